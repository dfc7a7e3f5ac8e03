"""The `Profiler` protocol, the recorded window, the registry, and the profilers by eBPF probes."""

from __future__ import annotations

import asyncio
import importlib
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Protocol

import msgspec

from traceloom.agent import worker
from traceloom.agent.ownership.model import Process
from traceloom.errors import TraceloomError

# Name -> module and class. `timeline`, `memory` and `telemetry` need parts of the agent and are
# created by callers that have these.
PROFILERS = {
    "timeline": "traceloom.agent.profilers.timeline:TimelineProfiler",
    "stacks": "traceloom.agent.profilers.py_spy:StacksProfiler",
    "dump": "traceloom.agent.profilers.py_spy:DumpProfiler",
    "allocations": "traceloom.agent.profilers.base:AllocationsProfiler",
    "launches": "traceloom.agent.profilers.base:LaunchesProfiler",
    "memory": "traceloom.agent.profilers.attached:AttachedMemoryProfiler",
    "telemetry": "traceloom.agent.profilers.telemetry:TelemetryProfiler",
}


class Window(msgspec.Struct, frozen=True):
    """The window to record: from `start_ns` on the wall clock (0: at once), for a duration or a
    number of steps.

    `measured`: for steps of unknown duration: waits for the traces recorded at the same time and
    returns their start and end.
    """

    start_ns: int
    duration_s: float | None
    steps: int | None
    measured: Callable[[], Awaitable[tuple[int, int]]] | None = None

    def over(self) -> asyncio.Future[tuple[int, int]]:
        """Returns a future that completes at the end of the window, with its start and end in ns on
        the wall clock.

        Raises:
            ProfilerError: `no-duration`: the duration of its steps is unknown.
        """
        start_ns, seconds = max(self.start_ns, time.time_ns()), self.duration_s
        if seconds is not None:
            end_ns = start_ns + int(seconds * 1e9)
            return asyncio.ensure_future(
                asyncio.sleep((end_ns - time.time_ns()) / 1e9, (start_ns, end_ns))
            )
        if self.measured is None:
            raise ProfilerError(
                "it is recorded for a time, and nobody knows how long a step takes",
                slug="no-duration",
                hint="ask for a duration, or for the timeline beside it",
            )
        return asyncio.ensure_future(self.measured())


class ProfilerError(TraceloomError):
    """A profiler could not record; the slug says why."""

    exit_code = 3


class Profiler(Protocol):
    """Records a process."""

    name: str

    def resources(self, process: Process) -> frozenset[str]:
        """Returns the resources that it needs exclusively, as `ptrace:PID`, `counters:UUID`,
        `kineto:PID`.
        """

    async def record(
        self, process: Process, window: Window, directory: Path, stem: str
    ) -> list[Path]:
        """Write `directory/STEM.KIND...` and return the files; stops its processes if it is
        cancelled.

        Raises:
            ProfilerError: It cannot record.
        """


def has_profiler(name: str) -> bool:
    return name in PROFILERS


def create_profiler(name: str) -> Profiler:
    """Returns a new profiler.

    Raises:
        ProfilerError: `no-profiler`: this version does not have it.
    """
    if not has_profiler(name):
        raise ProfilerError(f"there is no profiler `{name}` in this version", slug="no-profiler")
    module, _, kind = PROFILERS[name].partition(":")
    profiler: Profiler = getattr(importlib.import_module(module), kind)()
    return profiler


class ProbedProfiler:
    """A profiler that needs no cooperation of the process: see `traceloom.agent.probes`."""

    name: str

    def resources(self, process: Process) -> frozenset[str]:  # noqa: ARG002  (probes exclude nothing)
        """Always empty: a function may have any number of probes."""
        return frozenset()

    async def record(
        self, process: Process, window: Window, directory: Path, stem: str
    ) -> list[Path]:
        """Write `directory/STEM.NAME.json.gz`.

        Raises:
            ProfilerError: `not-recorded`: the kernel or permissions forbid it, or the process has
                no such functions.
        """
        if window.duration_s is None and window.steps is None:
            raise ProfilerError(
                "neither a duration nor a number of steps was asked for", slug="not-recorded"
            )
        path = directory / f"{stem}.{self.name}.json.gz"
        try:
            written = await worker.run_alone(
                self.name,
                order={
                    "pid": process.pid,
                    "start_ticks": process.start_ticks,
                    "rank": process.owner.rank,
                    "path": str(path),
                    "start_ns": window.start_ns,
                    "duration_s": window.duration_s,
                    "steps": window.steps,
                },
            )
        except TraceloomError as error:
            raise ProfilerError(
                error.message, slug="not-recorded", where=f"process {process.pid}"
            ) from error
        finally:
            path.with_name(f"{path.name}.tmp").unlink(missing_ok=True)
        return [Path(text) for text in written]


class AllocationsProfiler(ProbedProfiler):
    """Allocations and frees of memory with stacks, by probes of PyTorch's and CUDA's functions."""

    name = "allocations"


class LaunchesProfiler(ProbedProfiler):
    """Launches of kernels and graphs, and waits for devices, by probes of CUDA's runtime
    functions.
    """

    name = "launches"
