"""Graphs of single ranks made by hand: an origin and one kernel per communication."""

from __future__ import annotations

from typing import Any

import polars as pl

from traceloom.graph.graph import GRAPH_SCHEMAS, Graph
from traceloom.graph.job import join_ranks

US = 1_000


def filled(name: str, rows: list[dict[str, Any]]) -> pl.DataFrame:
    schema = GRAPH_SCHEMAS[name]
    return pl.DataFrame(
        [{column: row.get(column) for column in schema} for row in rows], schema=schema
    )


def part(
    rank: int,
    operations: list[dict[str, Any]],
    *,
    epoch_us: int = 0,
    host: str | None = "a",
    world: int | None = None,
) -> Graph:
    """One rank: an origin, and one kernel per operation given by `start`, `end` (us) and what is known of it."""
    nodes = [
        {
            "node": 0,
            "kind": "origin",
            "name": "origin",
            "rank": rank,
            "start_ns": 0,
            "duration_ns": 0,
            "work_ns": 0,
        }
    ]
    said = []
    for number, operation in enumerate(operations, 1):
        start, length = operation["start"] * US, (operation["end"] - operation["start"]) * US
        kind = operation.get("kind", "all_reduce")
        nodes.append(
            {
                "node": number,
                "kind": kind if kind in ("send", "receive") else "collective",
                "name": f"nccl {kind}",
                "rank": rank,
                "lane": 0,
                "start_ns": start,
                "duration_ns": length,
                "work_ns": length,
            }
        )
        said.append(
            {
                "node": number,
                "group": "0",
                "kind": kind,
                **{k: v for k, v in operation.items() if k not in ("start", "end", "kind")},
            }
        )
    edges = [
        {
            "source": number - 1,
            "target": number,
            "kind": "stream" if number > 1 else "origin",
            "evidence": "inferred",
            "from_end": True,
            "to_end": False,
            "delay_ns": 0,
            "residual_ns": 0,
        }
        for number in range(1, len(nodes))
    ]
    return Graph(
        nodes=filled("nodes", [{**node, "residual_ns": 0} for node in nodes]),
        edges=filled("edges", edges),
        lanes=filled(
            "lanes",
            [
                {
                    "lane": 0,
                    "rank": rank,
                    "kind": "device",
                    "device": 0,
                    "stream": 7,
                    "name": "stream 7",
                }
            ],
        ),
        communication=filled("communication", said),
        ranks=filled(
            "ranks",
            [{"rank": rank, "host": host, "window_start_ns": 0, "window_end_ns": 10_000_000}],
        ),
        epoch_ns=epoch_us * US,
        world_size=world,
    )


def checked(parts: list[Graph]) -> Graph:
    for one in parts:
        one.check()
    graph = join_ranks(parts)
    graph.check()
    return graph


def instances(graph: Graph, rank: int) -> list[int | None]:
    mine = graph.nodes.filter(pl.col("rank") == rank)["node"]
    return graph.communication.filter(pl.col("node").is_in(mine.to_list()))["instance"].to_list()
