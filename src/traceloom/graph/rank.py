"""The graph of one rank: the nodes of its threads and streams, and the edges between them."""

import numpy as np
import polars as pl
from msgspec import Struct

from traceloom.graph import graph as graph_schema
from traceloom.graph.communication import RankCommunication, find_communication
from traceloom.graph.dataflow import DataFlow, find_data_flow, forward_backward_edges
from traceloom.graph.device_edges import (
    MIN_NOTICED_SHARE,
    LateWork,
    add_command_waits,
    add_dependency_edges,
    add_launch_edges,
    add_occupancy_edges,
    add_queue_edges,
    add_stream_edges,
    wait_edges,
)
from traceloom.graph.device_work import (
    LAUNCHED_BY_OP,
    ORPHANS,
    DeviceWork,
    WorkTimeline,
    collect_device_work,
)
from traceloom.graph.edges import Edges
from traceloom.graph.graph import GRAPH_SCHEMAS, Graph, build_empty_frame
from traceloom.graph.host_match import Matching
from traceloom.graph.host_tree import (
    LAUNCHES,
    NOT_LAUNCHES,
    HostTree,
    Segments,
    build_host_tree,
    build_segments,
    separate_messages,
)
from traceloom.graph.syncs import find_awaited_work, find_spin_waits, sync_records
from traceloom.graph.threads import add_hand_off_edges, find_hand_offs, find_loader_waits
from traceloom.system.text import replace_surrogates
from traceloom.trace.array_types import Ints
from traceloom.trace.arrays import extract_column, to_nullable_series
from traceloom.trace.frames import cast_to_schema
from traceloom.trace.notice import Notice
from traceloom.trace.trace import Trace
from traceloom.trace.vocabulary import COMMAND, COPY, HOST_NODE

_MAX_NAME_CHARS = 60


class RankParts(Struct, frozen=True):
    """The parts that the nodes of a rank are made of, and the numbers of these nodes: the origin is
    0, then segments, then GPU work.

    Attributes:
        tree: Host events.
        host: Their segments.
        kinds: Kind of each segment: number in NODE_KINDS. Gaps think, calls launch or block, the
            rest is the host's own work.
        work: GPU work.
        communication: Which of the work, and which host events, are communication.
        segment_node: Node of each segment.
        work_node: Node of each work.
    """

    tree: HostTree
    host: Segments
    kinds: Ints
    work: DeviceWork
    communication: RankCommunication
    segment_node: Ints
    work_node: Ints


class EdgeCounts(Struct, frozen=True):
    """Counts of findings made while edges were added.

    Attributes:
        overlapping: Pairs of neighbours on one stream that overlap.
        queued: Launches that found their queue full.
        held: Numbers of commands that hold their stream until another's event.
        unknown: Positions of synchronising calls that took long although it is unknown what they
            waited for.
        spins: Segments in which the host polls memory until GPU work is done.
        flow: Data flow between ops; None without a host trace.
    """

    overlapping: int
    queued: int
    held: Ints
    unknown: Ints
    spins: Ints
    flow: DataFlow | None


def link_rank(trace: Trace, matching: Matching | None = None) -> Graph:
    """Links one process's trace into a graph.

    Args:
        trace: The device trace.
        matching: The host trace joined to it, where there is one.

    Returns:
        A graph of one rank, not calibrated: no delays, work equal to the durations, no residuals.
        Times start at 0, which is `trace.start_ns`.
    """
    trace = separate_messages(trace)
    tree = build_host_tree(trace)
    handovers = find_hand_offs(trace, tree, build_segments(tree))
    host = handovers.host
    work = collect_device_work(trace, tree)
    times = WorkTimeline(work, tree)
    records = sync_records(trace, tree)
    waiting = find_awaited_work(trace, tree, work, times, records)
    spinning, spun_on = find_spin_waits(trace, tree, host, times, handovers.waits)
    own_communication = find_communication(trace, tree, work, matching)
    submits = np.zeros(tree.row.size, dtype=np.bool_)
    submits[work.call[work.call >= 0]] = True
    call = np.flatnonzero(tree.call)
    submits[call[tree.named(LAUNCHES, call) & ~tree.named(NOT_LAUNCHES, call)]] = True
    kinds = np.where(
        host.owner >= 0,
        graph_schema.NODE_KINDS.index(graph_schema.HOST),
        graph_schema.NODE_KINDS.index(graph_schema.THINK),
    )
    kinds[handovers.waits] = graph_schema.NODE_KINDS.index(graph_schema.WAIT)
    kinds[host.first[submits]] = graph_schema.NODE_KINDS.index(graph_schema.LAUNCH)
    kinds[host.last[waiting.call]] = graph_schema.NODE_KINDS.index(graph_schema.BLOCK)
    kinds[host.last[waiting.calls]] = graph_schema.NODE_KINDS.index(graph_schema.BLOCK)
    kinds[spinning] = graph_schema.NODE_KINDS.index(graph_schema.BLOCK)
    kinds[host.first[own_communication.host_event]] = own_communication.host_kind
    parts = RankParts(
        tree=tree,
        host=host,
        kinds=kinds,
        work=work,
        communication=own_communication,
        segment_node=np.arange(1, host.owner.size + 1),
        work_node=np.arange(host.owner.size + 1, host.owner.size + 1 + work.row.size),
    )
    edges = Edges()
    # Each segment after the one before it on its thread.
    index = np.flatnonzero(host.lane[1:] == host.lane[:-1])
    before, after = host.owner[index], host.owner[index + 1]
    low, high = np.minimum(before, after), np.maximum(before, after)
    nested = (low >= 0) & (low != high) & (high < tree.stop[low]) if tree.row.size else low > 0
    for kind, follows in (("call", index[nested]), ("thread", index[~nested])):
        edges.add(
            kind,
            "measured",
            parts.segment_node[follows],
            parts.segment_node[follows + 1],
            from_end=True,
            to_end=False,
            firm=True,
        )
    waits = np.zeros(tree.row.size, dtype=np.bool_)
    waits[waiting.call] = True
    add_launch_edges(edges, tree, work, waits, host, parts.segment_node, parts.work_node)
    overlapping = add_stream_edges(edges, work, parts.work_node)
    last_node = parts.segment_node[host.last]
    edges.add(
        "synchronize",
        waiting.evidence,
        parts.work_node[waiting.work],
        last_node[waiting.call],
        from_end=True,
        to_end=True,
    )
    wait_edges(edges, tree, times, parts.work_node, records, communication=own_communication.work)
    add_dependency_edges(edges, trace, work, parts.work_node)
    edges.add(
        "synchronize",
        "inferred",
        parts.work_node[spun_on],
        parts.segment_node[spinning],
        from_end=True,
        to_end=True,
    )
    delayed = add_command_waits(edges, trace, work, parts.work_node)
    queued = add_queue_edges(edges, tree, work, last_node, parts.work_node)
    add_hand_off_edges(edges, handovers, parts.segment_node)
    loading = np.setdiff1d(find_loader_waits(trace, tree, host), handovers.waits)
    origin = np.zeros_like(loading)
    edges.add("origin", "inferred", origin, parts.segment_node[loading], from_end=True, to_end=True)
    forward_backward_edges(edges, trace, tree, host, parts.segment_node)
    flow = None
    if matching is not None:
        host_op = np.asarray(matching.host_op, dtype=np.int64)[tree.row]
        flow = find_data_flow(
            tree, host, work, parts.segment_node, parts.work_node, host_op, matching.host.ops
        )
        edges.add("data", matching.evidence, flow.source, flow.target, from_end=True, to_end=False)
    return _assemble_graph(
        trace,
        parts,
        edges,
        EdgeCounts(overlapping, queued, delayed, waiting.unknown, spinning, flow),
        matching,
    )


def _assemble_graph(
    trace: Trace, parts: RankParts, edges: Edges, edge_counts: EdgeCounts, matching: Matching | None
) -> Graph:
    """Assembles the graph from its nodes and edges; waits for room on the device are found last,
    since they depend on all other edges.
    """
    meta, rank, work_node = trace.meta, trace.meta.rank or 0, parts.work_node
    nodes, lanes = _build_nodes(trace, parts, edge_counts.held, matching)
    times = np.empty(2 * nodes.height, dtype=np.int64)
    times[0::2] = nodes["start_ns"].to_numpy()
    times[1::2] = (nodes["start_ns"] + nodes["duration_ns"]).to_numpy()
    on_engines = (nodes["category"][work_node] == COPY).to_numpy()
    late = add_occupancy_edges(edges, parts.work, ~on_engines, work_node, times)
    frame, refused = edges.frame(times)
    ranks = pl.DataFrame(
        [
            {
                "rank": rank,
                "host": meta.host,
                "process": meta.process,
                "device_trace": replace_surrogates(meta.path),
                "host_trace": None if matching is None else replace_surrogates(matching.host.path),
                "window_start_ns": int(nodes["start_ns"][0]),
                "window_end_ns": int(times.max()),
                "clock_offset_ns": 0,
                "clock_drift": 0.0,
            }
        ],
        schema=GRAPH_SCHEMAS["ranks"],
    )
    copy_node = np.full(trace.events.height + 1, -1, dtype=np.int64)
    copy_node[parts.work.row] = work_node
    copied = copy_node[trace.copies["event"].to_numpy()]
    order = np.argsort(copied, kind="stable")
    order = order[copied[order] >= 0]
    transfers = trace.copies[order].hstack([pl.Series("node", copied[order])])
    coverage = _build_coverage(rank, parts, edge_counts, late, refused)
    names = nodes["name"][work_node]
    notices = (*trace.notices, *_build_late_notices(names, late, int(times.max() - times[0]), rank))
    host_ops = build_empty_frame("host_ops")
    if matching is not None:
        rank_column = pl.lit(rank, dtype=pl.Int32).alias("rank")
        schema = GRAPH_SCHEMAS["host_ops"]
        host_ops = matching.host.ops.with_columns(rank_column).pipe(cast_to_schema, schema)
        coverage = pl.concat([matching.coverage().with_columns(rank_column), coverage])
        notices = (*notices, *matching.notices)
    return Graph(
        nodes=nodes,
        edges=frame,
        lanes=lanes,
        communication=parts.communication.rows(parts),
        transfers=transfers.pipe(cast_to_schema, GRAPH_SCHEMAS["transfers"]),
        ranks=ranks,
        coverage=coverage,
        host_ops=host_ops,
        name=replace_surrogates(meta.path),
        epoch_ns=trace.start_ns,
        world_size=meta.world_size,
        notices=notices,
    )


def _build_nodes(
    trace: Trace, parts: RankParts, delayed: Ints, matching: Matching | None
) -> tuple[pl.DataFrame, pl.DataFrame]:
    """Returns the `nodes` and `lanes` of a rank; commands that hold their stream (`delayed`)
    wait.
    """
    host, work, tree = parts.host, parts.work, parts.tree
    owned = host.owner >= 0
    row = np.full(host.owner.size, -1, dtype=np.int64)
    row[owned] = tree.row[host.owner[owned]]
    event = np.concatenate([[-1], row, work.row])
    start = np.concatenate([host.start, work.start])
    end = np.concatenate([host.end, work.end])
    first = int(start.min()) if start.size else trace.start_ns
    start, end = (np.concatenate([[first], times]) - trace.start_ns for times in (start, end))
    category = trace.events["category"][work.row]
    work_kind = np.full(category.len(), graph_schema.NODE_KINDS.index(graph_schema.KERNEL))
    for name, node_kind in (
        ("kernel", graph_schema.KERNEL),
        ("copy", graph_schema.COPY),
        ("fill", graph_schema.FILL),
    ):
        work_kind[(category == name).to_numpy()] = graph_schema.NODE_KINDS.index(node_kind)
    calls_host = category == COMMAND
    if calls_host.any():
        calls_host &= trace.events["name"].gather(work.row).str.starts_with(HOST_NODE)
        work_kind[calls_host.to_numpy()] = graph_schema.NODE_KINDS.index(graph_schema.HOST)
    work_kind[parts.communication.work] = parts.communication.work_kind
    work_kind[delayed] = graph_schema.NODE_KINDS.index(graph_schema.WAIT)
    kind = np.concatenate(
        [[graph_schema.NODE_KINDS.index(graph_schema.ORIGIN)], parts.kinds, work_kind]
    )
    # lanes that hold nodes, numbered anew; -1 stays
    lane = np.concatenate([[-1], host.lane, work.lane])
    used = np.flatnonzero(np.bincount(lane[lane >= 0], minlength=trace.lanes.height))
    number = np.full(trace.lanes.height + 1, -1, dtype=np.int64)
    number[used] = np.arange(used.size)
    lanes = (
        trace.lanes[used]
        .with_columns(
            pl.int_range(pl.len(), dtype=pl.UInt32).alias("lane"),
            pl.lit(trace.meta.rank or 0, dtype=pl.Int32).alias("rank"),
            pl.col("kind").cast(pl.String),
        )
        .pipe(cast_to_schema, GRAPH_SCHEMAS["lanes"])
    )
    # The step by the time at which a node began; -1 outside the steps.
    step = np.full(start.size, -1, dtype=np.int64)
    steps = trace.steps.sort("start_ns")
    if steps.height:
        time = start + trace.start_ns
        index = np.searchsorted(steps["start_ns"].to_numpy(), time, side="right") - 1
        in_step = (index >= 0) & (time < steps["end_ns"].to_numpy()[index])
        step = np.where(in_step, steps["step"].to_numpy()[index], -1)
    # Bytes of copies, fills and communication; -1 unknown.
    sizes = np.full(trace.events.height + 1, -1, dtype=np.int64)
    copies = trace.copies.drop_nulls("bytes")
    sizes[copies["event"].to_numpy()] = copies["bytes"].to_numpy()
    sizes = sizes[event]
    sizes[: host.owner.size + 1] = -1
    sent_bytes = extract_column(parts.communication.about, "in_bytes", absent=-1, large=False)
    sizes[parts.communication.nodes(parts)] = sent_bytes
    events = trace.events[["name", "category", "op", "step", "correlation"]]
    row_of = to_nullable_series(event, pl.UInt32, absent=-1)
    frame = pl.DataFrame([column[row_of] for column in events])
    nodes = frame.with_columns(
        pl.int_range(event.size, dtype=graph_schema.Node).alias("node"),
        pl.Series(graph_schema.NODE_KINDS, dtype=graph_schema.NodeKind)[kind].alias("kind"),
        pl.col("name").fill_null(pl.Series(graph_schema.NODE_KINDS)[kind]),
        pl.lit(trace.meta.rank or 0, dtype=pl.Int32).alias("rank"),
        to_nullable_series(number[lane], pl.UInt32, absent=-1).alias("lane"),
        pl.Series("start_ns", start),
        pl.Series("duration_ns", end - start),
        pl.Series("work_ns", end - start),
        pl.lit(0, dtype=pl.Int64).alias("residual_ns"),
        row_of.alias("event"),
        pl.when(pl.col("category") == "op").then(row_of).otherwise(pl.col("op")).alias("op"),
        pl.coalesce(pl.col("step"), to_nullable_series(step, pl.Int32, absent=-1)).alias("step"),
        to_nullable_series(sizes, absent=-1).alias("bytes"),
    )
    host_op = pl.Series("host_op", [None], dtype=pl.Int64).new_from_index(0, nodes.height)
    if matching is not None:
        ids = pl.Series("host_op", np.asarray(matching.host_op, dtype=np.int64)).replace(-1, None)
        host_op = ids.gather(nodes["op"].cast(pl.UInt32))
    return nodes.with_columns(host_op).pipe(cast_to_schema, GRAPH_SCHEMAS["nodes"]), lanes


def _build_coverage(
    rank: int, parts: RankParts, edge_counts: EdgeCounts, late: LateWork, refused: pl.DataFrame
) -> pl.DataFrame:
    """Returns the `coverage` rows of a rank, except those of its host trace.

    Args:
        rank: The rank.
        parts: The parts of its nodes.
        edge_counts: Counts made while edges were added.
        late: Work that started long after it was ready.
        refused: Edges that contradict the order of others: kind, count.
    """
    work, host = parts.work, parts.host
    span = work.end - work.start
    rows: list[tuple[str, str, int, int | None]] = []
    launched = work.call >= 0
    outcomes = (
        ("attached by correlation", launched & work.correlated),
        ("attached by arrow", launched & ~work.correlated),
        ("attached to its op by External id", work.orphans == LAUNCHED_BY_OP),
        *((reason, work.orphans == code) for code, reason in enumerate(ORPHANS)),
    )
    for subject, is_subject in (("gpu-work", ~work.command), ("device-commands", work.command)):
        for outcome, matches_outcome in outcomes:
            counted = matches_outcome & is_subject
            if counted.any():
                rows.append((subject, outcome, int(counted.sum()), int(span[counted].sum())))
    submitted = np.unique(work.call[launched]).size
    is_launch = parts.kinds == graph_schema.NODE_KINDS.index(graph_schema.LAUNCH)
    rows.append(("launches", "with GPU work", submitted, None))
    without_work_count = int(is_launch.sum()) - int(
        is_launch[host.first[np.unique(work.call[launched])]].sum()
    )
    if without_work_count:
        rows.append(("launches", "without GPU work in the window", without_work_count, None))
    if edge_counts.overlapping:
        rows.append(("streams", "neighbours that overlap", edge_counts.overlapping, None))
    if edge_counts.queued:
        rows.append(("launches", "held up by a full queue", edge_counts.queued, None))
    if edge_counts.flow is not None:
        rows.append(
            ("data", "edges from the last writer of a storage", edge_counts.flow.source.size, None)
        )
        rows.append(
            (
                "data",
                "reads of what was written before the window, or nowhere",
                edge_counts.flow.unplaced,
                None,
            )
        )
        rows.append(
            ("data", "reads before their writer had ended: no edge", edge_counts.flow.late, None)
        )
    if late.crowded:
        rows.append(("streams", "work that waited for room on the device", late.crowded, None))
    if late.before.size:
        waited = int(late.before_ns.sum())
        rows.append(
            ("streams", "work behind what was launched before the window", late.before.size, waited)
        )
    if late.unexplained.size:
        waited = int(late.waited_ns.sum())
        rows.append(
            ("streams", "work that waited for nothing recorded", late.unexplained.size, waited)
        )
    if edge_counts.unknown.size:
        total_ns = int(parts.tree.span()[edge_counts.unknown].sum())
        rows.append(
            (
                "synchronisations",
                "long, and not known what was awaited",
                edge_counts.unknown.size,
                total_ns,
            )
        )
    if edge_counts.spins.size:
        total_ns = int((host.end - host.start)[edge_counts.spins].sum())
        rows.append(
            (
                "synchronisations",
                "self time that ends with the work launched before it",
                edge_counts.spins.size,
                total_ns,
            )
        )
    lengths = host.end - host.start
    gaps = host.owner < 0
    rows.append(("host-time", "in recorded events", int((~gaps).sum()), int(lengths[~gaps].sum())))
    rows.append(("host-time", "in gaps between them", int(gaps.sum()), int(lengths[gaps].sum())))
    if parts.tree.polling:
        rows.append(
            (
                "host-time",
                "left out: threads that only poll",
                parts.tree.polling,
                parts.tree.polling_ns,
            )
        )
    rows += [
        ("edges", f"left out: {kind} against the order of others", count, None)
        for kind, count in refused.rows()
    ]
    return pl.DataFrame(
        [(rank, *row) for row in rows], schema=GRAPH_SCHEMAS["coverage"], orient="row"
    )


def _build_late_notices(
    names: pl.Series, late: LateWork, window_ns: int, rank: int
) -> list[Notice]:
    """Returns a notice where much of the window is spent before GPU work that nothing recorded
    holds back.

    Args:
        names: Name of each work.
        late: The work that waited.
        window_ns: Length of the rank's window.
        rank: The rank.
    """
    min_noticed_ns = MIN_NOTICED_SHARE * max(window_ns, 1)
    notices = []
    longest = int(late.before_ns.max(initial=0))
    if longest >= min_noticed_ns:
        text = (
            f"for {longest / 1e6:.1f} ms ({100 * longest / window_ns:.0f} % of the window) the device did nothing that "
            "is recorded, though work had been launched: it was behind what lies before the window; "
            "that time is taken as given"
        )
        notices.append(Notice("busy-before-window", "warning", text, int(late.before.size), rank))
    total = int(late.waited_ns.sum())
    if total < min_noticed_ns:
        return notices
    worst = int(np.argmax(late.waited_ns))
    name, waited = (
        names[int(late.unexplained[worst])][:_MAX_NAME_CHARS],
        late.waited_ns[worst] / 1e6,
    )
    text = (
        f"{late.unexplained.size} pieces of GPU work started {total / 1e6:.1f} ms in all after everything that is "
        f"known to hold them back ({name}: {waited:.1f} ms); "
        "re-timing from causes alone misses that time"
    )
    return [
        *notices,
        Notice("unexplained-starts", "warning", text, int(late.unexplained.size), rank),
    ]
