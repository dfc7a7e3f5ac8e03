"""Memory curves and peaks."""

from __future__ import annotations

from dataclasses import replace

from traceloom.analyze import memory
from traceloom.model import Trace
from traceloom.testing import TraceBuilder


def with_census(trace: Trace, cpu: int) -> Trace:
    return replace(trace, meta=replace(trace.meta, capture={"live_bytes_at_start": {"cpu": cpu}}))


def on_cpu() -> TraceBuilder:
    return (
        TraceBuilder(device_name=None)
        .op("aten::mm", 0, 100)
        .allocation(1, 300, address=1, total_allocated=300, device=-1, device_type=0)
        .allocation(2, 200, address=2, total_allocated=500, device=-1, device_type=0)
        .allocation(3, -300, address=1, total_allocated=200, device=-1, device_type=0)
    )


def test_a_gpu_allocator_knows_what_was_there_before() -> None:
    trace = (
        TraceBuilder()
        .op("aten::mm", 0, 100)
        .allocation(1, 100, address=1, total_allocated=1100, total_reserved=5000)
        .allocation(2, 200, address=2, total_allocated=1300, total_reserved=6000)
        .allocation(3, -100, address=1, total_allocated=1200, total_reserved=6000)
        .build()
    )
    result = memory(trace)
    row = result.devices.to_dicts()[0]
    assert (row["device_type"], row["peak_bytes"], row["start_bytes"], row["end_bytes"]) == ("cuda", 1300, 1000, 1200)
    assert (row["allocation_count"], row["free_count"], row["evidence"]) == (2, 1, "allocator-totals")
    assert row["peak_time_ns"] == 2000
    assert result.curve.select("allocated_bytes", "reserved_bytes").rows() == [(1100, 5000), (1300, 6000), (1200, 6000)]


def test_the_peak_may_lie_before_the_first_event() -> None:
    trace = TraceBuilder().op("a", 0, 9).allocation(1, -100, address=1, total_allocated=900, total_reserved=1).build()
    assert memory(trace).devices["peak_bytes"].to_list() == [1000]


def test_on_the_cpu_the_events_are_added_up_and_the_start_is_unknown() -> None:
    row = memory(on_cpu().build()).devices.to_dicts()[0]
    assert (row["peak_bytes"], row["start_bytes"], row["end_bytes"]) == (500, None, 200)
    assert row["evidence"] == "running-sum"


def test_a_census_at_the_start_makes_cpu_figures_absolute() -> None:
    row = memory(with_census(on_cpu().build(), 7000)).devices.to_dicts()[0]
    assert (row["peak_bytes"], row["start_bytes"], row["end_bytes"]) == (7500, 7000, 7200)
    assert row["evidence"] == "census-and-sum"


def test_shared_memory_of_loader_workers_is_a_class_of_its_own() -> None:
    def event(time: float, size: int, address: int, allocated: int, reserved: int) -> None:
        builder.allocation(
            time, size, address=address, total_allocated=allocated, total_reserved=reserved, device=-1, device_type=0
        )

    builder = TraceBuilder(device_name=None).op("aten::mm", 0, 100)
    event(1, 300, 1, 300, 0)
    event(2, 64, 9, 0, 64)
    event(3, -64, 9, 0, 0)
    event(4, -32, 8, 0, 0)  # a block from before the window, which only this allocator reports
    event(5, -300, 1, 0, 0)
    event(6, 50, 9, 50, 0)  # the address used again by the ordinary allocator
    rows = {row["device_type"]: row for row in memory(builder.build()).devices.to_dicts()}
    assert (rows["cpu"]["allocation_count"], rows["cpu"]["free_count"], rows["cpu"]["end_bytes"]) == (2, 1, 50)
    shared = rows["cpu-shared"]
    assert (shared["allocation_count"], shared["free_count"], shared["end_bytes"]) == (1, 2, -32)


def test_a_long_curve_keeps_every_extreme_of_its_parts() -> None:
    builder = TraceBuilder().op("aten::mm", 0, 20_000)
    for index in range(9000):
        spike = 10**6 if index == 4321 else index % 7
        builder.allocation(index, 1, address=index, total_allocated=spike, total_reserved=10**7)
    result = memory(builder.build())
    assert result.curve.height <= 4000
    assert result.curve["allocated_bytes"].max() == 10**6
    assert result.curve["time_ns"].is_sorted()
    assert (result.curve["time_ns"][0], result.curve["time_ns"][-1]) == (0, 8_999_000)


def test_without_allocations_the_frames_are_empty_with_the_same_columns() -> None:
    none, some = memory(TraceBuilder().build()), memory(on_cpu().build())
    assert (none.devices.schema, none.curve.schema) == (some.devices.schema, some.curve.schema)
    assert none.devices.height == 0
