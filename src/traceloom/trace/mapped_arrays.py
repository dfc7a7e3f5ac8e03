"""NumPy arrays and growing columns of large traces in mapped files.

A `MappedArray` behaves like any NumPy array. Results of at least `MIN_MAPPED_BYTES` are written
slice by slice to an unlinked file, which vanishes with the process, however that ends, and is
mapped into memory, so that the system can reclaim the pages whenever it needs memory. Code that
creates a large array next to a mapped one passes NumPy's `like`, as in `np.full(n, -1,
like=start)`. Columns that are still being read are spooled to files as well (`ColumnSpool`).
"""

from __future__ import annotations

import mmap
import os
import tempfile
import weakref
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from traceloom.errors import InputError
from traceloom.trace.array_types import Array

MIN_MAPPED_BYTES = 1 << 20  # smaller arrays stay in memory
MAX_SORTED_ELEMENTS = 1 << 20  # elements sorted at once
_SAMPLE_SIZE = 4096
SLICE_ELEMENTS = 1 << 18  # elements processed at once
_MAX_IDLE_BYTES = 1 << 29  # bytes of free blocks kept for reuse
_MAX_MAPPED_BYTES = 1 << 29  # bytes allocated before pages are unmapped


class _BlockPool:
    """Mapped blocks that later arrays reuse, since new pages cost more than used ones."""

    def __init__(self) -> None:
        self._idle: dict[int, list[mmap.mmap]] = {}
        self._idle_bytes = 0
        self._used: dict[int, mmap.mmap] = {}
        self._fresh = 0

    def empty(self, count: int, dtype: Any) -> MappedArray:
        """Returns an uninitialized array, shape (count,).

        Raises:
            InputError: `no-space`: the disk is full.
        """
        dtype = np.dtype(dtype)
        size = int(count) * dtype.itemsize
        # Round up to a multiple of an eighth of a power of two, so that blocks fit other arrays.
        grain = max(mmap.ALLOCATIONGRANULARITY, 1 << max(0, size.bit_length() - 4))
        size = max(grain, -(-size // grain) * grain)
        waiting = self._idle.get(size)
        if waiting:
            block = waiting.pop()
            self._idle_bytes -= size
        else:
            block = allocate_block(size)
        self._used[id(block)] = block
        # Unmap pages from time to time; they stay in the system's file cache, which may evict them.
        self._fresh += size
        if self._fresh > _MAX_MAPPED_BYTES and hasattr(mmap, "MADV_DONTNEED"):
            for mapped in [
                *self._used.values(),
                *(block for blocks in self._idle.values() for block in blocks),
            ]:
                mapped.madvise(mmap.MADV_DONTNEED)
            self._fresh = size
        owner = MappedArray((int(count),), dtype, buffer=block)
        # at exit all files vanish by themselves
        weakref.finalize(owner, self.free, block).atexit = False
        return owner

    def clear(self) -> None:
        self._idle.clear()
        self._idle_bytes = 0

    def forget(self) -> None:
        """Leaves all blocks to the parent, in a forked process."""
        self.clear()
        self._used.clear()

    def free(self, block: mmap.mmap) -> None:
        if self._used.pop(id(block), None) is None:
            return
        size = len(block)
        if self._idle_bytes + size <= _MAX_IDLE_BYTES:
            self._idle.setdefault(size, []).append(block)
            self._idle_bytes += size


def get_spill_directory() -> Path:
    """Returns the directory for files of large traces: `TRACELOOM_CACHE_DIR`, else the user's cache
    directory.
    """
    from traceloom.system.files import find_cache_directory

    return find_cache_directory() / "spill"


def describe_full_disk(error: OSError) -> InputError:
    return InputError(
        f"the columns of this large trace do not fit the disk: {(error.strerror or str(error)).lower()}",
        slug="no-space",
        where=str(get_spill_directory()),
        hint="set TRACELOOM_CACHE_DIR to a directory with more space",
    )


def allocate_block(size: int) -> mmap.mmap:
    """Returns a mapped file with its space reserved, since writing a page on a full disk would kill
    the process.

    Raises:
        InputError: `no-space`: the disk is full.
    """
    directory = get_spill_directory()
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=directory) as file:
            if hasattr(os, "posix_fallocate"):
                os.posix_fallocate(file.fileno(), 0, size)
            else:
                zeros = bytes(min(size, 1 << 20))
                for offset in range(0, size, len(zeros)):
                    file.write(zeros[: size - offset])
                file.flush()
            return mmap.mmap(file.fileno(), size)
    except OSError as error:
        raise describe_full_disk(error) from error


def allocate_array(count: int, dtype: Any) -> Array:
    """Returns an array for values that go with a `MappedArray`; on disk too if it is large."""
    if count * np.dtype(dtype).itemsize < MIN_MAPPED_BYTES:
        return np.empty(count, dtype=dtype)
    return BLOCK_POOL.empty(count, dtype)


def iterate_slices(count: int) -> Iterator[slice]:
    """Yields slices of `SLICE_ELEMENTS` that cover `count` elements."""
    return (slice(low, min(low + SLICE_ELEMENTS, count)) for low in range(0, count, SLICE_ELEMENTS))


def _unwrap(value: Any) -> Any:
    return value.view(np.ndarray) if isinstance(value, MappedArray) else value


class MappedArray(np.ndarray[Any, Any]):
    """An array whose data are in a file.

    Created by `allocate_array`, `copy_to_disk` and by operations on mapped arrays.
    """

    def __array_ufunc__(
        self, ufunc: Any, method: str, *inputs: Any, out: Any = None, **kwargs: Any
    ) -> Any:
        """Element-wise and cumulative operations write into a new file; others return NumPy's
        result.
        """
        unwrapped = [_unwrap(value) for value in inputs]
        if out is not None:
            getattr(ufunc, method)(*unwrapped, out=tuple(_unwrap(value) for value in out), **kwargs)
            return out[0] if len(out) == 1 else out
        run = getattr(ufunc, method)
        count = max(
            (len(value) for value in unwrapped if getattr(value, "ndim", 0) == 1), default=0
        )
        flat = count and all(getattr(value, "ndim", 0) < 2 for value in unwrapped)
        if ufunc.nout != 1 or method not in {"__call__", "accumulate"} or not flat:
            return run(*unwrapped, **kwargs)
        is_full = [getattr(value, "ndim", 0) == 1 and len(value) == count for value in unwrapped]
        first = run(
            *(value[:1] if long else value for value, long in zip(unwrapped, is_full, strict=True)),
            **kwargs,
        )
        result = allocate_array(count, first.dtype)
        run(*unwrapped, out=_unwrap(result), **kwargs)
        return result

    def __array_function__(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        """Uses the slice-wise implementations of this module where there is one, else NumPy's."""
        replacement = _FUNCTIONS.get(func)
        if replacement is not None:
            return replacement(*args, **kwargs)
        return super().__array_function__(func, types, args, kwargs)

    def __getitem__(self, key: Any) -> Any:
        """Gathers rows by number or mask slice by slice."""
        if isinstance(key, np.ndarray) and key.ndim == 1 and self.ndim == 1:
            return select_rows(self, key)
        return super().__getitem__(key)

    def __setitem__(self, key: Any, value: Any) -> None:
        """Sets rows by number or mask slice by slice."""
        new = _unwrap(value)
        if not (isinstance(key, np.ndarray) and key.ndim == 1 and self.ndim == 1):
            super().__setitem__(key, new)
            return
        values, key = _unwrap(self), _unwrap(key)
        per_row = isinstance(new, np.ndarray) and new.ndim == 1 and len(new) != 1
        offset = 0
        for row_slice in iterate_slices(len(key)):
            part, selection = values, key[row_slice]
            count = len(selection)
            if key.dtype == np.bool_:
                part, count = values[row_slice], int(np.count_nonzero(selection))
            part[selection] = new[offset : offset + count] if per_row else new
            offset += count
        if per_row and offset != len(new):
            raise ValueError(f"{len(new)} values for {offset} rows")

    def astype(self, dtype: Any, *_: Any, **__: Any) -> Any:
        result = allocate_array(len(self), dtype)
        np.copyto(_unwrap(result), _unwrap(self), casting="unsafe")
        return result

    def copy(self, *_: Any) -> Any:
        return self.astype(self.dtype)

    def argsort(self, *_: Any, **__: Any) -> Any:
        """See `numpy.argsort`; always stable."""
        return _argsort(self)

    def cumsum(self, *_: Any, **__: Any) -> Any:
        """See `numpy.cumsum`."""
        values = _unwrap(self)
        result = allocate_array(len(values), np.cumsum(values[:1]).dtype)
        before = np.zeros((), dtype=result.dtype)
        for row_slice in iterate_slices(len(values)):  # NumPy would convert all of it first
            result[row_slice] = np.cumsum(values[row_slice]) + before
            before = result[row_slice.stop - 1]
        return result


def copy_to_disk(values: Array) -> Array:
    result = allocate_array(len(values), values.dtype)
    result[:] = values
    return result


def _collect_parts(count: int, dtype: Any, parts: Iterable[Array]) -> Array:
    """Concatenates parts into an array on disk, shape (count,)."""
    result = allocate_array(count, dtype)
    offset = 0
    for part in parts:
        result[offset : offset + len(part)] = part
        offset += len(part)
    return result


def select_rows(values: Array, key: Array) -> Array:
    """Returns `values[key]` on disk, for one-dimensional arrays; `key` holds row numbers or a
    mask.
    """
    values, key = _unwrap(values), _unwrap(key)
    if key.dtype != np.bool_:
        return _collect_parts(
            len(key),
            values.dtype,
            (values[key[row_slice]] for row_slice in iterate_slices(len(key))),
        )
    if len(key) != len(values):
        raise IndexError(f"a mask of {len(key)} for {len(values)} rows")
    selected = (values[row_slice][key[row_slice]] for row_slice in iterate_slices(len(key)))
    return _collect_parts(int(np.count_nonzero(key)), values.dtype, selected)


def _where(condition: Any, *choices: Any) -> Any:
    if not choices:
        return _nonzero(condition)
    parts = [_unwrap(value) for value in (condition, *choices)]
    count = max(len(value) for value in parts if getattr(value, "ndim", 0) == 1)
    is_full = [getattr(value, "ndim", 0) == 1 and len(value) == count for value in parts]
    results = (
        np.where(
            *(
                value[row_slice] if long else value
                for value, long in zip(parts, is_full, strict=True)
            )
        )
        for row_slice in iterate_slices(count)
    )
    first = np.where(
        *(value[:1] if long else value for value, long in zip(parts, is_full, strict=True))
    )
    return _collect_parts(count, first.dtype, results)


def _nonzero(values: Any) -> tuple[Array]:
    values = _unwrap(values)
    rows = (
        np.flatnonzero(values[row_slice]) + row_slice.start
        for row_slice in iterate_slices(len(values))
    )
    return (_collect_parts(int(np.count_nonzero(values)), np.intp, rows),)


def _concatenate(arrays: Any, axis: int = 0, *_: Any, dtype: Any = None, **__: Any) -> Array:
    parts = [np.atleast_1d(_unwrap(part)) for part in arrays]
    if any(part.ndim > 1 for part in parts):  # two-dimensional arrays stay in memory
        return np.concatenate(parts, axis=axis, dtype=dtype)
    return _collect_parts(
        sum(map(len, parts)), np.result_type(*parts) if dtype is None else dtype, parts
    )


def _argsort(values: Any, *_: Any, **__: Any) -> Array:
    """Stable argsort by ranges of values: each range is sorted in memory, from the lowest to the
    highest.

    The bounds of ranges are values of a sample; values equal to a bound form a range of their own,
    which needs no sorting, so that a frequent value does not make a range too large.
    """
    unwrapped = _unwrap(values)
    count = len(unwrapped)
    sample = np.sort(unwrapped[:: max(1, count // _SAMPLE_SIZE)])
    bounds = np.unique(sample[:: max(1, len(sample) * MAX_SORTED_ELEMENTS // max(count, 1))])
    range_number = allocate_array(count, np.uint16)
    for row_slice in iterate_slices(count):
        chunk = unwrapped[row_slice]
        range_number[row_slice] = np.searchsorted(bounds, chunk, side="left") + np.searchsorted(
            bounds, chunk, side="right"
        )

    def ranges() -> Iterator[Array]:
        for number in range(2 * len(bounds) + 1):
            (rows,) = _nonzero(range_number == number)
            yield (
                rows[np.argsort(unwrapped[_unwrap(rows)], kind="stable")]
                if number % 2 == 0
                else rows
            )

    return _collect_parts(count, np.intp, ranges())


def _lexsort(keys: Any, *_: Any, **__: Any) -> Any:
    order = _argsort(keys[0])
    for key in keys[1:]:
        order = order[_argsort(key[order])]
    return order


def _searchsorted(values: Any, targets: Any, side: Any = "left") -> Any:
    if np.ndim(targets) == 0:
        return np.searchsorted(_unwrap(values), targets, side=side)
    values, targets = _unwrap(values), _unwrap(np.asarray(targets))
    common = np.result_type(values, targets)
    if values.dtype != common:
        values = _unwrap(copy_to_disk(values).astype(common))
    positions = (
        np.searchsorted(values, targets[row_slice], side=side)
        for row_slice in iterate_slices(len(targets))
    )
    return _collect_parts(len(targets), np.intp, positions)


def _repeat(values: Any, repeats: Any, *_: Any, **__: Any) -> Array:
    values, repeats = _unwrap(values), np.broadcast_to(_unwrap(repeats), len(values))
    repeated = (
        np.repeat(values[row_slice], repeats[row_slice])
        for row_slice in iterate_slices(len(values))
    )
    return _collect_parts(int(repeats.sum()), values.dtype, repeated)


def _bincount(values: Any, weights: None = None, minlength: int = 0) -> Array:
    if weights is not None:
        raise TypeError("counts of arrays on disk take no weights")
    values = _unwrap(values)
    bin_count = max(minlength, int(values.max()) + 1 if len(values) else 0)
    total = np.zeros(bin_count, dtype=np.intp)
    for row_slice in iterate_slices(len(values)):  # NumPy would convert all of it first
        total += np.bincount(values[row_slice], minlength=bin_count)
    return total


def _isin(element: Any, test_elements: Any, **kwargs: Any) -> Array:
    element, among = _unwrap(element), _unwrap(test_elements)
    members = (
        np.isin(element[row_slice], among, **kwargs) for row_slice in iterate_slices(len(element))
    )
    return _collect_parts(len(element), np.bool_, members)


def _sort(values: Any, *_: Any, **__: Any) -> Array:
    result = copy_to_disk(_unwrap(values))
    _unwrap(result).sort()
    return result


def _unique(values: Any, return_index: bool = False, return_inverse: bool = False, **_: Any) -> Any:
    order = _argsort(values)
    ordered = values[order]
    first = np.ones(len(ordered), dtype=np.bool_, like=values)
    first[1:] = ordered[1:] != ordered[:-1]
    outputs = [ordered[first]]
    if return_index:
        outputs.append(order[first])
    if return_inverse:
        inverse = allocate_array(len(order), np.intp)
        inverse[order] = np.cumsum(first) - 1
        outputs.append(inverse)
    return outputs[0] if len(outputs) == 1 else tuple(outputs)


def _full(shape: Any, fill_value: Any, dtype: Any = None, **_: Any) -> Array:
    result = allocate_array(shape, np.asarray(fill_value).dtype if dtype is None else dtype)
    result[:] = fill_value
    return result


def _arange(start: int, stop: int | None = None, *, dtype: Any = np.int64, **_: Any) -> Array:
    low, high = (0, int(start)) if stop is None else (int(start), int(stop))
    count = max(high - low, 0)
    numbers = (
        np.arange(low + row_slice.start, low + row_slice.stop, dtype=dtype)
        for row_slice in iterate_slices(count)
    )
    return _collect_parts(count, dtype, numbers)


_FUNCTIONS: dict[Any, Callable[..., Any]] = {
    np.where: _where,
    np.nonzero: _nonzero,
    np.flatnonzero: lambda values: _nonzero(values)[0],
    np.concatenate: _concatenate,
    np.argsort: _argsort,
    np.lexsort: _lexsort,
    np.searchsorted: _searchsorted,
    np.repeat: _repeat,
    np.cumsum: lambda values, *_, **__: values.cumsum(),
    np.bincount: _bincount,
    np.isin: _isin,
    np.sort: _sort,
    np.unique: _unique,
    np.full: _full,
    np.zeros: lambda shape, dtype=float, **_: _full(shape, 0, dtype),
    np.ones: lambda shape, dtype=float, **_: _full(shape, 1, dtype),
    np.empty: lambda shape, dtype=float, **_: allocate_array(shape, dtype),
    np.arange: _arange,
}

BLOCK_POOL = _BlockPool()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=BLOCK_POOL.forget)

MIN_SPILL_BYTES = (
    500 * 10**6
)  # of text: columns of larger traces go to disk, since a report of them needs too much memory

_CHUNK_BYTES = 1 << 22  # read at once


class ColumnSpool:
    """Columns that grow on disk; the files vanish when they are closed, however the process
    ends.
    """

    def __init__(self) -> None:
        self._files: dict[tuple[str, str], BinaryIO] = {}

    def add(self, table: str, name: str, values: Array) -> None:
        """Append values to a column.

        Raises:
            InputError: `no-space`: the disk is full.
        """
        try:
            if (table, name) not in self._files:
                directory = get_spill_directory()
                directory.mkdir(parents=True, exist_ok=True)
                self._files[table, name] = tempfile.TemporaryFile(dir=directory)  # noqa: SIM115 - open until `column`
            self._files[table, name].write(np.ascontiguousarray(values).data)
        except OSError as error:
            raise describe_full_disk(error) from error

    def column(self, table: str, name: str, remaining: list[Array], dtype: Any) -> Array:
        """Returns a whole column: the spooled values, then `remaining`. Each column can be read
        only once.
        """
        for values in remaining:
            self.add(table, name, values)
        try:
            with self._files.pop((table, name)) as file:
                file.flush()
                values = allocate_array(file.tell() // np.dtype(dtype).itemsize, dtype)
                file.seek(0)
                target_bytes = values.view(np.ndarray).view(np.uint8)
                filled = 0
                while count := file.readinto(target_bytes[filled : filled + _CHUNK_BYTES].data):  # type: ignore[attr-defined]
                    filled += count
        except OSError as error:
            raise describe_full_disk(error) from error
        return values

    def holds(self, table: str, name: str) -> bool:
        return (table, name) in self._files

    def close(self) -> None:
        for file in self._files.values():
            file.close()
        self._files.clear()
