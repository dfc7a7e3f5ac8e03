"""Host ops to device events by the order of their names: for each thread its lane, all threads in one iteration."""

from __future__ import annotations

import numpy as np
from msgspec import Struct, field
from numpy.typing import NDArray

from traceloom.read.alignment import Places, align, hashes, occurrences, similar
from traceloom.read.sequences import Line

Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]

# An op gets its id and its start time one after the other; in between another thread may get both.
_RACE_NS = 200_000
_LANES = 64  # tried for each thread: those with most ops


class Placed(Struct, frozen=True):
    """Where the ops of one host thread stand.

    Attributes:
        line: The thread.
        lane: The lane.
        start: Where in the lane they begin, for each iteration that fits.
        slack: How far off that may be; 0: exactly there, one after the other.
    """

    line: Line
    lane: Line
    start: Ints
    slack: int


class Fit(Struct):
    """A choice of lanes for threads.

    Attributes:
        placed: Of each thread that has a place.
        ops: How many ops these threads hold.
    """

    placed: list[Placed] = field(default_factory=list)
    ops: int = 0

    @property
    def iterations(self) -> int:
        """In how many iterations all of them fit."""
        return self.placed[0].start.size if self.placed else 0


def fit(threads: list[Line], lanes: list[Line]) -> Fit:
    """Choose a lane for every thread, so that as many ops as possible fit in the same iterations.

    The thread with most ops comes first. The ids of the host trace count ops of all threads in the order in which they
    began, so they say between which of its ops each other thread begins.

    Args:
        threads: Lines of the host trace, longest first.
        lanes: Lines of the device trace.
    """
    if not threads:
        return Fit()
    places = [_places(thread, lanes[:_LANES]) for thread in threads]
    best = Fit()
    for lane, found in places[0].items():
        here = Fit([Placed(threads[0], lanes[lane], found.start, found.slack)], threads[0].size)
        taken = {lane}
        for thread, mine in zip(threads[1:], places[1:], strict=True):
            _add(here, thread, {at: one for at, one in mine.items() if at not in taken}, lanes, taken)
        if (here.ops, here.iterations) > (best.ops, best.iterations):
            best = here
    return best


def _places(thread: Line, lanes: list[Line]) -> dict[int, Places]:
    """Lane -> where the thread's ops stand in it: exactly with the ops around them, exactly, or nearly."""
    for nested in (True, False):
        found = {
            at: Places(start, np.full(start.size, thread.size), 0)
            for at, lane in enumerate(lanes)
            if (
                start := occurrences(thread.nested if nested else thread.names, lane.nested if nested else lane.names)
            ).size
        }
        if found:
            return found
    near = {at: similar(thread.names, lane.names) for at, lane in enumerate(lanes)}
    most = max((int(place.votes.max(initial=0)) for place in near.values()), default=0)
    return {at: place for at, place in near.items() if most and place.votes.max(initial=0) >= 0.8 * most}


def _add(here: Fit, thread: Line, places: dict[int, Places], lanes: list[Line], taken: set[int]) -> None:
    """Add the lane in which a thread fits most of the iterations, if there is one."""
    most: tuple[Bools, Ints, int] | None = None
    for at, found in places.items():
        good, which = _in_iteration(here.placed[0], thread, lanes[at], found)
        if good.any() and (most is None or good.sum() > most[0].sum()):
            most = good, found.start[which], at
    if most is None:
        return
    good, start, at = most
    here.placed = [Placed(one.line, one.lane, one.start[good], one.slack) for one in here.placed]
    here.placed.append(Placed(thread, lanes[at], start[good], places[at].slack))
    here.ops += thread.size
    taken.add(at)


def _in_iteration(first: Placed, thread: Line, lane: Line, found: Places) -> tuple[Bools, Ints]:
    """For each iteration of the first thread: does the other have a place in it, and which."""
    before = int(np.searchsorted(first.line.order, thread.order[0])) - 1
    low = _times(first.lane, first.start + before - first.slack)
    high = _times(first.lane, first.start + before + 1 + first.slack)
    early = _times(lane, found.start - found.slack)
    late = _times(lane, found.start + found.slack)
    last = found.start.size - 1
    if before < 0:
        which = np.searchsorted(early, high, side="right") - 1
        good = (which >= 0) | (early[0] <= high + _RACE_NS)
    else:
        which = np.searchsorted(late, low)
        bounded = before + 1 < first.line.size
        good = (which <= last) & ((early[np.minimum(which, last)] <= high + _RACE_NS) | (not bounded))
        # Only where none comes after, one that came a little before.
        near = ~good & (which > 0) & (late[np.maximum(which - 1, 0)] >= low - _RACE_NS)
        which = np.where(near, which - 1, which)
        good |= near
    which = np.clip(which, 0, found.start.size - 1)
    again = np.flatnonzero(which[1:] == which[:-1])  # one place cannot belong to two iterations
    good[again if before >= 0 else again + 1] = False
    return good, which


def _times(lane: Line, at: Ints) -> Ints:
    return lane.order[np.clip(at, 0, lane.size - 1)]


def pairs(fitted: Fit, iteration: int = 0, *, shifted: bool = True) -> tuple[Ints, Ints]:
    """Rows of host ops and of events that belong together, in one of the iterations that fit.

    Args:
        fitted: Lanes of the threads.
        iteration: Which of those that fit.
        shifted: Trust that most ops stand as far apart in both as the place says. Where a short pattern repeats and ops
            are missing, that pairs repetitions wrongly.
    """
    mine, theirs = [], []
    for one in fitted.placed:
        start = int(one.start[iteration])
        if one.slack == 0:
            left, right = np.arange(one.line.size), np.arange(start, start + one.line.size)
        else:
            low = max(0, start - one.slack)
            high = min(one.lane.size, start + one.line.size + 2 * one.slack)
            shift = start - low if shifted else None
            left, right = align(one.line.names, hashes(one.lane.names.tokens[low:high]), shift)
            right = right + low
        mine.append(one.line.row[left])
        theirs.append(one.lane.row[right])
    nothing = np.empty(0, dtype=np.int64)
    return np.concatenate([nothing, *mine]), np.concatenate([nothing, *theirs])
