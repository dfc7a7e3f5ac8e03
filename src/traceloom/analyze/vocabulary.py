"""The distinct names of a trace's events, so that a pattern is matched once per name and not once per event."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import polars as pl
from numpy.typing import NDArray

from traceloom.analyze.remembered import per_trace
from traceloom.model import Trace


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """The names of a trace.

    Attributes:
        names: The distinct names.
        code: For each row of `trace.events` the index of its name; shape (events,).
    """

    names: pl.Series
    code: NDArray[np.uint32]

    def matching(self, pattern: str) -> NDArray[np.bool_]:
        """Which names hold the regular expression; shape (names,)."""
        return self.names.str.contains(pattern).to_numpy()

    def events(self, pattern: str) -> NDArray[np.bool_]:
        """Which events have a name that holds the regular expression; shape (events,)."""
        found: NDArray[np.bool_] = self.matching(pattern)[self.code]
        return found


@per_trace
def vocabulary(trace: Trace) -> Vocabulary:
    """The distinct names of the events."""
    names = trace.events["name"]
    physical = names.cast(pl.Categorical).to_physical().to_numpy()  # numbers of the process, not of this trace alone
    example = np.full(int(physical.max(initial=0)) + 1, -1)
    example[physical] = np.arange(physical.size)
    used = example >= 0
    number = (np.cumsum(used) - 1).astype(np.uint32)
    return Vocabulary(names.gather(example[used]), number[physical])
