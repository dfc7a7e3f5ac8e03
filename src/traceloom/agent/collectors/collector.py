"""The interface of collectors, and reading of kernel files."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from traceloom.agent.config import Config
from traceloom.agent.metrics import HistogramReading, Reading


class Collector(Protocol):
    """Returns all its readings each time. May block; called from a thread, never concurrently."""

    name: str
    period_s: float
    timeout_s: float

    def collect(self) -> Sequence[Reading | HistogramReading]:
        """Read the current values.

        Raises:
            OSError: Nothing can be read now; counted, and reported by `agent doctor`.
        """

    def list_problems(self) -> list[str]:
        """Returns what does not work here: sentences for the doctor, each with what would help."""


class HostCollector:
    """A collector that reads kernel files: their location, and its period.

    `view` is the /proc directory of the process whose mounts and network are read: our own, or the
    host's first process if the host's /proc is mounted elsewhere (in a container).
    """

    name: str

    def __init__(self, config: Config) -> None:
        self.period_s = config.collect.periods.get(self.name, config.collect.period)
        self.timeout_s = config.collect.timeouts.get(self.name, config.collect.timeout)
        self.proc = Path(config.collect.proc)
        self.sys = Path(config.collect.sys)
        self.view = self.proc / ("self" if config.collect.proc == "/proc" else "1")


def read(path: str | os.PathLike[str], limit: int = 1 << 20) -> bytes:
    """Returns the first `limit` bytes of a kernel file, which may return less than requested per
    call.

    Raises:
        OSError: It does not exist, access is denied, or its process has ended.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        parts = []
        while limit > 0 and (part := os.read(descriptor, min(limit, 1 << 18))):
            parts.append(part)
            limit -= len(part)
    finally:
        os.close(descriptor)
    return b"".join(parts)


def read_if_there(path: str | os.PathLike[str]) -> bytes:
    """Returns the content of a kernel file; empty if it does not exist or its device is off."""
    try:
        return read(path)
    except OSError:
        return b""
