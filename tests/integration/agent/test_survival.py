"""What the agent survives: disks that are full or read-only, clocks that jump, being stopped; and what others see."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

import pytest

from support.faketime import as_file_says, needs_faketime
from support.running_agent import Running
from support.waiting import until
from traceloom.errors import TraceloomError
from traceloom.server.client import AgentClient

NOBODY = 65534
root_only = pytest.mark.skipif(
    os.geteuid() != 0, reason="only root mounts disks and becomes another user"
)


@contextlib.contextmanager
def small_disk(directory: Path, size: str) -> Iterator[Path]:
    directory.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(directory)]
    if (
        shutil.which("mount") is None
        or subprocess.run(command, capture_output=True, check=False).returncode
    ):
        pytest.skip("no disk can be mounted here")
    try:
        yield directory
    finally:
        subprocess.run(["umount", "--lazy", str(directory)], check=True)


def _goes_on(agent: Running) -> None:
    """It collects, and answers what is now."""
    state = agent.client.get("status")
    runs = {collector["name"]: collector["runs"] for collector in state["collectors"]}
    until(
        lambda: all(
            c["runs"] > runs[c["name"]] + 1 for c in agent.client.get("status")["collectors"]
        )
    )
    since = str(state["now_ns"] / 1e9)
    assert until(lambda: agent.client.get("query", metric="gpu_power_watts", since=since)["series"])
    assert agent.client.get("status")["devices"] == 2


def _ticks(history: Path) -> int:
    with contextlib.closing(sqlite3.connect(f"file:{history}?mode=ro", uri=True)) as database:
        return int(database.execute("SELECT count(*) FROM ticks").fetchone()[0])


def _has_more_than(ticks: int, history: Path) -> bool:
    return _ticks(history) > ticks


def _is_ahead(agent: Running, hours: float) -> bool:
    return (
        abs(float(agent.client.get("status")["now_ns"]) - time.time_ns() - hours * 3600e9) < 600e9
    )


def _fill(file: BinaryIO) -> None:
    while True:
        file.write(b"\0" * 4096)


def _entries(audit: Path, who: str) -> list[dict[str, Any]]:
    lines = audit.read_text(encoding="utf-8").splitlines()
    return [entry for entry in map(json.loads, lines) if entry["who"] == who]


def _no_traceback(agent: Running) -> None:
    assert "Traceback" not in (agent.directory / "log").read_text(encoding="utf-8")


@root_only
def test_a_full_disk(tmp_path: Path) -> None:
    """Ticks that do not fit are counted; memory and answers go on; what was before is there when there is room."""
    with small_disk(tmp_path / "disk", "2m") as disk:
        agent = Running(tmp_path, disk=disk)
        ballast = disk / "ballast"
        try:
            until(lambda: _ticks(disk / "agent.db"))
            before_ns = time.time_ns()
            with ballast.open("wb", buffering=0) as file, pytest.raises(OSError, match="No space"):
                _fill(file)
            until(lambda: agent.client.get("status")["history"]["lost_ticks"])
            assert agent.client.get("status")["history_error"]
            _goes_on(agent)
            agent.client.post("counters/pause", {"seconds": 1})
            checks = until(
                lambda: [
                    c
                    for c in agent.client.get("doctor")["checks"]
                    if c["area"] == "files" and c["works"] == "no"
                ]
            )
            assert {check["name"] for check in checks} >= {"history"}
        finally:
            assert agent.end() == 0
        ballast.unlink()
        again = Running(tmp_path, disk=disk)
        try:
            assert again.client.get("status")["history_error"] == ""
            series = again.client.get("query", metric="gpu_power_watts", since="1h")["series"]
            assert series[0]["times_ns"][0] < before_ns
        finally:
            assert again.end() == 0
    _no_traceback(again)


@pytest.mark.thorough
@root_only
def test_a_read_only_disk(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", "8m") as disk:
        assert Running(tmp_path, disk=disk).end() == 0
        subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
        agent = Running(tmp_path, disk=disk)
        try:
            until(lambda: agent.client.get("status")["history"]["lost_ticks"])
            _goes_on(agent)
            agent.client.get(
                "query", metric="gpu_power_watts", since="1h"
            )  # which looks at the disk too
            agent.client.post("counters/pause", {"seconds": 1})
            checks = {check["name"]: check for check in agent.client.get("doctor")["checks"]}
            assert (checks["history"]["works"], checks["audit"]["works"]) == ("no", "no")
        finally:
            assert agent.end() == 0
    _no_traceback(agent)


@pytest.mark.thorough
@needs_faketime
def test_a_clock_that_jumps(tmp_path: Path) -> None:
    """An hour ahead, then two back: it collects and writes at its pace, and every tick can be asked for, in order."""
    clock = tmp_path / "clock"
    clock.write_text("+0", encoding="ascii")
    environment = as_file_says(clock)
    agent = Running(tmp_path, environment=environment)
    try:
        began_ns = agent.client.get("status")["now_ns"]
        assert abs(began_ns - time.time_ns()) < 600e9
        until(lambda: agent.client.get("query", metric="gpu_power_watts", since="1m")["series"])
        until(
            partial(_has_more_than, _ticks(tmp_path / "agent.db"), tmp_path / "agent.db")
        )  # of this hour
        for hours in (1, -1):
            clock.write_text(f"{3600 * hours:+d}", encoding="ascii")
            until(partial(_is_ahead, agent, hours))
            written = _ticks(tmp_path / "agent.db")
            _goes_on(agent)
            until(partial(_has_more_than, written, tmp_path / "agent.db"))
            assert agent.client.get("status")["history"]["lost_ticks"] == 0
        span = {"since": str(began_ns / 1e9 - 7200), "until": str(began_ns / 1e9 + 7200)}
        times_ns = agent.client.get("query", metric="gpu_power_watts", **span)["series"][0][
            "times_ns"
        ]
        assert times_ns == sorted(times_ns)
        assert {round((at_ns - began_ns) / 3600e9) for at_ns in times_ns} == {-1, 0, 1}
    finally:
        agent.end(signal.SIGKILL)  # sleeps, which an end in order needs, fail under libfaketime
    _no_traceback(agent)


@pytest.mark.thorough
def test_it_is_stopped_for_a_while(tmp_path: Path) -> None:
    """Who asks meanwhile does not wait for ever; afterwards what was missed is not made up for."""
    agent = Running(tmp_path)
    try:
        began = time.monotonic()
        runs = {state["name"]: state["runs"] for state in agent.client.get("status")["collectors"]}
        agent.process.send_signal(signal.SIGSTOP)
        stopped = time.monotonic()
        with pytest.raises(TraceloomError, match="does not answer"):
            AgentClient(agent.socket, 4.0).get("status")
        paused_s = time.monotonic() - stopped
        agent.process.send_signal(signal.SIGCONT)
        states = agent.client.get("status")["collectors"]
        _goes_on(agent)
        most = (time.monotonic() - began - paused_s) / 0.2 + 3
        assert all(state["runs"] - runs[state["name"]] <= most for state in states)
        assert agent.socket.exists(), "its guard saw no end of it"
    finally:
        agent.process.send_signal(signal.SIGCONT)
        assert agent.end() == 0
    _no_traceback(agent)


AS_NOBODY = """
import json, os, sys
from pathlib import Path
from traceloom.server.client import AgentClient
from traceloom.errors import TraceloomError
os.setgroups([])
os.setgid(65534)
os.setuid(65534)
client = AgentClient(Path(sys.argv[1]), 30)
def post(route, body):
    try:
        return client.post(route, body)
    except TraceloomError as error:
        return error.slug
answers = {
    "you": client.get("status")["you"],
    "processes": client.get("processes"),
    "jobs": client.get("jobs"),
    "memory": client.get("query", metric="process_memory_bytes", by="job"),
    "groups": client.get("query", metric="job_processes"),
    "pause": post("counters/pause", {"seconds": 1}),
    "trace": post("traces", {"job": "ours", "path": "/etc/shadow"}),
    "audit": os.access(sys.argv[2], os.R_OK) or os.access(sys.argv[2], os.W_OK),
}
print(json.dumps(answers))
"""


@root_only
def test_another_user_sees_the_own_processes_alone_and_changes_nothing() -> None:
    directory = Path(tempfile.mkdtemp(prefix="traceloom-test-"))
    directory.chmod(0o755)
    agent = Running(directory)
    sleepers = [
        subprocess.Popen(
            ["sleep", "600"],
            user=user,
            cwd="/",
            env={"TRACELOOM_JOB": job, "PATH": "/usr/bin:/bin"},
        )
        for user, job in ((NOBODY, "theirs"), (0, "ours"))
    ]
    try:
        pids = {sleeper.pid for sleeper in sleepers}
        until(lambda: pids <= {row["pid"] for row in agent.client.get("processes")["processes"]})
        until(lambda: len(agent.client.get("query", metric="job_processes")["series"]) >= 2)
        agent.client.post("counters/pause", {"seconds": 1})
        until((directory / "audit.jsonl").exists)

        def asked() -> Any:
            command = [
                sys.executable,
                "-c",
                AS_NOBODY,
                str(agent.socket),
                str(directory / "audit.jsonl"),
            ]
            return json.loads(
                subprocess.run(command, capture_output=True, text=True, check=True).stdout
            )

        answers = until(lambda: (answers := asked())["memory"]["series"] and answers)
        assert answers["you"] == "own"
        assert [row["pid"] for row in answers["processes"]["processes"]] == [sleepers[0].pid]
        assert answers["processes"]["hidden"] >= 1
        assert [row["job"] for row in answers["jobs"]["jobs"]] == ["theirs"]
        assert {row["labels"]["job"] for row in answers["memory"]["series"]} == {"theirs"}
        assert {row["labels"]["job"] for row in answers["groups"]["series"]} == {"theirs"}
        assert (answers["pause"], answers["trace"], answers["audit"]) == (
            "not-allowed",
            "no-such-job",
            False,
        )
        entries = until(lambda: _entries(directory / "audit.jsonl", f"uid {NOBODY}"))
        assert (entries[0]["what"], entries[0]["result"]) == (
            "/api/v1/counters/pause",
            "not-allowed",
        )
    finally:
        for sleeper in sleepers:
            sleeper.kill()
            sleeper.wait()
        code = agent.end()
        log = (directory / "log").read_text(encoding="utf-8")
        shutil.rmtree(directory)
    assert code == 0
    assert "Traceback" not in log
