"""CUDA graph replays, and their kernels joined to the operators of a second recording.

Definitions: docs/concepts/graph-launches.md and docs/concepts/inference.md.

A replay only has the call that launched it. The recording of the capture (or of the same model run
eagerly) has, for each kernel in the same order, the operator that launched it.
"""

from dataclasses import dataclass

import numpy as np
import polars as pl
from msgspec import Struct
from numpy.typing import NDArray

from traceloom.analyze.gpu_work import (
    build_host_event_index,
    collect_launched_work,
    convert_to_ndarray,
)
from traceloom.analyze.names import build_vocabulary
from traceloom.analyze.repeats import find_occurrences
from traceloom.formats.arguments import (
    can_reread_events,
    read_all_arguments,
    read_numeric_arguments,
)
from traceloom.trace.array_types import Ints
from traceloom.trace.arrays import find_longest_increasing_subsequence, to_nullable_series
from traceloom.trace.frames import Result, build_schema, cast_to_schema
from traceloom.trace.session import Session
from traceloom.trace.trace import Trace
from traceloom.trace.vocabulary import KERNEL, LAUNCHES

GRAPH_CALLS = r"(?i)graph_?launch"
_DEVIATION_FACTOR = 1.1  # a replay deviates when its span is this many times the median ...
_MIN_DEVIATIONS = 5  # ... and this many median absolute deviations above it
_MIN_REPLAYS = 3  # replays for a spread
_MIN_COMMON_SHARE = 0.8  # share of nodes that two graphs have in common
_MAX_COMPARED = 64  # graphs that are compared with each other

_MEDIANS = ("work_median_ns", "idle_median_ns", "call_median_ns")
GRAPHS = build_schema(
    "graph graph_id evidence launch_name replay_count node_count stream_count span_median_ns span_min_ns span_max_ns",
    *_MEDIANS,
    "total_ns deviating_count like",
    {"evidence": pl.Enum(["correlated", "inferred"])},
)
REPLAYS = build_schema(
    "graph replay launch step start_ns span_ns work_ns idle_ns",
    "call_ns delay_ns node_count deviation worst_node worst_excess_ns",
)
NODES = build_schema(
    "graph node node_id name replay_count mean_ns min_ns max_ns total_ns gap_mean_ns example"
)
# Identity of a node: its id where there is one, else position and name
_NODE_KEYS = [
    "graph",
    "node_id",
    "place",
    "code",
]


@dataclass(frozen=True)
class GraphLaunches(Result):
    """Graph launches of one trace.

    Attributes:
        graphs: One row per graph, by first launch: graph (a number from 0), graph_id (the
            recorder's; null where there is none), evidence (correlated: replays are joined by graph
            id; inferred: by the sequence of names), launch_name, replay_count, node_count (of most
            replays), stream_count, then over replays median, min and max of span (first start to
            last end), medians of work (sum of durations), idle (time of the span in which nothing
            of the replay runs) and of the call; total_ns (work of all replays), deviating_count,
            like (the graph of more replays that shares at least 80 % of its nodes; null without
            one).
        replays: One row per launch: graph, replay (its number within the graph), launch (row of the
            call), step, start_ns (of the first work), span_ns, work_ns, idle_ns, call_ns, delay_ns
            (start - end of the call, at least 0), node_count, deviation (in words; null where it is
            as the others), worst_node (the node that is most above its median over the replays,
            null where none is) and worst_excess_ns (by how much).
        nodes: One row per graph and node: node (position), node_id (the recorder's), name,
            replay_count, mean_ns, min_ns, max_ns and total_ns of its work, gap_mean_ns (time before
            it in which nothing of the replay ran), example (row of its work in the first replay
            that has it). The totals of a graph add up to its `total_ns`.
        work_count: GPU work of graph launches.
        fraction: Its share of the summed durations of all GPU work; None without GPU work.
    """

    graphs: pl.DataFrame
    replays: pl.DataFrame
    nodes: pl.DataFrame
    work_count: int
    fraction: float | None


class _LaunchedWork(Struct, frozen=True):
    """Work of graph launches, by launch, then start; `replay` numbers the launches by row."""

    row: Ints
    replay: Ints
    start: Ints
    length: Ints
    gap: Ints  # time before it in which nothing of its replay ran; 0 for the first of a replay
    stream: Ints
    code: Ints
    launch: Ints  # of each replay
    call_start: Ints  # of each replay
    call_end: Ints  # of each replay
    first: Ints  # where each replay begins
    all_ns: int  # summed time of all GPU work


class _AlignedReplays(Struct, frozen=True):
    """Replays aligned with each other; `graph`, `graph_id` and `sequence` per replay."""

    work: _LaunchedWork
    graph: Ints
    graph_id: Ints
    sequence: NDArray[np.uint64]
    placed: pl.DataFrame


def graph_launches(trace: Trace) -> GraphLaunches:
    """Finds the graph launches and aligns their replays."""
    aligned = _align_replays(trace)
    work_ns, all_ns = int(aligned.work.length.sum()), aligned.work.all_ns
    fraction = work_ns / all_ns if all_ns else None
    if not aligned.work.launch.size:
        graphs, replays, nodes = (
            pl.DataFrame(schema=columns) for columns in (GRAPHS, REPLAYS, NODES)
        )
        return GraphLaunches(graphs, replays, nodes, 0, fraction)
    aligned_nodes = _summarize_nodes(trace, aligned.placed)
    replays = _build_replays(trace, aligned, aligned_nodes)
    nodes = aligned_nodes.pipe(cast_to_schema, NODES)
    graphs = _summarize_graphs(trace, aligned, replays)
    graphs = graphs.with_columns(
        pl.Series("like", _find_similar_graphs(graphs, nodes), dtype=pl.UInt32)
    )
    return GraphLaunches(graphs, replays, nodes, aligned.work.row.size, fraction)


def list_replayed_work(trace: Trace) -> pl.DataFrame:
    """Returns the GPU work of graph launches: event, launch (row of the call), graph and node as in
    `graph_launches`.
    """
    aligned = _align_replays(trace)
    nodes = _summarize_nodes(trace, aligned.placed)
    node_numbers = nodes.select(pl.col("own_id").alias("node_id"), "graph", "place", "code", "node")
    return aligned.placed.join(
        node_numbers, on=_NODE_KEYS, how="left", maintain_order="left"
    ).select(pl.col("row").alias("event"), "launch", "graph", "node")


def _align_replays(trace: Trace) -> _AlignedReplays:
    submitted = collect_launched_work(trace)
    vocabulary = build_vocabulary(trace)
    called = vocabulary.matching(GRAPH_CALLS)
    known_rows = np.flatnonzero(submitted.known)
    known_rows = known_rows[
        called[convert_to_ndarray(vocabulary.code)[submitted.launch[known_rows]]]
    ]
    known_rows = known_rows[np.lexsort((submitted.start[known_rows], submitted.launch[known_rows]))]
    launch, first, replay = np.unique(
        submitted.launch[known_rows], return_index=True, return_inverse=True
    )
    start, end, row = (
        submitted.start[known_rows],
        submitted.end[known_rows],
        submitted.row[known_rows],
    )
    # Replays one after the other on a clock that restarts with each, so that none reaches into the
    # next.
    zero = start[first][replay]
    shift = replay * (int((end - zero).max(initial=0)) + 1) - zero
    reach = np.maximum.accumulate(end + shift)
    gap = np.maximum(start + shift - np.append(0, reach[:-1])[: start.size], 0)
    gap[first] = 0
    work = _LaunchedWork(
        row=row,
        replay=replay,
        start=start,
        length=end - start,
        gap=gap,
        stream=submitted.lane[known_rows],
        code=convert_to_ndarray(vocabulary.code)[row].astype(np.int64),
        launch=launch,
        call_start=submitted.call_start[known_rows[first]],
        call_end=submitted.call_end[known_rows[first]],
        first=first,
        all_ns=int((submitted.end - submitted.start).sum()),
    )
    graph_id, node_id = _read_graph_ids(trace, work)
    order = np.lexsort((work.start, work.stream, work.replay))
    position = np.empty(order.size, dtype=np.int64)
    position[order] = np.arange(order.size) - work.first[work.replay[order]]
    # One number per replay for its names in order: equal for equal sequences.
    with np.errstate(over="ignore"):
        mixed = work.code.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15) + position.astype(
            np.uint64
        )
        for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
            mixed = (mixed ^ (mixed >> np.uint64(shift))) * np.uint64(factor)
        sequence = np.zeros(work.launch.size, dtype=np.uint64)
        np.add.at(sequence, work.replay, mixed ^ (mixed >> np.uint64(31)))
    has_id = graph_id >= 0
    # Numbers of graphs in the order of their first launch.
    key = np.where(has_id, graph_id, -1 - np.unique(sequence, return_inverse=True)[1])
    _, first, graph = np.unique(key, return_index=True, return_inverse=True)
    graph = np.argsort(np.argsort(first, kind="stable"), kind="stable")[graph]
    node_id = np.where(has_id[work.replay], node_id, -1)
    placed = pl.DataFrame(
        {
            "graph": graph[work.replay],
            "launch": work.launch[work.replay],
            "node_id": node_id,
            "place": np.where(node_id < 0, position, -1),
            "code": np.where(node_id < 0, work.code, -1),
            "at": position,
            "row": work.row,
            "length": work.length,
            "gap": work.gap,
        }
    ).cast({"graph": pl.UInt32, "launch": pl.UInt32})
    return _AlignedReplays(work, graph, graph_id, sequence, placed)


def _read_graph_ids(trace: Trace, work: _LaunchedWork) -> tuple[Ints, Ints]:
    """Returns the graph id of each replay and the node id of each piece, where the recorder wrote
    them; -1 elsewhere.
    """
    graph_id = np.full(work.launch.size, -1, dtype=np.int64)
    node_id = np.full(work.row.size, -1, dtype=np.int64)
    launch_names = trace.events["name"][work.launch]
    if (
        not work.row.size
        or launch_names.str.starts_with("hip").all()
        or not can_reread_events(trace)
    ):
        return graph_id, node_id
    order = np.argsort(work.row, kind="stable")
    read = read_numeric_arguments(
        trace, work.row[order], {"graph": "graph id", "node": "graph node id"}
    )
    ids = np.full((2, work.row.size), -1, dtype=np.int64)
    for values, name in zip(ids, ("graph", "node"), strict=True):
        values[order] = read[name].cast(pl.Int64, strict=False).fill_null(0).to_numpy()
    graph_id[:] = ids[0][work.first]
    graph_id[graph_id <= 0] = -1
    node_id[:] = np.where(ids[1] > 0, ids[1], -1)
    return graph_id, node_id


def _summarize_nodes(trace: Trace, placed: pl.DataFrame) -> pl.DataFrame:
    """Returns the nodes of every graph in their order, with their identity and their median."""
    length = pl.col("length")
    added = (
        placed.group_by(_NODE_KEYS)
        .agg(
            pl.col("at").min(),
            pl.col("row").min().alias("example"),
            pl.len().alias("replay_count"),
            length.mean().round().alias("mean_ns"),
            length.median().alias("median"),
            length.min().alias("min_ns"),
            length.max().alias("max_ns"),
            length.sum().alias("total_ns"),
            pl.col("gap").mean().round().alias("gap_mean_ns"),
        )
        .sort("graph", "at", "replay_count", "example", descending=[False, False, True, False])
        .with_columns(
            pl.int_range(pl.len()).over("graph").alias("node"),
            pl.when(pl.col("node_id") >= 0).then("node_id").alias("id"),
        )
    )
    named_nodes = added.with_columns(trace.events["name"][added["example"]].alias("name"))
    return named_nodes.rename({"node_id": "own_id", "id": "node_id"})


def _build_replays(trace: Trace, laid: _AlignedReplays, nodes: pl.DataFrame) -> pl.DataFrame:
    work, graph = laid.work, laid.graph
    start, node_count = work.start[work.first], np.diff(np.append(work.first, work.row.size))
    frame = pl.DataFrame(
        {
            "graph": graph,
            "launch": work.launch,
            "step": trace.events["step"][work.launch],
            "start_ns": start,
            "span_ns": np.maximum.reduceat(work.start + work.length, work.first) - start,
            "work_ns": np.add.reduceat(work.length, work.first),
            "idle_ns": np.add.reduceat(work.gap, work.first),
            "call_ns": work.call_end - work.call_start,
            "delay_ns": np.maximum(start - work.call_end, 0),
            "node_count": node_count,
            "sequence": laid.sequence,
        }
    )
    # The most frequent sequence of each graph; of equally frequent ones the first.
    counted = (
        frame.with_row_index("at")
        .group_by("graph", "sequence")
        .agg(
            pl.len().alias("often"),
            pl.col("at").min(),
            pl.col("node_count").last().alias("usual_nodes"),
        )
    )
    typical = counted.sort("graph", "often", "at", descending=[False, True, False]).unique(
        "graph", keep="first"
    )
    typical = typical.select("graph", "usual_nodes", usual="sequence")
    middle = pl.col("span_ns").median().over("graph")
    spread = (pl.col("span_ns") - middle).abs().median().over("graph")
    longer = (pl.col("span_ns") > middle * _DEVIATION_FACTOR) & (
        pl.col("span_ns") > middle + _MIN_DEVIATIONS * spread
    )
    enough = pl.len().over("graph") >= _MIN_REPLAYS
    times = (pl.col("span_ns") / middle).round(2).cast(pl.String)
    other = pl.col("sequence") != pl.col("usual")
    fewer = pl.format("{} nodes instead of {}", "node_count", "usual_nodes")
    deviation = (
        pl.when(other & (pl.col("node_count") != pl.col("usual_nodes")))
        .then(fewer)
        .when(other)
        .then(pl.lit("other nodes"))
        .when(longer & enough)
        .then(pl.format("{} times as long as the median", times))
    )
    # For each replay the node that is most above its median.
    medians = nodes.select(
        pl.col("own_id").alias("node_id"), "graph", "place", "code", "node", "median"
    )
    excess = (pl.col("length") - pl.col("median")).floor()
    worst = (
        laid.placed.join(medians, on=_NODE_KEYS, how="left")
        .with_columns(excess.alias("worst_excess_ns"))
        .filter(pl.col("worst_excess_ns") > 0)
        .sort("worst_excess_ns", "node", descending=[True, False])
        .unique(["graph", "launch"], keep="first", maintain_order=True)
        .select("graph", "launch", pl.col("node").alias("worst_node"), "worst_excess_ns")
    )
    return (
        frame.join(typical, on="graph", how="left", maintain_order="left")
        .with_columns(deviation.alias("deviation"))
        .sort("graph", "launch")
        .with_columns(pl.int_range(pl.len()).over("graph").alias("replay"))
        .cast({"graph": pl.UInt32, "launch": pl.UInt32})
        .join(worst, on=["graph", "launch"], how="left", maintain_order="left")
        .pipe(cast_to_schema, REPLAYS)
    )


def _summarize_graphs(trace: Trace, laid: _AlignedReplays, replays: pl.DataFrame) -> pl.DataFrame:
    """Returns the columns of `GRAPHS` except `like`."""
    span, schema = (
        pl.col("span_ns"),
        pl.Schema({name: kind for name, kind in GRAPHS.items() if name != "like"}),
    )
    added = replays.group_by("graph").agg(
        pl.len().alias("replay_count"),
        pl.col("node_count").mode().min(),
        span.min().alias("span_min_ns"),
        span.max().alias("span_max_ns"),
        *(
            pl.col(f"{name}_ns").median().floor().alias(f"{name}_median_ns")
            for name in ("span", "work", "idle", "call")
        ),
        pl.col("work_ns").sum().alias("total_ns"),
        pl.col("deviation").is_not_null().sum().alias("deviating_count"),
        pl.col("launch").first(),
    )
    work, graph = laid.work, pl.Series("graph", laid.graph, dtype=pl.UInt32)
    ids = pl.DataFrame([graph, pl.Series("graph_id", laid.graph_id)]).unique("graph", keep="first")
    streams = pl.DataFrame([graph[work.replay], pl.Series("stream", work.stream)])
    streams = streams.group_by("graph").agg(pl.col("stream").n_unique().alias("stream_count"))
    rows = added.join(ids, on="graph").join(streams, on="graph").sort("graph")
    has_id = pl.col("graph_id") >= 0
    return rows.with_columns(
        pl.when(has_id).then("graph_id").alias("graph_id"),
        pl.when(has_id).then(pl.lit("correlated")).otherwise(pl.lit("inferred")).alias("evidence"),
        trace.events["name"][rows["launch"]].alias("launch_name"),
    ).pipe(cast_to_schema, schema)


def _find_similar_graphs(graphs: pl.DataFrame, nodes: pl.DataFrame) -> list[int | None]:
    """Returns for each graph the one of more replays (or more nodes) whose names are nearly the
    same; few graphs only.
    """
    ordered = graphs.sort("replay_count", "node_count", "graph", descending=[True, True, False])[
        "graph"
    ].to_list()
    if len(ordered) > _MAX_COMPARED:
        return [None] * graphs.height
    names = {
        graph: dict(part.group_by("name").len().iter_rows())
        for (graph,), part in nodes.select("graph", "name").group_by("graph")
    }
    like: dict[int, int] = {}
    for index, graph in enumerate(ordered):
        for other in ordered[:index]:
            shared = sum(
                min(count, names[other].get(name, 0)) for name, count in names[graph].items()
            )
            max_nodes = max(sum(names[graph].values()), sum(names[other].values()))
            if shared >= _MIN_COMMON_SHARE * max_nodes:
                like[graph] = other
                break
    return [like.get(graph) for graph in graphs["graph"].to_list()]


_LAUNCH_CALL = r"(?i)launch.*kernel|kernel.*launch"
_BEGIN_CAPTURE, _END_CAPTURE = r"(?i)StreamBeginCapture", r"(?i)StreamEndCapture"
_MIN_JOINED_SHARE = 0.5  # of a graph's nodes must be joined, else the capture is of other work
_MAX_CAPTURES = 64  # captures of one recording that are tried

MAPPED_NODES_SCHEMA = build_schema(
    "graph node name replay_count total_ns op op_name module evidence reason",
    {"op": pl.UInt32, "evidence": pl.Enum(["correlated", "inferred"])},
)
"""Nodes of graphs with the operator that launched the same kernel in the capture: op (row of the
CAPTURE's events), its name, the module around it; evidence (correlated: the whole graph's names
occur in the capture in this order; inferred: an alignment in order), reason (why there is no
operator).
"""


def select_rank_trace(capture: Session | Trace | None, trace: Trace) -> Trace | None:
    """Returns of a recorded session the trace of the same rank, else its first."""
    if capture is None or isinstance(capture, Trace):
        return capture
    return next(
        (candidate for candidate in capture.traces if candidate.rank == trace.rank),
        capture.traces[0],
    )


def map_nodes(
    graph_launches: GraphLaunches, capture: Trace, *, launches: bool = False
) -> pl.DataFrame:
    """Returns the nodes of all graphs with the operators of the capture: `MAPPED`.

    With `launches` also `kernel`: the capture's event of that kernel, or the call that captured it.
    """
    shape = pl.Schema({**MAPPED_NODES_SCHEMA, **({"kernel": pl.UInt32()} if launches else {})})
    # The launches of the capture: its kernels, else, where nothing ran, the launch calls that name
    # their kernel.
    events = capture.events
    kernels = events.filter(pl.col("category") == KERNEL, pl.col("launch").is_not_null())
    # Replays of graphs have no operator here either.
    kernels = kernels.filter(~events["name"].gather(kernels["launch"]).str.contains(GRAPH_CALLS))
    call_start = events["start_ns"].gather(kernels["launch"])
    order = np.lexsort((kernels["start_ns"].to_numpy(), call_start.to_numpy()))
    kernels = kernels[order].select(
        "name", "launch", "event", pl.col("op").cast(pl.Int64).fill_null(-1)
    )
    calls = events.filter(pl.col("category").is_in(LAUNCHES))
    capture_start, end = (
        calls.filter(pl.col("name").str.contains(name))["start_ns"].to_numpy()
        for name in (_BEGIN_CAPTURE, _END_CAPTURE)
    )
    index = np.searchsorted(end, capture_start)
    capture_start, end = capture_start[index < end.size], end[index[index < end.size]]
    unrecorded = calls.filter(
        pl.col("name").str.contains(_LAUNCH_CALL),
        ~pl.col("event").is_in(kernels["launch"].implode()),
    )
    if unrecorded.height and can_reread_events(capture):
        kernel_names = [
            args.get("kernel")
            for args in read_all_arguments(capture, unrecorded["event"].to_numpy().astype(np.int64))
        ]
        texts = [name if isinstance(name, str) else None for name in kernel_names]
        named_kernels = unrecorded.with_columns(
            pl.Series("name", texts, dtype=pl.String)
        ).drop_nulls("name")
        named_kernels = named_kernels.select(
            "name",
            pl.col("event").alias("launch"),
            "event",
            pl.col("op").cast(pl.Int64).fill_null(-1),
        )
        # A recording of the capture holds both: what ran, and what was only captured.
        both = pl.concat([kernels, named_kernels.cast(kernels.schema)])
        kernels = both[
            np.argsort(events["start_ns"].gather(both["launch"]).to_numpy(), kind="stable")
        ]
    start = events["start_ns"].gather(kernels["launch"]).to_numpy()
    bounds = zip(
        np.searchsorted(start, capture_start).tolist(),
        np.searchsorted(start, end).tolist(),
        strict=True,
    )
    captures = [
        *[(low, high) for low, high in bounds if high > low][:_MAX_CAPTURES],
        (0, kernels.height),
    ]
    nodes = graph_launches.nodes.select("graph", "node", "name", "replay_count", "total_ns")
    numbered = pl.Enum(
        pl.concat([nodes["name"], kernels["name"]]).unique(maintain_order=True).drop_nulls()
    )
    capture_codes = kernels["name"].cast(numbered).to_physical().to_numpy().astype(np.int64)
    parts = []
    for (_graph,), graph_nodes in nodes.group_by("graph", maintain_order=True):
        graph_codes = graph_nodes["name"].cast(numbered).to_physical().to_numpy().astype(np.int64)
        alignment, exact = _find_best_alignment(graph_codes, capture_codes, captures)
        placeless = "its place in the order is not found in the capture"
        if (alignment < 0).all():
            placeless = "the capture is of other work: less than half of the graph stands in it in this order"
        reason = np.where(
            np.isin(graph_codes, capture_codes),
            placeless,
            "no kernel of this name is in the capture",
        )
        part = graph_nodes.with_columns(
            pl.Series("at", alignment),
            pl.lit("correlated" if exact else "inferred").alias("evidence"),
            pl.when(pl.Series(alignment < 0))
            .then(pl.Series(reason.astype(object), dtype=pl.String))
            .alias("reason"),
        )
        parts.append(part)
    if not parts:
        return pl.DataFrame(schema=shape)
    rows = pl.concat(parts)
    alignment = rows["at"].to_numpy()
    op = np.append(kernels["op"].to_numpy(), -1)[alignment]
    kernel = np.append(kernels["event"].to_numpy().astype(np.int64), -1)[alignment]
    host = build_host_event_index(capture)
    position = np.append(convert_to_ndarray(host.tree.position), -1)[op]
    module = np.append(convert_to_ndarray(host.tree.row), -1)[
        host.find_nearest_ancestor(position, host.named(r"^nn\.Module: "))
    ]
    op_row, module_row = (to_nullable_series(row, pl.UInt32, absent=-1) for row in (op, module))
    none, names = pl.Series(op < 0), capture.events["name"]
    return rows.with_columns(
        to_nullable_series(kernel, pl.UInt32, absent=-1).alias("kernel"),
        op_row.alias("op"),
        names.gather(op_row).alias("op_name"),
        names.gather(module_row).alias("module"),
        pl.when(pl.col("reason").is_null() & none)
        .then(pl.lit("its launch stands in no operator of the capture"))
        .otherwise("reason")
        .alias("reason"),
        pl.when(~none).then("evidence").alias("evidence"),
    ).pipe(cast_to_schema, shape)


def _find_best_alignment(
    graph_codes: Ints, capture_codes: Ints, captures: list[tuple[int, int]]
) -> tuple[Ints, bool]:
    """Returns the position in the capture of each node, -1 for none; and whether all names occur
    there in this order.
    """
    graph_matches = find_occurrences(graph_codes, capture_codes)
    if graph_matches.size:
        return graph_matches[0] + np.arange(graph_codes.size), True
    best = np.full(graph_codes.size, -1, dtype=np.int64)
    for low, high in captures:
        aligned = _align_by_names(graph_codes, capture_codes[low:high])
        if (aligned >= 0).sum() > (best >= 0).sum():
            best = np.where(aligned >= 0, aligned + low, -1)
    if (
        best >= 0
    ).sum() < _MIN_JOINED_SHARE * graph_codes.size:  # a few kernels of common names prove nothing
        best[:] = -1
    return best, False


def _align_by_names(graph_codes: Ints, capture_codes: Ints) -> Ints:
    """Returns positions in `capture_codes` for as many of `graph_codes` as can be joined in order
    by equal names; else -1.

    The k-th kernel of a name is joined with the k-th of that name, counted from the front or from
    the back; of these pairs the longest sequence that is ascending on both sides is kept.
    """
    best = np.full(graph_codes.size, -1, dtype=np.int64)
    kth = pl.int_range(pl.len()).over("code").alias("k")
    for direction in (1, -1):
        graph_side, capture_side = (
            pl.DataFrame({"code": codes[::direction]}).with_row_index("at").with_columns(kth)
            for codes in (graph_codes, capture_codes)
        )
        joined = graph_side.join(capture_side, on=["code", "k"], how="left", maintain_order="left")
        pairs = joined["at_right"].cast(pl.Int64).fill_null(-1).to_numpy()
        paired = np.flatnonzero(pairs >= 0)
        matched = paired[find_longest_increasing_subsequence(pairs[paired])]
        if matched.size > (best >= 0).sum():
            best[:] = -1
            positions = pairs[matched]
            best[matched if direction == 1 else graph_codes.size - 1 - matched] = (
                positions if direction == 1 else capture_codes.size - 1 - positions
            )
    return best
