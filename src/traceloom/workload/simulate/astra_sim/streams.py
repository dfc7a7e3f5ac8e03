"""Running collectives message by message, and for all ranks at once where that is exact.

If all ranks of a ring, a switch or a full mesh start at once, and each sends to the ranks at the
same distances, every link of one kind sees the same messages at the same times. A message that one
rank sends to a distance then also stands for the one that arrives at it from the rank at that
distance before it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

import numpy as np

from traceloom.trace.array_types import Bools, Ints
from traceloom.workload.collective_algorithms import Round, Schedule
from traceloom.workload.simulate.astra_sim.collectives import (
    AnalyticalNetwork,
    Arrive,
    Clock,
    CollectivePhase,
    Event,
    Link,
    Links,
    LostOrderError,
    Travel,
    convert_to_ns,
    get_members,
)

# One position in one round: messages out (position, bytes) and in (position, bytes, reduced
# bytes), in order.
Step = tuple[list[tuple[int, int]], list[tuple[int, int, int]]]


@lru_cache(maxsize=64)
def build_steps(schedule: Schedule) -> list[list[Step]]:
    """Returns the rounds of each position in which it takes part; equal rounds are one object."""
    steps: list[list[Step]] = [[] for _ in range(schedule.ranks)]
    steps_by_round: dict[int, list[tuple[int, Step]]] = {}
    for part in schedule.rounds:
        if id(part) not in steps_by_round:
            steps_by_round[id(part)] = _split_round(part, schedule.ranks)
        for position, step in steps_by_round[id(part)]:
            steps[position].append(step)
    return steps


def _split_round(part: Round, ranks: int) -> list[tuple[int, Step]]:
    source_order, target_order = (
        np.argsort(endpoints, kind="stable") for endpoints in (part.source, part.target)
    )
    out = list(
        zip(part.target[source_order].tolist(), part.bytes[source_order].tolist(), strict=True)
    )
    incoming = list(
        zip(
            *(column[target_order].tolist() for column in (part.source, part.bytes, part.reduced)),
            strict=True,
        )
    )
    source_offsets, target_offsets = (
        np.searchsorted(endpoints, np.arange(ranks + 1)).tolist()
        for endpoints in (part.source[source_order], part.target[target_order])
    )
    return [
        (
            position,
            (
                out[source_offsets[position] : source_offsets[position + 1]],
                incoming[target_offsets[position] : target_offsets[position + 1]],
            ),
        )
        for position in range(ranks)
        if source_offsets[position] < source_offsets[position + 1]
        or target_offsets[position] < target_offsets[position + 1]
    ]


class Mailbox:
    """Messages in flight or arrived, and pending receives; the k-th send with a key matches the
    k-th receive.

    Args:
        clock: The event queue.
        transmit: Sends a message: (source, target, bytes, arrive, payload).
    """

    def __init__(self, clock: Clock, transmit: Callable[[int, int, int, Event, Any], None]) -> None:
        self._clock, self._transmit = clock, transmit
        self._arrived: dict[Any, int] = {}
        self._awaited: dict[Any, list[Callable[[], None]]] = {}

    def send(  # noqa: PLR0917  (a message is identified by its ends and size)
        self,
        key: Any,
        source: int,
        target: int,
        size: int,
        sent: Callable[[], None] | None = None,
        took_ns: int | None = None,
    ) -> None:
        """Sends now; `sent` is called on arrival, whether or not it is received; `took_ns` bypasses
        the network.
        """
        if took_ns is None:
            self._transmit(source, target, size, self._arrive, (key, sent))
        else:
            self._clock.at(self._clock.now + took_ns, self._arrive, (key, sent))

    def receive(self, key: Any, received: Callable[[], None]) -> None:
        """Waits for a message; if it has already arrived, `received` is still called as a later
        event of the current time.
        """
        arrived = self._arrived.pop(key, 0)
        if arrived:
            if arrived > 1:
                self._arrived[key] = arrived - 1
            self._clock.at(self._clock.now, lambda _: received(), None)
        else:
            self._awaited.setdefault(key, []).append(received)

    def _arrive(self, message: tuple[Any, Callable[[], None] | None]) -> None:
        key, sent = message
        if sent:
            sent()
        awaited = self._awaited.pop(key, None)
        if awaited is None:
            self._arrived[key] = self._arrived.get(key, 0) + 1
            return
        if len(awaited) > 1:
            self._awaited[key] = awaited[1:]
        awaited[0]()


@dataclass(slots=True)
class RankQueues:
    """The queues of one rank, and its events: events of one time run together, in order.

    Attributes:
        rank: The rank.
        clock: The event queue.
        width: Max chunks in flight per dimension.
        waiting: Chunks by dimension, those in flight first.
        running: Number of chunks in flight by dimension.
    """

    rank: int
    clock: Clock
    width: int
    waiting: dict[int, list[CollectiveStream]] = field(default_factory=dict)
    running: dict[int, int] = field(default_factory=dict)
    _events: dict[int, list[tuple[Event, Any]]] = field(default_factory=dict)

    def after(self, delay_ns: int, event: Event, payload: Any = None) -> None:
        """Calls `event(payload)` after a delay."""
        time = self.clock.now + delay_ns
        events = self._events.get(time)
        if events is None:
            self._events[time] = [(event, payload)]
            self.clock.at(time, self._run)
        else:
            events.append((event, payload))

    def _run(self, _: Any) -> None:
        now = self.clock.now
        for event, payload in self._events[now]:
            event(payload)
        del self._events[now]

    def drop(self, tag: Any) -> None:
        """Forgets the chunks of a collective, none of which has sent a message yet."""
        for dimension, streams in self.waiting.items():
            for stream in streams:
                stream.dropped = stream.tag[:-1] == tag
            kept = self.waiting[dimension] = [stream for stream in streams if not stream.dropped]
            self.running[dimension] = min(self.running[dimension], len(kept))

    def fill(self, dimension: int) -> None:
        """Starts chunks up to the limit in flight."""
        queue = self.waiting.get(dimension, [])
        while (running := self.running.get(dimension, 0)) < min(self.width, len(queue)):
            self.running[dimension] = running + 1
            queue[running].begin()


class CollectiveStream:
    """One rank's part of one chunk.

    Args:
        queues: Queues of the rank.
        mailbox: Transmits the messages.
        tag: Identifies the chunk; equal on all its ranks.
        group: Ranks of the collective.
        phases: Phases to run.
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
        self._queues, self._mailbox, self.tag, self._group = queues, mailbox, tag, group
        self._phases, self._rate, self._done = deque(phases), memory_rate, done
        self._phase: CollectivePhase | None = None
        self._steps: list[Step] = []
        self.dropped = False  # whether something else carries it out

    def proceed(self) -> None:
        """Leaves the current phase, if any, and queues for the next one."""
        previous_phase = self._phase
        if not self._phases:
            self._done()
        if previous_phase is not None:
            self._queues.waiting[previous_phase.dimension].remove(self)
        if self._phases:
            phase = self._phase = self._phases.popleft()
            self._queues.waiting.setdefault(phase.dimension, []).append(self)
        if previous_phase is not None:
            self._queues.running[previous_phase.dimension] -= 1
            self._queues.fill(previous_phase.dimension)
        if self._phase is not previous_phase and self._phase is not None:
            self._queues.fill(self._phase.dimension)

    def begin(self) -> None:
        """Starts the phase when its turn in the queue has come."""
        phase = self._phase
        assert phase is not None
        self._ranks = get_members(phase, self._queues.rank, self._group).tolist()
        self._steps = build_steps(phase.schedule)[self._ranks.index(self._queues.rank)]
        self._step = self._arrived = self._free = self._sent = 0
        if phase.window:
            self._queues.after(phase.delay_ns, self._go_on, phase.window)
        elif not self._steps or self._steps[0][0]:
            self._queues.after(phase.delay_ns, self._go)
        else:
            self._go(None)

    def _go(self, _: Any) -> None:
        """Starts the messages of a step; a group of one rank has none."""
        if self.dropped:
            return
        if not self._steps:
            self.proceed()
            return
        out, incoming = self._steps[self._step]
        self._free = 0
        for k in range(max(len(out), len(incoming))):
            if k < len(out):
                self._send(*out[k])
            if k < len(incoming):
                self._receive(*incoming[k])
        if not incoming:
            self._next()

    def _go_on(self, free_slots: int) -> None:
        """Sends the next messages of a window with `free_slots` free slots.

        The second step starts once all messages of the first have arrived, reduced or not.
        """
        phase = self._phase
        assert phase is not None
        if self.dropped:
            return
        self._free += free_slots
        peer_count = phase.schedule.ranks - 1
        count = peer_count * len(self._steps)
        while self._free and self._sent < count:
            step, k = divmod(self._sent, peer_count)
            if self._arrived < step * peer_count:
                break
            out, incoming = self._steps[step]
            self._send(*out[k])
            self._receive(*incoming[k])
            self._sent += 1
            self._free -= 1
        if self._sent == count and self._free == phase.window:
            self.proceed()

    def _send(self, position: int, size: int) -> None:
        rank, peer = self._queues.rank, self._ranks[position]
        self._mailbox.send((self.tag, rank, peer, size), rank, peer, size)

    def _receive(self, position: int, size: int, reduced: int) -> None:
        key = (self.tag, self._ranks[position], self._queues.rank, size)
        self._mailbox.receive(key, lambda: self._take(reduced))

    def _take(self, reduced: int) -> None:
        phase = self._phase
        assert phase is not None
        if phase.window:
            reduced = phase.reduced[self._arrived]
        self._arrived += 1
        self._queues.after(phase.delay_ns, self._reduce, reduced)

    def _reduce(self, reduced: int) -> None:
        if reduced:  # two reads and one write
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


# (source, target, bytes, time sent) -> time of arrival, all in the order of the messages
Transmit = Callable[[Ints, Ints, Ints, Ints], Ints]


def compute_phase_ends(
    phase: CollectivePhase, members: Ints, begin_ns: Ints, memory_rate: float, transmit: Transmit
) -> Ints:
    """Returns the end of each rank for one phase of one chunk.

    Args:
        phase: The phase.
        members: The rank at each position.
        begin_ns: Start of each position; shape (ranks,).
        memory_rate: Bytes per second at which a rank reads or writes.
        transmit: Returns arrival times; called once per round.

    Raises:
        LostOrderError: It must be simulated message by message.
    """
    schedule, delay = phase.schedule, phase.delay_ns
    ready = begin_ns + np.where(_find_first_senders(schedule), delay, 0)
    if phase.window:
        return _compute_all_to_all_ends(phase, members, ready, memory_rate, transmit)
    for part, permutes, reduction_ns in _list_rounds(schedule, memory_rate):
        arrival_ns = transmit(
            members[part.source], members[part.target], part.bytes, ready[part.source]
        )
        have = np.maximum(arrival_ns, ready[part.target]) + (delay + reduction_ns)
        if permutes:
            after = np.empty_like(ready)
            after[part.target] = have
        else:
            after = ready.copy()
            np.maximum.at(after, part.target, have)
        ready = after
    return ready


@lru_cache(maxsize=64)
def _list_rounds(schedule: Schedule, memory_rate: float) -> list[tuple[Round, bool, Ints]]:
    """Returns each round, whether every rank receives one message in it, and the time of its
    reductions.
    """
    listed: dict[int, tuple[Round, bool, Ints]] = {}
    for part in schedule.rounds:
        if id(part) not in listed:
            listed[id(part)] = (
                part,
                bool((np.bincount(part.target, minlength=schedule.ranks) == 1).all()),
                _compute_reduction_ns(part, memory_rate),
            )
    return [listed[id(part)] for part in schedule.rounds]


@lru_cache(maxsize=64)
def is_permuting(schedule: Schedule) -> bool:
    """Returns whether no rank sends or receives two messages in one round."""
    return all(
        len(np.unique(ends)) == len(ends)
        for part in {id(part): part for part in schedule.rounds}.values()
        for ends in (part.source, part.target)
    )


def depends_on_all(schedule: Schedule) -> bool:
    """Returns whether the end of each rank depends on the starts of all: not so after halving and
    doubling among other than 2^n ranks.
    """
    steps = schedule.ranks.bit_length() - 1
    return not schedule.ranks & (schedule.ranks - 1) or schedule.messages != schedule.ranks * steps


@lru_cache(maxsize=64)
def _find_first_senders(schedule: Schedule) -> Bools:
    """Returns which positions send in the first round that they take part in."""
    first = np.full(schedule.ranks, len(schedule.rounds))
    sends = first.copy()
    for number, part in enumerate(schedule.rounds):
        np.minimum.at(sends, part.source, number)
        np.minimum.at(first, part.source, number)
        np.minimum.at(first, part.target, number)
    at_once: Bools = sends == first
    return at_once


def _compute_reduction_ns(part: Round, memory_rate: float) -> Ints:
    """Returns the time of reductions: a message is read twice and written once."""
    return 3 * convert_to_ns(part.reduced / memory_rate * 1e9)


def _compute_all_to_all_ends(
    phase: CollectivePhase, members: Ints, ready: Ints, memory_rate: float, transmit: Transmit
) -> Ints:
    """Two all-to-all rounds; the second one starts once all of the first has arrived."""
    ranks = phase.schedule.ranks
    first, second = phase.schedule.rounds
    senders, receivers = (
        column.reshape(ranks - 1, ranks) for column in (first.source, first.target)
    )  # by distance
    arrival_ns = transmit(
        members[first.source], members[first.target], first.bytes, ready[first.source]
    )
    arrived = np.empty((ranks - 1, ranks), np.int64)
    np.put_along_axis(
        arrived,
        receivers,
        np.maximum(arrival_ns, ready[first.target]).reshape(senders.shape),
        axis=1,
    )
    have = np.sort(arrived, axis=0) + phase.delay_ns + _compute_reduction_ns(first, memory_rate)[0]
    last = arrived.max(axis=0)
    begun = np.where(have >= last, have, np.iinfo(np.int64).max).min(axis=0)
    sent = np.maximum(have, begun)  # of the k-th message of each position
    source_sent = np.take_along_axis(sent, senders, axis=1).ravel()
    arrival_ns = transmit(members[second.source], members[second.target], second.bytes, source_sent)
    posted = np.take_along_axis(sent, receivers, axis=1).ravel()
    done = (
        np.maximum(arrival_ns, posted) + phase.delay_ns + _compute_reduction_ns(second, memory_rate)
    )
    if (have == last).any() or (done < have[-1][second.target]).any():
        raise LostOrderError  # the order at equal times matters, or an early arrival frees a slot
    end: Ints = have[-1].copy()
    np.maximum.at(end, second.target, done)
    return end


@lru_cache(maxsize=64)
def is_rotation(schedule: Schedule) -> bool:
    """Returns whether all ranks send the same messages, each to the ranks at the same distances."""
    seen_rounds: set[int] = set()
    for part in schedule.rounds:
        if id(part) in seen_rounds:
            continue
        seen_rounds.add(id(part))
        if len(part.source) % schedule.ranks:
            return False
        source_order = np.argsort(part.source, kind="stable").reshape(schedule.ranks, -1)
        if (part.source[source_order] != np.arange(schedule.ranks)[:, np.newaxis]).any():
            return False
        for column in ((part.target - part.source) % schedule.ranks, part.bytes, part.reduced):
            rows = column[source_order]
            if (rows != rows[0]).any():
                return False
    return True


@lru_cache(maxsize=64)
def _select_first_position(schedule: Schedule) -> Schedule:
    """Returns the messages of position 0; equal rounds stay one object."""
    selected_rounds = {}
    for part in schedule.rounds:
        if id(part) not in selected_rounds:
            is_first = (part.source == 0) | (part.target == 0)
            selected_rounds[id(part)] = Round(
                part.source[is_first],
                part.target[is_first],
                part.bytes[is_first],
                part.reduced[is_first],
            )
    return Schedule(schedule.ranks, tuple(selected_rounds[id(part)] for part in schedule.rounds))


class _RotatingClock(Clock):
    """The events of one rank, which stand for those of all ranks.

    Attributes:
        first: The rank whose event is the first one among equal events of all ranks.
    """

    first = 0

    def at(self, time: int, event: Event, payload: Any = None) -> None:
        super().at(time, self._run_event, (self.first, event, payload))

    def _run_event(self, planned: tuple[int, Event, Any]) -> None:
        self.first, event, payload = planned
        event(payload)


class _OneRank(Links):
    """The links of rank 0, each of which represents all links of its kind."""

    _clock: _RotatingClock

    def _there(self, travel: Travel) -> None:
        # The event passes to the owner of the next link, or to the receiver.
        target = travel.links[travel.next].ends[1]
        (_, backwards, _, _), _ = travel.what
        self._clock.first += -backwards if target == self._fabric.sizes[0] else target
        super()._there(travel)

    def route(self, source: int, target: int) -> list[Link]:
        """Returns the corresponding links of rank 0."""
        count = self._fabric.sizes[0]
        return [
            (0, (b - a) % count) if max(a, b) < count else (0, count) if b == count else (count, 0)
            for a, b in super().route(source, target)
        ]


def simulate_synchronous(
    fabric: AnalyticalNetwork, chunks: list[list[CollectivePhase]], memory_rate: float
) -> tuple[int, int, dict[Link, list[int]]]:
    """Returns how long a collective takes that all ranks start at once, and what follows from it.

    Args:
        fabric: One dimension.
        chunks: The phases of each chunk.
        memory_rate: Bytes per second at which a rank reads or writes.

    Returns:
        Time in ns; how many ranks after the first to start the first one ends, at the same time;
        bytes, busy and waiting time of each link.
    """
    clock, ranks = _RotatingClock(), fabric.sizes[0]
    links = _OneRank(fabric, clock)

    def transmit(source: int, target: int, size: int, arrive: Arrive, payload: Any) -> None:
        (tag, _, _, _), sent = payload
        links.send(
            source, target, size, arrive, ((tag, (source - target) % ranks, source, size), sent)
        )

    queues = RankQueues(0, clock, 1)
    mailbox = Mailbox(clock, transmit)

    for number, chunk_phases in enumerate(chunks):
        phases = [
            replace(phase, schedule=_select_first_position(phase.schedule))
            for phase in chunk_phases
        ]
        CollectiveStream(
            queues,
            mailbox,
            number,
            tuple(range(ranks)),
            phases,
            memory_rate=memory_rate,
            done=lambda: None,
        ).proceed()
    clock.run()  # the last event ends the last chunk
    usage = {
        ((a + shift) % ranks if a < ranks else a, (b + shift) % ranks if b < ranks else b): values
        for (a, b), values in links.usage.items()
        for shift in range(ranks)
    }
    return clock.now, clock.first % ranks, usage
