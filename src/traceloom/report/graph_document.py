"""What a graph is made of, as one JSON document: nodes, edges and their evidence, coverage, clocks, delays, the law."""

from __future__ import annotations

from typing import Any

import polars as pl

from traceloom import __version__
from traceloom.model import Graph
from traceloom.model.notice import worst_first

FORMAT, VERSION = "traceloom-link", 1


def build(graph: Graph, law: Any = None) -> dict[str, Any]:
    """The document.

    Args:
        graph: A graph.
        law: What `traceloom.retime.law` found, where it was asked for.
    """
    nodes, edges = graph.nodes, graph.edges
    kinds = nodes.group_by("kind").agg(pl.len().alias("count"), pl.col("duration_ns").sum().alias("time_ns"))
    typed = edges.group_by("kind", "evidence").agg(pl.len().alias("count"))
    return {
        "format": FORMAT,
        "version": VERSION,
        "traceloom": __version__,
        "name": graph.name,
        "stage": graph.stage,
        "epoch_ns": str(graph.epoch_ns),
        "world_size": graph.world_size,
        "window_ns": graph.end_ns,
        "nodes": {"count": nodes.height, "kinds": kinds.sort("kind").to_dicts()},
        "edges": {"count": edges.height, "kinds": typed.sort("kind", "evidence").to_dicts()},
        "ranks": graph.ranks.with_columns(
            (pl.col("window_end_ns") - pl.col("window_start_ns")).alias("window_ns")
        ).to_dicts(),
        "coverage": graph.coverage.to_dicts(),
        "delays": graph.delays.to_dicts(),
        "law": None if law is None else law.to_dict(),
        "notices": [notice.to_dict() for notice in worst_first(graph.notices)],
    }
