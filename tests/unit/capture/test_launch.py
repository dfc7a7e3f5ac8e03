"""A command that is recorded: what becomes of it, what is said in the end, and that nothing is left behind."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from support.waiting import until
from traceloom.capture import manifest
from traceloom.capture.launch import Launch
from traceloom.capture.settings import Settings
from traceloom.errors import OutputError, UsageError

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="its commands are those of a shell")
# What a rank that recorded steps 5 and 6 says of itself.
PART: dict[str, Any] = {
    "rank": 0,
    "name": "rank0",
    "job": None,
    "notices": [],
    "steps": {"start_ns": [1] * 9},
    "graph_step": None,
    "window": {
        "file": "rank0.kineto.json.gz",
        "first_step": 5,
        "step_count": 2,
        "start_ns": 1,
        "end_ns": 2,
    },
    "overhead": {
        "ratio": 1.25,
        "ratio_low": 1.0,
        "ratio_high": 1.5,
        "ratio_of": "cpu",
        "graph_step_ratio": None,
    },
}


def launch(directory: Path, *command: str, force: bool = False) -> Launch:
    return Launch(Settings(str(directory)), list(command), force=force)


def writes(
    directory: Path, part: str, name: str = "rank0", then: str = "exit 0"
) -> tuple[str, ...]:
    """A command that leaves a part of a capture, as a recorded process does."""
    return (
        "sh",
        "-c",
        'printf %s "$1" > "$2"; eval "$3"',
        "sh",
        part,
        str(directory / f"{name}.capture.json"),
        then,
    )


@pytest.mark.parametrize(
    ("command", "status", "slug"),
    [
        pytest.param(("true",), 0, "no-hook", id="no Python"),
        pytest.param(("sh", "-c", "exit 7"), 7, "no-hook", id="fails"),
        pytest.param((sys.executable, "-c", "raise SystemExit(3)"), 3, "no-torch", id="no torch"),
        pytest.param((sys.executable, "-I", "-c", "pass"), 0, "no-hook", id="isolated"),
        pytest.param(("sh", "-c", "kill -9 $$"), -9, "ended-unseen", id="killed"),
        pytest.param(("sh", "-c", "kill -11 $$"), -11, "ended-unseen", id="crashes"),
    ],
)
@pytest.mark.parametrize("existing", [False, True], ids=["new", "with a file"])
def test_what_comes_to_nothing_says_why_and_leaves_nothing(
    tmp_path: Path, command: tuple[str, ...], status: int, slug: str, existing: bool
) -> None:
    directory = tmp_path / "run"
    if existing:
        directory.mkdir()
        (directory / "notes.txt").write_text("the user's")
    recording = launch(directory, *command)
    assert recording.run() == status
    (line,) = recording.summary("run")
    assert line.startswith("nothing was recorded: ")
    assert line.endswith(f" [{slug}]")
    if status < 0:
        assert signal.Signals(-status).name in line
    assert not recording.recorded
    assert (
        [path.name for path in directory.rglob("*")] == ["notes.txt"]
        if existing
        else not directory.exists()
    )


def test_the_command_gets_its_environment_and_ours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OF_THE_USER", "stays")
    monkeypatch.setenv("PYTHONPATH", "/of/the/user")
    monkeypatch.setenv("KINETO_LOG_LEVEL", "1")
    out = tmp_path / "environment.json"
    script = "import json, os, sys; json.dump(dict(os.environ), open(sys.argv[1], 'w'))"
    recording = launch(tmp_path / "run", sys.executable, "-c", script, str(out))
    before = dict(os.environ)
    assert recording.run() == 0
    recording.summary("run")
    told = json.loads(out.read_text())
    assert (told["OF_THE_USER"], told["KINETO_LOG_LEVEL"]) == ("stays", "1")
    assert told["PYTHONPATH"].endswith(":/of/the/user")
    assert json.loads(told["TRACELOOM_RECORD"])["directory"] == str(tmp_path / "run")
    assert dict(os.environ) == before


def test_what_a_rank_wrote_is_merged_with_what_is_known_of_the_run(tmp_path: Path) -> None:
    directory = tmp_path / "run"
    command = writes(directory, json.dumps(manifest.document([PART], {})), then="kill -15 $$")
    before_ns = time.time_ns()
    recording = launch(directory, *command)
    assert recording.run() == -15
    lines = recording.summary("shown")
    capture = json.loads((directory / "capture.json").read_text())
    run = capture["run"]
    assert (run["command"], run["exit_code"], run["signal"]) == (list(command), None, 15)
    assert before_ns <= run["started_ns"] <= run["ended_ns"] <= time.time_ns()
    unseen = {"file": None, "reason": "the process did not say when its window opened"}
    assert capture["ranks"] == [PART | {"stack_samples": unseen}]
    assert lines[0] == (
        "recorded steps 5 to 6 of 9; a recorded step took 1.25 x (1.00 to 1.50) the CPU time of an unrecorded one"
    )
    assert lines[1].startswith("wrote shown (")
    assert lines[1].endswith("next: traceloom report shown")
    assert sorted(path.name for path in directory.rglob("*")) == [
        "capture.json",
        "rank0.capture.json",
    ]


@pytest.mark.parametrize(
    "part", ["", '{"rank": 0', "\xff", "[]", "null", '"rank0"', "{}", '{"ranks": 3}']
)
def test_parts_that_are_none_are_said_and_kept(tmp_path: Path, part: str) -> None:
    directory = tmp_path / "run"
    recording = launch(directory, *writes(directory, part))
    assert recording.run() == 0
    (line,) = recording.summary("run")
    assert line.startswith("the parts of the capture could not be put together: ")
    assert line.endswith(" [not-merged]")
    assert (directory / "rank0.capture.json").read_text() == part


@pytest.mark.parametrize("part", ["", "[]", "{}"])
def test_of_such_parts_an_earlier_capture_stays(tmp_path: Path, part: str) -> None:
    directory = tmp_path / "run"
    directory.mkdir()
    (directory / "rank0.capture.json").write_text(json.dumps(manifest.document([PART], {})))
    capture = manifest.merge(directory, {"command": ["earlier"]})
    recording = launch(directory, *writes(directory / ".traceloom" / "new", part), force=True)
    recording._command[-2] = str(recording._place / "rank0.capture.json")
    recording.run()
    merged, kept = recording.summary("run")
    assert (merged.endswith(" [not-merged]"), kept.endswith(" [kept-beside]")) == (True, True)
    assert json.loads((directory / "capture.json").read_text()) == capture
    assert (tmp_path / "run-unfinished-1" / "rank0.capture.json").read_text() == part


def test_a_command_that_there_is_not(tmp_path: Path) -> None:
    recording = launch(tmp_path / "run", "no-such-command-anywhere")
    with pytest.raises(UsageError) as raised:
        recording.run()
    assert raised.value.slug == "command-not-found"
    assert not (tmp_path / "run").exists()


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_directory_that_cannot_be_written(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(OutputError) as raised:
        launch(tmp_path / "run", "true")
    tmp_path.chmod(0o700)
    assert raised.value.slug == "not-writable"


def test_a_file_is_no_directory(tmp_path: Path) -> None:
    (tmp_path / "run").write_text("a file")
    with pytest.raises(OutputError) as raised:
        launch(tmp_path / "run", "true")
    assert raised.value.slug == "not-writable"
    assert (tmp_path / "run").read_text() == "a file"


def test_sigterm_is_passed_on_and_the_handlers_come_back(tmp_path: Path) -> None:
    ready = tmp_path / "ready"
    script = 'trap "exit 5" TERM; : > "$1"; while :; do sleep 0.05; done'
    recording = launch(tmp_path / "run", "sh", "-c", script, "sh", str(ready))
    before = [signal.getsignal(each) for each in (signal.SIGTERM, signal.SIGINT)]
    seen: list[Any] = []

    def act() -> None:
        until(ready.exists)
        seen.append(signal.getsignal(signal.SIGTERM))
        os.kill(os.getpid(), signal.SIGTERM)

    thread = threading.Thread(target=act)
    thread.start()
    status = recording.run()
    thread.join()
    recording.summary("run")
    assert status == 5
    assert seen[0] not in before
    assert [signal.getsignal(each) for each in (signal.SIGTERM, signal.SIGINT)] == before
