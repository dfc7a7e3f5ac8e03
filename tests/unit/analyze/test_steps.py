"""Step times, and the lag of the GPU."""

from __future__ import annotations

import random

import pytest

from traceloom.analyze import step_times
from traceloom.analyze.steps import build_tiles
from traceloom.testing import TraceBuilder


def three() -> TraceBuilder:
    return TraceBuilder().op("before", 0, 5).step(1, 10, 20).step(2, 30, 40).step(3, 70, 30)


def test_steps_last_until_the_next_one_and_have_a_spread() -> None:
    times = step_times(three().build())
    assert times.steps["duration_ns"].to_list() == [20_000, 40_000, 30_000]
    assert (times.count, times.median_ns, times.min_ns, times.max_ns) == (3, 30_000, 20_000, 40_000)
    assert times.spread_fraction == pytest.approx((35 - 25) / 30)
    assert times.evidence == "profiler-step"


def test_the_lag_is_how_long_after_its_step_the_last_work_ends() -> None:
    builder = (
        three().launch("cudaLaunchKernel", 12, 1, correlation=1).kernel("a", 15, 20, correlation=1)
    )
    builder.launch("cudaLaunchKernel", 32, 1, correlation=2).kernel("b", 36, 2, correlation=2)
    steps = step_times(builder.build()).steps
    assert steps["lag_ns"].to_list() == [5_000, 0, None]
    assert steps["launch_count"].to_list() == [1, 1, 0]


@pytest.mark.sampled(5)
@pytest.mark.parametrize("seed", range(20))
def test_what_is_left_after_the_last_call_of_step_is_no_whole_step(seed: int) -> None:
    chance = random.Random(seed)
    builder, at, steps = TraceBuilder(), 0, chance.randint(1, 6)
    ops = chance.randint(1, 40)
    for number in range(steps):
        builder.step(number, at, 10 * ops + 20)
        for index in range(ops):
            builder.op("aten::mm", at + 10 * index, 8)
        at += 10 * ops + 20
    rest = chance.randint(0, (ops - 1) // 10)
    builder.step(steps, at, 10 * rest + 15)
    for index in range(rest):
        builder.op("aten::item", at + 10 * index, 8)
    builder.launch("cudaDeviceSynchronize", at + 10 * rest, 10, correlation=1, flow=False)
    times = step_times(builder.build())
    assert times.steps["complete"].to_list() == [True] * steps + [False]
    assert times.median_ns == (10 * ops + 20) * 1000


def test_a_graph_launch_counts_once() -> None:
    builder = three().launch("cudaGraphLaunch", 12, 1, correlation=1)
    builder.kernel("a", 15, 2, correlation=1).kernel("b", 18, 2, correlation=1)
    assert step_times(builder.build()).steps["launch_count"].to_list() == [1, 0, 0]


def test_a_trace_without_steps_has_none_and_says_so() -> None:
    times = step_times(TraceBuilder().op("aten::mm", 0, 5).build())
    assert times.steps.height == 0
    assert (times.count, times.median_ns, times.spread_fraction, times.evidence) == (
        0,
        None,
        None,
        "none",
    )


def test_tiles_cover_the_trace_without_holes() -> None:
    trace = three().op("after", 110, 20).build()
    cut = build_tiles(trace)
    assert cut.row.tolist() == [-1, 0, 1, 2, -1]
    assert (cut.spans.start[1:] == cut.spans.end[:-1]).all()
    assert (cut.spans.start[0], cut.spans.end[-1]) == (trace.start_ns, trace.end_ns)
