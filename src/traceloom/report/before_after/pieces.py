"""Pieces of a picture of before and after: nodes of a graph, put together where they would be narrower than a pixel."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]

_COARSEST = 256  # pieces of a lane at the least, however many lanes there are


@dataclass(frozen=True, slots=True)
class Pieces:
    """Pieces, in the order of lanes and of their time before.

    Shapes: P = pieces; (2, P) is before and after.

    Attributes:
        lane: The lane of each, (P,).
        start: First moment, ns, (2, P); 0 where nothing of it is there.
        end: Last moment, ns, (2, P); the start where nothing of it is there.
        longest: The node that takes longest of it, (2, P); -1 where nothing of it is there.
        count: How many nodes it stands for, (P,).
        first: Row in `order` of its first node, (P,).
        order: The nodes, piece by piece.
        grain_ns: What was put together is shorter than this; 0 where nothing was.
    """

    lane: Ints
    start: Ints
    end: Ints
    longest: Ints
    count: Ints
    first: Ints
    order: Ints
    grain_ns: int


def pieces(lane: Ints, start: Ints, end: Ints, limit: int) -> Pieces:
    """Put nodes together until there are few enough.

    Neighbours on a lane become one piece when all of them lie in the same stretch of time before and in the same
    stretch of time after, and none is longer than a stretch. Stretches grow until few enough pieces are left.

    Args:
        lane: The lane of each node, shape (N,).
        start: Start before and after, ns >= 0, shape (2, N).
        end: End before and after, ns, shape (2, N).
        limit: The most pieces.
    """
    order = np.lexsort((start[1], start[0], lane)).astype(np.int64)
    lane, start, end = lane[order], start[:, order], end[:, order]
    span = max(int(end.max()), 1) if end.size else 1
    grain, heads = 0, np.arange(lane.size)
    cells = 1 << 17
    while heads.size > limit and cells >= _COARSEST:
        grain = -(-span // cells)
        long: Bools = np.any(end - start >= grain, axis=0)
        new = (np.diff(lane, prepend=-1) != 0) | long | np.append(False, long[:-1])
        # nothing can be seen of a node that is gone: it does not separate its neighbours
        for cell in np.where(end > start, start // grain, -1):
            latest = np.maximum.accumulate(np.where(cell >= 0, np.arange(cell.size), 0))
            held = cell[latest]
            new |= np.diff(held, prepend=held[:1] - 1 if held.size else -1) != 0
        heads = np.flatnonzero(new)
        cells = cells * 3 // 4
    if heads.size > limit:  # where after is in another order than before, stretches part few neighbours or all
        of_lanes = np.flatnonzero(np.diff(lane, prepend=-1))
        heads = np.union1d(of_lanes, heads[:: -(-heads.size // limit)])
    if not heads.size:
        none = np.zeros((2, 0), dtype=np.int64)
        return Pieces(lane[:0], none, none, none, heads, heads, order, grain)
    present = end > start
    count = np.diff(np.append(heads, lane.size))
    group = np.repeat(np.arange(heads.size), count)
    first = np.minimum.reduceat(np.where(present, start, np.iinfo(np.int64).max), heads, axis=1)
    last = np.maximum.reduceat(np.where(present, end, -1), heads, axis=1)
    gone = last < 0
    longest = np.empty((2, heads.size), dtype=np.int64)
    for side in (0, 1):
        # the longest node of each piece comes first
        by = np.lexsort((-(end[side] - start[side]), group))
        longest[side] = order[by[heads]]
    return Pieces(
        lane[heads], np.where(gone, 0, first), np.where(gone, 0, last), np.where(gone, -1, longest), count, heads,
        order, grain,
    )  # fmt: skip
