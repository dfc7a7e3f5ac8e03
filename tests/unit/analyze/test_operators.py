"""Operators: self times and device times add up, recursion counts once."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import polars as pl
import pytest

from support.odd_traces import Row, above, gpu_rows_of, rows_of
from traceloom.analyze import operators
from traceloom.testing import TraceBuilder
from traceloom.trace.trace import Trace


def rows(builder: TraceBuilder, *, by_shape: bool = False) -> dict[Any, dict[str, Any]]:
    found = operators(builder.build(), by_shape).operators.to_dicts()
    return {(row["name"], row["shapes"]) if by_shape else row["name"]: row for row in found}


def test_self_time_is_the_time_as_innermost_op_with_its_calls_and_frames() -> None:
    builder = (
        TraceBuilder()
        .op("aten::linear", 0, 20)
        .op("aten::addmm", 5, 10)
        .launch("cudaLaunchKernel", 7, 4, correlation=1)
        .kernel("gemm", 30, 50, correlation=1)
    )
    found = rows(builder)
    assert (found["aten::linear"]["self_ns"], found["aten::linear"]["total_ns"]) == (10_000, 20_000)
    assert (found["aten::addmm"]["self_ns"], found["aten::addmm"]["total_ns"]) == (10_000, 10_000)
    assert found["aten::linear"]["fraction"] == 0.5


def test_device_time_belongs_to_the_innermost_op_and_totals_to_all_around() -> None:
    builder = (
        TraceBuilder()
        .op("aten::linear", 0, 20)
        .op("aten::addmm", 5, 10)
        .launch("cudaLaunchKernel", 7, 4, correlation=1)
        .kernel("gemm", 30, 50, correlation=1)
        .launch("cudaMemsetAsync", 16, 1, correlation=2)
        .fill(90, 5, bytes=4, correlation=2)
    )
    found = rows(builder)
    assert (found["aten::linear"]["self_device_ns"], found["aten::linear"]["device_ns"]) == (
        5000,
        55_000,
    )
    assert (found["aten::addmm"]["self_device_ns"], found["aten::addmm"]["device_ns"]) == (
        50_000,
        50_000,
    )
    assert (found["aten::linear"]["kernel_count"], found["aten::addmm"]["kernel_count"]) == (1, 1)


def test_recursion_counts_once_in_totals() -> None:
    builder = (
        TraceBuilder()
        .op("aten::to", 0, 20)
        .op("aten::copy_", 2, 16)
        .op("aten::to", 5, 10)
        .launch("cudaLaunchKernel", 6, 2, correlation=1)
        .kernel("copy", 30, 7, correlation=1)
    )
    found = rows(builder)["aten::to"]
    assert found["count"] == 2
    assert found["total_ns"] == 20_000
    assert found["self_ns"] == 14_000
    assert found["mean_ns"] == 15_000
    assert (found["device_ns"], found["kernel_count"]) == (7000, 1)


def test_two_calls_of_one_name_side_by_side_both_count() -> None:
    builder = (
        TraceBuilder().op("aten::mm", 0, 5).op("aten::mm", 5, 5).op("aten::mm", 5, 3, thread=2)
    )
    assert rows(builder)["aten::mm"]["total_ns"] == 13_000


def test_orphans_and_work_outside_ops_are_the_remainder() -> None:
    builder = (
        TraceBuilder()
        .op("aten::mm", 0, 5)
        .launch("cudaLaunchKernel", 1, 2, correlation=1)
        .kernel("gemm", 10, 3, correlation=1)
        .launch("cudaLaunchKernel", 20, 2, correlation=2)
        .kernel("custom", 30, 4, correlation=2)
        .kernel("early", 2, 5)
    )
    result = operators(builder.build())
    assert (result.unattributed_device_ns, result.unattributed_count, result.gpu_work_ns) == (
        9000,
        2,
        12_000,
    )
    assert result.operators["self_device_ns"].sum() == 3000


def test_scopes_and_step_marks_are_no_operators() -> None:
    builder = (
        TraceBuilder()
        .op("traceloom.scope:block", 0, 20)
        .launch("cudaLaunchKernel", 1, 2, correlation=1)
        .kernel("k", 30, 4, correlation=1)
        .op("aten::mm", 5, 5)
    )
    result = operators(builder.build())
    assert result.operators["name"].to_list() == ["aten::mm"]
    assert result.unattributed_device_ns == 4000


def test_shapes_split_the_rows_when_asked_for() -> None:
    builder = (
        TraceBuilder()
        .op("aten::mm", 0, 5, shapes=[[2, 3], [3, 4]])
        .op("aten::mm", 10, 7, shapes=[[2, 3], [3, 4]])
        .op("aten::mm", 20, 3, shapes=[[8, 8], [8, 8]])
        .op("aten::zeros", 30, 1)
    )
    found = rows(builder, by_shape=True)
    assert {(key[0], row["count"], row["self_ns"]) for key, row in found.items()} == {
        ("aten::mm", 2, 12_000),
        ("aten::mm", 1, 3000),
        ("aten::zeros", 1, 1000),
    }
    assert [key[1] for key in found if key[0] == "aten::zeros"] == [None]
    assert rows(builder)["aten::mm"]["shapes"] is None


def test_columns_do_not_depend_on_the_trace() -> None:
    some = operators(TraceBuilder().op("aten::mm", 0, 1).build())
    for builder in (
        TraceBuilder(),
        TraceBuilder().kernel("k", 0, 5),
        TraceBuilder(device_name=None),
    ):
        result = operators(builder.build())
        assert result.operators.schema == some.operators.schema
        assert result.operators.height == 0


# -- against a reference that looks at each event ----------------------------------------------------------------


def is_op(row: Row) -> bool:
    return row["category"] == "op" and not row["name"].startswith("traceloom.")


@pytest.mark.parametrize("by_shape", [False, True])
def test_every_column_is_what_looking_at_each_event_gives(odd: Trace, by_shape: bool) -> None:
    events = rows_of(odd)
    shapes = dict(odd.tensors.select("event", "shapes").rows()) if by_shape else {}

    def key(row: Row) -> tuple[str, str | None]:
        return row["name"], shapes.get(row["event"])

    wanted: dict[tuple[str, str | None], dict[str, int]] = defaultdict(lambda: defaultdict(int))
    for row in filter(is_op, events):
        around = [other for other in above(events, row) if is_op(other)]
        columns = wanted[key(row)]
        columns["count"] += 1
        columns["spans"] += row["ns"]
        columns["self_ns"] += row["ns"]
        columns["total_ns"] += 0 if key(row) in map(key, around) else row["ns"]
        if around:
            wanted[key(around[0])]["self_ns"] -= row["ns"]
    outside_ns = outside_count = 0
    for work in gpu_rows_of(odd):
        launch = work["launch"] if work["launch"] is not None else work["op"]
        origin = None if launch is None else events[launch]
        around = (
            []
            if origin is None
            else [row for row in (origin, *above(events, origin)) if is_op(row)]
        )
        if not around:
            outside_ns, outside_count = outside_ns + work["ns"], outside_count + 1
            continue
        wanted[key(around[0])]["self_device_ns"] += work["ns"]
        for name in {key(row) for row in around}:
            wanted[name]["device_ns"] += work["ns"]
            wanted[name]["kernel_count"] += work["category"] == "kernel"
    result = operators(odd, by_shape)
    assert (result.unattributed_device_ns, result.unattributed_count) == (outside_ns, outside_count)
    assert result.operators.height == len(wanted)
    in_ops = sum(columns["self_ns"] for columns in wanted.values())
    for row in result.operators.to_dicts():
        columns = wanted[row["name"], row["shapes"]]
        for name in ("count", "self_ns", "total_ns", "self_device_ns", "device_ns", "kernel_count"):
            assert row[name] == columns[name], (row["name"], name)
        assert row["mean_ns"] == pytest.approx(columns["spans"] / columns["count"], abs=0.5)
        assert row["fraction"] == pytest.approx(columns["self_ns"] / in_ops)


def test_rows_come_by_self_time_and_rows_by_shape_add_up_to_those_by_name(odd: Trace) -> None:
    by_name, by_shape = operators(odd).operators, operators(odd, by_shape=True).operators
    for frame in (by_name, by_shape):
        assert frame["self_ns"].is_sorted(descending=True)
    columns = [
        "count",
        "self_ns",
        "self_device_ns",
    ]  # what counts nested calls of a row once does not add up
    added = by_shape.group_by("name").agg(pl.col(columns).sum()).sort("name")
    assert added.equals(by_name.select("name", *columns).sort("name"))


def test_operators_do_not_depend_on_when_the_trace_began_nor_on_its_clock() -> None:
    def made(base_ns: int, delay: float) -> pl.DataFrame:
        builder = (
            TraceBuilder(base_ns=base_ns)
            .op("aten::linear", delay, 20)
            .op("aten::mm", delay + 3, 9.5)
        )
        builder.launch("cudaLaunchKernel", delay + 5, 2, correlation=1).kernel(
            "k", delay + 40, 7, correlation=1
        )
        return operators(builder.build()).operators

    assert made(0, 0).equals(made(1_700_000_000_000_000_000, 0))
    assert made(0, 0).equals(made(0, 1e9))


@pytest.mark.parametrize(
    "name", ["", "aten::mm\x1b[31m", "<b>aten::mm</b>", "\u202eنص::mm", "x" * 5000, "a\nb\tc", "🔥"]
)
def test_names_of_any_letters_are_names(name: str) -> None:
    result = operators(TraceBuilder().op(name, 0, 5).op(name, 10, 7).build())
    assert result.operators.select("name", "count", "self_ns").rows() == [(name, 2, 12_000)]
