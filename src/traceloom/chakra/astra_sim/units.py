"""Units: what becomes one node for ASTRA-sim. GPU work and communication stay; host nodes run together.

The nodes of a host thread follow each other without gaps. A run of them becomes one unit, cut wherever something else
holds on to it: before a node from whose start work is launched, or that waits for another thread; behind a node for
which others wait, or that waits for GPU work.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import polars as pl

from traceloom.array_types import Bools, Ints
from traceloom.model import graph_schema as gs
from traceloom.model.graph import Graph

HOST_KINDS = (gs.HOST, gs.THINK, gs.WAIT, gs.LAUNCH, gs.BLOCK)
_NOWHERE = (gs.ORIGIN, gs.RENDEZVOUS, gs.ARRIVAL)


@dataclass(frozen=True)
class Units:
    """The units of a graph, and what they wait for.

    Attributes:
        frame: `unit` (row number), `node` (the first one), `name`, `rank`, `lane`, `position` (place on its lane),
            `on_host`, `start_ns`, `end_ns`, `work_ns` (what it takes when nothing is awaited), `members` (nodes in it).
            Sorted by lane and time.
        source: Unit that is waited for, per edge.
        target: Unit that waits.
        from_end: Whether the edge holds from the end of its source (else from its start).
        to_end: Whether it holds back the end of its target (else its start).
        queues: Lanes whose units follow each other because the thread or the stream says so. Files of other writers
            say nothing of that: there, nodes on one lane may come in any order.
    """

    frame: pl.DataFrame
    source: Ints
    target: Ints
    from_end: Bools
    to_end: Bools
    queues: Ints


def units_of(graph: Graph) -> Units:
    """The units of a calibrated graph, of all its ranks; edges between ranks are left to the simulator."""
    nodes = graph.nodes.filter(~pl.col("kind").is_in(_NOWHERE)).sort("lane", "start_ns", "node", nulls_last=True)
    row_of_node = np.full(graph.nodes.height, -1, dtype=np.int64)
    row_of_node[nodes["node"].to_numpy()] = np.arange(nodes.height)
    edges = graph.edges.select(
        pl.Series("source", row_of_node[graph.edges["source"].to_numpy()]),
        pl.Series("target", row_of_node[graph.edges["target"].to_numpy()]),
        "kind",
        "from_end",
        "to_end",
    )
    rank = nodes["rank"].to_numpy()
    source, target = edges["source"].to_numpy(), edges["target"].to_numpy()
    within_rank = (source >= 0) & (target >= 0) & (source != target)
    within_rank[within_rank] = rank[source[within_rank]] == rank[target[within_rank]]
    edges = edges.filter(pl.Series(within_rank))
    source, target = edges["source"].to_numpy(), edges["target"].to_numpy()
    from_end, to_end = edges["from_end"].to_numpy(), edges["to_end"].to_numpy()
    # Whether a unit begins with each node (by its place).
    at_host = nodes["kind"].is_in(HOST_KINDS).to_numpy()
    lane = nodes["lane"].fill_null(-1).cast(pl.Int64).to_numpy()
    begins = ~at_host
    begins[:1] = True
    begins[1:] |= (lane[1:] != lane[:-1]) | ~at_host[:-1]
    begins |= (nodes["kind"] == gs.WAIT).to_numpy()  # alone, so that the work of a unit lies where the unit does
    # Only what holds from an end to the start of the next node on the lane is inside a unit.
    inner = from_end & ~to_end & (target == source + 1)
    begins[target[~inner & ~to_end]] = True
    begins[source[~inner & ~from_end]] = True
    ends = np.concatenate([target[~inner & to_end], source[~inner & from_end]])
    begins[ends[ends + 1 < len(begins)] + 1] = True
    unit = np.cumsum(begins) - 1
    on_host = pl.col("kind").is_in(HOST_KINDS)
    waits = pl.col("kind") == gs.WAIT
    # A thread that waits does nothing itself; GPU work takes what it took.
    work = pl.when(waits).then(0).when(on_host).then(pl.col("work_ns") + pl.col("residual_ns")).otherwise("duration_ns")
    heaviest = pl.col("name").get(pl.col("work").arg_max())
    more = pl.col("name").n_unique() - 1
    frame = (
        nodes.with_columns(
            pl.Series("unit", unit), work.alias("work"), on_host.alias("on_host"), pl.col("rank").cast(pl.Int64)
        )
        .group_by("unit", maintain_order=True)
        .agg(
            pl.col("node").first(),
            pl.when(more > 0).then(pl.format("{} and {} more", heaviest, more)).otherwise(heaviest).alias("name"),
            pl.col("rank", "lane", "kind", "on_host", "start_ns").first(),
            (pl.col("start_ns") + pl.col("duration_ns")).max().alias("end_ns"),
            pl.col("work").sum().alias("work_ns"),
            pl.col("bytes").first(),
            pl.len().alias("members"),
        )
        .with_columns(pl.int_range(pl.len()).over("lane").alias("position"))
    )
    source, target = unit[source], unit[target]
    other = source != target
    follows = edges["kind"].is_in(["thread", "stream"]) | ((edges["kind"] == "call") & edges["from_end"])
    queues = np.unique(lane[edges["target"].to_numpy()][follows.to_numpy()])
    return Units(frame, source[other], target[other], from_end[other], to_end[other], queues)
