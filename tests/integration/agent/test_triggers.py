"""Traces that nobody asked for, of real ranks of stock PyTorch: by a metric, by the clock, after a kill for want of memory."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from support.memory_group import STARVED, limited_group
from support.running_agent import Running
from support.waiting import until
from traceloom.cli import main
from traceloom.formats import load
from traceloom.server.client import AgentClient

pytestmark = [
    pytest.mark.torch,
    pytest.mark.skipif(sys.platform != "linux", reason="the agent is Linux's"),
]
WAIT_S = 180.0
# Trains, waits for its data where a file says so, and tells the agent of its steps; the agent may be gone for a while.
RANK = """
import sys, time
from pathlib import Path
import torch
from traceloom.server.client import AgentClient
from traceloom.errors import TraceloomError
client, slow = AgentClient(Path(sys.argv[1]), 60), Path(sys.argv[2])
model = torch.nn.Linear(64, 64)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
seconds, waited, told = [], 0.0, 0.0
while True:
    began = time.monotonic()
    if slow.exists():
        time.sleep(0.1)
        waited += time.monotonic() - began
    model(torch.ones(8, 64)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    time.sleep(0.005)
    seconds.append(time.monotonic() - began)
    if time.monotonic() - told > 0.3:
        try:
            client.post("steps", {"steps": seconds, "loader_wait_seconds": waited})
        except TraceloomError:
            pass
        seconds, waited, told = [], 0.0, time.monotonic()
"""


@contextmanager
def ranks(agent: Running, slow: Path, job: str, number: int) -> Iterator[None]:
    """So many ranks of a job that `agent env` alone has prepared; they step when it begins."""
    variables = agent.client.get("environment")["variables"]
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", RANK, str(agent.socket), str(slow)],
            env={
                **os.environ,
                **variables,
                "TRACELOOM_JOB": job,
                "RANK": str(rank),
                "WORLD_SIZE": str(number),
            },
        )
        for rank in range(number)
    ]

    def step() -> bool:
        assert all(process.poll() is None for process in processes)
        rows = [
            row for row in agent.client.get("processes")["processes"] if row["owner"]["job"] == job
        ]
        return len([row for row in rows if row["steps_per_second"]]) == number

    try:
        until(step, WAIT_S)
        yield
    finally:
        for process in processes:
            process.kill()
        for process in processes:
            process.wait(60)


def of_trigger(client: AgentClient, name: str) -> list[dict[str, Any]]:
    requests: list[dict[str, Any]] = client.get("requests")["requests"]
    return [
        request for request in requests if request["trigger"] and request["trigger"]["rule"] == name
    ]


def ended(client: AgentClient, name: str) -> dict[str, Any]:
    request: dict[str, Any] = until(
        lambda: next((request for request in of_trigger(client, name) if request["done"]), None),
        WAIT_S,
    )
    return request


def told(client: AgentClient, name: str) -> dict[str, Any]:
    answer: dict[str, Any] = next(
        each for each in client.get("triggers")["rules"] if each["name"] == name
    )
    return answer


@pytest.mark.thorough
def test_ranks_that_wait_for_data_are_traced_unasked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    job, slow = f"waits-{os.getpid()}", tmp_path / "slow"
    rules = f"""
[[triggers]]
name = "waits"
on = "metric"
metric = "dataloader_wait_seconds_total"
where = {{ job = "{job}" }}
above = 0.2
duration = 0.4
cooldown = 50000
[[triggers]]
name = "never"
on = "metric"
metric = "rdma_port_up"
below = 1
[trigger_budget]
share = 0.5
"""
    agent = Running(tmp_path, rules)
    try:
        with ranks(agent, slow, job, 2):
            assert of_trigger(agent.client, "waits") == []
            slow.touch()
            request = ended(agent.client, "waits")
            assert [(target["rank"], target["state"]) for target in request["targets"]] == [
                (0, "kept"),
                (1, "kept"),
            ], request
            assert (request["who"], request["uid"], request["trigger"]["target"]) == (
                "trigger waits",
                os.geteuid(),
                job,
            )
            assert f"dataloader_wait_seconds_total of job {job}" in request["trigger"]["what"]
            folder = tmp_path / "traces" / str(os.geteuid()) / request["id"]
            assert sorted(
                trace.rank for trace in load(folder).traces if trace.rank is not None
            ) == [0, 1]
            document = json.loads((folder / "capture.json").read_text(encoding="utf-8"))
            assert document["request"]["trigger"] == request["trigger"]
            measured = until(lambda: (rule := told(agent.client, "waits"))["kept_bytes"] and rule)
            assert measured["kept_bytes"] == sum(target["bytes"] for target in request["targets"])
            assert measured["fired"] == 1
            assert main(["trace", "--list", "--socket", str(agent.socket)]) == 0
            printed = capsys.readouterr().out
            assert "by trigger waits" in printed
            assert request["trigger"]["what"] in printed
            checks = {
                check["name"]: check
                for check in agent.client.get("doctor")["checks"]
                if check["area"] == "triggers"
            }
            assert checks["waits"]["works"] == "yes"
            assert "no collector delivers `rdma_port_up`" in checks["never"]["why"]

            # It goes on while the agent, which is killed, is away; the next one knows what was traced, and that it was of late.
            assert agent.end(signal.SIGKILL) == -signal.SIGKILL
            again = Running(tmp_path, rules)
            agent.client, agent.process, agent.short, agent.log = (
                again.client,
                again.process,
                again.short,
                again.log,
            )
            refused = until(
                lambda: (rule := told(agent.client, "waits"))["refusals"].get("cooldown") and rule,
                WAIT_S,
            )
            assert (refused["fired"], refused["last"]["request"]) == (1, request["id"])
            assert refused["last_refusal"]["reason"] == "cooldown"
            assert len(of_trigger(agent.client, "waits")) == 1

            def counted() -> bool:
                where = "trigger=waits,reason=cooldown"
                answer = agent.client.get(
                    "query", metric="trigger_refusals_total", raw="true", where=where
                )
                return any(row["values"][-1] >= 1 for row in answer["series"])

            until(counted)
            assert main(["agent", "triggers", "--socket", str(agent.socket)]) == 0
            printed = capsys.readouterr().out
            assert "cooldown" in printed
            assert f"request {request['id']}" in printed
            assert "as things are it cannot fire: no collector delivers `rdma_port_up`" in printed
    finally:
        assert agent.end() == 0
    results = [
        json.loads(line)
        for line in (tmp_path / "audit.jsonl").read_text(encoding="utf-8").splitlines()
    ]
    assert [line["result"] for line in results if line["who"] == "trigger waits"][:2] == [
        "done",
        "cooldown",
    ]
    assert "Traceback" not in (tmp_path / "log").read_text(encoding="utf-8")


@pytest.mark.thorough
def test_by_the_clock_and_after_a_kill_for_want_of_memory(tmp_path: Path) -> None:
    job = f"starved-{os.getpid()}"
    rules = f"""
[[triggers]]
name = "often"
on = "cadence"
every = 2
cooldown = 50000
where = {{ job = "{job}" }}
duration = 0.2
target = "slowest-and-median"
[[triggers]]
name = "killed"
on = "oom-kill"
where = {{ job = "{job}" }}
duration = 0.2
cooldown = 1
[trigger_budget]
share = 0.5
"""
    with limited_group() as group:
        agent = Running(tmp_path, rules)
        try:
            with ranks(agent, tmp_path / "slow", job, 1):
                request = ended(agent.client, "often")
                assert [target["state"] for target in request["targets"]] == ["kept"]
                assert request["trigger"]["what"] == "every 2.00 s"
                until(lambda: told(agent.client, "often")["refusals"].get("cooldown"), WAIT_S)

                program = [sys.executable, "-c", STARVED, str(group)]
                environment = {**os.environ, "TRACELOOM_JOB": job}
                with subprocess.Popen(
                    program, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment
                ) as starved:
                    try:
                        assert starved.stdin is not None
                        assert starved.stdout is not None
                        starved.stdout.readline()
                        where = f"job={job},cgroup=/{group.name}"
                        until(
                            lambda: agent.client.get(
                                "query", metric="oom_kills_total", where=where, raw="true"
                            )["series"]
                        )
                        starved.stdin.write(b"\n")
                        starved.stdin.flush()
                        starved.wait(60)
                    finally:
                        starved.kill()
                killed = ended(agent.client, "killed")
                assert [(target["rank"], target["state"]) for target in killed["targets"]] == [
                    (0, "kept")
                ], killed
                assert (
                    killed["trigger"]["what"]
                    == f"1 process killed for want of memory in /{group.name}"
                )
        finally:
            assert agent.end() == 0
    assert "Traceback" not in (tmp_path / "log").read_text(encoding="utf-8")


def test_without_rules_it_shows_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    agent = Running(tmp_path)
    try:
        assert main(["agent", "triggers", "--socket", str(agent.socket)]) == 0
        printed = capsys.readouterr().out
        assert "nothing is traced unasked" in printed
        assert "[[triggers]]" in printed
        assert not (tmp_path / "triggers.db").exists()
    finally:
        assert agent.end() == 0
