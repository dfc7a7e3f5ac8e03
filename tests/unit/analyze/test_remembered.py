"""What is remembered of a trace, and when it is forgotten."""

from __future__ import annotations

import gc
import weakref

import pytest

from traceloom.analyze import remembered
from traceloom.analyze.remembered import per_trace
from traceloom.model import Trace
from traceloom.testing import TraceBuilder


def test_the_result_is_computed_once_per_trace_and_not_mixed_up() -> None:
    asked: list[Trace] = []

    @per_trace
    def height(trace: Trace) -> int:
        asked.append(trace)
        return trace.events.height

    first, second = TraceBuilder().op("a", 0, 1).build(), TraceBuilder().op("a", 0, 1).op("b", 2, 1).build()
    assert [height(first), height(first), height(second), height(first)] == [1, 1, 2, 1]
    assert len(asked) == 2


def test_of_large_traces_only_the_last_is_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remembered, "MOST_EVENTS", 4)
    asked: list[Trace] = []

    @per_trace
    def height(trace: Trace) -> int:
        asked.append(trace)
        return trace.events.height

    def made(events: int) -> Trace:
        builder = TraceBuilder()
        for i in range(events):
            builder = builder.op("a", 2 * i, 1)
        return builder.build()

    small, small_too, large = made(1), made(2), made(9)
    assert [height(small), height(small_too), height(small)] == [1, 2, 1]
    assert len(asked) == 2
    assert [height(large), height(large), height(small), height(large)] == [9, 9, 1, 9]
    assert len(asked) == 5  # the large one was kept while it was the last, and went with the next trace


def test_a_trace_is_not_kept_alive_and_its_result_goes_with_it() -> None:
    class Big:
        pass

    made: list[weakref.ref[Big]] = []

    @per_trace
    def big(trace: Trace) -> Big:
        value = Big()
        made.append(weakref.ref(value))
        return value

    trace = TraceBuilder().op("a", 0, 1).build()
    big(trace)
    assert made[0]() is not None
    del trace
    gc.collect()
    assert made[0]() is None
