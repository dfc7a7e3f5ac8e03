"""What is remembered of a trace, and when it is forgotten."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import polars as pl
import pytest
from msgspec import Struct

from traceloom.testing import TraceBuilder
from traceloom.trace import batch
from traceloom.trace.batch import (
    cache_last_result,
    cache_per_trace,
    enable_batching,
    estimate_array_bytes,
    run_in_batches,
)
from traceloom.trace.trace import Trace


def test_the_result_is_computed_once_per_trace_and_not_mixed_up() -> None:
    asked: list[Trace] = []

    @cache_per_trace
    def height(trace: Trace) -> int:
        asked.append(trace)
        return trace.events.height

    first, second = (
        TraceBuilder().op("a", 0, 1).build(),
        TraceBuilder().op("a", 0, 1).op("b", 2, 1).build(),
    )
    assert [height(first), height(first), height(second), height(first)] == [1, 1, 2, 1]
    assert len(asked) == 2


def test_results_of_all_traces_are_kept_while_they_are_small_else_the_last_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(batch, "MAX_CACHED_BYTES", 100)
    asked: list[Trace] = []

    @cache_per_trace
    def starts(trace: Trace) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
        asked.append(trace)
        return trace.events["start_ns"].to_numpy()

    def made(events: int) -> Trace:
        builder = TraceBuilder()
        for i in range(events):
            builder = builder.op("a", 2 * i, 1)
        return builder.build()

    small, small_too, large = made(4), made(5), made(9)  # 32, 40 and 72 bytes
    assert [starts(trace).size for trace in (small, small_too, small)] == [4, 5, 4]
    assert asked == [small, small_too]
    assert [starts(trace).size for trace in (large, large, small_too, small)] == [9, 9, 5, 4]
    assert asked[2:] == [large]
    last = made(1)
    assert [starts(trace).size for trace in (last, last, large)] == [1, 1, 9]
    assert asked[3:] == [last, large]  # together they were too large: only the newest was kept


@dataclass
class Two:
    """A result of two parts."""

    numbers: pl.Series
    rest: dict[str, list[pl.DataFrame]]


class Pair(Struct, frozen=True):
    first: pl.Series
    second: pl.DataFrame


def test_what_is_made_from_something_is_made_again_from_something_else() -> None:
    made: list[tuple[int, str]] = []

    @cache_last_result
    def name(trace: Trace, source: list[str]) -> str:
        made.append((trace.events.height, source[0]))
        return source[0]

    first, second = (
        TraceBuilder().op("a", 0, 1).build(),
        TraceBuilder().op("a", 0, 1).op("b", 2, 1).build(),
    )
    source, equal = ["x"], ["x"]
    assert [
        name(first, source),
        name(first, source),
        name(second, source),
        name(first, source),
    ] == ["x"] * 4
    assert made == [(1, "x"), (2, "x")]
    name(first, equal)  # equal is not the same
    name(first, source)
    assert made[2:] == [(1, "x"), (1, "x")]


def test_small_traces_that_follow_each_other_are_looked_at_at_once_for_as_long_as_they_are_together(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(batch, "MAX_BATCH_EVENTS", 4)
    asked: list[list[int]] = []

    @run_in_batches
    def height(traces: Sequence[Trace]) -> list[int]:
        heights = [trace.events.height for trace in traces]
        asked.append(heights)
        return heights

    def made(events: int) -> Trace:
        builder = TraceBuilder()
        for i in range(events):
            builder = builder.op("a", 2 * i, 1)
        return builder.build()

    traces = [made(events) for events in (1, 2, 0, 3, 1, 9, 2, 2)]
    with enable_batching(traces):
        assert [height(trace) for trace in traces] == [1, 2, 0, 3, 1, 9, 2, 2]
        assert asked == [[1, 2, 0], [3, 1], [9], [2, 2]]
        assert [height(traces[7]), height(traces[6])] == [2, 2]
        assert height(made(5)) == 5  # of no group
        with enable_batching(traces[:2]):
            assert height(traces[1]) == 2
        assert asked[4:] == [[5], [1, 2]]
    assert [height(traces[3]), height(traces[3])] == [3, 3]
    assert asked[6:] == [[3], [3]]


def test_what_is_kept_of_each_trace_is_kept_of_those_that_are_together(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(batch, "MAX_CACHED_BYTES", 10)
    asked: list[Trace] = []

    @cache_per_trace
    def starts(trace: Trace) -> pl.Series:
        asked.append(trace)
        return trace.events["start_ns"]

    first, second, third = (TraceBuilder().op("a", 0, 1).op("a", 2, 1).build() for _ in range(3))
    with enable_batching([first, second]):
        for trace in (first, second, first, second):
            starts(trace)
        assert asked == [first, second]  # each is larger than what may be kept of others
        for trace in (third, first):
            starts(trace)
    assert asked[2:] == [third, first]


def test_the_size_of_a_result_is_that_of_its_arrays_and_frames() -> None:
    numbers = pl.Series([1, 2, 3], dtype=pl.Int32)
    frame = pl.DataFrame({"a": [1.0, 2.0]})
    assert estimate_array_bytes(Two(numbers, {"one": [frame, frame], "none": []})) == 12 + 2 * 16
    assert estimate_array_bytes(Pair(numbers, frame)) == 12 + 16
    assert estimate_array_bytes((np.zeros(5, dtype=np.int8), "a text", 7, None)) == 5


def test_a_trace_is_not_kept_alive_and_its_result_goes_with_it() -> None:
    class Big:
        pass

    made: list[weakref.ref[Big]] = []

    @cache_per_trace
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
