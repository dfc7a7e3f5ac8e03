"""Sets of time: union, intersection, difference, coverage of half-open intervals [start, end) in
integer nanoseconds.

Everything is vectorised: a set is two sorted int64 arrays, an operation costs a few `searchsorted`,
never a loop.
"""

from typing import NamedTuple

import numpy as np

from traceloom.trace.array_types import Ints
from traceloom.trace.arrays import gather_rows


class Spans(NamedTuple):
    """A set of time: intervals that are sorted, disjoint, not empty and not touching.

    Attributes:
        start: int64, ascending.
        end: int64, ascending; `start[i] < end[i] < start[i + 1]`.
    """

    start: Ints
    end: Ints

    @property
    def total(self) -> int:
        return int((self.end - self.start).sum())


class Overlaps(NamedTuple):
    """Pairs of intervals that share time, in ascending order of `left`, then `right`; arrays of one
    length.

    Attributes:
        left: Row of the left operand.
        right: Row of the right operand.
        start: Start of the shared time.
        end: End of the shared time, > start.
    """

    left: Ints
    right: Ints
    start: Ints
    end: Ints


EMPTY_SPANS = Spans(np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64))


def merge_intervals(start: Ints, end: Ints) -> Spans:
    """Returns all time that lies in at least one interval; intervals without length (`end <=
    start`) hold no time.
    """
    nonempty = end > start
    if not nonempty.all():
        start, end = start[nonempty], end[nonempty]
    if not start.size:
        return EMPTY_SPANS
    if (start[1:] < start[:-1]).any():
        order = np.argsort(start, kind="stable")
        start, end = start[order], end[order]
    latest_end = np.maximum.accumulate(end)
    starts_span = np.concatenate(([True], start[1:] > latest_end[:-1]))
    return Spans(start[starts_span], latest_end[np.concatenate((starts_span[1:], [True]))])


def merge_spans(*sets: Spans) -> Spans:
    return merge_intervals(
        np.concatenate([s.start for s in sets]), np.concatenate([s.end for s in sets])
    )


def find_overlaps(start: Ints, end: Ints, spans: Spans) -> Overlaps:
    """Returns where any intervals (in any order, they may overlap each other) share time with a
    set.

    The result has at most one row per interval and per span that begins or ends inside it.
    """
    first_span = np.searchsorted(spans.end, start, side="right")
    count = np.maximum(np.searchsorted(spans.start, end, side="left") - first_span, 0)
    count[end <= start] = 0
    left = np.repeat(np.arange(start.size, like=start), count)
    offset = np.arange(left.size, like=left) - np.repeat(np.cumsum(count) - count, count)
    right = first_span[left] + offset
    low = np.maximum(start[left], gather_rows(spans.start, right))
    return Overlaps(left, right, low, np.minimum(end[left], gather_rows(spans.end, right)))


def intersect_spans(left: Spans, right: Spans) -> Spans:
    shared = find_overlaps(left.start, left.end, right)
    return Spans(shared.start, shared.end)


def invert_spans(spans: Spans, low: int, high: int) -> Spans:
    """Returns the time of [low, high) that is not in the set."""
    clipped = clip_spans(spans, low, high)
    edges_start = np.concatenate(([low], clipped.end)).astype(np.int64)
    edges_end = np.concatenate((clipped.start, [high])).astype(np.int64)
    nonempty = edges_end > edges_start
    return Spans(edges_start[nonempty], edges_end[nonempty])


def subtract_spans(left: Spans, right: Spans) -> Spans:
    """Returns the time of `left` that is not in `right`."""
    if not left.start.size:
        return EMPTY_SPANS
    return intersect_spans(left, invert_spans(right, int(left.start[0]), int(left.end[-1])))


def clip_spans(spans: Spans, low: int, high: int) -> Spans:
    """Returns the part of the set in [low, high)."""
    start, end = np.maximum(spans.start, low), np.minimum(spans.end, high)
    nonempty = end > start
    return Spans(start[nonempty], end[nonempty])


def compute_coverage(spans: Spans, low: Ints, high: Ints) -> Ints:
    """Returns the nanoseconds of the set in each [low, high); 0 where `high <= low`. Shape of
    `low`.
    """
    covered: Ints = np.maximum(
        _compute_covered_before(spans, high) - _compute_covered_before(spans, low), 0
    )
    return covered


def _compute_covered_before(spans: Spans, time: Ints) -> Ints:
    if not spans.start.size:
        return np.zeros(np.shape(time), dtype=np.int64)
    sums = np.concatenate(([0], np.cumsum(spans.end - spans.start)))
    count_started = np.searchsorted(spans.start, time, side="right")
    excess = np.maximum(spans.end[count_started - 1] - time, 0)
    return sums[count_started] - np.where(count_started > 0, excess, 0)


def sum_clipped_durations(start: Ints, end: Ints, low: Ints, high: Ints) -> Ints:
    """Returns the nanoseconds of each [low, high) counted once *per interval*: the sum of all
    clipped durations, not their union.

    Intervals may overlap; those with `end <= start` count as 0.
    """
    end = np.maximum(end, start)
    return _sum_durations_before(start, end, high) - _sum_durations_before(start, end, low)


def _sum_durations_before(start: Ints, end: Ints, time: Ints) -> Ints:
    # Sum of min(end, t) - min(start, t); int64 wraps around modulo 2^64, and the difference is
    # correct again.
    result = np.zeros(np.shape(time), dtype=np.int64)
    for values, sign in ((np.sort(start), 1), (np.sort(end), -1)):
        sums = np.concatenate(([0], np.cumsum(values)))
        count_before = np.searchsorted(values, time, side="right")
        result += sign * (count_before * time - sums[count_before])
    return result
