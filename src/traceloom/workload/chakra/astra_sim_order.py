"""Merging host work into units, and ordering the nodes of all ranks.

The nodes of a host thread follow each other without gaps. A run of them becomes one unit, split
wherever another dependency attaches: before a node that launches work from its start or waits for
another thread, and after a node that others wait for or that waits for GPU work.

If units are dropped, a unit waits instead for the last kept unit of every chain that must have
ended.

Threads and streams are queues: whatever waits for the k-th unit waits for all before it. Elsewhere,
units that wait for each other in sequence form chains with the same property. So the units that
must have ended before a point are one per chain, and a point with one predecessor shares the
predecessor's result.
"""

import heapq
from dataclasses import dataclass
from typing import Any

import numpy as np
import polars as pl

from traceloom.errors import InvariantError
from traceloom.formats.chakra.et_pb2 import NodeType
from traceloom.graph import graph as graph_schema
from traceloom.graph.graph import Graph, sort_topologically
from traceloom.trace.array_types import Bools, Ints

HOST_KINDS = (
    graph_schema.HOST,
    graph_schema.THINK,
    graph_schema.WAIT,
    graph_schema.LAUNCH,
    graph_schema.BLOCK,
)
_LANELESS_KINDS = (graph_schema.ORIGIN, graph_schema.RENDEZVOUS, graph_schema.ARRIVAL)


@dataclass(frozen=True)
class Units:
    """The units of a graph, and their dependencies.

    Attributes:
        frame: `unit` (row number), `node` (the first one), `name`, `rank`, `lane`, `position`
            (place on its lane), `on_host`, `start_ns`, `end_ns`, `work_ns` (duration without
            waits), `members` (nodes in it). Sorted by lane and time.
        source: Unit that is waited for, per edge.
        target: Unit that waits.
        from_end: Whether the edge starts at the end of its source (else at its start).
        to_end: Whether it delays the end of its target (else its start).
        queues: Lanes that run their units in sequence because they are threads or streams. Files of
            other writers do not state that: their nodes on a lane may run in any order.
    """

    frame: pl.DataFrame
    source: Ints
    target: Ints
    from_end: Bools
    to_end: Bools
    queues: Ints


def is_for_simulators(graph: Graph) -> bool:
    """Returns whether the graph is of other writers' files that hold no call stack: then every node
    is work of its own.
    """
    return graph.foreign.height > 0 and bool(
        graph.edges.select((pl.col("kind") != "call") | pl.col("from_end")).to_series().all()
    )


def build_units(graph: Graph) -> Units:
    """Returns the units of a calibrated graph, of all its ranks; edges between ranks are left to
    the simulator.
    """
    nodes = graph.nodes.filter(~pl.col("kind").is_in(_LANELESS_KINDS)).sort(
        "lane", "start_ns", "node", nulls_last=True
    )
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
    # Whether a unit begins with each node, by position.
    at_host = nodes["kind"].is_in(HOST_KINDS).to_numpy()
    lane = nodes["lane"].fill_null(-1).cast(pl.Int64).to_numpy()
    is_unit_start = ~at_host
    is_unit_start[:1] = True
    is_unit_start[1:] |= (lane[1:] != lane[:-1]) | ~at_host[:-1] | is_for_simulators(graph)
    is_unit_start |= (
        nodes["kind"] == graph_schema.WAIT
    ).to_numpy()  # in units of their own, so that the work of a unit is at the time of the unit
    # Only edges from an end to the start of the next node on the lane are inside a unit.
    inner = from_end & ~to_end & (target == source + 1)
    is_unit_start[target[~inner & ~to_end]] = True
    is_unit_start[source[~inner & ~from_end]] = True
    last_nodes = np.concatenate([target[~inner & to_end], source[~inner & from_end]])
    is_unit_start[last_nodes[last_nodes + 1 < len(is_unit_start)] + 1] = True
    unit = np.cumsum(is_unit_start) - 1
    on_host = pl.col("kind").is_in(HOST_KINDS)
    # A waiting thread does no work itself; GPU work keeps its duration.
    work = (
        pl.when(pl.col("kind") == graph_schema.WAIT)
        .then(0)
        .when(on_host)
        .then(pl.col("work_ns") + pl.col("residual_ns"))
        .otherwise("duration_ns")
    )
    heaviest = pl.col("name").get(pl.col("work").arg_max())
    extra_count = pl.col("name").n_unique() - 1
    frame = (
        nodes.with_columns(
            pl.Series("unit", unit),
            work.alias("work"),
            on_host.alias("on_host"),
            pl.col("rank").cast(pl.Int64),
        )
        .group_by("unit", maintain_order=True)
        .agg(
            pl.col("node").first(),
            pl.when(extra_count > 0)
            .then(pl.format("{} and {} more", heaviest, extra_count))
            .otherwise(heaviest)
            .alias("name"),
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
    follows = edges["kind"].is_in(["thread", "stream"]) | (
        (edges["kind"] == "call") & edges["from_end"] & (not is_for_simulators(graph))
    )
    queues = np.unique(lane[edges["target"].to_numpy()][follows.to_numpy()])
    return Units(frame, source[other], target[other], from_end[other], to_end[other], queues)


_Latest = dict[int, int]  # chain -> position in the order of its last unit that must have ended
_NO_UNITS: _Latest = {}


@dataclass(frozen=True, slots=True)
class AwaitedUnits:
    """Pairs of kept units: `target` (ascending) starts after the end of `source`; no pair twice.

    Attributes:
        target: Unit.
        source: Unit.
        queued: Whether only the queue of a lane implies it, although the measured work overlapped.
        order: All units in an order in which each comes after what it waits for.
    """

    target: Ints
    source: Ints
    queued: Bools
    order: Ints


def find_awaited_units(units: Units, retained: Bools) -> AwaitedUnits:
    """Returns the dependencies between kept units, including those that pass through dropped units.

    Args:
        units: All units.
        retained: Which of them become nodes.
    """
    count = units.frame.height
    lane = units.frame["lane"].fill_null(-1).cast(int).to_numpy()
    same = np.flatnonzero((lane[1:] == lane[:-1]) & np.isin(lane[1:], units.queues))
    source = np.concatenate([units.source * 2 + units.from_end, same * 2 + 1])
    target = np.concatenate([units.target * 2 + units.to_end, same * 2 + 2])
    try:
        order = sort_topologically(count, source, target)
    except InvariantError:  # the queue of a lane would close a cycle: drop the queues
        source, target = source[: len(units.source)], target[: len(units.source)]
        order = sort_topologically(count, source, target)
    position = np.empty(2 * count, np.int64)
    position[order] = np.arange(2 * count)
    position = position[0::2]  # of the starts: a later unit of a chain is later in the order
    chain = _assign_chains(
        order, source, target, retained, np.where(np.isin(lane, units.queues), lane, -1)
    )
    # For every unit and each chain: the last kept unit that must have ended before the unit starts.
    positions, is_kept = position.tolist(), retained.tolist()
    target_order = np.argsort(target, kind="stable")
    before = source[target_order].tolist()
    first = np.searchsorted(target[target_order], np.arange(2 * count + 1)).tolist()
    points: list[_Latest] = [_NO_UNITS] * (2 * count)
    for point in order.tolist():
        unit = point >> 1
        latest_by_chain = points[point - 1] if point & 1 else _NO_UNITS
        if point & 1 and is_kept[unit]:
            latest_by_chain = {chain[unit]: positions[unit]}
        for other in before[first[point] : first[point + 1]]:
            latest_by_chain = _merge_latest(latest_by_chain, points[other])
        points[point] = latest_by_chain
    latest = [points[2 * unit] if is_kept[unit] else _NO_UNITS for unit in range(count)]
    unit_at = np.empty(2 * count, np.int64)
    unit_at[position] = np.arange(count)
    pairs_target = np.repeat(np.arange(count), [len(latest_by_chain) for latest_by_chain in latest])
    pairs_source = unit_at[
        np.fromiter(
            (
                latest_position
                for latest_by_chain in latest
                for latest_position in latest_by_chain.values()
            ),
            np.int64,
            len(pairs_target),
        )
    ]
    overlap = (
        units.frame["end_ns"].to_numpy()[pairs_source]
        > units.frame["start_ns"].to_numpy()[pairs_target]
    )
    queued = (
        overlap
        & (lane[pairs_source] == lane[pairs_target])
        & np.isin(lane[pairs_target], units.queues)
    )
    return AwaitedUnits(pairs_target, pairs_source, queued, order[order % 2 == 0] // 2)


def _assign_chains(
    order: Ints, source: Ints, target: Ints, retained: Bools, queue_of: Ints
) -> list[int]:
    """Returns a chain for every unit: its queue; elsewhere the chain of a direct predecessor, if
    that is the end of its chain, or a new one.

    Args:
        order: All points in topological order.
        source: Point that is waited for, per edge.
        target: Point that waits.
        retained: Which units are kept.
        queue_of: The lane of units on queues, -1 elsewhere.
    """
    direct = (
        (source & 1).astype(bool)
        & ~(target & 1).astype(bool)
        & retained[source >> 1]
        & retained[target >> 1]
    )
    direct &= (queue_of[source >> 1] < 0) & (queue_of[target >> 1] < 0)
    target_order = np.flatnonzero(direct)[np.argsort(target[direct], kind="stable")]
    before = (source[target_order] >> 1).tolist()
    first = np.searchsorted(target[target_order] >> 1, np.arange(len(retained) + 1)).tolist()
    own_chain = np.arange(len(retained)) + queue_of.max(initial=-1) + 1
    chain: list[int] = np.where(queue_of >= 0, queue_of, own_chain).tolist()
    has_successor = [False] * len(retained)
    for point in order[order % 2 == 0].tolist() if len(before) else []:
        unit = point >> 1
        for other in before[first[unit] : first[unit + 1]]:
            if not has_successor[other]:
                has_successor[other] = True
                chain[unit] = chain[other]
                break
    return chain


def _merge_latest(current: _Latest, other: _Latest) -> _Latest:
    """Returns the later unit of the two for each chain; returns an input itself if it has them
    all.
    """
    if not other or current is other:
        return current
    if not current:
        return other
    both = current
    for chain, position in other.items():
        if both.get(chain, -1) < position:
            if both is current:
                both = dict(current)
            both[chain] = position
    return both


def compute_job_order(frame: pl.DataFrame, pairs: Ints) -> Ints:
    """Returns the position of every node; the parts of one collective share one; -1 for nodes in a
    cycle.

    Among the ready nodes, the earliest by recorded time comes next; a collective counts from the
    arrival of its last part.

    Args:
        frame: Columns type, rank, start_ns, instance, comm_src, comm_dst, comm_tag.
        pairs: (row, row that it waits for).
    """
    rows = frame.with_row_index("row").with_columns(pl.col("row").cast(pl.Int64))
    # The representative of each row: the first part of its collective, else the row itself.
    joined = (
        (pl.col("type") == int(NodeType.COMM_COLL_NODE))
        & pl.col("instance").is_not_null()
        & pl.col("why").is_null()
    )
    joined_rows = rows.filter(joined).select(
        "row", pl.col("row").min().over("instance").alias("first")
    )
    meets = np.arange(frame.height, dtype=np.int64)
    meets[joined_rows["row"].to_numpy()] = joined_rows["first"].to_numpy()
    # (row of a send, row of its receive): matched by sender, receiver, tag and sequence.
    keys = ["comm_src", "comm_dst", "comm_tag"]
    message_rows = rows.sort("start_ns", "row").select("row", "type", *keys)
    message_rows = message_rows.with_columns(
        pl.int_range(pl.len()).over("type", *keys).alias("turn")
    )
    sends, receives = (
        message_rows.filter(pl.col("type") == int(kind))
        for kind in (NodeType.COMM_SEND_NODE, NodeType.COMM_RECV_NODE)
    )
    messages = sends.join(receives, on=[*keys, "turn"]).select("row", "row_right").to_numpy()
    target = meets[np.concatenate([pairs[:, 0], messages[:, 1]])]
    source = meets[np.concatenate([pairs[:, 1], messages[:, 0]])]
    time = np.zeros(frame.height, np.int64)
    np.maximum.at(time, meets, frame["start_ns"].to_numpy())
    followers = target[np.argsort(source, kind="stable")].tolist()
    first: Any = np.concatenate(
        [[0], np.cumsum(np.bincount(source, minlength=frame.height))]
    ).tolist()
    waits: Any = np.bincount(target, minlength=frame.height).tolist()
    when: Any = time.tolist()
    ready = [(when[row], row) for row in range(frame.height) if not waits[row]]
    heapq.heapify(ready)
    position = np.full(frame.height, -1, np.int64)
    count = 0
    while ready:
        _, row = heapq.heappop(ready)
        position[row] = count
        count += 1
        for follower in followers[first[row] : first[row + 1]]:
            waits[follower] -= 1
            if not waits[follower]:
                heapq.heappush(ready, (when[follower], follower))
    positions: Ints = position[meets]
    return positions


def find_last_before(order: Ints, counts: Bools, pairs: Ints) -> Ints:
    """Returns, for every node, the highest position of a node in `counts` among all its direct and
    indirect dependencies.

    Args:
        order: From `compute_job_order`.
        counts: Which nodes count.
        pairs: (row, row that it waits for); the second one has the lower position, or neither has
            any.

    Returns:
        -1 where there is none.
    """
    last: list[int] = [-1] * len(order)
    counted_position = np.where(counts, order, -1).tolist()
    for row, awaited in pairs[np.argsort(order[pairs[:, 0]], kind="stable")].tolist():
        last[row] = max(last[row], counted_position[awaited], last[awaited])
    return np.array(last, np.int64)
