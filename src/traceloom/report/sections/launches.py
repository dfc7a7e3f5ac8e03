"""Launch delays, queues, calls that were held up, short kernels."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import polars as pl

from traceloom import analyze
from traceloom.analyze.launches import BINS, CALLS, NAMES, OUTLIERS, QUEUES, SHORT, STEPS, TOTALS, Launches
from traceloom.analyze.queue_depth import thinned
from traceloom.model import Trace, units
from traceloom.report.absent import Absent
from traceloom.report.options import ReportOptions
from traceloom.report.sections.curves import curves
from traceloom.report.sections.section import Row, Section, Study, on_rank
from traceloom.report.sections.shapes import or_null, ranked, record
from traceloom.report.table import Col, Table

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
_NULLS = {
    "totals": {"device", *(name for name in TOTALS if name.endswith(("median_ns", "p95_ns", "max_ns")))},
    "operators": {"name"},
    "outliers": {"device", "stream", "step"},
    "queues": {"device", "stream", "capacity"},
    "curve": {"device", "stream"},
    "device_queues": {"device", "stream", "capacity"},
    "device_curve": {"device", "stream"},
    "bins": {"high_ns"},
    "steps": {"device"},
}
_SHAPES: dict[str, tuple[Mapping[str, Any], str]] = {
    "totals": (TOTALS, "launches of each device"),
    "names": (NAMES, "by name of GPU work, the largest total delay first; the first hundred of each rank"),
    "operators": (NAMES, "the same by the operator that launched it; the first hundred of each rank"),
    "calls": (CALLS, "launch calls by name"),
    "outliers": (OUTLIERS, "late work, long calls, calls held up by a full queue; the hundred longest of each rank"),
    "queues": (QUEUES, "the queue of each stream"),
    "curve": (_CURVE, "depth of each queue over time: the largest in each of at most 300 parts of the window"),
    "device_queues": (QUEUES, "the queues of each device together; `stream` is null"),
    "device_curve": (_CURVE, "depth of each device's queues together over time"),
    "bins": (BINS, "kernels by duration"),
    "short": (SHORT, "kernels shorter than their launch call, by name; the first hundred of each rank"),
    "steps": (STEPS, "what a whole step launches, per device"),
}


def _measure(trace: Trace, _options: ReportOptions) -> Launches:
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


def _build(study: Study[Launches], absent: Absent) -> Row | None:
    if not any(measured.totals.height for measured in study.results):
        absent.say("launches")
        return None
    out: Row = {}
    for name in _SHAPES:
        rows = study.concat(lambda measured, name=name: getattr(measured, name))  # type: ignore[misc]
        if by := _LARGEST_FIRST.get(name):
            rows = rows.sort(by, descending=True, nulls_last=True, maintain_order=True)
        out[name] = absent.rows(rows, f"launches.{name}")
    return out


def _times(what: str) -> list[Col]:
    return [
        Col(f"{what}_median_ns", f"{what.capitalize()}", "time", "median"),
        Col(f"{what}_p95_ns", "95 %", "time", "95th percentile", narrow=what == "latency"),
        Col(f"{what}_max_ns", "Most", "time", narrow=what == "latency"),
    ]


def _tables(value: Row) -> Iterator[Table]:
    ranks = {row["rank"] for row in value["totals"]}
    rank = [Col("rank", "Rank", "count")] if len(ranks) > 1 else []
    device = [Col("device", "GPU", "count", narrow=False)]
    stream = Col("stream", "Stream", "count", "without one: all streams of the device")
    columns = {
        "totals": (
            "Launches",
            [*device, Col("launch_count", "Launches", "count"), Col("work_count", "Work", "count"),
             Col("unknown_count", "Unknown", "count", "work whose launch is not recorded", narrow=False),
             *_times("delay"), *_times("latency"), Col("late_count", "Late", "count", "latency of 100 µs and more")],
        ),
        "queues": (
            "Queues",
            [*device, stream, Col("launch_count", "Launches", "count"), Col("max_launches", "Most pending", "count"),
             Col("mean_launches", "Mean", "number"), Col("empty_ns", "Empty", "time", "nothing was pending"),
             Col("held_count", "Held up", "count", "launch calls that waited for room"),
             Col("held_ns", "For", "time", "beyond the usual duration of such a call"),
             Col("capacity", "Full at", "count", "launches pending when calls were held up", narrow=False)],
        ),
        "calls": (
            "Launch calls",
            [Col("call_count", "Calls", "count"), Col("total_ns", "Total", "time"), Col("median_ns", "Median", "time"),
             Col("p95_ns", "95 %", "time", narrow=False), Col("max_ns", "Most", "time"),
             Col("long_count", "Long", "count", "50 µs and more"), Col("name", "Call", "name")],
        ),
        "names": (
            "Delays by name",
            [Col("launch_count", "Launches", "count"), *_times("delay"), *_times("latency"),
             Col("name", "Name", "name")],
        ),
        "operators": (
            "Delays by operator",
            [Col("launch_count", "Launches", "count"), *_times("delay"), *_times("latency"),
             Col("name", "Operator", "name")],
        ),
        "outliers": (
            "Late work and long calls",
            [Col("kind", "Kind"), Col("duration_ns", "Time", "time"), Col("start_ns", "At", "time", narrow=False),
             Col("step", "Step", "count", narrow=False), Col("launch_name", "Call", "text", narrow=False),
             Col("work_name", "Work", "name")],
        ),
        "short": (
            "Kernels shorter than their launch",
            [Col("short_count", "Short", "count"), Col("kernel_count", "Of", "count"),
             Col("short_ns", "Kernels", "time"), Col("call_ns", "Calls", "time", "the calls that launched them"),
             Col("name", "Name", "name")],
        ),
        "bins": (
            "Kernels by duration",
            [Col("low_ns", "From", "time"), Col("high_ns", "Below", "time"), Col("kernel_count", "Kernels", "count"),
             Col("total_ns", "Time", "time"), Col("short_count", "Short", "count", "shorter than their launch call")],
        ),
        "steps": (
            "Per step",
            [*device, Col("mean_launch_count", "Launches", "number"),
             Col("min_launch_count", "Least", "count", narrow=False),
             Col("max_launch_count", "Most", "count", narrow=False),
             Col("mean_call_ns", "In calls", "time"), Col("max_call_ns", "Most", "time"),
             Col("mean_short_count", "Short kernels", "number"), Col("mean_held_ns", "Held up", "time"),
             Col("step_count", "Steps", "count")],
        ),
    }  # fmt: skip
    for name, (title, shown) in columns.items():
        rows = value[name] if name != "bins" else _all_bins(value["bins"])
        rows = rows + _of_devices(value) if name == "queues" else rows
        if rows:
            several = [] if name == "bins" else rank
            yield Table(f"launches-{name}", title, [*several, *shown], rows, f"launches.{name}")


def _of_devices(value: Row) -> list[Row]:
    """The queues of the devices that have several streams."""
    streams: dict[tuple[Any, Any], int] = {}
    for row in value["queues"]:
        key = row["rank"], row["device"]
        streams[key] = streams.get(key, 0) + 1
    return [row for row in value["device_queues"] if streams.get((row["rank"], row["device"]), 0) > 1]


def _all_bins(rows: list[Row]) -> list[Row]:
    """The histogram over all ranks, without its empty bins."""
    bins: dict[int, Row] = {}
    for row in rows:
        bin_ = bins.setdefault(row["low_ns"], {**row, "kernel_count": 0, "total_ns": 0, "short_count": 0})
        for name in ("kernel_count", "total_ns", "short_count"):
            bin_[name] += row[name]
    return [row for _, row in sorted(bins.items()) if row["kernel_count"]]


def _summary(value: Row | None) -> str | None:
    totals = [row for row in value["totals"] if row["launch_count"]] if value else []
    if not value or not totals:
        return None
    worst = max(totals, key=lambda row: row["latency_median_ns"])
    short = sum(row["short_count"] for row in value["bins"])
    kernels = sum(row["kernel_count"] for row in value["bins"])
    held = sum(row["held_ns"] for row in value["queues"])
    rank = on_rank(worst, totals)
    words = [
        f"work{rank} begins {units.duration(worst['latency_median_ns'])} (median) after nothing holds it back any more"
    ]
    if kernels:
        words.append(f"{units.count(short)} of {units.count(kernels)} kernels are shorter than their launch call")
    if held:
        words.append(f"full queues held launch calls up for {units.duration(held)}")
    return "; ".join(words)


def _picture(value: Row | None) -> str:
    if not value:
        return ""
    lines: dict[str, list[tuple[int, int]]] = {}
    for row in value["curve"]:
        rank = "" if row["rank"] is None else f"rank {row['rank']}, "
        lines.setdefault(f"{rank}stream {row['stream']}", []).append((row["time_ns"], row["launches"]))
    return curves(lines, "launches pending")


SECTION = Section(
    key="launches",
    title="Launches",
    note="What happens between launch calls and the start of their work; queues; kernels too short for it.",
    measure=_measure,
    build=_build,
    tables=_tables,
    summary=_summary,
    picture=_picture,
    schema=or_null(
        record(
            {name: ranked(shape, nullable=_NULLS.get(name, ()), what=what) for name, (shape, what) in _SHAPES.items()}
        )
    ),
    reasons={
        "launches": "no GPU work was recorded",
        **{f"launches.{name}[*].rank": "the file does not say its rank" for name in _SHAPES},
        **{f"launches.{name}[*].device": "the file does not number the device" for name in _SHAPES},
        **{f"launches.{name}[*].stream": "the file does not number the stream" for name in _SHAPES},
        **{
            f"launches.totals[*].{name}": "no launch of this device's work is recorded"
            for name in _NULLS["totals"] - {"device"}
        },
        "launches.operators[*].name": "no operator stands around the launch",
        "launches.outliers[*].step": "null is the time outside all steps",
        **{f"launches.device_{name}[*].stream": "all streams of the device together" for name in ("queues", "curve")},
        **{f"launches.{name}[*].capacity": "no launch call was held up" for name in ("queues", "device_queues")},
        "launches.bins[*].high_ns": "the last bin has no upper bound",
    },
)
