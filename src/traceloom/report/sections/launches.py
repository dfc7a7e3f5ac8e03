"""Launch delays, queues, calls that were held up, short kernels."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from html import escape
from typing import TYPE_CHECKING

import polars as pl

from traceloom import analyze
from traceloom.analyze.launches import BINS, CALLS, NAMES, OUTLIERS, QUEUES, SHORT, STEPS, TOTALS, Launches
from traceloom.analyze.queue_depth import thinned
from traceloom.harmless import harmless
from traceloom.model import Trace, units
from traceloom.report.absent import Absent
from traceloom.report.options import ReportOptions
from traceloom.report.sections.section import Listed, Section, Study, on_rank
from traceloom.report.sections.shapes import Part
from traceloom.report.table import Cells, Table

if TYPE_CHECKING:
    from traceloom.report.documents.sections import LaunchesBinsRow, LaunchesValue

_ROWS = 100  # of each table of a rank
_POINTS = 300  # of each curve
_LARGEST_FIRST = {  # over all ranks
    "outliers": "duration_ns",
    "calls": "total_ns",
    "short": "call_ns",
    "names": "delay_max_ns",
    "operators": "delay_max_ns",
    "queues": "held_ns",
}
_CURVE = {"device": pl.Int32, "stream": pl.Int64, "time_ns": pl.Int64, "launches": pl.Int64, "works": pl.Int64}
_NO_LAUNCH = "no launch of this device's work is recorded"
_TOGETHER = {"stream": "all streams of the device together"}
_DELAYS = ["delay_median_ns", "+delay_p95_ns", "+delay_max_ns", "latency_median_ns", "latency_p95_ns", "latency_max_ns"]


class LaunchesSection(Section[Launches, "LaunchesValue"]):
    """Launch calls, the start of their work, and queues."""

    key, title = "launches", "Launches"
    note = "What happens between launch calls and the start of their work; queues; kernels too short for it."
    missing = "no GPU work was recorded"
    parts = {
        "totals": Part(
            TOTALS,
            "launches of each device",
            {name: _NO_LAUNCH for name in TOTALS if name.endswith(("median_ns", "p95_ns", "max_ns"))},
            ("device",),
        ),
        "names": Part(NAMES, "by name of GPU work, the largest total delay first; the first hundred of each rank"),
        "operators": Part(
            NAMES,
            "the same by the operator that launched it; the first hundred of each rank",
            {"name": "no operator stands around the launch"},
        ),
        "calls": Part(CALLS, "launch calls by name"),
        "outliers": Part(
            OUTLIERS,
            "late work, long calls, calls held up by a full queue; the hundred longest of each rank",
            nullable=("device", "stream", "step"),
        ),
        "queues": Part(QUEUES, "the queue of each stream", nullable=("device", "stream", "capacity")),
        "curve": Part(
            _CURVE,
            "depth of each queue over time: the largest in each of at most 300 parts of the window",
            nullable=("device", "stream"),
        ),
        "device_queues": Part(
            QUEUES, "the queues of each device together; `stream` is null", _TOGETHER, ("device", "capacity")
        ),
        "device_curve": Part(_CURVE, "depth of each device's queues together over time", _TOGETHER, ("device",)),
        "bins": Part(BINS, "kernels by duration", nullable=("high_ns",)),
        "short": Part(SHORT, "kernels shorter than their launch call, by name; the first hundred of each rank"),
        "steps": Part(STEPS, "what a whole step launches, per device", nullable=("device",)),
    }

    def measure(self, trace: Trace, options: ReportOptions) -> Launches:
        launches = analyze.launches(trace)
        return replace(
            launches,
            names=launches.names.head(_ROWS),
            operators=launches.operators.head(_ROWS),
            outliers=launches.outliers.head(_ROWS),
            short=launches.short.head(_ROWS),
            curve=thinned(launches.curve, _POINTS),
            device_curve=thinned(launches.device_curve, _POINTS),
        )

    def build(self, study: Study[Launches], absent: Absent) -> LaunchesValue | None:
        if not any(launches.totals.height for launches in study.results):
            absent.say("launches")
            return None
        frames = study.frames(self.parts)
        for name, by in _LARGEST_FIRST.items():
            frames[name] = frames[name].sort(by, descending=True, nulls_last=True, maintain_order=True)
        return self.lists(frames, absent)

    def tables(self, value: LaunchesValue) -> Iterator[Table]:
        # the queues of devices as a whole, where they have several streams
        streams = Counter((row["rank"], row["device"]) for row in value["queues"])
        together = [row for row in value["device_queues"] if streams[row["rank"], row["device"]] > 1]
        queues: list[Cells] = [*value["queues"], *together]
        bins: dict[int, list[LaunchesBinsRow]] = {}  # by lower bound
        for row in value["bins"]:
            bins.setdefault(row["low_ns"], []).append(row)
        filled = [
            {
                "low_ns": low_ns,
                "high_ns": rows[0]["high_ns"],
                "kernel_count": sum(row["kernel_count"] for row in rows),
                "total_ns": sum(row["total_ns"] for row in rows),
                "short_count": sum(row["short_count"] for row in rows),
            }
            for low_ns, rows in sorted(bins.items())
            if any(row["kernel_count"] for row in rows)
        ]
        listed: list[Listed] = [
            ("totals", "Launches", value["totals"], ["?rank", "+device", "launch_count", "work_count",
                "+unknown_count", *_DELAYS, "late_count"]),
            ("queues", "Queues", queues, ["?rank", "+device", "stream", "launch_count", "max_launches",
                "mean_launches", "empty_ns", "held_count", "held_ns", "+capacity"]),
            ("calls", "Launch calls", value["calls"], ["?rank", "call_count", "total_ns", "median_ns", "+p95_ns",
                "max_ns", "long_count", "name"]),
            ("names", "Delays by name", value["names"], ["?rank", "launch_count", *_DELAYS, "name"]),
            ("operators", "Delays by operator", value["operators"], ["?rank", "launch_count", *_DELAYS, "name"]),
            ("outliers", "Late work and long calls", value["outliers"], ["?rank", "kind", "duration_ns", "+start_ns",
                "+step", "+launch_name", "work_name"]),
            ("short", "Kernels shorter than their launch", value["short"], ["?rank", "short_count", "kernel_count",
                "short_ns", "call_ns", "name"]),
            ("bins", "Kernels by duration", filled, ["low_ns", "high_ns", "kernel_count", "total_ns", "short_count"]),
            ("steps", "Per step", value["steps"], ["?rank", "+device", "mean_launch_count", "+min_launch_count",
                "+max_launch_count", "mean_call_ns", "max_call_ns", "mean_short_count", "mean_held_ns", "step_count"]),
        ]  # fmt: skip
        yield from self.filled(listed, value["totals"])

    def summary(self, value: LaunchesValue) -> str | None:
        totals = [row for row in value["totals"] if row["launch_count"]]
        if not totals:
            return None
        worst = max(totals, key=lambda row: row["latency_median_ns"] or 0)
        short = sum(row["short_count"] for row in value["bins"])
        kernels = sum(row["kernel_count"] for row in value["bins"])
        held = sum(row["held_ns"] for row in value["queues"])
        words = [f"median launch latency{on_rank(worst, totals)}: {units.duration(worst['latency_median_ns'])}"]
        if kernels:
            words.append(f"{units.count(short)} of {units.count(kernels)} kernels are shorter than their launch call")
        if held:
            words.append(f"full queues held launch calls up for {units.duration(held)}")
        return "; ".join(words)

    def picture(self, value: LaunchesValue) -> str:
        lines: dict[str, list[tuple[int, int]]] = {}
        for row in value["curve"]:
            rank = "" if row["rank"] is None else f"rank {row['rank']}, "
            lines.setdefault(f"{rank}stream {row['stream']}", []).append((row["time_ns"], row["launches"]))
        return curves(lines, "launches pending")


_WIDTH, _HEIGHT, _TOP, _LEFT, _BOTTOM = 1256, 200, 14, 46, 20
_MOST = 8  # lines in one picture
_COLOURS = ("compute", "communication", "memory", "annotation", "blocking", "forward", "launch", "other")  # of the page


def curves(lines: Mapping[str, Sequence[tuple[int, int]]], what: str) -> str:
    """A picture of step curves; empty where there is nothing to draw.

    Args:
        lines: Name -> (time in ns, value from then on), by time. The first eight with the largest values are drawn.
        what: What the values are, for the title.
    """
    drawn = sorted((name for name, line in lines.items() if line), key=lambda name: -max(v for _, v in lines[name]))
    drawn = drawn[:_MOST]
    if not drawn:
        return ""
    first = min(lines[name][0][0] for name in drawn)
    last = max(lines[name][-1][0] for name in drawn)
    most = max(1, *(value for name in drawn for _, value in lines[name]))
    across = (_WIDTH - _LEFT) / max(last - first, 1)
    up = (_HEIGHT - _TOP - _BOTTOM) / most
    parts = []
    for colour, name in zip(_COLOURS, drawn, strict=False):
        path = ""
        for number, (time, value) in enumerate(lines[name]):
            x, y = _LEFT + (time - first) * across, _HEIGHT - _BOTTOM - value * up
            path += f"M{x:.1f} {y:.1f}" if number == 0 else f"H{x:.1f}V{y:.1f}"
        parts.append(f'<path class="l-{colour}" d="{path}"><title>{escape(harmless(name))}</title></path>')
    legend = "".join(
        f'<li><i class="swatch b-{colour}"></i>{escape(harmless(name))}</li>'
        for colour, name in zip(_COLOURS, drawn, strict=False)
    )
    base = _HEIGHT - _BOTTOM
    return (
        f'<figure class="picture"><figcaption>{escape(what.capitalize())}</figcaption>'
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{escape(what)} over time">'
        f'<path class="axis" d="M{_LEFT} {_TOP}V{base}H{_WIDTH}"/>'
        f'<text x="{_LEFT - 4}" y="{_TOP + 4}" text-anchor="end">{units.count(most)}</text>'
        f'<text x="{_LEFT - 4}" y="{base}" text-anchor="end">0</text>'
        f'<text x="{_LEFT}" y="{_HEIGHT - 5}">{units.duration(first)}</text>'
        f'<text x="{_WIDTH}" y="{_HEIGHT - 5}" text-anchor="end">{units.duration(last)}</text>'
        f'{"".join(parts)}</svg><ul class="legend">{legend}</ul></figure>'
    )


SECTION = LaunchesSection()
