"""Kernels of graph replays joined to the operators of a second recording: of the capture, or of a run without graphs.

A replay knows only the call that launched it. The recording of the capture (or of the same model run eagerly) knows,
for each kernel in the same order, the operator that launched it. Definitions: docs/concepts/inference.md.
"""

from __future__ import annotations

import numpy as np
import polars as pl

from traceloom.analyze.graph_launches import GRAPH_CALLS, GraphLaunches
from traceloom.analyze.op_siblings import host_of
from traceloom.analyze.repeats import places_of
from traceloom.analyze.submissions import plain
from traceloom.array_types import Ints
from traceloom.model import Session, Trace
from traceloom.model.arrays import longest_rise, nullable
from traceloom.model.category import KERNEL, LAUNCHES
from traceloom.model.frames import as_declared, schema
from traceloom.read.again import readable, whole

_LAUNCH = r"(?i)launch.*kernel|kernel.*launch"
_BEGIN, _END = r"(?i)StreamBeginCapture", r"(?i)StreamEndCapture"
_LEAST_SHARE = 0.5  # of a graph's nodes must be joined, else the capture is of other work
_MOST_PARTS = 64  # captures of one recording that are tried

MAPPED = schema(
    "graph node name replay_count total_ns op op_name module evidence reason",
    {"op": pl.UInt32, "evidence": pl.Enum(["correlated", "inferred"])},
)
"""Nodes of graphs with the operator that launched the same kernel in the capture: op (row of the CAPTURE's events), its
name, the module around it; evidence (correlated: the whole graph's names stand in the capture in this order; inferred:
an alignment in order), reason (why there is no operator)."""


def of_rank(capture: Session | Trace | None, trace: Trace) -> Trace | None:
    """Of a recorded session the trace of the same rank, else its first."""
    if capture is None or isinstance(capture, Trace):
        return capture
    return next((candidate for candidate in capture.traces if candidate.rank == trace.rank), capture.traces[0])


def mapped_nodes(graph_launches: GraphLaunches, capture: Trace, *, launches: bool = False) -> pl.DataFrame:
    """The nodes of all graphs with the operators of the capture: `MAPPED`.

    With `launches` also `kernel`: the capture's event of that kernel, or the call that captured it.
    """
    shape = pl.Schema({**MAPPED, **({"kernel": pl.UInt32()} if launches else {})})
    # What the capture launched: its kernels, else, where nothing ran, the launch calls that name their kernel
    events = capture.events
    kernels = events.filter(pl.col("category") == KERNEL, pl.col("launch").is_not_null())
    # replays of graphs know no operator here either
    kernels = kernels.filter(~events["name"].gather(kernels["launch"]).str.contains(GRAPH_CALLS))
    by_call = events["start_ns"].gather(kernels["launch"])
    order = np.lexsort((kernels["start_ns"].to_numpy(), by_call.to_numpy()))
    kernels = kernels[order].select("name", "launch", "event", pl.col("op").cast(pl.Int64).fill_null(-1))
    calls = events.filter(pl.col("category").is_in(LAUNCHES))
    begin, end = (calls.filter(pl.col("name").str.contains(name))["start_ns"].to_numpy() for name in (_BEGIN, _END))
    index = np.searchsorted(end, begin)
    begin, end = begin[index < end.size], end[index[index < end.size]]
    silent = calls.filter(pl.col("name").str.contains(_LAUNCH), ~pl.col("event").is_in(kernels["launch"].implode()))
    if silent.height and readable(capture):
        kernel_names = [args.get("kernel") for args in whole(capture, silent["event"].to_numpy().astype(np.int64))]
        texts = [name if isinstance(name, str) else None for name in kernel_names]
        named = silent.with_columns(pl.Series("name", texts, dtype=pl.String)).drop_nulls("name")
        named = named.select(
            "name", pl.col("event").alias("launch"), "event", pl.col("op").cast(pl.Int64).fill_null(-1)
        )
        # a recording of the capture holds both: what ran, and what was only captured
        both = pl.concat([kernels, named.cast(kernels.schema)])
        kernels = both[np.argsort(events["start_ns"].gather(both["launch"]).to_numpy(), kind="stable")]
    start = events["start_ns"].gather(kernels["launch"]).to_numpy()
    bounds = zip(np.searchsorted(start, begin).tolist(), np.searchsorted(start, end).tolist(), strict=True)
    captures = [*[(low, high) for low, high in bounds if high > low][:_MOST_PARTS], (0, kernels.height)]
    nodes = graph_launches.nodes.select("graph", "node", "name", "replay_count", "total_ns")
    words = pl.concat([nodes["name"], kernels["name"]]).unique(maintain_order=True)
    numbered = pl.Enum(words.drop_nulls())
    capture_codes = kernels["name"].cast(numbered).to_physical().to_numpy().astype(np.int64)
    parts = []
    for (_graph,), graph_nodes in nodes.group_by("graph", maintain_order=True):
        graph_codes = graph_nodes["name"].cast(numbered).to_physical().to_numpy().astype(np.int64)
        at, exact = _best(graph_codes, capture_codes, captures)
        placeless = "its place in the order is not found in the capture"
        if (at < 0).all():
            placeless = "the capture is of other work: less than half of the graph stands in it in this order"
        reason = np.where(np.isin(graph_codes, capture_codes), placeless, "no kernel of this name is in the capture")
        part = graph_nodes.with_columns(
            pl.Series("at", at),
            pl.lit("correlated" if exact else "inferred").alias("evidence"),
            pl.when(pl.Series(at < 0)).then(pl.Series(reason.astype(object), dtype=pl.String)).alias("reason"),
        )
        parts.append(part)
    if not parts:
        return pl.DataFrame(schema=shape)
    rows = pl.concat(parts)
    at = rows["at"].to_numpy()
    op = np.append(kernels["op"].to_numpy(), -1)[at]
    kernel = np.append(kernels["event"].to_numpy().astype(np.int64), -1)[at]
    host = host_of(capture)
    position = np.append(plain(host.tree.position), -1)[op]
    module = np.append(plain(host.tree.row), -1)[host.climb(position, host.named(r"^nn\.Module: "))]
    op_row, module_row = (nullable(row, pl.UInt32, absent=-1) for row in (op, module))
    none, names = pl.Series(op < 0), capture.events["name"]
    return rows.with_columns(
        nullable(kernel, pl.UInt32, absent=-1).alias("kernel"),
        op_row.alias("op"),
        names.gather(op_row).alias("op_name"),
        names.gather(module_row).alias("module"),
        pl.when(pl.col("reason").is_null() & none).then(pl.lit("its launch stands in no operator of the capture"))
        .otherwise("reason").alias("reason"),
        pl.when(~none).then("evidence").alias("evidence"),
    ).pipe(as_declared, shape)  # fmt: skip


def _best(graph_codes: Ints, capture_codes: Ints, captures: list[tuple[int, int]]) -> tuple[Ints, bool]:
    """Position in the capture of each node, -1 for none; and whether all names appear there in this order."""
    whole_graph = places_of(graph_codes, capture_codes)
    if whole_graph.size:
        return whole_graph[0] + np.arange(graph_codes.size), True
    best = np.full(graph_codes.size, -1, dtype=np.int64)
    for low, high in captures:
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
    kth = pl.int_range(pl.len()).over("code").alias("k")
    for turn in (1, -1):
        graph_side, capture_side = (
            pl.DataFrame({"code": codes[::turn]}).with_row_index("at").with_columns(kth)
            for codes in (graph_codes, capture_codes)
        )
        joined = graph_side.join(capture_side, on=["code", "k"], how="left", maintain_order="left")
        pairs = joined["at_right"].cast(pl.Int64).fill_null(-1).to_numpy()
        paired = np.flatnonzero(pairs >= 0)
        kept = paired[longest_rise(pairs[paired])]
        if kept.size > (best >= 0).sum():
            best[:] = -1
            positions = pairs[kept]
            best[kept if turn == 1 else graph_codes.size - 1 - kept] = (
                positions if turn == 1 else capture_codes.size - 1 - positions
            )
    return best
