"""What is remembered of a trace, and when it is forgotten."""

from __future__ import annotations

import gc
import weakref

from traceloom.analyze.remembered import per_trace
from traceloom.model import Trace
from traceloom.testing import TraceBuilder


def test_the_result_is_computed_once_per_trace_and_not_mixed_up() -> None:
    asked: list[Trace] = []

    @per_trace
    def height(trace: Trace) -> int:
        asked.append(trace)
        return trace.events.height

    one, two = TraceBuilder().op("a", 0, 1).build(), TraceBuilder().op("a", 0, 1).op("b", 2, 1).build()
    assert [height(one), height(one), height(two), height(one)] == [1, 1, 2, 1]
    assert len(asked) == 3


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
