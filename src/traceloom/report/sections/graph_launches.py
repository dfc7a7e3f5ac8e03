"""CUDA and HIP graphs: their replays, node upon node."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import polars as pl

from traceloom import analyze
from traceloom.analyze.graph_launches import GRAPHS, NODES, REPLAYS
from traceloom.model import Trace, units
from traceloom.report.absent import Absent
from traceloom.report.options import ReportOptions
from traceloom.report.sections.section import Frames, Listed, Section, Study
from traceloom.report.sections.shapes import Part
from traceloom.report.table import Table

if TYPE_CHECKING:
    from traceloom.report.documents.sections import GraphLaunchesValue

_ROWS = 1000  # nodes and replays of a rank
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
            "replays": replays.drop("usual").head(_ROWS),
            "nodes": nodes.head(_ROWS),
        }

    def build(self, study: Study[Frames], absent: Absent) -> GraphLaunchesValue | None:
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


SECTION = GraphLaunchesSection()
