"""Who encloses whom on a lane: parents, depths and clipped ends, without a Python loop over events."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]

_PASSES = 6  # real traces settle in 1 to 3


@dataclass(frozen=True, slots=True)
class Nesting:
    """The forest of a trace's events; arrays of shape (events,).

    Attributes:
        parent: Row of the enclosing event on the same lane; -1 for roots.
        depth: 0 for roots.
        nested_end_ns: End, clipped to the parent's.
        clipped: Rows whose end was clipped (spans that crossed their parent's end).
    """

    parent: Ints
    depth: Ints
    nested_end_ns: Ints
    clipped: Ints


def nest(lane: Ints, start_ns: Ints, end_ns: Ints, nests: Bools) -> Nesting:
    """Find each event's parent: the nearest earlier one on its lane that has not ended at its start.

    Spans that cross (a child that outlives its parent) are clipped to the parent. Clipping can free later events of a
    parent, so parents are found again until nothing changes; a trace so damaged that this takes long is walked event
    by event instead.

    Args:
        lane: Lane of each event; rows sorted by (start, longer first).
        start_ns: Starts.
        end_ns: Ends, >= starts.
        nests: False for rows that stand alone (device lanes, where overlap is not nesting).
    """
    rows = np.flatnonzero(nests)
    order = rows[np.argsort(lane[rows], kind="stable")]
    lanes, starts, raw = lane[order], start_ns[order], end_ns[order]
    above, depths, ends = _settle(lanes, starts, raw)
    parent = np.full(lane.shape, -1, dtype=np.int64)
    parent[order] = np.where(above >= 0, order[above], -1)
    depth = np.zeros(lane.shape, dtype=np.int64)
    depth[order] = depths
    nested_end = end_ns.copy()
    nested_end[order] = ends
    return Nesting(parent, depth, nested_end, np.sort(order[ends < raw]))


def _settle(lanes: Ints, starts: Ints, raw: Ints) -> tuple[Ints, Ints, Ints]:
    """Parents, depths and clipped ends that agree with each other."""
    ends = raw
    for _ in range(_PASSES):
        above = _previous_open(lanes, starts, ends)
        depths = _depths(above)
        clipped = _clip(above, depths, raw)
        if np.array_equal(clipped, ends):
            return above, depths, ends
        ends = clipped
    return _walk(lanes, starts, raw)


def _walk(lanes: Ints, starts: Ints, raw: Ints) -> tuple[Ints, Ints, Ints]:
    """The same by a stack: linear whatever the data, but a Python step per event."""
    above, depths, ends = np.full(len(raw), -1, dtype=np.int64), np.zeros(len(raw), dtype=np.int64), raw.copy()
    stack: list[int] = []
    for row in range(len(raw)):
        while stack and (lanes[stack[-1]] != lanes[row] or ends[stack[-1]] <= starts[row]):
            stack.pop()
        if stack:
            above[row], depths[row] = stack[-1], len(stack)
            ends[row] = min(raw[row], ends[stack[-1]])
        stack.append(row)
    return above, depths, ends


def _previous_open(lanes: Ints, starts: Ints, ends: Ints) -> Ints:
    """The nearest earlier row of the same lane whose end is after the start, by pointer jumping.

    A row that has ended lets its successors jump to its own candidate: all rows between had ended before it began.
    """
    above = np.arange(-1, len(starts) - 1, dtype=np.int64)
    open_rows = np.arange(len(starts), dtype=np.int64)
    while open_rows.size:
        candidate = above[open_rows]
        foreign = (candidate < 0) | (lanes[candidate] != lanes[open_rows])
        above[open_rows[foreign]] = -1
        open_rows, candidate = open_rows[~foreign], candidate[~foreign]
        ended = ends[candidate] <= starts[open_rows]
        open_rows, candidate = open_rows[ended], candidate[ended]
        above[open_rows] = above[candidate]
    return above


def _depths(above: Ints) -> Ints:
    """Length of each row's chain of parents, by pointer doubling."""
    depth = (above >= 0).astype(np.int64)
    pointer = above.copy()
    rows = np.flatnonzero(pointer >= 0)
    while rows.size:
        target = pointer[rows]
        depth[rows] += depth[target]
        pointer[rows] = pointer[target]
        rows = rows[pointer[rows] >= 0]
    return depth


def _clip(above: Ints, depths: Ints, raw: Ints) -> Ints:
    """The ends, each bounded by its parent's, from the roots down."""
    ends = raw.copy()
    order = np.argsort(depths, kind="stable")
    bounds = np.searchsorted(depths[order], np.arange(1, int(depths.max(initial=0)) + 2))
    for low, high in zip(bounds[:-1], bounds[1:], strict=True):
        rows = order[low:high]
        ends[rows] = np.minimum(ends[rows], ends[above[rows]])
    return ends
