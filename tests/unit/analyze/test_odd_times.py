"""Times that jitter, that a writer lost, and that cannot be: of made recordings in which the truth is known."""

from __future__ import annotations

import random

import pytest

from traceloom import Session, analyze
from traceloom.analyze.critical_path import critical_path
from traceloom.system.units import format_duration
from traceloom.testing import TraceBuilder
from traceloom.trace.trace import Trace

SEEDS = range(20)


def build_stream(seed: int, jitter_us: float) -> tuple[Trace, float]:
    """Steps of kernels in a row whose records overlap by at most the jitter, and their share of the step."""
    chance = random.Random(seed)
    builder, correlation, at, worked, length = TraceBuilder(), 0, 0.0, 0.0, 0.0
    for step in range(3):
        kernels = [round(chance.uniform(100, 900), 1) for _ in range(chance.randint(4, 12))]
        idle = round(chance.uniform(10, 60), 1)
        total = sum(kernels) + idle
        builder.step(step, at, total)
        device = at + 8.0
        for number, kernel in enumerate(kernels):
            correlation += 1
            called = at + 1 + 0.5 * number
            builder.launch("cudaLaunchKernel", called, 0.4, correlation=correlation)
            overlap = round(chance.uniform(0, jitter_us), 3) if number else 0.0
            builder.kernel("gemm", device - overlap, kernel + overlap, correlation=correlation)
            device += kernel
        builder.launch(
            "cudaDeviceSynchronize", at + 7.9, device - at - 7.4, correlation=10**6 + step
        )
        at, worked, length = at + total, worked + sum(kernels), length + total
    return builder.build(), worked / length


@pytest.mark.sampled(5)
@pytest.mark.parametrize("seed", SEEDS)
def test_the_path_goes_over_kernels_whose_records_overlap_by_jitter(seed: int) -> None:
    trace, share = build_stream(seed, 0.9)
    path = critical_path(Session((trace,), "made"), step=1)
    by_class = dict(path.classes.select("class", "fraction").rows())
    assert by_class["compute"] == pytest.approx(share, abs=0.05)
    assert by_class.get("pause", 0.0) < 0.001
    slugs = {notice.slug for notice in analyze.quality(trace).notices}
    assert "overlapping-gpu-work" not in slugs


@pytest.mark.sampled(5)
@pytest.mark.parametrize("seed", SEEDS)
def test_lost_times_are_left_out_and_counted_whatever_their_share(seed: int) -> None:
    chance = random.Random(seed)
    builder, lost = TraceBuilder(), 0
    base = chance.choice([1_000, 1_615_207_264_505_000])
    for number in range(40):
        gone = chance.random() < chance.choice([0.1, 0.5])
        lost += gone
        builder.op("aten::mm", 0 if gone else base + 10 * number, 0 if gone else 5)
    trace = builder.build()
    assert trace.events.height == 40 - lost
    counts = {notice.slug: notice.count for notice in trace.notices}
    assert counts.get("missing-time", 0) == lost


@pytest.mark.sampled(5)
@pytest.mark.parametrize("seed", SEEDS)
def test_kernels_that_overrun_their_successors_count_until_the_next_begins(seed: int) -> None:
    chance = random.Random(seed)
    builder, expected, at, worked = TraceBuilder(), 0, 100.0, 0
    for number in range(chance.randint(40, 80)):
        builder.launch("cudaLaunchKernel", at - 5, 1, correlation=number + 1)
        overruns = chance.random() < 0.05 and number < 25
        expected += overruns
        worked += 10 if overruns else 8
        length = chance.randint(500, 5_000_000)
        builder.kernel("k", at, length if overruns else 8, correlation=number + 1)
        at += 10
    trace = builder.build()
    found = [notice.count for notice in trace.notices if notice.slug == "impossible-duration"]
    assert found == ([expected] if expected else [])
    assert analyze.gpu_time(trace).devices["busy_ns"].to_list() == [worked * 1000]
    assert trace.end_ns == round((at - 2) * 1000)


def test_kernels_of_one_graph_launch_may_run_at_once() -> None:
    builder = TraceBuilder().launch("cudaGraphLaunch", 0, 5, correlation=1)
    builder.kernel("long", 10, 1000, correlation=1)
    for number in range(30):
        builder.kernel("short", 20 + 10 * number, 8, correlation=1)
    trace = builder.build()
    assert "impossible-duration" not in {notice.slug for notice in trace.notices}
    assert trace.end_ns == 1_010_000


def build_waits(seed: int) -> tuple[Trace, int, int, int]:
    """Steps that end with a synchronisation 5 us after the last work, but for those in which the clock of the GPU is
    off; how many these are, by how much at most, and the number of steps.
    """
    chance = random.Random(seed)
    builder, at, steps = TraceBuilder(), 0, chance.randint(3, 12)
    offs = []
    for step in range(steps):
        off = chance.choice([0, 0, 0, chance.randint(300, 600_000), -chance.randint(300, 9_000)])
        offs.append(abs(off))
        length = chance.randint(10_000, 30_000)
        for number in range(3):
            correlation = 3 * step + number + 1
            builder.launch("cudaLaunchKernel", at + 2 * number, 1, correlation=correlation)
            kernel_us = length // 3 + (max(0, -off) if number == 2 else 0)
            start = at + 10 + number * (length // 3)
            builder.kernel("k", start, kernel_us, correlation=correlation)
        end = at + 10 + 3 * (length // 3) + max(0, off)
        name = "cudaDeviceSynchronize" if off < 0 else "cudaStreamSynchronize"
        builder.launch(name, at + 8, end - at - 8, correlation=10**6 + step)
        at = end + 10_000
    wrong = [off for off in offs if off]
    return builder.build(), len(wrong), max(wrong, default=0), steps


@pytest.mark.sampled(6)
@pytest.mark.parametrize("seed", SEEDS)
def test_waits_that_contradict_the_work_are_told_with_their_size(seed: int) -> None:
    trace, wrong, most_us, steps = build_waits(seed)
    quality = analyze.quality(trace)
    (row,) = quality.checks.filter(check="waits-contradict-work").to_dicts()
    assert (row["affected_count"], row["total_count"]) == (wrong, steps)
    told = [one.message for one in quality.notices if one.slug == "waits-contradict-work"]
    assert bool(told) == bool(wrong)
    assert all(f"up to {format_duration(most_us * 1000)} " in message for message in told)


@pytest.mark.sampled(5)
@pytest.mark.parametrize("seed", SEEDS)
def test_work_before_its_launch_is_told_beyond_the_jitter(seed: int) -> None:
    chance = random.Random(seed)
    builder, most, count = TraceBuilder(), 0.0, 0
    for number in range(20):
        early = round(chance.choice([-5.0, 0.9, chance.uniform(1.1, 900)]), 3)
        builder.launch("cudaLaunchKernel", 1000 + 2000 * number, 3, correlation=number + 1)
        builder.kernel("k", 1000 + 2000 * number - early, 10, correlation=number + 1)
        count, most = count + (early > 1), max(most, early)
    (row,) = (
        analyze.quality(builder.build()).checks.filter(check="gpu-work-before-launch").to_dicts()
    )
    assert row["affected_count"] == count
    assert f"up to {format_duration(round(most * 1000))}:" in row["message"]
