"""Operators: self times and device times add up, recursion counts once."""

from __future__ import annotations

from typing import Any

from traceloom.analyze import operators
from traceloom.testing import TraceBuilder


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
    assert (found["aten::linear"]["self_device_ns"], found["aten::linear"]["device_ns"]) == (5000, 55_000)
    assert (found["aten::addmm"]["self_device_ns"], found["aten::addmm"]["device_ns"]) == (50_000, 50_000)
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
    builder = TraceBuilder().op("aten::mm", 0, 5).op("aten::mm", 5, 5).op("aten::mm", 5, 3, thread=2)
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
    assert (result.unattributed_device_ns, result.unattributed_count, result.gpu_work_ns) == (9000, 2, 12_000)
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
    for builder in (TraceBuilder(), TraceBuilder().kernel("k", 0, 5), TraceBuilder(device_name=None)):
        result = operators(builder.build())
        assert result.operators.schema == some.operators.schema
        assert result.operators.height == 0
