"""Step counts and pace per process, as reported or probed.

What marks a step: `profiler.step()` while the program calls it, else the step of the optimizer that
was seen first.
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
from traceloom.agent.probes.elf import Uprobes, open_mapped, read_mappings
from traceloom.agent.probes.steps import LOADER, PROFILER_STEP, StepMark, StepProbes

_BOUNDS = METRICS["step_seconds"].bounds
_RATE_WINDOW_S = 60.0
_RETENTION_S = 600.0  # after the last report of a (job, rank)
_MAX_PACE_SAMPLES = 64  # times that steps were heard of


@dataclass(slots=True)
class _RankCounter:
    """Of one rank of a job, since the agent began.

    `buckets` are not cumulated; the last is above every bound.
    """

    buckets: list[int] = field(default_factory=lambda: [0] * (len(_BOUNDS) + 1))
    seconds: float = 0.0
    waited: float | None = None
    reported: float = 0.0  # on the monotonic clock


class StepsTaken(NamedTuple):
    """Steps of a process since the last look.

    `buckets`: how many took at most each bound of `step_seconds`, not cumulated, the last beyond;
    shape (bounds + 1,). `seconds`: how long they took together; `waited`: of that for data,
    seconds, None where it is not known. `total`: all steps of the process since it began, None
    where some were perhaps not seen.
    """

    process: str
    buckets: tuple[int, ...]
    seconds: float
    waited: float | None
    total: int | None = None


class StepPace(NamedTuple):
    """How a process steps. `last`, `lived`: when a step, and a step or a batch, was last heard of,
    monotonic seconds.

    `median_s`: of the time of its steps; `every_s`: of the time between two news of steps; both
    seconds.
    """

    steps: int
    last: float
    lived: float
    median_s: float
    every_s: float


@dataclass(slots=True)
class _PaceTracker:
    """Of one process: its last times of steps, as means of what was heard of at once, and the times
    between.
    """

    steps: int = 0
    last: float = 0.0
    lived: float = 0.0
    times: deque[float] = field(default_factory=lambda: deque(maxlen=_MAX_PACE_SAMPLES))
    between: deque[float] = field(default_factory=lambda: deque(maxlen=_MAX_PACE_SAMPLES))


class RecentSteps(NamedTuple):
    """Steps of a process in the last minute: how many, how long they took, and waited for data;
    None: not known.
    """

    number: int
    seconds: float
    waited: float | None


class StepCounter:
    """Counts steps by job and rank, and their rate and pace by process."""

    def __init__(self) -> None:
        # Hear of the steps of a process as they come: (seconds, how many took so long each on
        # average).
        self.listeners: list[Callable[[str, Sequence[tuple[float, int]]], None]] = []
        self._counters: dict[tuple[str, str], _RankCounter] = {}
        self._rates: dict[str, deque[tuple[float, RecentSteps]]] = {}
        self._untaken: dict[str, int] = {}  # process -> steps since `take`
        self._reporting: set[str] = set()  # processes that report themselves
        self._paces: dict[str, _PaceTracker] = {}
        self._totals: dict[
            str, int
        ] = {}  # process -> its steps since it began, where all are known

    def report(  # noqa: PLR0917  (of one report)
        self,
        process: str,
        job: str,
        rank: int | None,
        seconds: Sequence[float],
        loader_wait_seconds: float | None = None,
        total: int | None = None,
    ) -> None:
        """Take steps that ended since the last report; durations that are no time (NaN, negative)
        are left out.

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
        self._add(
            StepsTaken(process, tuple(buckets), sum(durations), loader_wait_seconds), job, rank
        )
        for listener in self.listeners:
            listener(process, [(duration, 1) for duration in durations])

    def count(self, observed: StepsTaken, job: str, rank: int | None) -> None:
        """Take steps that were seen from outside; of a process that reports itself they only show
        that it lives.
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
        pacing = self._paces.setdefault(observed.process, _PaceTracker())
        pacing.lived = now
        if number:
            pacing.between.append(now - pacing.last if pacing.steps else observed.seconds)
            pacing.steps += number
            pacing.last = now
            pacing.times.append(observed.seconds / number)
        times = self._rates.setdefault(process, deque())
        times.append((now, RecentSteps(number, observed.seconds, observed.waited)))
        while times[0][0] < now - _RATE_WINDOW_S and len(times) > 1:
            times.popleft()

    def pace(self, process: str) -> StepPace | None:
        """How a process steps; None of one that has not made a step."""
        pacing = self._paces.get(process)
        if pacing is None or not pacing.steps:
            return None
        return StepPace(
            pacing.steps, pacing.last, pacing.lived, median(pacing.times), median(pacing.between)
        )

    def total(self, process: str) -> int | None:
        """Steps that a process has made by now since it began, as its pace has it; None where not
        all were counted.
        """
        total, pace, rate = self._totals.get(process), self.pace(process), self.per_second(process)
        if total is None or pace is None:
            return None
        return total + int((time.monotonic() - pace.last) * (rate or 0.0))

    def resume(self, process: str, pace: StepPace) -> None:
        """Take up the pace of a process from before this agent began; a step it makes from now on
        is its next.
        """
        if process not in self._paces:
            now = time.monotonic()
            times, between = (
                deque([pace.median_s], maxlen=_MAX_PACE_SAMPLES),
                deque([pace.every_s], maxlen=_MAX_PACE_SAMPLES),
            )
            self._paces[process] = _PaceTracker(pace.steps, now, now, times, between)

    def per_second(self, process: str) -> float | None:
        """Steps per second of a process over the last minute; None where it has not reported twice."""
        times = list(self._rates.get(process, ()))
        now = time.monotonic()
        if len(times) <= 1 or times[-1][0] < now - _RATE_WINDOW_S:
            return None
        # The steps of the first report ended before the span began.
        return sum(lately.number for _, lately in times[1:]) / (now - times[0][0])

    def lately(self, process: str) -> RecentSteps | None:
        """The last minute of a process; None where it has not stepped in it."""
        oldest = time.monotonic() - _RATE_WINDOW_S
        recent = [
            lately for recorded_at, lately in self._rates.get(process, ()) if recorded_at >= oldest
        ]
        number, waits = (
            sum(lately.number for lately in recent),
            [lately.waited for lately in recent],
        )
        if not number:
            return None
        waited = None if None in waits else sum(wait for wait in waits if wait is not None)
        return RecentSteps(number, sum(lately.seconds for lately in recent), waited)

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
        self._untaken = {
            process: steps for process, steps in self._untaken.items() if process in living
        }
        self._rates = {
            process: times for process, times in self._rates.items() if process in living
        }
        self._paces = {
            process: pacing for process, pacing in self._paces.items() if process in living
        }
        self._totals = {
            process: total for process, total in self._totals.items() if process in living
        }
        self._counters = {
            key: counter
            for key, counter in self._counters.items()
            if counter.reported > now - _RETENTION_S
        }

    def readings(self) -> list[Reading | HistogramReading]:
        """Step times and loader waits of every rank."""
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
_CLOSE_TIMEOUT_S = 2.0  # for a run that is under way
_MAX_LIBRARIES = 64  # of different files; each has two probes


class _Library(NamedTuple):
    """A file with probes: those, the processes that map it, what cannot be seen of it, and since
    when (clock ticks).
    """

    probes: Uprobes
    processes: set[str]
    path: str
    lacks: str
    since_ticks: int


class ProbedStepClock:
    """Attaches probes to the libraries of PyTorch processes, and reads what they counted.

    Args:
        config: The agent's.
        processes: Gives the processes that matter now.
    """

    name = "probes"

    def __init__(self, config: Config, processes: Callable[[], Iterable[Process]]) -> None:
        self.period_s = config.collect.periods.get(self.name, config.collect.period)
        # The first look into a library may wait for a slow disk.
        self.timeout_s = config.collect.timeouts.get(self.name, max(config.collect.timeout, 10.0))
        self.taken: list[StepsTaken] = []  # of the last run
        self._on = config.probes.steps
        self._proc = Path(config.collect.proc)
        self._processes = processes
        self._busy, self._closed = threading.Lock(), False
        self._probes: StepProbes | None = None
        self._libraries: dict[tuple[int, int], _Library] = {}
        self._looked: set[str] = set()  # processes whose library is known
        self._refused: dict[str, str] = {}  # process -> why it has no probes
        self._last: dict[str, dict[tuple[int, int], StepMark]] = {}

    def collect(self) -> list[Reading]:
        """Attach to what is new, let go of what has ended, and count; without the right to it
        nothing is done.

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
                with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has ended
                    self._look(process, self._probes)
        marks = self._probes.marks()
        suspended_ns = time.clock_gettime_ns(time.CLOCK_BOOTTIME) - time.monotonic_ns()
        for pid in marks:
            owner = processes.get(pid)
            first_ns = min(mark.first_ns for mark in marks[pid].values())
            if owner is None or first_ns + suspended_ns < (owner.start_ticks - 1) * (
                10**9 // TICKS_PER_S
            ):
                self._probes.forget(pid)  # it has ended; its pid may be another one's by now
            elif observed := self._since_last(owner, marks[pid]):
                self.taken.append(observed)
        return [
            Reading("agent_probed_libraries", (), len(self._libraries)),
            Reading("agent_probes_lost_total", (), self._probes.lost()),
        ]

    def trouble(self) -> list[str]:
        """What cannot be seen of processes that it watches."""
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
        """Take all probes away, when a run that is under way has ended; else the kernel does, with
        the process.
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

    def _look(self, process: Process, probes: StepProbes) -> None:
        """Attach to the library of a process, unless that has been done for another one."""
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
        """What a process has done since the last run; None where it has done nothing."""
        before = self._last.get(process.key, {})
        self._last[process.key] = marks
        nothing = StepMark(0, 0, 0, 0, (0,) * len(next(iter(marks.values())).buckets))
        clocks = [
            key for key, mark in marks.items() if mark.number > before.get(key, nothing).number
        ]
        wait = marks.get((LOADER, 0))
        waited_ns = wait.total_ns - before.get((LOADER, 0), nothing).total_ns if wait else None
        steps = [
            (kind, marks[kind, which].first_ns, which) for kind, which in clocks if kind != LOADER
        ]
        if not steps and not waited_ns:
            return None
        kind, _, which = min(steps, default=(PROFILER_STEP, 0, 0))
        now, last = marks.get((kind, which), nothing), before.get((kind, which), nothing)
        buckets = tuple(
            number - earlier for number, earlier in zip(now.buckets, last.buckets, strict=True)
        )
        seconds = (now.total_ns - last.total_ns) / 1e9
        # Of a process that began before there were probes, some steps were perhaps not seen.
        saw_start = any(
            process.key in library.processes and process.start_ticks > library.since_ticks
            for library in self._libraries.values()
        )
        total = (
            now.number + 1 if saw_start and len(steps) == 1 else None
        )  # the first call ends no step that has begun
        return StepsTaken(
            process.key, buckets, seconds, None if waited_ns is None else waited_ns / 1e9, total
        )
