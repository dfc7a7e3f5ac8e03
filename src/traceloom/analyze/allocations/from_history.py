"""Which line made a block: the stacks of the allocator's own history, laid beside the blocks of a trace.

A trace recorded without stacks knows who made a block by operator and module; the allocator's history knows the lines,
also of blocks from before the recording. Both tell addresses, which are given out again and again, and times, which may
be a little apart. Blocks whose address occurs once in both tell how far the clocks are apart; by that the others are
matched, and what could be two blocks stays without a stack.
"""

from __future__ import annotations

from typing import Literal

import numpy as np
import polars as pl

from traceloom.analyze.allocations.blocks import EXISTED, Blocks
from traceloom.analyze.intervals import Ints
from traceloom.model.snapshot import Snapshot

DEVICE = "cuda"
CLOSEST_NS = 2_000
"""The history has microseconds: nothing nearer can be told apart."""
FARTHEST_NS = 10_000_000
"""Clocks that are farther apart are not believed."""
_PLACE = ["device", "address"]


def stack_numbers(blocks: Blocks, snapshot: Snapshot, start_ns: int) -> Ints:
    """The number of the stack (of `snapshot.stacks`) that made each block; 0, which is none, where that is not certain.

    Args:
        blocks: Of a trace; only those of GPUs are looked up.
        snapshot: Of the same process, taken later; its history may begin after the blocks do.
        start_ns: When the recording began.

    Returns:
        Shape (blocks,).
    """
    history = _history(snapshot)
    gpu_blocks = _blocks(blocks, start_ns)
    out = np.zeros(blocks.made.size, dtype=np.int64)
    clock_offset = _apart(gpu_blocks.filter("inside"), history)
    if clock_offset is None:
        return out
    ahead, reach = clock_offset
    shifted = gpu_blocks.with_columns(pl.col("time") + ahead).sort("time")
    inside, before = shifted.filter("inside"), shifted.filter(~pl.col("inside"))
    # Blocks of the recording: the only allocation at their address within `reach` of their time.
    last = _nearest(inside, history, reach, "backward").filter(pl.col("told") >= pl.col("time") - reach)
    first = _nearest(inside, history, -reach, "forward").select("block", first="told")
    alone = last.join(first, on="block").filter(pl.col("told") == pl.col("first"))
    # Blocks from before: the last allocation at their address, if that did not come after the beginning.
    earlier = _nearest(before, history, reach, "backward").filter(pl.col("told") <= pl.col("time") - reach)
    for matches in (alone.filter(pl.len().over(*_PLACE, "told") == 1), earlier):
        fitting = matches.filter(pl.col("asked") <= pl.col("bytes"))
        out[fitting["block"].to_numpy()] = fitting["stack"].to_numpy()
    return out


def _history(snapshot: Snapshot) -> pl.DataFrame:
    """Allocations with a time, by time: device, address, time (ns), asked (bytes), stack."""
    made = snapshot.entries.filter((pl.col("action") == "alloc") & pl.col("time_us").is_not_null())
    twice = pl.len().over(*_PLACE, "time_us") > 1  # within one microsecond: nobody knows which is which
    return made.select(
        *_PLACE,
        pl.col("bytes").alias("asked"),
        pl.when(twice).then(0).otherwise("stack").alias("stack"),
        (pl.col("time_us") * 1000).alias("time"),
    ).sort("time")


def _blocks(blocks: Blocks, start_ns: int) -> pl.DataFrame:
    """The blocks of GPUs: block, device, address, bytes, time (ns), and whether they were made in the recording."""
    on_gpu = np.array([pool.device_type == DEVICE for pool in blocks.pools], dtype=np.bool_)
    rows = (
        np.flatnonzero(on_gpu[blocks.pool] & (blocks.address < 1 << 63))
        if on_gpu.any()
        else np.zeros(0, dtype=np.int64)
    )
    inside = blocks.start_ns[rows] != EXISTED
    device = np.array([max(pool.device, 0) for pool in blocks.pools], dtype=np.int32)
    return pl.DataFrame(
        {
            "block": rows,
            "device": device[blocks.pool[rows]],
            "address": blocks.address[rows].astype(np.int64),
            "bytes": blocks.bytes[rows],
            "time": np.where(inside, blocks.start_ns[rows], start_ns),
            "inside": inside,
        }
    )


def _apart(inside: pl.DataFrame, history: pl.DataFrame) -> tuple[int, int] | None:
    """How far the history is ahead of the trace, and how surely, in ns; None where the two do not belong together."""
    alone = [frame.filter(pl.len().over(_PLACE) == 1) for frame in (inside, history)]
    both = alone[0].join(alone[1], on=_PLACE, suffix="_told").filter(pl.col("asked") <= pl.col("bytes"))
    difference = (both["time_told"] - both["time"]).to_numpy()
    if not difference.size:
        return 0, FARTHEST_NS
    ahead = int(np.median(difference))
    spread = int(np.median(np.abs(difference - ahead)))
    return (ahead, CLOSEST_NS + 5 * spread) if abs(ahead) + 5 * spread < FARTHEST_NS else None


def _nearest(
    gpu_blocks: pl.DataFrame, history: pl.DataFrame, shift: int, strategy: Literal["backward", "forward"]
) -> pl.DataFrame:
    """Each block with the next allocation at its address, seen from `shift` behind its time; `told` is its time."""
    columns = history.select(*_PLACE, "asked", "stack", "time", told="time")
    shifted = gpu_blocks.with_columns(at=pl.col("time") + shift).sort("at")
    return shifted.join_asof(
        columns.rename({"time": "at"}), on="at", by=_PLACE, strategy=strategy, check_sortedness=False
    ).drop_nulls("told")
