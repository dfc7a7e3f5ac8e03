"""Collectives message by message: the chunks of each rank, their queues, and what each waits for."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import numpy as np

from traceloom.schedules import Round, Schedule
from traceloom.simulate.astra_sim.clock import Clock, Event
from traceloom.simulate.astra_sim.collectives import CollectivePhase, members_of

# Of one position in one round: messages out (position, bytes) and in (position, bytes, reduced bytes), in their order.
Step = tuple[list[tuple[int, int]], list[tuple[int, int, int]]]


@lru_cache(maxsize=64)
def steps_of(schedule: Schedule) -> list[list[Step]]:
    """The rounds of each position in which it has a part; equal rounds are one object."""
    steps: list[list[Step]] = [[] for _ in range(schedule.ranks)]
    made: dict[int, list[tuple[int, Step]]] = {}
    for part in schedule.rounds:
        if id(part) not in made:
            made[id(part)] = _steps(part, schedule.ranks)
        for position, step in made[id(part)]:
            steps[position].append(step)
    return steps


def _steps(part: Round, ranks: int) -> list[tuple[int, Step]]:
    by_source, by_target = (np.argsort(ends, kind="stable") for ends in (part.source, part.target))
    out = list(zip(part.target[by_source].tolist(), part.bytes[by_source].tolist(), strict=True))
    into = list(zip(*(column[by_target].tolist() for column in (part.source, part.bytes, part.reduced)), strict=True))
    of_source, of_target = (
        np.searchsorted(ends, np.arange(ranks + 1)).tolist()
        for ends in (part.source[by_source], part.target[by_target])
    )
    return [
        (
            position,
            (out[of_source[position] : of_source[position + 1]], into[of_target[position] : of_target[position + 1]]),
        )
        for position in range(ranks)
        if of_source[position] < of_source[position + 1] or of_target[position] < of_target[position + 1]
    ]


class Mailbox:
    """Messages under way or arrived, and who waits for them: the k-th send of a key is the k-th receive of it.

    Args:
        clock: When things happen.
        transmit: Sends a message: (source, target, bytes, arrive, what).
    """

    def __init__(self, clock: Clock, transmit: Callable[[int, int, int, Event, Any], None]) -> None:
        self._clock, self._transmit = clock, transmit
        self._arrived: dict[Any, int] = {}
        self._awaited: dict[Any, deque[Callable[[], None]]] = {}

    def send(  # noqa: PLR0917  (a message's ends and size are its name)
        self,
        key: Any,
        source: int,
        target: int,
        size: int,
        sent: Callable[[], None] | None = None,
        took_ns: int | None = None,
    ) -> None:
        """Send now; `sent` is called when the message is there, received or not; `took_ns` goes past the network."""
        if took_ns is None:
            self._transmit(source, target, size, self._arrive, (key, sent))
        else:
            self._clock.at(self._clock.now + took_ns, self._arrive, (key, sent))

    def receive(self, key: Any, received: Callable[[], None]) -> None:
        """Wait for a message; of one that is there already `received` is called at this time, but later."""
        if self._arrived.get(key):
            self._arrived[key] -= 1
            self._clock.at(self._clock.now, lambda _: received(), None)
        else:
            self._awaited.setdefault(key, deque()).append(received)

    def _arrive(self, what: tuple[Any, Callable[[], None] | None]) -> None:
        key, sent = what
        if sent:
            sent()
        awaited = self._awaited.get(key)
        if awaited:
            awaited.popleft()()
        else:
            self._arrived[key] = self._arrived.get(key, 0) + 1


@dataclass(slots=True)
class RankQueues:
    """One rank's queues, and its events: those of one time happen together, in their order.

    Attributes:
        rank: Which.
        clock: When things happen.
        width: How many chunks of a dimension are under way at once.
        waiting: Of each dimension, its chunks: those under way first.
        running: Of each dimension, how many are under way.
    """

    rank: int
    clock: Clock
    width: int
    waiting: dict[int, list[Stream]] = field(default_factory=dict)
    running: dict[int, int] = field(default_factory=dict)
    _events: dict[int, list[tuple[Event, Any]]] = field(default_factory=dict)

    def after(self, delay_ns: int, event: Event, what: Any = None) -> None:
        """Call `event(what)` after a time."""
        time = self.clock.now + delay_ns
        events = self._events.get(time)
        if events is None:
            self._events[time] = [(event, what)]
            self.clock.at(time, self._run)
        else:
            events.append((event, what))

    def _run(self, _: Any) -> None:
        now = self.clock.now
        for event, what in self._events[now]:
            event(what)
        del self._events[now]

    def add(self, stream: Stream, dimension: int) -> None:
        """A chunk asks for a dimension, after all others.

        Whatever the scheduling policy: it orders collectives, of which a rank does one at a time.
        """
        self.waiting.setdefault(dimension, []).append(stream)

    def fill(self, dimension: int) -> None:
        """Begin as many chunks as may be under way."""
        queue = self.waiting.get(dimension, [])
        while (running := self.running.get(dimension, 0)) < min(self.width, len(queue)):
            self.running[dimension] = running + 1
            queue[running].begin()


class Stream:
    """One rank's part of one chunk.

    Args:
        queues: Of the rank.
        mailbox: Where messages go.
        tag: Equal on all ranks of the chunk, and on no other chunk's.
        group: Ranks of the collective.
        phases: What to do.
        memory_rate: Bytes per second at which a rank reads or writes.
        done: Called at the end.
    """

    def __init__(
        self,
        queues: RankQueues,
        mailbox: Mailbox,
        tag: Any,
        group: tuple[int, ...],
        phases: list[CollectivePhase],
        *,
        memory_rate: float,
        done: Callable[[], None],
    ) -> None:
        self._queues, self._mailbox, self._tag, self._group = queues, mailbox, tag, group
        self._phases, self._rate, self._done = deque(phases), memory_rate, done
        self._phase: CollectivePhase | None = None
        self._steps: list[Step] = []

    def proceed(self) -> None:
        """Leave the phase, if any, and ask for the next one."""
        left = self._phase
        if not self._phases:
            self._done()
        if left is not None:
            self._queues.waiting[left.dimension].remove(self)
        if self._phases:
            phase = self._phase = self._phases.popleft()
            self._queues.add(self, phase.dimension)
        if left is not None:
            self._queues.running[left.dimension] -= 1
            self._queues.fill(left.dimension)
        if self._phase is not left and self._phase is not None:
            self._queues.fill(self._phase.dimension)

    def begin(self) -> None:
        """The phase's turn has come."""
        phase = self._phase
        assert phase is not None
        members = members_of(phase, self._queues.rank, self._group)
        self._ranks = members.tolist()
        self._steps = steps_of(phase.schedule)[self._ranks.index(self._queues.rank)]
        self._step = self._arrived = self._free = self._sent = 0
        if phase.window:
            self._queues.after(phase.delay_ns, self._go_on, phase.window)
        elif not self._steps or self._steps[0][0]:
            self._queues.after(phase.delay_ns, self._go)
        else:
            self._go(None)

    def _go(self, _: Any) -> None:
        """The messages of a step; a group of one rank has none."""
        if not self._steps:
            self.proceed()
            return
        out, into = self._steps[self._step]
        self._free = 0
        for k in range(max(len(out), len(into))):
            if k < len(out):
                self._send(*out[k])
            if k < len(into):
                self._receive(*into[k])
        if not into:
            self._next()

    def _go_on(self, more: int) -> None:
        """The next messages of a window in which there is room for so many more.

        The second step begins once all messages of the first have arrived, reduced or not.
        """
        phase = self._phase
        assert phase is not None
        self._free += more
        others = phase.schedule.ranks - 1
        count = others * len(self._steps)
        while self._free and self._sent < count:
            step, k = divmod(self._sent, others)
            if self._arrived < step * others:
                break
            out, into = self._steps[step]
            self._send(*out[k])
            self._receive(*into[k])
            self._sent += 1
            self._free -= 1
        if self._sent == count and self._free == phase.window:
            self.proceed()

    def _send(self, position: int, size: int) -> None:
        rank, peer = self._queues.rank, self._ranks[position]
        self._mailbox.send((self._tag, rank, peer, size), rank, peer, size)

    def _receive(self, position: int, size: int, reduced: int) -> None:
        key = (self._tag, self._ranks[position], self._queues.rank, size)
        self._mailbox.receive(key, lambda: self._take(reduced))

    def _take(self, reduced: int) -> None:
        phase = self._phase
        assert phase is not None
        if phase.window:
            reduced = phase.reduced[self._arrived]
        self._arrived += 1
        self._queues.after(phase.delay_ns, self._reduce, reduced)

    def _reduce(self, reduced: int) -> None:
        if reduced:  # it is read twice and written once
            self._queues.after(3 * int(reduced / self._rate * 1e9), self._have, None)
        else:
            self._have(None)

    def _have(self, _: Any) -> None:
        assert self._phase is not None
        if self._phase.window:
            self._go_on(1)
            return
        self._free += 1
        if self._free == len(self._steps[self._step][1]):
            self._next()

    def _next(self) -> None:
        self._step += 1
        if self._step < len(self._steps):
            self._go(None)
        else:
            self.proceed()
