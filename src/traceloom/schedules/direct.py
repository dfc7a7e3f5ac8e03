"""Everybody sends to everybody at once, or one rank to all others."""

from __future__ import annotations

import numpy as np

from traceloom.array_types import Ints
from traceloom.schedules.schedule import Round, Schedule, pieces, round_of


def direct(kind: str, ranks: int, size: int, *, splits: Ints | None = None) -> Schedule:
    """Whole buffers, or the k-th piece of every buffer to position k, in the order of distance.

    Args:
        kind: all_reduce, reduce_scatter, all_gather, all_to_all; of position 0: broadcast, reduce, gather, scatter.
        ranks: How many.
        size: Bytes: of all_gather one rank's part, else a rank's whole buffer (of gather and scatter the root's).
        splits: Of all_to_all: bytes from each position (row) to each position; equal pieces where not given.
    """
    if kind in {"broadcast", "reduce", "gather", "scatter"}:
        others = np.arange(1, ranks)
        each = np.full(ranks - 1, size) if kind in {"broadcast", "reduce"} else pieces(size, ranks)[1:]
        first, last = (0, others) if kind in {"broadcast", "scatter"} else (others, 0)
        return Schedule(ranks, (round_of(first, last, each, reduce=kind == "reduce"),))
    source = np.tile(np.arange(ranks), ranks - 1)
    target = (source + np.repeat(np.arange(1, ranks), ranks)) % ranks
    piece = pieces(size, ranks)
    rounds: list[Round] = []
    if kind == "all_gather":
        rounds.append(round_of(source, target, size))
    elif kind == "all_to_all":
        rounds.append(round_of(source, target, piece[target] if splits is None else splits[source, target]))
    else:
        rounds.append(round_of(source, target, piece[target], reduce=True))
        if kind == "all_reduce":
            rounds.append(round_of(source, target, piece[source]))
    return Schedule(ranks, tuple(rounds))
