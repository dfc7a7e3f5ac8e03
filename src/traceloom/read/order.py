"""Rows in time order: the permutation of the file's complete events, and arrays in the new order."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import polars as pl
from msgspec import Struct
from numpy.typing import NDArray

from traceloom.read import mapped
from traceloom.read.fields import NULL
from traceloom.read.ondisk import OnDisk, lookup, pieces

Ints = NDArray[np.int64]
Array = NDArray[Any]
NO_ROW = -1


class Order(Struct, frozen=True):
    """The permutation that sorts events by (start, longer first, place in the file).

    Attributes:
        rows: `column[rows]` is in time order.
        event: Event number of each row of the file.
    """

    rows: Ints
    event: Ints


def time_order(start: Ints, duration: Ints) -> Order:
    """Sort by start; only where starts are equal are durations looked at."""
    rows = np.argsort(start, kind="stable")
    sorted_start = start[rows]
    equal = sorted_start[1:] == sorted_start[:-1]
    if equal.any():
        tied = np.zeros(len(rows), dtype=np.bool_, like=start)
        tied[1:] |= equal
        tied[:-1] |= equal
        places = np.flatnonzero(tied)
        among = rows[places]
        rows[places] = among[np.lexsort((-duration[among], start[among]))]
    event = np.empty(len(rows), dtype=np.int64, like=start)
    event[rows] = np.arange(len(rows), like=start)
    return Order(rows, event)


def nearest(parent: Ints, wanted: NDArray[np.bool_]) -> Ints:
    """The nearest proper ancestor that is wanted, -1 where none: pointer jumping over the others."""
    up = parent.copy()
    rows = np.flatnonzero(up >= 0)
    while rows.size:
        rows = rows[~wanted[up[rows]]]
        up[rows] = up[up[rows]]
        rows = rows[up[rows] >= 0]
    return up


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
        return pl.repeat(None, len(values), dtype=dtype, eager=True)  # takes no memory until it is read
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
