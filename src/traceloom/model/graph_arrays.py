"""The columns of a graph as arrays: in memory, or in files where the graph is that of many ranks.

What is computed from arrays of `traceloom.storage.ondisk` lies in files too, so that a pass over a large graph does not
take more memory the more ranks it has.
"""

from __future__ import annotations

import numpy as np
import polars as pl

from traceloom.array_types import Array, Ints
from traceloom.model.graph import Graph
from traceloom.storage import ondisk

LARGE = 500_000  # nodes and edges of a graph from which on its arrays lie in files: about twelve ranks of 20 MB


def is_large(graph: Graph) -> bool:
    """Whether the graph's arrays lie in files."""
    return graph.nodes.height + graph.edges.height >= LARGE


def points(graph: Graph) -> tuple[Ints, Ints]:
    """Source and target point of each edge; see `Graph.points`."""
    if not is_large(graph):
        return graph.points()
    source, target = (
        array(graph, graph.edges[node]).astype(np.int64) * 2 + graph.edges[end].to_numpy()
        for node, end in (("source", "from_end"), ("target", "to_end"))
    )
    return source, target


def point_times(graph: Graph) -> Ints:
    """The measured time of every point; see `Graph.point_times`."""
    if not is_large(graph):
        return graph.point_times()
    start, duration = (array(graph, graph.nodes[name]) for name in ("start_ns", "duration_ns"))
    times: Ints = ondisk.empty(2 * len(start), np.int64)
    times[0::2], times[1::2] = start, start + duration
    return times


def array(graph: Graph, column: pl.Series) -> Array:
    """A column of the graph without nulls, kinds as their numbers; what is computed from it lies where it lies."""
    values: Array = (column.to_physical() if isinstance(column.dtype, pl.Enum) else column).to_numpy()
    return values.view(ondisk.OnDisk) if is_large(graph) else values


def plain(values: Array) -> Array:
    """The same array, wherever it lies; what is computed from it lies in memory."""
    return values.view(np.ndarray)


def room(rows: int, columns: int, *, large: bool) -> Ints:
    """A plain array without values, of which the data lie in a file where it is large. Shape (rows, columns)."""
    if not large:
        return np.empty((rows, columns), dtype=np.int64)
    return plain(ondisk.empty(rows * columns, np.int64)).reshape(rows, columns)
