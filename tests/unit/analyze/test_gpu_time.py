"""GPU time of small traces made by hand; times in microseconds."""

from __future__ import annotations

from typing import Any

from traceloom.analyze import gpu_time
from traceloom.testing import TraceBuilder


def row_of(builder: TraceBuilder) -> dict[str, Any]:
    return gpu_time(builder.build()).devices.to_dicts()[0]


def test_overlapping_work_counts_once_in_busy_and_twice_in_sums() -> None:
    row = row_of(TraceBuilder().kernel("a", 0, 10, stream=7).kernel("b", 5, 10, stream=8))
    assert (row["busy_ns"], row["compute_ns"], row["kernel_ns"]) == (15_000, 15_000, 20_000)


def test_exposed_is_what_compute_does_not_cover() -> None:
    builder = (
        TraceBuilder().kernel("gemm", 0, 10).kernel("ncclDevKernel_AllReduce", 5, 10, stream=20)
    )
    builder.copy("Memcpy DtoH (Device -> Pinned)", 12, 8, bytes=1, stream=30)
    row = row_of(builder)
    assert (row["communication_ns"], row["exposed_communication_ns"]) == (10_000, 5_000)
    assert (row["memory_ns"], row["exposed_memory_ns"]) == (8_000, 5_000)
    assert (row["window_ns"], row["busy_ns"], row["idle_ns"]) == (20_000, 20_000, 0)


def test_edge_idle_stands_apart_from_the_window() -> None:
    row = row_of(
        TraceBuilder().op("aten::mm", 0, 100).kernel("gemm", 30, 10).kernel("gemm", 50, 10)
    )
    assert (row["edge_idle_before_ns"], row["window_ns"], row["edge_idle_after_ns"]) == (
        30_000,
        30_000,
        40_000,
    )
    assert row["idle_ns"] == 10_000


def test_a_kernel_across_a_step_border_is_shared_by_time_and_counted_where_it_starts() -> None:
    builder = TraceBuilder().step(1, 0, 50).step(2, 50, 50).kernel("gemm", 40, 30)
    first, second, outside = gpu_time(builder.build()).steps.to_dicts()
    assert (first["step"], first["busy_ns"], first["gpu_work_count"]) == (1, 10_000, 1)
    assert (second["step"], second["busy_ns"], second["gpu_work_count"]) == (2, 20_000, 0)
    assert (outside["step"], outside["start_ns"], outside["duration_ns"]) == (None, None, 0)


def test_a_device_without_work_in_a_step_has_a_row_all_the_same() -> None:
    builder = TraceBuilder(devices=2).step(1, 0, 50).step(2, 50, 50)
    steps = gpu_time(
        builder.kernel("gemm", 10, 5, device=0).kernel("gemm", 60, 5, device=1).build()
    ).steps
    rows = [
        (r["device"], r["step"], r["busy_ns"], r["edge_idle_after_ns"]) for r in steps.to_dicts()
    ]
    assert rows == [
        (0, 1, 5_000, 35_000),
        (0, 2, 0, 50_000),
        (0, None, 0, 0),
        (1, 1, 0, 0),
        (1, 2, 5_000, 35_000),
        (1, None, 0, 0),
    ]


def test_devices_carry_their_names() -> None:
    assert row_of(TraceBuilder(device_name="H100").kernel("gemm", 0, 1))["name"] == "H100"
    assert row_of(TraceBuilder(device_name=None).kernel("gemm", 0, 1))["name"] is None


def test_a_cpu_only_trace_has_frames_without_rows() -> None:
    result = gpu_time(TraceBuilder(device_name=None).op("aten::mm", 0, 10).build())
    assert result.devices.height == result.steps.height == 0
    assert result.devices.columns[:3] == ["device", "name", "start_ns"]


def test_an_empty_trace_has_frames_without_rows() -> None:
    assert gpu_time(TraceBuilder().build()).devices.height == 0
