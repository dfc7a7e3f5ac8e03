"""`traceloom trace --attach`, through an agent: ranks that nobody prepared, what is refused, a kill of the agent."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from support.attaching import UnpreparedProgram
from support.running_agent import Running
from support.waiting import until
from traceloom.agent.attach.injection import explain_attach_refusal
from traceloom.cli import main
from traceloom.errors import TraceloomError
from traceloom.formats import load

WHY = explain_attach_refusal()[0]
pytestmark = [pytest.mark.torch, pytest.mark.skipif(bool(WHY), reason=WHY)]
JOB = f"unprepared-{os.getpid()}"
BERT = 40_002
ON = "[traces]\nattach = true\nwait = 60.0\n"


@pytest.fixture(scope="module")
def ranks() -> Iterator[list[UnpreparedProgram]]:
    def begin(rank: int) -> UnpreparedProgram:
        return UnpreparedProgram(
            RANK=str(rank), WORLD_SIZE="2", LOCAL_RANK=str(rank), TRACELOOM_JOB=JOB
        )

    with ThreadPoolExecutor(2) as threads:
        running = list(threads.map(begin, range(2)))
    try:
        yield running
    finally:
        codes = [program.close() for program in running]
    assert codes == [0, 0]


@pytest.fixture(scope="module")
def agent(
    ranks: list[UnpreparedProgram], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Running]:
    running = Running(tmp_path_factory.mktemp("agent"), ON)
    try:
        until(lambda: _known(running) == {0, 1}, 180)
        yield running
    finally:
        running.end()
    assert "Traceback" not in (running.directory / "log").read_text(encoding="utf-8")


def _known(agent: Running) -> set[int]:
    owners = [row["owner"] for row in agent.client.get("processes")["processes"]]
    return {owner["rank"] for owner in owners if owner["job"] == JOB}


def _trace(agent: Running, *words: str) -> int:
    return main(["trace", "--config", str(agent.directory / "agent.toml"), *words])


def _ended(agent: Running, request: str) -> dict[str, Any]:
    def done() -> dict[str, Any] | None:
        answer: dict[str, Any] = agent.client.get(f"requests/{request}")
        return answer if answer["done"] else None

    answer = until(done, 180)
    assert answer is not None
    return answer


def test_a_process_and_what_it_cost_it(
    agent: Running,
    ranks: list[UnpreparedProgram],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    output = tmp_path / "run"
    assert (
        _trace(
            agent, "--pid", str(ranks[0].pid), "--duration", "300ms", "--attach", "-o", str(output)
        )
        == 0
    )
    printed = capsys.readouterr()
    assert "rank0 timeline: stopped for " in printed.out
    assert f"traceloom report {output}" in printed.out
    (target,) = json.loads((output / "capture.json").read_text(encoding="utf-8"))["request"][
        "targets"
    ]
    assert target["attached_ns"] > 0
    assert 0 < target["pause_ns"] < 30e9
    assert main(["report", str(output), "--quiet"]) == 0
    assert ranks[0].ask("len(threading.enumerate())") == 1


@pytest.mark.thorough
def test_ranks_begin_at_one_instant(
    agent: Running,
    ranks: list[UnpreparedProgram],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    output = tmp_path / "run"
    words = (
        "--job",
        JOB,
        "--steps",
        "3",
        "--attach",
        "--profilers",
        "timeline,telemetry",
        "--json",
    )
    assert _trace(agent, *words, "-o", str(output)) in {0, 4}  # telemetry is by time
    request = json.loads(capsys.readouterr().out)
    timelines = [target for target in request["targets"] if target["profiler"] == "timeline"]
    assert [(target["state"], target["steps"]) for target in timelines] == [
        ("kept", 3),
        ("kept", 3),
    ]
    assert len({target["start_ns"] for target in timelines}) == 1
    for target in timelines:
        assert target["skew_ns"] == target["window_start_ns"] - target["start_ns"] > -500_000_000
    assert sorted(trace.rank for trace in load(output).traces) == [0, 1]


def test_without_attach_it_says_what_helps(
    agent: Running,
    ranks: list[UnpreparedProgram],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    pid, output = str(ranks[0].pid), str(tmp_path / "run")
    assert _trace(agent, "--pid", pid, "--steps", "1", "--profilers", "memory", "-o", output) == 3
    assert "add --attach" in capsys.readouterr().err
    assert (
        _trace(
            agent, "--pid", pid, "--steps", "1", "--profilers", "memory", "--attach", "-o", output
        )
        == 3
    )
    assert "does not use CUDA (no-cuda)" in capsys.readouterr().err


def test_memory_is_read_by_the_verb(
    agent: Running,
    ranks: list[UnpreparedProgram],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    ranks[1].ask("len(globals().setdefault('played', cuda(False)))")
    output = tmp_path / "run"
    words = (
        "--job",
        JOB,
        "--rank",
        "1",
        "--duration",
        "300ms",
        "--attach",
        "--profilers",
        "timeline,memory",
    )
    assert _trace(agent, *words, "-o", str(output)) == 0
    path = output / "rank1.memory.pickle"
    assert f"traceloom memory {path}" in capsys.readouterr().out
    assert main(["memory", str(path)]) == 0
    assert "cuda:0 holds 1.00 kB" in capsys.readouterr().out


@pytest.mark.thorough
def test_a_request_outlives_a_kill_of_the_agent(
    agent: Running, ranks: list[UnpreparedProgram]
) -> None:
    body = {"pids": [ranks[0].pid], "duration_s": 3.0, "attach": True}
    request = agent.client.post("requests", body)["id"]
    until(lambda: agent.client.get(f"requests/{request}")["targets"][0]["state"] == "accepted", 120)
    command = [
        sys.executable,
        "-m",
        "traceloom",
        "agent",
        "run",
        "--config",
        str(agent.directory / "agent.toml"),
    ]
    agent.process.send_signal(signal.SIGKILL)
    agent.process.wait()
    agent.process = subprocess.Popen(
        [*command, "--simulate", "2"], stdout=agent.log, stderr=agent.log
    )
    until(agent._answers)
    (target,) = _ended(agent, request)["targets"]
    assert (target["state"], target["attempt"]) == ("kept", 1), target


AS_BERT = """
import os, sys
from pathlib import Path
from traceloom.server.client import AgentClient
from traceloom.errors import TraceloomError
os.setgroups([]); os.setgid(int(sys.argv[2])); os.setuid(int(sys.argv[2]))
try:
    print(AgentClient(Path(sys.argv[1]), 60).post("requests", {"pids": [int(sys.argv[3])], "steps": 1, "attach": True}))
except TraceloomError as error:
    print(error.slug)
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to be another user")
def test_nobody_has_another_users_process_attached_to(
    ranks: list[UnpreparedProgram],
) -> None:
    folder = Path(tempfile.mkdtemp(prefix="tl"))
    folder.chmod(0o755)
    other = Running(folder, ON)
    try:
        command = [sys.executable, "-c", AS_BERT, str(other.socket), str(BERT), str(ranks[0].pid)]
        assert (
            subprocess.run(command, capture_output=True, text=True, check=True).stdout
            == "no-such-process\n"
        )
        lines = [
            json.loads(line)
            for line in (folder / "audit.jsonl").read_text(encoding="utf-8").splitlines()
        ]
        assert [line["result"] for line in lines if line["who"] == f"uid {BERT}"] == ["not-allowed"]
    finally:
        other.end()
        shutil.rmtree(folder)


def test_it_is_off_unless_the_configuration_says_so(
    ranks: list[UnpreparedProgram], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = Running(tmp_path)
    try:
        until(lambda: _known(other) == {0, 1}, 180)
        words = (
            "--pid",
            str(ranks[0].pid),
            "--steps",
            "1",
            "--attach",
            "-o",
            str(tmp_path / "run"),
        )
        assert _trace(other, *words) == 3
        refusal = capsys.readouterr().err
        assert "explain attach-off" in refusal
        assert "attach = true" in refusal
        with pytest.raises(TraceloomError) as error:
            other.client.post("requests", {"pids": [ranks[0].pid], "steps": 1, "attach": True})
        assert error.value.slug == "attach-off"
    finally:
        other.end()
