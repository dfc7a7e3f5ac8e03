"""Conversion between Polars columns and NumPy arrays, and vectorized algorithms on nested spans.

Numbers are converted without change; a bitmap marks the nulls. Texts are views of 16 bytes per row
(length, then the text itself or a prefix and its position in a common buffer), as the Arrow
columnar format describes them under "variable-size binary view layout".

What NumPy computes from an array on disk is on disk too, so callers see no difference. Only
indexing a table in memory needs `gather_rows`, and a newly created array takes `like=` a column.
"""

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
from traceloom.trace.mapped_arrays import MappedArray, allocate_array, iterate_slices, select_rows
from traceloom.trace.trace import Trace

_MAX_INLINE_BYTES = 12  # longest text that is stored inside its view
_MAX_HEAP_BYTES = 2**31 - 1
_ARROW_NAMES: dict[Any, str] = {
    pl.Int64: "int64",
    pl.UInt64: "uint64",
    pl.Int32: "int32",
    pl.UInt32: "uint32",
    pl.UInt16: "uint16",
    pl.Float64: "float64",
}


class _ArrowArray:
    """An Arrow array that is exported itself rather than as a copy of its metadata."""

    def __init__(self, array: Any) -> None:
        self._array = array

    def __arrow_c_array__(self, requested_schema: Any = None) -> tuple[Any, Any]:
        make = ctypes.pythonapi.PyCapsule_New
        make.restype, make.argtypes = (
            ctypes.py_object,
            [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p],
        )
        return self._array.schema.__arrow_c_schema__(), make(
            self._array._addr(),  # noqa: SLF001
            b"arrow_array",
            None,
        )


def build_number_column(values: MappedArray, dtype: Any, absent: int | None = None) -> pl.Series:
    """Returns a numeric column; null where the value is `absent`.

    Args:
        values: Shape (rows,).
        dtype: A Polars number type.
        absent: The value that stands for null; None if there are no nulls.
    """
    present = None if absent is None else values != absent
    target = np.dtype(_ARROW_NAMES[dtype])
    data = values.astype(target) if values.dtype != target else values
    if present is None or present.all():
        return pl.Series(data.view(np.ndarray)).cast(dtype)
    validity = np.packbits(present.view(np.ndarray), bitorder="little")
    return wrap_arrow_buffers(_ARROW_NAMES[dtype], len(data), [validity, data.view(np.ndarray)])


def get_arrow_name(dtype: pl.DataType) -> str | None:
    """Returns Arrow's name of a numeric type; None for other types."""
    return _ARROW_NAMES.get(type(dtype))


class TextTable:
    """Distinct texts from which columns are built by code.

    Args:
        texts: The texts; a code is an index into them.
    """

    def __init__(self, texts: list[str]) -> None:
        encoded = [text.encode() for text in texts]
        lengths = np.array([len(text) for text in encoded], dtype=np.int64)
        self.fits = int(lengths.sum()) <= _MAX_HEAP_BYTES
        self._heap = np.frombuffer(b"".join(encoded) or b"\0", dtype=np.uint8)
        offsets = np.cumsum(lengths) - lengths
        views = []
        for text, offset in zip(encoded, offsets.tolist(), strict=True) if self.fits else ():
            length = len(text).to_bytes(4, "little")
            inline = (
                text.ljust(_MAX_INLINE_BYTES, b"\0") if len(text) <= _MAX_INLINE_BYTES else None
            )
            views.append(length + (inline or text[:4] + bytes(4) + offset.to_bytes(4, "little")))
        # one extra view, for codes below 0
        self._views = np.frombuffer(
            b"".join([*views, bytes(16)]), dtype=np.complex128
        )  # any 16-byte type will do

    def column(
        self, codes: Array, store_array: Callable[[Array], Array] = lambda values: values
    ) -> pl.Series:
        """Returns the texts of the codes, null for codes below 0. Shape (rows,).

        Args:
            codes: Indices into the texts.
            store_array: Moves the views and the text buffer to their final storage.
        """
        present = codes >= 0
        gathered = select_rows(self._views, codes).view(np.ndarray)
        validity = (
            None if present.all() else np.packbits(present.view(np.ndarray), bitorder="little")
        )
        return wrap_arrow_buffers(
            "string_view",
            len(codes),
            [validity, store_array(gathered).view(np.uint8), store_array(self._heap)],
        )


def wrap_arrow_buffers(kind: str, length: int, buffers: list[Any]) -> pl.Series:
    """Wraps buffers in Arrow's layout as a column without copying them; the bitmap comes first,
    None if there are no nulls.
    """
    import nanoarrow

    if kind == "string_view":
        buffers = [*buffers, np.array([len(buffers[-1])], dtype=np.int64)]
    array = nanoarrow.c_array_from_buffers(
        getattr(nanoarrow, kind)(), length, buffers, null_count=-1, validation_level="none"
    )
    return pl.Series(_ArrowArray(array))


def build_mapped_column(
    dtype: pl.DataType, count: int, parts: Callable[[], Iterator[pl.Series]]
) -> pl.Series:
    """Returns a column on disk that is concatenated from parts.

    Args:
        dtype: Type of the column; a column that is neither numeric nor text is returned in memory.
        count: Rows of all parts.
        parts: Yields the parts in order; called twice for texts.
    """
    if not count:
        return pl.Series([], dtype=dtype)
    offset = 0
    if dtype == pl.String:
        distinct = pl.Series([], dtype=pl.String)
        for part in parts():
            distinct = pl.concat([distinct, part.drop_nulls().unique()]).unique(maintain_order=True)
        table, codes = TextTable(distinct.to_list()), allocate_array(count, np.int32)
        if not table.fits or not isinstance(codes, MappedArray):
            return pl.concat(list(parts()), rechunk=True)
        for part in parts():
            numbered = part.cast(pl.Enum(distinct)).to_physical().cast(pl.Int32)
            codes[offset : offset + part.len()] = numbered.fill_null(-1).to_numpy()
            offset += part.len()
        return table.column(codes)
    if type(dtype) not in _ARROW_NAMES:
        return pl.concat(list(parts()), rechunk=True)
    kind = _ARROW_NAMES[type(dtype)]
    values, present = allocate_array(count, np.dtype(kind)), np.ones(count, dtype=np.bool_)
    for part in parts():
        rows = slice(offset, offset + part.len())
        values[rows] = part.fill_null(0).to_numpy()
        present[rows] = part.is_not_null().to_numpy()
        offset += part.len()
    data = values.view(np.ndarray)
    if present.all():
        return pl.Series(data)
    return wrap_arrow_buffers(kind, count, [np.packbits(present, bitorder="little"), data])


NULL = -(2**63)  # as in `traceloom.formats.kineto_fields`, which decodes without Polars
NO_ROW = -1
Engine = Literal["in-memory", "streaming"]


def is_large(trace: Trace) -> bool:
    """Returns whether arrays computed from the trace go to disk."""
    return trace.meta.file_bytes >= mapped_arrays.MIN_SPILL_BYTES


def keep_in_memory(trace: Trace) -> Trace:
    """Returns the trace, marked so that arrays computed from it stay in memory however large it
    is.
    """
    return replace(trace, meta=replace(trace.meta, file_bytes=-1)) if is_large(trace) else trace


def choose_engine(trace: Trace) -> Engine:
    """Returns the Polars engine for columns as long as the trace: streaming for large traces."""
    return "streaming" if is_large(trace) else "in-memory"


def get_event_column(trace: Trace, name: str, absent: int | None = None) -> Array:
    """Returns a column of `trace.events`, shape (events,), as a mapped array if the trace is large.

    Args:
        trace: The trace.
        name: The column; categories as their codes.
        absent: Value for nulls; the column is int64 then. None for columns without nulls.
    """
    if name != "category":
        return extract_column(trace.events, name, absent, large=is_large(trace))
    if id(trace) not in _categories_cache:
        _categories_cache[id(trace)] = extract_column(trace.events, name, large=is_large(trace))
        weakref.finalize(trace, _categories_cache.pop, id(trace))
    return _categories_cache[id(trace)]


_categories_cache: dict[
    int, Array
] = {}  # by the trace's id: the column read most often; a view, which takes no memory


def extract_column(
    events: pl.DataFrame, name: str, absent: int | None = None, *, large: bool
) -> Array:
    """`get_event_column` of a frame of events; `large` selects a mapped array."""
    series = events[name]
    if isinstance(series.dtype, pl.Enum):
        series = series.to_physical()
    if absent is None:
        return series.to_numpy().view(MappedArray) if large else series.to_numpy()
    if not large:
        integers = series.cast(pl.Int64)
        return (integers.fill_null(absent) if integers.null_count() else integers).to_numpy()
    values = allocate_array(series.len(), np.int64)
    for row_slice in iterate_slices(series.len()):
        values[row_slice] = series[row_slice].cast(pl.Int64).fill_null(absent).to_numpy()
    return values


def move_columns_to_disk(trace: Trace, frame: pl.DataFrame) -> pl.DataFrame:
    """Returns the frame with its columns on disk if the trace is large; for frames that are
    kept.
    """
    if not is_large(trace):
        return frame

    def parts(name: str) -> Iterator[pl.Series]:
        return (frame[name][row_slice] for row_slice in iterate_slices(frame.height))

    columns = [
        build_mapped_column(dtype, frame.height, partial(parts, name))
        for name, dtype in frame.schema.items()
    ]
    return pl.DataFrame(
        [column.alias(name) for name, column in zip(frame.schema, columns, strict=True)]
    )


def gather_rows(table: Array, codes: Array) -> Array:
    """Returns `table[codes]`, on disk if the codes are."""
    return select_rows(table, codes) if isinstance(codes, MappedArray) else table[codes]


def encode_names_by_piece(texts: pl.Series) -> tuple[pl.Series, NDArray[np.uint32]]:
    """Returns the distinct texts of a column on disk in order of appearance, and the code of each
    row, slice by slice.
    """
    distinct = pl.Series(texts.name, [], dtype=pl.String)
    for row_slice in iterate_slices(texts.len()):
        distinct = pl.concat([distinct, texts[row_slice].unique()]).unique(maintain_order=True)
    code = allocate_array(texts.len(), np.uint32)
    for row_slice in iterate_slices(texts.len()):
        code[row_slice] = texts[row_slice].cast(pl.Enum(distinct)).to_physical().to_numpy()
    return distinct, code


def encode_names(texts: pl.Series) -> tuple[pl.Series, NDArray[np.uint32]]:
    """Returns the distinct texts of a column in memory, in no particular order, and the code of
    each row.
    """
    physical = (
        texts.cast(pl.Categorical).to_physical().to_numpy()
    )  # codes of the whole process, not only of this column
    example = np.full(int(physical.max(initial=0)) + 1, -1)
    example[physical] = np.arange(physical.size)
    used = example >= 0
    return texts[example[used]], (np.cumsum(used, dtype=np.uint32) - 1)[physical]


def find_nearest_ancestor(parent: Ints, is_match: NDArray[np.bool_]) -> Ints:
    """Returns the nearest proper ancestor with `is_match`, -1 if there is none, by pointer jumping
    over the others.
    """
    up = parent.copy()
    rows = np.flatnonzero(up >= 0)
    while rows.size:
        rows = rows[~is_match[up[rows]]]
        up[rows] = up[up[rows]]
        rows = rows[up[rows] >= 0]
    return up


def find_longest_increasing_subsequence(values: Ints) -> Ints:
    """Returns the positions of a longest strictly ascending subsequence, in order; patience
    sorting, O(n log n).
    """
    pile_tops: list[int] = []
    last: list[int] = []
    before = np.empty(values.size, dtype=np.int64)
    for position, value in enumerate(values.tolist()):
        pile = bisect_left(pile_tops, value)
        if pile == len(pile_tops):
            pile_tops.append(value)
            last.append(position)
        else:
            pile_tops[pile] = value
            last[pile] = position
        before[position] = last[pile - 1] if pile else -1
    out = np.empty(len(pile_tops), dtype=np.int64)
    position = last[-1] if last else -1
    for index in range(len(pile_tops) - 1, -1, -1):
        out[index] = position
        position = int(before[position])
    return out


def find_subtree_stops(lane: Array, start: Array, end: Array) -> Array:
    """Returns where the subtree of each row stops: the first later row of its lane that starts at
    or after its end.

    Args:
        lane: Lane of each row, ascending; shape (rows,).
        start: Start of each span, ascending within each lane.
        end: End of each span; the spans nest.
    """
    stop = np.arange(1, lane.size + 1, like=lane)
    bounds = np.concatenate([np.flatnonzero(np.diff(lane, prepend=-1)), [lane.size]])
    for low, high in pairwise(bounds.tolist()):
        following = low + np.searchsorted(start[low:high], end[low:high], side="left")
        stop[low:high] = np.maximum(stop[low:high], following)
    return stop


def find_innermost_stretch(start: Ints, stop: Ints, size: int) -> Ints:
    """Returns, for each of `size` positions, the start of the innermost nested range ]start, stop[
    around it; -1 if there is none.

    The result changes only where a range begins or ends. There, the innermost range is the last one
    that began with as many ranges around it as are open, less one.
    """
    opened = np.bincount(start + 1, minlength=size + 1)
    opened -= np.bincount(stop, minlength=size + 1)
    changes = np.zeros(size + 1, dtype=np.bool_)
    changes[0] = changes[start + 1] = changes[stop] = True
    change_points = np.flatnonzero(changes[:size])
    opened = np.cumsum(opened, out=opened)
    enclosing, depth = opened[start], opened[change_points] - 1
    order = np.argsort(
        enclosing.astype(np.uint16) if enclosing.max(initial=0) < 1 << 16 else enclosing,
        kind="stable",
    )
    key = enclosing[order] * size + start[order]
    index = np.searchsorted(key, depth * size + change_points) - 1
    value = np.where(depth >= 0, np.append(start[order], -1)[index], -1)
    return np.repeat(value, np.diff(np.append(change_points, size)))


def sort_unique(values: Array) -> Array:
    ordered = np.sort(values)
    first = np.ones(len(ordered), dtype=np.bool_)
    first[1:] = ordered[1:] != ordered[:-1]
    return ordered[first]


def to_nullable_series(values: Array, dtype: Any = pl.Int64, absent: int = NULL) -> pl.Series:
    """Returns a column in which `absent` is null."""
    if isinstance(values, MappedArray):
        return build_number_column(values, dtype, absent)
    missing = values == absent
    if missing.all():
        return pl.Series([None], dtype=dtype).new_from_index(
            0, len(values)
        )  # takes no memory until it is read
    series = pl.Series(values)
    return series.set(pl.Series(missing), None).cast(dtype) if missing.any() else series.cast(dtype)


def to_series(values: Array, dtype: Any) -> pl.Series:
    """Returns a column without nulls."""
    if isinstance(values, MappedArray):
        return build_number_column(values, dtype)
    return pl.Series(values).cast(dtype)


def build_event_column(values: Ints) -> pl.Series:
    """Returns a column of event numbers in which -1 is null."""
    return to_nullable_series(values, pl.UInt32, NO_ROW)


def take_texts(values: pl.Series, codes: Array) -> pl.Series:
    """Returns `values[codes]` in one chunk; codes on disk are converted slice by slice."""
    if not isinstance(codes, MappedArray):
        return values[pl.Series(codes.astype(np.uint32))]
    plain_codes = codes.view(np.ndarray)
    parts = [
        values[pl.Series(plain_codes[row_slice].astype(np.uint32))]
        for row_slice in iterate_slices(len(codes))
    ]
    return pl.concat(parts, rechunk=True)


class NumberedTexts:
    """Texts by code: names unchanged, lists as compact JSON text that is made on first use.

    Attributes:
        names: The names; empty strings in place of lists.
    """

    def __init__(self, table: Iterable[Any]) -> None:
        self._keys = list(table)
        self.names = [key if isinstance(key, str) else "" for key in self._keys]
        self._is_list = np.array([not isinstance(key, str) for key in self._keys] + [False])
        self._tables: dict[bool, _TextColumn] = {}

    def column(self, codes: Array) -> pl.Series:
        """Returns the texts of the codes; null for -1."""
        lists = bool(gather_rows(self._is_list, codes).any())
        if lists not in self._tables:
            values = (
                [key if isinstance(key, str) else format_json_list(key) for key in self._keys]
                if lists
                else self.names
            )
            self._tables[lists] = _TextColumn(values)
        return self._tables[lists].column(codes)


class _TextColumn:
    def __init__(self, values: list[str]) -> None:
        self._values = values
        self._series = pl.Series([*values, None], dtype=pl.String)
        self._table: TextTable | None = None

    def column(self, codes: Array) -> pl.Series:
        if isinstance(codes, MappedArray):
            self._table = self._table or TextTable(self._values)
            if self._table.fits:
                return self._table.column(codes)
        return self._series[
            pl.Series(np.where(codes < 0, len(self._values), codes).astype(np.uint32))
        ]


def format_json_list(raw: bytes) -> str:
    """Returns JSON text without blanks, or the content of a JSON string; `[]` if it is
    malformed.
    """
    import msgspec

    try:
        value = msgspec.json.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return "[]"
    return value if isinstance(value, str) else msgspec.json.encode(value).decode()


_MAX_RADIX_VALUE = 1 << 16  # smaller integers are radix sorted in one pass
_MAX_ROUNDS = 4  # of shortening parents; spans that still cross are clipped
_MAX_ANCESTORS = 100  # ancestors examined; chains of crossing spans can be as long as the trace


def compute_stable_order(numbers: Ints) -> Ints:
    """Returns the rows in the order of small integers >= 0 (lanes, depths), stable."""
    if isinstance(numbers, MappedArray) or int(numbers.max(initial=0)) >= _MAX_RADIX_VALUE:
        return np.argsort(numbers, kind="stable")
    return np.argsort(numbers.astype(np.uint16), kind="stable")


def compute_time_order(start: Ints, duration: Ints) -> Ints:
    """Returns the rows by (start, longer first, file order); durations are compared only where
    starts are equal.
    """
    rows = np.argsort(start, kind="stable")
    sorted_start = start[rows]
    equal = sorted_start[1:] == sorted_start[:-1]
    if equal.any():
        tied = np.zeros(len(rows), dtype=np.bool_, like=start)
        tied[1:] |= equal
        tied[:-1] |= equal
        positions = np.flatnonzero(tied)
        among = rows[positions]
        rows[positions] = among[np.lexsort((-duration[among], start[among]))]
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


def build_nesting(lane: Ints, start_ns: Ints, end_ns: Ints, nests: Bools) -> Nesting:
    """Find each event's parent: the nearest earlier one on its lane that has not ended at its
    start.

    Where two spans cross (one starts inside the other and outlives it), the one that loses less is
    shortened. A child that overruns by a rounding error is clipped to its parent, whereas the
    Python frame of `__enter__` ends where the annotation that it opens begins.

    Args:
        lane: Lane of each event; rows sorted by (start, longer first).
        start_ns: Starts.
        end_ns: Ends, >= starts.
        nests: False for rows that stand alone (device lanes, where overlap is not nesting).
    """
    rows = np.flatnonzero(nests)
    order = rows[compute_stable_order(lane[rows])]
    lanes, starts, raw = lane[order], start_ns[order], end_ns[order]
    # First candidates: the previous row on the same lane.
    parent_rows = np.arange(-1, len(lanes) - 1, dtype=np.int64, like=lanes)
    parent_rows[1:][lanes[1:] != lanes[:-1]] = -1
    parent_rows = _find_previous_open(starts, raw, parent_rows)
    # Shorten parents where an overrunning child would lose more.
    clipped_ends = raw
    for _ in range(_MAX_ROUNDS):
        child = np.flatnonzero((parent_rows >= 0) & (clipped_ends > clipped_ends[parent_rows]))
        outer = parent_rows[child]
        shorter = clipped_ends.copy()
        for _ in range(_MAX_ANCESTORS):
            overrun = clipped_ends[child] - clipped_ends[outer]
            cut = (overrun > 0) & (clipped_ends[outer] - starts[child] < overrun)
            child, outer = child[cut], outer[cut]
            np.minimum.at(shorter, outer, starts[child])
            outer = parent_rows[outer]
            child, outer = child[outer >= 0], outer[outer >= 0]
            if not child.size:
                break
        if np.array_equal(shorter, clipped_ends):
            break
        clipped_ends = shorter
        parent_rows = _find_previous_open(starts, clipped_ends, parent_rows)
    parent_rows, depths, clipped_ends = _settle(starts, parent_rows, clipped_ends)
    parent = np.full(len(lane), -1, dtype=np.int64, like=lane)
    parent[order] = np.where(parent_rows >= 0, order[parent_rows], -1)
    depth = np.zeros(len(lane), dtype=np.int64, like=lane)
    depth[order] = depths
    nested_end = end_ns.copy()
    nested_end[order] = clipped_ends
    return Nesting(parent, depth, nested_end, np.sort(order[clipped_ends < raw]))


def _settle(starts: Ints, parent_rows: Ints, raw: Ints) -> tuple[Ints, Ints, Ints]:
    """Returns consistent parents, depths and clipped ends; rows in pre-order.

    Clipping a span frees later events that it seemed to enclose; only the small subtrees where that
    happens are walked event by event.
    """
    depths = compute_nesting_depths(parent_rows)
    # Each end is bounded by its parent's, from the roots down.
    clipped_ends = raw.copy()
    order = compute_stable_order(depths)
    for low, high in pairwise(np.cumsum(np.bincount(depths))):
        rows = order[low:high]
        clipped_ends[rows] = np.minimum(clipped_ends[rows], clipped_ends[parent_rows[rows]])
    freed = np.flatnonzero((parent_rows >= 0) & (clipped_ends[parent_rows] <= starts))
    # The topmost ancestors that ended too early: only their subtrees can change.
    tops = parent_rows[freed]
    while True:
        higher = parent_rows[tops]
        climbs = (higher >= 0) & (clipped_ends[higher] <= starts[freed])
        if not climbs.any():
            break
        tops = np.where(climbs, higher, tops)
    done = 0
    for top in sorted(set(tops.tolist())):
        if top < done:
            continue
        done, width = top + 1, 64  # the first row after the subtree
        while done < len(depths):
            after_subtree = np.flatnonzero(depths[done : done + width] <= depths[top])
            if after_subtree.size:
                done += int(after_subtree[0])
                break
            done, width = min(done + width, len(depths)), width * 2
        _walk(top, done, starts, raw, (parent_rows, depths, clipped_ends))
    return parent_rows, depths, clipped_ends


def _walk(low: int, high: int, starts: Ints, raw: Ints, columns: tuple[Ints, Ints, Ints]) -> None:
    """Recomputes parents, depths and ends of the rows low..high-1 of one lane in place, using a
    stack.
    """
    parent_rows, depths, clipped_ends = columns
    outer, base = int(parent_rows[low]), int(depths[low])
    limit = int(clipped_ends[outer]) if outer >= 0 else None
    stack: list[tuple[int, int]] = []  # rows and their ends
    parents, levels, clipped = [], [], []
    for row, (start, raw_end) in enumerate(
        zip(starts[low:high].tolist(), raw[low:high].tolist(), strict=True), low
    ):
        while stack and stack[-1][1] <= start:
            stack.pop()
        parent, bound = stack[-1] if stack else (outer, limit)
        end = raw_end if bound is None else min(raw_end, bound)
        parents.append(parent)
        levels.append(base + len(stack))
        clipped.append(end)
        stack.append((row, end))
    parent_rows[low:high], depths[low:high], clipped_ends[low:high] = parents, levels, clipped


def _find_previous_open(starts: Ints, span_ends: Ints, previous: Ints) -> Ints:
    """Returns the nearest earlier row of the same lane whose end is after the start, by pointer
    jumping.

    A row that has ended lets its successors jump to its own candidate: all rows between had ended
    before it began.

    Args:
        starts: Starts.
        span_ends: Ends.
        previous: First candidates: the previous row, or the result for later ends; -1 at the start
            of a lane.
    """
    previous = previous.copy()
    rows = np.flatnonzero(previous >= 0)
    while rows.size:
        candidate = previous[rows]
        ended = span_ends[candidate] <= starts[rows]
        rows = rows[ended]
        previous[rows] = candidate = previous[candidate[ended]]
        rows = rows[candidate >= 0]
    return previous


def compute_nesting_depths(parent_rows: Ints) -> Ints:
    """Returns the length of each row's chain of parents, by pointer doubling."""
    depth = (parent_rows >= 0).astype(np.int64)
    pointer = parent_rows.copy()
    rows = np.flatnonzero(pointer >= 0)
    while rows.size:
        target = pointer[rows]
        depth[rows] += depth[target]
        pointer[rows] = pointer[target]
        rows = rows[pointer[rows] >= 0]
    return depth
