"""The distinct names of a trace's events, so that a pattern is matched once per name and not once per event."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
import polars as pl
from numpy.typing import NDArray

from traceloom.analyze.remembered import of_each, per_trace
from traceloom.model import Trace
from traceloom.model.arrays import is_large, lookup, numbered
from traceloom.model.letter_case import contain


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """The names of a trace.

    Attributes:
        names: The distinct names.
        code: For each row of `trace.events` the index of its name; shape (events,).
        ordered: The distinct names in the order of the alphabet, of all traces that are looked at together, so that a
            pattern is matched once for all of them.
        place: For each name its index there; shape (names,).
    """

    names: pl.Series
    code: NDArray[np.uint32]
    ordered: pl.Series
    place: NDArray[np.int64]
    _matched: dict[str, NDArray[np.bool_]] = field(default_factory=dict, repr=False, compare=False)

    def matching(self, pattern: str) -> NDArray[np.bool_]:
        """Which names hold the regular expression; shape (names,). Remembered, so nobody may change it."""
        return self.matching_each([pattern])[0]

    def matching_each(self, patterns: Sequence[str]) -> list[NDArray[np.bool_]]:
        """The same for each of several expressions; in one go, which takes less than one by one."""
        new = [pattern for pattern in patterns if pattern not in self._matched]
        for pattern, matches in zip(new, contain(self.ordered, new) if new else (), strict=True):
            self._matched[pattern] = matches.to_numpy()[self.place]
            self._matched[pattern].flags.writeable = False
        return [self._matched[pattern] for pattern in patterns]

    def events(self, pattern: str) -> NDArray[np.bool_]:
        """Which events have a name that holds the regular expression; shape (events,)."""
        matches: NDArray[np.bool_] = lookup(self.matching(pattern), self.code)
        return matches


@per_trace
def vocabulary(trace: Trace) -> Vocabulary:
    """The distinct names of the events."""
    return _of_each(trace)


@of_each
def _of_each(traces: Sequence[Trace]) -> Iterable[Vocabulary]:
    coded = [_coded(trace) for trace in traces]
    every = pl.concat([names for names, _ in coded])
    order = every.arg_sort().to_numpy()
    number = every[order].rle_id().to_numpy()  # of the distinct name
    ordered = every[order[np.flatnonzero(np.diff(number, prepend=-1))]]
    place = np.empty(order.size, dtype=np.int64)
    place[order] = number
    bounds = np.cumsum([names.len() for names, _ in coded])[:-1]
    for (names, code), place_of in zip(coded, np.split(place, bounds), strict=True):
        yield Vocabulary(names, code, ordered, place_of)


def _coded(trace: Trace) -> tuple[pl.Series, NDArray[np.uint32]]:
    """The distinct names, and the index of each event's."""
    names = trace.events["name"]
    if is_large(trace):
        return numbered(names)
    physical = names.cast(pl.Categorical).to_physical().to_numpy()  # numbers of the process, not of this trace alone
    example = np.full(int(physical.max(initial=0)) + 1, -1)
    example[physical] = np.arange(physical.size)
    used = example >= 0
    number = (np.cumsum(used) - 1).astype(np.uint32)
    return names[example[used]], number[physical]
