"""Stacks of real processes: one, and a job of which one rank stops before a collective."""

from __future__ import annotations

import asyncio
import gzip
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from support.gloo_job import hanging_job, line_of_hang
from traceloom.agent.hangs.bundle import HangContext, HangReport, write_bundle
from traceloom.agent.hangs.detector import Hang, HungProcess
from traceloom.agent.hangs.stacks import collect_stacks
from traceloom.agent.ownership.model import Owner, Process
from traceloom.agent.profilers import py_spy
from traceloom.agent.profilers.base import ProfilerError, Window
from traceloom.agent.profilers.py_spy import DumpProfiler, StackDump, StacksProfiler, dump_stacks

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the agent is for Linux")
SLEEPING = """
import threading, time
def inner(): time.sleep(3600)
def outer(): inner()
threading.Thread(target=outer, name="loader", daemon=True).start()
print("up", flush=True)
time.sleep(3600)
"""


def process_of(pid: int, rank: int | None = None, world: int | None = None) -> Process:
    """A running process as the agent's collector has it."""
    ticks = int(
        Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()[19]
    )
    return Process(
        key=f"{pid}@{ticks}",
        pid=pid,
        start_ticks=ticks,
        started_ns=0,
        parent_pid=os.getpid(),
        uid=os.getuid(),
        command="",
        owner=Owner(rank=rank, world_size=world),
    )


def bundle_of(processes: list[Process], directory: Path) -> HangReport:
    """What is kept of a job all of whose processes have made three steps."""
    members = tuple(
        HungProcess(key=p.key, pid=p.pid, rank=p.owner.rank, steps=3) for p in processes
    )
    hang = Hang(job="j", uid=os.getuid(), processes=members, since_ns=0, seen_ns=1, median_s=0.1)
    scene = HangContext(host="here", processes=tuple(processes), devices=(), events=(), series={})
    return asyncio.run(write_bundle(hang, scene, directory, 10**8))


@pytest.fixture
def sleeping() -> Iterator[subprocess.Popen[str]]:
    child = subprocess.Popen([sys.executable, "-c", SLEEPING], stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    assert child.stdout.readline() == "up\n"
    yield child
    child.kill()
    child.communicate()


def test_all_threads_of_a_process(sleeping: subprocess.Popen[str], tmp_path: Path) -> None:
    (path,) = asyncio.run(
        DumpProfiler().record(process_of(sleeping.pid, 3), Window(0, None, None), tmp_path, "rank3")
    )
    assert path == tmp_path / "rank3.dump.json"
    dump = msgspec.json.decode(path.read_bytes(), type=StackDump)
    assert (dump.format, dump.pid, dump.rank, dump.native) == (
        "traceloom-dump",
        sleeping.pid,
        3,
        False,
    )
    threads = {thread.name: thread for thread in dump.threads}
    assert threads["MainThread"].id == sleeping.pid
    names = [frame.function for frame in threads["loader"].frames]
    assert names[-2:] == ["outer", "inner"]
    assert threads["loader"].frames[-1].line == 3
    assert sleeping.poll() is None


def test_native_calls_too(sleeping: subprocess.Popen[str]) -> None:
    dump = asyncio.run(dump_stacks(process_of(sleeping.pid), native=True))
    (main,) = [thread for thread in dump.threads if thread.id == sleeping.pid]
    native = [frame for frame in main.frames if not frame.line]
    assert any("nanosleep" in frame.function for frame in native), main.frames
    assert any(Path(frame.file).name.startswith("libc") for frame in native), main.frames


def test_a_pid_that_another_process_has_now_is_not_looked_at(
    sleeping: subprocess.Popen[str],
) -> None:
    other = msgspec.structs.replace(process_of(sleeping.pid), start_ticks=1)
    with pytest.raises(ProfilerError, match="has ended") as raised:
        asyncio.run(dump_stacks(other))
    assert raised.value.slug == "exited"


def test_what_cannot_be_looked_at_has_a_reason(sleeping: subprocess.Popen[str]) -> None:
    no_python = subprocess.Popen(["sleep", "3600"])
    try:
        other = process_of(no_python.pid)
        looked = asyncio.run(collect_stacks([other, process_of(sleeping.pid)]))
    finally:
        no_python.kill()
        no_python.wait()
    assert set(looked.dumps) == {sleeping.pid}
    assert "runs no Python" in looked.reasons[no_python.pid]


def test_without_py_spy_it_is_said_what_helps(
    sleeping: subprocess.Popen[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    with pytest.raises(ProfilerError) as raised:
        asyncio.run(dump_stacks(process_of(sleeping.pid)))
    assert raised.value.slug == "no-py-spy"
    assert "pip install" in raised.value.hint


def test_another_users_process_is_not_looked_at_without_the_right(
    sleeping: subprocess.Popen[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can become another user")
    with tempfile.TemporaryDirectory() as name:  # pytest's own are closed to other users
        directory = Path(name)
        copy = Path(shutil.copy(py_spy.find_py_spy(), directory / "real"))
        program = directory / "py-spy"  # the real one, as a user who is not the process's
        program.write_text(
            f'#!/bin/sh\nexec setpriv --reuid 4001 --regid 4001 --clear-groups {copy} "$@"\n'
        )
        for path in (directory, copy, program):
            path.chmod(0o755)
        monkeypatch.setenv("PATH", f"{directory}:{os.environ['PATH']}")
        with pytest.raises(ProfilerError) as raised:
            asyncio.run(dump_stacks(process_of(sleeping.pid)))
    assert raised.value.slug == "not-permitted"
    assert "ptrace_scope" in raised.value.hint


def test_a_file_that_is_there_is_not_replaced(
    sleeping: subprocess.Popen[str], tmp_path: Path
) -> None:
    (tmp_path / "rank0.dump.json").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ProfilerError) as raised:
        asyncio.run(
            DumpProfiler().record(
                process_of(sleeping.pid), Window(0, None, None), tmp_path, "rank0"
            )
        )
    assert raised.value.slug == "cannot-write"
    assert not (tmp_path / "elsewhere").exists()


def test_a_bundle_has_pythons_calls_where_native_ones_cannot_be_had(
    sleeping: subprocess.Popen[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    program = tmp_path / "bin" / "py-spy"
    program.parent.mkdir()
    refuses = 'case "$*" in *--native*) echo "Error: it is traced already" >&2; exit 1;; esac'
    program.write_text(f'#!/bin/sh\n{refuses}\nexec {py_spy.find_py_spy()} "$@"\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    with pytest.raises(ProfilerError, match="it is traced already"):
        asyncio.run(dump_stacks(process_of(sleeping.pid), native=True))
    (tmp_path / "bundle").mkdir()
    bundle = bundle_of([process_of(sleeping.pid, 0)], tmp_path / "bundle")
    assert bundle.sentence.endswith(": rank 0 is in `<module>` (<string>:7)")
    stacks = msgspec.json.decode((tmp_path / "bundle" / "stacks.json").read_bytes())
    assert [group["thread"] for group in stacks["groups"]] == ["", "loader"]
    assert stacks["unseen"] == []


@pytest.mark.thorough
@pytest.mark.torch
def test_the_rank_that_stops_before_a_collective_is_named(tmp_path: Path) -> None:
    directory = tmp_path / "bundle"
    directory.mkdir()
    with hanging_job(tmp_path, ranks=3, hanging=1, name="planted") as job:
        processes = [process_of(child.pid, rank, 3) for rank, child in enumerate(job)]
        bundle = bundle_of(processes, directory)
        assert all(child.poll() is None for child in job)  # untouched
    # Rank 0 waits for a collective that it began earlier; only its native calls say so.
    assert bundle.sentence.endswith(
        f": rank 1 is in `load_batch` (train.py:{line_of_hang(tmp_path)}); rank 0 waits in a collective; "
        "rank 2 waits in `all_reduce`"
    )
    assert bundle.ranks == (1,)
    assert {"rank0.dump.json", "rank1.dump.json", "rank2.dump.json", "stacks.json"} <= set(
        bundle.files
    )
    document = msgspec.json.decode((directory / "stacks.json").read_bytes())
    assert bundle.sentence.endswith(document["sentence"])
    assert [group["ranks"] for group in document["groups"] if group["elsewhere"]] == [[1]]


PHASES = """
import sys, time
def fast(): spin(0.3)
def slow(): spin(0.5)
def spin(seconds):
    end = time.monotonic() + seconds
    while time.monotonic() < end: pass
print("up", flush=True)
while True:
    for phase in (fast, slow):
        start = time.time_ns()
        phase()
        print(phase.__name__, start, time.time_ns(), flush=True)
"""
# What a sample's time may be off by: a tick of the clock of files, and what a loaded machine does between two calls.
TOLERANCE_NS = 25_000_000


def _recorded(directory: Path, stem: str) -> dict[str, Any]:
    document: dict[str, Any] = json.loads(
        gzip.decompress((directory / f"{stem}.stacks.json.gz").read_bytes())
    )
    return document


def test_samples_lie_in_the_phases_that_the_program_says_itself(tmp_path: Path) -> None:
    program = subprocess.Popen([sys.executable, "-c", PHASES], stdout=subprocess.PIPE, text=True)
    assert program.stdout is not None
    try:
        assert program.stdout.readline() == "up\n"
        process = process_of(program.pid, 0)
        window = Window(time.time_ns() + 300_000_000, 4.0, None)
        (path,) = asyncio.run(StacksProfiler().record(process, window, tmp_path, "rank0"))
    finally:
        program.kill()
        lines = program.communicate()[0].splitlines()
    assert path == tmp_path / "rank0.stacks.json.gz"
    truth = [
        (name, int(start), int(end)) for name, start, end in (line.split() for line in lines[:-1])
    ]
    document = _recorded(tmp_path, "rank0")
    assert document["threads"][0] == {"id": program.pid, "name": "MainThread"}
    names = [frame[0] for frame in document["frames"]]
    seen: Counter[str] = Counter()
    right: list[
        bool
    ] = []  # every sample begins where a phase does: a clock that is off puts all of them wrong
    for time_ns, thread, period_ns, frames in document["samples"]:
        assert thread == 0
        assert window.start_ns <= time_ns < time_ns + period_ns <= window.start_ns + 4_000_000_000
        phases = {"fast", "slow"} & {names[frame] for frame in frames}
        if not phases:
            continue
        (phase,) = phases
        seen[phase] += period_ns
        spans = [
            (start - TOLERANCE_NS, end + TOLERANCE_NS)
            for name, start, end in truth
            if name == phase
        ]
        right.append(any(start <= time_ns <= end for start, end in spans))
    assert (
        sum(right) >= 0.8 * len(right) > 0
    )  # some come late where py-spy is not let run between look and note
    within = (window.start_ns, window.start_ns + 4_000_000_000)
    for phase in ("fast", "slow"):
        real = sum(
            max(0, min(end, within[1]) - max(start, within[0]))
            for name, start, end in truth
            if name == phase
        )
        assert seen[phase] == pytest.approx(
            real, rel=0.6
        )  # a busy machine leaves samples out, of either phase


def test_a_recording_that_is_cancelled_leaves_nothing(
    sleeping: subprocess.Popen[str], tmp_path: Path
) -> None:
    def spies() -> list[str]:
        mark = f"--pid\0{sleeping.pid}\0".encode()
        return [
            entry.name
            for entry in Path("/proc").iterdir()
            if entry.name.isdecimal() and mark in _command(entry)
        ]

    async def cancelled() -> None:
        recording = asyncio.create_task(
            StacksProfiler().record(
                process_of(sleeping.pid), Window(0, 600.0, None), tmp_path, "rank0"
            )
        )
        deadline = time.monotonic() + 60
        while not spies():
            assert time.monotonic() < deadline
            await asyncio.sleep(0.05)
        recording.cancel()
        with pytest.raises(asyncio.CancelledError):
            await recording

    asyncio.run(cancelled())
    assert spies() == []
    assert list(tmp_path.iterdir()) == []
    assert sleeping.poll() is None


def _command(process: Path) -> bytes:
    try:
        return (process / "cmdline").read_bytes()
    except OSError:
        return b""


def test_a_process_that_ends_in_the_window_keeps_what_it_did(tmp_path: Path) -> None:
    code = "import sys; print('up', flush=True); sys.stdin.readline()"
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as program:
        assert program.stdin is not None
        assert program.stdout is not None
        program.stdout.readline()

        async def recorded() -> None:
            recording = asyncio.create_task(
                StacksProfiler().record(
                    process_of(program.pid, 0), Window(0, 600.0, None), tmp_path, "rank0"
                )
            )
            await asyncio.sleep(2)
            program.communicate("\n")
            await recording

        asyncio.run(recorded())
    assert [sample[1] for sample in _recorded(tmp_path, "rank0")["samples"]] == [0]


def test_stacks_need_a_time(sleeping: subprocess.Popen[str], tmp_path: Path) -> None:
    with pytest.raises(ProfilerError) as raised:
        asyncio.run(
            StacksProfiler().record(process_of(sleeping.pid), Window(0, None, 3), tmp_path, "rank0")
        )
    assert raised.value.slug == "no-duration"
