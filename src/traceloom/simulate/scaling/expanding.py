"""The graph of every rank of a scaled job: for other simulators, and for networks whose links are shared."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import polars as pl

from traceloom.array_types import Floats, Ints
from traceloom.model.frames import as_declared
from traceloom.model.graph import Graph
from traceloom.model.graph_schema import GRAPH_SCHEMAS, empty_frame
from traceloom.retime import Plan
from traceloom.simulate.scaling.replicas import ALL, DataAxis, Replica
from traceloom.simulate.scaling.variation import QUANTILES, Variation


def expanded(
    replica: Replica,
    variation: Variation,
    meetings: pl.DataFrame,
    copies: int,
    *,
    transfer_ns: Floats,
    seed: int | None = None,
) -> Graph:
    """The graph of all ranks, with the times that follow from its works.

    Args:
        replica: One copy.
        variation: What its works and delays are.
        meetings: As `replica.meetings`, with the members and bytes of the scaled job.
        copies: How many.
        transfer_ns: Of each meeting, shape (meetings,).
        seed: Of the works that each rank draws for itself; None: all ranks take the mean.

    Returns:
        A graph without notices of its own; its communication has an `instance` and no list of ranks.
    """
    single = replica.graph
    axis = DataAxis(replica.axis.stride, copies, replica.axis.positions * copies)
    inner = single.nodes.height - meetings.height
    lanes = single.lanes.height
    copy = np.arange(copies)
    rank_of = np.array(
        [[axis.rank(position, number) for position in range(axis.positions)] for number in range(copies)]
    )
    # Meetings of all copies come once, of neighbours once per block, of one copy as often as there are copies.
    span = meetings["span"].to_numpy().astype(np.int64)
    several = np.where(span == ALL, 1, copies // np.maximum(span, 1))
    first = inner * copies + np.cumsum(several) - several

    def moved(node: Ints) -> Ints:
        """Numbers of nodes in every copy, (copies, nodes) as one row."""
        meeting = np.maximum(node - inner, 0)
        block = np.where(span[meeting] == ALL, 0, copy[:, np.newaxis] // np.maximum(span[meeting], 1))
        numbers: Ints = np.where(node < inner, node + copy[:, np.newaxis] * inner, first[meeting] + block).ravel()
        return numbers

    def tiled(frame: pl.DataFrame) -> pl.DataFrame:
        return frame[np.tile(np.arange(frame.height), copies)]

    work = np.broadcast_to(variation.work_ns[:inner], (copies, inner)).copy()
    if seed is not None:
        random = np.random.default_rng(seed)
        pool = variation.work_pool[:inner]
        varied = np.flatnonzero(pool >= 0)
        work[:, varied] *= variation.pools[pool[varied], random.integers(0, QUANTILES, (copies, varied.size))]
    nodes = tiled(single.nodes[:inner])
    position = nodes["rank"].fill_null(0).to_numpy()
    nodes = nodes.with_columns(
        rank=pl.Series(rank_of[np.repeat(copy, inner), position]),
        lane=pl.col("lane").cast(pl.Int64) + pl.Series(np.repeat(copy * lanes, inner)),
        work_ns=pl.Series(np.rint(work.ravel()).astype(np.int64)),
        residual_ns=pl.lit(0, pl.Int64),
    )
    joints = single.nodes[inner:][np.repeat(np.arange(meetings.height), several)]
    block = np.arange(several.sum()) - np.repeat(np.cumsum(several) - several, several)
    joints = joints.with_columns(
        rank=pl.Series(
            rank_of[block * np.maximum(np.repeat(span, several), 1), joints["rank"].fill_null(0).to_numpy()]
            if joints.height
            else block
        )
    )
    whole = pl.concat([nodes, joints], how="diagonal_relaxed").with_columns(node=pl.int_range(pl.len()))
    source, target = (single.edges[end].to_numpy().astype(np.int64) for end in ("source", "target"))
    out_of = source >= inner
    delay = variation.delay_ns.copy()
    delay[out_of] = transfer_ns[source[out_of] - inner]
    running = np.isfinite(variation.part)
    delays = np.broadcast_to(delay, (copies, delay.size)).copy()
    delays[:, running] = variation.part[running] * work[:, source[running]]
    edges = tiled(single.edges).with_columns(
        source=pl.Series(moved(source)),
        target=pl.Series(moved(target)),
        delay_ns=pl.Series(np.rint(delays.ravel()).astype(np.int64)),
        residual_ns=pl.lit(0, pl.Int64),
    )
    # Edges of copies that share a meeting stand there once for each part, as in a recorded graph.
    communication = single.communication
    of_part = replica.parts["meeting"].cast(pl.Int64)
    meets = pl.col("instance").is_not_null()
    grown = meetings.select("members", "in_bytes", "out_bytes")[of_part.fill_null(0)] if meetings.height else None
    if grown is not None:
        growing = meets & pl.Series((span == ALL)[of_part.fill_null(0).to_numpy()])
        communication = communication.with_columns(
            group_size=pl.when(meets).then(grown["members"]).otherwise("group_size"),
            in_bytes=pl.when(growing).then(grown["in_bytes"]).otherwise("in_bytes"),
            out_bytes=pl.when(growing).then(grown["out_bytes"]).otherwise("out_bytes"),
        )
    communication = tiled(communication)
    instance = moved(of_part.fill_null(0).to_numpy() + inner)
    # The peer of a message is in its own copy, the root of a larger group in the first one.
    peer_position = replica.parts["peer_position"].fill_null(0).to_numpy().astype(np.int64)
    of_copy = replica.parts.select(pl.col("pair") | (pl.col("span") == 1)).to_series().to_numpy()
    has_peer = replica.parts["peer_position"].is_not_null().to_numpy()
    peer = rank_of[np.where(of_copy, copy[:, np.newaxis], 0).ravel(), np.tile(peer_position, copies)]
    communication = communication.with_columns(
        node=pl.Series(moved(single.communication["node"].to_numpy().astype(np.int64))),
        instance=pl.when(pl.col("instance").is_not_null()).then(pl.Series(instance - inner * copies)),
        peer=pl.when(pl.Series(np.tile(has_peer, copies))).then(pl.Series(peer)),
    )
    frames: dict[str, Any] = {
        "nodes": whole,
        "edges": edges,
        "lanes": tiled(single.lanes).with_columns(
            lane=pl.int_range(pl.len()),
            rank=pl.Series(rank_of[np.repeat(copy, lanes), np.tile(single.lanes["rank"].to_numpy(), copies)]),
        ),
        "communication": communication,
        "transfers": tiled(single.transfers).with_columns(
            node=pl.Series(moved(single.transfers["node"].to_numpy().astype(np.int64)))
        ),
    }
    declared: dict[str, Any] = {name: as_declared(frame, GRAPH_SCHEMAS[name]) for name, frame in frames.items()}
    graph = replace(single, **declared, delays=empty_frame("delays"), world_size=axis.world)
    times = Plan(graph).evaluate()
    start, end = times[0::2], times[1::2]
    return replace(
        graph,
        nodes=graph.nodes.with_columns(pl.Series("start_ns", start), pl.Series("duration_ns", end - start)),
    )
