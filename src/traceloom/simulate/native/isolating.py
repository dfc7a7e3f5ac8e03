"""One side of a workload alone: the other takes no time, and passes on what is waited for."""

from __future__ import annotations

from dataclasses import replace

import polars as pl

from traceloom.model import graph_schema as gs
from traceloom.model.graph import Graph

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
    return replace(graph, nodes=nodes, edges=edges)
