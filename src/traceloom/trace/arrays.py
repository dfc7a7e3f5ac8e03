"""Columns as NumPy arrays and back.

Who encloses whom on a lane: parents, depths, nearest ancestors, without a loop over events.

Numbers go over as they are; a bitmap says which of them are null. Texts are views of 16 bytes per row (length, then the
text itself or a prefix and its place in one common buffer), as the Arrow columnar format describes them under
"variable-size binary view layout".

What NumPy computes from an array on disk lies on disk too, so callers do not see the difference. Only indexing a table
in memory needs `lookup`, and an array that is made anew takes `like=` a column.
"""

from __future__ import annotations

import ctypes
import weakref
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any, Literal

import numpy as np
import polars as pl
from msgspec import Struct
from numpy.typing import NDArray

from traceloom.trace import mapped_arrays
from traceloom.trace.array_types import Array, Bools, Ints
from traceloom.trace.mapped_arrays import OnDisk, empty, pieces, rows_of
from traceloom.trace.trace import Trace

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


NULL = -(2**63)  # as in `traceloom.formats.kineto_fields`, which decodes without Polars
NO_ROW = -1
Engine = Literal["in-memory", "streaming"]


def is_large(trace: Trace) -> bool:
    """Whether what is computed from the trace goes to disk."""
    return trace.meta.file_bytes >= mapped_arrays.SPILL_BYTES


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

    columns = [gathered(dtype, frame.height, partial(parts, name)) for name, dtype in frame.schema.items()]
    return pl.DataFrame([column.alias(name) for name, column in zip(frame.schema, columns, strict=True)])


def gather_rows(table: Array, codes: Array) -> Array:
    """`table[codes]`, on disk where the codes are."""
    return rows_of(table, codes) if isinstance(codes, OnDisk) else table[codes]


def encode_names_by_piece(texts: pl.Series) -> tuple[pl.Series, NDArray[np.uint32]]:
    """The distinct texts of a column on disk in order of appearance, and the number of each row's; by piece."""
    distinct = pl.Series(texts.name, [], dtype=pl.String)
    for piece in pieces(texts.len()):
        distinct = pl.concat([distinct, texts[piece].unique()]).unique(maintain_order=True)
    code = empty(texts.len(), np.uint32)
    for piece in pieces(texts.len()):
        code[piece] = texts[piece].cast(pl.Enum(distinct)).to_physical().to_numpy()
    return distinct, code


def encode_names(texts: pl.Series) -> tuple[pl.Series, NDArray[np.uint32]]:
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


def longest_increasing_subsequence(values: Ints) -> Ints:
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


def innermost_stretch(here: Ints, stop: Ints, size: int) -> Ints:
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


def sorted_unique(values: Array) -> Array:
    """The different values, sorted."""
    ordered = np.sort(values)
    first = np.ones(len(ordered), dtype=np.bool_)
    first[1:] = ordered[1:] != ordered[:-1]
    return ordered[first]


def to_nullable_series(values: Array, dtype: Any = pl.Int64, absent: int = NULL) -> pl.Series:
    """A column in which `absent` is null."""
    if isinstance(values, OnDisk):
        return numbers(values, dtype, absent)
    missing = values == absent
    if missing.all():
        return pl.Series([None], dtype=dtype).new_from_index(0, len(values))  # takes no memory until it is read
    series = pl.Series(values)
    return series.set(pl.Series(missing), None).cast(dtype) if missing.any() else series.cast(dtype)


def to_series(values: Array, dtype: Any) -> pl.Series:
    """A column without nulls."""
    if isinstance(values, OnDisk):
        return numbers(values, dtype)
    return pl.Series(values).cast(dtype)


def row_numbers(values: Ints) -> pl.Series:
    """A column of event numbers in which -1 is null."""
    return to_nullable_series(values, pl.UInt32, NO_ROW)


def take_texts(values: pl.Series, codes: Array) -> pl.Series:
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
        lists = bool(gather_rows(self._is_list, codes).any())
        if lists not in self._tables:
            values = (
                [key if isinstance(key, str) else format_json_list(key) for key in self._keys] if lists else self.names
            )
            self._tables[lists] = _TextColumn(values)
        return self._tables[lists].column(codes)


class _TextColumn:
    def __init__(self, values: list[str]) -> None:
        self._values = values
        self._series = pl.Series([*values, None], dtype=pl.String)
        self._table: TextTable | None = None

    def column(self, codes: Array) -> pl.Series:
        if isinstance(codes, OnDisk):
            self._table = self._table or TextTable(self._values)
            if self._table.fits:
                return self._table.column(codes)
        return self._series[pl.Series(np.where(codes < 0, len(self._values), codes).astype(np.uint32))]


def format_json_list(raw: bytes) -> str:
    """JSON text without blanks; the content of a JSON string; `[]` where it is malformed."""
    import msgspec

    try:
        value = msgspec.json.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return "[]"
    return value if isinstance(value, str) else msgspec.json.encode(value).decode()


_SMALL = 1 << 16  # whole numbers below are sorted in one pass
_ROUNDS = 4  # of cutting; what still crosses then is clipped
_CLIMB = 100  # ancestors looked at; chains of crossing spans are as long as the trace


def stable_order(numbers: Ints) -> Ints:
    """The rows in the order of small numbers >= 0 (lanes, depths), equal ones as they stand."""
    if isinstance(numbers, OnDisk) or int(numbers.max(initial=0)) >= _SMALL:
        return np.argsort(numbers, kind="stable")
    return np.argsort(numbers.astype(np.uint16), kind="stable")


def time_order(start: Ints, duration: Ints) -> Ints:
    """The rows by (start, longer first, place in the file); only where starts are equal are durations looked at."""
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
    return rows


class Nesting(Struct, frozen=True):
    """The forest of a trace's events; arrays of shape (events,).

    Attributes:
        parent: Row of the enclosing event on the same lane; -1 for roots.
        depth: 0 for roots.
        nested_end_ns: End, shortened where spans cross.
        clipped: Rows that were shortened.
    """

    parent: Ints
    depth: Ints
    nested_end_ns: Ints
    clipped: Ints


def nest(lane: Ints, start_ns: Ints, end_ns: Ints, nests: Bools) -> Nesting:
    """Find each event's parent: the nearest earlier one on its lane that has not ended at its start.

    Where two spans cross (one starts inside the other and outlives it), the one that loses less is shortened: a child
    that overruns by a rounding error is clipped to its parent, but the Python frame of `__enter__` ends where the
    annotation that it opens begins.

    Args:
        lane: Lane of each event; rows sorted by (start, longer first).
        start_ns: Starts.
        end_ns: Ends, >= starts.
        nests: False for rows that stand alone (device lanes, where overlap is not nesting).
    """
    rows = np.flatnonzero(nests)
    order = rows[stable_order(lane[rows])]
    lanes, starts, raw = lane[order], start_ns[order], end_ns[order]
    # First candidates: the row before on the same lane.
    above = np.arange(-1, len(lanes) - 1, dtype=np.int64, like=lanes)
    above[1:][lanes[1:] != lanes[:-1]] = -1
    above = _previous_open(starts, raw, above)
    # Parents are cut where an overrunning child would lose more.
    ends = raw
    for _ in range(_ROUNDS):
        child = np.flatnonzero((above >= 0) & (ends > ends[above]))
        outer = above[child]
        shorter = ends.copy()
        for _ in range(_CLIMB):
            overrun = ends[child] - ends[outer]
            cut = (overrun > 0) & (ends[outer] - starts[child] < overrun)
            child, outer = child[cut], outer[cut]
            np.minimum.at(shorter, outer, starts[child])
            outer = above[outer]
            child, outer = child[outer >= 0], outer[outer >= 0]
            if not child.size:
                break
        if np.array_equal(shorter, ends):
            break
        ends = shorter
        above = _previous_open(starts, ends, above)
    above, depths, ends = _settle(starts, above, ends)
    parent = np.full(len(lane), -1, dtype=np.int64, like=lane)
    parent[order] = np.where(above >= 0, order[above], -1)
    depth = np.zeros(len(lane), dtype=np.int64, like=lane)
    depth[order] = depths
    nested_end = end_ns.copy()
    nested_end[order] = ends
    return Nesting(parent, depth, nested_end, np.sort(order[ends < raw]))


def _settle(starts: Ints, above: Ints, raw: Ints) -> tuple[Ints, Ints, Ints]:
    """Parents, depths and clipped ends that agree with each other; rows in pre-order.

    Clipping a span frees later events it seemed to enclose; only the small subtrees where that happens are walked
    event by event.
    """
    depths = nesting_depths(above)
    # Each end is bounded by its parent's, from the roots down.
    ends = raw.copy()
    order = stable_order(depths)
    for low, high in pairwise(np.cumsum(np.bincount(depths))):
        rows = order[low:high]
        ends[rows] = np.minimum(ends[rows], ends[above[rows]])
    freed = np.flatnonzero((above >= 0) & (ends[above] <= starts))
    # The highest ancestors that ended too early: all that can change lies below them.
    tops = above[freed]
    while True:
        higher = above[tops]
        climbs = (higher >= 0) & (ends[higher] <= starts[freed])
        if not climbs.any():
            break
        tops = np.where(climbs, higher, tops)
    done = 0
    for top in sorted(set(tops.tolist())):
        if top < done:
            continue
        done, width = top + 1, 64  # the first row after the subtree
        while done < len(depths):
            outside = np.flatnonzero(depths[done : done + width] <= depths[top])
            if outside.size:
                done += int(outside[0])
                break
            done, width = min(done + width, len(depths)), width * 2
        _walk(top, done, starts, raw, (above, depths, ends))
    return above, depths, ends


def _walk(low: int, high: int, starts: Ints, raw: Ints, columns: tuple[Ints, Ints, Ints]) -> None:
    """Recompute parents, depths and ends of the rows low..high-1 of one lane with a stack, in place."""
    above, depths, ends = columns
    outer, base = int(above[low]), int(depths[low])
    limit = int(ends[outer]) if outer >= 0 else None
    stack: list[tuple[int, int]] = []  # rows and their ends
    parents, levels, clipped = [], [], []
    for row, (start, own) in enumerate(zip(starts[low:high].tolist(), raw[low:high].tolist(), strict=True), low):
        while stack and stack[-1][1] <= start:
            stack.pop()
        parent, bound = stack[-1] if stack else (outer, limit)
        end = own if bound is None else min(own, bound)
        parents.append(parent)
        levels.append(base + len(stack))
        clipped.append(end)
        stack.append((row, end))
    above[low:high], depths[low:high], ends[low:high] = parents, levels, clipped


def _previous_open(starts: Ints, ends: Ints, above: Ints) -> Ints:
    """The nearest earlier row of the same lane whose end is after the start, by pointer jumping.

    A row that has ended lets its successors jump to its own candidate: all rows between had ended before it began.

    Args:
        starts: Starts.
        ends: Ends.
        above: First candidates: the row before, or the result for later ends; -1 where that is of another lane.
    """
    above = above.copy()
    rows = np.flatnonzero(above >= 0)
    while rows.size:
        candidate = above[rows]
        ended = ends[candidate] <= starts[rows]
        rows = rows[ended]
        above[rows] = candidate = above[candidate[ended]]
        rows = rows[candidate >= 0]
    return above


def nesting_depths(above: Ints) -> Ints:
    """Length of each row's chain of parents, by pointer doubling."""
    depth = (above >= 0).astype(np.int64)
    pointer = above.copy()
    rows = np.flatnonzero(pointer >= 0)
    while rows.size:
        target = pointer[rows]
        depth[rows] += depth[target]
        pointer[rows] = pointer[target]
        rows = rows[pointer[rows] >= 0]
    return depth
