"""Steps of PyTorch processes that nobody prepared, from probes: a collector.

What marks a step: `profiler.step()` while the program calls it, else the step of the optimizer that was seen first.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

from traceloom.agent.bpf.mappings import mappings, open_mapped
from traceloom.agent.bpf.step_probes import LOADER, PROFILER_STEP, StepMark, StepProbes
from traceloom.agent.bpf.support import unsupported
from traceloom.agent.bpf.uprobes import Uprobes
from traceloom.agent.collect.processes import TICKS_PER_S
from traceloom.agent.config import Config
from traceloom.agent.metrics import Reading
from traceloom.agent.owners import Process
from traceloom.agent.steps import StepsTaken

_LIBRARY = "libtorch_cpu.so"
_CLOSING_S = 2.0  # for a run that is under way
_MOST_LIBRARIES = 64  # of different files; each has two probes


class _Library(NamedTuple):
    """A file with probes: those, the processes that map it, what cannot be seen of it, and since when (clock ticks)."""

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
        """Attach to what is new, let go of what has ended, and count; without the right to it nothing is done.

        Raises:
            OSError: The kernel refuses now what it allowed before.
        """
        with self._busy:
            return [] if self._closed else self._collected()

    def _collected(self) -> list[Reading]:
        self.taken = []
        if not self._on or (self._probes is None and any(unsupported())):
            return []
        processes = {
            process.pid: process for process in self._processes() if process.owner.framework in ("", "pytorch")
        }
        if self._probes is None:
            self._probes = StepProbes()
        living = {process.key for process in processes.values()}
        self._looked &= living
        self._last = {process: marks for process, marks in self._last.items() if process in living}
        self._refused = {process: why for process, why in self._refused.items() if process in living}
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
            if owner is None or first_ns + suspended_ns < (owner.start_ticks - 1) * (10**9 // TICKS_PER_S):
                self._probes.forget(pid)  # it has ended; its pid may be another one's by now
            elif taken := self._since_last(owner, marks[pid]):
                self.taken.append(taken)
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
        """Take all probes away, when a run that is under way has ended; else the kernel does, with the process."""
        if not self._busy.acquire(timeout=_CLOSING_S):
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
        for mapping in mappings(process.pid, self._proc):
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
                elif len(self._libraries) == _MOST_LIBRARIES:
                    os.close(descriptor)
                    self._refused[process.key] = f"more than {_MOST_LIBRARIES} copies of PyTorch are in use"
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

    def _since_last(self, process: Process, marks: dict[tuple[int, int], StepMark]) -> StepsTaken | None:
        """What a process has done since the last run; None where it has done nothing."""
        before = self._last.get(process.key, {})
        self._last[process.key] = marks
        nothing = StepMark(0, 0, 0, 0, (0,) * len(next(iter(marks.values())).buckets))
        clocks = [key for key, mark in marks.items() if mark.number > before.get(key, nothing).number]
        wait = marks.get((LOADER, 0))
        waited_ns = wait.total_ns - before.get((LOADER, 0), nothing).total_ns if wait else None
        steps = [(kind, marks[kind, which].first_ns, which) for kind, which in clocks if kind != LOADER]
        if not steps and not waited_ns:
            return None
        kind, _, which = min(steps, default=(PROFILER_STEP, 0, 0))
        now, last = marks.get((kind, which), nothing), before.get((kind, which), nothing)
        buckets = tuple(number - earlier for number, earlier in zip(now.buckets, last.buckets, strict=True))
        seconds = (now.total_ns - last.total_ns) / 1e9
        # Of a process that began before there were probes, some steps were perhaps not seen.
        seen = any(
            process.key in library.processes and process.start_ticks > library.since_ticks
            for library in self._libraries.values()
        )
        total = now.number + 1 if seen and len(steps) == 1 else None  # the first call ends no step that has begun
        return StepsTaken(process.key, buckets, seconds, None if waited_ns is None else waited_ns / 1e9, total)
