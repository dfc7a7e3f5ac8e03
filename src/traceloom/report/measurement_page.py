"""A measured machine as a page: time and bus bandwidth over the size of messages, and all that was measured."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from html import escape
from itertools import groupby
from operator import itemgetter
from typing import TYPE_CHECKING

from traceloom.model import units
from traceloom.report.calibration import SPANS
from traceloom.report.log_plane import LogPlane
from traceloom.report.measurement import kernel_size, rate
from traceloom.report.table import Cells, Col
from traceloom.report.views.html.frame import framed, key_numbers, one_after_the_other
from traceloom.report.views.html.table import table
from traceloom.report.views.html.text import text

if TYPE_CHECKING:
    from traceloom.report.documents.calibration import CollectiveGroupFields, TransferFitRow
    from traceloom.report.documents.measurement import MeasuredCollectiveRow, MeasurementDocument

_WIDTH, _HEIGHT = 1000, 340
_LEFT, _RIGHT, _TOP, _BOTTOM = 92, 170, 14, 44
_POINTS = 32  # of a fitted curve
_COLOURS = ("accent", "c-communication", "c-memory", "path", "c-annotation", "ink")  # one for each kind
_FITS = (
    Col("latency_ns", "Latency", "time"), Col("residual_p10", "Off by, P10", "share"),
    Col("residual_p50", "Median", "share"), Col("residual_p90", "P90", "share"), Col("count", "Times", "count"),
)  # fmt: skip
_TIMED = (
    Col("median_ns", "Time", "time", hint="median, of the slowest rank"), Col("p10_ns", "P10", "time"),
    Col("p90_ns", "P90", "time"), Col("fitted_ns", "Fitted", "time"), Col("residual", "Off by", "share"),
    Col("half_width", "Known to", "share", hint="half the width of the median's interval (95 %)"),
    Col("count", "Times", "count"),
)  # fmt: skip
_GROUP = (Col("collective", "Collective", "name"), Col("where", "Ranks"))
_KERNEL = (Col("kernel", "Kernel", "name"), Col("element_type", "Type"))
_BUS = Col("bus_rate", "Bus bandwidth", "byte_rate")


def render(document: MeasurementDocument) -> str:
    """The document as one HTML page that needs nothing but itself.

    Args:
        document: What `traceloom.report.measurement.build` made.
    """
    name = str(document["machine"]["name"])
    headline = _headline(document)
    best = {row["kernel"]: rate(row) for row in sorted(document["kernels"], key=lambda row: row["rate"] or 0)}
    launch = next((row for row in document["kernels"] if row["kernel"] == "launch"), None)
    numbers = [
        ("Matrix product", best.get("matrix_product", ""), "", "the best"),
        ("Memory", units.byte_rate(document["peaks"].get("memory")), "", "largest copy or triad"),
    ]
    if launch:
        numbers.append(("Launch", units.duration(round(launch["median_ns"])), "", "of one element"))
    return framed(
        title=f"Measured: {headline} – {name}",
        name=f"Measured: {name}",
        headline=f"<h1>{text(headline)}</h1>",
        numbers=key_numbers(numbers),
        footer=(
            f"<p>Traceloom {text(document['traceloom'])}</p>"
            "<p>The machine for <code>traceloom simulate</code>: <code>-o machine.toml</code></p>"
        ),
        **one_after_the_other(_sections(document)),
    )


def _headline(document: MeasurementDocument) -> str:
    """The answer in one line."""
    rates = [(row["rate"], row["collective"]) for row in document["collectives"] if row["rate"]]
    if not rates:
        return "one rank, no network"
    best, of = max(rates, key=itemgetter(0))
    least = min(document["collectives"], key=lambda row: row["median_ns"])
    return (
        f"up to {units.byte_rate(1e9 * best)} ({of}), from "
        f"{units.duration(round(least['median_ns']))} ({least['collective']})"
    )


def _sections(document: MeasurementDocument) -> Iterator[tuple[str, str, str, str]]:
    """(id, title, note, body) of each."""
    for where in dict.fromkeys(map(_where, document["collectives"])):
        points = [row for row in document["collectives"] if _where(row) == where]
        fits = [row for row in document["transfers"] if _where(row) == where]
        key = where.replace(" ", "-")
        note = "Dots are medians of the slowest rank, lines what was fitted to them."
        yield f"time-{key}", f"Time, {where}", note, _picture(points, fits, "time", lambda _, time: time)
        note = "Bytes on the bus of each rank, by the time."
        bandwidth = _picture(points, fits, "bus bandwidth", lambda bus, time: bus / time)
        yield f"bandwidth-{key}", f"Bus bandwidth, {where}", note, bandwidth
    collectives: list[Cells] = [
        {**row, "where": _where(row), "bus_rate": row["rate"] and 1e9 * row["rate"]} for row in document["collectives"]
    ]
    transfers: list[Cells] = [
        {**row, "where": _where(row), "latency_ns": row["alpha_ns"],
         "bus_rate": row["bandwidth"] and 1e9 * row["bandwidth"]} for row in document["transfers"]
    ]  # fmt: skip
    if transfers:
        sizes = Col("from_bytes", "From", "bytes"), Col("to_bytes", "To", "bytes")
        body = table("transfers-table", (*_GROUP, *sizes, _BUS, *_FITS), transfers, {}, "Fits", whole="-o measure.json")
        yield "transfers", "Fits", "Time = latency + bytes on the bus / bus bandwidth; how far times lie off.", body
        columns = (*_GROUP, Col("size_bytes", "Size", "bytes"), *_TIMED, _BUS)
        body = table("collectives-table", columns, collectives, {}, "Collectives", whole="-o measure.json")
        yield "collectives", "Collectives", "All that was measured.", body
    kernels: list[Cells] = [
        {**row, "kernel": row["kernel"].replace("_", " "), "of": kernel_size(row), "speed": rate(row)}
        for row in document["kernels"]
    ]
    columns = (*_KERNEL, Col("of", "Size"), *_TIMED, Col("speed", "Rate"))
    yield (
        "kernels",
        "Kernels",
        "On all ranks at the same time.",
        table("kernels-table", columns, kernels, {}, "Kernels", whole="-o measure.json"),
    )
    words = [*(f"{entry['path']}: {entry['reason']}" for entry in document["absent"]),
             *(notice["message"] for notice in document["notices"]),
             ", ".join(f"{key} {value}" for key, value in document["environment"].items())]  # fmt: skip
    yield "known", "To be known", "", "".join(f"<p>{text(line)}.</p>" for line in words)


def _where(row: CollectiveGroupFields) -> str:
    return f"{row['ranks']} {SPANS[row['span']]}"


def _picture(
    points: Sequence[MeasuredCollectiveRow],
    fits: Sequence[TransferFitRow],
    what: str,
    value: Callable[[float, float], float],
) -> str:
    """Dots and fitted curves over the size of messages.

    Args:
        points: Of one group of ranks, by kind.
        fits: Of the same.
        what: Is drawn upwards.
        value: Of bytes on the bus and a time in ns.
    """
    label = units.byte_rate if what == "bus bandwidth" else units.duration
    scale = 1e9 if what == "bus bandwidth" else 1.0
    heights = [value(row["bus_bytes"], time) for row in points for time in (row["median_ns"], row["fitted_ns"])]
    edges = (_LEFT, _WIDTH - _RIGHT, _TOP, _HEIGHT - _BOTTOM)
    plane = LogPlane([row["size_bytes"] for row in points], heights, edges)
    ink, grid = 'fill="currentColor"', 'stroke="var(--grid)"'
    parts = []
    for power in range(plane.x_low, plane.x_high + 1):
        x = f"{plane.x(10.0**power):.1f}"
        parts.append(f'<line {grid} x1="{x}" x2="{x}" y1="{_TOP}" y2="{_HEIGHT - _BOTTOM}"/>')
        size = units.size(10**power).replace(".00", "").replace(".0", "")  # a power of ten needs no decimals
        parts.append(f'<text x="{x}" y="{_HEIGHT - _BOTTOM + 18}" text-anchor="middle" {ink}>{size}</text>')
    for power in range(plane.y_low, plane.y_high + 1):
        y = f"{plane.y(10.0**power):.1f}"
        parts.append(f'<line {grid} x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y}" y2="{y}"/>')
        tick = label(round(scale * 10.0**power))
        parts.append(f'<text x="{_LEFT - 8}" y="{y}" dy="4" text-anchor="end" {ink}>{tick}</text>')
    for number, (kind, of_kind) in enumerate(groupby(points, key=lambda row: row["collective"])):
        rows = list(of_kind)
        colour = f"var(--{_COLOURS[number]})"
        factor = rows[0]["bus_bytes"] / rows[0]["size_bytes"]
        for fit in (fit for fit in fits if fit["collective"] == kind):
            step = math.log(fit["to_bytes"] / fit["from_bytes"]) / _POINTS
            sizes = [fit["from_bytes"] * math.exp(step * k) for k in range(_POINTS + 1)]
            times = [fit["alpha_ns"] + size * factor / (fit["bandwidth"] or math.inf) for size in sizes]
            line = "L".join(
                f"{plane.x(size):.1f} {plane.y(value(size * factor, time)):.1f}"
                for size, time in zip(sizes, times, strict=True)
            )
            parts.append(f'<path d="M{line}" fill="none" stroke="{colour}" stroke-width="1.6"/>')
        for row in rows:
            height = value(row["bus_bytes"], row["median_ns"])
            words = (
                f"{kind}, {units.size(row['size_bytes'])}: {label(round(scale * height))}, "
                f"{100 * row['residual']:+.0f} % off its fit"
            )
            at = f'cx="{plane.x(row["size_bytes"]):.1f}" cy="{plane.y(height):.1f}"'
            parts.append(f'<circle {at} r="3.5" fill="{colour}"><title>{escape(words)}</title></circle>')
        top, left = _TOP + 18 * number + 10, _WIDTH - _RIGHT + 18
        parts.append(f'<rect x="{left}" y="{top - 9}" width="10" height="10" fill="{colour}"/>')
        parts.append(f'<text x="{left + 15}" y="{top}" {ink}>{escape(kind)}</text>')
    caption = f"{what.capitalize()} over the size of messages"
    return (
        f"<figure><figcaption>{caption}, both logarithmic.</figcaption>"
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" width="100%" role="img" font-family="system-ui, sans-serif" '
        f'font-size="12" aria-label="{caption}">{"".join(parts)}</svg></figure>'
    )
