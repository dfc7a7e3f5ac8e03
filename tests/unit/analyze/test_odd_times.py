"""Times that jitter, that a writer lost, and that cannot be: of made recordings in which the truth is known."""

from __future__ import annotations

import random

import pytest

from traceloom import Session, analyze
from traceloom.analyze.critical_path import critical_path
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
def test_kernels_that_overrun_their_successors_are_counted(seed: int) -> None:
    chance = random.Random(seed)
    builder, expected, at = TraceBuilder(), 0, 100.0
    for number in range(chance.randint(40, 80)):
        builder.launch("cudaLaunchKernel", at - 5, 1, correlation=number + 1)
        overruns = chance.random() < 0.05 and number < 25
        expected += overruns
        builder.kernel("k", at, 5_000_000 if overruns else 8, correlation=number + 1)
        at += 10
    found = [
        row for row in analyze.quality(builder.build()).notices if row.slug == "impossible-duration"
    ]
    assert [row.count for row in found] == ([expected] if expected else [])
