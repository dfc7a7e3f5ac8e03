"""What a graph is made of, as one JSON document: nodes, edges and their evidence, coverage, clocks, delays, the law."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import polars as pl

from traceloom import __version__
from traceloom.model import Graph
from traceloom.model.frames import rows
from traceloom.model.notice import worst_first

if TYPE_CHECKING:
    from traceloom.report.documents.graph import GraphDocument
    from traceloom.retime.law import Law

FORMAT, VERSION = "traceloom-link", 1


def build(graph: Graph, law: Law | None = None) -> GraphDocument:
    """The document.

    Args:
        graph: A graph.
        law: What `traceloom.retime.law` found, where it was asked for.
    """
    nodes, edges = graph.nodes, graph.edges
    kinds = nodes.group_by("kind").agg(pl.len().alias("count"), pl.col("duration_ns").sum().alias("time_ns"))
    typed = edges.group_by("kind", "evidence").agg(pl.len().alias("count"))
    law_fields: Any = None if law is None else law.to_dict()
    return {
        "format": FORMAT,
        "version": VERSION,
        "traceloom": __version__,
        "name": graph.name,
        "stage": graph.stage,
        "epoch_ns": str(graph.epoch_ns),
        "world_size": graph.world_size,
        "window_ns": graph.end_ns,
        "nodes": {"count": nodes.height, "kinds": rows(kinds.sort("kind"))},
        "edges": {"count": edges.height, "kinds": rows(typed.sort("kind", "evidence"))},
        "ranks": rows(
            graph.ranks.with_columns((pl.col("window_end_ns") - pl.col("window_start_ns")).alias("window_ns"))
        ),
        "coverage": rows(graph.coverage),
        "delays": rows(graph.delays),
        "law": law_fields,
        "notices": [notice.to_dict() for notice in worst_first(graph.notices)],
    }
