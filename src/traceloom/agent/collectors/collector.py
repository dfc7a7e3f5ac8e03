"""What collects: one module per thing that is looked at; each has a period, a time-out and a metric
about itself.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from traceloom.agent.config import Config
from traceloom.agent.metrics import HistogramReading, Reading


class Collector(Protocol):
    """Delivers all its readings each time. Blocks; called from a thread, never twice at once."""

    name: str
    period_s: float
    timeout_s: float

    def collect(self) -> Sequence[Reading | HistogramReading]:
        """Look.

        Raises:
            OSError: Nothing can be seen now; counted, and said in `agent doctor`.
        """

    def trouble(self) -> list[str]:
        """What of it does not work here: sentences for the doctor, each with what would help."""


class HostCollector:
    """A collector that reads the kernel's files: where they are, and how often it runs.

    `view` is the directory of the process whose mounts and network are meant: our own, or the
    host's first process where the host's /proc is mounted elsewhere than at /proc (in a container).
    """

    name: str

    def __init__(self, config: Config) -> None:
        self.period_s = config.collect.periods.get(self.name, config.collect.period)
        self.timeout_s = config.collect.timeouts.get(self.name, config.collect.timeout)
        self.proc = Path(config.collect.proc)
        self.sys = Path(config.collect.sys)
        self.view = self.proc / ("self" if config.collect.proc == "/proc" else "1")


def read(path: str | os.PathLike[str], limit: int = 1 << 20) -> bytes:
    """The first `limit` bytes of a file of the kernel, which gives less than was asked for per
    call.

    Raises:
        OSError: It is not there, is not ours to read, or its process ended.
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
    """A file of the kernel as of `read`; empty where it says nothing: it is not there, or its
    device is off.
    """
    try:
        return read(path)
    except OSError:
        return b""
