"""How many ranks the job of a graph has."""

from __future__ import annotations

from dataclasses import replace

import polars as pl
import pytest

from support.small_graph import small_graph
from traceloom.graph.graph import Graph, build_empty_frame


def test_a_graph_without_nodes_is_of_one_rank() -> None:
    assert Graph(build_empty_frame("nodes"), build_empty_frame("edges")).job_size == 1


@pytest.mark.parametrize(
    ("stated", "groups", "peer", "ranks"),
    [
        (None, [0, 1], None, 2),
        (8, [0, 1], None, 8),
        (None, [0, 5], None, 6),
        (None, [0, 1], 9, 10),
        (3, [0, 1], 9, 10),
    ],
)
def test_ranks_are_those_that_are_stated_or_named(
    stated: int | None, groups: list[int], peer: int | None, ranks: int
) -> None:
    graph = small_graph(2)
    communication = graph.communication.with_columns(
        pl.lit(pl.Series([groups], dtype=graph.communication.schema["ranks"]).first()).alias(
            "ranks"
        ),
        pl.lit(peer, graph.communication.schema["peer"]).alias("peer"),
    )
    assert replace(graph, communication=communication, world_size=stated).job_size == ranks
