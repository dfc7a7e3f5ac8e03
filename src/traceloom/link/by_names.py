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
    for lane, first_places in places[0].items():
        attempt = Fit([Placed(threads[0], lanes[lane], first_places.start, first_places.slack)], threads[0].size)
        taken = {lane}
        for thread, thread_places in zip(threads[1:], places[1:], strict=True):
            _add(
                attempt, thread, {at: in_lane for at, in_lane in thread_places.items() if at not in taken}, lanes, taken
            )
        if (attempt.ops, attempt.iterations) > (best.ops, best.iterations):
            best = attempt
    return best


def _places(thread: Line, lanes: list[Line]) -> dict[int, Places]:
    """Lane -> where the thread's ops stand in it: exactly with the ops around them, exactly, or nearly."""
    for nested in (True, False):
        exact = {
            at: Places(start, np.full(start.size, thread.size), 0)
            for at, lane in enumerate(lanes)
            if (
                start := occurrences(thread.nested if nested else thread.names, lane.nested if nested else lane.names)
            ).size
        }
        if exact:
            return exact
    near = {at: similar(thread.names, lane.names) for at, lane in enumerate(lanes)}
    most = max((int(candidate.votes.max(initial=0)) for candidate in near.values()), default=0)
    return {at: candidate for at, candidate in near.items() if most and candidate.votes.max(initial=0) >= 0.8 * most}


def _add(attempt: Fit, thread: Line, places: dict[int, Places], lanes: list[Line], taken: set[int]) -> None:
    """Add the lane in which a thread fits most of the iterations, if there is one."""
    most: tuple[Bools, Ints, int] | None = None
    for at, in_lane in places.items():
        good, chosen = _in_iteration(attempt.placed[0], thread, lanes[at], in_lane)
        if good.any() and (most is None or good.sum() > most[0].sum()):
            most = good, in_lane.start[chosen], at
    if most is None:
        return
    good, start, at = most
    attempt.placed = [Placed(placed.line, placed.lane, placed.start[good], placed.slack) for placed in attempt.placed]
    attempt.placed.append(Placed(thread, lanes[at], start[good], places[at].slack))
    attempt.ops += thread.size
    taken.add(at)


def _in_iteration(first: Placed, thread: Line, lane: Line, places: Places) -> tuple[Bools, Ints]:
    """For each iteration of the first thread: whether the other has a place in it, and which."""
    before = int(np.searchsorted(first.line.order, thread.order[0])) - 1
    low = _times(first.lane, first.start + before - first.slack)
    high = _times(first.lane, first.start + before + 1 + first.slack)
    early = _times(lane, places.start - places.slack)
    late = _times(lane, places.start + places.slack)
    last = places.start.size - 1
    if before < 0:
        chosen = np.searchsorted(early, high, side="right") - 1
        good = (chosen >= 0) | (early[0] <= high + _RACE_NS)
    else:
        chosen = np.searchsorted(late, low)
        bounded = before + 1 < first.line.size
        good = (chosen <= last) & ((early[np.minimum(chosen, last)] <= high + _RACE_NS) | (not bounded))
        # Only where none comes after, one that came a little before.
        near = ~good & (chosen > 0) & (late[np.maximum(chosen - 1, 0)] >= low - _RACE_NS)
        chosen = np.where(near, chosen - 1, chosen)
        good |= near
    chosen = np.clip(chosen, 0, places.start.size - 1)
    again = np.flatnonzero(chosen[1:] == chosen[:-1])  # one place cannot belong to two iterations
    good[again if before >= 0 else again + 1] = False
    return good, chosen


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
    host_rows, event_rows = [], []
    for placed in fitted.placed:
        start = int(placed.start[iteration])
        if placed.slack == 0:
            left, right = np.arange(placed.line.size), np.arange(start, start + placed.line.size)
        else:
            low = max(0, start - placed.slack)
            high = min(placed.lane.size, start + placed.line.size + 2 * placed.slack)
            shift = start - low if shifted else None
            left, right = align(placed.line.names, hashes(placed.lane.names.tokens[low:high]), shift)
            right = right + low
        host_rows.append(placed.line.row[left])
        event_rows.append(placed.lane.row[right])
    nothing = np.empty(0, dtype=np.int64)
    return np.concatenate([nothing, *host_rows]), np.concatenate([nothing, *event_rows])
