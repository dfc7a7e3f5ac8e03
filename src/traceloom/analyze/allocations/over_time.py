"""Who holds how much over time: levels of any partition of the blocks at chosen instants."""

from __future__ import annotations

from itertools import pairwise

import numpy as np

from traceloom.analyze.allocations.blocks import Blocks
from traceloom.array_types import Ints

INSTANTS = 480
"""About how many instants a curve has; the highest of all is among them."""


def instants(levels: Ints, most: int = INSTANTS) -> Ints:
    """Rows at which a curve is drawn: first and highest of each of so many equal parts, and the last row.

    Args:
        levels: Bytes after each row, with the start before the first row, as `Blocks.levels` gives them.
        most: About how many.

    Returns:
        Row numbers, sorted; -1 is the start.
    """
    size = levels.size
    if size <= most:
        return np.arange(size) - 1
    bounds = -(-np.arange(most // 2 + 1) * size // (most // 2))
    highest = bounds[:-1] + [int(levels[low:high].argmax()) for low, high in pairwise(bounds.tolist())]
    return np.unique(np.concatenate([bounds[:-1], highest, [size - 1]])) - 1


def levels_by(blocks: Blocks, key: Ints, keys: int, rows: Ints, pool: int) -> Ints:
    """Bytes of the blocks of one memory by key just after each of the rows, shape (keys, rows).

    Args:
        blocks: The blocks.
        key: A number from 0 below `keys` for each block.
        keys: How many there are.
        rows: Sorted row numbers; -1 for before the first.
        pool: Which memory.
    """
    in_pool = np.flatnonzero(blocks.pool == pool)
    width = rows.size + 1
    present = np.bincount(key[in_pool], minlength=keys) > 0
    used = np.flatnonzero(present)
    first = ((np.cumsum(present) - 1) * width)[key[in_pool]]  # offset of each block's key among those in use
    change = np.zeros(used.size * width)
    for at, sign in ((blocks.made[in_pool], 1), (blocks.ended[in_pool], -1)):
        # weights are summed as doubles, which are exact below 2^53 bytes
        cell = first + np.searchsorted(rows, at)
        change += sign * np.bincount(cell, weights=blocks.bytes[in_pool], minlength=change.size)
    levels = np.zeros((keys, rows.size), dtype=np.int64)
    levels[used] = np.cumsum(change.astype(np.int64).reshape(used.size, width)[:, :-1], axis=1)
    return levels


def largest_keys(levels: Ints, most: int) -> tuple[Ints, Ints]:
    """The keys with the highest levels, and a row that adds up all others.

    Returns:
        Their numbers (at most `most`, the highest first), and the levels of these and of the rest, shape (<= most + 1,
        rows); the last row is the rest.
    """
    order = np.argsort(-levels.max(axis=1, initial=0), kind="stable")
    kept = order[:most]
    rest = levels[order[most:]].sum(axis=0, keepdims=True)
    return kept, np.concatenate([levels[kept], rest])
