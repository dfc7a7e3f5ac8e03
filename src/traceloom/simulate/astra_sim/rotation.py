"""Collectives in which every rank does the same at the same time: one rank and its links stand for all.

Where all ranks of a ring, a switch or a full mesh begin at once, and each sends to the ranks at the same distances,
every link of one kind sees the same messages at the same times. What the one rank sends to a distance arrives at
itself, as what the rank at that distance before it has sent.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import Any

import numpy as np

from traceloom.schedules import Round, Schedule
from traceloom.simulate.astra_sim.clock import Clock
from traceloom.simulate.astra_sim.collectives import CollectivePhase
from traceloom.simulate.astra_sim.network import AnalyticalNetwork, Arrive, Link, Links
from traceloom.simulate.astra_sim.streams import Mailbox, RankQueues, Stream


@lru_cache(maxsize=64)
def is_rotation(schedule: Schedule) -> bool:
    """Whether all ranks send the same, each to the ranks at the same distances."""
    seen: set[int] = set()
    for part in schedule.rounds:
        if id(part) in seen:
            continue
        seen.add(id(part))
        if len(part.source) % schedule.ranks:
            return False
        by_source = np.argsort(part.source, kind="stable").reshape(schedule.ranks, -1)
        if (part.source[by_source] != np.arange(schedule.ranks)[:, np.newaxis]).any():
            return False
        for column in ((part.target - part.source) % schedule.ranks, part.bytes, part.reduced):
            rows = column[by_source]
            if (rows != rows[0]).any():
                return False
    return True


@lru_cache(maxsize=64)
def _of_first(schedule: Schedule) -> Schedule:
    """The messages of position 0; equal rounds stay one."""
    made = {}
    for part in schedule.rounds:
        if id(part) not in made:
            own = (part.source == 0) | (part.target == 0)
            made[id(part)] = Round(part.source[own], part.target[own], part.bytes[own], part.reduced[own])
    return Schedule(schedule.ranks, tuple(made[id(part)] for part in schedule.rounds))


class _OneRank(Links):
    """The links of rank 0, each of which stands for its likes."""

    def route(self, source: int, target: int) -> list[Link]:
        """The links by their likes: those of rank 0."""
        count = self._fabric.sizes[0]
        return [
            (0, (b - a) % count) if max(a, b) < count else (0, count) if b == count else (count, 0)
            for a, b in super().route(source, target)
        ]


def one_of_all(
    fabric: AnalyticalNetwork, chunks: list[list[CollectivePhase]], memory_rate: float
) -> tuple[int, dict[Link, list[int]]]:
    """How long a collective takes that all ranks begin at once, and what it does to each link.

    Args:
        fabric: One dimension.
        chunks: The phases of each chunk.
        memory_rate: Bytes per second at which a rank reads or writes.

    Returns:
        Time in ns; bytes, busy and waiting time of each link.
    """
    clock, ranks = Clock(), fabric.sizes[0]
    links = _OneRank(fabric, clock)

    def transmit(source: int, target: int, size: int, arrive: Arrive, what: Any) -> None:
        (tag, _, _, _), sent = what
        links.send(source, target, size, arrive, ((tag, (source - target) % ranks, source, size), sent))

    left = [len(chunks)]
    queues = RankQueues(0, clock, 1)
    mailbox = Mailbox(clock, transmit)

    def done() -> None:
        left[0] -= 1
        if not left[0]:
            left.append(clock.now)

    for number, own in enumerate(chunks):
        phases = [replace(phase, schedule=_of_first(phase.schedule)) for phase in own]
        stream = Stream(queues, mailbox, number, tuple(range(ranks)), phases, memory_rate=memory_rate, done=done)
        stream.proceed()
    clock.run()
    usage = {
        ((a + shift) % ranks if a < ranks else a, (b + shift) % ranks if b < ranks else b): values
        for (a, b), values in links.usage.items()
        for shift in range(ranks)
    }
    return left[1], usage
