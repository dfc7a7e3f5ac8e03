"""Edges of a graph by the names of their ends, and kernels with the calls that launch them."""

from __future__ import annotations

import polars as pl

from traceloom.graph.graph import Graph
from traceloom.testing.trace_builder import TraceBuilder


def edges(graph: Graph, kind: str) -> list[tuple[str, str, bool, bool, str]]:
    """Names at both ends of the edges of a kind, whether they join ends, and how they are known; the graph is whole."""
    graph.check()
    name = graph.nodes["name"]
    return [
        (name[row["source"]], name[row["target"]], row["from_end"], row["to_end"], row["evidence"])
        for row in graph.edges.filter(pl.col("kind") == kind).to_dicts()
    ]


def launched(
    built: TraceBuilder, name: str, at: float, start: float, length: float, *, stream: int = 7
) -> None:
    """Add a kernel, and the call of 4 µs that launches it."""
    number = round(at * 10) + 1
    built.launch("cudaLaunchKernel", at, 4, correlation=number)
    built.kernel(name, start, length, stream=stream, correlation=number)
