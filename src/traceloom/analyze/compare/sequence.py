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


def pairs(base: Items, new: Items) -> list[Pair]:
    """Places of elements that are the same in both lists, both ascending.

    Equal ends are taken as they are. Between them, of all ways to pair elements of one name in their order, the one is
    taken that has the largest sum: large subtrees count more than small ones; equal shapes, equal GPU work and equal
    subtrees more than others. (Wagner and Fischer's table, a row at a time.)
    """
    low, short = 0, min(base.mark.size, new.mark.size)
    equal = base.mark[:short] == new.mark[:short]
    low = short if equal.all() else int(np.argmin(equal))
    back = short - low
    equal = base.mark[base.mark.size - back :][::-1] == new.mark[new.mark.size - back :][::-1]
    high = back if equal.all() else int(np.argmin(equal))
    inner = _inner(base.part(low, base.mark.size - high), new.part(low, new.mark.size - high))
    matched = [(index, index) for index in range(low)]
    matched += [(low + at, low + to) for at, to in inner]
    return matched + [(base.mark.size - k, new.mark.size - k) for k in range(high, 0, -1)]


def _inner(left: Items, right: Items) -> list[Pair]:
    """Pair lists of any length, block by block; of the pairs of each block only those in its first half are kept."""
    matched: list[Pair] = []
    at = to = 0
    while at < left.name.size and to < right.name.size:
        ahead = _best(left.part(at, at + BLOCK), right.part(to, to + BLOCK))
        last = at + BLOCK >= left.name.size and to + BLOCK >= right.name.size
        kept = ahead if last else [pair for pair in ahead if max(pair) < BLOCK // 2]
        matched += [(at + row, to + column) for row, column in kept]
        if last:
            break
        row, column = kept[-1] if kept else (BLOCK // 2, BLOCK // 2)
        at, to = at + row + 1, to + column + 1
    return matched


def _best(left: Items, right: Items) -> list[Pair]:
    """The pairing with the largest sum of weights, as early in both as possible."""
    rows, columns = left.name.size, right.name.size
    best = np.zeros((rows + 1, columns + 1), dtype=np.int32)
    for row in range(rows - 1, -1, -1):
        gained = _weights(left, row, right)
        gains = np.maximum(best[row + 1, :-1], np.where(gained > 0, best[row + 1, 1:] + gained, 0))
        best[row, :-1] = np.maximum.accumulate(gains[::-1])[::-1]
    matched: list[Pair] = []
    row = column = 0
    while row < rows and column < columns and best[row, column]:
        if best[row, column] == best[row + 1, column]:
            row += 1
        elif best[row, column] == best[row, column + 1]:
            column += 1
        else:
            matched.append((row, column))
            row, column = row + 1, column + 1
    return matched


def _weights(left: Items, row: int, right: Items) -> NDArray[np.int32]:
    """The weight of pairing element `row` with each element on the right; 0 where the names differ."""
    smaller = np.minimum(left.size[row], right.size)
    gained = 8 + 4 * np.log2(smaller).astype(np.int32)
    for weight, left_values, right_values in (
        (4, left.shape, right.shape),
        (3, left.work, right.work),
        (3, left.mark, right.mark),
    ):
        gained += weight * (left_values[row] == right_values)
    weights: NDArray[np.int32] = np.where(left.name[row] == right.name, gained, 0).astype(np.int32)
    return weights
