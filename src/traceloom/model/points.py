"""The points of a graph (start and end of every node) in an order in which each comes after what it waits for."""

from __future__ import annotations

from array import array
from typing import Any

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from traceloom.array_types import Bools, Ints
from traceloom.errors import InvariantError

_MOST_LISTED = 200_000  # runs; a list takes four times the room of an array


class Layers(Struct, frozen=True):
    """Items in runs, and in which order the runs can be gone through.

    A run is a stretch of neighbouring items, each of which waits for the one before it and for nothing else.

    Attributes:
        run: Number of the run of each item.
        rank: Place of each run in an order in which each comes after what it waits for.
        layer: Of each run, how many links that are not between neighbours lead to it at most, one after the other.
    """

    run: Ints
    rank: Ints
    layer: Ints


def layers(chained: Bools, source: Ints, target: Ints) -> Layers | None:
    """Order items that wait for each other; None if there is a cycle.

    The work outside NumPy is one step per run and link, so that long chains cost next to nothing.

    Args:
        chained: Whether each item waits for the one before it; shape (items,).
        source: Item of every other link that is waited for.
        target: Item that waits.
    """
    heads = ~chained
    heads[target] = True
    run = np.cumsum(heads) - 1
    first = np.flatnonzero(heads)
    count = first.size
    from_run, to_run = run[source], run[target]
    follows = chained[first]
    many = count > _MOST_LISTED
    waits = _by_number(np.bincount(to_run, minlength=count) + follows, many)
    by_source = np.argsort(from_run, kind="stable")
    reached = _by_number(to_run[by_source], many)
    bounds = _by_number(np.searchsorted(from_run[by_source], np.arange(count + 1)), many)
    next_follows = _by_number(np.append(follows[1:], False), many)
    run_layers = np.zeros(count, dtype=np.int64, like=chained)
    layer = _by_number(run_layers, many)
    ready = [at for at, left in enumerate(waits) if not left]
    order = array("q")
    while ready:
        at = ready.pop()
        while True:
            order.append(at)
            current = layer[at]
            low, high = bounds[at], bounds[at + 1]
            if low < high:
                for follower in reached[low:high]:
                    if layer[follower] <= current:
                        layer[follower] = current + 1
                    left = waits[follower] - 1
                    waits[follower] = left
                    if not left:
                        ready.append(follower)
            if not next_follows[at]:
                break
            at += 1
            if layer[at] < current:  # noqa: PLR1730  (max() takes three times as long)
                layer[at] = current
            left = waits[at] - 1
            waits[at] = left
            if left:
                break
    if len(order) < count:
        return None
    rank = np.empty(count, dtype=np.int64, like=chained)
    rank[np.frombuffer(order, dtype=np.int64)] = np.arange(count)
    if not many:
        run_layers[:] = layer
    return Layers(run, rank, run_layers)


def _by_number(values: NDArray[Any], many: bool) -> Any:
    """The values as a list, or as a view of the array, which is slower but takes no object for each."""
    return values.data if many else values.tolist()


def topological(nodes: int, source: Ints, target: Ints) -> Ints:
    """All 2 x `nodes` points in topological order.

    Args:
        nodes: Number of nodes; point 2i is the start of node i, 2i + 1 its end, and an end comes after its start.
        source: Point of each edge that is waited for.
        target: Point of each edge that waits.

    Raises:
        InvariantError: `broken-cycle`: there is none.
    """
    layering = _of_points(nodes, source, target)
    if layering is None:
        raise cycle(nodes, source, target)
    return np.argsort(layering.rank[layering.run], kind="stable")


def acyclic(nodes: int, source: Ints, target: Ints) -> bool:
    """Whether there is such an order; arguments as of `topological`."""
    return _of_points(nodes, source, target) is not None


def _of_points(nodes: int, source: Ints, target: Ints) -> Layers | None:
    chained = np.zeros(2 * nodes, dtype=np.bool_, like=source)
    chained[1::2] = True
    neighbours = (target == source + 1) & (source % 2 == 1)
    chained[target[neighbours]] = True
    return layers(chained, source[~neighbours], target[~neighbours])


def cycle(nodes: int, source: Ints, target: Ints) -> InvariantError:
    """The error that names the points which wait for each other."""
    starts = np.arange(nodes, dtype=np.int64) * 2
    from_point, to_point = np.concatenate([source, starts]), np.concatenate([target, starts + 1])
    by_source = np.argsort(from_point, kind="stable")
    next_of: Any = to_point[by_source].tolist()
    first: Any = np.searchsorted(from_point[by_source], np.arange(2 * nodes + 1)).tolist()
    waits: Any = np.bincount(to_point, minlength=2 * nodes).tolist()
    ready = [point for point in range(2 * nodes) if not waits[point]]
    while ready:
        point = ready.pop()
        for follower in next_of[first[point] : first[point + 1]]:
            waits[follower] -= 1
            if not waits[follower]:
                ready.append(follower)
    stuck = np.flatnonzero(waits)  # points that are on a circle or behind one
    return InvariantError(
        f"{stuck.size} points wait for each other, one of them is of node {int(stuck[0]) // 2}",
        slug="broken-cycle",
    )
