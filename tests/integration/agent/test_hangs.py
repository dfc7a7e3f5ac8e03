"""Jobs that stop, as an agent sees them that nobody asked: who is elsewhere, and when it is no hang."""

from __future__ import annotations

import gzip
import json
import os
import signal
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from support.running_agent import Running, running_agent
from support.stalling_job import StallingJob, reporting_job, stepping, torchrun_job
from support.waiting import until
from traceloom.agent.profilers import py_spy
from traceloom.server.client import AgentClient

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="the agent is for Linux"),
    pytest.mark.skipif(not py_spy.find_py_spy(), reason="py-spy is not installed"),
]
# So short that a test takes seconds; a machine that is busy lets no rank wait for so long.
SETTINGS = "[hangs]\nleast = 2.5\nsteps = 5.0\nevery = 0.001\n"


@pytest.fixture
def short() -> Iterator[Path]:
    """A directory whose name leaves room for that of a socket."""
    with tempfile.TemporaryDirectory(prefix="tl") as name:
        yield Path(name)


def hangs(client: AgentClient, job: str) -> list[dict[str, Any]]:
    listed: list[dict[str, Any]] = client.get("hangs", job=job)["hangs"]
    return listed


def next_hang(client: AgentClient, job: str, after: int = 0) -> dict[str, Any]:
    """The hang after so many others, once it is told."""
    return until(
        lambda: next((hang for hang in hangs(client, job)[after:] if hang["sentence"]), None), 180
    )


def value(client: AgentClient, metric: str, job: str) -> float | None:
    (row,) = [row for row in client.get("jobs")["jobs"] if row["job"] == job]
    return next(
        (each["value"] for each in row["values"] if each["metric"] == f"traceloom_{metric}"), None
    )


@pytest.mark.torch
@pytest.mark.parametrize(
    "kinds",
    [
        {"sleep": "sleep_long"},
        pytest.param(
            {"spin": "spin_around", "lock": "take_lock", "loader": "Numbers.__getitem__"},
            marks=pytest.mark.thorough,
        ),
    ],
    ids=["sleep", "spin-lock-loader"],
)
def test_a_rank_that_stops_is_named_by_stacks_and_flight_recorder(
    tmp_path: Path, short: Path, kinds: dict[str, str]
) -> None:
    name = f"hang-stops-{os.getpid()}"
    with (
        running_agent(tmp_path / "agent", SETTINGS, simulated=2) as client,
        torchrun_job(
            tmp_path, 2, name, reports_to=tmp_path / "agent/agent.sock", servers=short
        ) as job,
    ):
        stepping(client, name)
        until(lambda: value(client, "job_hung", name) == 0)
        for number, (kind, where) in enumerate(kinds.items()):
            job.tell(f"{kind} 1")
            hang = next_hang(client, name, number)
            assert hang["state"] == "hangs"
            assert hang["ranks"] == [1]
            assert f"rank 1 is in `{where}` (train.py:" in hang["sentence"]
            assert (
                "rank 0 waits in a collective" in hang["sentence"]
            )  # in `work.wait()`, which is C++
            assert (
                "by the flight recorder, rank 1 has not queued `all_reduce` number"
                in hang["sentence"]
            )
            assert "disagree" not in hang["sentence"]
            if kind == "sleep":
                # Without native calls too, the recorder tells that rank 0 waits.
                stacks = client.get("stacks", job=name, native="false")
                assert f"rank 1 is in `{where}`" in stacks["sentence"]
                assert "rank 0 waits in `all_reduce`" in stacks["sentence"]
                look_at_bundle(client, name, job, hang)
            job.tell("")
            until(lambda number=number: hangs(client, name)[number]["state"] == "recovered")  # type: ignore[misc]
        assert len(hangs(client, name)) == len(kinds)
        until(lambda: value(client, "job_hung", name) == 0)
        assert value(client, "job_hangs_total", name) == len(kinds)
        audit = [
            json.loads(line)
            for line in (tmp_path / "agent/audit.jsonl").read_text(encoding="utf-8").splitlines()
        ]
        assert [row["state"] for row in audit if row["what"] == "hang-over"] == ["recovered"] * len(
            kinds
        )
        noted = [row for row in audit if row["what"] == "hang"]
        assert [row["sentence"] for row in noted] == [
            hang["sentence"] for hang in hangs(client, name)
        ]


def look_at_bundle(client: AgentClient, name: str, job: StallingJob, hang: dict[str, Any]) -> None:
    directory = Path(hang["directory"])
    assert {path.name for path in directory.iterdir()} == set(hang["files"])
    assert directory.stat().st_mode & 0o777 == 0o700
    report = json.loads((directory / "hang.json").read_text(encoding="utf-8"))
    assert (report["format"], report["job"], report["ranks"]) == ("traceloom-hang", name, [1])
    assert report["sentence"] == hang["sentence"]
    witnesses = {each["source"]: each["ranks"] for each in report["witnesses"]}
    assert witnesses == {"stacks": [1], "flight recorder": [1]}
    assert {
        each["rank"] for each in report["members"] if each["flight"] == "asked its control server"
    } == {0, 1}
    stacks = json.loads((directory / "stacks.json").read_text(encoding="utf-8"))
    (elsewhere,) = [group for group in stacks["groups"] if group["elsewhere"]]
    assert elsewhere["ranks"] == [1]
    assert [frame[2] for frame in elsewhere["frames"] if frame[0] == "sleep_long"] == [
        job.line("SLEEPS")
    ]
    assert json.loads((directory / "flight_rank_0.json").read_text(encoding="utf-8"))["version"]
    (telemetry,) = directory.glob("*.telemetry.json.gz")
    series = json.loads(gzip.decompress(telemetry.read_bytes()))["series"]
    (pid,) = {each["pid"] for each in report["members"] if each["rank"] == 1}
    assert any(
        each["metric"] == "traceloom_process_cpu_seconds_total"
        and each["labels"]["process"].startswith(f"{pid}@")
        for each in series
    )
    page = (directory / "hang.md").read_text(encoding="utf-8")
    assert "sleep_long" in page
    assert "flight recorder: rank 1 has not queued" in page
    rows = {
        row["pid"]: row
        for row in client.get("processes")["processes"]
        if row["owner"]["job"] == name
    }
    hung = [row for row in rows.values() if row["hung_since_ns"] is not None]
    assert {row["owner"]["rank"] for row in hung} == {0, 1}
    assert {row["hung_since_ns"] for row in hung} == {hang["since_ns"]}
    until(lambda: value(client, "job_hung", name) == 1)


@pytest.mark.torch
@pytest.mark.thorough
def test_of_four_ranks_without_preparation_one_is_named_by_probes_and_stacks(
    tmp_path: Path,
) -> None:
    from support.probes import WHY_NOT

    if WHY_NOT:
        pytest.skip(f"no probes of functions here: {WHY_NOT}")
    name = f"hang-four-{os.getpid()}"
    with (
        running_agent(tmp_path / "agent", SETTINGS) as client,
        torchrun_job(tmp_path, 4, name) as job,
    ):
        stepping(client, name, 4)
        job.tell("sleep 2")
        hang = next_hang(client, name)
    assert hang["ranks"] == [2]
    assert f"rank 2 is in `sleep_long` (train.py:{job.line('SLEEPS')})" in hang["sentence"]
    assert "ranks 1, 3 wait in `all_reduce`" in hang["sentence"]
    assert "flight recorder" not in hang["sentence"]


def test_a_rank_that_is_stopped_or_killed_is_named_and_a_job_that_is_stopped_is_left(
    tmp_path: Path,
) -> None:
    name = f"hang-states-{os.getpid()}"
    with (
        running_agent(tmp_path / "agent", SETTINGS) as client,
        reporting_job(tmp_path, 2, name, tmp_path / "agent/agent.sock") as job,
    ):
        stepping(client, name)
        for process in job.processes:
            process.send_signal(signal.SIGSTOP)
        waited(client, name, 4)
        job.tell("work 0")  # what it does between its steps says nothing of the other
        job.processes[0].send_signal(signal.SIGCONT)
        hang = next_hang(client, name)
        assert hang["ranks"] == [1]
        assert "rank 1 is stopped by a signal or a debugger" in hang["sentence"]
        job.tell("step")
        job.processes[1].send_signal(signal.SIGCONT)
        until(lambda: hangs(client, name)[0]["state"] == "recovered")
        job.processes[1].kill()
        job.processes[1].wait(60)
        job.tell("step 1")  # rank 0 waits for it
        hang = next_hang(client, name, 1)
        assert hang["ranks"] == [1]
        assert f"rank 1 is not seen: its process {job.processes[1].pid} ended" in hang["sentence"]
        job.processes[0].kill()
        job.processes[0].wait(60)
        until(lambda: hangs(client, name)[1]["state"] == "ended")
        assert len(hangs(client, name)) == 2


@pytest.mark.thorough
def test_a_job_that_works_without_steps_does_not_hang(tmp_path: Path) -> None:
    name = f"hang-works-{os.getpid()}"
    with (
        running_agent(tmp_path / "agent", SETTINGS) as client,
        reporting_job(tmp_path, 2, name, tmp_path / "agent/agent.sock") as job,
    ):
        stepping(client, name)
        job.tell("evaluate 0")  # the other waits for it
        waited(client, name, 15)
        assert not hangs(client, name)
        job.tell("step")
        stepping(client, name)
        job.tell("idle")  # nobody waits in a collective, and both are where the other is
        hang = next_hang(client, name)
        assert hang["ranks"] == []
        assert "ranks 0, 1 are in `wait_for_others` (train.py:" in hang["sentence"]


@pytest.mark.thorough
def test_a_checkpoint_that_takes_long_is_no_hang(tmp_path: Path) -> None:
    if not _are_writes_counted(tmp_path):
        pytest.skip("the kernel does not count writes to this file system for processes")
    name = f"hang-checkpoint-{os.getpid()}"
    with (
        running_agent(tmp_path / "agent", SETTINGS) as client,
        reporting_job(tmp_path, 2, name, tmp_path / "agent/agent.sock") as job,
    ):
        stepping(client, name)
        job.tell("checkpoint 0")  # the other waits for it
        waited(client, name, 10)
        assert not hangs(client, name)


def _are_writes_counted(directory: Path) -> bool:
    def written() -> int:
        lines = Path("/proc/self/io").read_text(encoding="ascii").splitlines()
        return int(dict(line.split(": ") for line in lines)["write_bytes"])

    before = written()
    with (directory / "counted").open("wb") as file:
        file.write(bytes(1 << 20))
        file.flush()
        os.fsync(file.fileno())
    return written() - before >= 1 << 20


def waited(client: AgentClient, name: str, seconds: float) -> None:
    """The job makes no steps for longer than a hang takes to be seen, by the agent's own clock."""
    before = hangs(client, name)
    begun = client.get("clock")["monotonic_ns"]
    until(lambda: client.get("clock")["monotonic_ns"] > begun + seconds * 1e9)
    assert hangs(client, name) == before


@pytest.mark.thorough
def test_a_restart_of_the_agent_neither_forgets_nor_repeats_a_hang(tmp_path: Path) -> None:
    name = f"hang-restart-{os.getpid()}"
    agent = Running(tmp_path, SETTINGS.replace("0.001", "3600"))
    try:
        with reporting_job(tmp_path, 2, name, agent.socket) as job:
            stepping(agent.client, name)
            job.tell("idle")
            first = next_hang(agent.client, name)
            assert Path(first["directory"], "hang.md").is_file()
            until(lambda: first["id"] in (tmp_path / "hangs.json").read_text(encoding="utf-8"))
            agent.end(signal.SIGKILL)
            agent = Running(tmp_path, SETTINGS.replace("0.001", "3600"))
            (again,) = hangs(agent.client, name)
            assert (again["id"], again["state"], again["sentence"]) == (
                first["id"],
                "hangs",
                first["sentence"],
            )
            waited(agent.client, name, 5)
            job.tell("step")
            until(lambda: hangs(agent.client, name)[0]["state"] == "recovered")
            stepping(agent.client, name)
            # It hangs while no agent runs; and there is one bundle of a job in an hour.
            agent.end()
            job.tell("idle")
            agent = Running(tmp_path, SETTINGS.replace("0.001", "3600"))
            second = next_hang(agent.client, name, 1)
            assert second["directory"] == ""
            assert second["no_bundle"].startswith("one of this job was made 0 min ago")
            assert "are in `wait_for_others`" in second["sentence"]
            assert [path.name for path in Path(first["directory"]).parent.iterdir()] == [
                first["id"]
            ]
    finally:
        agent.end()


def test_the_bundle_belongs_to_the_jobs_user(short: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can become another user")
    name, anna = f"hang-anna-{os.getpid()}", 4001
    short.chmod(0o711)
    with (
        running_agent(short / "agent", SETTINGS) as client,
        reporting_job(short, 1, name, short / "agent/agent.sock", user=anna) as job,
    ):
        # A look before the process became its user's gives the name to root, and `NAME@USER` to the user.
        names = {name, f"{name}@{anna}"}
        name = until(lambda: next(iter(names & set(client.get("hangs")["watched"])), ""))
        stepping(client, name, 1)
        job.tell("idle")
        hang = next_hang(client, name)
        directory = Path(hang["directory"])
        assert hang["uid"] == anna
        assert {path.stat().st_uid for path in (directory, *directory.iterdir())} == {anna}
        assert {directory.parent.stat().st_uid, directory.parent.parent.stat().st_uid} == {0}
        os.seteuid(anna)
        try:
            assert "wait_for_others" in (directory / "hang.md").read_text(encoding="utf-8")
        finally:
            os.seteuid(0)
