"""Halving and doubling: partners at growing distances exchange halves."""

from __future__ import annotations

import numpy as np

from traceloom.schedules.schedule import Schedule, pieces, power_of_two, round_of


def halving_doubling(kind: str, ranks: int, size: int) -> Schedule:
    """Recursive halving, recursive doubling, or one after the other (thakur2005optimization).

    Args:
        kind: all_reduce, reduce_scatter, all_gather.
        ranks: How many, a power of two.
        size: Bytes: of all_gather one rank's part, else a rank's whole buffer.

    Raises:
        UsageError: `no-such-schedule`: not a power of two.
    """
    steps = power_of_two(ranks, "halving-doubling")
    position = np.arange(ranks)
    whole = size * ranks if kind == "all_gather" else size
    piece = pieces(whole, ranks)
    halving = []
    for step in range(steps):
        # What a rank gives away is for all positions that agree with its partner in the bits so far.
        partner = position ^ (1 << step)
        low = (1 << (step + 1)) - 1
        sums = np.zeros(low + 1, np.int64)
        np.add.at(sums, position & low, piece)
        halving.append((partner, sums[partner & low]))
    rounds = []
    if kind != "all_gather":
        rounds += [round_of(position, partner, out, reduce=True) for partner, out in halving]
    if kind != "reduce_scatter":  # backwards: each sends what its partner sent it
        rounds += [round_of(position, partner, out[partner]) for partner, out in reversed(halving)]
    return Schedule(ranks, tuple(rounds))
