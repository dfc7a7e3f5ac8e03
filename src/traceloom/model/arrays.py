"""Columns as arrays and arrays as columns: in memory, or on disk where the trace is very large.

What NumPy computes from an array on disk lies on disk too, so callers do not see the difference. Only indexing a table
in memory needs `lookup`, and an array that is made anew takes `like=` a column.
"""

from __future__ import annotations

import weakref
from bisect import bisect_left
from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any, Literal

import numpy as np
import polars as pl
from numpy.typing import NDArray

from traceloom.array_types import Array, Ints
from traceloom.model import Trace
from traceloom.storage import mapped, spill
from traceloom.storage.ondisk import OnDisk, empty, pieces, rows_of

NULL = -(2**63)  # as in `traceloom.read.fields`, which decodes without Polars
NO_ROW = -1
Engine = Literal["in-memory", "streaming"]


def is_large(trace: Trace) -> bool:
    """Whether what is computed from the trace goes to disk."""
    return trace.meta.file_bytes >= spill.SPILL_BYTES


def in_memory(trace: Trace) -> Trace:
    """The same trace, of which what is computed stays in memory however large it is."""
    return replace(trace, meta=replace(trace.meta, file_bytes=-1)) if is_large(trace) else trace


def engine(trace: Trace) -> Engine:
    """How Polars should work on columns as long as the trace: whole columns at once, or by pieces."""
    return "streaming" if is_large(trace) else "in-memory"


def column(trace: Trace, name: str, absent: int | None = None) -> Array:
    """A column of `trace.events`, shape (events,); what is computed from it lies where it lies.

    Args:
        trace: The trace.
        name: The column; categories as their numbers.
        absent: What stands for null; the column is int64 then. None for columns without nulls.
    """
    if name != "category":
        return column_of(trace.events, name, absent, large=is_large(trace))
    if id(trace) not in _CATEGORIES:
        _CATEGORIES[id(trace)] = column_of(trace.events, name, large=is_large(trace))
        weakref.finalize(trace, _CATEGORIES.pop, id(trace))
    return _CATEGORIES[id(trace)]


_CATEGORIES: dict[int, Array] = {}  # by the trace's id: what is asked for most; a view, which takes no memory


def column_of(events: pl.DataFrame, name: str, absent: int | None = None, *, large: bool) -> Array:
    """The same of a frame of events, where it is known whether what is computed from it goes to disk."""
    series = events[name]
    if isinstance(series.dtype, pl.Enum):
        series = series.to_physical()
    if absent is None:
        return series.to_numpy().view(OnDisk) if large else series.to_numpy()
    if not large:
        whole = series.cast(pl.Int64)
        return (whole.fill_null(absent) if whole.null_count() else whole).to_numpy()
    values = empty(series.len(), np.int64)
    for piece in pieces(series.len()):
        values[piece] = series[piece].cast(pl.Int64).fill_null(absent).to_numpy()
    return values


def on_disk(trace: Trace, frame: pl.DataFrame) -> pl.DataFrame:
    """The frame with its columns on disk, where the trace is very large; for frames that are kept."""
    if not is_large(trace):
        return frame

    def parts(name: str) -> Iterator[pl.Series]:
        return (frame[name][piece] for piece in pieces(frame.height))

    columns = [mapped.gathered(dtype, frame.height, partial(parts, name)) for name, dtype in frame.schema.items()]
    return pl.DataFrame([column.alias(name) for name, column in zip(frame.schema, columns, strict=True)])


def lookup(table: Array, codes: Array) -> Array:
    """`table[codes]`, on disk where the codes are."""
    return rows_of(table, codes) if isinstance(codes, OnDisk) else table[codes]


def numbered(texts: pl.Series) -> tuple[pl.Series, NDArray[np.uint32]]:
    """The distinct texts of a column on disk in order of appearance, and the number of each row's; by piece."""
    distinct = pl.Series(texts.name, [], dtype=pl.String)
    for piece in pieces(texts.len()):
        distinct = pl.concat([distinct, texts[piece].unique()]).unique(maintain_order=True)
    code = empty(texts.len(), np.uint32)
    for piece in pieces(texts.len()):
        code[piece] = texts[piece].cast(pl.Enum(distinct)).to_physical().to_numpy()
    return distinct, code


def coded(texts: pl.Series) -> tuple[pl.Series, NDArray[np.uint32]]:
    """The distinct texts of a column in memory, and the number of each row's: `numbered`, without its order."""
    physical = texts.cast(pl.Categorical).to_physical().to_numpy()  # numbers of the process, not of this column alone
    example = np.full(int(physical.max(initial=0)) + 1, -1)
    example[physical] = np.arange(physical.size)
    used = example >= 0
    return texts[example[used]], (np.cumsum(used, dtype=np.uint32) - 1)[physical]


def nearest(parent: Ints, wanted: NDArray[np.bool_]) -> Ints:
    """The nearest proper ancestor that is wanted, -1 where none: pointer jumping over the others."""
    up = parent.copy()
    rows = np.flatnonzero(up >= 0)
    while rows.size:
        rows = rows[~wanted[up[rows]]]
        up[rows] = up[up[rows]]
        rows = rows[up[rows] >= 0]
    return up


def longest_rise(values: Ints) -> Ints:
    """Positions of a longest strictly ascending subsequence, in order: patience sorting, in n log n."""
    ends: list[int] = []
    last: list[int] = []
    before = np.empty(values.size, dtype=np.int64)
    for at, value in enumerate(values.tolist()):
        pile = bisect_left(ends, value)
        if pile == len(ends):
            ends.append(value)
            last.append(at)
        else:
            ends[pile] = value
            last[pile] = at
        before[at] = last[pile - 1] if pile else -1
    out = np.empty(len(ends), dtype=np.int64)
    at = last[-1] if last else -1
    for index in range(len(ends) - 1, -1, -1):
        out[index] = at
        at = int(before[at])
    return out


def subtree_stops(lane: Array, start: Array, end: Array) -> Array:
    """Where the subtree of each row stops: the first later row of its lane that starts at or after its end.

    Args:
        lane: In which the rows are, ascending; shape (rows,).
        start: Ascending within each lane.
        end: Of spans that nest.
    """
    stop = np.arange(1, lane.size + 1, like=lane)
    bounds = np.concatenate([np.flatnonzero(np.diff(lane, prepend=-1)), [lane.size]])
    for low, high in pairwise(bounds.tolist()):
        following = low + np.searchsorted(start[low:high], end[low:high], side="left")
        stop[low:high] = np.maximum(stop[low:high], following)
    return stop


def innermost(here: Ints, stop: Ints, size: int) -> Ints:
    """For each of `size` positions the last of the nested stretches ]here, stop[ around it; -1 for none.

    It changes only where a stretch begins or ends. There it is the last one that began with as many around it as are
    open, less one.
    """
    opened = np.bincount(here + 1, minlength=size + 1)
    opened -= np.bincount(stop, minlength=size + 1)
    changes = np.zeros(size + 1, dtype=np.bool_)
    changes[0] = changes[here + 1] = changes[stop] = True
    at = np.flatnonzero(changes[:size])
    opened = np.cumsum(opened, out=opened)
    around, depth = opened[here], opened[at] - 1
    order = np.argsort(around.astype(np.uint16) if around.max(initial=0) < 1 << 16 else around, kind="stable")
    key = around[order] * size + here[order]
    index = np.searchsorted(key, depth * size + at) - 1
    value = np.where(depth >= 0, np.append(here[order], -1)[index], -1)
    innermost: Ints = np.repeat(value, np.diff(np.append(at, size)))
    return innermost


def distinct(values: Array) -> Array:
    """The different values, sorted."""
    ordered = np.sort(values)
    first = np.ones(len(ordered), dtype=np.bool_)
    first[1:] = ordered[1:] != ordered[:-1]
    return ordered[first]


def nullable(values: Array, dtype: Any = pl.Int64, absent: int = NULL) -> pl.Series:
    """A column in which `absent` is null."""
    if isinstance(values, OnDisk):
        return mapped.numbers(values, dtype, absent)
    missing = values == absent
    if missing.all():
        return pl.Series([None], dtype=dtype).new_from_index(0, len(values))  # takes no memory until it is read
    series = pl.Series(values)
    return series.set(pl.Series(missing), None).cast(dtype) if missing.any() else series.cast(dtype)


def plain(values: Array, dtype: Any) -> pl.Series:
    """A column without nulls."""
    if isinstance(values, OnDisk):
        return mapped.numbers(values, dtype)
    return pl.Series(values).cast(dtype)


def row_numbers(values: Ints) -> pl.Series:
    """A column of event numbers in which -1 is null."""
    return nullable(values, pl.UInt32, NO_ROW)


def chosen(values: pl.Series, codes: Array) -> pl.Series:
    """`values[codes]` in one piece of memory; the numbers are handed over by piece."""
    if not isinstance(codes, OnDisk):
        return values[pl.Series(codes.astype(np.uint32))]
    plain_codes = codes.view(np.ndarray)
    parts = [values[pl.Series(plain_codes[piece].astype(np.uint32))] for piece in pieces(len(codes))]
    return pl.concat(parts, rechunk=True)


class Texts:
    """Texts by number: names as they are, lists as compact JSON text, which is made when first asked for.

    Attributes:
        names: The texts that stand in the file as text; empty in the places of lists.
    """

    def __init__(self, table: Iterable[Any]) -> None:
        self._keys = list(table)
        self.names = [key if isinstance(key, str) else "" for key in self._keys]
        self._is_list = np.array([not isinstance(key, str) for key in self._keys] + [False])
        self._tables: dict[bool, _TextColumn] = {}

    def column(self, codes: Array) -> pl.Series:
        """The texts of these numbers; null for -1."""
        lists = bool(lookup(self._is_list, codes).any())
        if lists not in self._tables:
            values = [key if isinstance(key, str) else compact(key) for key in self._keys] if lists else self.names
            self._tables[lists] = _TextColumn(values)
        return self._tables[lists].column(codes)


class _TextColumn:
    def __init__(self, values: list[str]) -> None:
        self._values = values
        self._series = pl.Series([*values, None], dtype=pl.String)
        self._table: mapped.TextTable | None = None

    def column(self, codes: Array) -> pl.Series:
        if isinstance(codes, OnDisk):
            self._table = self._table or mapped.TextTable(self._values)
            if self._table.fits:
                return self._table.column(codes)
        return self._series[pl.Series(np.where(codes < 0, len(self._values), codes).astype(np.uint32))]


def compact(raw: bytes) -> str:
    """JSON text without blanks; the content of a JSON string; `[]` where it is malformed."""
    import msgspec

    try:
        value = msgspec.json.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return "[]"
    return value if isinstance(value, str) else msgspec.json.encode(value).decode()
