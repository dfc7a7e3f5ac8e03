"""Profilers of a real PyTorch program that nobody prepared: attached to, traced, and left as it was."""

from __future__ import annotations

import asyncio
import gzip
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from support.attaching import UnpreparedProgram, described, tracer_of
from support.waiting import until
from traceloom.agent.attach.injection import explain_attach_refusal
from traceloom.agent.kineto import read_process_state
from traceloom.agent.ownership.model import Process
from traceloom.agent.profilers.attached import (
    AttachedMemoryProfiler,
    AttachedProfiler,
    AttachedTimelineProfiler,
)
from traceloom.agent.profilers.base import ProfilerError, Window
from traceloom.agent.profilers.timeline import TimelineOrder
from traceloom.agent.traces.requests import LeaseTable
from traceloom.formats.memory_files import read_snapshot

WHY = explain_attach_refusal()[0]
pytestmark = [pytest.mark.torch, pytest.mark.skipif(bool(WHY), reason=WHY)]
STEPS, TIME = Window(0, None, 3), Window(0, 0.3, None)


@pytest.fixture(scope="module")
def program() -> Iterator[UnpreparedProgram]:
    running = UnpreparedProgram()
    try:
        before = running.ask("state()")
        yield running
        assert running.ask("state()") == before  # after all that was done to it
    finally:
        code = running.close()
    assert code == 0


@pytest.fixture
def place() -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="tl"))
    for name in ("incoming", "kept/request"):
        (folder / name).mkdir(parents=True)
    yield folder
    left = list((folder / "incoming").iterdir())
    shutil.rmtree(folder)
    assert left == []


class Attached:
    """What became of a recording: states as they were told, facts, the error."""

    def __init__(
        self, place: Path, kind: type[AttachedProfiler] = AttachedTimelineProfiler, **order: Any
    ) -> None:
        self.states: list[tuple[str, str]] = []
        self.facts: dict[str, Any] = {}
        self.slug = self.detail = ""
        self.folder = place / "kept" / "request"
        wanted = TimelineOrder(
            trace_id="traceloom-1-rank0",
            group_id="traceloom-1",
            incoming=place / "incoming",
            stem="rank0",
            **{"wait_s": 120.0, **order},
        )
        self.profiler = kind(wanted, self.tell, LeaseTable())

    def tell(self, state: str, reason: str = "", detail: str = "", **facts: Any) -> None:
        if (state, reason) not in self.states[-1:]:
            self.states.append((state, reason))
        self.facts |= facts

    async def record(self, process: Process, window: Window) -> None:
        try:
            assert isinstance(self.profiler, (AttachedTimelineProfiler, AttachedMemoryProfiler))
            await self.profiler.record(process, window, self.folder, "rank0")
        except ProfilerError as error:
            self.slug, self.detail = error.slug, error.message

    def run(
        self,
        process: Process,
        window: Window,
        meanwhile: Callable[[], None] = lambda: None,
        when: str = "accepted",
    ) -> Attached:
        """Record; `meanwhile` is called once it is in that state."""

        async def live() -> None:
            recording = asyncio.create_task(self.record(process, window))
            while not recording.done() and when not in dict(self.states):  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            await asyncio.to_thread(meanwhile)
            await recording

        asyncio.run(live())
        return self

    def events(self) -> list[dict[str, Any]]:
        document = json.loads(gzip.decompress((self.folder / "rank0.kineto.json.gz").read_bytes()))
        assert document["trace_id"] == "traceloom-1-rank0"
        events: list[dict[str, Any]] = document["traceEvents"]
        return events


@pytest.mark.sampled(1)
@pytest.mark.parametrize("stacks", [False, True], ids=["plain", "stacks"])
def test_by_steps_and_at_once_again_by_time(
    program: UnpreparedProgram, place: Path, stacks: bool
) -> None:
    traced = Attached(place, shapes=True, stacks=stacks).run(program.described(), STEPS)
    assert traced.slug == "", traced.detail
    states = [state for state, _ in traced.states]
    assert [state for state in states if state != "accepted"] == [
        "delivered",
        "written",
        "verified",
        "kept",
    ]
    assert (traced.facts["steps"], traced.facts["bytes"] > 0) == (3, True)
    assert 0 < traced.facts["pause_ns"] < 30e9
    assert traced.facts["held_ns"] > 0
    names = [event["name"] for event in traced.events() if event.get("cat") == "cpu_op"]
    assert names.count("aten::linear") == 3  # a call of the model in each step
    assert any("Input Dims" in event.get("args", {}) for event in traced.events())
    functions = {
        event["name"] for event in traced.events() if event.get("cat") == "python_function"
    }
    assert any("step" in name for name in functions) == stacks
    begins_ns = time.time_ns() + 700_000_000
    again = Attached(place).run(program.described(), Window(begins_ns, 0.3, None))
    assert again.slug == "", again.detail
    assert again.facts["window_start_ns"] > begins_ns - 1_000_000  # on PyTorch's own clock
    lasted_s = (again.facts["window_end_ns"] - again.facts["window_start_ns"]) / 1e9
    assert 0.3 <= lasted_s < 5.3
    assert tracer_of(program.pid) == 0


@pytest.mark.thorough
def test_a_profile_of_the_programs_own_goes_first(program: UnpreparedProgram, place: Path) -> None:
    """PyTorch 2.13 ends the program with SIGSEGV where two profiles meet."""
    traced = Attached(place).run(
        program.described(), Window(0, 2.5, None), lambda: program.say("own(5)")
    )
    assert program.answer() > 20
    assert traced.slug == "", traced.detail
    assert ("queued", "cancelled-by-program") in traced.states
    assert traced.facts["attempt"] == 2
    # One that runs already is waited for.
    program.say("own(200)")
    later = Attached(place).run(program.described(), TIME)
    assert program.answer() > 500
    assert (later.slug, ("delivered", "waiting") in later.states) == ("", True)


@pytest.mark.thorough
def test_a_program_that_ends_meanwhile_ends_in_order(place: Path) -> None:
    """PyTorch 2.13 ends with SIGSEGV where Python ends during a profile."""
    running = UnpreparedProgram()
    codes: list[int] = []
    traced = Attached(place).run(
        running.described(), Window(0, 60.0, None), lambda: codes.append(running.close())
    )
    assert (codes, traced.slug) == ([0], "exited")


def test_one_that_is_stopped_is_waited_for(program: UnpreparedProgram, place: Path) -> None:
    os.kill(program.pid, signal.SIGSTOP)
    ticks = program.described().start_ticks
    try:
        until(lambda: read_process_state(program.pid, ticks) == "T")
        late = Attached(place, wait_s=0.5).run(program.described(), TIME, when="queued")
        assert (late.slug, late.states) == ("expired", [("queued", "stopped")])
        go_on = lambda: os.kill(program.pid, signal.SIGCONT)  # noqa: E731
        traced = Attached(place).run(program.described(), TIME, go_on, when="queued")
    finally:
        os.kill(program.pid, signal.SIGCONT)
    assert (traced.slug, traced.states[0]) == ("", ("queued", "stopped"))


def test_one_that_runs_no_python_is_not_reached(
    program: UnpreparedProgram, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("traceloom.agent.profilers.attached._DEADLINE_GRACE_S", 0.2)
    program.say("[print(json.dumps('waits'), flush=True), sys.stdin.readline()]")
    assert program.answer() == "waits"
    late = Attached(place, wait_s=0.5)
    asyncio.run(late.record(program.described(), STEPS))
    program.say("on")
    assert program.answer() == [None, "on\n"]
    assert (late.slug, late.facts["pause_ns"] > 0) == ("not-reached", True)
    # What was scheduled finds that nobody waits.
    assert until(
        lambda: program.ask("[thread.name for thread in threading.enumerate()]") == ["MainThread"]
    )


def test_one_that_does_not_step(place: Path, program: UnpreparedProgram) -> None:
    program.say(
        "[torch.mm(torch.ones(4, 4), torch.ones(4, 4)) is None for _ in range(25) if not time.sleep(0.1)][0]"
    )
    late = Attached(place, wait_s=1.0).run(program.described(), STEPS)
    assert program.answer() is False
    assert (late.slug, "0 of 3 steps" in late.detail) == ("not-stepping", True)


def test_what_is_cancelled_ends_in_the_program(program: UnpreparedProgram, place: Path) -> None:
    async def cancelled() -> None:
        traced = Attached(place)
        recording = asyncio.create_task(traced.record(program.described(), Window(0, 600.0, None)))
        while "accepted" not in dict(traced.states):
            assert not recording.done(), traced.detail
            await asyncio.sleep(0.01)
        recording.cancel()
        with pytest.raises(asyncio.CancelledError):
            await recording

    asyncio.run(cancelled())
    assert until(
        lambda: program.ask("[thread.name for thread in threading.enumerate()]") == ["MainThread"]
    )
    assert Attached(place).run(program.described(), TIME).slug == ""


def test_what_cannot_be_attached_to_is_refused(program: UnpreparedProgram, place: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as other:
        assert Attached(place).run(described(other.pid), TIME, when="").slug == "no-torch"
        old = described(other.pid)
        other.communicate(b"\n")
    assert Attached(place).run(old, TIME, when="").slug == "exited"
    code = (
        "from traceloom.agent.attach.injection import StoppedThread\n"
        f"with StoppedThread({program.pid}, 60.0): print('stopped', flush=True); input()"
    )
    command = [sys.executable, "-c", code]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as tracer:
        assert tracer.stdout is not None
        assert tracer.stdout.readline() == "stopped\n"
        refused = Attached(place).run(program.described(), TIME, when="")
        tracer.communicate("\n")
    assert (refused.slug, str(tracer.pid) in refused.detail) == ("traced-already", True)


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to be another user")
def test_another_users_process_is_not_attached_to(program: UnpreparedProgram, place: Path) -> None:
    code = (
        "import os\nfrom traceloom.agent.attach.injection import StoppedThread\n"
        "os.setgroups([]); os.setgid(4001); os.setuid(4001)\n"
        f"try:\n    with StoppedThread({program.pid}, 5.0): print('stopped')\nexcept PermissionError: print('refused')"
    )
    assert (
        subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True
        ).stdout
        == "refused\n"
    )


@pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("unshare") is None, reason="needs root and unshare"
)
def test_one_that_does_not_see_the_directory_is_refused(
    program: UnpreparedProgram, place: Path
) -> None:
    folder = place / "incoming"
    code = f"mount -t tmpfs none {folder} && exec {sys.executable} -c 'print(\"up\", flush=True); input()'"
    with subprocess.Popen(
        ["unshare", "--mount", "sh", "-c", code],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as inside:
        assert inside.stdout is not None
        assert inside.stdout.readline() == "up\n"
        refused = Attached(place).run(described(inside.pid), TIME, when="")
        inside.communicate("\n")
    assert (refused.slug, str(folder) in refused.detail) == ("not-mounted", True)


@pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("unshare") is None, reason="needs root and unshare"
)
def test_one_that_lacks_the_directory_is_refused_and_has_not_ended(
    program: UnpreparedProgram, place: Path
) -> None:
    code = f"mount -t tmpfs none {place} && exec {sys.executable} -c 'print(\"up\", flush=True); input()'"
    with subprocess.Popen(
        ["unshare", "--mount", "sh", "-c", code],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as inside:
        assert inside.stdout is not None
        assert inside.stdout.readline() == "up\n"
        refused = Attached(place).run(described(inside.pid), TIME, when="")
        inside.communicate("\n")
    assert (refused.slug, str(place) in refused.detail) == ("not-mounted", True)


def test_memory_without_cuda_is_refused(program: UnpreparedProgram, place: Path) -> None:
    refused = Attached(place, AttachedMemoryProfiler).run(program.described(), TIME)
    assert (refused.slug, refused.detail) == ("no-cuda", "the program does not use CUDA")


@pytest.mark.thorough
def test_memory_of_a_program_with_a_device(place: Path) -> None:
    running = UnpreparedProgram()
    running.ask("len(globals().setdefault('played', cuda(False)))")
    traced = Attached(place, AttachedMemoryProfiler).run(running.described(), STEPS)
    assert (traced.slug, traced.facts["file"]) == ("", "rank0.memory.pickle"), traced.detail
    path = traced.folder / "rank0.memory.pickle"
    assert read_snapshot(path).entries["bytes"].to_list() == [1000]
    assert running.ask("played['calls']") == [["all", "alloc", "python"], [None, "all", "all"]]
    # A history of the program's own goes on.
    running.ask("played.update(history=True, calls=[])")
    assert Attached(place, AttachedMemoryProfiler).run(running.described(), TIME).slug == ""
    assert running.ask("[played['history'], played['calls']]") == [True, []]
    # What asks for code is refused, and nothing of it is run.
    running.ask("played.update(hostile=True)")
    hostile = Attached(place, AttachedMemoryProfiler).run(running.described(), TIME)
    assert hostile.slug == "pickle-with-code"
    killed = Attached(place, AttachedMemoryProfiler).run(
        running.described(), Window(0, 60.0, None), running.process.kill
    )
    assert killed.slug == "exited"
    assert running.close() == -signal.SIGKILL
