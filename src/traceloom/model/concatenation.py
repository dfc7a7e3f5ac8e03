"""Several graphs side by side in one, without anything between them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import polars as pl

from traceloom.model.graph import Graph

_SHIFTED = {
    "nodes": {"node": "nodes", "lane": "lanes"},
    "edges": {"source": "nodes", "target": "nodes"},
    "lanes": {"lane": "lanes"},
    "communication": {"node": "nodes"},
    "transfers": {"node": "nodes"},
}


def concatenated(graphs: Sequence[Graph], name: str) -> Graph:
    """One graph with the rows of all; what belongs to the whole (epoch, stage, delays) is taken from the first.

    Args:
        graphs: At least one; their ranks differ.
        name: The name of the new graph.
    """
    if len(graphs) == 1:
        return replace(graphs[0], name=name)
    frames: dict[str, list[pl.DataFrame]] = {frame: [] for frame in graphs[0].frames()}
    rows = {"nodes": 0, "lanes": 0}
    for graph in graphs:
        for frame, rows_of_it in graph.frames().items():
            shifts = _SHIFTED.get(frame, {})
            frames[frame].append(rows_of_it.with_columns(pl.col(column) + rows[of] for column, of in shifts.items()))
        rows = {of: count + getattr(graph, of).height for of, count in rows.items()}
    whole: dict[str, Any] = {frame: pl.concat(parts) for frame, parts in frames.items() if frame != "delays"}
    notices = tuple(notice for graph in graphs for notice in graph.notices)
    return replace(graphs[0], name=name, notices=notices, **whole)
