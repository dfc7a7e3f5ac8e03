"""All series of host, devices and a job's processes in a window, every 100 ms."""

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
from traceloom.agent.metrics import METRICS, SeriesKey
from traceloom.agent.ownership.model import Process
from traceloom.agent.profilers.base import ProfilerError, Window
from traceloom.agent.snapshot import CollectorResult, Snapshot

FORMAT_VERSION = 1
_MAX_VALUES = 4_000_000  # 64 MB: 1,000 series for more than six minutes
_FAST_COLLECTION_S = 2.0  # requested at a time; renewed until the window is over
_AGENT_PREFIXES = ("agent_", "collector_")  # metrics about the agent itself


class TelemetryProfiler:
    """The profiler `telemetry`: one file per host, whichever of a job's processes it is requested
    for.

    The series are those of the host and its devices, which everybody may see, and those of the
    target's processes, job and control groups.

    Args:
        host_snapshot: Receives the readings of the collectors.
        scheduler: Runs the collectors.
        host: Name of the host.
    """

    name = "telemetry"

    def __init__(self, snapshot: Snapshot, scheduler: Scheduler, host: str) -> None:
        self.host_snapshot, self.scheduler, self.host = snapshot, scheduler, host

    def resources(self, process: Process) -> frozenset[str]:
        """Always empty: the collectors run anyway."""
        del process
        return frozenset()

    async def record(
        self, process: Process, window: Window, directory: Path, stem: str
    ) -> list[Path]:
        """Write `STEM.telemetry.json.gz`; the stem is the host's name.

        Raises:
            ProfilerError: `no-duration`, `cannot-write`.
        """
        window_end = window.over()
        values: dict[SeriesKey, tuple[array[int], array[float]]] = {}
        room = _MAX_VALUES

        def take(_collector: str, sheet: CollectorResult) -> None:
            nonlocal room
            allowed = select_job_labels(self.host_snapshot, process)
            for series, value in sheet.values.items():
                if room and is_relevant_series(series, allowed):
                    times, numbers = values.setdefault(series, (array("q"), array("d")))
                    times.append(sheet.at_ns)
                    numbers.append(value)
                    room -= 1

        try:
            await asyncio.sleep(max(0.0, (window.start_ns - time.time_ns()) / 1e9))
            for name, result in self.host_snapshot.results.items():
                # The last values before the start: slow collectors may have no others.
                take(name, result)
            self.host_snapshot.listeners.append(take)
            while not window_end.done():
                self.scheduler.run_fast(_FAST_COLLECTION_S)
                await asyncio.wait({window_end}, timeout=_FAST_COLLECTION_S / 2)
        finally:
            window_end.cancel()
            with contextlib.suppress(ValueError):  # it had not started
                self.host_snapshot.listeners.remove(take)
        start_ns, end_ns = await window_end
        for series, (times, numbers) in list(values.items()):
            # Include the last values before the start.
            in_window = slice(
                max(bisect_right(times, start_ns) - 1, 0), bisect_right(times, end_ns)
            )
            values[series] = (times[in_window], numbers[in_window])
            if not values[series][0]:
                del values[series]
        return [
            await asyncio.to_thread(
                write_series, directory / f"{stem}.telemetry.json.gz", self.host, values, room == 0
            )
        ]


def select_job_labels(snapshot: Snapshot, process: Process) -> Mapping[str, set[str]]:
    """Returns the label values that identify the processes of the same job and user, by label."""
    job_processes = [
        other
        for other in snapshot.processes.values()
        if other.key == process.key
        or (process.owner.job and other.owner.job == process.owner.job and other.uid == process.uid)
    ] or [process]
    return {
        "process": {other.key for other in job_processes},
        "job": {other.owner.job for other in job_processes if other.owner.job},
        "cgroup": {other.cgroup for other in job_processes} | {""},
    }


def is_relevant_series(series: SeriesKey, allowed: Mapping[str, set[str]]) -> bool:
    """Whether a series is kept: about the host, or about `allowed` label values; not about the
    agent itself.
    """
    name, labels = series
    metric = METRICS[name]
    if metric.kind == "info" or name.startswith(_AGENT_PREFIXES):
        return False
    return all(
        label not in allowed or value in allowed[label]
        for label, value in zip(metric.labels, labels, strict=True)
    )


def write_series(
    path: Path,
    host: str,
    values: Mapping[SeriesKey, tuple[array[int], array[float]]],
    truncated: bool,
) -> Path:
    """Write series, each with times in ns and values, to a new file; returns its path.

    Args:
        path: `STEM.telemetry.json.gz`.
        host: Name of the host.
        values: Series -> times and values, of equal lengths.
        truncated: Whether values were dropped.

    Raises:
        ProfilerError: `cannot-write`.
    """
    # Encode series by series, so that the GIL is never held for long.
    header = msgspec.json.encode(
        {"format": "traceloom-telemetry", "version": FORMAT_VERSION, "host": host, "cut": truncated}
    )
    try:
        with (
            path.open("xb") as file,
            igzip.IGzipFile(filename="", fileobj=file, mode="wb", mtime=0) as gzip_file,
        ):
            gzip_file.write(header[:-1] + b',"series":[')
            for index, ((name, labels), (times, numbers)) in enumerate(sorted(values.items())):
                metric = METRICS[name]
                series = {
                    "metric": metric.full_name,
                    "unit": metric.unit,
                    "kind": metric.kind,
                    "labels": {
                        label: text
                        for label, text in zip(metric.labels, labels, strict=True)
                        if text
                    },
                    "times_ns": list(times),
                    "values": list(numbers),
                }
                gzip_file.write((b"," if index else b"") + msgspec.json.encode(series))
            gzip_file.write(b"]}")
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise ProfilerError(
            f"the file cannot be written: {reason}", slug="cannot-write", where=str(path)
        ) from error
    return path
