"""Sections about launches, queues and graph replays."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from html import escape
from typing import TYPE_CHECKING

import polars as pl

from traceloom import analyze
from traceloom.analyze.graph_launches import GRAPHS, NODES, REPLAYS
from traceloom.analyze.launches import (
    BINS,
    CALLS,
    NAMES,
    OUTLIERS,
    QUEUES,
    SHORT_KERNELS,
    STEPS,
    TOTALS,
    Launches,
    reduce_curve,
)
from traceloom.formats import load
from traceloom.report.document import Cells, ListSchema, ReportOptions, Table, UnknownValues
from traceloom.report.sections.section import (
    Frames,
    Measurements,
    Section,
    TableSpec,
    format_rank_suffix,
)
from traceloom.system import units
from traceloom.system.sanitize import sanitize
from traceloom.trace.session import Session
from traceloom.trace.trace import Trace

if TYPE_CHECKING:
    from traceloom.report.documents.sections import (
        GraphLaunchesValue,
        LaunchesBinsRow,
        LaunchesValue,
    )


_MAX_ROWS = 100  # of each table of a rank
_MAX_CURVE_POINTS = 300  # of each curve
_LARGEST_FIRST = {  # over all ranks
    "outliers": "duration_ns",
    "calls": "total_ns",
    "short": "call_ns",
    "names": "delay_max_ns",
    "operators": "delay_max_ns",
    "queues": "held_ns",
}
_CURVE = {
    "device": pl.Int32,
    "stream": pl.Int64,
    "time_ns": pl.Int64,
    "launches": pl.Int64,
    "works": pl.Int64,
}
_NO_LAUNCH_REASON = "no launch of this device's work is recorded"
_DEVICE_QUEUE_REASONS = {"stream": "all streams of the device together"}
_DELAY_COLUMNS = [
    "delay_median_ns",
    "+delay_p95_ns",
    "+delay_max_ns",
    "latency_median_ns",
    "latency_p95_ns",
    "latency_max_ns",
]


class LaunchesSection(Section[Launches, "LaunchesValue"]):
    key, title = "launches", "Launches"
    note = "What happens between launch calls and the start of their work; queues; kernels too short for it."
    missing = "no GPU work was recorded"
    parts = {
        "totals": ListSchema(
            TOTALS,
            "launches of each device",
            {
                name: _NO_LAUNCH_REASON
                for name in TOTALS
                if name.endswith(("median_ns", "p95_ns", "max_ns"))
            },
            ("device",),
        ),
        "names": ListSchema(
            NAMES,
            "by name of GPU work, the largest total delay first; the first hundred of each rank",
        ),
        "operators": ListSchema(
            NAMES,
            "the same by the operator that launched it; the first hundred of each rank",
            {"name": "no operator stands around the launch"},
        ),
        "calls": ListSchema(CALLS, "launch calls by name"),
        "outliers": ListSchema(
            OUTLIERS,
            "late work, long calls, calls held up by a full queue; the hundred longest of each rank",
            nullable=("device", "stream", "step"),
        ),
        "queues": ListSchema(
            QUEUES, "the queue of each stream", nullable=("device", "stream", "capacity")
        ),
        "curve": ListSchema(
            _CURVE,
            "depth of each queue over time: the largest in each of at most 300 parts of the window",
            nullable=("device", "stream"),
        ),
        "device_queues": ListSchema(
            QUEUES,
            "the queues of each device together; `stream` is null",
            _DEVICE_QUEUE_REASONS,
            ("device", "capacity"),
        ),
        "device_curve": ListSchema(
            _CURVE,
            "depth of each device's queues together over time",
            _DEVICE_QUEUE_REASONS,
            ("device",),
        ),
        "bins": ListSchema(BINS, "kernels by duration", nullable=("high_ns",)),
        "short": ListSchema(
            SHORT_KERNELS,
            "kernels shorter than their launch call, by name; the first hundred of each rank",
        ),
        "steps": ListSchema(STEPS, "what a whole step launches, per device", nullable=("device",)),
    }

    def measure(self, trace: Trace, options: ReportOptions) -> Launches:
        launches = analyze.launches(trace)
        return replace(
            launches,
            names=launches.names.head(_MAX_ROWS),
            operators=launches.operators.head(_MAX_ROWS),
            outliers=launches.outliers.head(_MAX_ROWS),
            short=launches.short.head(_MAX_ROWS),
            curve=reduce_curve(launches.curve, _MAX_CURVE_POINTS),
            device_curve=reduce_curve(launches.device_curve, _MAX_CURVE_POINTS),
        )

    def build(
        self, measurements: Measurements[Launches], unknowns: UnknownValues
    ) -> LaunchesValue | None:
        if not any(launches.totals.height for launches in measurements.results):
            unknowns.explain("launches")
            return None
        frames = measurements.frames(self.parts)
        for name, sort_columns in _LARGEST_FIRST.items():
            frames[name] = frames[name].sort(
                sort_columns, descending=True, nulls_last=True, maintain_order=True
            )
        return self.lists(frames, unknowns)

    def tables(self, value: LaunchesValue) -> Iterator[Table]:
        # the queues of devices as a whole, where they have several streams
        streams = Counter((row["rank"], row["device"]) for row in value["queues"])
        shared_queues = [
            row for row in value["device_queues"] if streams[row["rank"], row["device"]] > 1
        ]
        queues: list[Cells] = [*value["queues"], *shared_queues]
        bins: dict[int, list[LaunchesBinsRow]] = {}  # by lower bound
        for row in value["bins"]:
            bins.setdefault(row["low_ns"], []).append(row)
        listed: list[TableSpec] = [
            (
                "totals",
                "Launches",
                value["totals"],
                [
                    "?rank",
                    "+device",
                    "launch_count",
                    "work_count",
                    "+unknown_count",
                    *_DELAY_COLUMNS,
                    "late_count",
                ],
            ),
            (
                "queues",
                "Queues",
                queues,
                [
                    "?rank",
                    "+device",
                    "stream",
                    "launch_count",
                    "max_launches",
                    "mean_launches",
                    "empty_ns",
                    "held_count",
                    "held_ns",
                    "+capacity",
                ],
            ),
            (
                "calls",
                "Launch calls",
                value["calls"],
                [
                    "?rank",
                    "call_count",
                    "total_ns",
                    "median_ns",
                    "+p95_ns",
                    "max_ns",
                    "long_count",
                    "name",
                ],
            ),
            (
                "names",
                "Delays by name",
                value["names"],
                ["?rank", "launch_count", *_DELAY_COLUMNS, "name"],
            ),
            (
                "operators",
                "Delays by operator",
                value["operators"],
                ["?rank", "launch_count", *_DELAY_COLUMNS, "name"],
            ),
            (
                "outliers",
                "Late work and long calls",
                value["outliers"],
                ["?rank", "kind", "duration_ns", "+start_ns", "+step", "+launch_name", "work_name"],
            ),
            (
                "short",
                "Kernels shorter than their launch",
                value["short"],
                ["?rank", "short_count", "kernel_count", "short_ns", "call_ns", "name"],
            ),
            (
                "bins",
                "Kernels by duration",
                [
                    {
                        "low_ns": low_ns,
                        "high_ns": rows[0]["high_ns"],
                        "kernel_count": sum(row["kernel_count"] for row in rows),
                        "total_ns": sum(row["total_ns"] for row in rows),
                        "short_count": sum(row["short_count"] for row in rows),
                    }
                    for low_ns, rows in sorted(bins.items())
                    if any(row["kernel_count"] for row in rows)
                ],
                ["low_ns", "high_ns", "kernel_count", "total_ns", "short_count"],
            ),
            (
                "steps",
                "Per step",
                value["steps"],
                [
                    "?rank",
                    "+device",
                    "mean_launch_count",
                    "+min_launch_count",
                    "+max_launch_count",
                    "mean_call_ns",
                    "max_call_ns",
                    "mean_short_count",
                    "mean_held_ns",
                    "step_count",
                ],
            ),
        ]
        yield from self.filled(listed, value["totals"])

    def summary(self, value: LaunchesValue) -> str | None:
        totals = [row for row in value["totals"] if row["launch_count"]]
        if not totals:
            return None
        worst = max(totals, key=lambda row: row["latency_median_ns"] or 0)
        short = sum(row["short_count"] for row in value["bins"])
        kernels = sum(row["kernel_count"] for row in value["bins"])
        held_ns = sum(row["held_ns"] for row in value["queues"])
        clauses = [
            f"median launch latency{format_rank_suffix(worst, totals)}: {units.format_duration(worst['latency_median_ns'])}"
        ]
        if kernels:
            clauses.append(
                f"{units.format_count(short)} of {units.format_count(kernels)} kernels are shorter than their launch call"
            )
        if held_ns:
            clauses.append(f"full queues held launch calls up for {units.format_duration(held_ns)}")
        return "; ".join(clauses)

    def picture(self, value: LaunchesValue) -> str:
        lines: dict[str, list[tuple[int, int]]] = {}
        for row in value["curve"]:
            rank = "" if row["rank"] is None else f"rank {row['rank']}, "
            lines.setdefault(f"{rank}stream {row['stream']}", []).append(
                (row["time_ns"], row["launches"])
            )
        return draw_step_curves(lines, "launches pending")


_WIDTH, _HEIGHT, _TOP, _LEFT, _BOTTOM = 1256, 200, 14, 46, 20
_MAX_LINES = 8  # lines in one figure
_COLOURS = (
    "compute",
    "communication",
    "memory",
    "annotation",
    "blocking",
    "forward",
    "launch",
    "other",
)  # of the page


def draw_step_curves(lines: Mapping[str, Sequence[tuple[int, int]]], value_label: str) -> str:
    """Draws step curves; empty where there is nothing to draw.

    Args:
        lines: Name -> (time in ns, value from then on), by time. The first eight with the largest
            values are drawn.
        value_label: Name of the values, for the title.
    """
    visible_names = sorted(
        (name for name, line in lines.items() if line),
        key=lambda name: -max(v for _, v in lines[name]),
    )
    visible_names = visible_names[:_MAX_LINES]
    if not visible_names:
        return ""
    first = min(lines[name][0][0] for name in visible_names)
    last = max(lines[name][-1][0] for name in visible_names)
    max_value = max(1, *(value for name in visible_names for _, value in lines[name]))
    across = (_WIDTH - _LEFT) / max(last - first, 1)
    up = (_HEIGHT - _TOP - _BOTTOM) / max_value
    parts = []
    for colour, name in zip(_COLOURS, visible_names, strict=False):
        path = ""
        for number, (time, value) in enumerate(lines[name]):
            x, y = _LEFT + (time - first) * across, _HEIGHT - _BOTTOM - value * up
            path += f"M{x:.1f} {y:.1f}" if number == 0 else f"H{x:.1f}V{y:.1f}"
        parts.append(
            f'<path class="l-{colour}" d="{path}"><title>{escape(sanitize(name))}</title></path>'
        )
    legend = "".join(
        f'<li><i class="swatch b-{colour}"></i>{escape(sanitize(name))}</li>'
        for colour, name in zip(_COLOURS, visible_names, strict=False)
    )
    base = _HEIGHT - _BOTTOM
    return (
        f'<figure class="picture"><figcaption>{escape(value_label.capitalize())}</figcaption>'
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{escape(value_label)} over time">'
        f'<path class="axis" d="M{_LEFT} {_TOP}V{base}H{_WIDTH}"/>'
        f'<text x="{_LEFT - 4}" y="{_TOP + 4}" text-anchor="end">{units.format_count(max_value)}</text>'
        f'<text x="{_LEFT - 4}" y="{base}" text-anchor="end">0</text>'
        f'<text x="{_LEFT}" y="{_HEIGHT - 5}">{units.format_duration(first)}</text>'
        f'<text x="{_WIDTH}" y="{_HEIGHT - 5}" text-anchor="end">{units.format_duration(last)}</text>'
        f'{"".join(parts)}</svg><ul class="legend">{legend}</ul></figure>'
    )


SECTION = LaunchesSection()

_MAX_GRAPH_LAUNCHES = 1000  # nodes and replays of a rank
_NO_NODE_REASON = "no node of the replay is above its median"


class GraphLaunchesSection(Section[Frames, "GraphLaunchesValue"]):
    key, title = "graph_launches", "Graph launches"
    note = "CUDA and HIP graphs: one call, many kernels; replays laid node upon node."
    missing = "no graph launch was recorded"
    parts = {
        "graphs": ListSchema(GRAPHS, "one row per graph", nullable=("graph_id", "like")),
        "replays": ListSchema(
            REPLAYS,
            "one row per launch; those that deviate and the longest, at most a thousand of each rank",
            {"worst_node": _NO_NODE_REASON, "worst_excess_ns": _NO_NODE_REASON},
            ("step", "deviation"),
        ),
        "nodes": ListSchema(
            NODES,
            "one row per graph and node, longest first, at most a thousand of each rank",
            nullable=("node_id",),
        ),
    }

    def measure(self, trace: Trace, options: ReportOptions) -> Frames:
        launches = analyze.graph_launches(trace)
        if not launches.graphs.height:
            return {name: pl.DataFrame(schema=part.columns) for name, part in self.parts.items()}
        replays = launches.replays.with_columns(
            launches.replays["deviation"].is_null().alias("usual")
        ).sort("usual", "span_ns", descending=[False, True])
        nodes = launches.nodes.sort("total_ns", descending=True, maintain_order=True)
        return {
            "graphs": launches.graphs,
            "replays": replays.drop("usual").head(_MAX_GRAPH_LAUNCHES),
            "nodes": nodes.head(_MAX_GRAPH_LAUNCHES),
        }

    def build(
        self, measurements: Measurements[Frames], unknowns: UnknownValues
    ) -> GraphLaunchesValue | None:
        if not any(frames["graphs"].height for frames in measurements.results):
            unknowns.explain("graph_launches")
            return None
        return self.lists(measurements.frames(self.parts), unknowns)

    def tables(self, value: GraphLaunchesValue) -> Iterator[Table]:
        listed: list[TableSpec] = [
            (
                "graphs",
                "Graphs",
                value["graphs"],
                [
                    "?rank",
                    "graph",
                    "replay_count",
                    "node_count",
                    "span_median_ns",
                    "+span_min_ns",
                    "span_max_ns",
                    "idle_median_ns",
                    "+call_median_ns",
                    "total_ns",
                    "deviating_count",
                    "+like",
                    "+evidence",
                    "+launch_name",
                ],
            ),
            (
                "nodes",
                "Nodes",
                value["nodes"],
                [
                    "?rank",
                    "graph",
                    "node",
                    "+replay_count",
                    "mean_ns",
                    "min_ns",
                    "max_ns",
                    "+gap_mean_ns",
                    "total_ns",
                    "name",
                ],
            ),
            (
                "replays",
                "Replays that deviate",
                [row for row in value["replays"] if row["deviation"]],
                [
                    "?rank",
                    "graph",
                    "replay",
                    "span_ns",
                    "start_ns",
                    "+step",
                    "worst_node",
                    "worst_excess_ns",
                    "deviation",
                ],
            ),
        ]
        yield from self.filled(listed, value["graphs"])

    def summary(self, value: GraphLaunchesValue) -> str | None:
        if not value:
            return None
        replays = sum(row["replay_count"] for row in value["graphs"])
        deviating_count = sum(row["deviating_count"] for row in value["graphs"])
        work = sum(row["total_ns"] for row in value["graphs"])
        deviation_note = (
            f"{units.format_count(deviating_count)} of them {'deviates' if deviating_count == 1 else 'deviate'}"
            if deviating_count
            else "none deviates"
        )
        single = len(value["graphs"]) == 1
        return (
            f"{units.format_count(replays)} {'replay' if replays == 1 else 'replays'} of {len(value['graphs'])} "
            f"{'graph' if single else 'graphs'} hold {units.format_duration(work)} of GPU work; {deviation_note}"
        )


GRAPH_LAUNCHES_SECTION = GraphLaunchesSection()


def read_graph_capture(options: ReportOptions) -> Session | None:
    """Loads the file of `graph_capture`; None if there is none."""
    return None if options.graph_capture is None else _read(options.graph_capture, options.cache)


@lru_cache(maxsize=1)
def _read(path: str, cache: bool) -> Session:
    return load(path, cache=cache)
