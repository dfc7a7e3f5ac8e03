"""Memory curves and peaks."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import pairwise

import polars as pl
import pytest

from traceloom.analyze import memory
from traceloom.analyze.memory_answers import explain_allocations
from traceloom.testing import TraceBuilder
from traceloom.trace.trace import Trace


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
    assert (row["device_type"], row["peak_bytes"], row["start_bytes"], row["end_bytes"]) == (
        "cuda",
        1300,
        1000,
        1200,
    )
    assert (row["allocation_count"], row["free_count"], row["evidence"]) == (
        2,
        1,
        "allocator-totals",
    )
    assert row["peak_time_ns"] == 2000
    assert result.curve.select("allocated_bytes", "reserved_bytes").rows() == [
        (1100, 5000),
        (1300, 6000),
        (1200, 6000),
    ]


def test_the_peak_may_lie_before_the_first_event() -> None:
    trace = (
        TraceBuilder()
        .op("a", 0, 9)
        .allocation(1, -100, address=1, total_allocated=900, total_reserved=1)
        .build()
    )
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
            time,
            size,
            address=address,
            total_allocated=allocated,
            total_reserved=reserved,
            device=-1,
            device_type=0,
        )

    builder = TraceBuilder(device_name=None).op("aten::mm", 0, 100)
    event(1, 300, 1, 300, 0)
    event(2, 64, 9, 0, 64)
    event(3, -64, 9, 0, 0)
    event(4, -32, 8, 0, 0)  # a block from before the window, which only this allocator reports
    event(5, -300, 1, 0, 0)
    event(6, 50, 9, 50, 0)  # the address used again by the ordinary allocator
    rows = {row["device_type"]: row for row in memory(builder.build()).devices.to_dicts()}
    assert (
        rows["cpu"]["allocation_count"],
        rows["cpu"]["free_count"],
        rows["cpu"]["end_bytes"],
    ) == (2, 1, 50)
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


def played(seed: int, events: int, before: int) -> tuple[Trace, dict[int, list[int]]]:
    """Random allocations on two devices whose allocators told their totals; the totals by device."""
    chance = random.Random(seed)
    builder = TraceBuilder(devices=2).op("aten::mm", 0, 2 * events)
    live: dict[tuple[int, int], int] = {}
    levels: dict[int, list[int]] = {0: [before], 1: [0]}
    for number in range(events):
        device, address = chance.randrange(2), chance.randrange(1, 40)
        size = (
            -live.pop((device, address))
            if (device, address) in live
            else chance.randrange(1, 1 << 30)
        )
        if size > 0:
            live[device, address] = size
        levels[device].append(levels[device][-1] + size)
        builder.allocation(
            number,
            size,
            address=address,
            device=device,
            total_allocated=levels[device][-1],
            total_reserved=1 << 40,
        )
    return builder.build(), levels


@pytest.mark.parametrize("before", [0, 5 << 30])
@pytest.mark.parametrize("events", [1, 2, 300])
def test_curve_and_peak_are_those_of_the_allocator(events: int, before: int) -> None:
    trace, levels = played(events, events, before)
    found = memory(trace)
    for device, of in levels.items():
        if len(of) == 1:
            continue
        row = found.devices.filter(device=device).row(0, named=True)
        assert (row["start_bytes"], row["end_bytes"], row["peak_bytes"]) == (of[0], of[-1], max(of))
        changes = [later - earlier for earlier, later in pairwise(of)]
        assert row["allocation_count"] == sum(change > 0 for change in changes)
        assert row["free_count"] == sum(change < 0 for change in changes)
        assert found.curve.filter(device=device)["allocated_bytes"].to_list() == of[1:]
        if max(of) > of[0]:
            at = found.curve.filter(device=device, time_ns=row["peak_time_ns"])
            assert at["allocated_bytes"].to_list() == [max(of)]


@pytest.mark.parametrize("events", [2, 300])
def test_both_accounts_of_memory_agree(events: int) -> None:
    trace, _ = played(events, events, 1 << 30)
    short, long = memory(trace).devices, explain_allocations(trace).pools
    columns = ["device", "peak_bytes", "start_bytes", "end_bytes", "allocation_count", "free_count"]
    assert short.select(columns).sort("device").rows() == long.select(columns).sort("device").rows()


def test_devices_and_memories_are_apart() -> None:
    builder = TraceBuilder(devices=2).op("aten::mm", 0, 100)
    for time, kind, device, size in ((1, 1, 0, 10), (2, 1, 1, 20), (3, 0, -1, 40), (4, 6, 0, 80)):
        builder.allocation(time, size, address=7, device_type=kind, device=device)
    rows = memory(builder.build()).devices.select("device_type", "device", "end_bytes").rows()
    assert sorted(rows) == [("cpu", -1, 40), ("cuda", 0, 10), ("cuda", 1, 20), ("hip", 0, 80)]


@pytest.mark.parametrize("size", [1, 2**40, 2**62])
def test_amounts_of_any_magnitude_stay_exact(size: int) -> None:
    builder = (
        TraceBuilder()
        .op("aten::mm", 0, 100)
        .allocation(1, size, address=1)
        .allocation(2, -size, address=1)
    )
    row = memory(builder.build()).devices.row(0, named=True)
    assert (row["peak_bytes"], row["end_bytes"]) == (size, 0)
    assert memory(builder.build()).curve.schema["allocated_bytes"] == pl.Int64
