"""`traceloom agent ACTION` asks what it says: its JSON is the agent's answer, its text has what the answer has."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from support.agent_server import SmallAgent, ask, listening
from traceloom.agent.metrics import METRICS
from traceloom.cli import main

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the agent is Linux's")


class Asking:
    """An agent that listens, and the command that asks it."""

    def __init__(self, agent: SmallAgent, socket: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.agent, self.socket, self._capsys = agent, socket, capsys

    def __call__(self, *words: str, code: int = 0) -> str:
        self._capsys.readouterr()
        action, *rest = words
        assert main(["agent", action, "--socket", str(self.socket), *rest]) == code
        printed = self._capsys.readouterr()
        return printed.out if not code else printed.err

    def route(self, path: str) -> Any:
        return ask(self.socket, f"/api/v1/{path}").json()


@pytest.fixture(scope="module")
def served() -> Iterator[tuple[SmallAgent, Path]]:
    folder, agent = Path(tempfile.mkdtemp(prefix="tl")), SmallAgent()
    with listening(agent, folder) as listeners:
        yield agent, listeners.socket_path
    shutil.rmtree(folder)


@pytest.fixture
def asking(served: tuple[SmallAgent, Path], capsys: pytest.CaptureFixture[str]) -> Asking:
    return Asking(*served, capsys)


@pytest.mark.parametrize("action", ["status", "hangs", "triggers", "doctor"])
def test_the_answer_of_a_route_is_printed_as_it_is(asking: Asking, action: str) -> None:
    answer, direct = json.loads(asking(action, "--json")), asking.route(action)
    for whole in (answer, direct):  # what differs from one moment to the next
        for name in ("uptime_seconds", "now_ns", "at_ns"):
            whole.pop(name, None)
    assert answer.keys() == direct.keys()
    assert asking(action).strip()


def test_processes_are_those_of_the_job(asking: Asking) -> None:
    everything = json.loads(asking("ps", "--json"))
    assert everything == asking.route("processes")
    own = json.loads(asking("ps", "--job", "slurm-7", "--json"))
    assert [row["key"] for row in own["processes"]] == ["11@100"]
    text = asking("ps", "--job", "slurm-7")
    assert "slurm-7" in text
    assert "slurm-8" not in text
    assert json.loads(asking("ps", "--job", "nobody", "--json"))["processes"] == []


def test_events_are_those_of_the_job_and_of_the_time(asking: Asking) -> None:
    events = json.loads(asking("events", "--json"))["events"]
    assert events == asking.route("events?since=10m")["events"]
    assert {event["kind"] for event in events} == {"xid", "oom-kill"}
    own = json.loads(asking("events", "--job", "slurm-7", "--json"))["events"]
    assert own == [event for event in events if event["job"] == "slurm-7"]
    assert own
    assert json.loads(asking("events", "--since", "0s", "--json"))["events"] != events


@pytest.mark.parametrize(
    ("words", "parameters"),
    [
        ((), {"by": (), "where": {}, "raw": False}),
        (("--by", "job,rank"), {"by": ("job", "rank")}),
        (("--where", "device=0"), {"where": {"device": "GPU-0"}}),  # by number, as people see them
        (("--where", "device=GPU-1"), {"where": {"device": "GPU-1"}}),
        (("--where", "device=1:0,job=a"), {"where": {"device": "MIG-1", "job": "a"}}),
        (("--raw",), {"raw": True}),
    ],
)
def test_a_question_reaches_the_history_as_it_was_meant(
    asking: Asking, words: tuple[str, ...], parameters: dict[str, Any]
) -> None:
    asking("query", "traceloom_gpu_busy_ratio", *words, "--json")
    question = asking.agent.questions[-1]
    assert question.metric == "gpu_busy_ratio"
    assert question.until_ns - question.since_ns == 600 * 10**9
    assert {name: getattr(question, name) for name in parameters} == parameters


def test_a_time_without_a_zone_is_one_of_here(
    asking: Asking, monkeypatch: pytest.MonkeyPatch
) -> None:
    import time

    monkeypatch.setenv("TZ", "Asia/Tokyo")
    time.tzset()
    try:
        asking(
            "query",
            "gpu_busy_ratio",
            "--since",
            "2026-01-31T12:00",
            "--until",
            "2026-01-31T12:00+00:00",
            "--json",
        )
        question = asking.agent.questions[-1]
        assert question.until_ns - question.since_ns == 9 * 3600 * 10**9
    finally:
        monkeypatch.undo()
        time.tzset()


def test_metrics_are_listed_without_an_agent(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert main(["agent", "query", "--socket", str(tmp_path / "none"), "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)
    assert len(listed) == len(METRICS)
    assert any("gpu_busy_ratio" in str(row) for row in listed)


def test_variables_are_ready_for_a_shell(asking: Asking) -> None:
    variables = json.loads(asking("env", "--json"))
    lines = [shlex.split(line) for line in asking("env").splitlines()]
    assert all(word == "export" and len(rest) == 1 for word, *rest in lines)
    assert dict(assignment.split("=", 1) for _, assignment in lines) == variables
    more = json.loads(asking("env", "--flight-recorder", "--json"))
    assert more.items() > variables.items()


def test_which_of_several_jobs_is_asked(asking: Asking) -> None:
    refused = asking("stacks", code=2)
    assert "which of 2 jobs?" in refused
    assert "no-such-job" in refused
    looked = json.loads(asking("stacks", "--job", "slurm-7", "--json"))
    assert set(looked) >= {"sentence", "groups", "unseen"}
    assert asking.agent.looked_at[-1] == ([11], False)
    asking("stacks", "--pid", "11", "--native")
    assert asking.agent.looked_at[-1] == ([11], True)


def test_a_picture_is_all_of_it_at_once(asking: Asking) -> None:
    picture = json.loads(asking("top", "--once", "--json", "--job", "slurm-8"))
    assert [row["key"] for row in picture["processes"]["processes"]] == ["22@100"]
    assert {device["uuid"] for device in picture["devices"]["devices"]} >= {"GPU-0", "GPU-1"}
    assert "slurm-8" in asking("top", "--once")


@pytest.mark.parametrize("action", ["status", "ps", "hangs", "triggers", "events", "top", "stacks"])
def test_without_an_agent_it_is_said_what_helps(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, action: str
) -> None:
    assert main(["agent", action, "--socket", str(tmp_path / "none")]) == 3
    error = capsys.readouterr().err
    assert "no agent runs here" in error
    assert "traceloom agent run" in error


def test_without_an_agent_the_doctor_looks_itself(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tmp_path / "agent.toml"
    config.write_text(
        "[paths]\n"
        + "".join(
            f'{name} = "{tmp_path / name}"\n' for name in ("socket", "history", "audit", "traces")
        )
    )
    monkeypatch.setattr("traceloom.agent.config.SYSTEM_SOCKET", tmp_path / "no-other")
    assert main(["agent", "doctor", "--config", str(config), "--json"]) == 0
    checks = json.loads(capsys.readouterr().out)["checks"]
    files = {check["name"]: check for check in checks if check["area"] == "files"}
    assert {name: check["works"] for name, check in files.items()} == dict.fromkeys(
        ("socket", "history", "audit"), "yes"
    )
    assert files["history"]["why"] == str(tmp_path / "history")
    assert (
        main(["agent", "doctor", "--socket", str(tmp_path / "none")]) == 3
    )  # one that was named is not there
    assert "no agent runs here" in capsys.readouterr().err
    assert os.listdir(tmp_path) == ["agent.toml"]  # noqa: PTH208
