"""Launches, queues, graph replays."""

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
from traceloom.analyze.launches import BINS, CALLS, NAMES, OUTLIERS, QUEUES, SHORT, STEPS, TOTALS, Launches, downsample
from traceloom.formats import load
from traceloom.report.document import Cells, Part, ReportOptions, Table, UnknownValues
from traceloom.report.sections.section import Frames, Listed, Measurements, Section, of_rank_suffix
from traceloom.system import units
from traceloom.system.sanitize import sanitize
from traceloom.trace.session import Session
from traceloom.trace.trace import Trace

if TYPE_CHECKING:
    from traceloom.report.documents.sections import GraphLaunchesValue, LaunchesBinsRow, LaunchesValue


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
            curve=downsample(launches.curve, _POINTS),
            device_curve=downsample(launches.device_curve, _POINTS),
        )

    def build(self, study: Measurements[Launches], absent: UnknownValues) -> LaunchesValue | None:
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
        words = [f"median launch latency{of_rank_suffix(worst, totals)}: {units.duration(worst['latency_median_ns'])}"]
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
        parts.append(f'<path class="l-{colour}" d="{path}"><title>{escape(sanitize(name))}</title></path>')
    legend = "".join(
        f'<li><i class="swatch b-{colour}"></i>{escape(sanitize(name))}</li>'
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

_MAX_GRAPH_LAUNCHES = 1000  # nodes and replays of a rank
_NO_NODE = "no node of the replay is above its median"


class GraphLaunchesSection(Section[Frames, "GraphLaunchesValue"]):
    """Graphs, their nodes and their replays."""

    key, title = "graph_launches", "Graph launches"
    note = "CUDA and HIP graphs: one call, many kernels; replays laid node upon node."
    missing = "no graph launch was recorded"
    parts = {
        "graphs": Part(GRAPHS, "one row per graph", nullable=("graph_id", "like")),
        "replays": Part(
            REPLAYS,
            "one row per launch; those that deviate and the longest, at most a thousand of each rank",
            {"worst_node": _NO_NODE, "worst_excess_ns": _NO_NODE},
            ("step", "deviation"),
        ),
        "nodes": Part(
            NODES, "one row per graph and node, longest first, at most a thousand of each rank", nullable=("node_id",)
        ),
    }

    def measure(self, trace: Trace, options: ReportOptions) -> Frames:
        launches = analyze.graph_launches(trace)
        if not launches.graphs.height:
            return {name: pl.DataFrame(schema=part.columns) for name, part in self.parts.items()}
        order = launches.replays["deviation"].is_null()
        replays = launches.replays.with_columns(order.alias("usual")).sort("usual", "span_ns", descending=[False, True])
        nodes = launches.nodes.sort("total_ns", descending=True, maintain_order=True)
        return {
            "graphs": launches.graphs,
            "replays": replays.drop("usual").head(_MAX_GRAPH_LAUNCHES),
            "nodes": nodes.head(_MAX_GRAPH_LAUNCHES),
        }

    def build(self, study: Measurements[Frames], absent: UnknownValues) -> GraphLaunchesValue | None:
        if not any(frames["graphs"].height for frames in study.results):
            absent.say("graph_launches")
            return None
        return self.lists(study.frames(self.parts), absent)

    def tables(self, value: GraphLaunchesValue) -> Iterator[Table]:
        deviating = [row for row in value["replays"] if row["deviation"]]
        listed: list[Listed] = [
            ("graphs", "Graphs", value["graphs"], ["?rank", "graph", "replay_count", "node_count", "span_median_ns",
                "+span_min_ns", "span_max_ns", "idle_median_ns", "+call_median_ns", "total_ns", "deviating_count",
                "+like", "+evidence", "+launch_name"]),
            ("nodes", "Nodes", value["nodes"], ["?rank", "graph", "node", "+replay_count", "mean_ns", "min_ns",
                "max_ns", "+gap_mean_ns", "total_ns", "name"]),
            ("replays", "Replays that deviate", deviating, ["?rank", "graph", "replay", "span_ns", "start_ns", "+step",
                "worst_node", "worst_excess_ns", "deviation"]),
        ]  # fmt: skip
        yield from self.filled(listed, value["graphs"])

    def summary(self, value: GraphLaunchesValue) -> str | None:
        if not value:
            return None
        replays = sum(row["replay_count"] for row in value["graphs"])
        odd = sum(row["deviating_count"] for row in value["graphs"])
        work = sum(row["total_ns"] for row in value["graphs"])
        how = f"{units.count(odd)} of them {'deviates' if odd == 1 else 'deviate'}" if odd else "none deviates"
        single = len(value["graphs"]) == 1
        return (
            f"{units.count(replays)} {'replay' if replays == 1 else 'replays'} of {len(value['graphs'])} "
            f"{'graph' if single else 'graphs'} hold {units.duration(work)} of GPU work; {how}"
        )


GRAPH_LAUNCHES_SECTION = GraphLaunchesSection()


def capture_of_graphs(options: ReportOptions) -> Session | None:
    """What `graph_capture` names; None where nothing is given."""
    return None if options.graph_capture is None else _read(options.graph_capture, options.cache)


@lru_cache(maxsize=1)
def _read(path: str, cache: bool) -> Session:
    return load(path, cache=cache)
