"""Kernels of graph replays joined to the operators of a second recording: of the capture, or of a run without graphs.

A replay knows only the call that launched it. The recording of the capture (or of the same model run eagerly) knows,
for each kernel in the same order, the operator that launched it. Definitions: docs/concepts/inference.md.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass

import numpy as np
import polars as pl

from traceloom.analyze.ancestry import forest
from traceloom.analyze.graph_launches import GRAPH_CALLS, GraphLaunches
from traceloom.analyze.intervals import Ints
from traceloom.analyze.op_siblings import host_of
from traceloom.analyze.repeats import places_of
from traceloom.analyze.submissions import plain
from traceloom.model import Session, Trace
from traceloom.model.category import KERNEL, LAUNCHES
from traceloom.read.again import readable, whole

_LAUNCH = r"(?i)launch.*kernel|kernel.*launch"
_BEGIN, _END = r"(?i)StreamBeginCapture", r"(?i)StreamEndCapture"
_LEAST_SHARE = 0.5  # of a graph's nodes must be joined, else the capture is of other work
_MOST_PARTS = 64  # captures of one recording that are tried

MAPPED = pl.Schema(
    {
        "graph": pl.UInt32(),
        "node": pl.UInt32(),
        "name": pl.String(),
        "replay_count": pl.Int64(),
        "total_ns": pl.Int64(),
        "op": pl.UInt32(),
        "op_name": pl.String(),
        "module": pl.String(),
        "evidence": pl.Enum(["correlated", "inferred"]),
        "reason": pl.String(),
    }
)
"""Nodes of graphs with the operator that launched the same kernel in the capture: op (row of the CAPTURE's events), its
name, the module around it; evidence (correlated: the whole graph's names stand in the capture in this order; inferred:
an alignment in order), reason (why there is no operator)."""


@dataclass(frozen=True, slots=True)
class _Capture:
    """Kernels of the capture in the order of their launches; arrays of one length."""

    name: pl.Series
    launch: Ints
    kernel: Ints  # the event that tells its grid: the kernel, or the call that only captured it
    op: Ints
    begin: Ints  # bounds of the parts: every capture of a graph, and the whole
    end: Ints


def of_rank(capture: Session | Trace | None, trace: Trace) -> Trace | None:
    """Of a recorded session the trace of the same rank, else its first."""
    if capture is None or isinstance(capture, Trace):
        return capture
    return next((candidate for candidate in capture.traces if candidate.rank == trace.rank), capture.traces[0])


def mapped_nodes(graph_launches: GraphLaunches, capture: Trace, *, launches: bool = False) -> pl.DataFrame:
    """The nodes of all graphs with the operators of the capture: `MAPPED`.

    With `launches` also `kernel`: the capture's event of that kernel, or the call that captured it.
    """
    extra = {"kernel": pl.UInt32()} if launches else {}
    shape = pl.Schema({**MAPPED, **extra})
    kernels = _kernels(capture)
    nodes = graph_launches.nodes.select("graph", "node", "name", "replay_count", "total_ns")
    words = pl.concat([nodes["name"], kernels.name]).unique(maintain_order=True)
    numbered = pl.Enum(words.drop_nulls())
    capture_codes = kernels.name.cast(numbered).to_physical().to_numpy().astype(np.int64)
    parts = []
    for (_graph,), graph_nodes in nodes.group_by("graph", maintain_order=True):
        graph_codes = graph_nodes["name"].cast(numbered).to_physical().to_numpy().astype(np.int64)
        at, exact = _best(graph_codes, capture_codes, kernels)
        parts.append(_rows(graph_nodes, graph_codes, capture_codes, at, exact=exact))
    if not parts:
        return pl.DataFrame(schema=shape)
    rows = pl.concat(parts)
    at = rows["at"].to_numpy()
    op = np.where(at >= 0, np.append(kernels.op, -1)[at], -1)
    kernel = pl.Series("kernel", np.append(kernels.kernel, 0)[at]).set(pl.Series(at < 0), None).cast(pl.UInt32)
    none = pl.Series(op < 0)
    op_row = pl.Series(op).set(none, None).cast(pl.UInt32)
    return rows.with_columns(
        kernel,
        op_row.alias("op"),
        capture.events["name"].gather(op_row).alias("op_name"),
        pl.Series("module", _modules(capture, op), dtype=pl.String),
        pl.when(pl.col("reason").is_null() & none).then(pl.lit("its launch stands in no operator of the capture"))
        .otherwise("reason").alias("reason"),
        pl.when(~none).then("evidence").alias("evidence"),
    ).select(list(shape)).cast(shape)  # fmt: skip


def _kernels(capture: Trace) -> _Capture:
    """What the capture launched: its kernels, else, where nothing ran, the launch calls that name their kernel."""
    events = capture.events
    kernel = events.filter(pl.col("category") == KERNEL, pl.col("launch").is_not_null())
    # replays of graphs know no operator here either
    kernel = kernel.filter(~events["name"].gather(kernel["launch"]).str.contains(GRAPH_CALLS))
    by_call = events["start_ns"].gather(kernel["launch"])
    order = np.lexsort((kernel["start_ns"].to_numpy(), by_call.to_numpy()))
    kernel = kernel[order].select("name", "launch", "event", pl.col("op").cast(pl.Int64).fill_null(-1))
    begin, end = _captures(capture)
    calls = events.filter(pl.col("category").is_in(LAUNCHES), pl.col("name").str.contains(_LAUNCH))
    silent = calls.filter(~pl.col("event").is_in(kernel["launch"].implode())).select("event", "start_ns", "op")
    if silent.height and readable(capture):
        kernel_names = [args.get("kernel") for args in whole(capture, silent["event"].to_numpy().astype(np.int64))]
        named = silent.with_columns(
            pl.Series("name", [name if isinstance(name, str) else None for name in kernel_names], dtype=pl.String)
        )
        named = named.drop_nulls("name").select(
            "name", pl.col("event").alias("launch"), "event", pl.col("op").cast(pl.Int64).fill_null(-1)
        )
        # a recording of the capture holds both: what ran, and what was only captured
        both = pl.concat([kernel, named.cast(kernel.schema)])
        kernel = both[np.argsort(events["start_ns"].gather(both["launch"]).to_numpy(), kind="stable")]
    start = events["start_ns"].gather(kernel["launch"]).to_numpy()
    low, high = np.searchsorted(start, begin), np.searchsorted(start, end)
    filled = high > low
    return _Capture(
        name=kernel["name"],
        launch=kernel["launch"].to_numpy().astype(np.int64),
        kernel=kernel["event"].to_numpy().astype(np.int64),
        op=kernel["op"].to_numpy(),
        begin=np.append(low[filled][:_MOST_PARTS], 0),
        end=np.append(high[filled][:_MOST_PARTS], kernel.height),
    )


def _captures(capture: Trace) -> tuple[Ints, Ints]:
    """Start and end of each capture of a graph, where the calls are recorded."""
    calls = capture.events.filter(pl.col("category").is_in(LAUNCHES)).select("name", "start_ns")
    begin = calls.filter(pl.col("name").str.contains(_BEGIN))["start_ns"].to_numpy()
    end = calls.filter(pl.col("name").str.contains(_END))["start_ns"].to_numpy()
    index = np.searchsorted(end, begin)
    has_end = index < end.size
    return begin[has_end], end[index[has_end]]


def _best(graph_codes: Ints, capture_codes: Ints, kernels: _Capture) -> tuple[Ints, bool]:
    """Position in the capture of each node, -1 for none; and whether all names appear there in this order."""
    whole_graph = places_of(graph_codes, capture_codes)
    if whole_graph.size:
        return whole_graph[0] + np.arange(graph_codes.size), True
    best = np.full(graph_codes.size, -1, dtype=np.int64)
    for low, high in zip(kernels.begin.tolist(), kernels.end.tolist(), strict=True):
        aligned = _aligned(graph_codes, capture_codes[low:high])
        if (aligned >= 0).sum() > (best >= 0).sum():
            best = np.where(aligned >= 0, aligned + low, -1)
    if (best >= 0).sum() < _LEAST_SHARE * graph_codes.size:  # a few kernels of everyday names prove nothing
        best[:] = -1
    return best, False


def _aligned(graph_codes: Ints, capture_codes: Ints) -> Ints:
    """Positions in `capture_codes` for as many of `graph_codes` as can be joined in order by equal names; else -1.

    The k-th kernel of a name is joined with the k-th of that name, counted from the front or from the back; of these
    pairs the longest sequence that goes forward on both sides is kept.
    """
    best = np.full(graph_codes.size, -1, dtype=np.int64)
    for turn in (1, -1):
        graph_side, capture_side = graph_codes[::turn], capture_codes[::turn]
        pairs = _kth(graph_side, capture_side)
        paired = np.flatnonzero(pairs >= 0)
        kept = paired[_rising(pairs[paired])]
        if kept.size > (best >= 0).sum():
            best[:] = -1
            positions = pairs[kept]
            best[kept if turn == 1 else graph_codes.size - 1 - kept] = (
                positions if turn == 1 else capture_codes.size - 1 - positions
            )
    return best


def _kth(left: Ints, right: Ints) -> Ints:
    """For each entry of `left`, the k-th with its code, the position of the k-th with that code in `right`; else -1."""
    frames = [
        pl.DataFrame({"code": codes}).with_row_index("at").with_columns(pl.int_range(pl.len()).over("code").alias("k"))
        for codes in (left, right)
    ]
    joined = frames[0].join(frames[1], on=["code", "k"], how="left", maintain_order="left")
    return joined["at_right"].cast(pl.Int64).fill_null(-1).to_numpy()


def _rising(values: Ints) -> Ints:
    """Positions of a longest strictly rising subsequence, in n log n."""
    tails: list[int] = []
    last: list[int] = []
    before = np.full(values.size, -1, dtype=np.int64)
    for at, value in enumerate(values.tolist()):
        index = bisect_left(tails, value)
        if index == len(tails):
            tails.append(value)
            last.append(at)
        else:
            tails[index] = value
            last[index] = at
        before[at] = last[index - 1] if index else -1
    kept: list[int] = []
    position = last[-1] if last else -1
    while position >= 0:
        kept.append(position)
        position = int(before[position])
    return np.array(kept[::-1], dtype=np.int64)


def _rows(graph_nodes: pl.DataFrame, graph_codes: Ints, capture_codes: Ints, at: Ints, *, exact: bool) -> pl.DataFrame:
    in_capture = np.isin(graph_codes, capture_codes)
    other_work = bool((at < 0).all())
    placeless = "the capture is of other work: less than half of the graph stands in it in this order"
    reason = np.where(
        in_capture,
        placeless if other_work else "its place in the order is not found in the capture",
        "no kernel of this name is in the capture",
    )
    missing = pl.Series(at < 0)
    return graph_nodes.with_columns(
        pl.Series("at", at),
        pl.lit("correlated" if exact else "inferred").alias("evidence"),
        pl.when(missing).then(pl.Series(reason.astype(object), dtype=pl.String)).alias("reason"),
    )


def _modules(capture: Trace, op: Ints) -> list[str | None]:
    """Name of the nearest module around each operator."""
    host = host_of(capture)
    named = host.named(r"^nn\.Module: ")
    with_op = np.flatnonzero(op >= 0)
    out: list[str | None] = [None] * op.size
    if not named.any() or not with_op.size:
        return out
    above = host.climb(plain(forest(capture).position)[op[with_op]], named)
    rows = np.append(host.tree.row, 0)[above]
    names = capture.events["name"].gather(rows)
    for index, name, in_module in zip(with_op.tolist(), names.to_list(), (above >= 0).tolist(), strict=True):
        out[index] = name if in_module else None
    return out
