"""Arrays and traces whose data lie on disk are the same as those in memory, and leave no files."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys

import numpy as np
import polars as pl
import pytest

from support.bigfile import write_big
from support.public_traces import NAMES
from traceloom.errors import InputError
from traceloom.formats import read_kineto
from traceloom.testing import TraceBuilder
from traceloom.trace import arrays, mapped_arrays, storage
from traceloom.trace.arrays import TextTable, build_number_column

RANDOM = np.random.default_rng(7)
VALUES = RANDOM.integers(0, 50, 1000)
MASK = VALUES > 20
ROWS = RANDOM.permutation(1000)


@pytest.fixture(autouse=True)
def large(monkeypatch, tmp_path):
    """Every array and every file counts as large."""
    monkeypatch.setenv("TRACELOOM_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(mapped_arrays, "MIN_MAPPED_BYTES", 1)
    monkeypatch.setattr(mapped_arrays, "SLICE_ELEMENTS", 64)
    monkeypatch.setattr(mapped_arrays, "MAX_SORTED_ELEMENTS", 100)
    yield
    mapped_arrays.BLOCK_POOL.clear()


OPERATIONS = {
    "comparison": lambda a: a > 20,
    "arithmetic": lambda a: a // 7 * 3 - 1,
    "negation": lambda a: ~(-a > -20),
    "two arrays": lambda a: np.maximum(a, a[::-1]) + a,
    "rows by number": lambda a: a[ROWS],
    "rows by small numbers": lambda a: a[ROWS.astype(np.uint16)],
    "rows by mask": lambda a: a[MASK],
    "rows by mask on disk": lambda a: a[a > 20],
    "slice": lambda a: a[3:900],
    "neighbours": lambda a: a[1:] == a[:-1],
    "argsort": lambda a: np.argsort(a, kind="stable"),
    "argsort of distinct values": lambda a: np.argsort(a[ROWS] * 1000 + ROWS, kind="stable"),
    "argsort of one value": lambda a: np.argsort(a * 0, kind="stable"),
    "argsort of a few": lambda a: np.argsort(a[:3], kind="stable"),
    "lexsort": lambda a: np.lexsort((a, -a % 7)),
    "sort": np.sort,
    "where": lambda a: np.where(a > 20, a, -1),
    "where of numbers": lambda a: np.where(a > 20, -1, np.int64(3)),
    "flatnonzero": lambda a: np.flatnonzero(a > 20),
    "cumsum": lambda a: np.cumsum(a > 20),
    "running maximum": np.maximum.accumulate,
    "running maximum from the end": lambda a: np.minimum.accumulate(a[::-1])[::-1],
    "concatenate": lambda a: np.concatenate([[0], a, a]),
    "append": lambda a: np.append(a, 7),
    "diff": lambda a: np.diff(a, prepend=-1),
    "unique": np.unique,
    "unique, where first": lambda a: np.unique(a, return_index=True)[1],
    "unique, which": lambda a: np.unique(a, return_inverse=True)[1],
    "searchsorted": lambda a: np.searchsorted(np.sort(a), a, side="right"),
    "searchsorted of other numbers": lambda a: np.searchsorted(np.sort(a).astype(np.uint32), a),
    "repeat": lambda a: np.repeat(a, a),
    "isin": lambda a: np.isin(a, [1, 2]),
    "clip": lambda a: np.clip(a, 3, 9),
    "astype": lambda a: a.astype(np.uint16),
    "full": lambda a: np.full(1000, 3, like=a),
    "zeros": lambda a: np.zeros(1000, dtype=np.bool_, like=a),
    "arange": lambda a: np.arange(1000, like=a),
    "arange from": lambda a: np.arange(-1, 999, dtype=np.int32, like=a),
    "lookup": lambda a: arrays.gather_rows(np.arange(50) * 2, a),
}


@pytest.mark.parametrize("name", OPERATIONS)
def test_an_operation_gives_what_it_gives_in_memory_and_lies_on_disk(name):
    expected = OPERATIONS[name](VALUES)
    found = OPERATIONS[name](mapped_arrays.copy_to_disk(VALUES))
    assert isinstance(found, mapped_arrays.MappedArray)
    assert found.dtype == expected.dtype
    assert np.array_equal(found.view(np.ndarray), expected)


def _set_rows(values):
    values[ROWS[:500]] = VALUES[:500]


def _set_mask(values):
    values[MASK] = VALUES[MASK]


def _set_one(values):
    values[MASK] = 5


def _add_in_place(values):
    values[np.flatnonzero(MASK)] += 1
    values |= 1


def _least_at(values):
    np.minimum.at(values, ROWS[:500], VALUES[:500])


def _last_of_equal_rows(values):
    values[VALUES] = np.arange(1000)


@pytest.mark.parametrize(
    "change",
    [_set_rows, _set_mask, _set_one, _add_in_place, _least_at, _last_of_equal_rows],
    ids=lambda f: f.__name__,
)
def test_a_change_in_place_is_the_same_as_in_memory(change):
    inside, outside = VALUES.copy(), mapped_arrays.copy_to_disk(VALUES)
    change(inside)
    change(outside)
    assert np.array_equal(outside.view(np.ndarray), inside)


def test_what_is_wrong_in_memory_is_wrong_on_disk():
    values = mapped_arrays.copy_to_disk(VALUES)
    with pytest.raises(IndexError):
        values[np.array([1000])]
    with pytest.raises(IndexError):
        values[MASK[1:]]
    with pytest.raises(ValueError, match=r"shape mismatch|values for"):
        values[ROWS[:4]] = VALUES[:3]


def test_one_number_is_a_number():
    values = mapped_arrays.copy_to_disk(VALUES)
    assert values.sum() == VALUES.sum()
    assert values.max() == VALUES.max()
    assert int(values[3]) == VALUES[3]


def test_values_are_counted_as_in_memory():
    values = mapped_arrays.copy_to_disk(VALUES.astype(np.int32))
    assert np.array_equal(np.bincount(values, minlength=60), np.bincount(VALUES, minlength=60))
    assert np.bincount(values[:0], minlength=3).tolist() == [0, 0, 0]


def test_tables_and_empty_arrays_are_left_to_numpy():
    values = mapped_arrays.copy_to_disk(VALUES)
    assert np.array_equal(values.reshape(10, 100) + 1, VALUES.reshape(10, 100) + 1)
    assert (values[:0] + 1).size == 0


def test_columns_share_the_data_of_arrays_and_outlive_them():
    values = mapped_arrays.copy_to_disk(VALUES)
    column = build_number_column(values, pl.Int64)
    nullable = build_number_column(values, pl.Int64, absent=3)
    values[0] = 77
    del values
    assert column[0] == nullable[0] == 77
    assert nullable[1:].to_list() == [
        None if value == 3 else value for value in VALUES[1:].tolist()
    ]
    assert build_number_column(
        mapped_arrays.copy_to_disk(VALUES), pl.UInt32, absent=3
    ).null_count() == int((VALUES == 3).sum())


def test_texts_of_any_length_are_columns():
    texts = [
        "short",
        "",
        "x" * 12,
        "y" * 13,
        "zwölf Zeichen und mehr",
        *(f"t{number}" * number for number in range(1, 46)),
    ]
    codes = mapped_arrays.copy_to_disk(np.where(VALUES == 9, -1, VALUES).astype(np.int32))
    column = TextTable(texts).column(codes)
    assert column.dtype == pl.String
    assert column.to_list() == [None if code < 0 else texts[code] for code in codes.tolist()]
    assert column.value_counts().height == 50


def test_blocks_are_used_again_and_have_no_names(tmp_path):
    first = mapped_arrays.copy_to_disk(VALUES)
    address = first.ctypes.data
    assert list((tmp_path / "cache" / "spill").iterdir()) == []
    view = first[5:]
    del first
    second = mapped_arrays.copy_to_disk(VALUES + 1)
    assert second.ctypes.data != address, "a view still holds the first block"
    assert view[0] == VALUES[5]
    del view
    assert mapped_arrays.copy_to_disk(VALUES).ctypes.data == address


@pytest.mark.sampled(5)
@pytest.mark.data
@pytest.mark.parametrize("name", NAMES)
def test_a_real_trace_on_disk_is_the_trace_in_memory(name, shared_data, monkeypatch):
    path = shared_data / "kineto" / f"{name}.json.gz"
    inside = read_kineto(path)
    monkeypatch.setattr(mapped_arrays, "MIN_SPILL_BYTES", 0)
    monkeypatch.setattr(mapped_arrays, "SLICE_ELEMENTS", 10_000)
    monkeypatch.setattr(mapped_arrays, "MAX_SORTED_ELEMENTS", 20_000)
    outside = read_kineto(path)
    for frame, expected in inside.frames().items():
        assert outside.frames()[frame].schema == expected.schema
        assert outside.frames()[frame].equals(expected), frame
    assert outside.meta == inside.meta
    assert outside.notices == inside.notices
    outside.check()


@pytest.mark.sampled(1)
@pytest.mark.data
@pytest.mark.parametrize("name", ["a100_ddp_nccl", "h100_qwen_0.5b", "mi300_vllm_piecewise_graphs"])
def test_a_saved_trace_comes_back_on_disk(name, shared_data, tmp_path, monkeypatch):
    trace = read_kineto(shared_data / "kineto" / f"{name}.json.gz")
    storage.save(trace, tmp_path)
    monkeypatch.setattr(mapped_arrays, "MIN_SPILL_BYTES", 0)
    monkeypatch.setattr(storage, "PART_ROWS", 7_000)
    back = storage.load_trace(tmp_path)
    for frame, expected in trace.frames().items():
        assert back.frames()[frame].schema == expected.schema
        assert back.frames()[frame].equals(expected), frame


def test_a_damaged_saved_trace_is_refused_on_disk_too(tmp_path, monkeypatch):
    storage.save(_builder().build(), tmp_path)
    pl.DataFrame({"event": [1]}).write_ipc(tmp_path / "events.arrow")
    monkeypatch.setattr(mapped_arrays, "MIN_SPILL_BYTES", 0)
    with pytest.raises(ValueError, match="events is not as it was written"):
        storage.load_trace(tmp_path)
    with pytest.raises(ValueError, match="events is not as its head says"):
        storage.load_trace(tmp_path, permanent=False)


def _builder():
    made = TraceBuilder().step(0, 0, 1000)
    for number in range(50):
        made.op("aten::mm", number * 10, 8).launch(
            "cudaLaunchKernel", number * 10 + 1, 2, correlation=number
        )
        made.kernel("gemm", number * 10 + 4, 3, correlation=number)
    return made


def test_a_full_disk_is_said_in_one_sentence(tmp_path, monkeypatch):
    path = tmp_path / "trace.json"
    path.write_text(_builder().text())
    monkeypatch.setattr(mapped_arrays, "MIN_SPILL_BYTES", 0)

    def full(*_args):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full, raising=False)
    with pytest.raises(InputError, match="do not fit the disk: no space left on device") as caught:
        read_kineto(path)
    assert caught.value.slug == "no-space"
    assert "TRACELOOM_CACHE_DIR" in str(caught.value)
    assert list((tmp_path / "cache" / "spill").iterdir()) == []


def test_where_nothing_reserves_space_zeros_are_written(monkeypatch):
    monkeypatch.delattr(os, "posix_fallocate", raising=False)
    assert np.array_equal(mapped_arrays.copy_to_disk(VALUES).view(np.ndarray), VALUES)


@pytest.mark.parametrize("ending", [signal.SIGINT, signal.SIGKILL], ids=["interrupted", "killed"])
def test_a_reader_that_is_stopped_leaves_no_files(ending, tmp_path):
    path = tmp_path / "big.json"
    write_big(path, 3_000_000)
    code = (
        "import os, signal, sys\n"
        "from traceloom.formats import kineto, read_kineto\n"
        "from traceloom.trace import mapped_arrays as ondisk, mapped_arrays as spill\n"
        "spill.MIN_SPILL_BYTES = 0; ondisk.MIN_MAPPED_BYTES = 1\n"
        "real = kineto._assemble\n"
        "def stopped(decoded, *rest):\n"
        "    decoded.columns.take('spans', 'start', 'int64')\n"
        "    os.kill(os.getpid(), int(sys.argv[2]))\n"
        "    return real(decoded, *rest)\n"
        "kineto._assemble = stopped\n"
        "read_kineto(sys.argv[1])\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(path), str(int(ending))], capture_output=True, check=False
    )
    assert done.returncode == -ending
    assert list((tmp_path / "cache" / "spill").iterdir()) == []
