"""GPU work that was ready but found the device full: it starts when work of another stream leaves."""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from traceloom.link.device_work import DeviceWork
from traceloom.link.edges import Edges

Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]

_LATE_NS = 100_000  # work that starts this long after all that is known to hold it back waits for something else
_AFTER_NS = 10_000  # it starts this soon after room was made
_TAIL_NS = 20_000  # or this long before the other ends: its last blocks leave room
BEGINNING = 0.05  # of the window: who was launched so early can be behind what was launched before
MUCH = 0.01  # of the window: time that nothing recorded explains is worth a word
_TAIL = 0.03  # or this share of the other's duration


class Late(NamedTuple):
    """Work that started long after all that is known to hold it back.

    Attributes:
        crowded: How many found the device full.
        unexplained: Numbers of the work that nothing recorded explains.
        waited_ns: How long each of those had been ready.
        before: Numbers of the first work of streams that what lies before the window must have held back.
        before_ns: How long each of those had been ready.
    """

    crowded: int
    unexplained: Ints
    waited_ns: Ints
    before: Ints
    before_ns: Ints


def occupancy_edges(edges: Edges, work: DeviceWork, kernel: Bools, work_node: Ints, times: Ints) -> Late:
    """From the end of long work of one stream to the start of work of another that had been ready for long.

    Kernels wait for kernels, copies for copies.

    Args:
        edges: All edges so far; those into work say when it was ready.
        work: GPU work.
        kernel: Which of it runs on multiprocessors (kernels and fills), not on copy engines.
        work_node: Node of each work.
        times: Measured time of each point, ns.

    Returns:
        What waited for room, and what waited for nothing that is known.
    """
    lanes, bounds = work.lanes()
    begun = times[2 * work_node]
    # of each point the latest time of what holds it back; the earliest time there is where nothing does
    held_until = np.full(times.size, times.min(initial=0))
    for source, target in zip(edges.source, edges.target, strict=True):
        np.maximum.at(held_until, target, times[source])
    ready = held_until[2 * work_node] + work.start - begun  # on the clock of the trace
    late = np.flatnonzero((work.start - ready >= _LATE_NS) & (work.call >= 0) & ~work.command)
    best = np.full(late.size, -1, dtype=np.int64)
    distance = np.full(late.size, np.iinfo(np.int64).max)
    start = work.start[late]
    for lane, (low, high) in zip(lanes.tolist(), pairwise(bounds.tolist()), strict=True):
        by_end = low + np.argsort(work.end[low:high], kind="stable")
        at = np.searchsorted(work.end[by_end], start - _AFTER_NS)
        other = by_end[np.minimum(at, by_end.size - 1)]
        length = work.end[other] - work.start[other]
        before = work.end[other] - start
        fits = (at < by_end.size) & (work.lane[late] != lane) & (work.device[other] == work.device[late])
        fits &= (kernel[other] == kernel[late]) & (work.start[other] < start) & (work.end[other] > ready[late])
        fits &= before <= np.maximum(_TAIL_NS, _TAIL * length)
        better = fits & (np.abs(before) < distance)
        best, distance = np.where(better, other, best), np.where(better, np.abs(before), distance)
    held = best >= 0
    edges.add("occupancy", "inferred", work_node[best[held]], work_node[late[held]], from_end=True, to_end=False)
    rest = late[~held]
    early = _held_from_before(work, rest, ready, int(times.min(initial=0)), int(times.max(initial=0)), begun)
    before, rest = rest[early], rest[~early]
    nothing = np.zeros(before.size, dtype=np.int64)
    edges.add("origin", "assumed", nothing, work_node[before], from_end=True, to_end=False, firm=True)
    waited = work.start - ready
    return Late(int(held.sum()), rest, waited[rest], before, waited[before])


def _held_from_before(  # noqa: PLR0917  (times of the work and of the window)
    work: DeviceWork, rest: Ints, ready: Ints, low: int, high: int, begun: Ints
) -> Bools:
    """Which work is the first of its stream, launched at the window's beginning, and ran after nothing recorded.

    While it was ready its device did nothing that is recorded: it was busy with what had been launched before.
    """
    _, bounds = work.lanes()
    launched_ns = work.asked[rest] - work.start[rest] + begun[rest]
    early = np.isin(rest, bounds[:-1]) & (launched_ns - low <= BEGINNING * (high - low))
    for device in np.unique(work.device).tolist():
        of_device = np.flatnonzero(work.device == device)
        ends = np.sort(work.end[of_device])
        on_device = work.device[rest] == device
        ended = np.searchsorted(ends, work.start[rest], side="right") - np.searchsorted(ends, ready[rest], side="right")
        running = np.searchsorted(np.sort(work.start[of_device]), work.start[rest]) - np.searchsorted(
            ends, work.start[rest], side="right"
        )
        early &= ~on_device | ((ended == 0) & (running == 0))
    return early
