"""Trees: up to a root, down from it, or both."""

from __future__ import annotations

import numpy as np

from traceloom.array_types import Ints
from traceloom.schedules.schedule import Round, Schedule, merged, pieces, round_of


def tree(kind: str, ranks: int, size: int) -> Schedule:
    """A binomial tree under position 0.

    Args:
        kind: all_reduce (up and down), reduce, broadcast.
        ranks: How many.
        size: Bytes of a rank's buffer.
    """
    steps = (ranks - 1).bit_length()
    up, down = [], []
    for step in range(steps):
        child = np.arange(1 << step, ranks, 2 << step)
        up.append(round_of(child, child - (1 << step), size, reduce=True))
        down.append(round_of(child - (1 << step), child, size))
    rounds = [*(up if kind != "broadcast" else []), *(reversed(down) if kind != "reduce" else [])]
    return Schedule(ranks, tuple(rounds))


def double_tree(kind: str, ranks: int, size: int, *, chunks: int = 1) -> Schedule:
    """Two binary trees with half the buffer each; who is a leaf of one is inside the other (sanders2009two).

    Args:
        kind: all_reduce, broadcast, reduce.
        ranks: How many.
        size: Bytes of a rank's buffer.
        chunks: In how many parts each half goes along its tree.
    """
    slots: dict[int, list[Round]] = {}
    for parent, half in zip((parents(ranks, 0), parents(ranks, ranks - 1)), pieces(size, 2).tolist(), strict=True):
        for slot, part in _along(parent, half, chunks, kind):
            slots.setdefault(slot, []).append(part)
    return Schedule(ranks, tuple(merged(slots[slot]) for slot in sorted(slots)))


def one_tree(parent: Ints, size: int) -> Schedule:
    """All of an all_reduce along one tree, given as the parent of each position (-1 for the root)."""
    rounds: dict[int, list[Round]] = {}
    for slot, part in _along(parent, size, 1, "all_reduce"):
        rounds.setdefault(slot, []).append(part)
    return Schedule(len(parent), tuple(merged(rounds[slot]) for slot in sorted(rounds)))


def parents(ranks: int, root: int) -> Ints:
    """A balanced binary tree of all other positions, in order, under the first or the last position.

    Args:
        ranks: How many.
        root: 0 or ranks - 1.

    Returns:
        The parent of each position, -1 for the root.
    """
    parent = np.full(ranks, -1, np.int64)
    first = 0 if root else 1
    spans = [(first, first + ranks - 1, root)]
    while spans:
        low, high, above = spans.pop()
        if low < high:
            middle = (low + high) // 2
            parent[middle] = above
            spans += [(low, middle, middle), (middle + 1, high, middle)]
    return parent


def depths(parent: Ints) -> Ints:
    """How far each position is from the root."""
    depth, above = np.zeros(len(parent), np.int64), parent.copy()
    while (above >= 0).any():
        depth += above >= 0
        above = np.where(above >= 0, parent[above], -1)
    return depth


def _along(parent: Ints, size: int, chunks: int, kind: str) -> list[tuple[int, Round]]:
    """Messages of one tree with the slot of time that each belongs to."""
    depth = depths(parent)
    position = np.flatnonzero(parent >= 0)
    height = np.zeros(len(parent), np.int64)  # longest way down
    for level in range(int(depth.max(initial=0)), 0, -1):
        at = np.flatnonzero(depth == level)
        np.maximum.at(height, parent[at], height[at] + 1)
    highest = int(height.max(initial=0)) if kind != "broadcast" else 0
    messages: list[tuple[int, Round]] = []
    for number, bytes_of in enumerate(pieces(size, chunks).tolist()):
        if kind != "broadcast":
            for level in range(1, highest + 1):
                child = position[height[parent[position]] == level]
                messages.append((number + level - 1, round_of(child, parent[child], bytes_of, reduce=True)))
        if kind != "reduce":
            for level in range(1, int(depth.max(initial=0)) + 1):
                child = position[depth[position] == level]
                messages.append((number + highest + level - 1, round_of(parent[child], child, bytes_of)))
    return messages
