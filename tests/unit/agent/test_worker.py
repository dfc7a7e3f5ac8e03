"""Tasks in processes of their own: what they give, how they fail, and that none is left behind."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.waiting import until
from traceloom.agent import worker
from traceloom.errors import TraceloomError
from traceloom.system.processes import WorkerProcess

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the agent is Linux's")


def children() -> set[str]:
    pids: set[str] = set()
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(FileNotFoundError):  # a thread that has ended since
            pids.update((task / "children").read_text().split())
    return pids


@pytest.fixture
def silent(tmp_path: Path) -> Iterator[str]:
    """A socket that somebody listens at, and never answers."""
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "s"))
        listener.listen()
        yield str(tmp_path / "s")


def test_what_a_task_gives_comes_back(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"no record")
    result = worker.run("flight-records", files={"3": str(tmp_path / "a")})
    assert list(result["bad"]) == ["3"]
    assert "the file is no dump of PyTorch's flight recorder: it is no JSON" in result["bad"]["3"]
    assert asyncio.run(worker.run_alone("flight-records", files={})) == {
        "bad": {},
        "verdict": {
            "kind": "nothing",
            "sentence": "no rank waits in a collective that is recorded",
            "ranks": [],
            "confidence": None,
            "waits": {},
            "group": "",
            "operation": "",
            "sequence": None,
        },
    }


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("task", "arguments", "words"),
    [
        ("flight-records", {}, "missing 1 required"),
        ("flight-records", {"files": 7}, "has no attribute"),
        ("keep-trace", {"folder": "/"}, "missing"),
        ("no-such-task", {}, "ended"),
        ("launches", {"order": {"pid": 0}}, "missing required field"),
    ],
)
def test_a_task_that_fails_says_why(task: str, arguments: dict[str, object], words: str) -> None:
    before = children()
    with pytest.raises(TraceloomError, match=words) as first:
        worker.run(task, **arguments)
    with pytest.raises(TraceloomError, match=words) as second:
        asyncio.run(worker.run_alone(task, **arguments))
    assert first.value.slug == second.value.slug == "task-failed"
    assert task in first.value.message
    until(lambda: children() <= before)


def test_a_task_that_takes_too_long_is_killed(silent: str) -> None:
    before = children()
    with pytest.raises(TraceloomError, match="`pod-resources` failed: its process ended"):
        worker.run("pod-resources", timeout_s=1.0, socket=silent)
    assert children() <= before


def test_a_task_that_nobody_waits_for_any_more_is_killed(silent: str) -> None:
    before = children()

    async def cancelled() -> None:
        running = asyncio.create_task(worker.run_alone("pod-resources", socket=silent))
        await asyncio.to_thread(until, lambda: children() - before)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running

    asyncio.run(cancelled())
    until(lambda: children() <= before)  # it is reaped, whenever the kernel lets it go


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may become another user")
def test_a_task_as_another_user_reads_what_that_user_may(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_bytes(b"{}")
    secret.chmod(0o600)
    own = worker.run("flight-records", files={"0": str(secret)})
    assert "no dump of PyTorch's flight recorder" in own["bad"]["0"]
    try:
        other = worker.run("flight-records", user=65534, files={"0": str(secret)})
    except TraceloomError as error:  # of a Python that is root's alone
        assert error.slug == "task-failed"  # noqa: PT017
    else:
        assert "ermission denied" in other["bad"]["0"]


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("yes | tr -d '\\n'", ValueError),  # without end
        ("yes [ | tr -d '\\n' | head -c 100000; echo", RecursionError),
        ("sleep 600 & echo '[1'", ValueError),  # its child has the pipe, and ends not
    ],
)
def test_an_answer_of_a_process_that_another_user_may_change(
    text: str, error: type[Exception]
) -> None:
    started = WorkerProcess("traceloom.agent.worker", quiet=True)
    started.kill()
    started.ended()
    command = ["bash", "-c", text]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, start_new_session=True
    ) as started._process:  # type: ignore[assignment]
        try:
            with pytest.raises(error):
                started.read_answer(60.0, 1 << 20)
        finally:
            os.killpg(started._process.pid, signal.SIGKILL)


def test_a_process_that_says_nothing_is_not_waited_for_even_if_its_pipe_stays_open() -> None:
    started = WorkerProcess("traceloom.agent.worker", quiet=True)
    try:
        assert started.read_answer(0.2, 1 << 20) is None
    finally:
        started.kill()
        started.ended()
