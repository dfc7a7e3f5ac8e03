"""The distinct names of a trace's events, so that a pattern is matched once per name and not once per event."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
import polars as pl
from numpy.typing import NDArray

from traceloom.analyze.remembered import of_each, per_trace
from traceloom.analyze.stacked import stacked, unstacked
from traceloom.model import Trace
from traceloom.model.arrays import coded, is_large, lookup, numbered
from traceloom.model.letter_case import contain


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """The names of a trace.

    Attributes:
        names: The distinct names.
        code: For each row of `trace.events` the index of its name; shape (events,).
        ordered: The distinct names of all traces that are looked at together, in the order of the alphabet: a pattern
            is matched for all of them at once.
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
    names, code = _distinct(trace)
    return Vocabulary(names, code, *_ordered(trace))


@per_trace
def _distinct(trace: Trace) -> tuple[pl.Series, NDArray[np.uint32]]:
    """The distinct names, and for each event the index of its own."""
    names = trace.events["name"]
    return numbered(names) if is_large(trace) else coded(names)


@of_each
def _ordered(traces: Sequence[Trace]) -> Iterable[tuple[pl.Series, NDArray[np.int64]]]:
    """The names of all the traces, and for each of one's own its place among them."""
    rows = stacked(_distinct(trace)[0].to_frame() for trace in traces)
    ordered = rows["name"].unique().sort()
    index = ordered.to_frame().with_row_index("place")
    places = rows.join(index, on="name", how="left", nulls_equal=True, maintain_order="left").drop("name")
    return [(ordered, place["place"].cast(pl.Int64).to_numpy()) for place in unstacked(places, traces)]
