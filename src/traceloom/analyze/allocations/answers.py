"""The answers about one trace: who holds the memory at the peak, what was allocated where, what grows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import polars as pl

from traceloom.analyze.allocations.blocks import ALIVE, EXISTED
from traceloom.analyze.allocations.categories import CATEGORIES, EVIDENCE
from traceloom.analyze.allocations.explained import Explained, explain
from traceloom.analyze.allocations.growth import growth
from traceloom.analyze.allocations.holders import TREE, scope_tree, sums_by
from traceloom.analyze.allocations.named import Named
from traceloom.analyze.allocations.owners import Owners
from traceloom.analyze.allocations.remarks import remarks
from traceloom.analyze.allocations.table import names
from traceloom.analyze.intervals import Ints
from traceloom.model import Notice, Trace
from traceloom.model.result import Result

POOLS = pl.Schema(
    {
        "pool": pl.Int64,
        "device_type": pl.String,
        "device": pl.Int32,
        "peak_bytes": pl.Int64,
        "peak_time_ns": pl.Int64,
        "peak_step": pl.Int32,
        "peak_row": pl.Int64,
        "unseen_bytes": pl.Int64,
        "start_bytes": pl.Int64,
        "end_bytes": pl.Int64,
        "allocation_count": pl.Int64,
        "free_count": pl.Int64,
        "reserved_at_peak_bytes": pl.Int64,
    }
)
"""One row per memory."""


@dataclass(frozen=True)
class Allocations(Result):
    """Whose memory it is, in one trace.

    Attributes:
        pools: One row per memory (a device, or the shared memory of loader workers): peak, its time, step and row;
            `unseen_bytes` (what the allocator held before the recording and was never seen), start, end, counts.
        peak: At the peak of each pool, who holds what: pool and `TREE`.
        categories: At the peak: pool, category, evidence, bytes, block_count, fraction.
        largest: The largest blocks alive at the peak: pool, name, bytes, category, time_ns, end_ns, step.
        growth: Places that leave memory alive step after step; see `growth`.
        notices: What to know about the pairing.
    """

    pools: pl.DataFrame
    peak: pl.DataFrame
    categories: pl.DataFrame
    largest: pl.DataFrame
    growth: pl.DataFrame
    notices: tuple[Notice, ...]


MOST = 100
CATEGORY_ROWS = pl.Schema(
    {
        "pool": pl.Int64,
        "category": pl.String,
        "evidence": pl.String,
        "bytes": pl.Int64,
        "block_count": pl.Int64,
        "fraction": pl.Float64,
    }
)
LARGEST = pl.Schema(
    {
        "pool": pl.Int64,
        "name": pl.String,
        "owner": pl.String,
        "bytes": pl.Int64,
        "category": pl.String,
        "backward": pl.Boolean,
        "time_ns": pl.Int64,
        "end_ns": pl.Int64,
        "step": pl.Int32,
    }
)


def allocations(trace: Trace, *, full_op_names: bool = False) -> Allocations:
    """Pair, name and explain the allocations of a trace (recorded with `profile_memory`).

    Args:
        trace: The trace; without allocation events all frames are empty.
        full_op_names: Keep namespaces in names: `aten::relu`.
    """
    return answers(explain(trace, full_op_names=full_op_names))


def answers(explained: Explained, rows: Mapping[int, int] | None = None, *, most: int = MOST) -> Allocations:
    """The same for blocks that are explained already, and for other instants than the peaks.

    Args:
        explained: The blocks.
        rows: Row of `trace.allocations` just after which each memory is looked at; the peak where none is given.
        most: How many of the largest blocks to list; 0 for none.
    """
    trace, named, kinds, whose = explained.trace, explained.named, explained.kinds, explained.whose
    pools = _pools(trace, named)
    peaks, by_category, largest = [TREE_ROWS.to_frame()], [CATEGORY_ROWS.to_frame()], [LARGEST.to_frame()]
    for pool, highest, unseen in pools.select("pool", "peak_row", "unseen_bytes").rows():
        row = (rows or {}).get(pool, highest)
        chosen = (named.blocks.pool == pool) & named.blocks.alive(row)
        pool_column = pl.lit(pool, pl.Int64).alias("pool")
        peaks.append(scope_tree(named, chosen, unseen, whose).select(pool_column, pl.all()))
        key = kinds.category * len(EVIDENCE) + kinds.evidence
        both = [(category, evidence) for category in CATEGORIES for evidence in EVIDENCE]
        sums = sums_by(named, chosen, key, pl.int_range(len(both), eager=True))
        by_category.append(_categories(sums, unseen, both).select(pool_column, pl.all()))
        if most:
            chosen_rows = np.flatnonzero(chosen)
            top = chosen_rows[np.argsort(-named.blocks.bytes[chosen_rows], kind="stable")[:most]]
            largest.append(_told(trace, named, whose, kinds.category, top).select(pool_column, pl.all()))
    return Allocations(
        pools,
        pl.concat(peaks),
        pl.concat(by_category),
        pl.concat(largest),
        growth(trace, named),
        remarks(named, whose),
    )


TREE_ROWS = pl.Schema({"pool": pl.Int64(), **TREE})


def _pools(trace: Trace, named: Named) -> pl.DataFrame:
    rows = trace.allocations
    times = rows["time_ns"]
    out = []
    for number, pool in enumerate(named.blocks.pools):
        levels = named.blocks.levels(number, rows.height)
        unseen = 0 if pool.start_bytes is None else pool.start_bytes - int(levels[0])
        peak = int(levels.argmax())
        row = max(peak - 1, 0)
        in_pool = named.blocks.pool == number
        before = named.blocks.start_ns == EXISTED
        out.append(
            {
                "pool": number,
                "device_type": pool.device_type,
                "device": pool.device,
                "peak_bytes": int(levels[peak]) + unseen,
                "peak_time_ns": times[row],
                "peak_step": rows["step"][row],
                "peak_row": peak - 1,
                "unseen_bytes": unseen,
                "start_bytes": pool.start_bytes,
                "end_bytes": int(levels[-1]) + unseen,
                "allocation_count": int((in_pool & ~before).sum()),
                "free_count": int((in_pool & (named.blocks.end_ns != ALIVE)).sum()),
                "reserved_at_peak_bytes": rows["reserved_bytes"][row] if pool.start_bytes is not None else None,
            }
        )
    return pl.DataFrame(out, schema=POOLS)


def _categories(sums: pl.DataFrame, unseen: int, both: list[tuple[str, str]]) -> pl.DataFrame:
    rows = [(*both[key], size, count) for key, size, count, _ in sums.rows()]
    if unseen:
        rows.append(("before_recording", "none", unseen, 0))
    frame = pl.DataFrame(rows, schema=["category", "evidence", "bytes", "block_count"], orient="row")
    whole = max(int(frame["bytes"].sum()), 1) if rows else 1
    summed = frame.group_by("category", "evidence").agg(pl.col("bytes", "block_count").sum()) if rows else frame
    ranked = summed.with_columns(fraction=pl.col("bytes") / whole).sort("bytes", "category", descending=[True, False])
    columns = [name for name in CATEGORY_ROWS if name != "pool"]
    return ranked.select(columns).cast({name: CATEGORY_ROWS[name] for name in columns})


def _told(trace: Trace, named: Named, whose: Owners, category: Ints, top: Ints) -> pl.DataFrame:
    """The rows of `LARGEST` for some blocks, without the pool."""
    made = named.blocks.made[top]
    step = trace.allocations["step"].gather(np.maximum(made, 0)) if top.size else pl.Series([], dtype=pl.Int32)
    return pl.DataFrame(
        {
            "name": names(named, whose, top),
            "owner": whose.table["name"].gather(pl.Series(whose.of[top]).replace(-1, None).cast(pl.UInt32)),
            "bytes": named.blocks.bytes[top],
            "category": pl.Series(CATEGORIES).gather(category[top]),
            "backward": named.backward[top],
            "time_ns": pl.Series(named.blocks.start_ns[top]).replace(EXISTED, None),
            "end_ns": pl.Series(named.blocks.end_ns[top]).replace(ALIVE, None),
            "step": step.set(pl.Series(made < 0), None),
        }
    ).cast({name: kind for name, kind in LARGEST.items() if name != "pool"})
