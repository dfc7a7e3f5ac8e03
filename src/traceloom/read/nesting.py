"""Who encloses whom on a lane: parents, depths and clipped ends, without a Python loop over events."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
from msgspec import Struct

from traceloom.array_types import Bools, Ints
from traceloom.storage.ondisk import OnDisk

_SMALL = 1 << 16  # whole numbers below are sorted in one pass
_ROUNDS = 4  # of cutting; what still crosses then is clipped
_CLIMB = 100  # ancestors looked at; chains of crossing spans are as long as the trace


def stable_order(numbers: Ints) -> Ints:
    """The rows in the order of small numbers >= 0 (lanes, depths), equal ones as they stand."""
    if isinstance(numbers, OnDisk) or int(numbers.max(initial=0)) >= _SMALL:
        return np.argsort(numbers, kind="stable")
    return np.argsort(numbers.astype(np.uint16), kind="stable")


def time_order(start: Ints, duration: Ints) -> Ints:
    """The rows by (start, longer first, place in the file); only where starts are equal are durations looked at."""
    rows = np.argsort(start, kind="stable")
    sorted_start = start[rows]
    equal = sorted_start[1:] == sorted_start[:-1]
    if equal.any():
        tied = np.zeros(len(rows), dtype=np.bool_, like=start)
        tied[1:] |= equal
        tied[:-1] |= equal
        places = np.flatnonzero(tied)
        among = rows[places]
        rows[places] = among[np.lexsort((-duration[among], start[among]))]
    return rows


class Nesting(Struct, frozen=True):
    """The forest of a trace's events; arrays of shape (events,).

    Attributes:
        parent: Row of the enclosing event on the same lane; -1 for roots.
        depth: 0 for roots.
        nested_end_ns: End, shortened where spans cross.
        clipped: Rows that were shortened.
    """

    parent: Ints
    depth: Ints
    nested_end_ns: Ints
    clipped: Ints


def nest(lane: Ints, start_ns: Ints, end_ns: Ints, nests: Bools) -> Nesting:
    """Find each event's parent: the nearest earlier one on its lane that has not ended at its start.

    Where two spans cross (one starts inside the other and outlives it), the one that loses less is shortened: a child
    that overruns by a rounding error is clipped to its parent, but the Python frame of `__enter__` ends where the
    annotation that it opens begins.

    Args:
        lane: Lane of each event; rows sorted by (start, longer first).
        start_ns: Starts.
        end_ns: Ends, >= starts.
        nests: False for rows that stand alone (device lanes, where overlap is not nesting).
    """
    rows = np.flatnonzero(nests)
    order = rows[stable_order(lane[rows])]
    lanes, starts, raw = lane[order], start_ns[order], end_ns[order]
    # First candidates: the row before on the same lane.
    above = np.arange(-1, len(lanes) - 1, dtype=np.int64, like=lanes)
    above[1:][lanes[1:] != lanes[:-1]] = -1
    above = _previous_open(starts, raw, above)
    # Parents are cut where an overrunning child would lose more.
    ends = raw
    for _ in range(_ROUNDS):
        child = np.flatnonzero((above >= 0) & (ends > ends[above]))
        outer = above[child]
        shorter = ends.copy()
        for _ in range(_CLIMB):
            overrun = ends[child] - ends[outer]
            cut = (overrun > 0) & (ends[outer] - starts[child] < overrun)
            child, outer = child[cut], outer[cut]
            np.minimum.at(shorter, outer, starts[child])
            outer = above[outer]
            child, outer = child[outer >= 0], outer[outer >= 0]
            if not child.size:
                break
        if np.array_equal(shorter, ends):
            break
        ends = shorter
        above = _previous_open(starts, ends, above)
    above, depths, ends = _settle(starts, above, ends)
    parent = np.full(len(lane), -1, dtype=np.int64, like=lane)
    parent[order] = np.where(above >= 0, order[above], -1)
    depth = np.zeros(len(lane), dtype=np.int64, like=lane)
    depth[order] = depths
    nested_end = end_ns.copy()
    nested_end[order] = ends
    return Nesting(parent, depth, nested_end, np.sort(order[ends < raw]))


def _settle(starts: Ints, above: Ints, raw: Ints) -> tuple[Ints, Ints, Ints]:
    """Parents, depths and clipped ends that agree with each other; rows in pre-order.

    Clipping a span frees later events it seemed to enclose; only the small subtrees where that happens are walked
    event by event.
    """
    depths = nesting_depths(above)
    # Each end is bounded by its parent's, from the roots down.
    ends = raw.copy()
    order = stable_order(depths)
    for low, high in pairwise(np.cumsum(np.bincount(depths))):
        rows = order[low:high]
        ends[rows] = np.minimum(ends[rows], ends[above[rows]])
    freed = np.flatnonzero((above >= 0) & (ends[above] <= starts))
    # The highest ancestors that ended too early: all that can change lies below them.
    tops = above[freed]
    while True:
        higher = above[tops]
        climbs = (higher >= 0) & (ends[higher] <= starts[freed])
        if not climbs.any():
            break
        tops = np.where(climbs, higher, tops)
    done = 0
    for top in sorted(set(tops.tolist())):
        if top < done:
            continue
        done, width = top + 1, 64  # the first row after the subtree
        while done < len(depths):
            outside = np.flatnonzero(depths[done : done + width] <= depths[top])
            if outside.size:
                done += int(outside[0])
                break
            done, width = min(done + width, len(depths)), width * 2
        _walk(top, done, starts, raw, (above, depths, ends))
    return above, depths, ends


def _walk(low: int, high: int, starts: Ints, raw: Ints, columns: tuple[Ints, Ints, Ints]) -> None:
    """Recompute parents, depths and ends of the rows low..high-1 of one lane with a stack, in place."""
    above, depths, ends = columns
    outer, base = int(above[low]), int(depths[low])
    limit = int(ends[outer]) if outer >= 0 else None
    stack: list[tuple[int, int]] = []  # rows and their ends
    parents, levels, clipped = [], [], []
    for row, (start, own) in enumerate(zip(starts[low:high].tolist(), raw[low:high].tolist(), strict=True), low):
        while stack and stack[-1][1] <= start:
            stack.pop()
        parent, bound = stack[-1] if stack else (outer, limit)
        end = own if bound is None else min(own, bound)
        parents.append(parent)
        levels.append(base + len(stack))
        clipped.append(end)
        stack.append((row, end))
    above[low:high], depths[low:high], ends[low:high] = parents, levels, clipped


def _previous_open(starts: Ints, ends: Ints, above: Ints) -> Ints:
    """The nearest earlier row of the same lane whose end is after the start, by pointer jumping.

    A row that has ended lets its successors jump to its own candidate: all rows between had ended before it began.

    Args:
        starts: Starts.
        ends: Ends.
        above: First candidates: the row before, or the result for later ends; -1 where that is of another lane.
    """
    above = above.copy()
    rows = np.flatnonzero(above >= 0)
    while rows.size:
        candidate = above[rows]
        ended = ends[candidate] <= starts[rows]
        rows = rows[ended]
        above[rows] = candidate = above[candidate[ended]]
        rows = rows[candidate >= 0]
    return above


def nesting_depths(above: Ints) -> Ints:
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
