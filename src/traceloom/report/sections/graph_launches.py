"""CUDA and HIP graphs: their replays, node upon node."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from traceloom import analyze
from traceloom.analyze.graph_launches import GRAPHS, NODES, REPLAYS, GraphLaunches
from traceloom.model import Trace, units
from traceloom.report.absent import Absent
from traceloom.report.options import ReportOptions
from traceloom.report.sections.section import Row, Section, Study
from traceloom.report.sections.shapes import or_null, ranked, record
from traceloom.report.table import Col, Table

_ROWS = 1000  # nodes and replays of a rank
_NULLS = {
    "graphs": {"graph_id", "like"},
    "replays": {"step", "deviation", "worst_node", "worst_excess_ns"},
    "nodes": {"node_id"},
}
_SHAPES = {
    "graphs": (GRAPHS, "one row per graph"),
    "replays": (REPLAYS, "one row per launch; those that deviate and the longest, at most a thousand of each rank"),
    "nodes": (NODES, "one row per graph and node, the most time first, at most a thousand of each rank"),
}


def _measure(trace: Trace, _options: ReportOptions) -> GraphLaunches:
    launches = analyze.graph_launches(trace)
    order = launches.replays["deviation"].is_null()
    replays = launches.replays.with_columns(order.alias("usual")).sort("usual", "span_ns", descending=[False, True])
    return replace(
        launches,
        replays=replays.drop("usual").head(_ROWS),
        nodes=launches.nodes.sort("total_ns", descending=True, maintain_order=True).head(_ROWS),
    )


def _build(study: Study[GraphLaunches], absent: Absent) -> Row | None:
    if not any(measured.work_count for measured in study.results):
        absent.say("graph_launches")
        return None
    return {
        name: absent.rows(study.concat(lambda measured, name=name: getattr(measured, name)), f"graph_launches.{name}")  # type: ignore[misc]
        for name in _SHAPES
    }


def _tables(value: Row) -> Iterator[Table]:
    rank = [Col("rank", "Rank", "count")] if len({row["rank"] for row in value["graphs"]}) > 1 else []
    graph = Col("graph", "Graph", "count")
    columns = {
        "graphs": (
            "Graphs",
            [graph, Col("replay_count", "Replays", "count"), Col("node_count", "Nodes", "count"),
             Col("span_median_ns", "Replay", "time", "first start to last end, median"),
             Col("span_min_ns", "Least", "time", narrow=False), Col("span_max_ns", "Most", "time"),
             Col("idle_median_ns", "Idle", "time", "inside the span, median"),
             Col("call_median_ns", "Call", "time", "of the launch, median", narrow=False),
             Col("total_ns", "Work", "time", "summed over all replays"),
             Col("deviating_count", "Deviate", "count", "replays that deviate"),
             Col("like", "Like", "count", "a graph with nearly the same nodes", narrow=False),
             Col("evidence", "Evidence", narrow=False), Col("launch_name", "Call", "text", narrow=False)],
        ),
        "nodes": (
            "Nodes",
            [graph, Col("node", "Node", "count"), Col("replay_count", "Replays", "count", narrow=False),
             Col("mean_ns", "Mean", "time"), Col("min_ns", "Least", "time"), Col("max_ns", "Most", "time"),
             Col("gap_mean_ns", "Gap before", "time", "nothing of the replay ran, mean", narrow=False),
             Col("total_ns", "Total", "time"), Col("name", "Name", "name")],
        ),
        "replays": (
            "Replays that deviate",
            [graph, Col("replay", "Replay", "count"), Col("span_ns", "Span", "time"), Col("start_ns", "At", "time"),
             Col("step", "Step", "count", narrow=False), Col("worst_node", "Worst node", "count"),
             Col("worst_excess_ns", "By", "time", "above its median"), Col("deviation", "How", "name")],
        ),
    }  # fmt: skip
    for name, (title, shown) in columns.items():
        rows = [row for row in value[name] if name != "replays" or row["deviation"]]
        if rows:
            yield Table(f"graph-launches-{name}", title, [*rank, *shown], rows, f"graph_launches.{name}")


def _summary(value: Row | None) -> str | None:
    if not value:
        return None
    replays = sum(row["replay_count"] for row in value["graphs"])
    odd = sum(row["deviating_count"] for row in value["graphs"])
    work = sum(row["total_ns"] for row in value["graphs"])
    how = f"{units.count(odd)} of them deviate" if odd else "none deviates"
    single = len(value["graphs"]) == 1
    return (
        f"{units.count(replays)} {'replay' if replays == 1 else 'replays'} of {len(value['graphs'])} "
        f"{'graph' if single else 'graphs'} hold {units.duration(work)} of GPU work; {how}"
    )


SECTION = Section(
    key="graph_launches",
    title="Graph launches",
    note="CUDA and HIP graphs: one call, many kernels; replays laid node upon node.",
    measure=_measure,
    build=_build,
    tables=_tables,
    summary=_summary,
    schema=or_null(
        record({name: ranked(shape, nullable=_NULLS[name], what=what) for name, (shape, what) in _SHAPES.items()})
    ),
    reasons={
        "graph_launches": "no graph launch was recorded",
        **{f"graph_launches.{name}[*].rank": "the file does not say its rank" for name in _SHAPES},
        "graph_launches.graphs[*].graph_id": "the recorder does not write graph ids",
        "graph_launches.graphs[*].like": "no other graph has nearly the same nodes",
        "graph_launches.nodes[*].node_id": "the recorder does not write graph node ids",
        "graph_launches.replays[*].step": "null is the time outside all steps",
        "graph_launches.replays[*].deviation": "null is a replay like the others",
        "graph_launches.replays[*].worst_node": "no node of the replay is above its median",
        "graph_launches.replays[*].worst_excess_ns": "no node of the replay is above its median",
    },
)
