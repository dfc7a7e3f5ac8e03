"""Kernels by name and category."""

from __future__ import annotations

from traceloom.analyze import kernels
from traceloom.testing import TraceBuilder


def test_kernels_are_added_up_by_name_largest_first() -> None:
    builder = TraceBuilder().kernel("gemm", 0, 10).kernel("gemm", 20, 5).kernel("add", 30, 1)
    builder.fill(40, 4, bytes=1)
    rows = kernels(builder.build()).kernels.to_dicts()
    assert [(r["name"], r["kind"], r["category"], r["count"], r["total_ns"]) for r in rows] == [
        ("gemm", "kernel", "compute", 2, 15_000),
        ("Memset (Device)", "fill", "memory", 1, 4_000),
        ("add", "kernel", "compute", 1, 1_000),
    ]
    top = rows[0]
    assert (top["mean_ns"], top["min_ns"], top["max_ns"], top["fraction"]) == (7_500, 5_000, 10_000, 0.75)


def test_a_sum_above_its_union_shows_overlap_per_device() -> None:
    builder = TraceBuilder(devices=2).kernel("a", 0, 10, stream=7).kernel("b", 5, 10, stream=8)
    builder.kernel("c", 0, 10, device=1)
    row = kernels(builder.build()).categories.to_dicts()[0]
    assert row == {"category": "compute", "count": 3, "total_ns": 30_000, "union_ns": 25_000}


def test_without_gpu_work_the_categories_are_zero_and_the_table_is_empty() -> None:
    result = kernels(TraceBuilder().op("aten::mm", 0, 1).build())
    assert result.kernels.height == 0
    assert result.categories["total_ns"].to_list() == [0, 0, 0]


def test_only_kernels_without_duration_have_a_share_of_nothing() -> None:
    assert kernels(TraceBuilder().kernel("a", 0, 0).build()).kernels["fraction"].to_list() == [0.0]
