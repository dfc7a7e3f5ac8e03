"""Recordings of one process at different times are windows of it, not ranks."""

from __future__ import annotations

import random

import pytest

from traceloom import Session
from traceloom.analyze.answer import answer
from traceloom.report import ReportOptions, build
from traceloom.report.sections.steps import SECTION
from traceloom.testing import TraceBuilder
from traceloom.trace.trace import Trace


def build_window(process: int, start_us: float, steps: int, *, rank: int | None = None) -> Trace:
    builder = TraceBuilder(rank=rank, world_size=4, process=process)
    for number in range(steps):
        at = start_us + 1000 * number
        builder.step(number, at, 1000).op("aten::mm", at + 10, 20)
        builder.launch("cudaLaunchKernel", at + 12, 5, correlation=number + 1)
        builder.kernel("gemm", at + 40, 800, correlation=number + 1)
    return builder.build()


@pytest.mark.sampled(6)
@pytest.mark.parametrize("ranked", [False, True])
@pytest.mark.parametrize("seed", range(20))
def test_windows_are_counted_once_in_processes_gpus_and_steps(seed: int, ranked: bool) -> None:
    chance = random.Random(seed)
    processes = chance.randint(1, 3)
    traces, expected, steps = [], {}, dict.fromkeys(range(processes), 0)
    for process in range(processes):
        start = float(chance.randint(0, 3000))
        for _ in range(chance.randint(1, 4)):
            count = chance.randint(2, 5)
            rank = process if ranked else None
            traces.append(build_window(100 + process, start, count, rank=rank))
            expected[id(traces[-1])] = process
            steps[process] += count
            start += 1000 * count + chance.randint(100, 10_000)
    traces.sort(key=lambda trace: (trace.rank or 0, trace.start_ns))
    session = Session(tuple(traces), "made")
    numbers = [expected[id(trace)] for trace in traces]
    order = list(dict.fromkeys(numbers))
    assert session.process_numbers == tuple(order.index(number) for number in numbers)
    sentence = answer(session).sentence
    if not ranked:
        assert (f"{processes} processes" in sentence) == (processes > 1)
    assert f"{max(steps.values())} steps of 1.00 ms" in sentence
    assert ("GPU 0 is" if processes == 1 else f"the {processes} GPUs are") in sentence


def test_files_that_claim_one_process_at_the_same_time_are_two() -> None:
    session = Session((build_window(100, 0, 3), build_window(100, 500, 3)), "made")
    assert session.process_numbers == (0, 1)


def test_traces_that_do_not_say_their_process_are_one_each() -> None:
    session = Session((build_window(0, 0, 3), build_window(0, 9000, 3)), "made")
    assert session.process_numbers == (0, 1)


def test_windows_are_no_ranks_that_could_differ() -> None:
    traces = (build_window(100, 0, 4), build_window(100, 9000, 3))
    session = Session(traces, "made")
    assert "by rank" not in answer(session).sentence
    document = build(session, ReportOptions(full=True))
    assert document["imbalance"] is None
    assert document["across_ranks"] is None
    first = next(iter(SECTION.tables(document)))
    assert (first.title, first.columns[0].title) == ("Steps by window", "Window")
