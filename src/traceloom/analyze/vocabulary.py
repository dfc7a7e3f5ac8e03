"""The distinct names of a trace's events, so that a pattern is matched once per name and not once per event."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import polars as pl
from numpy.typing import NDArray

from traceloom.analyze.remembered import per_trace
from traceloom.model import Trace
from traceloom.model.letter_case import contains
from traceloom.read import ondisk
from traceloom.read.large import is_large
from traceloom.read.ondisk import lookup


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """The names of a trace.

    Attributes:
        names: The distinct names.
        code: For each row of `trace.events` the index of its name; shape (events,).
    """

    names: pl.Series
    code: NDArray[np.uint32]
    _matched: dict[str, NDArray[np.bool_]] = field(default_factory=dict, repr=False, compare=False)

    def matching(self, pattern: str) -> NDArray[np.bool_]:
        """Which names hold the regular expression; shape (names,). Remembered, so nobody may change it."""
        if pattern not in self._matched:
            self._matched[pattern] = contains(self.names, pattern).to_numpy()
            self._matched[pattern].flags.writeable = False
        return self._matched[pattern]

    def events(self, pattern: str) -> NDArray[np.bool_]:
        """Which events have a name that holds the regular expression; shape (events,)."""
        matches: NDArray[np.bool_] = lookup(self.matching(pattern), self.code)
        return matches


@per_trace
def vocabulary(trace: Trace) -> Vocabulary:
    """The distinct names of the events."""
    names = trace.events["name"]
    if is_large(trace):
        return _by_piece(names)
    physical = names.cast(pl.Categorical).to_physical().to_numpy()  # numbers of the process, not of this trace alone
    example = np.full(int(physical.max(initial=0)) + 1, -1)
    example[physical] = np.arange(physical.size)
    used = example >= 0
    number = (np.cumsum(used) - 1).astype(np.uint32)
    return Vocabulary(names.gather(example[used]), number[physical])


def _by_piece(names: pl.Series) -> Vocabulary:
    """The same without a whole column in memory."""
    distinct = pl.Series(names.name, [], dtype=pl.String)
    for piece in ondisk.pieces(names.len()):
        distinct = pl.concat([distinct, names[piece].unique()]).unique(maintain_order=True)
    numbered = pl.Enum(distinct)
    code = ondisk.empty(names.len(), np.uint32)
    for piece in ondisk.pieces(names.len()):
        code[piece] = names[piece].cast(numbered).to_physical().to_numpy()
    return Vocabulary(distinct, code)
