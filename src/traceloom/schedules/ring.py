"""Rings: every rank sends to the next one."""

from __future__ import annotations

import numpy as np

from traceloom.schedules.schedule import Round, Schedule, pieces, round_of


def ring(kind: str, ranks: int, size: int, *, chunks: int = 1) -> Schedule:
    """Pieces go round the ring: patarasuk2009bandwidth for all_reduce; broadcast and reduce go along it as a chain.

    Args:
        kind: all_reduce, reduce_scatter, all_gather, all_to_all (blocks are handed on until they are there),
            broadcast, reduce (both of position 0).
        ranks: How many.
        size: Bytes: of all_gather one rank's part, else a rank's whole buffer.
        chunks: In how many parts a chain hands on its buffer.
    """
    position = np.arange(ranks)
    following = (position + 1) % ranks
    if kind in {"broadcast", "reduce"}:
        return Schedule(ranks, _chain(ranks, size, chunks, reduce=kind == "reduce"))
    rounds: list[Round] = []
    if kind == "all_gather":
        rounds = [round_of(position, following, size)] * (ranks - 1)
    elif kind == "all_to_all":
        rounds = [round_of(position, following, size // ranks)] * (ranks * (ranks - 1) // 2)
    else:
        piece = pieces(size, ranks)
        even = size % ranks == 0
        # The piece that a rank sends first; at the end of a reduction it holds the one after its own, or its own.
        phases = {"all_reduce": ((0, True), (1, False)), "reduce_scatter": ((-1, True),)}[kind]
        for first, reduce in phases:
            same = round_of(position, following, piece, reduce=reduce)
            for step in range(ranks - 1):
                out = piece if even else piece[(position + first - step) % ranks]
                rounds.append(same if even else round_of(position, following, out, reduce=reduce))
    return Schedule(ranks, tuple(rounds))


def _chain(ranks: int, size: int, chunks: int, *, reduce: bool) -> tuple[Round, ...]:
    """From position 0 to the last one, chunk after chunk; a reduction from the last one to position 0."""
    chunk = pieces(size, chunks)
    rounds = []
    for step in range(ranks - 1 + chunks - 1):
        link = np.arange(max(step - chunks + 1, 0), min(step, ranks - 2) + 1)  # between two neighbours
        near, far = (ranks - 1 - link, ranks - 2 - link) if reduce else (link, link + 1)
        rounds.append(round_of(near, far, chunk[step - link], reduce=reduce))
    return tuple(rounds)
