"""What host, devices and the processes of a job did in a window, every 100 ms: all their series."""

from __future__ import annotations

import asyncio
import contextlib
import time
from array import array
from bisect import bisect_right
from collections.abc import Mapping
from pathlib import Path

import msgspec
from isal import igzip

from traceloom.agent.collectors.scheduler import Scheduler
from traceloom.agent.metrics import METRICS, Series
from traceloom.agent.ownership.model import Process
from traceloom.agent.profilers.base import ProfilerError, Window
from traceloom.agent.snapshot import Board, Sheet

VERSION = 1
_MOST_VALUES = 4_000_000  # 64 MB: 1,000 series for more than six minutes
_FAST_S = 2.0  # at once; renewed until the window is over
_AGENT = ("agent_", "collector_")  # metrics about the agent itself


class TelemetryProfiler:
    """The profiler `telemetry`: one file per host, whichever of a job's processes it is asked for.

    The series are those of the host and its devices, which everybody sees, and of the processes, the job and the
    control groups of the target alone.

    Args:
        board: Where the collectors put what they read.
        scheduler: Runs them.
        host: Its name.
    """

    name = "telemetry"

    def __init__(self, board: Board, scheduler: Scheduler, host: str) -> None:
        self.board, self.scheduler, self.host = board, scheduler, host

    def resources(self, process: Process) -> frozenset[str]:
        """It excludes nothing: the collectors run anyway."""
        del process
        return frozenset()

    async def record(self, process: Process, window: Window, directory: Path, stem: str) -> list[Path]:
        """Writes `STEM.telemetry.json.gz`; the stem is the host's name.

        Raises:
            ProfilerError: `no-duration`, `cannot-write`.
        """
        over = window.over()
        values: dict[Series, tuple[array[int], array[float]]] = {}
        room = _MOST_VALUES

        def take(_collector: str, sheet: Sheet) -> None:
            nonlocal room
            allowed = allowed_labels(self.board, process)
            for series, value in sheet.values.items():
                if room and is_wanted(series, allowed):
                    times, numbers = values.setdefault(series, (array("q"), array("d")))
                    times.append(sheet.at_ns)
                    numbers.append(value)
                    room -= 1

        try:
            await asyncio.sleep(max(0.0, (window.start_ns - time.time_ns()) / 1e9))
            for name, sheet in self.board.sheets.items():
                take(name, sheet)  # what was last known when it began: of slow collectors that is all there is
            self.board.watchers.append(take)
            while not over.done():
                self.scheduler.fast(_FAST_S)
                await asyncio.wait({over}, timeout=_FAST_S / 2)
        finally:
            over.cancel()
            with contextlib.suppress(ValueError):  # it had not begun
                self.board.watchers.remove(take)
        start_ns, end_ns = await over
        for series, (times, numbers) in list(values.items()):
            # With what was last known when it began.
            kept = slice(max(bisect_right(times, start_ns) - 1, 0), bisect_right(times, end_ns))
            values[series] = (times[kept], numbers[kept])
            if not values[series][0]:
                del values[series]
        return [await asyncio.to_thread(write, directory / f"{stem}.telemetry.json.gz", self.host, values, room == 0)]


def allowed_labels(board: Board, process: Process) -> Mapping[str, set[str]]:
    """The values of labels that say whose a series is: those of the processes of the same job and user."""
    same = [
        other
        for other in board.processes.values()
        if other.key == process.key
        or (process.owner.job and other.owner.job == process.owner.job and other.uid == process.uid)
    ] or [process]
    return {
        "process": {other.key for other in same},
        "job": {other.owner.job for other in same if other.owner.job},
        "cgroup": {other.cgroup for other in same} | {""},
    }


def is_wanted(series: Series, allowed: Mapping[str, set[str]]) -> bool:
    """Whether a series is kept: about the host, or about what is `allowed`; not about the agent itself."""
    name, labels = series
    metric = METRICS[name]
    if metric.kind == "info" or name.startswith(_AGENT):
        return False
    return all(
        label not in allowed or value in allowed[label] for label, value in zip(metric.labels, labels, strict=True)
    )


def write(path: Path, host: str, values: Mapping[Series, tuple[array[int], array[float]]], cut: bool) -> Path:
    """Put series, each with times in ns and values, into a new file; returns its path.

    Args:
        path: `STEM.telemetry.json.gz`.
        host: Its name.
        values: Series -> times and values, of equal lengths.
        cut: There was more.

    Raises:
        ProfilerError: `cannot-write`.
    """
    # Series after series, so that the interpreter is never held for long.
    head = msgspec.json.encode({"format": "traceloom-telemetry", "version": VERSION, "host": host, "cut": cut})
    try:
        with path.open("xb") as file, igzip.IGzipFile(filename="", fileobj=file, mode="wb", mtime=0) as packed:
            packed.write(head[:-1] + b',"series":[')
            for at, ((name, labels), (times, numbers)) in enumerate(sorted(values.items())):
                metric = METRICS[name]
                series = {
                    "metric": metric.full_name, "unit": metric.unit, "kind": metric.kind,
                    "labels": {label: text for label, text in zip(metric.labels, labels, strict=True) if text},
                    "times_ns": list(times), "values": list(numbers),
                }  # fmt: skip
                packed.write((b"," if at else b"") + msgspec.json.encode(series))
            packed.write(b"]}")
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise ProfilerError(f"the file cannot be written: {reason}", slug="cannot-write", where=str(path)) from error
    return path
