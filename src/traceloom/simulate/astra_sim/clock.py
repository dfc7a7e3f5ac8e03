"""The order of events: by time, and those of one time in the order in which they were asked for."""

from __future__ import annotations

from collections.abc import Callable
from heapq import heappop, heappush
from typing import Any

import numpy as np

from traceloom.array_types import Floats, Ints
from traceloom.errors import UsageError
from traceloom.retime.plan import LONGEST_NS

Event = Callable[[Any], None]


def too_long() -> UsageError:
    """The error for what takes longer than anybody can wait."""
    return UsageError(
        "these times add up to more than 100 days",
        slug="times-too-long",
        hint="bandwidths are in 2^30 B/s, latencies in ns, durations in microseconds",
    )


def whole_ns(times: Floats) -> Ints:
    """Times in whole ns, rounded down.

    Raises:
        UsageError: slug `times-too-long`.
    """
    if times.size and not times.max() < LONGEST_NS:
        raise too_long()
    return times.astype(np.int64)


class Clock:
    """Events to come.

    Attributes:
        now: Time of the event that is happening, in ns.
    """

    def __init__(self) -> None:
        self.now = 0
        self._times: list[int] = []
        self._events: dict[int, list[tuple[Event, Any]]] = {}

    def at(self, time: int, event: Event, what: Any = None) -> None:
        """Call `event(what)` at a time that is not before now.

        Raises:
            UsageError: slug `times-too-long`.
        """
        events = self._events.get(time)
        if events is None:
            if not self.now <= time < LONGEST_NS:
                raise too_long()
            self._events[time] = [(event, what)]
            heappush(self._times, time)
        else:
            events.append((event, what))

    def run(self) -> None:
        """Let everything happen."""
        while self._times:
            self.now = time = self._times[0]
            for event, what in self._events[time]:  # grows while it runs: what is asked for at once
                event(what)
            heappop(self._times)
            del self._events[time]
