"""Columns are declared by names whose words say their types."""

from __future__ import annotations

import polars as pl
import pytest

from traceloom.trace.columns import COLUMNS
from traceloom.trace.frames import build_schema


def test_the_last_word_of_a_name_says_its_type() -> None:
    names = build_schema(
        "rank worst_rank wait_ns sent_bytes kernel_count fraction before_name event pageable depth"
    )
    assert list(names.items()) == [
        ("rank", pl.Int32()),
        ("worst_rank", pl.Int32()),
        ("wait_ns", pl.Int64()),
        ("sent_bytes", pl.Int64()),
        ("kernel_count", pl.Int64()),
        ("fraction", pl.Float64()),
        ("before_name", pl.String()),
        ("event", pl.UInt32()),
        ("pageable", pl.Boolean()),
        ("depth", pl.UInt16()),
    ]


def test_a_whole_name_goes_before_its_words_and_a_mean_is_a_number() -> None:
    assert build_schema(
        "mean_wait_ns mean_ns gap_mean_ns base_count by_kernel bytes_per_step"
    ) == pl.Schema(
        {
            "mean_wait_ns": pl.Float64(),
            "mean_ns": pl.Int64(),
            "gap_mean_ns": pl.Int64(),
            "base_count": pl.Float64(),
            "by_kernel": pl.Boolean(),
            "bytes_per_step": pl.Float64(),
        }
    )


def test_types_of_names_keep_their_order_and_schemas_come_where_they_stand() -> None:
    inner = build_schema("start_ns state", {"state": pl.Enum(["on", "off"])})
    outer = build_schema("rank cause", inner, "count", {"cause": pl.Int8, "count": pl.UInt64()})
    assert list(outer.items()) == [
        ("rank", pl.Int32()),
        ("cause", pl.Int8()),
        ("start_ns", pl.Int64()),
        ("state", pl.Enum(["on", "off"])),
        ("count", pl.UInt64()),
    ]


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        (("rank quux start_ns",), "no word says the type of quux"),
        (("rank start_ns rank",), "the column `rank` stands twice"),
        (("rank", build_schema("start_ns"), "start_ns"), "the column `start_ns` stands twice"),
        (("rank kind", {"kid": pl.Int8}), "no column is named kid"),
    ],
)
def test_a_mistake_is_an_error_with_the_name(columns: tuple[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build_schema(*columns)


def test_units_of_the_documents_agree() -> None:
    whole, share = {"time", "bytes", "flops"}, {"share", "change", "flop_rate", "byte_rate"}
    different, compared = {}, 0
    for path, column in COLUMNS.items():
        name = path.rpartition(".")[2]
        if (
            "mean" in name
            or name == "bytes_per_step"
            or column.unit not in whole | share | {"name"}
        ):
            continue
        try:
            kind = build_schema(name)[name]
        except ValueError:
            continue  # not of a table
        compared += 1
        if kind != (
            pl.Int64()
            if column.unit in whole
            else pl.Float64()
            if column.unit in share
            else pl.String()
        ):
            different[path] = (column.unit, kind)
    assert different == {}
    assert compared > 200
