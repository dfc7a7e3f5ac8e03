"""The points of a graph (start and end of every node) in an order in which each comes after what it waits for."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from traceloom.errors import InvariantError

Ints = NDArray[np.int64]


def topological(nodes: int, source: Ints, target: Ints) -> Ints:
    """All 2 x `nodes` points in topological order.

    Args:
        nodes: Number of nodes; point 2i is the start of node i, 2i + 1 its end, and an end comes after its start.
        source: Point of each edge that is waited for.
        target: Point of each edge that waits.

    Raises:
        InvariantError: `broken-cycle`: there is none.
    """
    starts = np.arange(nodes, dtype=np.int64) * 2
    from_point, to_point = np.concatenate([source, starts]), np.concatenate([target, starts + 1])
    by_source = np.argsort(from_point, kind="stable")
    next_of = to_point[by_source].tolist()
    first: Any = np.concatenate([[0], np.cumsum(np.bincount(from_point, minlength=2 * nodes))]).tolist()
    waits: Any = np.bincount(to_point, minlength=2 * nodes).tolist()
    ready = [point for point in range(2 * nodes - 1, -1, -1) if not waits[point]]
    order: list[int] = []
    while ready:
        point = ready.pop()
        order.append(point)
        for follower in next_of[first[point] : first[point + 1]]:
            waits[follower] -= 1
            if not waits[follower]:
                ready.append(follower)
    if len(order) < 2 * nodes:
        stuck = next(point for point, count in enumerate(waits) if count)
        raise InvariantError(
            f"{2 * nodes - len(order)} points wait for each other, one of them is of node {stuck // 2}",
            slug="broken-cycle",
            hint="this is a defect of Traceloom, please report it",
        )
    return np.array(order, dtype=np.int64)
