"""What is recorded of a process on demand: one class for each kind of recording."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

import msgspec

from traceloom.agent.owners import Process
from traceloom.errors import TraceloomError


class Window(msgspec.Struct, frozen=True):
    """When is recorded. `start_ns` is wall clock, 0: at once; for so long, or for so many steps."""

    start_ns: int
    duration_s: float | None
    steps: int | None


class ProfilerError(TraceloomError):
    """A profiler cannot record: `message` says why."""

    exit_code = 3


class Profiler(Protocol):
    """Records a process in a window, beside what else runs."""

    name: str

    def resources(self, process: Process) -> frozenset[str]:
        """What no two profilers may have at once: `ptrace:PID`, `counters:UUID`, `kineto:PID`."""

    async def record(self, process: Process, window: Window, directory: Path, stem: str) -> list[Path]:
        """Record, and write files `directory/STEM.KIND...`; whoever cancels it, ends what it started.

        Raises:
            ProfilerError: It cannot; nothing is written then.
        """
