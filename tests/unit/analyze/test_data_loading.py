"""Waits of the training loop for its data."""

from __future__ import annotations

import random

import pytest

from traceloom.analyze import data_loading
from traceloom.testing import TraceBuilder

NEXT = "enumerate(DataLoader)#_MultiProcessingDataLoaderIter.__next__"
SINGLE = "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__"


def test_waits_are_counted_per_step_and_cut_at_its_bounds() -> None:
    trace = TraceBuilder().mark(1, 0).annotation(NEXT, 8, 6).mark(2, 10).mark(3, 20).build()
    result = data_loading(trace)
    assert result.total_ns == 6000
    assert result.steps.rows() == [(1, 2000, 0.2, None, True), (2, 4000, 0.4, None, True)]
    assert result.waits.select("name", "duration_ns", "step").rows() == [(NEXT, 6000, 1)]


def test_nested_loaders_count_once() -> None:
    trace = TraceBuilder().step(1, 0, 20).annotation(NEXT, 0, 10).annotation(NEXT, 2, 5).build()
    assert data_loading(trace).total_ns == 10_000


def test_python_frames_serve_where_there_is_no_annotation() -> None:
    trace = (
        TraceBuilder()
        .step(1, 0, 20)
        .python("torch/utils/data/dataloader.py(733): __next__", 3, 4)
        .build()
    )
    result = data_loading(trace)
    assert (result.evidence, result.total_ns) == ("python-frames", 4000)


def test_a_trace_without_loader_calls_says_unknown_not_zero() -> None:
    result = data_loading(TraceBuilder().step(1, 0, 20).op("aten::mm", 0, 5).build())
    assert (result.evidence, result.total_ns, result.steps.rows()) == (
        "none",
        None,
        [(1, None, None, None, None)],
    )


def test_the_loader_is_the_bottleneck_where_the_gpu_has_nothing_to_do_meanwhile() -> None:
    builder = TraceBuilder()
    for number, kernel_at in ((1, 0), (2, 160)):
        builder.step(number, 100 * number, 100).annotation(NEXT, 100 * number + 10, 50)
        builder.launch("cudaLaunchKernel", 100 * number, 2, correlation=number)
        builder.kernel(
            "k",
            kernel_at + 100 * number if number == 1 else 260,
            90 if number == 1 else 20,
            correlation=number,
        )
    result = data_loading(builder.build())
    assert result.steps.select("wait_ns", "gpu_idle_ns", "bottleneck").rows() == [
        (50_000, 0, False),
        (50_000, 50_000, True),
    ]
    assert result.waits["gpu_idle_ns"].to_list() == [0, 50_000]


def test_who_makes_the_batch_is_told_by_the_iterator_or_by_the_frames() -> None:
    single = "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__"
    builder = TraceBuilder().step(1, 0, 300).annotation(NEXT, 0, 10).annotation(single, 20, 10)
    assert data_loading(builder.build()).waits["maker"].to_list() == ["workers", "main_thread"]
    frames = TraceBuilder().step(1, 0, 300)
    for at, inner in (
        (0, "dataloader.py(1283): _try_get_data"),
        (50, "_utils/fetch.py(51): fetch"),
        (100, "x.py(3): y"),
    ):
        frames.python("torch/utils/data/dataloader.py(733): __next__", at, 20)
        frames.python(f"torch/utils/data/{inner}", at + 2, 10)
    assert data_loading(frames.build()).waits["maker"].to_list() == ["workers", "main_thread", None]


def test_what_the_waiting_thread_does_is_told_by_place_and_adds_up() -> None:
    builder = (
        TraceBuilder()
        .step(1, 0, 200)
        .python("torch/utils/data/dataloader.py(733): __next__", 0, 100)
        .python("torch/utils/data/_utils/fetch.py(51): fetch", 10, 40)
        .python("data.py(7): __getitem__", 15, 20)
        .python("torch/utils/data/_utils/collate.py(12): default_collate", 60, 10)
        .op("aten::stack", 62, 5)
        .op("aten::to", 80, 5)
    )
    result = data_loading(builder.build())
    assert dict(result.spent.select("part", "ns").rows()) == {
        "fetch": 40_000,
        "collate": 10_000,
        "operators": 5000,
        "other": 45_000,
    }
    assert result.spent["ns"].sum() == result.total_ns


# -- random loops -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(6))
def test_waits_of_random_loops_are_counted_instant_by_instant(seed: int) -> None:
    chance = random.Random(seed)
    builder, waits, busy = TraceBuilder(), [], []
    bounds = sorted(chance.sample(range(50, 950), 4))
    for number, low in enumerate(bounds):
        builder.mark(number, low, thread=9)
    at = 0
    while at < 900:
        length = chance.randrange(1, 80)
        builder.annotation(chance.choice((NEXT, SINGLE)), at, length)
        waits.append((at, at + length))
        at += length + chance.randrange(1, 90)
    for number in range(12):
        start, length = chance.randrange(950), chance.randrange(1, 60)
        builder.launch("cudaLaunchKernel", start, 1, correlation=number + 1, thread=4)
        builder.kernel("k", start, length, correlation=number + 1)
        busy.append((start, start + length))
    trace = builder.build()
    found = data_loading(trace)
    waiting = {instant for low, high in waits for instant in range(low, high)}
    working = {instant for low, high in busy for instant in range(low, high)}
    assert found.total_ns == 1000 * len(waiting)
    assert found.waits["duration_ns"].to_list() == [1000 * (high - low) for low, high in waits]
    idle = [1000 * len(set(range(low, high)) - working) for low, high in waits]
    assert found.waits["gpu_idle_ns"].to_list() == idle
    for step, wait, part, idling, bottleneck in found.steps.rows():
        low, high = bounds[step], bounds[step + 1]
        inside = waiting & set(range(low, high))
        assert wait == 1000 * len(inside)
        assert part == pytest.approx(len(inside) / (high - low))
        assert idling == 1000 * len(inside - working)
        assert bottleneck == (part >= 0.05 and idling >= wait / 2)
    assert found.spent["ns"].sum() == found.total_ns
