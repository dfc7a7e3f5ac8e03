"""The answers about one trace: who holds the memory at the peak, what was allocated where, what grows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
import polars as pl

from traceloom.analyze.allocations.blocks import ALIVE, EXISTED
from traceloom.analyze.allocations.categories import CATEGORIES, EVIDENCE
from traceloom.analyze.allocations.explained import Explained, explain
from traceloom.analyze.allocations.growth import growth
from traceloom.analyze.allocations.holders import TREE, scope_tree, sums_by
from traceloom.analyze.allocations.named import Named
from traceloom.analyze.allocations.table import names
from traceloom.array_types import Ints
from traceloom.model import Notice, Trace, units
from traceloom.model.frames import as_declared, schema
from traceloom.model.result import Result

POOLS = schema(
    "pool device_type device peak_bytes peak_time_ns peak_step peak_row unseen_bytes",
    "start_bytes end_bytes allocation_count free_count reserved_at_peak_bytes",
)
"""One row per memory."""

_LOST = """blocks were never freed in the recording, and yet their address was given out again: they are taken to end
there (another thread freed them, or events were dropped)"""
_RESIZED = "frees say another size than their allocation: that of the allocation counts"
_UNSEEN = """storages ({size}) are alive at the end whose allocation was not recorded, and that were not there before:
other threads made them, or they are not PyTorch's own (NumPy arrays, mapped files); no figure holds them"""
_GONE = """storages ({size}) from before the recording were not found any more at its end, but no free of them was
recorded: they count until the end"""
_EARLY = """blocks ({size}) were freed whose allocation was not recorded: they are taken to be from before the
recording, where no other thread made them; their owner is unknown"""
_NO_ADDRESS = """blocks were recorded without an address: a free is taken to end the youngest block of its size, so
that sums are right but single lifetimes are guesses"""
_UNKNOWN = "backward nodes belong to no recorded forward operator: what they allocate is called backward.unknown"
_COMPILED = """allocations ({size}) were made in compiled code: they are charged to the scope that called it, because
modules and scopes inside it are gone"""


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
CATEGORY_ROWS = schema("pool category evidence bytes block_count fraction")
LARGEST = schema("pool name owner bytes category backward time_ns end_ns step")


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
        rows_of = [(*both[key], size, count) for key, size, count, _ in sums.rows()]
        if unseen:
            rows_of.append(("before_recording", "none", unseen, 0))
        kept = ["category", "evidence", "bytes", "block_count"]
        summed = pl.DataFrame(rows_of, schema={name: CATEGORY_ROWS[name] for name in kept}, orient="row")
        summed = summed.group_by("category", "evidence").agg(pl.col("bytes", "block_count").sum())
        whole = max(int(summed["bytes"].sum()), 1)
        ranked = summed.with_columns(pool_column, fraction=pl.col("bytes") / whole)
        ranked = ranked.sort("bytes", "category", descending=[True, False])
        by_category.append(ranked.pipe(as_declared, CATEGORY_ROWS))
        if not most:
            continue
        chosen_rows = np.flatnonzero(chosen)
        top = chosen_rows[np.argsort(-named.blocks.bytes[chosen_rows], kind="stable")[:most]]
        made = named.blocks.made[top]
        step = trace.allocations["step"].gather(np.maximum(made, 0)) if top.size else pl.Series([], dtype=pl.Int32)
        table = pl.DataFrame(
            {
                "name": names(named, whose, top),
                "owner": whose.table["name"].gather(pl.Series(whose.of[top]).replace(-1, None).cast(pl.UInt32)),
                "bytes": named.blocks.bytes[top],
                "category": pl.Series(CATEGORIES).gather(kinds.category[top]),
                "backward": named.backward[top],
                "time_ns": pl.Series(named.blocks.start_ns[top]).replace(EXISTED, None),
                "end_ns": pl.Series(named.blocks.end_ns[top]).replace(ALIVE, None),
                "step": step.set(pl.Series(made < 0), None),
            }
        )
        largest.append(table.select(pool_column, pl.all()).cast(LARGEST))
    # What pairing and naming had to assume, and what the recording cannot have seen
    blocks = named.blocks
    early = np.flatnonzero((blocks.start_ns == EXISTED) & (blocks.owner < 0))
    without_address = int(((blocks.address == 0) & (blocks.owner < 0)).sum())
    compiled = np.flatnonzero(np.append(named.places.compiled, False)[named.position])
    listed = whose.table["bytes"].to_numpy()
    none = early[:0]
    notices = (
        Notice("lost-frees", "warning", _line(_LOST, none), blocks.lost_frees),
        Notice("resized-frees", "warning", _line(_RESIZED, none), blocks.resized),
        Notice("unrecorded-allocations", "warning", _line(_UNSEEN, listed[whose.unseen]), whose.unseen.size),
        Notice("unrecorded-frees", "warning", _line(_GONE, blocks.bytes[whose.gone]), whose.gone.size),
        Notice("freed-from-before", "info", _line(_EARLY, blocks.bytes[early]), early.size),
        Notice("allocations-without-address", "info", _line(_NO_ADDRESS, none), without_address),
        Notice("backward-without-forward", "info", _line(_UNKNOWN, none), named.places.unknown_backward),
        Notice("compiled-allocations", "info", _line(_COMPILED, blocks.bytes[compiled]), compiled.size),
    )
    counted = (notice for notice in notices if notice.count)
    return Allocations(
        pools,
        pl.concat(peaks),
        pl.concat(by_category),
        pl.concat(largest),
        growth(trace, named),
        tuple(replace(notice, message=f"{units.count(notice.count)} {notice.message}") for notice in counted),
    )


TREE_ROWS = schema("pool", TREE)


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


def _line(text: str, sizes: Ints) -> str:
    return text.replace("\n", " ").format(size=units.size(int(sizes.sum())))
