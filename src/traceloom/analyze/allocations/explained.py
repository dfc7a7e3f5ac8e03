"""The blocks of a trace with all that is known of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import polars as pl

from traceloom.analyze.allocations.blocks import EXISTED, Blocks
from traceloom.analyze.allocations.categories import Categories, categories
from traceloom.analyze.allocations.named import Named, named
from traceloom.analyze.allocations.owners import BlockOwners, owners
from traceloom.analyze.allocations.partitions import Partition, partition, stack_partition
from traceloom.analyze.allocations.table import Stacks
from traceloom.array_types import Ints
from traceloom.model import Trace
from traceloom.model import category as cat
from traceloom.model.arrays import in_memory
from traceloom.model.snapshot import Snapshot, stack_texts

_DEVICE = "cuda"
_CLOSEST_NS = 2_000
"""The history has microseconds: nothing nearer can be told apart."""
_FARTHEST_NS = 10_000_000
"""Clocks that are farther apart are not believed."""
_PLACE = ["device", "address"]


@dataclass(frozen=True, slots=True)
class Explained:
    """Blocks with names, categories and owners.

    Attributes:
        trace: The trace they are of.
        named: Their names.
        kinds: Their categories.
        whose: Their owners.
        stacks: The stack of each block as text, the innermost frame first, where the source gives them with the blocks;
            None where frames are events of the trace.
        lines: The stacks by the history of the GPU's allocator, null where none is certain: for blocks of whom the
            trace has no frames. None without a history.
    """

    trace: Trace
    named: Named
    kinds: Categories
    whose: BlockOwners
    stacks: pl.Series | None = None
    lines: pl.Series | None = None
    _divided: dict[tuple[str, int | None], Partition] = field(default_factory=dict, repr=False, compare=False)

    def by(self, what: str, depth: int | None = None) -> Partition:
        """Divide the blocks by scope, module, category, op, stack or dtype; made once, so nobody may change it."""
        made = self._divided
        if (what, depth) not in made:
            if what == "stack" and (self.stacks is not None or self.lines is not None):
                every = np.arange(self.named.position.size)
                made[what, depth] = stack_partition(self.named, self.stack_reader()(every))
            else:
                made[what, depth] = partition(what, self.trace, self.named, self.kinds, self.whose, depth=depth)
        return made[what, depth]

    def stack_reader(self) -> Callable[[Ints], pl.Series]:
        """Gives the Python stacks of some blocks, the innermost frame first; null where none was recorded."""
        if self.stacks is not None:
            return self.stacks.gather
        recorded, lines = Stacks(self.trace).reader(self.named.position), self.lines
        if lines is None:
            return recorded
        return lambda rows: pl.select(pl.coalesce(recorded(rows), lines.gather(rows))).to_series()

    @property
    def has_stacks(self) -> bool:
        """Whether the Python stack of any block is known."""
        if any(stacks is not None and stacks.len() > stacks.null_count() for stacks in (self.stacks, self.lines)):
            return True
        kinds = self.trace.events["category"].to_physical()
        return bool((kinds == cat.CATEGORIES.index(cat.PYTHON)).any())


def explain(trace: Trace, *, full_op_names: bool = False, snapshot: Snapshot | None = None) -> Explained:
    """Pair, name and explain the allocations of a trace.

    Args:
        trace: Recorded with `profile_memory`; without allocation events there are no blocks.
        full_op_names: Keep the namespaces of operators in names: `aten::relu`.
        snapshot: Of the allocator in the same process, taken later: its history holds the stacks.
    """
    trace = in_memory(trace)  # blocks are held there, so the columns that describe them are too
    named_blocks = named(trace, full_op_names=full_op_names)
    named_blocks.blocks.check()
    whose = owners(trace, named_blocks.blocks)
    lines = None
    if snapshot is not None:
        number = _stack_numbers(named_blocks.blocks, snapshot, trace.start_ns)
        lines = stack_texts(snapshot).gather(number)
    return Explained(trace, named_blocks, categories(trace, named_blocks, whose), whose, lines=lines)


def _stack_numbers(blocks: Blocks, snapshot: Snapshot, start_ns: int) -> Ints:
    """The number of the stack (of `snapshot.stacks`) that made each block; 0, which is none, where that is not certain.

    A trace recorded without stacks knows who made a block by operator and module; the allocator's history knows the
    lines, also of blocks from before the recording. Both tell addresses, which are given out again and again, and
    times, which may be a little apart. Blocks whose address occurs once in both tell how far the clocks are apart; by
    that the others are matched, and what could be two blocks stays without a stack.

    Args:
        blocks: Of a trace; only those of GPUs are looked up.
        snapshot: Of the same process, taken later; its history may begin after the blocks do.
        start_ns: When the recording began.

    Returns:
        Shape (blocks,).
    """
    made = snapshot.entries.filter((pl.col("action") == "alloc") & pl.col("time_us").is_not_null())
    twice = pl.len().over(*_PLACE, "time_us") > 1  # within one microsecond: nobody knows which is which
    history = made.select(
        *_PLACE,
        pl.col("bytes").alias("asked"),
        pl.when(twice).then(0).otherwise("stack").alias("stack"),
        (pl.col("time_us") * 1000).alias("time"),
    ).sort("time")
    on_gpu = np.array([pool.device_type == _DEVICE for pool in blocks.pools], dtype=np.bool_)
    rows = np.zeros(0, dtype=np.int64)
    if on_gpu.any():
        rows = np.flatnonzero(on_gpu[blocks.pool] & (blocks.address < 1 << 63))
    recorded = blocks.start_ns[rows] != EXISTED
    device = np.array([max(pool.device, 0) for pool in blocks.pools], dtype=np.int32)
    gpu_blocks = pl.DataFrame(
        {
            "block": rows,
            "device": device[blocks.pool[rows]],
            "address": blocks.address[rows].astype(np.int64),
            "bytes": blocks.bytes[rows],
            "time": np.where(recorded, blocks.start_ns[rows], start_ns),
            "inside": recorded,
        }
    )
    out = np.zeros(blocks.made.size, dtype=np.int64)
    # how far the history is ahead of the trace, and how surely
    once = [frame.filter(pl.len().over(_PLACE) == 1) for frame in (gpu_blocks.filter("inside"), history)]
    both = once[0].join(once[1], on=_PLACE, suffix="_told").filter(pl.col("asked") <= pl.col("bytes"))
    difference = (both["time_told"] - both["time"]).to_numpy()
    ahead, reach = 0, _FARTHEST_NS
    if difference.size:
        ahead = int(np.median(difference))
        spread = int(np.median(np.abs(difference - ahead)))
        if abs(ahead) + 5 * spread >= _FARTHEST_NS:  # the two do not belong together
            return out
        reach = _CLOSEST_NS + 5 * spread
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


def _nearest(
    gpu_blocks: pl.DataFrame, history: pl.DataFrame, shift: int, strategy: Literal["backward", "forward"]
) -> pl.DataFrame:
    """Each block with the next allocation at its address, seen from `shift` behind its time; `told` is its time."""
    columns = history.select(*_PLACE, "asked", "stack", "time", told="time")
    shifted = gpu_blocks.with_columns(at=pl.col("time") + shift).sort("at")
    return shifted.join_asof(
        columns.rename({"time": "at"}), on="at", by=_PLACE, strategy=strategy, check_sortedness=False
    ).drop_nulls("told")
