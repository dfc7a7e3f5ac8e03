"""Times that jitter, that a writer lost, and that cannot be: of made recordings in which the truth is known."""

from __future__ import annotations

import random

import polars as pl
import pytest

from traceloom import Session, analyze
from traceloom.analyze.answer import answer
from traceloom.analyze.critical_path import critical_path
from traceloom.system.units import format_duration
from traceloom.testing import TraceBuilder
from traceloom.testing.known_runs import FAULTS_US, build_faulty
from traceloom.trace.trace import Trace

SEEDS = range(20)
SLUGS = {
    "overlap": None,
    "lost": "missing-time",
    "overrun": "impossible-duration",
    "wait": "waits-contradict-work",
    "early": "gpu-work-before-launch",
}


def find_counts(trace: Trace) -> dict[str, int | None]:
    notices = (*trace.notices, *analyze.quality(trace).notices)
    return {notice.slug: notice.count for notice in notices}


@pytest.mark.sampled(10)
@pytest.mark.parametrize("fault", FAULTS_US)
@pytest.mark.parametrize("seed", SEEDS)
def test_what_is_wrong_is_counted_and_decides_nothing(seed: int, fault: str) -> None:
    known = build_faulty(seed, fault)
    trace = known.builder.build()
    told = answer(Session((trace,), "made"))
    assert told.step_ns == known.step_ns
    assert told.sentence.startswith(f"{len(known.host_ns)} steps of ")
    assert told.whole_ns == sum(known.host_ns)
    assert analyze.gpu_time(trace).devices["busy_ns"].to_list() == [known.busy_ns]
    counts = find_counts(trace)
    if (slug := SLUGS[fault]) is None:
        assert counts.keys().isdisjoint({"overlapping-gpu-work", *SLUGS.values()})
    else:
        assert counts[slug] == known.wrong_count
    if fault in {"wait", "early"}:
        messages = {one.slug: one.message for one in analyze.quality(trace).notices}
        assert f"up to {format_duration(known.largest_ns)}" in messages[str(slug)]


@pytest.mark.sampled(4)
@pytest.mark.parametrize("seed", SEEDS)
def test_the_path_goes_over_kernels_whose_records_overlap_by_jitter(seed: int) -> None:
    known = build_faulty(seed, "overlap")
    path = critical_path(Session((known.builder.build(),), "made"), step=1)
    by_class = dict(path.classes.select("class", "fraction").rows())
    share = known.busy_ns / sum(known.host_ns)
    assert by_class["compute"] == pytest.approx(share, abs=0.02)
    assert by_class.get("pause", 0.0) < 0.002


@pytest.mark.sampled(4)
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("what", ["kernel", "optimizer", "last kernel, no steps"])
def test_an_event_far_longer_than_the_steps_around_it_decides_nothing(seed: int, what: str) -> None:
    chance = random.Random(seed)
    kernel_us, idle_us, kernels = chance.randint(100, 400), chance.randint(50, 300), 4
    step_us = kernels * kernel_us + idle_us + 20
    at_last = what.startswith("last")
    wrong = {31} if at_last else set(chance.sample(range(2, 29), 2))
    builder = TraceBuilder()
    for step in range(32):
        start, is_wrong = 1000 + step * step_us, step in wrong
        for index in range(kernels):
            number = step * kernels + index
            builder.op("aten::mm", start + 2 * index, 1.9)
            builder.launch("cudaLaunchKernel", start + 2 * index, 1, correlation=number)
            long = is_wrong and "kernel" in what and index == kernels - 1
            at = start + 15 + index * kernel_us
            builder.kernel("gemm", at, 1_770_000 if long else kernel_us, correlation=number)
        if not at_last:
            long = is_wrong and what == "optimizer"
            builder.annotation("Optimizer.step#SGD.step", start + 9, 1_770_000 if long else 2)
        wait_us = kernels * kernel_us + 5
        builder.launch("cudaDeviceSynchronize", start + 12, wait_us, correlation=10**6 + step)
        builder.op("aten::item", start + wait_us + 15, 2)
    trace = builder.build()
    told = answer(Session((trace,), "made"))
    assert find_counts(trace)["impossible-duration"] == len(wrong)
    if at_last:
        window_us = 31 * step_us + kernels * kernel_us
        assert told.whole_ns == window_us * 1000
    else:
        assert told.step_ns == step_us * 1000
        assert told.sentence.startswith(f"31 steps of {format_duration(step_us * 1000)}: ")
    compute = dict(told.parts.group_by("kind").agg(ns=pl.col("ns").sum()).rows())["compute"]
    steps = 32 if at_last else 31
    assert compute == steps * kernels * kernel_us * 1000


@pytest.mark.parametrize("length_us", [900, 60_000])
def test_a_kernel_that_the_host_did_not_wait_for_may_be_long(length_us: int) -> None:
    builder = TraceBuilder(devices=2)
    builder.launch("cudaLaunchKernel", 0, 5, correlation=1).kernel(
        "a", 10, length_us, correlation=1
    )
    builder.launch("cudaStreamSynchronize", 20, 5, correlation=2)
    assert "impossible-duration" not in find_counts(builder.build())
    builder.launch("cudaDeviceSynchronize", 30, 5, correlation=3)
    assert find_counts(builder.build())["impossible-duration"] == 1
    builder.launch("cudaLaunchKernel", 40, 5, correlation=4).kernel(
        "b", 50, 5, device=1, correlation=4
    )
    assert "impossible-duration" not in find_counts(builder.build())


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
