"""A process of a job is killed for want of memory in a real control group: it is counted, and an event of the job."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.memory_group import LIMIT, STARVED, limited_group
from support.running_agent import Running
from support.waiting import until
from traceloom.cli import main


@pytest.fixture
def group() -> Iterator[Path]:
    with limited_group() as path:
        yield path


def test_a_kill_is_counted_and_told_with_its_job(
    group: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    path = f"/{group.name}"
    agent = Running(tmp_path)
    command = [sys.executable, "-c", STARVED, str(group)]
    environment = {**os.environ, "TRACELOOM_JOB": "starved"}
    job = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment)
    try:
        assert job.stdin is not None
        assert job.stdout is not None
        job.stdout.readline()

        def last(metric: str) -> float | None:
            where = f"job=starved,cgroup={path}"  # before it moved there, the job was seen in the group of this test
            series = agent.client.get("query", metric=metric, where=where, raw="true")["series"]
            return series[0]["values"][-1] if series else None

        until(lambda: last("oom_kills_total") == 0)
        assert last("cgroup_memory_limit_bytes") == LIMIT
        began_ns = time.time_ns()
        job.stdin.write(b"\n")
        job.stdin.flush()
        assert job.wait(60) == -signal.SIGKILL
        until(lambda: last("oom_kills_total") == 1)
        peak = last("cgroup_memory_peak_bytes")
        assert peak is not None
        assert LIMIT / 2 < peak <= LIMIT
        series = agent.client.get(
            "query", metric="oom_kills_total", by="cgroup", where="job=starved"
        )["series"]
        assert {"cgroup": path} in [row["labels"] for row in series]
        event = until(
            lambda: [e for e in agent.client.get("events")["events"] if e["kind"] == "oom-kill"]
        )[0]
        assert (event["job"], event["cgroup"], event["count"]) == ("starved", path, 1)
        assert began_ns <= event["at_ns"] <= time.time_ns()
        for words in (["ps"], ["events", "--since", "1h", "--job", "starved"]):
            assert main(["agent", *words, "--socket", str(agent.socket)]) == 0
            out = capsys.readouterr().out
            assert re.search(r"starved +oom-kill: 1 process killed for want of memory", out), out
        assert main(["agent", "events", "--job", "other", "--socket", str(agent.socket)]) == 0
        assert "Nothing happened" in capsys.readouterr().out
    finally:
        job.kill()
        job.communicate()
        assert agent.end() == 0
    assert "Traceback" not in (tmp_path / "log").read_text(encoding="utf-8")
