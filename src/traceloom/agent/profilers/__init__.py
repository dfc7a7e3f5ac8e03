"""What records: each profiler is a class that records one process for one window of time."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

import msgspec

from traceloom.agent.owners import Process
from traceloom.errors import TraceloomError


class Window(msgspec.Struct, frozen=True):
    """What is to be recorded: from `start_ns` of the wall clock (0: at once), for a duration or a number of steps."""

    start_ns: int
    duration_s: float | None
    steps: int | None


class ProfilerError(TraceloomError):
    """A profiler could not record; the slug says why."""

    exit_code = 3


class Profiler(Protocol):
    """Records a process."""

    name: str

    def resources(self, process: Process) -> frozenset[str]:
        """What excludes others while it runs, as `ptrace:PID`, `counters:UUID`, `kineto:PID`."""

    async def record(self, process: Process, window: Window, directory: Path, stem: str) -> list[Path]:
        """Write `directory/STEM.KIND...`; kills what it started when it is cancelled.

        Raises:
            ProfilerError: It cannot.
        """
