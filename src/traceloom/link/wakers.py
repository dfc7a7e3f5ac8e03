"""Who wakes a thread that was idle: a thread with nothing to do waits for that, however long it takes."""

from __future__ import annotations

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from traceloom.link.calls import HOST_BACKENDS
from traceloom.link.cpu_time import CpuTime
from traceloom.link.host_tree import HostTree
from traceloom.link.segments import Segments

Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]

IDLE_NS = 100_000  # a thread that has had nothing to do for this long was given something
_JUST_NS = 1_000_000  # by what ended no longer ago than this, for all that is known
_COLLECTIVE = r"^c10d::"


class Wakers(Struct, frozen=True):
    """Work that begins after an idle time, with what another thread did when it was handed over.

    Attributes:
        head: Segments that begin such work.
        source: For each the segment of another thread that hands over; -1 where nothing tells.
        cut_ns: When it does, inside a quiet time of that thread; -1 where at its end.
        certain: Whether that is more than a guess.
    """

    head: Ints
    source: Ints
    cut_ns: Ints
    certain: Bools

    def of(self, chosen: Bools) -> Wakers:
        """Some of them."""
        return Wakers(self.head[chosen], self.source[chosen], self.cut_ns[chosen], self.certain[chosen])


def wakers(host: Segments, tree: HostTree, quiet: Bools, has_waker: Ints, main: int, cpu: CpuTime) -> Wakers:  # noqa: PLR0917
    """Find who woke the threads beside the main one.

    Communication was handed over by the call of the framework that began last before it. All else by what ended last
    on another thread; where that is long ago, by whoever did that, at that moment: it may have handed over in Python,
    which nothing records. What ended before the idle time began woke nobody.

    Args:
        host: All segments.
        tree: Their events.
        quiet: Segments in which nothing says what the thread does, shape (segments,).
        has_waker: Segments whose waker is known already.
        main: The main thread.
        cpu: How long threads ran: one that ran all the time was not idle.
    """
    gap = (host.owner < 0) & (host.end - host.start >= IDLE_NS)
    gap &= ~cpu.worked(host.lane, host.start, host.end)
    first = np.flatnonzero(np.append(True, host.lane[1:] != host.lane[:-1]))
    after = np.flatnonzero(gap[:-1] & (host.lane[1:] == host.lane[:-1])) + 1
    head = np.setdiff1d(np.concatenate([first, after]), has_waker)
    head = head[host.lane[head] != main]
    begins = np.zeros(host.owner.size, dtype=np.bool_)
    begins[after] = True
    since = np.where(begins[head], host.start[np.maximum(head - 1, 0)], np.iinfo(np.int64).min)
    called = _called(host, tree, head, since)
    ended = _ended(host, tree, head, since)
    just = ended >= 0
    just[just] = host.start[head[just]] - tree.end[ended[just]] <= _JUST_NS
    event = np.where(called >= 0, called, ended)
    source = np.where(event >= 0, host.last[np.maximum(event, 0)], -1)
    certain = (called >= 0) | just
    inside = _quiet_then(host, quiet, np.where(certain | (event < 0), -1, tree.lane[np.maximum(event, 0)]), head)
    cut = np.where(inside >= 0, host.start[head], -1)
    woken = Wakers(head, np.where(inside >= 0, inside, source), cut, certain)
    return woken.of(begins[head] | certain)  # what begins a thread for the first time may have begun by itself


def calls_for(tree: HostTree, talk: Ints) -> Ints:
    """The framework's call on another thread that began last before each communication; -1 where there is none."""
    calls = np.flatnonzero(tree.named(_COLLECTIVE) & ~tree.call)
    if not calls.size:
        return np.full(talk.size, -1, dtype=np.int64)
    calls = calls[np.argsort(tree.start[calls], kind="stable")]
    at = np.searchsorted(tree.start[calls], tree.start[talk], side="right") - 1
    event = calls[np.maximum(at, 0)]
    return np.where((at >= 0) & (tree.lane[event] != tree.lane[talk]), event, -1)


def _called(host: Segments, tree: HostTree, head: Ints, since: Ints) -> Ints:
    """For work that is communication, the call that asked for it, after the idle time had begun; else -1."""
    callers = np.full(head.size, -1, dtype=np.int64)
    owner = host.owner[head]
    talk = np.flatnonzero((owner >= 0) & tree.named(HOST_BACKENDS)[np.maximum(owner, 0)])
    event = calls_for(tree, owner[talk])
    fits = (event >= 0) & (tree.end[np.maximum(event, 0)] >= since[talk])
    callers[talk[fits]] = event[fits]
    return callers


def _ended(host: Segments, tree: HostTree, head: Ints, since: Ints) -> Ints:
    """The event of another thread that ended last before each head, after its idle time had begun; else -1."""
    ends = np.argsort(tree.end, kind="stable")
    lane, times = tree.lane[ends], tree.end[ends]
    # the last event of another thread than the one that ended last: before the run of that thread's events
    opens = np.append(True, lane[1:] != lane[:-1])[: lane.size]
    before_run = np.maximum.accumulate(np.where(opens, np.arange(lane.size), 0)) - 1
    at = np.searchsorted(times, host.start[head], side="right") - 1
    own = (at >= 0) & (lane[at] == host.lane[head])
    at = np.where(own, before_run[at], at)
    latest = np.where(at >= 0, ends[at], -1)
    latest[(latest >= 0) & (tree.end[latest] < since)] = -1
    return latest


def _quiet_then(host: Segments, quiet: Bools, lane: Ints, head: Ints) -> Ints:
    """The quiet segment of a thread (-1: no thread) within which each head begins; -1 where there is none."""
    matches = np.full(head.size, -1, dtype=np.int64)
    for number in np.unique(lane[lane >= 0]).tolist():
        segments = np.flatnonzero(host.lane == number)
        heads = np.flatnonzero(lane == number)
        time = host.start[head[heads]]
        at = segments[np.maximum(np.searchsorted(host.start[segments], time, side="right") - 1, 0)]
        inside = quiet[at] & (host.start[at] < time) & (time < host.end[at])
        matches[heads[inside]] = at[inside]
    return matches
