"""One side of a workload alone: the other takes no time, and passes on what is waited for."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import polars as pl

from traceloom.model import graph_schema as gs
from traceloom.model.graph import Graph
from traceloom.retime import Plan

SIDES = ("communication", "compute")


def isolated(graph: Graph, side: str) -> Graph:
    """The graph in which only one side takes time.

    Of `communication` that is the transfers, and the work of communication that meets nobody; of `compute` the work of
    all other nodes and the delays between them. What waits for the other side waits for what that waited for.

    Args:
        graph: Any graph.
        side: One of `SIDES`.
    """
    communicates = pl.col("kind").cast(pl.String).is_in([*gs.COMMUNICATION, gs.RENDEZVOUS, gs.ARRIVAL])
    node_side = graph.nodes.select(communicates).to_series()
    # Out of a meeting, into an arrival, and everything else between the parts of a communication.
    edge_side = graph.edges["kind"].cast(pl.String) == "rendezvous"
    stays = (node_side, edge_side) if side == "communication" else (~node_side, ~edge_side)
    nodes, edges = (
        frame.with_columns(pl.when(pl.lit(kept)).then(name).otherwise(0).alias(name) for name in columns)
        for frame, kept, columns in (
            (graph.nodes, stays[0], ("work_ns", "residual_ns")),
            (graph.edges, stays[1], ("delay_ns", "residual_ns")),
        )
    )
    return as_evaluated(replace(graph, nodes=nodes, edges=edges))


def as_evaluated(graph: Graph) -> Graph:
    """The graph with the times that follow from its works and delays in the place of measured ones."""
    times = Plan(graph).evaluate() if graph.nodes.height else np.zeros(0, dtype=np.int64)
    start, end = times[0::2], times[1::2]
    return replace(
        graph,
        nodes=graph.nodes.with_columns(pl.Series("start_ns", start), pl.Series("duration_ns", end - start)),
    )
