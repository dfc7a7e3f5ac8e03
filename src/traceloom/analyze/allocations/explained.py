"""The blocks of a trace with all that is known of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import polars as pl

from traceloom.analyze.allocations.categories import Categories, categories
from traceloom.analyze.allocations.from_history import stack_numbers
from traceloom.analyze.allocations.named import Named, named
from traceloom.analyze.allocations.owners import Owners, owners
from traceloom.analyze.allocations.partitions import Partition, partition, stack_partition
from traceloom.analyze.allocations.table import Stacks
from traceloom.analyze.intervals import Ints
from traceloom.model import Trace
from traceloom.model import category as cat
from traceloom.model.arrays import in_memory
from traceloom.model.snapshot import Snapshot, stack_texts


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
    whose: Owners
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
        stacks, position, lines = Stacks(self.trace), self.named.position, self.lines
        if lines is None:
            return lambda rows: stacks.of(position[rows])
        return lambda rows: pl.select(pl.coalesce(stacks.of(position[rows]), lines.gather(rows))).to_series()

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
        number = stack_numbers(named_blocks.blocks, snapshot, trace.start_ns)
        lines = stack_texts(snapshot).gather(number)
    return Explained(trace, named_blocks, categories(trace, named_blocks, whose), whose, lines=lines)
