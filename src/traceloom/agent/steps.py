"""Steps of jobs, as their processes report them or probes see them: how long they took and waited for data."""

from __future__ import annotations

import math
import time
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import NamedTuple

from traceloom.agent.metrics import METRICS, Histogram, Reading

_BOUNDS = METRICS["step_seconds"].bounds
_RATE_OVER_S = 60.0
_KEPT_S = 600.0  # after the last report of a (job, rank)
_PACED = 64  # times that steps were heard of


@dataclass(slots=True)
class _Counter:
    """Of one rank of a job, since the agent began. `buckets` are not cumulated; the last is above every bound."""

    buckets: list[int] = field(default_factory=lambda: [0] * (len(_BOUNDS) + 1))
    seconds: float = 0.0
    waited: float | None = None
    reported: float = 0.0  # on the monotonic clock


class StepsTaken(NamedTuple):
    """Steps of a process since the last look.

    `buckets`: how many took at most each bound of `step_seconds`, not cumulated, the last beyond; shape (bounds + 1,).
    `seconds`: how long they took together; `waited`: of that for data, seconds, None where it is not known.
    `total`: all steps of the process since it began, None where some were perhaps not seen.
    """

    process: str
    buckets: tuple[int, ...]
    seconds: float
    waited: float | None
    total: int | None = None


class Pace(NamedTuple):
    """How a process steps. `last`, `lived`: when a step, and a step or a batch, was last heard of, monotonic seconds.

    `median_s`: of the time of its steps; `every_s`: of the time between two news of steps; both seconds.
    """

    steps: int
    last: float
    lived: float
    median_s: float
    every_s: float


@dataclass(slots=True)
class _Pacing:
    """Of one process: its last times of steps, as means of what was heard of at once, and the times between."""

    steps: int = 0
    last: float = 0.0
    lived: float = 0.0
    times: deque[float] = field(default_factory=lambda: deque(maxlen=_PACED))
    between: deque[float] = field(default_factory=lambda: deque(maxlen=_PACED))


class StepsLately(NamedTuple):
    """Steps of a process in the last minute: how many, how long they took, and waited for data; None: not known."""

    number: int
    seconds: float
    waited: float | None


class Steps:
    """Counts steps by job and rank, and their rate and pace by process."""

    def __init__(self) -> None:
        # Hear of the steps of a process as they come: (seconds, how many took so long each on average).
        self.listeners: list[Callable[[str, Sequence[tuple[float, int]]], None]] = []
        self._counters: dict[tuple[str, str], _Counter] = {}
        self._rates: dict[str, deque[tuple[float, StepsLately]]] = {}
        self._untaken: dict[str, int] = {}  # process -> steps since `take`
        self._reporting: set[str] = set()  # processes that report themselves
        self._paces: dict[str, _Pacing] = {}
        self._totals: dict[str, int] = {}  # process -> its steps since it began, where all are known

    def report(  # noqa: PLR0917  (of one report)
        self,
        process: str,
        job: str,
        rank: int | None,
        seconds: Sequence[float],
        loader_wait_seconds: float | None = None,
        total: int | None = None,
    ) -> None:
        """Take steps that ended since the last report; durations that are no time (NaN, negative) are left out.

        `total`: all steps since the process began, these among them, where it says so.
        """
        self._reporting.add(process)
        if total is not None:
            self._totals[process] = total
        elif process in self._totals:
            self._totals[process] += len(seconds)
        durations = [duration for duration in seconds if 0 <= duration < math.inf]
        buckets = [0] * (len(_BOUNDS) + 1)
        for duration in durations:
            buckets[bisect_left(_BOUNDS, duration)] += 1
        if loader_wait_seconds is not None and not 0 <= loader_wait_seconds < math.inf:
            loader_wait_seconds = None
        self._add(StepsTaken(process, tuple(buckets), sum(durations), loader_wait_seconds), job, rank)
        for listener in self.listeners:
            listener(process, [(duration, 1) for duration in durations])

    def count(self, taken: StepsTaken, job: str, rank: int | None) -> None:
        """Take steps that were seen from outside; of a process that reports itself they only show that it lives."""
        if taken.process in self._reporting:
            if taken.process in self._paces:
                self._paces[taken.process].lived = time.monotonic()
            return
        if taken.total is not None:
            self._totals[taken.process] = taken.total
        self._add(taken, job, rank)
        if number := sum(taken.buckets):
            for listener in self.listeners:
                listener(taken.process, [(taken.seconds / number, number)])

    def _add(self, taken: StepsTaken, job: str, rank: int | None) -> None:
        now, number, process = time.monotonic(), sum(taken.buckets), taken.process
        counter = self._counters.setdefault((job, "" if rank is None else str(rank)), _Counter())
        counter.reported = now
        counter.buckets = [old + new for old, new in zip(counter.buckets, taken.buckets, strict=True)]
        counter.seconds += taken.seconds
        if taken.waited is not None:
            counter.waited = (counter.waited or 0.0) + taken.waited
        self._untaken[process] = self._untaken.get(process, 0) + number
        pacing = self._paces.setdefault(taken.process, _Pacing())
        pacing.lived = now
        if number:
            pacing.between.append(now - pacing.last if pacing.steps else taken.seconds)
            pacing.steps += number
            pacing.last = now
            pacing.times.append(taken.seconds / number)
        times = self._rates.setdefault(process, deque())
        times.append((now, StepsLately(number, taken.seconds, taken.waited)))
        while times[0][0] < now - _RATE_OVER_S and len(times) > 1:
            times.popleft()

    def pace(self, process: str) -> Pace | None:
        """How a process steps; None of one that has not made a step."""
        pacing = self._paces.get(process)
        if pacing is None or not pacing.steps:
            return None
        return Pace(pacing.steps, pacing.last, pacing.lived, median(pacing.times), median(pacing.between))

    def total(self, process: str) -> int | None:
        """Steps that a process has made by now since it began, as its pace has it; None where not all were counted."""
        total, pace, rate = self._totals.get(process), self.pace(process), self.per_second(process)
        if total is None or pace is None:
            return None
        return total + int((time.monotonic() - pace.last) * (rate or 0.0))

    def resume(self, process: str, pace: Pace) -> None:
        """Take up the pace of a process from before this agent began; a step it makes from now on is its next."""
        if process not in self._paces:
            now = time.monotonic()
            times, between = deque([pace.median_s], maxlen=_PACED), deque([pace.every_s], maxlen=_PACED)
            self._paces[process] = _Pacing(pace.steps, now, now, times, between)

    def per_second(self, process: str) -> float | None:
        """Steps per second of a process over the last minute; None where it has not reported twice."""
        times = list(self._rates.get(process, ()))
        now = time.monotonic()
        if len(times) <= 1 or times[-1][0] < now - _RATE_OVER_S:
            return None
        # The steps of the first report ended before the span began.
        return sum(lately.number for _, lately in times[1:]) / (now - times[0][0])

    def lately(self, process: str) -> StepsLately | None:
        """The last minute of a process; None where it has not stepped in it."""
        oldest = time.monotonic() - _RATE_OVER_S
        some = [lately for at, lately in self._rates.get(process, ()) if at >= oldest]
        number, waits = sum(lately.number for lately in some), [lately.waited for lately in some]
        if not number:
            return None
        waited = None if None in waits else sum(wait for wait in waits if wait is not None)
        return StepsLately(number, sum(lately.seconds for lately in some), waited)

    def take(self, process: str) -> int | None:
        """Steps of a process since the last call; None of one that has never reported."""
        if process not in self._untaken:
            return None
        steps, self._untaken[process] = self._untaken[process], 0
        return steps

    def forget(self, living: set[str]) -> None:
        """Drop processes that have ended, and ranks that have not reported for ten minutes."""
        now = time.monotonic()
        self._reporting &= living
        self._untaken = {process: steps for process, steps in self._untaken.items() if process in living}
        self._rates = {process: times for process, times in self._rates.items() if process in living}
        self._paces = {process: pacing for process, pacing in self._paces.items() if process in living}
        self._totals = {process: total for process, total in self._totals.items() if process in living}
        self._counters = {key: counter for key, counter in self._counters.items() if counter.reported > now - _KEPT_S}

    def readings(self) -> list[Reading | Histogram]:
        """Step times and loader waits of every rank."""
        readings: list[Reading | Histogram] = []
        for labels, counter in self._counters.items():
            cumulated = tuple(sum(counter.buckets[: end + 1]) for end in range(len(_BOUNDS)))
            readings.append(Histogram("step_seconds", labels, cumulated, sum(counter.buckets), counter.seconds))
            if counter.waited is not None:
                readings.append(Reading("dataloader_wait_seconds_total", labels, counter.waited))
        return readings
