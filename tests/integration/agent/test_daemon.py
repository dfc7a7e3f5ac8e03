"""The agent as a user runs it: a process, asked over its socket."""

from __future__ import annotations

import datetime as dt
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from support.probes import needs_probes
from support.running_agent import Running
from support.waiting import until
from traceloom.cli import main
from traceloom.testing import TraceBuilder

JOB = "import torch, time; print('up', flush=True); time.sleep(600)"


def steps_of(agent: Running, pid: int) -> float | None:
    """Steps per second of a process; others on this host may take some too."""
    rows = agent.client.get("processes")["processes"]
    return next((row["steps_per_second"] for row in rows if row["pid"] == pid), None)


@pytest.fixture
def agent(tmp_path: Path) -> Iterator[Running]:
    running = Running(tmp_path)
    yield running
    if running.process.poll() is None:
        assert running.end() == 0
    assert "Traceback" not in (tmp_path / "log").read_text(encoding="utf-8")


def test_verbs_show_what_it_knows(
    agent: Running, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "120")

    def shown(*words: str) -> str:
        assert main(["agent", *words, "--socket", str(agent.socket)]) == 0
        return capsys.readouterr().out

    assert "accelerators" in shown("status")
    assert json.loads(shown("status", "--json"))["devices"] == 2
    until(lambda: agent.client.get("query", metric="gpu_power_watts")["series"])
    picture = shown("top", "--once")
    assert re.search(r" [\d.]+ % +[\d.]+ % +[\d.]+ GB +\d+ W +\d+", picture), picture
    assert re.search(r"memory .* of [\d.]+ GB", picture), picture
    until(lambda: len(agent.client.get("query", metric="gpu_power_watts")["series"]) == 2)
    curves = shown("query", "gpu_power_watts")
    assert "watts" in curves
    assert re.findall(r"^ GPU (\d) .* [▁-█]+$", curves, re.MULTILINE) == ["0", "1"]
    of_one = json.loads(shown("query", "gpu_power_watts", "--where", "device=1", "--json"))[
        "series"
    ]
    uuids = {device["index"]: device["uuid"] for device in agent.client.get("devices")["devices"]}
    assert [series["labels"]["device"] for series in of_one] == [uuids["1"]]
    until(lambda: agent.client.get("query", metric="host_cpu_seconds_total")["series"])
    answer = json.loads(shown("query", "host_cpu_seconds_total", "--by", "mode", "--json"))
    assert {"user", "idle"} <= {series["labels"]["mode"] for series in answer["series"]}
    assert answer["unit"] == "seconds/s"
    assert (
        json.loads(shown("query", "host_cpu_seconds_total", "--raw", "--json"))["unit"] == "seconds"
    )
    by_name = {check["name"]: check for check in json.loads(shown("doctor", "--json"))["checks"]}
    assert by_name["cpu"]["why"] == ""
    assert by_name["devices"]["why"] == "2 devices answering"
    rdma = list(Path("/sys/class").glob("infiniband/*/ports/*"))
    assert by_name["rdma"]["why"] == ("" if rdma else "there is nothing of it here")
    assert "✓ cpu" in shown("doctor")
    assert "KINETO_IPC_SOCKET_DIR" in shown("env")


def test_stacks_of_a_job_are_shown_with_the_rank_that_is_elsewhere(
    agent: Running,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    (tmp_path / "ranks.py").write_text(
        "import os, time\ndef load_batch():\n    time.sleep(600)\ndef step():\n    time.sleep(600)\n"
        "print('up', flush=True)\nload_batch() if os.environ['RANK'] == '1' else step()\n",
        encoding="utf-8",
    )
    ranks = [
        subprocess.Popen(
            [sys.executable, str(tmp_path / "ranks.py")],
            stdout=subprocess.PIPE,
            env={**os.environ, "RANK": str(rank), "WORLD_SIZE": "3", "TRACELOOM_JOB": "run1"},
        )
        for rank in range(3)
    ]
    try:
        for child in ranks:
            assert child.stdout is not None
            child.stdout.readline()
        until(
            lambda: [job for job in agent.client.get("jobs")["jobs"] if job["ranks"] == [0, 1, 2]]
        )

        def shown(*words: str) -> str:
            assert main(["agent", "stacks", *words, "--socket", str(agent.socket)]) == 0
            return capsys.readouterr().out

        lines = until(
            lambda: (text := shown("--job", "run1")) and "in `step`" in text and text
        ).splitlines()
        assert (
            lines[0].strip()
            == "rank 1 is in `load_batch` (ranks.py:3); ranks 0, 2 are in `step` (ranks.py:5)"
        )
        assert [line.strip() for line in lines if " > " in line or "load_batch (" in line] == [
            "rank 1: load_batch (ranks.py:3)"
        ]
        answer = json.loads(shown("--pid", str(ranks[0].pid), "--json"))
        assert [group["ranks"] for group in answer["groups"]] == [[0]]
        assert [frame[0] for frame in answer["groups"][0]["frames"]] == ["<module>", "step"]
    finally:
        for child in ranks:
            child.kill()
            child.communicate()
    audit = [
        json.loads(line)
        for line in (agent.directory / "audit.jsonl").read_text(encoding="utf-8").splitlines()
    ]
    assert any("/api/v1/stacks" in json.dumps(line) for line in audit)


@pytest.mark.torch
def test_a_pytorch_process_is_seen_with_owner_and_rank(
    agent: Running, capsys: pytest.CaptureFixture[str]
) -> None:
    ranks = {
        "RANK": "1",
        "WORLD_SIZE": "2",
        "LOCAL_RANK": "1",
        "SLURM_JOB_ID": "4242",
        "MY_PASSWORD": "not-to-be-kept",
    }
    job = subprocess.Popen(
        [sys.executable, "-c", JOB, "--token", "s3cr3t-value"],
        stdout=subprocess.PIPE,
        env={**os.environ, **ranks},
    )
    try:
        assert job.stdout is not None
        job.stdout.readline()

        def seen() -> Any:
            rows = agent.client.get("processes")["processes"]
            return next(
                (row for row in rows if row["pid"] == job.pid and row["owner"]["framework"]), None
            )

        row = until(seen)
        owner = row["owner"]
        assert (owner["job"], owner["rank"], owner["world_size"], owner["framework"]) == (
            "slurm-4242",
            1,
            2,
            "pytorch",
        )
        assert "s3cr3t-value" not in json.dumps(row)
        assert "not-to-be-kept" not in json.dumps(row)
        assert main(["agent", "ps", "--socket", str(agent.socket)]) == 0
        out = capsys.readouterr().out
        assert "slurm-4242" in out
        assert "1/2" in out
        assert re.search(r"1/2 +pytorch .* [\d.]+ [MG]B ", out), out
        jobs = agent.client.get("jobs")["jobs"]
        assert next(one for one in jobs if one["job"] == "slurm-4242")["ranks"] == [1]
        memory = until(
            lambda: agent.client.get(
                "query", metric="process_memory_bytes", by="job", where="job=slurm-4242"
            )["series"]
        )
        assert memory[0]["values"][-1] > 50e6
    finally:
        job.kill()
        job.communicate()
    until(
        lambda: not any(row["pid"] == job.pid for row in agent.client.get("processes")["processes"])
    )


def test_steps_that_a_job_reports(agent: Running) -> None:
    """The one who reports is known by its socket: this process, which belongs to no job."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRACELOOM_JOB", "mine")
        code = (
            "import sys, time\nfrom pathlib import Path\nfrom traceloom.server.client import AgentClient\n"
            "client = AgentClient(Path(sys.argv[1]))\n"
            "while True:\n    client.post('steps', {'steps': [0.02, 0.03], 'loader_wait_seconds': 0.01, 'rank': 3}); time.sleep(0.2)\n"
        )
        job = subprocess.Popen([sys.executable, "-c", code, str(agent.socket)])
    try:
        series = until(
            lambda: agent.client.get(
                "query", metric="dataloader_wait_seconds_total", where="job=mine"
            )["series"]
        )
        assert series[0]["labels"] == {"job": "mine", "rank": "3"}
        until(lambda: steps_of(agent, job.pid))
    finally:
        job.kill()
        job.wait()


@pytest.mark.torch
@needs_probes
def test_steps_of_a_process_that_nobody_prepared(
    agent: Running, capsys: pytest.CaptureFixture[str]
) -> None:
    code = (
        "import time, torch\nlayer = torch.nn.Linear(2, 2)\noptimizer = torch.optim.SGD(layer.parameters())\n"
        "data = torch.utils.data.DataLoader(torch.randn(10**6, 2))\n"
        "for batch in data:\n    layer(batch).sum().backward(); time.sleep(0.02); optimizer.step()\n"
    )
    environment = {**os.environ, "SLURM_JOB_ID": "77", "RANK": "1", "WORLD_SIZE": "2"}
    job = subprocess.Popen([sys.executable, "-c", code], env=environment)
    try:
        until(lambda: steps_of(agent, job.pid))
        waited = until(
            lambda: agent.client.get(
                "query", metric="dataloader_wait_seconds_total", where="job=slurm-77"
            )["series"]
        )
        assert waited[0]["labels"] == {"job": "slurm-77", "rank": "1"}
        assert main(["agent", "ps", "--socket", str(agent.socket), "--json"]) == 0
        rows = json.loads(capsys.readouterr().out)["processes"]
        assert next(row for row in rows if row["pid"] == job.pid)["steps_per_second"] > 0
        assert main(["agent", "doctor", "--socket", str(agent.socket)]) == 0
        assert "✓ steps" in capsys.readouterr().out
    finally:
        job.kill()
        job.wait()


def test_a_job_is_judged_by_its_own_trace(
    agent: Running,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its steps x the bytes that its trace copies per step are its input; the roofline is that of the trace."""
    trace = TraceBuilder(device_name="NVIDIA H100 80GB HBM3")
    for step in range(4):
        at = 1000.0 * step
        trace.step(step, at, 1000).launch("cudaMemcpyAsync", at + 10, 1, correlation=step + 1)
        trace.copy(
            "Memcpy HtoD (Pinned -> Device)", at + 30, 90, bytes=1_000_000, correlation=step + 1
        )
    path = trace.write(tmp_path / "trace.json")
    code = (
        "import sys, time\nfrom pathlib import Path\nfrom traceloom.server.client import AgentClient\n"
        "while True:\n    AgentClient(Path(sys.argv[1])).post('steps', {'steps': [0.1]}); time.sleep(0.2)\n"
    )
    environment = {**os.environ, "TRACELOOM_JOB": "judged"}
    job = subprocess.Popen([sys.executable, "-c", code, str(agent.socket)], env=environment)

    def learn(path: Path, *more: str) -> int:
        return main(["agent", "learn", str(path), "--socket", str(agent.socket), *more])

    try:
        until(lambda: steps_of(agent, job.pid))
        assert learn(tmp_path / "none.json", "--job", "judged") == 3
        assert "none.json" in capsys.readouterr().err
        assert learn(path, "--job", "jugded") == 3
        assert "judged" in capsys.readouterr().err
        monkeypatch.chdir(tmp_path)
        assert learn(Path("trace.json"), "--job", "judged") == 0
        assert re.search(r"copied to device +1\.00 MB", capsys.readouterr().out)
        bytes_of_input = until(
            lambda: agent.client.get(
                "query", metric="job_input_bytes_total", where="job=judged", raw="true"
            )["series"]
        )
        assert bytes_of_input[0]["labels"] == {"job": "judged", "source": "copies"}
        assert bytes_of_input[0]["values"][-1] % 1_000_000 == 0
    finally:
        job.kill()
        job.wait()


def test_killed_and_restarted_it_keeps_history_and_leaves_no_socket(tmp_path: Path) -> None:
    first = Running(tmp_path)
    until(lambda: first.client.get("query", metric="gpu_power_watts")["series"])
    time.sleep(1.5)  # two ticks of history
    before = time.time_ns()
    first.end(signal.SIGKILL)
    until(lambda: not first.socket.exists())
    second = Running(tmp_path)
    try:
        series = second.client.get("query", metric="gpu_power_watts")["series"]
        assert any(series["times_ns"][0] < before for series in series)
    finally:
        assert second.end() == 0
    assert not second.socket.exists()


def test_a_second_agent_is_refused(agent: Running) -> None:
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "traceloom",
            "agent",
            "run",
            "--config",
            str(agent.directory / "agent.toml"),
        ],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 3
    assert "agent-runs" in done.stderr
    assert agent.client.get("status")["pid"] == agent.process.pid


def test_times_without_a_zone_are_those_of_this_place(
    agent: Running, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    until(lambda: agent.client.get("query", metric="gpu_power_watts")["series"])
    for zone in ("Asia/Tokyo", "America/New_York"):
        monkeypatch.setenv("TZ", zone)
        time.tzset()
        since = dt.datetime.now() - dt.timedelta(minutes=5)  # noqa: DTZ005  (as one reads it off a clock)
        words = [
            "query",
            "gpu_power_watts",
            "--since",
            since.isoformat(timespec="minutes"),
            "--json",
        ]
        assert main(["agent", *words, "--socket", str(agent.socket)]) == 0
        answer = json.loads(capsys.readouterr().out)
        assert 4 * 60 < (answer["until_ns"] - answer["since_ns"]) / 1e9 < 10 * 60
        assert len(answer["series"]) == 2
    monkeypatch.undo()
    time.tzset()
    assert (
        main(
            [
                "agent",
                "query",
                "gpu_power_watts",
                "--since",
                "1m",
                "--until",
                "2m",
                "--socket",
                str(agent.socket),
            ]
        )
        == 3
    )
    assert "`until` is before `since`" in capsys.readouterr().err


def test_a_collector_that_there_is_not_is_refused(tmp_path: Path) -> None:
    (tmp_path / "agent.toml").write_text(
        "[collect]\nperiods = { cgroup = 1.0 }\n", encoding="utf-8"
    )
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "traceloom",
            "agent",
            "run",
            "--config",
            str(tmp_path / "agent.toml"),
        ],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 3
    assert "wrong-config" in done.stderr
    assert "did you mean `cgroups`" in done.stderr


def test_who_acts_stands_in_the_audit_log(agent: Running) -> None:
    agent.client.post("counters/pause", {"seconds": 5})
    entry = json.loads(
        until(
            lambda: (
                (agent.directory / "audit.jsonl").read_text(encoding="utf-8").splitlines()
                if (agent.directory / "audit.jsonl").exists()
                else []
            )
        )[0]
    )
    assert entry["who"] == f"uid {os.geteuid()}"
    assert (entry["what"], entry["result"], entry["pid"]) == (
        "/api/v1/counters/pause",
        "done",
        os.getpid(),
    )


def test_without_an_agent_it_says_how_to_start_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["agent", "status", "--socket", str(tmp_path / "none.sock")]) == 3
    assert "traceloom agent run" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "slug"),
    [
        (["query", "gpu_power_wats"], "no-such-metric"),
        (["status", "gpu_power_watts"], "wrong-usage"),
        (["run", "--config", "/none/agent.toml"], "unreadable"),
    ],
)
def test_wrong_calls(words: list[str], slug: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["agent", *words]) in {2, 3}
    assert slug in capsys.readouterr().err


def test_variables_of_a_job_lead_to_the_agent_that_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A user's own agent, else root's."""
    system = tmp_path / "run" / "agent.sock"
    monkeypatch.setattr("os.geteuid", lambda: 12345)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setattr("traceloom.agent.config.SYSTEM_SOCKET", system)
    own = tmp_path / "traceloom" / "agent.sock"

    def printed() -> dict[str, str]:
        assert main(["agent", "env", "--json"]) == 0
        answer: dict[str, str] = json.loads(capsys.readouterr().out)
        return answer

    assert printed()["TRACELOOM_AGENT"] == str(own)
    for path in (system, own):  # root's begins, then the user's
        path.parent.mkdir()
        path.touch()
        assert printed()["TRACELOOM_AGENT"] == str(path)
        assert printed()["KINETO_IPC_SOCKET_DIR"] == str(path.with_name("kineto") / "12345")


def test_the_doctor_needs_no_agent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("os.geteuid", lambda: 12345)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setattr("traceloom.agent.config.SYSTEM_SOCKET", tmp_path / "none.sock")
    assert main(["agent", "doctor", "--json"]) == 0
    checks = json.loads(capsys.readouterr().out)["checks"]
    assert {check["name"] for check in checks} >= {
        "cpu",
        "memory",
        "processes",
        "devices",
        "py-spy",
        "socket",
    }
