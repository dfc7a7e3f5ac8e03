"""The graph of one rank: what its threads and streams did, and what each thing waited for."""

from __future__ import annotations

import numpy as np
import polars as pl
from msgspec import Struct
from numpy.typing import NDArray

from traceloom.link.attached import Found, coverage_rows, late_notices
from traceloom.link.autograd import forward_backward_edges
from traceloom.link.calls import LAUNCHES, NO_LAUNCH
from traceloom.link.communication import Communication, communication
from traceloom.link.dataflow import DataFlow, data_edges, data_flow
from traceloom.link.device_work import DeviceWork, device_work
from traceloom.link.edges import Edges
from traceloom.link.full_device import occupancy_edges
from traceloom.link.full_queue import queue_edges
from traceloom.link.host_tree import HostTree, host_tree
from traceloom.link.launches import launch_edges
from traceloom.link.matching import Matching
from traceloom.link.order_of_work import WorkByTime
from traceloom.link.segments import Segments, segments
from traceloom.link.spins import Spins, spins
from traceloom.link.streams import stream_edges
from traceloom.link.sync_records import sync_records
from traceloom.link.syncs import Awaited, awaited
from traceloom.link.threads import HandOffs, hand_off_edges, hand_offs
from traceloom.link.waits import command_waits, wait_edges
from traceloom.model import Trace
from traceloom.model import graph_schema as gs
from traceloom.model.arrays import nullable
from traceloom.model.category import COPY
from traceloom.model.graph import Graph
from traceloom.model.graph_schema import GRAPH_SCHEMAS, empty_frame
from traceloom.plain_text import clean

Ints = NDArray[np.int64]


class Parts(Struct, frozen=True):
    """What the nodes of a rank are made of, and their numbers: the origin is 0, then segments, then GPU work.

    Attributes:
        tree: Host events.
        host: Their segments.
        kinds: Kind of each segment: number in NODE_KINDS.
        work: GPU work.
        talk: Which of the work, and which host events, are communication.
        segment_node: Node of each segment.
        work_node: Node of each work.
    """

    tree: HostTree
    host: Segments
    kinds: Ints
    work: DeviceWork
    talk: Communication
    segment_node: Ints
    work_node: Ints


def link_rank(trace: Trace, matching: Matching | None = None) -> Graph:
    """Link one process's trace into a graph.

    Args:
        trace: The device trace.
        matching: Which of its events are which ops of the host trace, where there is one.

    Returns:
        A graph of one rank, not calibrated: no delays, work as long as it took, nothing left over. Times start at 0,
        which is `trace.start_ns`.
    """
    tree = host_tree(trace)
    handovers = hand_offs(trace, tree, segments(tree))
    host = handovers.host
    work = device_work(trace, tree)
    times = WorkByTime(work, tree)
    records = sync_records(trace, tree)
    waiting = awaited(trace, tree, work, times, records)
    spinning = spins(trace, tree, host, times, handovers.waits)
    talk = communication(trace, tree, work)
    parts = Parts(
        tree=tree,
        host=host,
        kinds=_segment_kinds(tree, handovers, work, waiting, spinning, talk),
        work=work,
        talk=talk,
        segment_node=np.arange(1, host.owner.size + 1),
        work_node=np.arange(host.owner.size + 1, host.owner.size + 1 + work.row.size),
    )
    edges = Edges()
    _thread_edges(edges, parts)
    waits = np.zeros(tree.row.size, dtype=np.bool_)
    waits[waiting.call] = True
    launch_edges(edges, tree, work, waits, host, parts.segment_node, parts.work_node)
    overlapping = stream_edges(edges, work, parts.work_node)
    last_node = parts.segment_node[host.last]
    edges.add(
        "synchronize", waiting.evidence, parts.work_node[waiting.work], last_node[waiting.call],
        from_end=True, to_end=True,
    )  # fmt: skip
    wait_edges(edges, tree, times, parts.work_node, records)
    edges.add(
        "synchronize", "inferred", parts.work_node[spinning.work], parts.segment_node[spinning.segment],
        from_end=True, to_end=True,
    )  # fmt: skip
    held = command_waits(edges, trace, work, parts.work_node)
    queued = queue_edges(edges, tree, work, last_node, parts.work_node)
    hand_off_edges(edges, handovers, parts.segment_node)
    forward_backward_edges(edges, trace, tree, host, parts.segment_node)
    flow = None if matching is None else _data(parts, edges, matching)
    return _assembled(
        trace, parts, edges, Found(overlapping, queued, held, waiting.unknown, spinning.segment, flow=flow), matching
    )


def _data(parts: Parts, edges: Edges, matching: Matching) -> DataFlow:
    """Edges by storage, from what the host trace says of each op."""
    tree = parts.tree
    ids = np.asarray(matching.host_op, dtype=np.int64)[tree.row]
    flow = data_flow(tree, parts.host, parts.work, parts.segment_node, parts.work_node, ids, matching.host.ops)
    data_edges(edges, flow, matching.evidence)
    return flow


def _segment_kinds(  # noqa: PLR0917  (what was found about the segments)
    tree: HostTree, handovers: HandOffs, work: DeviceWork, waiting: Awaited, spinning: Spins, talk: Communication
) -> Ints:
    """Number of the kind of each segment: gaps think, calls launch or block, the rest is the host's own work."""
    host = handovers.host
    kinds = np.where(host.owner >= 0, gs.NODE_KINDS.index(gs.HOST), gs.NODE_KINDS.index(gs.THINK))
    submits = np.zeros(tree.row.size, dtype=np.bool_)
    submits[work.call[work.call >= 0]] = True
    call = np.flatnonzero(tree.call)
    submits[call[tree.named(LAUNCHES, call) & ~tree.named(NO_LAUNCH, call)]] = True
    kinds[handovers.waits] = gs.NODE_KINDS.index(gs.WAIT)
    kinds[host.first[submits]] = gs.NODE_KINDS.index(gs.LAUNCH)
    kinds[host.last[waiting.call]] = gs.NODE_KINDS.index(gs.BLOCK)
    kinds[host.last[waiting.calls]] = gs.NODE_KINDS.index(gs.BLOCK)
    kinds[spinning.segment] = gs.NODE_KINDS.index(gs.BLOCK)
    kinds[host.first[talk.host_event]] = gs.NODE_KINDS.index(gs.COLLECTIVE)
    return kinds


def _thread_edges(edges: Edges, parts: Parts) -> None:
    """Each segment after the one before it on its thread."""
    host, tree = parts.host, parts.tree
    index = np.flatnonzero(host.lane[1:] == host.lane[:-1])
    before, after = host.owner[index], host.owner[index + 1]
    low, high = np.minimum(before, after), np.maximum(before, after)
    nested = (low >= 0) & (low != high) & (high < tree.stop[low]) if tree.row.size else low > 0
    for kind, chosen in (("call", nested), ("thread", ~nested)):
        at = index[chosen]
        edges.add(
            kind, "measured", parts.segment_node[at], parts.segment_node[at + 1],
            from_end=True, to_end=False, firm=True,
        )  # fmt: skip


def _assembled(trace: Trace, parts: Parts, edges: Edges, observed: Found, matching: Matching | None) -> Graph:
    nodes, lanes = _nodes(trace, parts, observed.held, matching)
    times = _point_times(nodes)
    on_engines = (nodes["category"].gather(parts.work_node) == COPY).to_numpy()
    observed = observed._replace(late=occupancy_edges(edges, parts.work, ~on_engines, parts.work_node, times))
    frame, refused = edges.frame(times)
    meta = trace.meta
    ranks = pl.DataFrame(
        [
            {
                "rank": meta.rank or 0,
                "host": meta.host,
                "process": meta.process,
                "device_trace": clean(meta.path),
                "host_trace": None if matching is None else clean(matching.host.path),
                "window_start_ns": int(nodes["start_ns"][0]),
                "window_end_ns": int(times.max()),
                "clock_offset_ns": 0,
                "clock_drift": 0.0,
            }
        ],
        schema=GRAPH_SCHEMAS["ranks"],
    )
    coverage = coverage_rows(meta.rank or 0, parts, observed, refused)
    names = nodes["name"].gather(parts.work_node)
    late = late_notices(names, observed.late, int(times.max() - times[0]), meta.rank or 0)
    host_ops, notices = empty_frame("host_ops"), (*trace.notices, *late)
    if matching is not None:
        host_ops = _of_rank(matching.host.ops, meta.rank or 0, "host_ops")
        coverage = pl.concat([_of_rank(matching.coverage(), meta.rank or 0, "coverage"), coverage])
        notices = (*notices, *matching.notices)
    return Graph(
        nodes=nodes,
        edges=frame,
        lanes=lanes,
        communication=parts.talk.rows(parts),
        transfers=_transfers(trace, parts),
        ranks=ranks,
        coverage=coverage,
        host_ops=host_ops,
        name=clean(meta.path),
        epoch_ns=trace.start_ns,
        world_size=meta.world_size,
        notices=notices,
    )


def _point_times(nodes: pl.DataFrame) -> Ints:
    times = np.empty(2 * nodes.height, dtype=np.int64)
    times[0::2] = nodes["start_ns"].to_numpy()
    times[1::2] = (nodes["start_ns"] + nodes["duration_ns"]).to_numpy()
    return times


def _nodes(trace: Trace, parts: Parts, held: Ints, matching: Matching | None) -> tuple[pl.DataFrame, pl.DataFrame]:
    host, work, tree = parts.host, parts.work, parts.tree
    owned = host.owner >= 0
    row = np.full(host.owner.size, -1, dtype=np.int64)
    row[owned] = tree.row[host.owner[owned]]
    event = np.concatenate([[-1], row, work.row])
    start = np.concatenate([host.start, work.start])
    end = np.concatenate([host.end, work.end])
    first = int(start.min()) if start.size else trace.start_ns
    start, end = (np.concatenate([[first], times]) - trace.start_ns for times in (start, end))
    kind = np.concatenate([[gs.NODE_KINDS.index(gs.ORIGIN)], parts.kinds, _work_kinds(trace, parts, held)])
    lane, lanes = _lanes(trace, np.concatenate([[-1], host.lane, work.lane]))
    events = trace.events.select("name", "category", "op", "step", "correlation")
    row_of = nullable(event, pl.UInt32, absent=-1)
    frame = pl.DataFrame([column.gather(row_of) for column in events])
    is_op = frame["category"] == "op"
    labels = pl.Series(gs.NODE_KINDS, dtype=gs.NodeKind).gather(kind)
    nodes = frame.with_columns(
        pl.int_range(event.size, dtype=gs.Node).alias("node"),
        labels.alias("kind"),
        pl.col("name").fill_null(pl.Series(gs.NODE_KINDS).gather(kind)),
        pl.lit(trace.meta.rank or 0, dtype=pl.Int32).alias("rank"),
        nullable(lane, pl.UInt32, absent=-1).alias("lane"),
        pl.Series("start_ns", start),
        pl.Series("duration_ns", end - start),
        pl.Series("work_ns", end - start),
        pl.lit(0, dtype=pl.Int64).alias("residual_ns"),
        row_of.alias("event"),
        pl.when(is_op.fill_null(value=False)).then(row_of).otherwise(pl.col("op")).alias("op"),
        pl.coalesce(pl.col("step"), nullable(_step_at(trace, start), pl.Int32, absent=-1)).alias("step"),
        nullable(_bytes(trace, parts, event), absent=-1).alias("bytes"),
    )
    host_op = pl.Series("host_op", [None], dtype=pl.Int64).new_from_index(0, nodes.height)
    if matching is not None:
        ids = pl.Series("host_op", np.asarray(matching.host_op, dtype=np.int64)).replace(-1, None)
        host_op = ids.gather(nodes["op"].cast(pl.UInt32))
    nodes = nodes.with_columns(host_op)
    return nodes.select(list(GRAPH_SCHEMAS["nodes"])).cast(GRAPH_SCHEMAS["nodes"]), lanes


def _of_rank(frame: pl.DataFrame, rank: int, name: str) -> pl.DataFrame:
    """The rows of a frame of the graph, with their rank."""
    with_rank = frame.with_columns(pl.lit(rank, dtype=pl.Int32).alias("rank"))
    return with_rank.select(list(GRAPH_SCHEMAS[name])).cast(GRAPH_SCHEMAS[name])


def _step_at(trace: Trace, start: Ints) -> Ints:
    """The step at each time (since the trace's start) by the time it began; -1 outside the steps."""
    steps = trace.steps.sort("start_ns")
    if not steps.height:
        return np.full(start.size, -1, dtype=np.int64)
    time = start + trace.start_ns
    at = np.searchsorted(steps["start_ns"].to_numpy(), time, side="right") - 1
    inside = (at >= 0) & (time < steps["end_ns"].to_numpy()[at])
    return np.where(inside, steps["step"].to_numpy()[at], -1)


def _work_kinds(trace: Trace, parts: Parts, held: Ints) -> Ints:
    """Number of the kind of each work; commands that hold their stream wait."""
    of = {"kernel": gs.KERNEL, "copy": gs.COPY, "fill": gs.FILL}
    category = trace.events["category"].gather(parts.work.row)
    kinds = np.full(category.len(), gs.NODE_KINDS.index(gs.KERNEL))
    for name, kind in of.items():
        kinds[(category == name).to_numpy()] = gs.NODE_KINDS.index(kind)
    kinds[parts.talk.work] = parts.talk.work_kind
    kinds[held] = gs.NODE_KINDS.index(gs.WAIT)
    return kinds


def _bytes(trace: Trace, parts: Parts, event: Ints) -> Ints:
    """Bytes of copies, fills and communication; -1 unknown."""
    sizes = np.full(trace.events.height + 1, -1, dtype=np.int64)
    copies = trace.copies.drop_nulls("bytes")
    sizes[copies["event"].to_numpy()] = copies["bytes"].to_numpy()
    out = sizes[event]
    out[: parts.host.owner.size + 1] = -1
    node, amount = parts.talk.node_bytes(parts)
    out[node] = amount
    return out


def _transfers(trace: Trace, parts: Parts) -> pl.DataFrame:
    number = np.full(trace.events.height + 1, -1, dtype=np.int64)
    number[parts.work.row] = parts.work_node
    node = number[trace.copies["event"].to_numpy()]
    return (
        trace.copies.with_columns(pl.Series("node", node))
        .filter(pl.col("node") >= 0)
        .sort("node")
        .select("node", "kind", "source_memory", "target_memory")
        .cast(GRAPH_SCHEMAS["transfers"])
    )


def _lanes(trace: Trace, lane: Ints) -> tuple[Ints, pl.DataFrame]:
    """Lanes that hold nodes, numbered anew; -1 stays."""
    used = np.flatnonzero(np.bincount(lane[lane >= 0], minlength=trace.lanes.height))
    number = np.full(trace.lanes.height + 1, -1, dtype=np.int64)
    number[used] = np.arange(used.size)
    frame = (
        trace.lanes.filter(pl.col("lane").is_in(pl.Series(used.astype(np.uint32)).implode()))
        .sort("lane")
        .with_columns(
            pl.int_range(pl.len(), dtype=pl.UInt32).alias("lane"),
            pl.lit(trace.meta.rank or 0, dtype=pl.Int32).alias("rank"),
            pl.col("kind").cast(pl.String),
        )
        .select(list(GRAPH_SCHEMAS["lanes"]))
        .cast(GRAPH_SCHEMAS["lanes"])
    )
    return number[lane], frame
