"""Two levels: inside hosts first, then between them."""

from __future__ import annotations

import numpy as np

from traceloom.array_types import Ints
from traceloom.errors import UsageError
from traceloom.schedules.ring import ring
from traceloom.schedules.schedule import Round, Schedule, side_by_side


def two_level(kind: str, ranks: int, size: int, *, local: int) -> Schedule:
    """Rings inside hosts of `local` neighbours, and rings between the hosts, of ranks with the same position in theirs.

    Args:
        kind: all_reduce, reduce_scatter, all_gather.
        ranks: How many, a multiple of `local`.
        size: Bytes: of all_gather one rank's part, else a rank's whole buffer.
        local: Ranks of a host.

    Raises:
        UsageError: `no-such-schedule`: the hosts would differ in size.
    """
    if ranks % local:
        raise UsageError(
            f"two-level needs hosts of one size, and {ranks} ranks are no multiple of {local}", slug="no-such-schedule"
        )
    hosts = ranks // local
    inside = [np.arange(local) + host * local for host in range(hosts)]
    between = [np.arange(hosts) * local + position for position in range(local)]

    def level(phase: str, positions: list[Ints], bytes_of: int) -> tuple[Round, ...]:
        count = len(positions[0])
        own = ring(phase, count, bytes_of)
        return side_by_side([(own, at) for at in positions]) if count > 1 else ()

    part = max(size // local, 1)
    rounds: tuple[Round, ...] = ()
    if kind == "all_gather":
        rounds = (*level(kind, between, size), *level(kind, inside, size * hosts))
    elif kind == "reduce_scatter":
        rounds = (*level(kind, inside, size), *level(kind, between, part))
    else:
        rounds = (
            *level("reduce_scatter", inside, size),
            *level("all_reduce", between, part),
            *level("all_gather", inside, part),
        )
    return Schedule(ranks, rounds)
