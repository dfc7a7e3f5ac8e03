"""The blocks of a trace with all that is known of them."""

from __future__ import annotations

from dataclasses import dataclass

from traceloom.analyze.allocations.categories import Categories, categories
from traceloom.analyze.allocations.named import Named, named
from traceloom.analyze.allocations.owners import Owners, owners
from traceloom.analyze.allocations.partitions import Partition, partition
from traceloom.model import Trace


@dataclass(frozen=True, slots=True)
class Explained:
    """Blocks with names, categories and owners.

    Attributes:
        trace: The trace they are of.
        named: Their names.
        kinds: Their categories.
        whose: Their owners.
    """

    trace: Trace
    named: Named
    kinds: Categories
    whose: Owners

    def by(self, what: str, depth: int | None = None) -> Partition:
        """Divide the blocks by scope, module, category, op, stack or dtype."""
        return partition(what, self.trace, self.named, self.kinds, self.whose, depth=depth)


def explain(trace: Trace, *, full_op_names: bool = False) -> Explained:
    """Pair, name and explain the allocations of a trace.

    Args:
        trace: Recorded with `profile_memory`; without allocation events there are no blocks.
        full_op_names: Keep the namespaces of operators in names: `aten::relu`.
    """
    found = named(trace, full_op_names=full_op_names)
    found.blocks.check()
    whose = owners(trace, found.blocks)
    return Explained(trace, found, categories(trace, found, whose), whose)
