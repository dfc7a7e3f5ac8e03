"""Which elements of two ordered lists are the same: the pairing in order that has the most in common."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
Pair = tuple[int, int]

BLOCK = 2_048  # elements of each list in one table of all ways to pair


@dataclass(frozen=True, slots=True)
class Items:
    """The elements of a list; arrays of one length.

    Attributes:
        name: Only elements of one name can be the same.
        shape: Those of one shape are rather the same than others.
        work: So are those that launch the same GPU work.
        mark: Equal where all that is below the elements is equal.
        size: How much is below them.
    """

    name: Ints
    shape: Ints
    work: Ints
    mark: Ints
    size: Ints

    def part(self, low: int, high: int) -> Items:
        """The elements from `low` to `high`."""
        return Items(*(getattr(self, name)[low:high] for name in self.__slots__))


def pairs(one: Items, other: Items) -> list[Pair]:
    """Places of elements that are the same in both lists, both ascending.

    Equal ends are taken as they are. Between them, of all ways to pair elements of one name in their order, the one is
    taken that has the largest sum: large subtrees count more than small ones; equal shapes, equal GPU work and equal
    subtrees more than others. (Wagner and Fischer's table, a row at a time.)
    """
    low, short = 0, min(one.mark.size, other.mark.size)
    equal = one.mark[:short] == other.mark[:short]
    low = short if equal.all() else int(np.argmin(equal))
    back = short - low
    equal = one.mark[one.mark.size - back :][::-1] == other.mark[other.mark.size - back :][::-1]
    high = back if equal.all() else int(np.argmin(equal))
    inner = _inner(one.part(low, one.mark.size - high), other.part(low, other.mark.size - high))
    found = [(place, place) for place in range(low)]
    found += [(low + at, low + to) for at, to in inner]
    return found + [(one.mark.size - k, other.mark.size - k) for k in range(high, 0, -1)]


def _inner(one: Items, other: Items) -> list[Pair]:
    """The pairing of lists of any length: block after block of both; of the pairing of each the first half is kept."""
    found: list[Pair] = []
    at = to = 0
    while at < one.name.size and to < other.name.size:
        ahead = _best(one.part(at, at + BLOCK), other.part(to, to + BLOCK))
        last = at + BLOCK >= one.name.size and to + BLOCK >= other.name.size
        kept = ahead if last else [pair for pair in ahead if max(pair) < BLOCK // 2]
        found += [(at + mine, to + theirs) for mine, theirs in kept]
        if last:
            break
        mine, theirs = kept[-1] if kept else (BLOCK // 2, BLOCK // 2)
        at, to = at + mine + 1, to + theirs + 1
    return found


def _best(one: Items, other: Items) -> list[Pair]:
    """The pairing with the largest sum of weights, as early in both as it can be."""
    rows, columns = one.name.size, other.name.size
    best = np.zeros((rows + 1, columns + 1), dtype=np.int32)
    for row in range(rows - 1, -1, -1):
        gained = _weights(one, row, other)
        here = np.maximum(best[row + 1, :-1], np.where(gained > 0, best[row + 1, 1:] + gained, 0))
        best[row, :-1] = np.maximum.accumulate(here[::-1])[::-1]
    found: list[Pair] = []
    row = column = 0
    while row < rows and column < columns and best[row, column]:
        if best[row, column] == best[row + 1, column]:
            row += 1
        elif best[row, column] == best[row, column + 1]:
            column += 1
        else:
            found.append((row, column))
            row, column = row + 1, column + 1
    return found


def _weights(one: Items, row: int, other: Items) -> NDArray[np.int32]:
    """What pairing one element with each of the others gains; 0 where the names differ."""
    smaller = np.minimum(one.size[row], other.size)
    gained = 8 + 4 * np.log2(smaller).astype(np.int32)
    for weight, mine, theirs in ((4, one.shape, other.shape), (3, one.work, other.work), (3, one.mark, other.mark)):
        gained += weight * (mine[row] == theirs)
    weights: NDArray[np.int32] = np.where(one.name[row] == other.name, gained, 0).astype(np.int32)
    return weights
