"""Names of events with patterns matched once per distinct name, and rule tables."""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
from numpy.typing import NDArray

from traceloom.errors import InputError, UsageError
from traceloom.system.files import read_small
from traceloom.trace.arrays import encode_names, encode_names_by_piece, gather_rows, is_large
from traceloom.trace.batch import (
    cache_per_trace,
    concatenate_by_trace,
    run_in_batches,
    split_by_trace,
)
from traceloom.trace.frames import contains, contains_any
from traceloom.trace.trace import Trace


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """The names of a trace.

    Attributes:
        names: The distinct names.
        code: For each row of `trace.events` the index of its name; shape (events,).
        ordered: The distinct names of all traces that are analysed together, in alphabetical order:
            a pattern is matched for all of them at once.
        place: For each name its index there; shape (names,).
    """

    names: pl.Series
    code: NDArray[np.uint32]
    ordered: pl.Series
    place: NDArray[np.int64]
    _matched: dict[str, NDArray[np.bool_]] = field(default_factory=dict, repr=False, compare=False)

    def matching(self, pattern: str) -> NDArray[np.bool_]:
        """Returns which names match the regular expression; shape (names,).

        Cached, so the result must not be changed.
        """
        return self.matching_each([pattern])[0]

    def matching_each(self, patterns: Sequence[str]) -> list[NDArray[np.bool_]]:
        """Returns the same for each of several expressions, in one pass, which is faster than one
        by one.
        """
        new = [pattern for pattern in patterns if pattern not in self._matched]
        for pattern, matches in zip(
            new, contains_any(self.ordered, new) if new else (), strict=True
        ):
            self._matched[pattern] = matches.to_numpy()[self.place]
            self._matched[pattern].flags.writeable = False
        return [self._matched[pattern] for pattern in patterns]

    def events(self, pattern: str) -> NDArray[np.bool_]:
        """Returns which events have a name that matches the regular expression; shape (events,)."""
        return gather_rows(self.matching(pattern), self.code)


@cache_per_trace
def build_vocabulary(trace: Trace) -> Vocabulary:
    """Returns the distinct names of the events."""
    names, code = _encode_distinct(trace)
    return Vocabulary(names, code, *_sort_names(trace))


@cache_per_trace
def _encode_distinct(trace: Trace) -> tuple[pl.Series, NDArray[np.uint32]]:
    """Returns the distinct names, and for each event the index of its own."""
    names = trace.events["name"]
    return encode_names_by_piece(names) if is_large(trace) else encode_names(names)


@run_in_batches
def _sort_names(traces: Sequence[Trace]) -> Iterable[tuple[pl.Series, NDArray[np.int64]]]:
    """Yields the names of all the traces in order, and the index of each trace's own names in
    them.
    """
    rows = concatenate_by_trace(_encode_distinct(trace)[0].to_frame() for trace in traces)
    ordered = rows["name"].unique().sort()
    index = ordered.to_frame().with_row_index("place")
    name_index = rows.join(
        index, on="name", how="left", nulls_equal=True, maintain_order="left"
    ).drop("name")
    return [
        (ordered, trace_index["place"].cast(pl.Int64).to_numpy())
        for trace_index in split_by_trace(name_index, traces)
    ]


_MAX_BYTES = 1 << 26
# Patterns of the built-in tables, which need no check in every run
_trusted_patterns: set[str] = set()


def read_built_in(name: str) -> list[Any]:
    """Returns the rows of a table that comes with Traceloom."""
    rows = check_list(
        json.loads(files("traceloom.analyze").joinpath(name).read_text(encoding="utf-8")), name
    )
    _trusted_patterns.update(
        row[key] for row in rows for key in ("pattern", "op", "under") if key in row
    )
    return rows


def read(path: str | Path) -> list[Any]:
    """Reads the rows of a user's table.

    Raises:
        InputError: slug `kernel-rules-unreadable`: the file is not a JSON list.
    """
    try:
        rows = json.loads(read_small(path, _MAX_BYTES))
    except (OSError, ValueError, RecursionError) as error:
        raise InputError(
            f"kernel rules cannot be read: {error}", slug="kernel-rules-unreadable", where=str(path)
        ) from error
    return check_list(rows, str(path))


def check_list(rows: Any, location: str) -> list[Any]:
    """Returns the rows if they are a list, and raises `kernel-rules-unreadable` otherwise."""
    if not isinstance(rows, list):
        raise InputError(
            "expected a JSON list of kernel rules", slug="kernel-rules-unreadable", where=location
        )
    return rows


def check_pattern(rule: str, pattern: str) -> None:
    """Rejects a pattern that is not a regular expression.

    Raises:
        UsageError: slug `bad-kernel-rule`.
    """
    if pattern in _trusted_patterns:
        return
    try:
        contains(pl.Series([""]), f"(?i){pattern}")
    except pl.exceptions.ComputeError as error:
        raise UsageError(
            f"kernel rule {rule!r} has a pattern that is no regular expression: {pattern!r}",
            slug="bad-kernel-rule",
            hint="look-around and back references are not supported",
        ) from error
