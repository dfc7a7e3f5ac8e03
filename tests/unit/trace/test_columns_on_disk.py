"""Columns that grow on disk and become Polars columns: by value, against lists in memory."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest

from traceloom.errors import InputError
from traceloom.trace import mapped_arrays
from traceloom.trace.arrays import (
    TextTable,
    build_mapped_column,
    build_number_column,
    get_arrow_name,
)
from traceloom.trace.mapped_arrays import ColumnSpool

TEXTS = [
    "",
    "a",
    "elf bytes..",
    "twelve bytes",
    "thirteen byte",
    "x" * 1000,
    "é" * 6,
    "é" * 7,
    "\U0001f600\0 \u2028",
]
LARGE, SMALL = 2**63 - 1, -(2**63)


@pytest.fixture(autouse=True)
def large(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """Every array counts as large."""
    monkeypatch.setenv("TRACELOOM_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(mapped_arrays, "MIN_MAPPED_BYTES", 1)
    monkeypatch.setattr(mapped_arrays, "SLICE_ELEMENTS", 16)
    yield
    mapped_arrays.BLOCK_POOL.clear()


def files(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()]


@pytest.mark.parametrize("dtype", [np.int64, np.uint64, np.int32, np.uint8, np.float64, np.bool_])
def test_a_column_is_its_parts_one_after_the_other(dtype: Any, tmp_path: Path) -> None:
    chance = np.random.default_rng(1)
    parts = [chance.integers(0, 2, size).astype(dtype) for size in (5, 0, 1, 700)]
    parts.append(
        np.array([np.iinfo(dtype).max if np.issubdtype(dtype, np.integer) else 1], dtype=dtype)
    )
    parts.append(np.arange(100).astype(dtype)[::-3])  # not contiguous
    spill = ColumnSpool()
    for part in parts[:3]:
        spill.add("events", "start", part)
    column = spill.column("events", "start", parts[3:], dtype)
    assert column.tolist() == [value for part in parts for value in part.tolist()]
    assert column.dtype == dtype
    assert isinstance(column, mapped_arrays.MappedArray)
    assert files(tmp_path) == []


def test_columns_of_the_same_name_belong_to_their_tables_and_are_given_once() -> None:
    spill = ColumnSpool()
    spill.add("a", "x", np.array([1, 2]))
    spill.add("b", "x", np.array([3]))
    spill.add("a", "y", np.array([4]))
    assert [spill.holds(*key) for key in (("a", "x"), ("b", "x"), ("a", "y"), ("b", "y"))] == [
        True,
        True,
        True,
        False,
    ]
    assert spill.column("a", "x", [], np.int64).tolist() == [1, 2]
    assert not spill.holds("a", "x")
    with pytest.raises(KeyError):
        spill.column("a", "x", [], np.int64)
    assert spill.column("b", "x", [np.array([5])], np.int64).tolist() == [3, 5]
    assert spill.column("only", "rest", [np.array([6.5])], np.float64).tolist() == [6.5]
    spill.close()
    assert not spill.holds("a", "y")
    spill.add("a", "y", np.array([7]))
    assert spill.column("a", "y", [], np.int64).tolist() == [7]


def test_without_a_place_for_the_files_it_is_said_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "in the way").write_text("a file")
    monkeypatch.setenv("TRACELOOM_CACHE_DIR", str(tmp_path / "in the way"))
    with pytest.raises(InputError) as caught:
        ColumnSpool().add("a", "x", np.array([1]))
    assert caught.value.slug == "no-space"
    assert caught.value.where == str(tmp_path / "in the way" / "spill")
    assert "TRACELOOM_CACHE_DIR" in str(caught.value.hint)
    with pytest.raises(InputError, match="do not fit the disk"):
        mapped_arrays.allocate_array(5, np.int64)


@pytest.mark.parametrize("absent", [None, 3, -1, 0])
@pytest.mark.parametrize("dtype", [pl.Int64, pl.UInt32, pl.UInt16, pl.Float64])
def test_numbers_are_null_where_they_are_the_absent_one(dtype: Any, absent: int | None) -> None:
    values = [3, 0, 7, 3, 1, *range(60), 3]
    column = build_number_column(mapped_arrays.copy_to_disk(np.array(values)), dtype, absent=absent)
    assert column.to_list() == [None if value == absent else value for value in values]
    assert column.dtype == dtype


@pytest.mark.parametrize(
    "codes", [[], [0], [-1], [-1, -5, -1], list(range(len(TEXTS))), [*range(len(TEXTS)), -1] * 9]
)
def test_texts_of_any_length_are_those_of_their_codes(codes: list[int]) -> None:
    column = TextTable(TEXTS).column(np.array(codes, dtype=np.int32))
    assert column.to_list() == [TEXTS[code] if code >= 0 else None for code in codes]
    assert column.dtype == pl.String
    assert column.null_count() == sum(code < 0 for code in codes)


def test_a_table_without_texts_gives_nulls_alone() -> None:
    assert TextTable([]).column(np.array([-1, -1])).to_list() == [None, None]
    assert TextTable([""]).column(np.array([0, -1])).to_list() == ["", None]


def test_columns_of_texts_work_as_any_other() -> None:
    codes = np.array([3, 4, -1, 5, 3, 8, 0], dtype=np.int32)
    column, plain = (
        TextTable(TEXTS).column(codes),
        pl.Series([TEXTS[code] if code >= 0 else None for code in codes]),
    )
    frame, expected = pl.DataFrame({"t": column}), pl.DataFrame({"t": plain})
    for query in (
        pl.col("t").sort(),
        pl.col("t").str.len_bytes(),
        pl.col("t").is_null(),
        pl.col("t").unique(maintain_order=True),
        pl.col("t").str.to_uppercase(),
        pl.col("t").filter(pl.col("t") == TEXTS[3]),
        pl.col("t").reverse().slice(1, 3),
    ):
        assert frame.select(query).equals(expected.select(query))


PARTS: dict[str, tuple[pl.DataType, list[list[Any]]]] = {
    "texts": (pl.String(), [["a", None, "x" * 40], [], ["b", "a", TEXTS[-1], ""]]),
    "nulls of texts": (pl.String(), [[None], [None, None]]),
    "whole numbers": (pl.Int64(), [[1, LARGE, SMALL], [0], list(range(50))]),
    "with nulls": (pl.Int64(), [[None, 0], [], [None], [5, None, -1]]),
    "unsigned": (pl.UInt64(), [[2**64 - 1, None], [0]]),
    "small": (pl.UInt16(), [[65535], [0, None]]),
    "fractions": (pl.Float64(), [[0.5, None, float("inf")], [-0.0]]),
    "neither": (pl.Boolean(), [[True, None], [False]]),
    "lists": (pl.List(pl.Int32()), [[[1, 2], None], [[]]]),
}


@pytest.mark.parametrize("name", PARTS)
def test_a_column_gathered_from_parts_is_their_sum(name: str) -> None:
    dtype, parts = PARTS[name]
    values = [value for part in parts for value in part]
    column = build_mapped_column(
        dtype, len(values), lambda: (pl.Series(part, dtype=dtype) for part in parts)
    )
    assert column.to_list() == values
    assert column.dtype == dtype
    assert column.null_count() == values.count(None)


@pytest.mark.parametrize("dtype", [pl.String(), pl.Int64(), pl.Boolean()])
def test_of_no_rows_nothing_is_asked(dtype: pl.DataType) -> None:
    column = build_mapped_column(dtype, 0, lambda: pytest.fail("there is nothing to ask for"))
    assert (column.len(), column.dtype) == (0, dtype)


@pytest.mark.parametrize(
    ("dtype", "name"),
    [
        (pl.Int64(), "int64"),
        (pl.UInt16(), "uint16"),
        (pl.Float64(), "float64"),
        (pl.String(), None),
        (pl.Int8(), None),
    ],
)
def test_arrow_has_a_name_for_numbers_of_the_columns(dtype: pl.DataType, name: str | None) -> None:
    assert get_arrow_name(dtype) == name
