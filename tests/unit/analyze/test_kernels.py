"""Kernels by name and category."""

from __future__ import annotations

from collections import defaultdict

import pytest

from support.odd_traces import covered, gpu_rows_of
from traceloom.analyze import Rule, kernels
from traceloom.testing import TraceBuilder
from traceloom.trace.trace import Trace


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
    assert (top["mean_ns"], top["min_ns"], top["max_ns"], top["fraction"]) == (
        7_500,
        5_000,
        10_000,
        0.75,
    )


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


def test_every_row_is_what_adding_up_the_work_gives(odd: Trace) -> None:
    found, work = kernels(odd), gpu_rows_of(odd)
    groups: dict[tuple[str, str], list[int]] = defaultdict(list)
    for row in work:
        groups[row["name"], row["category"]].append(row["ns"])
    whole = sum(row["ns"] for row in work)
    assert found.kernels.height == len(groups)
    assert found.kernels["total_ns"].is_sorted(descending=True)
    for row in found.kernels.to_dicts():
        ns = groups[row["name"], row["kind"]]
        assert (row["count"], row["total_ns"], row["mean_ns"]) == (
            len(ns),
            sum(ns),
            sum(ns) // len(ns),
        )
        assert (row["min_ns"], row["max_ns"], row["fraction"]) == (
            min(ns),
            max(ns),
            pytest.approx(sum(ns) / whole),
        )
        assert (row["category"] == "memory") == (row["kind"] != "kernel")
        assert (row["category"] == "communication") == row["name"].startswith("nccl")


def test_categories_count_their_time_once_per_device(odd: Trace) -> None:
    spans: dict[str, dict[int, list[tuple[int, int]]]] = defaultdict(lambda: defaultdict(list))
    for row in gpu_rows_of(odd):
        of_nccl = "communication" if row["name"].startswith("nccl") else "compute"
        category = of_nccl if row["category"] == "kernel" else "memory"
        spans[category][row["device"]].append((row["start_ns"], row["end_ns"]))
    for category, count, total, union in kernels(odd).categories.rows():
        of_devices = spans[category].values()
        assert count == sum(len(part) for part in of_devices)
        assert total == sum(end - start for part in of_devices for start, end in part)
        assert union == sum(map(covered, of_devices))


def test_a_rule_of_the_users_moves_a_kernel_to_its_category_and_no_time_is_lost(odd: Trace) -> None:
    plain, ruled = kernels(odd), kernels(odd, [Rule("ours", "communication", "^soft")])
    assert ruled.categories["total_ns"].sum() == plain.categories["total_ns"].sum()
    assert set(ruled.kernels.filter(rule="ours")["name"]) == (
        {"softmax"} if odd.gpu_work().height else set()
    )
    moved = plain.kernels.filter(name="softmax")["total_ns"].sum()
    at = plain.categories.filter(category="communication")["total_ns"].item()
    assert ruled.categories.filter(category="communication")["total_ns"].item() == at + moved
