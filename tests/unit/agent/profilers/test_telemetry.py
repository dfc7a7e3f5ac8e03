"""The series of a window: of host and devices, and of the job alone that is asked for."""

from __future__ import annotations

import asyncio
import gzip
import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from support.agent_server import full_board
from traceloom.agent.collectors.scheduler import Scheduler
from traceloom.agent.metrics import METRICS, HistogramReading, Reading
from traceloom.agent.profilers.base import ProfilerError, Window
from traceloom.agent.profilers.telemetry import TelemetryProfiler
from traceloom.agent.snapshot import Snapshot


class Counting:
    """A collector of one counter that counts its runs; left alone, it runs once a minute."""

    name, period_s, timeout_s = "cpu", 60.0, 5.0

    def __init__(self) -> None:
        self.runs = 0

    def collect(self) -> Sequence[Reading | HistogramReading]:
        self.runs += 1
        return [Reading("host_cpu_seconds_total", ("user",), self.runs)]

    def list_problems(self) -> list[str]:
        return []


def _recorded(
    host_snapshot: Snapshot,
    directory: Path,
    seconds: float,
    more: Callable[[Scheduler], Any] = lambda _: None,
) -> Any:
    async def live() -> None:
        scheduler = Scheduler(host_snapshot, [Counting()])
        scheduler.start()
        try:
            telemetry = TelemetryProfiler(host_snapshot, scheduler, "node1")
            process = host_snapshot.processes["11@100"]
            recording = asyncio.create_task(
                telemetry.record(process, Window(0, seconds, None), directory, "node1")
            )
            await asyncio.sleep(0.2)
            more(scheduler)
            assert await recording == [directory / "node1.telemetry.json.gz"]
        finally:
            await scheduler.stop()

    asyncio.run(live())
    return json.loads(gzip.decompress((directory / "node1.telemetry.json.gz").read_bytes()))


def test_a_collector_that_is_slow_otherwise_runs_every_100_ms_meanwhile(tmp_path: Path) -> None:
    before = time.time_ns()
    document = _recorded(full_board(), tmp_path, 3.0)
    assert (document["format"], document["version"], document["host"]) == (
        "traceloom-telemetry",
        1,
        "node1",
    )
    (curve,) = [
        each
        for each in document["series"]
        if each["metric"] == "traceloom_host_cpu_seconds_total"
        and each["labels"] == {"mode": "user"}
        and len(each["values"]) > 1
    ]
    assert (curve["unit"], curve["kind"]) == ("seconds", "counter")
    runs = curve["values"][1:]  # behind what was known when it began
    assert runs == sorted(runs)
    assert len(runs) >= 5  # 30 on a machine that has nothing else to do
    assert len(curve["times_ns"]) == len(curve["values"])
    assert all(before <= at <= time.time_ns() for at in curve["times_ns"][1:])


def test_series_of_other_jobs_are_left_out(tmp_path: Path) -> None:
    series = _recorded(full_board(), tmp_path, 0.5)["series"]
    named = {each["metric"].removeprefix("traceloom_") for each in series}
    assert {
        "gpu_power_watts",
        "host_cpu_seconds_total",
        "process_cpu_seconds_total",
        "job_power_watts",
    } <= named
    assert not {
        name
        for name in named
        if METRICS[name].kind == "info" or name.startswith(("agent_", "collector_"))
    }
    for label, own in (("process", "11@100"), ("job", "slurm-7"), ("cgroup", "/slurm-7")):
        assert {each["labels"][label] for each in series if label in each["labels"]} == {own}
    assert {each["labels"]["device"] for each in series if "gpu_power" in each["metric"]} == {
        "GPU-0",
        "GPU-1",
    }


def test_nobody_watches_when_it_is_over_or_cancelled(tmp_path: Path) -> None:
    host_snapshot = full_board()
    _recorded(host_snapshot, tmp_path, 0.3)
    assert host_snapshot.listeners == []

    async def cancelled() -> None:
        recording = asyncio.create_task(
            TelemetryProfiler(host_snapshot, Scheduler(host_snapshot, []), "node1").record(
                host_snapshot.processes["11@100"], Window(0, 600.0, None), tmp_path, "other"
            )
        )
        await asyncio.sleep(0.2)
        assert len(host_snapshot.listeners) == 1
        recording.cancel()
        with pytest.raises(asyncio.CancelledError):
            await recording

    asyncio.run(cancelled())
    assert host_snapshot.listeners == []
    assert not (tmp_path / "other.telemetry.json.gz").exists()


def test_a_window_without_a_time_and_a_file_that_is_there(tmp_path: Path) -> None:
    host_snapshot = full_board()
    telemetry = TelemetryProfiler(host_snapshot, Scheduler(host_snapshot, []), "node1")
    for window, slug in (
        (Window(0, None, 3), "no-duration"),
        (Window(0, 0.1, None), "cannot-write"),
    ):
        (tmp_path / "node1.telemetry.json.gz").touch()
        with pytest.raises(ProfilerError) as raised:
            asyncio.run(
                telemetry.record(host_snapshot.processes["11@100"], window, tmp_path, "node1")
            )
        assert raised.value.slug == slug
