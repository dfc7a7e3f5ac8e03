"""Step counts and pace per process, as reported or probed.

A step is marked by `profiler.step()` if the program calls it, else by the step of the first
optimizer seen.
"""

from __future__ import annotations

import contextlib
import math
import os
import threading
import time
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import NamedTuple

from traceloom.agent.collectors.processes import TICKS_PER_S
from traceloom.agent.config import Config
from traceloom.agent.metrics import METRICS, HistogramReading, Reading
from traceloom.agent.ownership.model import Process
from traceloom.agent.probes.calls import explain_unsupported
from traceloom.agent.probes.ebpf import Uprobes
from traceloom.agent.probes.steps import LOADER, PROFILER_STEP, StepMark, StepProbes
from traceloom.system.elf import open_mapped, read_mappings

_BOUNDS = METRICS["step_seconds"].bounds
_RATE_WINDOW_S = 60.0
_RETENTION_S = 600.0  # after the last report of a (job, rank)
_MAX_PACE_SAMPLES = 64  # observations of steps kept per process


@dataclass(slots=True)
class _RankCounter:
    """Counts of one rank of a job, since the agent started.

    `buckets` are not cumulative; the last is above every bound.
    """

    buckets: list[int] = field(default_factory=lambda: [0] * (len(_BOUNDS) + 1))
    seconds: float = 0.0
    waited: float | None = None
    reported: float = 0.0  # monotonic clock


class StepsTaken(NamedTuple):
    """Steps of a process since the previous observation.

    `buckets`: how many took at most each bound of `step_seconds`, not cumulative, the last beyond;
    shape (bounds + 1,). `seconds`: their total duration; `waited`: of that for data, seconds, None
    if unknown. `total`: all steps of the process since it started, None if some may have been
    missed.
    """

    process: str
    buckets: tuple[int, ...]
    seconds: float
    waited: float | None
    total: int | None = None


class StepPace(NamedTuple):
    """The pace of a process. `last`, `lived`: when a step, and a step or a batch, was last
    observed, monotonic seconds.

    `median_s`: median duration of its steps; `every_s`: median time between two observations; both
    seconds.
    """

    steps: int
    last: float
    lived: float
    median_s: float
    every_s: float


@dataclass(slots=True)
class _PaceTracker:
    """The last step durations of one process, as means per observation, and the times between
    observations.
    """

    steps: int = 0
    last: float = 0.0
    lived: float = 0.0
    times: deque[float] = field(default_factory=lambda: deque(maxlen=_MAX_PACE_SAMPLES))
    between: deque[float] = field(default_factory=lambda: deque(maxlen=_MAX_PACE_SAMPLES))


class RecentSteps(NamedTuple):
    """Steps of a process in the last minute: number, duration, and wait for data; None: unknown."""

    number: int
    seconds: float
    waited: float | None


class StepCounter:
    """Counts steps by job and rank, and tracks rate and pace by process."""

    def __init__(self) -> None:
        # Called with the new steps of a process: (mean seconds, number of steps).
        self.listeners: list[Callable[[str, Sequence[tuple[float, int]]], None]] = []
        self._counters: dict[tuple[str, str], _RankCounter] = {}
        self._rates: dict[str, deque[tuple[float, RecentSteps]]] = {}
        self._untaken: dict[str, int] = {}  # process -> steps since `take`
        self._reporting: set[str] = set()  # processes that report steps themselves
        self._paces: dict[str, _PaceTracker] = {}
        self._ranks: dict[str, int] = {}  # process -> the first rank that it said
        self._totals: dict[str, int] = {}  # process -> its steps since it started, if all are known

    def report(  # noqa: PLR0917  (of one report)
        self,
        process: str,
        job: str,
        rank: int | None,
        seconds: Sequence[float],
        loader_wait_seconds: float | None = None,
        total: int | None = None,
    ) -> None:
        """Add steps that ended since the last report; invalid durations (NaN, negative) are
        dropped.

        `total`: all steps since the process started, including these, if it reports that.
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
        self._add(
            StepsTaken(process, tuple(buckets), sum(durations), loader_wait_seconds), job, rank
        )
        for listener in self.listeners:
            listener(process, [(duration, 1) for duration in durations])

    def settle_rank(self, process: str, rank: int | None) -> int | None:
        """Returns the rank of a process of which nothing else tells it: what it said first, since
        each rank of a job costs series.
        """
        return rank if rank is None else self._ranks.setdefault(process, rank)

    def count(self, observed: StepsTaken, job: str, rank: int | None) -> None:
        """Add steps observed from outside; for a process that reports its own steps they only show
        that it is alive.
        """
        if observed.process in self._reporting:
            if observed.process in self._paces:
                self._paces[observed.process].lived = time.monotonic()
            return
        if observed.total is not None:
            self._totals[observed.process] = observed.total
        self._add(observed, job, rank)
        if number := sum(observed.buckets):
            for listener in self.listeners:
                listener(observed.process, [(observed.seconds / number, number)])

    def _add(self, observed: StepsTaken, job: str, rank: int | None) -> None:
        now, number, process = time.monotonic(), sum(observed.buckets), observed.process
        counter = self._counters.setdefault(
            (job, "" if rank is None else str(rank)), _RankCounter()
        )
        counter.reported = now
        counter.buckets = [
            old + new for old, new in zip(counter.buckets, observed.buckets, strict=True)
        ]
        counter.seconds += observed.seconds
        if observed.waited is not None:
            counter.waited = (counter.waited or 0.0) + observed.waited
        self._untaken[process] = self._untaken.get(process, 0) + number
        tracker = self._paces.setdefault(observed.process, _PaceTracker())
        tracker.lived = now
        if number:
            tracker.between.append(now - tracker.last if tracker.steps else observed.seconds)
            tracker.steps += number
            tracker.last = now
            tracker.times.append(observed.seconds / number)
        times = self._rates.setdefault(process, deque())
        times.append((now, RecentSteps(number, observed.seconds, observed.waited)))
        while times[0][0] < now - _RATE_WINDOW_S and len(times) > 1:
            times.popleft()

    def pace(self, process: str) -> StepPace | None:
        """Returns the pace of a process; None if it has not made a step."""
        tracker = self._paces.get(process)
        if tracker is None or not tracker.steps:
            return None
        return StepPace(
            tracker.steps,
            tracker.last,
            tracker.lived,
            median(tracker.times),
            median(tracker.between),
        )

    def total(self, process: str) -> int | None:
        """Returns the steps of a process since it started, as of its pace; None if not all were
        counted.
        """
        total, pace, rate = self._totals.get(process), self.pace(process), self.per_second(process)
        return (
            None
            if total is None or pace is None
            else total + int((time.monotonic() - pace.last) * (rate or 0.0))
        )

    def resume(self, process: str, pace: StepPace) -> None:
        """Restore the pace of a process from before this agent started; the next step that it makes
        continues it.
        """
        if process not in self._paces:
            now = time.monotonic()
            times, between = (
                deque([pace.median_s], maxlen=_MAX_PACE_SAMPLES),
                deque([pace.every_s], maxlen=_MAX_PACE_SAMPLES),
            )
            self._paces[process] = _PaceTracker(pace.steps, now, now, times, between)

    def per_second(self, process: str) -> float | None:
        """Returns the steps per second of a process over the last minute; None without at least two
        reports.
        """
        times = list(self._rates.get(process, ()))
        now = time.monotonic()
        if len(times) <= 1 or times[-1][0] < now - _RATE_WINDOW_S:
            return None
        # The steps of the first report ended before the span started.
        return sum(steps.number for _, steps in times[1:]) / (now - times[0][0])

    def lately(self, process: str) -> RecentSteps | None:
        """Returns the last minute of a process; None if it has not stepped in it."""
        oldest = time.monotonic() - _RATE_WINDOW_S
        recent = [
            steps for recorded_at, steps in self._rates.get(process, ()) if recorded_at >= oldest
        ]
        number, waits = (
            sum(steps.number for steps in recent),
            [steps.waited for steps in recent],
        )
        if not number:
            return None
        waited = None if None in waits else sum(wait for wait in waits if wait is not None)
        return RecentSteps(number, sum(steps.seconds for steps in recent), waited)

    def take(self, process: str) -> int | None:
        """Returns the steps of a process since the last call; None if it has never reported."""
        if process not in self._untaken:
            return None
        steps, self._untaken[process] = self._untaken[process], 0
        return steps

    def forget(self, living: set[str]) -> None:
        """Remove processes that have ended, and ranks that have not reported for ten minutes."""
        now = time.monotonic()
        self._reporting &= living
        self._untaken = {
            process: steps for process, steps in self._untaken.items() if process in living
        }
        self._rates = {
            process: times for process, times in self._rates.items() if process in living
        }
        self._paces = {
            process: tracker for process, tracker in self._paces.items() if process in living
        }
        self._ranks = {process: rank for process, rank in self._ranks.items() if process in living}
        self._totals = {
            process: total for process, total in self._totals.items() if process in living
        }
        self._counters = {
            key: counter
            for key, counter in self._counters.items()
            if counter.reported > now - _RETENTION_S
        }

    def readings(self) -> list[Reading | HistogramReading]:
        """Returns step times and loader waits of every rank."""
        readings: list[Reading | HistogramReading] = []
        for labels, counter in self._counters.items():
            cumulated = tuple(sum(counter.buckets[: end + 1]) for end in range(len(_BOUNDS)))
            readings.append(
                HistogramReading(
                    "step_seconds", labels, cumulated, sum(counter.buckets), counter.seconds
                )
            )
            if counter.waited is not None:
                readings.append(Reading("dataloader_wait_seconds_total", labels, counter.waited))
        return readings


_LIBRARY = "libtorch_cpu.so"
_CLOSE_TIMEOUT_S = 2.0  # waits for a run in progress
_MAX_LIBRARIES = 64  # distinct files; each has two probes


class _Library(NamedTuple):
    """A probed file: its probes, the processes that map it, what cannot be measured, and since when
    (clock ticks).
    """

    probes: Uprobes
    processes: set[str]
    path: str
    lacks: str
    since_ticks: int


class ProbedStepClock:
    """Attaches probes to the libraries of PyTorch processes, and reads the counts.

    Args:
        config: The agent's.
        processes: Returns the currently relevant processes.
    """

    name = "probes"

    def __init__(self, config: Config, processes: Callable[[], Iterable[Process]]) -> None:
        self.period_s = config.collect.periods.get(self.name, config.collect.period)
        # Reading a library for the first time may wait for a slow disk.
        self.timeout_s = config.collect.timeouts.get(self.name, max(config.collect.timeout, 10.0))
        self.taken: list[StepsTaken] = []  # in the last run
        self._on = config.probes.steps
        self._proc = Path(config.collect.proc)
        self._processes = processes
        self._busy, self._closed = threading.Lock(), False
        self._probes: StepProbes | None = None
        self._libraries: dict[tuple[int, int], _Library] = {}
        self._looked: set[str] = set()  # processes that were examined
        self._refused: dict[str, str] = {}  # process -> why it has no probes
        self._last: dict[str, dict[tuple[int, int], StepMark]] = {}

    def collect(self) -> list[Reading]:
        """Attach to new libraries, detach from unused ones, and count; without permission it does
        nothing.

        Raises:
            OSError: The kernel refuses now what it allowed before.
        """
        with self._busy:
            return [] if self._closed else self._collected()

    def _collected(self) -> list[Reading]:
        self.taken = []
        if not self._on or (self._probes is None and any(explain_unsupported())):
            return []
        processes = {
            process.pid: process
            for process in self._processes()
            if process.owner.framework in ("", "pytorch")
        }
        if self._probes is None:
            self._probes = StepProbes()
        living = {process.key for process in processes.values()}
        self._looked &= living
        self._last = {process: marks for process, marks in self._last.items() if process in living}
        self._refused = {
            process: reason for process, reason in self._refused.items() if process in living
        }
        for file, library in list(self._libraries.items()):
            library.processes.intersection_update(living)
            if not library.processes:
                library.probes.close()
                del self._libraries[file]
        for process in processes.values():
            if process.key not in self._looked and process.state != "D":  # its memory may be locked
                with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has ended now
                    self._find_probes(process, self._probes)
        marks = self._probes.marks()
        suspended_ns = time.clock_gettime_ns(time.CLOCK_BOOTTIME) - time.monotonic_ns()
        for pid in marks:
            owner = processes.get(pid)
            first_ns = min(mark.first_ns for mark in marks[pid].values())
            if owner is None or first_ns + suspended_ns < (owner.start_ticks - 1) * (
                10**9 // TICKS_PER_S
            ):
                self._probes.forget(pid)  # it has ended; its pid may be reused
            elif observed := self._since_last(owner, marks[pid]):
                self.taken.append(observed)
        return [
            Reading("agent_probed_libraries", (), len(self._libraries)),
            Reading("agent_probes_lost_total", (), self._probes.lost()),
        ]

    def list_problems(self) -> list[str]:
        """Returns what cannot be measured of the observed processes."""
        sentences = list(dict.fromkeys(self._refused.values()))
        sentences += [
            f"loader waits of processes with {library.path} are not measured: {library.lacks}"
            for library in self._libraries.values()
            if library.lacks
        ]
        if self._probes is not None and (lost := self._probes.lost()):
            sentences.append(f"{lost} steps were not counted: too many processes have some")
        return sentences

    def close(self) -> None:
        """Remove all probes, after a run in progress; if that takes too long, the kernel removes
        them with this process.
        """
        if not self._busy.acquire(timeout=_CLOSE_TIMEOUT_S):
            return
        self._closed = True
        for library in self._libraries.values():
            library.probes.close()
        self._libraries = {}
        if self._probes is not None:
            self._probes.close()
            self._probes = None
        self._busy.release()

    def _find_probes(self, process: Process, probes: StepProbes) -> None:
        """Attach to the library of a process, unless it is already probed."""
        for mapping in read_mappings(process.pid, self._proc):
            if mapping.path.rpartition("/")[2] != _LIBRARY:
                continue
            self._looked.add(process.key)
            try:
                descriptor = open_mapped(process.pid, mapping, self._proc)
                status = os.fstat(descriptor)
                file = (status.st_dev, status.st_ino)
                if file in self._libraries:
                    os.close(descriptor)
                    self._libraries[file].processes.add(process.key)
                elif len(self._libraries) == _MAX_LIBRARIES:
                    os.close(descriptor)
                    self._refused[process.key] = (
                        f"more than {_MAX_LIBRARIES} copies of PyTorch are in use"
                    )
                else:
                    attached, lacks = probes.attach(descriptor)
                    self._libraries[file] = _Library(
                        attached,
                        {process.key},
                        mapping.path,
                        lacks,
                        time.clock_gettime_ns(time.CLOCK_BOOTTIME) * TICKS_PER_S // 10**9,
                    )
            except OSError as error:
                self._refused[process.key] = f"no probes in {mapping.path}: {error.strerror}"
            return

    def _since_last(
        self, process: Process, marks: dict[tuple[int, int], StepMark]
    ) -> StepsTaken | None:
        """Returns the steps of a process since the last run; None if there are none."""
        before = self._last.get(process.key, {})
        self._last[process.key] = marks
        nothing = StepMark(0, 0, 0, 0, (0,) * len(next(iter(marks.values())).buckets))
        clocks = [
            key for key, mark in marks.items() if mark.number > before.get(key, nothing).number
        ]
        wait = marks.get((LOADER, 0))
        waited_ns = wait.total_ns - before.get((LOADER, 0), nothing).total_ns if wait else None
        steps = [
            (kind, marks[kind, mark_id].first_ns, mark_id)
            for kind, mark_id in clocks
            if kind != LOADER
        ]
        if not steps and not waited_ns:
            return None
        kind, _, mark_id = min(steps, default=(PROFILER_STEP, 0, 0))
        now, last = marks.get((kind, mark_id), nothing), before.get((kind, mark_id), nothing)
        buckets = tuple(
            number - earlier for number, earlier in zip(now.buckets, last.buckets, strict=True)
        )
        seconds = (now.total_ns - last.total_ns) / 1e9
        # If a process started before the probes, some of its steps may have been missed.
        saw_start = any(
            process.key in library.processes and process.start_ticks > library.since_ticks
            for library in self._libraries.values()
        )
        # The first call only starts a step.
        total = now.number + 1 if saw_start and len(steps) == 1 else None
        return StepsTaken(
            process.key, buckets, seconds, None if waited_ns is None else waited_ns / 1e9, total
        )
