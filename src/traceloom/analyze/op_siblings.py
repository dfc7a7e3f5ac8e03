"""Operators beside and below each other: what patterns of operators are looked for in."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import polars as pl

from traceloom.analyze.ancestry import Forest, forest
from traceloom.analyze.attribution import launched_work
from traceloom.analyze.submissions import plain
from traceloom.analyze.vocabulary import Vocabulary, vocabulary
from traceloom.array_types import Bools, Ints
from traceloom.model import Trace
from traceloom.model import category as cat
from traceloom.model.arrays import column, nullable


@dataclass(frozen=True)
class Host:
    """The host events of a trace with the questions that patterns ask; positions are those of the forest."""

    trace: Trace
    tree: Forest
    words: Vocabulary
    code: Ints
    is_op: Bools
    is_python: Bools
    is_call: Bools

    def named(self, pattern: str) -> Bools:
        """Host events whose name holds the pattern."""
        return self.words.matching(pattern)[self.code] if self.code.size else self.is_op

    def ops(self, pattern: str) -> Ints:
        """Positions of the operators whose name holds the pattern, ascending."""
        at, code = self._every_op
        return at[self.words.matching(pattern)[code]] if at.size else at

    @cached_property
    def _every_op(self) -> tuple[Ints, Ints]:
        """The positions of all operators, and their names."""
        at = np.flatnonzero(self.is_op)
        return at, self.code[at]

    def inside(self, wanted: Bools) -> Ints:
        """How many wanted events stand below each event (itself not counted)."""
        return self.tree.subtree_sums(wanted.astype(np.int64)) - wanted

    def last_child(self, wanted: Bools) -> Ints:
        """For every event the position of its last wanted child; -1 where it has none."""
        last = np.full(self.code.size, -1, dtype=np.int64)
        child = np.flatnonzero(wanted)
        above = self.op_parent[child] if wanted is self.is_op else self.tree.parent[child]
        child, above = child[above >= 0], above[above >= 0]
        np.maximum.at(last, above, child)
        return last

    def climb(self, position: Ints, wanted: Bools) -> Ints:
        """For a few events the nearest wanted event above each; -1 for none."""
        above, is_match = np.append(self.tree.parent, -1), np.append(wanted, False)
        current = above[position]
        while ((current >= 0) & ~is_match[current]).any():  # one turn per level of nesting
            current = np.where(is_match[current], current, above[current])
        return current

    @cached_property
    def op_parent(self) -> Ints:
        """Position of the nearest operator above each event; -1 for none."""
        return self.tree.nearest(self.is_op)

    @cached_property
    def last_op(self) -> Ints:
        """For every operator its last operator one level below; -1 for none."""
        return self.last_child(self.is_op)

    @cached_property
    def gpu_ns(self) -> Ints:
        """Duration of all GPU work launched inside each event."""
        work = launched_work(self.trace)
        own = np.zeros(self.code.size, dtype=np.int64)
        attributed = work.origin >= 0
        np.add.at(own, work.origin[attributed], work.duration_ns[attributed])
        return self.tree.subtree_sums(own)

    @cached_property
    def _tensors(self) -> Ints:
        """Row of each event in `tensors`; -1 for none."""
        row = np.full(self.code.size + 1, -1, dtype=np.int64)
        row[plain(self.tree.position)[self.trace.tensors["event"].to_numpy()]] = np.arange(self.trace.tensors.height)
        return row[:-1]

    def inputs(self, positions: Ints) -> pl.DataFrame:
        """Shapes and types (JSON text) of the inputs of these operators; null where they were not recorded."""
        row = nullable(self._tensors[positions], pl.UInt32, absent=-1)
        columns = [self.trace.tensors[name][row] for name in ("shapes", "types")]
        return pl.DataFrame([pl.Series("position", positions), *columns])

    @property
    def has_shapes(self) -> bool:
        """Whether shapes of inputs were recorded."""
        return self.trace.tensors.height > 0

    @cached_property
    def has_stacks(self) -> bool:
        """Whether Python frames were recorded."""
        return bool(self.is_python.any())


def host_of(trace: Trace) -> Host:
    """The host events of a trace."""
    tree = forest(trace)
    words = vocabulary(trace)
    row = plain(tree.row)
    category = plain(column(trace, "category"))[row]
    return Host(
        trace=trace,
        tree=tree,
        words=words,
        code=plain(words.code)[row].astype(np.int64),
        is_op=category == cat.CATEGORIES.index(cat.OP),
        is_python=category == cat.CATEGORIES.index(cat.PYTHON),
        is_call=np.isin(category, [cat.CATEGORIES.index(name) for name in cat.LAUNCHES]),
    )
