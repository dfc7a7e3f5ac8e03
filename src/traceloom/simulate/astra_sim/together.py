"""A collective as a whole, where its messages meet no others: a recurrence over the rounds, for all ranks at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from traceloom.array_types import Bools, Ints
from traceloom.schedules import Round, Schedule
from traceloom.simulate.astra_sim.clock import Clock, Event, whole_ns
from traceloom.simulate.astra_sim.collectives import CollectivePhase
from traceloom.simulate.astra_sim.streams import Mailbox, RankQueues, Stream

# (source, target, bytes, sent at) -> there at, all in the order of the messages
Transmit = Callable[[Ints, Ints, Ints, Ints], Ints]


class NoRecurrenceError(Exception):
    """The order of events decides: rounds for all ranks at once cannot say it."""


def ends_by_message(
    phases: Sequence[CollectivePhase], group: tuple[int, ...], begin_ns: Ints, memory_rate: float, transmit: Transmit
) -> Ints:
    """When each rank is done with all chunks of a collective, message by message; arguments as of `ends`."""
    clock = Clock()
    end = begin_ns.copy()

    def send(source: int, target: int, size: int, arrive: Event, what: Any) -> None:
        (there,) = transmit(*(np.array([k]) for k in (source, target, size, clock.now))).tolist()
        clock.at(there, arrive, what)

    mailbox = Mailbox(clock, send)

    def begin(position: int) -> None:
        queues = RankQueues(group[position], clock, 1)
        left = [len(phases)]

        def done() -> None:
            left[0] -= 1
            if not left[0]:
                end[position] = clock.now

        for number, phase in enumerate(phases):
            Stream(queues, mailbox, number, group, [phase], memory_rate=memory_rate, done=done).proceed()

    for position, time in enumerate(begin_ns.tolist()):
        clock.at(time, begin, position)
    clock.run()
    return end


def ends(phase: CollectivePhase, members: Ints, begin_ns: Ints, memory_rate: float, transmit: Transmit) -> Ints:
    """When each rank is done with one phase of one chunk.

    Args:
        phase: What is done.
        members: The rank at each position.
        begin_ns: When each position begins; shape (ranks,).
        memory_rate: Bytes per second at which a rank reads or writes.
        transmit: When messages are there; called once per round.

    Raises:
        NoRecurrenceError: It must be done message by message.
    """
    schedule, delay = phase.schedule, phase.delay_ns
    ready = begin_ns + np.where(_sends_first(schedule), delay, 0)
    if phase.window:
        return _all_to_all_twice(phase, members, ready, memory_rate, transmit)
    for part in schedule.rounds:
        there = transmit(members[part.source], members[part.target], part.bytes, ready[part.source])
        have = np.maximum(there, ready[part.target]) + delay + _reduction(part, memory_rate)
        if len(part.target) == schedule.ranks and (np.bincount(part.target, minlength=schedule.ranks) == 1).all():
            after = np.empty_like(ready)
            after[part.target] = have
        else:
            after = ready.copy()
            np.maximum.at(after, part.target, have)
        ready = after
    return ready


@lru_cache(maxsize=64)
def _sends_first(schedule: Schedule) -> Bools:
    """Places that send in the first round in which they have a part."""
    first = np.full(schedule.ranks, len(schedule.rounds))
    sends = first.copy()
    for number, part in enumerate(schedule.rounds):
        np.minimum.at(sends, part.source, number)
        np.minimum.at(first, part.source, number)
        np.minimum.at(first, part.target, number)
    at_once: Bools = sends == first
    return at_once


def _reduction(part: Round, memory_rate: float) -> Ints:
    """What reducing takes: the message is read twice and written once."""
    reading = whole_ns(part.reduced / memory_rate * 1e9)
    return 3 * reading


def _all_to_all_twice(
    phase: CollectivePhase, members: Ints, ready: Ints, memory_rate: float, transmit: Transmit
) -> Ints:
    """Two rounds of everybody to everybody; the second one begins once all of the first has arrived."""
    ranks = phase.schedule.ranks
    first, second = phase.schedule.rounds
    near, far = (column.reshape(ranks - 1, ranks) for column in (first.source, first.target))  # by distance
    there = transmit(members[first.source], members[first.target], first.bytes, ready[first.source])
    arrived = np.empty((ranks - 1, ranks), np.int64)
    np.put_along_axis(arrived, far, np.maximum(there, ready[first.target]).reshape(near.shape), axis=1)
    have = np.sort(arrived, axis=0) + phase.delay_ns + _reduction(first, memory_rate)[0]
    last = arrived.max(axis=0)
    begun = np.where(have >= last, have, np.iinfo(np.int64).max).min(axis=0)
    sent = np.maximum(have, begun)  # the k-th message of each position
    source_sent = np.take_along_axis(sent, near, axis=1).ravel()
    there = transmit(members[second.source], members[second.target], second.bytes, source_sent)
    posted = np.take_along_axis(sent, far, axis=1).ravel()
    done = np.maximum(there, posted) + phase.delay_ns + _reduction(second, memory_rate)
    if (have == last).any() or (done < have[-1][second.target]).any():
        raise NoRecurrenceError  # what comes first at one time matters, or what comes back early makes room to send
    end: Ints = have[-1].copy()
    np.maximum.at(end, second.target, done)
    return end
