"""Columns of large traces in mapped files: arrays, Polars columns over them, columns while reading.

Arrays of very large traces lie in mapped files (`ondisk`) and become Polars columns without a copy (`mapped`); columns
that are still being gathered go to files too (`spill`); `cache` keeps folders by the content they were made from.

An array of this kind behaves as any NumPy array. Results from `LEAST_BYTES` on are written piece by piece into a file
that has no name any more (it vanishes with the process, however that ends) and is mapped into memory, so that the
system can take the pages back whenever it needs room. Whoever makes a new large array beside such a one gives it to
NumPy's `like`, as in `np.full(n, -1, like=start)`.
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

LEAST_BYTES = 1 << 20  # what is smaller stays in memory
SORTED = 1 << 20  # elements that are sorted at once
_SAMPLED = 4096
PIECE = 1 << 18  # elements that are worked on at once
_MOST_IDLE = 1 << 29  # bytes of blocks kept for the next arrays
_MOST_MAPPED = 1 << 29  # bytes handed out before pages are given back


class _Scratch:
    """Blocks of mapped files, used again by later arrays since new pages cost more than old ones."""

    def __init__(self) -> None:
        self._idle: dict[int, list[mmap.mmap]] = {}
        self._idle_bytes = 0
        self._used: dict[int, mmap.mmap] = {}
        self._fresh = 0

    def empty(self, count: int, dtype: Any) -> OnDisk:
        """An array without values, shape (count,).

        Raises:
            InputError: `no-space`: the disk is full.
        """
        dtype = np.dtype(dtype)
        size = int(count) * dtype.itemsize
        # Up to a full number of eighths of a power of two, so that blocks fit other arrays.
        grain = max(mmap.ALLOCATIONGRANULARITY, 1 << max(0, size.bit_length() - 4))
        size = max(grain, -(-size // grain) * grain)
        waiting = self._idle.get(size)
        if waiting:
            block = waiting.pop()
            self._idle_bytes -= size
        else:
            block = new_block(size)
        self._used[id(block)] = block
        # Unmap pages now and then: they stay in the system's file cache, which may drop them.
        self._fresh += size
        if self._fresh > _MOST_MAPPED and hasattr(mmap, "MADV_DONTNEED"):
            for mapped in [*self._used.values(), *(block for blocks in self._idle.values() for block in blocks)]:
                mapped.madvise(mmap.MADV_DONTNEED)
            self._fresh = size
        owner = OnDisk((int(count),), dtype, buffer=block)
        # not at the end of the process, when all files vanish by themselves
        weakref.finalize(owner, self.free, block).atexit = False
        return owner

    def clear(self) -> None:
        """Remove what no array uses."""
        self._idle.clear()
        self._idle_bytes = 0

    def forget(self) -> None:
        """In a forked process: leave all blocks to its parent."""
        self.clear()
        self._used.clear()

    def free(self, block: mmap.mmap) -> None:
        if self._used.pop(id(block), None) is None:
            return
        size = len(block)
        if self._idle_bytes + size <= _MOST_IDLE:
            self._idle.setdefault(size, []).append(block)
            self._idle_bytes += size


def ondisk_folder() -> Path:
    """Where the files of large traces lie: `TRACELOOM_CACHE_DIR`, else the user's cache directory."""
    from traceloom.system.files import cache_directory

    return cache_directory() / "spill"


def no_space(error: OSError) -> InputError:
    """What to say where the disk is full."""
    return InputError(
        f"the columns of this large trace do not fit the disk: {(error.strerror or str(error)).lower()}",
        slug="no-space",
        where=str(ondisk_folder()),
        hint="set TRACELOOM_CACHE_DIR to a directory with more space",
    )


def new_block(size: int) -> mmap.mmap:
    """A mapped file whose space is reserved: writing a page when the disk is full would end the process.

    Raises:
        InputError: `no-space`: the disk is full.
    """
    directory = ondisk_folder()
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=directory) as file:
            if hasattr(os, "posix_fallocate"):
                os.posix_fallocate(file.fileno(), 0, size)
            else:
                zeros = bytes(min(size, 1 << 20))
                for at in range(0, size, len(zeros)):
                    file.write(zeros[: size - at])
                file.flush()
            return mmap.mmap(file.fileno(), size)
    except OSError as error:
        raise no_space(error) from error


def empty(count: int, dtype: Any) -> Array:
    """An array for values beside an `OnDisk` one: on disk too where it is large."""
    if count * np.dtype(dtype).itemsize < LEAST_BYTES:
        return np.empty(count, dtype=dtype)
    return BLOCK_POOL.empty(count, dtype)


def pieces(count: int) -> Iterator[slice]:
    """Slices that cover `count` elements, `PIECE` at a time."""
    return (slice(low, min(low + PIECE, count)) for low in range(0, count, PIECE))


def _plain(value: Any) -> Any:
    return value.view(np.ndarray) if isinstance(value, OnDisk) else value


class OnDisk(np.ndarray[Any, Any]):
    """An array whose data lie in a file. Made by `empty`, `stored` and by operations on its like."""

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, out: Any = None, **kwargs: Any) -> Any:
        """Element-wise operations and running ones write into a new file; the rest gives what it gives."""
        plain = [_plain(value) for value in inputs]
        if out is not None:
            getattr(ufunc, method)(*plain, out=tuple(_plain(value) for value in out), **kwargs)
            return out[0] if len(out) == 1 else out
        run = getattr(ufunc, method)
        count = max((len(value) for value in plain if getattr(value, "ndim", 0) == 1), default=0)
        flat = count and all(getattr(value, "ndim", 0) < 2 for value in plain)
        if ufunc.nout != 1 or method not in {"__call__", "accumulate"} or not flat:
            return run(*plain, **kwargs)
        whole = [getattr(value, "ndim", 0) == 1 and len(value) == count for value in plain]
        first = run(*(value[:1] if long else value for value, long in zip(plain, whole, strict=True)), **kwargs)
        result = empty(count, first.dtype)
        run(*plain, out=_plain(result), **kwargs)
        return result

    def __array_function__(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        """NumPy's functions: by piece where they are among these, else as NumPy does it."""
        own = _FUNCTIONS.get(func)
        if own is not None:
            return own(*args, **kwargs)
        return super().__array_function__(func, types, args, kwargs)

    def __getitem__(self, key: Any) -> Any:
        """Rows by number or by mask are gathered by piece."""
        if isinstance(key, np.ndarray) and key.ndim == 1 and self.ndim == 1:
            return rows_of(self, key)
        return super().__getitem__(key)

    def __setitem__(self, key: Any, value: Any) -> None:
        """Rows by number or by mask are set by piece."""
        new = _plain(value)
        if not (isinstance(key, np.ndarray) and key.ndim == 1 and self.ndim == 1):
            super().__setitem__(key, new)
            return
        values, key = _plain(self), _plain(key)
        each = isinstance(new, np.ndarray) and new.ndim == 1 and len(new) != 1
        at = 0
        for piece in pieces(len(key)):
            part, selection = values, key[piece]
            count = len(selection)
            if key.dtype == np.bool_:
                part, count = values[piece], int(np.count_nonzero(selection))
            part[selection] = new[at : at + count] if each else new
            at += count
        if each and at != len(new):
            raise ValueError(f"{len(new)} values for {at} rows")

    def astype(self, dtype: Any, *_: Any, **__: Any) -> Any:
        """A converted copy."""
        result = empty(len(self), dtype)
        np.copyto(_plain(result), _plain(self), casting="unsafe")
        return result

    def copy(self, *_: Any) -> Any:
        """A copy."""
        return self.astype(self.dtype)

    def argsort(self, *_: Any, **__: Any) -> Any:
        """See `numpy.argsort`; always stable."""
        return _argsort(self)

    def cumsum(self, *_: Any, **__: Any) -> Any:
        """See `numpy.cumsum`."""
        values = _plain(self)
        result = empty(len(values), np.cumsum(values[:1]).dtype)
        before = np.zeros((), dtype=result.dtype)
        for piece in pieces(len(values)):  # NumPy would convert all of it first
            result[piece] = np.cumsum(values[piece]) + before
            before = result[piece.stop - 1]
        return result


def stored(values: Array) -> Array:
    """The same values on disk, where they are large."""
    result = empty(len(values), values.dtype)
    result[:] = values
    return result


def _gathered(count: int, dtype: Any, parts: Iterable[Array]) -> Array:
    """An array on disk, shape (count,), from its parts, one after the other."""
    result = empty(count, dtype)
    at = 0
    for part in parts:
        result[at : at + len(part)] = part
        at += len(part)
    return result


def rows_of(values: Array, key: Array) -> Array:
    """`values[key]` on disk, for one-dimensional arrays; `key` are row numbers or a mask."""
    values, key = _plain(values), _plain(key)
    if key.dtype != np.bool_:
        return _gathered(len(key), values.dtype, (values[key[piece]] for piece in pieces(len(key))))
    if len(key) != len(values):
        raise IndexError(f"a mask of {len(key)} for {len(values)} rows")
    selected = (values[piece][key[piece]] for piece in pieces(len(key)))
    return _gathered(int(np.count_nonzero(key)), values.dtype, selected)


def _where(condition: Any, *choices: Any) -> Any:
    if not choices:
        return _nonzero(condition)
    parts = [_plain(value) for value in (condition, *choices)]
    count = max(len(value) for value in parts if getattr(value, "ndim", 0) == 1)
    whole = [getattr(value, "ndim", 0) == 1 and len(value) == count for value in parts]
    chosen = (
        np.where(*(value[piece] if long else value for value, long in zip(parts, whole, strict=True)))
        for piece in pieces(count)
    )
    first = np.where(*(value[:1] if long else value for value, long in zip(parts, whole, strict=True)))
    return _gathered(count, first.dtype, chosen)


def _nonzero(values: Any) -> tuple[Array]:
    values = _plain(values)
    rows = (np.flatnonzero(values[piece]) + piece.start for piece in pieces(len(values)))
    return (_gathered(int(np.count_nonzero(values)), np.intp, rows),)


def _concatenate(arrays: Any, axis: int = 0, *_: Any, dtype: Any = None, **__: Any) -> Array:
    parts = [np.atleast_1d(_plain(part)) for part in arrays]
    if any(part.ndim > 1 for part in parts):  # tables stay in memory
        return np.concatenate(parts, axis=axis, dtype=dtype)
    return _gathered(sum(map(len, parts)), np.result_type(*parts) if dtype is None else dtype, parts)


def _argsort(values: Any, *_: Any, **__: Any) -> Array:
    """Stable, by ranges of values: each is sorted in memory, from the lowest to the highest.

    The bounds of ranges are values of a sample; what equals a bound is a range of its own, which needs no sorting, so
    that a frequent value does no harm.
    """
    plain = _plain(values)
    count = len(plain)
    sample = np.sort(plain[:: max(1, count // _SAMPLED)])
    bounds = np.unique(sample[:: max(1, len(sample) * SORTED // max(count, 1))])
    range_number = empty(count, np.uint16)
    for piece in pieces(count):
        chunk = plain[piece]
        range_number[piece] = np.searchsorted(bounds, chunk, side="left") + np.searchsorted(bounds, chunk, side="right")

    def ranges() -> Iterator[Array]:
        for number in range(2 * len(bounds) + 1):
            (rows,) = _nonzero(range_number == number)
            yield rows[np.argsort(plain[_plain(rows)], kind="stable")] if number % 2 == 0 else rows

    return _gathered(count, np.intp, ranges())


def _lexsort(keys: Any, *_: Any, **__: Any) -> Any:
    order = _argsort(keys[0])
    for key in keys[1:]:
        order = order[_argsort(key[order])]
    return order


def _searchsorted(values: Any, targets: Any, side: Any = "left") -> Any:
    if np.ndim(targets) == 0:
        return np.searchsorted(_plain(values), targets, side=side)
    values, targets = _plain(values), _plain(np.asarray(targets))
    common = np.result_type(values, targets)
    if values.dtype != common:
        values = _plain(stored(values).astype(common))
    places = (np.searchsorted(values, targets[piece], side=side) for piece in pieces(len(targets)))
    return _gathered(len(targets), np.intp, places)


def _repeat(values: Any, repeats: Any, *_: Any, **__: Any) -> Array:
    values, repeats = _plain(values), np.broadcast_to(_plain(repeats), len(values))
    repeated = (np.repeat(values[piece], repeats[piece]) for piece in pieces(len(values)))
    return _gathered(int(repeats.sum()), values.dtype, repeated)


def _bincount(values: Any, weights: None = None, minlength: int = 0) -> Array:
    if weights is not None:
        raise TypeError("counts of arrays on disk take no weights")
    values = _plain(values)
    most = max(minlength, int(values.max()) + 1 if len(values) else 0)
    total = np.zeros(most, dtype=np.intp)
    for piece in pieces(len(values)):  # NumPy would convert all of it first
        total += np.bincount(values[piece], minlength=most)
    return total


def _isin(element: Any, test_elements: Any, **kwargs: Any) -> Array:
    element, among = _plain(element), _plain(test_elements)
    members = (np.isin(element[piece], among, **kwargs) for piece in pieces(len(element)))
    return _gathered(len(element), np.bool_, members)


def _sort(values: Any, *_: Any, **__: Any) -> Array:
    result = stored(_plain(values))
    _plain(result).sort()
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
        inverse = empty(len(order), np.intp)
        inverse[order] = np.cumsum(first) - 1
        outputs.append(inverse)
    return outputs[0] if len(outputs) == 1 else tuple(outputs)


def _full(shape: Any, fill_value: Any, dtype: Any = None, **_: Any) -> Array:
    result = empty(shape, np.asarray(fill_value).dtype if dtype is None else dtype)
    result[:] = fill_value
    return result


def _arange(start: int, stop: int | None = None, *, dtype: Any = np.int64, **_: Any) -> Array:
    low, high = (0, int(start)) if stop is None else (int(start), int(stop))
    count = max(high - low, 0)
    numbers = (np.arange(low + piece.start, low + piece.stop, dtype=dtype) for piece in pieces(count))
    return _gathered(count, dtype, numbers)


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
    np.empty: lambda shape, dtype=float, **_: empty(shape, dtype),
    np.arange: _arange,
}

BLOCK_POOL = _Scratch()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=BLOCK_POOL.forget)

SPILL_BYTES = 500 * 10**6  # of text, from which on columns go to disk: in memory the report of more needs too much

_READ_BYTES = 1 << 22  # at once


class ColumnSpool:
    """Columns that grow on disk; the files vanish when they are closed, however the process ends."""

    def __init__(self) -> None:
        self._files: dict[tuple[str, str], BinaryIO] = {}

    def add(self, table: str, name: str, values: Array) -> None:
        """Append values to a column.

        Raises:
            InputError: `no-space`: the disk is full.
        """
        try:
            if (table, name) not in self._files:
                folder = ondisk_folder()
                folder.mkdir(parents=True, exist_ok=True)
                self._files[table, name] = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115 - open until `column`
            self._files[table, name].write(np.ascontiguousarray(values).data)
        except OSError as error:
            raise no_space(error) from error

    def column(self, table: str, name: str, rest: list[Array], dtype: Any) -> Array:
        """The whole column, what was added and then the rest; it can be asked for once."""
        for values in rest:
            self.add(table, name, values)
        try:
            with self._files.pop((table, name)) as file:
                file.flush()
                values = empty(file.tell() // np.dtype(dtype).itemsize, dtype)
                file.seek(0)
                into = values.view(np.ndarray).view(np.uint8)
                at = 0
                while count := file.readinto(into[at : at + _READ_BYTES].data):  # type: ignore[attr-defined]
                    at += count
        except OSError as error:
            raise no_space(error) from error
        return values

    def holds(self, table: str, name: str) -> bool:
        """Whether something was added to the column."""
        return (table, name) in self._files

    def close(self) -> None:
        """Remove the columns that nobody asked for."""
        for file in self._files.values():
            file.close()
        self._files.clear()
