"""Polars columns whose data stay on disk: arrays of `traceloom.storage.ondisk` handed over without a copy.

Numbers go over as they are; a bitmap says which of them are null. Texts are views of 16 bytes per row (length, then the
text itself or a prefix and its place in one common buffer), as the Arrow columnar format describes them under
"variable-size binary view layout".
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import polars as pl

from traceloom.array_types import Array
from traceloom.storage.ondisk import OnDisk, empty, rows_of

_INLINE = 12  # bytes of a text that fit its view
_MOST_HEAP = 2**31 - 1
_ARROW: dict[Any, str] = {
    pl.Int64: "int64", pl.UInt64: "uint64", pl.Int32: "int32", pl.UInt32: "uint32", pl.UInt16: "uint16",
    pl.Float64: "float64",
}  # fmt: skip


class _Given:
    """An Arrow array that is handed over itself, not as a copy of its head."""

    def __init__(self, array: Any) -> None:
        self._array = array

    def __arrow_c_array__(self, requested_schema: Any = None) -> tuple[Any, Any]:
        make = ctypes.pythonapi.PyCapsule_New
        make.restype, make.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
        return self._array.schema.__arrow_c_schema__(), make(self._array._addr(), b"arrow_array", None)  # noqa: SLF001


def numbers(values: OnDisk, dtype: Any, absent: int | None = None) -> pl.Series:
    """A column of numbers; null where the value is `absent`.

    Args:
        values: Shape (rows,).
        dtype: A Polars number type.
        absent: Not looked for where None.
    """
    present = None if absent is None else values != absent
    target = np.dtype(_ARROW[dtype])
    data = values.astype(target) if values.dtype != target else values
    if present is None or present.all():
        return pl.Series(data.view(np.ndarray)).cast(dtype)
    bits = np.packbits(present.view(np.ndarray), bitorder="little")
    return series(_ARROW[dtype], len(data), [bits, data.view(np.ndarray)])


def arrow_name(dtype: pl.DataType) -> str | None:
    """What Arrow calls a type of numbers; None for other types."""
    return _ARROW.get(type(dtype))


class TextTable:
    """Distinct texts from which columns are made.

    Args:
        texts: The texts; a code is an index into them.
    """

    def __init__(self, texts: list[str]) -> None:
        encoded = [text.encode() for text in texts]
        lengths = np.array([len(text) for text in encoded], dtype=np.int64)
        self.fits = int(lengths.sum()) <= _MOST_HEAP
        self._heap = np.frombuffer(b"".join(encoded) or b"\0", dtype=np.uint8)
        places = np.cumsum(lengths) - lengths
        views = []
        for text, offset in zip(encoded, places.tolist(), strict=True) if self.fits else ():
            length = len(text).to_bytes(4, "little")
            inline = text.ljust(_INLINE, b"\0") if len(text) <= _INLINE else None
            views.append(length + (inline or text[:4] + bytes(4) + offset.to_bytes(4, "little")))
        # one more, for codes below 0
        self._views = np.frombuffer(b"".join([*views, bytes(16)]), dtype=np.complex128)  # any type of 16 bytes

    def column(self, codes: Array, keep: Callable[[Array], Array] = lambda values: values) -> pl.Series:
        """The texts of these codes; null for codes below 0. Shape (rows,).

        Args:
            codes: Indices into the texts.
            keep: Moves the views and the texts themselves to where they are to be kept.
        """
        present = codes >= 0
        gathered = rows_of(self._views, codes).view(np.ndarray)
        bits = None if present.all() else np.packbits(present.view(np.ndarray), bitorder="little")
        return series("string_view", len(codes), [bits, keep(gathered).view(np.uint8), keep(self._heap)])


def series(kind: str, length: int, buffers: list[Any]) -> pl.Series:
    """A column over buffers as Arrow lays them out, which are not copied; the bitmap first, None without nulls."""
    import nanoarrow

    if kind == "string_view":
        buffers = [*buffers, np.array([len(buffers[-1])], dtype=np.int64)]
    array = nanoarrow.c_array_from_buffers(
        getattr(nanoarrow, kind)(), length, buffers, null_count=-1, validation_level="none"
    )
    return pl.Series(_Given(array))


def gathered(dtype: pl.DataType, count: int, parts: Callable[[], Iterator[pl.Series]]) -> pl.Series:
    """A column on disk, from its parts.

    Args:
        dtype: Of the column; what is neither number nor text comes back in memory.
        count: Rows of all parts.
        parts: Gives the parts in order; called twice for texts.
    """
    if not count:
        return pl.Series([], dtype=dtype)
    at = 0
    if dtype == pl.String:
        distinct = pl.Series([], dtype=pl.String)
        for part in parts():
            distinct = pl.concat([distinct, part.drop_nulls().unique()]).unique(maintain_order=True)
        table, codes = TextTable(distinct.to_list()), empty(count, np.int32)
        if not table.fits or not isinstance(codes, OnDisk):
            return pl.concat(list(parts()), rechunk=True)
        for part in parts():
            numbered = part.cast(pl.Enum(distinct)).to_physical().cast(pl.Int32)
            codes[at : at + part.len()] = numbered.fill_null(-1).to_numpy()
            at += part.len()
        return table.column(codes)
    if type(dtype) not in _ARROW:
        return pl.concat(list(parts()), rechunk=True)
    kind = _ARROW[type(dtype)]
    values, present = empty(count, np.dtype(kind)), np.ones(count, dtype=np.bool_)
    for part in parts():
        rows = slice(at, at + part.len())
        values[rows] = part.fill_null(0).to_numpy()
        present[rows] = part.is_not_null().to_numpy()
        at += part.len()
    data = values.view(np.ndarray)
    if present.all():
        return pl.Series(data)
    return series(kind, count, [np.packbits(present, bitorder="little"), data])
