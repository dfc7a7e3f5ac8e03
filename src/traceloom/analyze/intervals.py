"""Sets of time: union, intersection, difference, coverage of half-open intervals [start, end) in integer nanoseconds.

Everything is vectorised: a set is two sorted int64 arrays, an operation costs a few `searchsorted`, never a loop.
"""

from __future__ import annotations

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
        """Nanoseconds in the set."""
        return int((self.end - self.start).sum())


class Overlaps(NamedTuple):
    """Pairs of intervals that share time, in ascending order of `left`, then `right`; arrays of one length.

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


EMPTY = Spans(np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64))


def union(start: Ints, end: Ints) -> Spans:
    """All time that lies in at least one interval; intervals without length (`end <= start`) hold no time."""
    keep = end > start
    if not keep.all():
        start, end = start[keep], end[keep]
    if not start.size:
        return EMPTY
    if (start[1:] < start[:-1]).any():
        order = np.argsort(start, kind="stable")
        start, end = start[order], end[order]
    reach = np.maximum.accumulate(end)
    opens = np.concatenate(([True], start[1:] > reach[:-1]))
    return Spans(start[opens], reach[np.concatenate((opens[1:], [True]))])


def merge(*sets: Spans) -> Spans:
    """The union of sets."""
    return union(np.concatenate([s.start for s in sets]), np.concatenate([s.end for s in sets]))


def overlaps(start: Ints, end: Ints, spans: Spans) -> Overlaps:
    """Where any intervals (in any order, they may overlap each other) share time with a set.

    The result has at most one row per interval and per span that begins or ends inside it.
    """
    first = np.searchsorted(spans.end, start, side="right")
    count = np.maximum(np.searchsorted(spans.start, end, side="left") - first, 0)
    count[end <= start] = 0
    left = np.repeat(np.arange(start.size, like=start), count)
    within = np.arange(left.size, like=left) - np.repeat(np.cumsum(count) - count, count)
    right = first[left] + within
    low = np.maximum(start[left], gather_rows(spans.start, right))
    high = np.minimum(end[left], gather_rows(spans.end, right))
    return Overlaps(left, right, low, high)


def intersection(left: Spans, right: Spans) -> Spans:
    """The time in both sets."""
    shared = overlaps(left.start, left.end, right)
    return Spans(shared.start, shared.end)


def complement(spans: Spans, low: int, high: int) -> Spans:
    """The time of [low, high) that is not in the set."""
    inside = clip(spans, low, high)
    edges_start = np.concatenate(([low], inside.end)).astype(np.int64)
    edges_end = np.concatenate((inside.start, [high])).astype(np.int64)
    keep = edges_end > edges_start
    return Spans(edges_start[keep], edges_end[keep])


def difference(left: Spans, right: Spans) -> Spans:
    """The time of `left` that is not in `right`."""
    if not left.start.size:
        return EMPTY
    return intersection(left, complement(right, int(left.start[0]), int(left.end[-1])))


def clip(spans: Spans, low: int, high: int) -> Spans:
    """The part of the set in [low, high)."""
    start, end = np.maximum(spans.start, low), np.minimum(spans.end, high)
    keep = end > start
    return Spans(start[keep], end[keep])


def coverage(spans: Spans, low: Ints, high: Ints) -> Ints:
    """Nanoseconds of the set in each [low, high); 0 where `high <= low`. Shape of `low`."""
    covered: Ints = np.maximum(_covered_before(spans, high) - _covered_before(spans, low), 0)
    return covered


def _covered_before(spans: Spans, time: Ints) -> Ints:
    if not spans.start.size:
        return np.zeros(np.shape(time), dtype=np.int64)
    sums = np.concatenate(([0], np.cumsum(spans.end - spans.start)))
    begun = np.searchsorted(spans.start, time, side="right")
    excess = np.maximum(spans.end[begun - 1] - time, 0)
    covered: Ints = sums[begun] - np.where(begun > 0, excess, 0)
    return covered


def summed_coverage(start: Ints, end: Ints, low: Ints, high: Ints) -> Ints:
    """Nanoseconds of each [low, high) counted once *per interval*: the sum of all clipped durations, not their union.

    Intervals may overlap; those with `end <= start` count as 0.
    """
    end = np.maximum(end, start)
    return _summed_before(start, end, high) - _summed_before(start, end, low)


def _summed_before(start: Ints, end: Ints, time: Ints) -> Ints:
    # sum of min(end, t) - min(start, t); int64 wraps around modulo 2^64, and the difference comes out right again
    result = np.zeros(np.shape(time), dtype=np.int64)
    for values, sign in ((np.sort(start), 1), (np.sort(end), -1)):
        sums = np.concatenate(([0], np.cumsum(values)))
        passed = np.searchsorted(values, time, side="right")
        result += sign * (passed * time - sums[passed])
    return result
