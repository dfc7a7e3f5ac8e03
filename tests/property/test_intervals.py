"""Sets of time behave as sets of nanoseconds do."""

from __future__ import annotations

import numpy as np
from hypothesis import given, strategies as st

from traceloom.analyze.intervals import (
    Spans,
    clip_spans,
    compute_coverage,
    find_overlaps,
    intersect_spans,
    invert_spans,
    merge_intervals,
    merge_spans,
    subtract_spans,
    sum_clipped_durations,
)

LIMIT = 60
times = st.integers(0, LIMIT)
intervals = st.lists(st.tuples(times, times), max_size=12)


def arrays(pairs: list[tuple[int, int]]) -> tuple[np.ndarray, np.ndarray]:
    both = np.array(pairs, dtype=np.int64).reshape(-1, 2)
    return both[:, 0], both[:, 1]


def spans(pairs: list[tuple[int, int]]) -> Spans:
    return merge_intervals(*arrays(pairs))


def seconds(pairs: list[tuple[int, int]]) -> set[int]:
    return {t for low, high in pairs for t in range(low, high)}


def content(found: Spans) -> set[int]:
    """The nanoseconds of a set, after a look at its own laws."""
    assert (found.start < found.end).all()
    assert (found.end[:-1] < found.start[1:]).all()
    assert found.start.dtype == found.end.dtype == np.int64
    return {
        t
        for low, high in zip(found.start.tolist(), found.end.tolist(), strict=True)
        for t in range(low, high)
    }


@given(intervals)
def test_a_union_holds_what_is_in_any_interval(one: list[tuple[int, int]]) -> None:
    assert content(spans(one)) == seconds(one)
    assert spans(one).total == len(seconds(one))


@given(intervals, intervals)
def test_set_operations_agree_with_sets(
    one: list[tuple[int, int]], other: list[tuple[int, int]]
) -> None:
    a, b = spans(one), spans(other)
    assert content(intersect_spans(a, b)) == seconds(one) & seconds(other)
    assert content(subtract_spans(a, b)) == seconds(one) - seconds(other)
    assert content(merge_spans(a, b)) == seconds(one) | seconds(other)


@given(intervals, times, times)
def test_clip_and_complement_split_a_window(
    one: list[tuple[int, int]], low: int, high: int
) -> None:
    window = set(range(low, high))
    assert content(clip_spans(spans(one), low, high)) == seconds(one) & window
    assert content(invert_spans(spans(one), low, high)) == window - seconds(one)


@given(intervals, intervals)
def test_coverage_counts_the_nanoseconds_in_each_window(
    one: list[tuple[int, int]], windows: list[tuple[int, int]]
) -> None:
    found = compute_coverage(spans(one), *arrays(windows))
    assert found.tolist() == [len(seconds(one) & set(range(low, high))) for low, high in windows]


@given(intervals, intervals)
def test_summed_coverage_counts_every_interval_by_itself(
    one: list[tuple[int, int]], windows: list[tuple[int, int]]
) -> None:
    ordered = [(low, max(low, high)) for low, high in windows]
    found = sum_clipped_durations(*arrays(one), *arrays(ordered))
    assert found.tolist() == [
        sum(len(set(range(*i)) & set(range(*w))) for i in one) for w in ordered
    ]


@given(intervals, intervals)
def test_overlaps_are_all_pairs_that_share_time(
    one: list[tuple[int, int]], other: list[tuple[int, int]]
) -> None:
    b = spans(other)
    found = find_overlaps(*arrays(one), b)
    pairs = list(zip(b.start.tolist(), b.end.tolist(), strict=True))
    wanted = [
        (i, j, max(low, start), min(high, end))
        for i, (low, high) in enumerate(one)
        for j, (start, end) in enumerate(pairs)
        if low < high and max(low, start) < min(high, end)
    ]
    assert [tuple(int(v) for v in row) for row in zip(*found, strict=True)] == wanted


@given(intervals, st.integers(-(2**61), 2**61))
def test_nothing_depends_on_where_zero_is(one: list[tuple[int, int]], shift: int) -> None:
    start, end = arrays(one)
    moved = merge_intervals(start + shift, end + shift)
    assert content(Spans(moved.start - shift, moved.end - shift)) == seconds(one)
    low, high = np.array([shift]), np.array([shift + LIMIT])
    whole = sum(len(range(*pair)) for pair in one)
    assert sum_clipped_durations(start + shift, end + shift, low, high).tolist() == [whole]
    assert compute_coverage(moved, low, high).tolist() == [len(seconds(one))]
