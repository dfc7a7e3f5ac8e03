"""What a rank had to do in each step: compute, embedding tables, bytes exchanged, tokens, memory."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence

import numpy as np
import polars as pl
from numpy.typing import NDArray

from traceloom.analyze.ancestry import forest
from traceloom.analyze.classify import stepped_work
from traceloom.analyze.collective.calls import sum_or_null
from traceloom.analyze.stacked import TRACE, stacked, unstacked
from traceloom.analyze.vocabulary import Vocabulary, vocabulary
from traceloom.model import Trace
from traceloom.model import category as cat
from traceloom.model.arrays import column
from traceloom.model.frames import as_declared, schema

MEASURES = ("compute_ns", "embedding_ns", "exchanged_bytes", "tokens", "memory_bytes")
LOAD_SCHEMA = schema("step", *MEASURES)

# Kernels of embedding tables: PyTorch's, FBGEMM's table-batched ones, and TorchRec's by their op.
EMBEDDING = r"(?i)embedding|split_?emb|_tbe_|\btbe\b"
NO_TABLE = r"(?i)rotary|rope|position"


def load_per_step(traces: Sequence[Trace], calls: pl.DataFrame) -> pl.DataFrame:
    """The load of each step of each trace; one row with step null for a trace without steps.

    Args:
        traces: Traces.
        calls: Their communication, of `collectives(...).calls` (`stacked`).

    Returns:
        trace, step, compute_ns (sum of compute kernels launched in the step), embedding_ns (of them, those of embedding
        tables by name or by the op around their launch; null where none ran in the whole trace), exchanged_bytes
        (sent in all-to-alls; null where unknown), tokens (indices looked up in the largest table of
        `aten::embedding`; null where shapes are not recorded), memory_bytes (most that was allocated on a device;
        null where allocations are not recorded).
    """
    none = pl.DataFrame({"step": [None]}, schema={"step": pl.Int32()})
    out = stacked(trace.steps[["step"]] if trace.steps.height else none for trace in traces)
    unstepped = pl.Series([not trace.steps.height for trace in traces])
    exchanged = calls.filter(pl.col("kind") == "all_to_all").select(TRACE, "step", exchanged_bytes="in_bytes")
    allocations = stacked(trace.allocations[["device_type", "step", "allocated_bytes"]] for trace in traces)
    on_device = allocations.filter(~pl.col("device_type").str.starts_with("cpu"))
    memory = on_device.select(TRACE, "step", memory_bytes="allocated_bytes")
    work = stepped_work(traces).filter(pl.col("category") == "compute")
    of_table = [_of_tables(trace, own) for trace, own in zip(traces, unstacked(work, traces), strict=True)]
    of_table_ns = pl.when(pl.Series(np.concatenate(of_table))).then("ns").otherwise(0)
    compute = work.select(TRACE, "step", compute_ns="ns", embedding_ns=of_table_ns)
    for part in (compute, exchanged, stacked(map(_tokens, traces)), memory):
        rows = part
        if unstepped.any():
            rows = part.with_columns(pl.when(~unstepped[part[TRACE]]).then("step").alias("step"))
        values = [name for name in rows.columns if name not in {TRACE, "step"}]
        # a sum that lacks a value is not known
        whole = [sum_or_null(name) for name in values]
        sums = rows.group_by(TRACE, "step").agg([pl.col("memory_bytes").max()] if part is memory else whole)
        out = out.join(sums, on=[TRACE, "step"], how="left", nulls_equal=True, maintain_order="left")
    embeds = (pl.col("embedding_ns") > 0).any().over(TRACE)
    embedding = pl.when(embeds).then(pl.col("embedding_ns").fill_null(0))
    return out.select(
        TRACE, "step", pl.col("compute_ns").fill_null(0), embedding.alias("embedding_ns"), *MEASURES[2:]
    ).pipe(as_declared, {TRACE: pl.UInt32(), **LOAD_SCHEMA})


def _tables(words: Vocabulary) -> NDArray[np.bool_]:
    return words.matching(EMBEDDING) & ~words.matching(NO_TABLE)


def _of_tables(trace: Trace, work: pl.DataFrame) -> NDArray[np.bool_]:
    """Which pieces of work are of embedding tables, by name or because the op that launched them lies inside one."""
    words = vocabulary(trace)
    by_name: NDArray[np.bool_] = _tables(words)[words.code[work["event"].to_numpy()]]
    return by_name | _below_tables(trace, work["op"])


def _below_tables(trace: Trace, op: pl.Series) -> NDArray[np.bool_]:
    """Whether the op that launched each piece of work lies inside an op of embedding tables (index_select does)."""
    tree, words = forest(trace), vocabulary(trace)
    is_table = _tables(words)
    none = np.zeros(op.len(), dtype=np.bool_)
    if not tree.row.size or not is_table.any():
        return none
    is_op = np.isin(
        column(trace, "category"), [cat.CATEGORIES.index(category) for category in (cat.OP, cat.ANNOTATION)]
    )
    table_ops = (is_table[words.code] & is_op)[tree.row]
    if not table_ops.any():
        return none
    above = tree.nearest_or_self(table_ops)
    at = tree.position[op.fill_null(0).to_numpy()]
    below: NDArray[np.bool_] = (at >= 0) & op.is_not_null().to_numpy() & (above[np.maximum(at, 0)] >= 0)
    return below


def _tokens(trace: Trace) -> pl.DataFrame:
    """step, tokens: how many indices each lookup in the largest table of `aten::embedding` takes."""
    is_op = column(trace, "category") == cat.CATEGORIES.index(cat.OP)
    looks_up = np.flatnonzero(is_op & vocabulary(trace).events(r"^aten::embedding$"))
    if not looks_up.size:
        return schema("step tokens").to_frame()
    ops = trace.events[["event", "step"]][looks_up]
    shaped = ops.join(trace.tensors[["event", "shapes"]], on="event", how="inner", maintain_order="left")
    table: dict[str | None, tuple[int, int]] = {}  # shapes: rows of the table, indices
    for text in shaped["shapes"].unique().to_list():
        try:
            dims = json.loads(text or "[]")
        except ValueError:
            continue
        if not isinstance(dims, list) or len(dims) < 2 or not all(isinstance(dim, list) for dim in dims[:2]):
            continue
        if dims[0] and dims[1] and all(isinstance(n, int) and 0 <= n < 2**40 for n in (*dims[0], *dims[1])):
            table[text] = dims[0][0], min(math.prod(dims[1]), 2**62)
    rows = [(step, *table[text]) for step, text in shaped[["step", "shapes"]].iter_rows() if text in table]
    lookups = pl.DataFrame(rows, {"step": pl.Int32(), "rows": pl.Int64(), "tokens": pl.Int64()}, orient="row")
    return lookups.filter(pl.col("rows") == pl.col("rows").max())[["step", "tokens"]]
