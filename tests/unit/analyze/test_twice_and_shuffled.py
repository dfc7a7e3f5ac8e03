"""What every analysis owes to what its file says: nothing to the order of entries, twice as much to twice the work."""

from __future__ import annotations

import math
from functools import cache
from typing import Any

import polars as pl
import pytest

from support.analyses import ALL, parts_of
from support.odd_traces import odd_builder, odd_trace
from traceloom import analyze
from traceloom.testing import TraceBuilder
from traceloom.trace.session import Session
from traceloom.trace.trace import Trace

LATER_US = 1_000.0  # when everything happens again; the first time is over after 400 µs


def same(first: Any, other: Any) -> bool:
    """Equal, frames with all their rows in order."""
    return first.equals(other) if isinstance(first, pl.DataFrame) else bool(first == other)


@cache
def shuffled(seed: int) -> Trace:
    return odd_builder(seed).shuffled(seed + 1).build()


@pytest.mark.parametrize("seed", [6, pytest.param(1, marks=pytest.mark.thorough)])
@pytest.mark.parametrize("name", ALL)
def test_the_order_of_the_entries_in_a_file_is_none_of_an_analysis(name: str, seed: int) -> None:
    first, other = (parts_of(ALL[name](trace)) for trace in (odd_trace(seed), shuffled(seed)))
    assert [part for part, value in first.items() if not same(value, other[part])] == []


@cache
def twice(seed: int) -> Trace:
    return odd_builder(seed).again(LATER_US).build()


# Of each analysis frames that tell a sum for each key: what is twice as much where all happens twice, and what is as
# it was.
SUMS: dict[str, tuple[str, str, str, str]] = {
    # name: (frame, keys, twice as much, the same)
    "gpu_time": (
        "devices",
        "device",
        (
            "busy_ns compute_ns communication_ns memory_ns exposed_communication_ns "
            "exposed_memory_ns gpu_work_count kernel_count kernel_ns"
        ),
        "edge_idle_before_ns edge_idle_after_ns",
    ),
    "kernels": (
        "kernels",
        "name category rule kind",
        "count total_ns",
        "mean_ns min_ns max_ns fraction",
    ),
    "operators": (
        "operators",
        "name shapes",
        "count self_ns total_ns device_ns self_device_ns kernel_count",
        "mean_ns fraction",
    ),
    "kernel_kinds": ("kinds", "device kind", "count sum_ns exclusive_ns", ""),
    "kernel_shapes": (
        "rows",
        "op shapes types kernel kind",
        "count total_ns",
        "mean_ns min_ns max_ns fraction",
    ),
    "modules": (
        "tree",
        "path kind",
        (
            "count host_ns self_host_ns device_ns self_device_ns kernel_count "
            "backward_host_ns backward_device_ns recompute_count"
        ),
        "depth",
    ),
    "flame": (
        "functions",
        "kind name file line",
        "calls self_ns total_ns self_device_ns device_ns",
        "",
    ),
    "threads": (
        "threads",
        "process thread name role",
        ("event_count busy_ns active_ns op_ns launch_ns blocking_call_ns python_ns launch_count"),
        "",
    ),
    "communication": (
        "collectives",
        "kind group element_type where",
        "count bytes total_ns exposed_ns",
        "mean_ns min_ns max_ns",
    ),
    "copies": (
        "kinds",
        "device kind source_memory target_memory by_kernel pageable",
        "count bytes unsized_count total_ns union_ns instant_count instant_bytes",
        "bytes_per_s min_bytes_per_s max_bytes_per_s",
    ),
    "launches": (
        "totals",
        "device",
        "work_count launch_count graph_work_count unknown_count early_count late_count",
        "delay_median_ns delay_max_ns span_median_ns span_max_ns latency_median_ns latency_max_ns",
    ),
    "roofline": (
        "operators",
        "name shapes types arithmetic",
        "count total_ns flops bytes",
        "fraction intensity flop_rate byte_rate roofline_fraction bound",
    ),
    "anti_patterns": ("patterns", "pattern", "match_count host_ns gpu_ns", "checked reason advice"),
    "blocking_calls": (
        "sites",
        "kind call op frame stack lane",
        "count pageable_count blocked_ns gpu_busy_ns",
        "max_ns",
    ),
}


@pytest.mark.sampled(15)
@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("name", SUMS)
def test_what_happens_twice_takes_twice_as_long(name: str, seed: int) -> None:
    part, *columns = SUMS[name]
    keys, doubled, kept = (column.split() for column in columns)
    first, other = (getattr(ALL[name](trace), part) for trace in (odd_trace(seed), twice(seed)))
    assert first.height, "the trace has what the analysis is about"
    expected = {
        tuple(row[key] for key in keys): [
            None if row[column] is None else 2 * row[column] for column in doubled
        ]
        + [row[column] for column in kept]
        for row in first.to_dicts()
    }
    actual = {
        tuple(row[key] for key in keys): [row[column] for column in (*doubled, *kept)]
        for row in other.to_dicts()
    }
    assert len(expected) == first.height, "the keys tell all rows apart"
    assert actual.keys() == expected.keys()
    for key, values in expected.items():
        differ = [
            column
            for column, value, again in zip((*doubled, *kept), values, actual[key], strict=True)
            if again != value
            and not (isinstance(value, float) and math.isclose(value, again, rel_tol=1e-9))
        ]
        assert differ == [], (key, values, actual[key])


@pytest.mark.parametrize("seed", [1, 2, 5, 6])
def test_steps_that_come_again_are_as_long_and_hold_as_much(seed: int) -> None:
    """The last steps of the second time, since a step ends where the next one begins."""
    first, other = odd_trace(seed), twice(seed)
    steps = [analyze.step_times(trace).steps.to_dicts() for trace in (first, other)]
    count = len(steps[0])
    assert len(steps[1]) == 2 * count
    for before, again in zip(steps[0], steps[1][count:], strict=True):
        assert again["duration_ns"] == before["duration_ns"]
        assert again["start_ns"] == before["start_ns"] + int(LATER_US * 1000)
        assert again["launch_count"] == before["launch_count"]
    after = steps[1][count]["step"]
    number = steps[0][0]["step"]
    for name, frame in (("gpu_time", "steps"), ("kernel_kinds", "steps"), ("modules", "steps")):
        rows = [getattr(ALL[name](trace), frame) for trace in (first, other)]
        rows = [frame.drop("name", "start_ns", "step_name", strict=False) for frame in rows]
        before, again = (
            frame.filter(pl.col("step") >= low)
            for frame, low in zip(rows, (number, after), strict=True)
        )
        moved = again.with_columns((pl.col("step") - (after - number)).cast(before.schema["step"]))
        assert moved.sort(pl.all()).equals(before.sort(pl.all())), name


@pytest.mark.parametrize("seed", [0, 2])
def test_a_thread_that_launches_nothing_changes_nothing_of_the_device(seed: int) -> None:
    """Also where it calls operators all the time."""
    busy = odd_builder(seed)
    for number in range(40):  # between the first and the last event of the others
        busy.op("aten::mm", 50 + 5.0 * number, 4, thread=900, shapes=[[4, 4], [4, 4]])
        busy.python("other.py(3): run", 50 + 5.0 * number, 4.5, thread=900)
    with_thread = busy.build()
    quiet = odd_trace(seed)
    for name in ("gpu_time", "kernels", "kernel_kinds", "communication", "copies"):
        first, other = (parts_of(ALL[name](trace)) for trace in (quiet, with_thread))
        assert [part for part, value in first.items() if not same(value, other[part])] == [], name
    first, other = (analyze.operators(trace) for trace in (quiet, with_thread))
    assert other.gpu_work_ns == first.gpu_work_ns
    assert other.operators["device_ns"].sum() == first.operators["device_ns"].sum()
    assert other.operators["count"].sum() == first.operators["count"].sum() + 40


# Idle time at the edges is that of the window, which is one for all devices.
OF_A_DEVICE = {
    "gpu_time": ("devices", "edge_idle_before_ns edge_idle_after_ns"),
    "kernel_kinds": ("kinds", ""),
    "communication": ("devices", ""),
    "copies": ("kinds", ""),
    "launches": ("queues", ""),
}


@cache
def of_device(seed: int, device: int) -> Trace:
    return odd_builder(seed).without_device(1 - device).build()


@pytest.mark.parametrize("seed", [0, 2])
@pytest.mark.parametrize("name", OF_A_DEVICE)
def test_what_runs_on_another_device_changes_nothing_of_a_device(name: str, seed: int) -> None:
    part, omitted = OF_A_DEVICE[name]
    for device in (0, 1):
        alone = getattr(ALL[name](of_device(seed, device)), part)
        among = getattr(ALL[name](odd_trace(seed)), part).filter(pl.col("device") == device)
        assert (
            alone.filter(pl.col("device") == device)
            .drop(omitted.split())
            .equals(among.drop(omitted.split()))
        )
        assert among.height


RANK_FRAMES = {
    "kernels": "kernels",
    "operators": "operators",
    "steps": "step_times",
    "collectives": "collectives",
}


@pytest.mark.parametrize("name", RANK_FRAMES)
def test_what_a_session_shows_is_what_its_ranks_show_one_after_the_other(name: str) -> None:
    builders = [TraceBuilder(rank=rank, world_size=3) for rank in (2, 0)]
    for rank, made in enumerate(builders):
        made.step(1, 0, 100).op("aten::mm", 1, 5 + rank).launch(
            "cudaLaunchKernel", 2, 1, correlation=1
        )
        made.kernel("ncclDevKernel_AllReduce_Sum", 9, 5 + rank, correlation=1)
    traces = [made.build() for made in builders]
    shown = getattr(Session(tuple(traces), "run"), name)
    assert shown.columns[0] == "rank"
    alone = [
        getattr(
            getattr(analyze, RANK_FRAMES[name])(trace), "calls" if name == "collectives" else name
        )
        for trace in traces
    ]
    expected = [
        (trace.rank, row)
        for trace, frame in zip(traces, alone, strict=True)
        for row in frame.drop("rank", strict=False).rows()
    ]
    assert [(rank, tuple(row)) for rank, *row in shown.rows()] == expected
    assert [rank for rank, _ in expected] == [2, 0]
