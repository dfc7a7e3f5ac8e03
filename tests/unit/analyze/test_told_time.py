"""What the answer is about: the recorded work without the profiler's own span, in the whole steps, and what the host did
at their edges."""

from __future__ import annotations

import random

import polars as pl
import pytest

from traceloom import Session
from traceloom.analyze.answer import answer
from traceloom.analyze.steps import step_times
from traceloom.report import ReportOptions, build
from traceloom.system.units import format_duration, format_share
from traceloom.testing import TraceBuilder

SEEDS = range(20)


@pytest.mark.sampled(5)
@pytest.mark.parametrize("seed", SEEDS)
def test_the_span_of_the_profiler_is_no_part_of_the_window(seed: int) -> None:
    chance = random.Random(seed)
    builder, at, busy = TraceBuilder(device_name=None), chance.randint(1, 10**7), 0
    first = at
    for _ in range(chance.randint(3, 30)):
        length = chance.randint(5, 500)
        builder.op("aten::mm", at, length)
        busy, end = busy + length, at + length
        at = end + chance.randint(0, 50)
    span = {"ph": "X", "cat": "Trace", "name": "PyTorch Profiler (0)", "args": None}
    length_us = end + chance.randint(0, 10**7)
    builder._events.append(
        span | {"pid": "Spans", "tid": "PyTorch Profiler", "ts": 0, "dur": length_us * 1000}
    )
    trace = builder.build()
    assert (trace.start_ns, trace.end_ns) == (first * 1000, end * 1000)
    told = answer(Session((trace,), "made"))
    assert told.whole_ns == (end - first) * 1000
    shares = dict(told.parts.group_by("kind").agg(pl.col("ns").sum()).rows())
    assert shares["op"] == busy * 1000


def test_a_recording_of_the_profiler_alone_has_its_window() -> None:
    builder = TraceBuilder()
    builder._events.append(
        {"ph": "X", "cat": "Trace", "name": "PyTorch Profiler (0)", "pid": "Spans", "tid": "x"}
        | {"ts": 1000, "dur": 5000, "args": None}
    )
    trace = builder.build()
    assert (trace.start_ns, trace.end_ns) == (1000, 6000)


@pytest.mark.sampled(5)
@pytest.mark.parametrize("seed", SEEDS)
def test_a_part_of_a_step_is_in_no_share(seed: int) -> None:
    chance = random.Random(seed)
    builder, count = TraceBuilder(), chance.randint(4, 9)
    step, kernel = chance.randint(800, 3000), chance.randint(100, 500)
    start = chance.randint(5_000, 90_000)  # time to load, which ends with the first optimizer step
    builder.annotation("start", 0, 10)
    for number in range(count):
        end = start + number * step
        called = end - 700
        builder.op("aten::mm", called, 30)
        if number:  # of the first step a part is recorded
            builder.op("aten::add", called - 50, 30)
        builder.launch("cudaLaunchKernel", called + 5, 5, correlation=number + 1)
        builder.kernel("gemm", called + 20, kernel, correlation=number + 1)
        builder.annotation("Optimizer.step#SGD.step", end - 60, 60)
    run = Session((builder.build(),), "made")
    steps = step_times(run.traces[0]).steps
    assert steps["complete"].to_list() == [False] + [True] * (count - 1)
    told = answer(run)
    assert told.sentence.startswith(f"{count - 1} steps of {format_duration(step * 1000)}: ")
    assert told.whole_ns == (count - 1) * step * 1000
    kinds = dict(told.parts.group_by("kind").agg(pl.col("ns").sum()).rows())
    assert kinds["compute"] == (count - 1) * kernel * 1000
    ground = build(run, ReportOptions())["findings_ground"]
    assert ground is not None
    assert ground["whole_ns"] == pytest.approx(
        step * 1000, abs=100_000
    )  # its last work may end earlier


@pytest.mark.sampled(5)
@pytest.mark.parametrize("seed", SEEDS)
def test_idle_edges_name_what_the_host_did_there(seed: int) -> None:
    chance = random.Random(seed)
    before, work, after = (chance.randint(*bounds) for bounds in ((6000, 9000), (9, 99), (9, 900)))
    in_ops = chance.randint(5000, before - 20)
    builder = TraceBuilder().step(1, 0, before + work + after)
    builder.op("aten::randn", 0, in_ops)
    builder.launch("cudaLaunchKernel", before - 10, 5, correlation=1)
    builder.kernel("gemm", before, work, correlation=1)
    told = answer(Session((builder.build(),), "made"))
    edges = before + after
    share = format_share(in_ops, edges)
    assert told.sentence.endswith(
        f"there was no GPU work yet, or no more, at the edges of the steps ({share} of that while "
        "the host worked inside framework operators)."
    )
