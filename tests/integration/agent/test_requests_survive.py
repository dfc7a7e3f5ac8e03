"""Requests for traces outlive kills, stops, full disks and clocks that jump, or fail with a reason.

The processes here poll as libkineto does, when their test says so: each is kept in its state for as long as needed.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from support.faketime import as_file_says, needs_faketime
from support.kineto_clients import PollingProcess, write_trace
from support.running_agent import Running
from support.waiting import until
from traceloom.errors import TraceloomError

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the agent is Linux's")
MOST_REQUESTS = 8
SETTINGS = f"[traces]\nmax_requests_per_user = {MOST_REQUESTS}\nwait = 90\n"

STATES = ("queued", "delivered", "accepted", "written", "verified", "kept")


class Traced:
    """A process that polls, and the last request for it."""

    def __init__(self, agent: Running) -> None:
        self.agent = agent
        self.process = PollingProcess(agent.short / "k" / str(os.geteuid()))
        self.pid = self.process.pid
        self.configurations: list[dict[str, str]] = []
        self.process.poll()
        self.request = ""

    def ask(self, **wanted: Any) -> str:
        body = {
            "pids": [self.pid],
            **({"duration_s": 0.5} if "steps" not in wanted else {}),
            **wanted,
        }
        self.request = self.agent.client.post("requests", body)["id"]
        return self.request

    def poll(self, mask: int = 3) -> dict[str, str]:
        lines = self.process.poll(mask)
        if lines:
            self.configurations.append(lines)
        return lines

    def configured(self) -> dict[str, str]:
        """Poll until it is answered with a configuration."""
        return until(self.poll)

    @property
    def target(self) -> dict[str, Any]:
        targets: list[dict[str, Any]] = self.agent.client.get(f"requests/{self.request}")["targets"]
        return next(target for target in targets if target["pid"] == self.pid)

    def comes_to(self, state: str, reason: str = "", mask: int | None = None) -> dict[str, Any]:
        """Wait for a state, or for a reason in it; with a mask, polling meanwhile."""

        def there() -> dict[str, Any] | None:
            if mask is not None:
                self.poll(mask)
            target = self.target
            ended = target["state"] in {"failed", "cancelled", "kept"}
            assert not ended or target["state"] == state, target
            return target if target["state"] == state and reason in {"", target["reason"]} else None

        return until(there)

    def write(self) -> None:
        write_trace(self.configurations[-1])


@pytest.fixture(scope="module")
def agent(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    running = Running(tmp_path_factory.mktemp("agent"), SETTINGS)
    try:
        yield running
    finally:
        code = running.end()
    assert code == 0
    assert "Traceback" not in (running.directory / "log").read_text(encoding="utf-8")


@pytest.fixture
def traced(agent: Running) -> Iterator[Any]:
    """Makes processes that poll."""
    with contextlib.ExitStack() as stack:

        def make() -> Traced:
            process = Traced(agent)
            stack.callback(process.process.close)
            return process

        yield make


@contextlib.contextmanager
def _database(agent: Running) -> Iterator[sqlite3.Connection]:
    with (
        contextlib.closing(
            sqlite3.connect(agent.directory / "requests.db", timeout=30)
        ) as database,
        database,
    ):
        yield database


def _states_on_disk(agent: Running) -> dict[int, str]:
    with _database(agent) as database:
        return dict(database.execute("SELECT pid, state FROM targets"))


def test_requests_in_every_state_outlive_a_kill_of_the_agent(agent: Running, traced: Any) -> None:
    queued, delivered, accepted, whole, verified, discarded, other = (traced() for _ in range(7))
    for process in (queued, other):
        process.poll(1)
    for process in (queued, delivered, accepted, whole, verified, discarded, other):
        process.ask()
    queued.comes_to("queued", "own-profiler", mask=1)
    other.comes_to("queued", "own-profiler", mask=1)
    for process in (delivered, accepted, whole, verified, discarded):
        process.configured()
        process.comes_to("delivered")
    for process in (accepted, whole):
        process.comes_to("accepted", mask=1)
    for process in (verified, discarded):
        process.write()
        process.comes_to("kept")
    expected = {
        queued.pid: "queued",
        delivered.pid: "delivered",
        accepted.pid: "accepted",
        whole.pid: "accepted",
    }
    until(lambda: expected.items() <= _states_on_disk(agent).items())
    until(
        lambda: (
            not any(
                Path(process.configurations[0]["ACTIVITIES_LOG_FILE"]).exists()
                for process in (verified, discarded)
            )
        )
    )
    agent.process.kill()
    agent.process.wait()
    with _database(agent) as database:
        # Killed a moment earlier, it had left these; and a pid that is another process's now.
        for process, state in ((verified, "verified"), (discarded, "written")):
            database.execute(
                "UPDATE targets SET state = ? WHERE request = ?", (state, process.request)
            )
            (document,) = database.execute(
                "SELECT document FROM requests WHERE id = ?", (process.request,)
            ).fetchone()
            changed = json.dumps({**json.loads(document), "done": False}).encode()
            database.execute(
                "UPDATE requests SET document = ? WHERE id = ?", (changed, process.request)
            )
        database.execute(
            "UPDATE targets SET process = ? WHERE request = ?", (f"{other.pid}@1", other.request)
        )
    verified.write()  # it is removed when `kept` is on disk
    whole.write()
    agent.start()
    assert whole.comes_to("kept")["attempt"] == 1
    verified.comes_to("kept")
    assert other.comes_to("failed")["reason"] == "exited"
    assert not other.poll()
    delivered.comes_to("accepted", mask=1)
    for process in (delivered, accepted):
        process.write()
        process.comes_to("kept", mask=1)
    for process in (queued, discarded):
        process.configured()
        process.write()
        process.comes_to("kept", mask=1)
    # Nobody is told twice: PyTorch's profiler drops what comes while it is busy, and says so to nobody.
    assert [len(process.configurations) for process in (delivered, accepted, whole, verified)] == [
        1,
        1,
        1,
        1,
    ]
    for process in (queued, delivered, accepted, whole, verified, discarded):
        request = until(
            lambda of=process.request: (r := agent.client.get(f"requests/{of}"))["done"] and r
        )
        assert request["files"] == ["capture.json", f"pid{process.pid}.kineto.json.gz"]
    assert not list((agent.directory / "traces" / str(os.geteuid()) / "incoming").iterdir())


@pytest.mark.thorough
def test_a_killed_guard_is_replaced_and_requests_go_on(agent: Running, traced: Any) -> None:
    process = traced()
    process.ask()
    process.configured()
    children = (
        Path(f"/proc/{agent.process.pid}/task/{agent.process.pid}/children")
        .read_text(encoding="ascii")
        .split()
    )
    guard = next(
        int(pid) for pid in children if b"guard.py" in Path(f"/proc/{pid}/cmdline").read_bytes()
    )
    os.kill(guard, signal.SIGKILL)
    process.write()
    process.comes_to("kept", mask=1)
    log = agent.directory / "log"
    until(lambda: "the guard had ended" in log.read_text(encoding="utf-8"))
    agent.process.kill()
    agent.process.wait()
    until(lambda: not agent.socket.exists())
    until(lambda: not (agent.short / "k" / str(os.geteuid()) / "dynolog").exists())
    agent.start()
    assert process.comes_to("kept")["bytes"] > 0


@pytest.mark.thorough
def test_a_job_that_is_killed_in_every_state(agent: Running, traced: Any) -> None:
    queued, delivered, accepted, whole, waits = (traced() for _ in range(5))
    queued.poll(1)
    for process in (queued, delivered, accepted, whole):
        process.ask()
    queued.comes_to("queued", "own-profiler", mask=1)
    for process in (delivered, accepted, whole):
        process.configured()
        process.comes_to("delivered")
    accepted.comes_to("accepted", mask=1)
    agent.process.send_signal(signal.SIGSTOP)
    whole.write()
    for process in (queued, delivered, accepted, whole):
        process.process.close()
    agent.process.send_signal(signal.SIGCONT)
    for process in (queued, delivered, accepted):
        assert process.comes_to("failed")["reason"] == "exited"
    whole.comes_to("kept")
    # Who has ended is remembered for a while, and is no target any more.
    request = agent.client.post("requests", {"host": os.uname().nodename, "duration_s": 0.5})
    pids = {target["pid"] for target in request["targets"]}
    agent.client.delete(f"requests/{request['id']}")
    assert waits.pid in pids
    assert pids.isdisjoint({process.pid for process in (queued, delivered, accepted, whole)})


@pytest.mark.thorough
def test_a_job_and_an_agent_that_are_stopped_for_a_while(agent: Running, traced: Any) -> None:
    process = traced()
    process.poll()  # its second: how often it polls is known
    os.kill(process.pid, signal.SIGSTOP)
    process.ask()
    process.comes_to("queued", "silent")
    os.kill(process.pid, signal.SIGCONT)
    process.configured()
    process.comes_to("delivered")
    os.kill(process.pid, signal.SIGSTOP)
    agent.process.send_signal(signal.SIGSTOP)
    time.sleep(0.5)  # nothing of it can be waited for: both are stopped
    agent.process.send_signal(signal.SIGCONT)
    os.kill(process.pid, signal.SIGCONT)
    process.comes_to("accepted", mask=1)
    process.write()
    process.comes_to("kept", mask=1)
    assert len(process.configurations) == 1


def test_requests_for_a_process_take_turns_and_are_counted_and_logged(
    agent: Running, traced: Any
) -> None:
    process = traced()
    process.poll(1)
    first = process.ask(steps=2)
    process.comes_to("queued", "own-profiler", mask=1)
    second = process.ask()
    detail = process.comes_to("queued", "leased")["detail"]
    assert first in detail
    more = [process.ask() for _ in range(MOST_REQUESTS - 2)]
    with pytest.raises(TraceloomError) as refusal:
        process.ask()
    assert refusal.value.slug == "quota"
    for request in (first, *more):
        agent.client.delete(f"requests/{request}")
    process.request = second
    assert "ACTIVITIES_DURATION_MSECS" in process.configured()
    process.write()
    process.comes_to("kept", mask=1)
    process.request = first
    assert process.comes_to("cancelled")["reason"] == "cancelled"

    def logged() -> list[dict[str, Any]] | None:
        lines = (agent.directory / "audit.jsonl").read_text(encoding="utf-8").splitlines()
        entries = [entry for entry in map(json.loads, lines) if entry["what"] == "/api/v1/requests"]
        entries = [entry for entry in entries if process.pid in entry["spec"]["pids"]]
        return entries if len(entries) == MOST_REQUESTS + 1 else None

    entries = until(logged)
    assert {entry["who"] for entry in entries} == {f"uid {os.geteuid()}"}
    assert [entry["result"] for entry in entries] == ["done"] * MOST_REQUESTS + ["not-allowed"]
    assert entries[0]["request"] == first
    assert entries[-1]["why"] == "quota"


def test_a_request_whose_row_cannot_be_read_stops_nobody(agent: Running, traced: Any) -> None:
    process = traced()
    process.poll(1)
    process.ask()
    process.comes_to("queued", "own-profiler", mask=1)
    until(lambda: _states_on_disk(agent).get(process.pid) == "queued")
    agent.process.kill()
    agent.process.wait()
    with _database(agent) as database:
        database.execute("INSERT INTO requests VALUES ('torn', 1, ?)", (b'{"id": "torn", "who',))
        row = database.execute(
            "SELECT * FROM targets WHERE request = ?", (process.request,)
        ).fetchone()
        database.execute(
            f"INSERT INTO targets VALUES ({', '.join('?' * len(row))})",
            (row[0], "odd", row[2], "no number", *row[4:]),
        )
    agent.start()
    process.configured()
    process.write()
    process.comes_to("kept", mask=1)


@pytest.mark.thorough
def test_who_waits_for_a_trace_waits_for_an_agent_that_is_started_again(
    agent: Running, traced: Any, tmp_path: Path
) -> None:
    process = traced()
    process.poll()
    output = tmp_path / "run"
    command = [
        sys.executable,
        "-m",
        "traceloom",
        "trace",
        "--pid",
        str(process.pid),
        "--duration",
        "500ms",
    ]
    command += ["--socket", str(agent.socket), "-o", str(output)]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as trace:
        assert trace.stderr is not None
        try:
            lines = [trace.stderr.readline()]
            process.configured()
            while "delivered" not in lines[-1]:
                lines.append(trace.stderr.readline())
                assert lines[-1], lines
            agent.process.kill()
            agent.process.wait()
            lines.append(trace.stderr.readline())
            assert "The agent is away" in lines[-1]
            agent.start()
            process.write()
            _, rest = trace.communicate(timeout=120)
        finally:
            trace.kill()
    assert trace.returncode == 0, rest
    states = [line.split()[4] for line in (*lines, *rest.splitlines()) if " s  pid" in line]
    assert list(dict.fromkeys(states)) == [state for state in STATES if state in states]
    assert states[-1] == "kept"
    assert sorted(path.name for path in output.iterdir()) == [
        "capture.json",
        f"pid{process.pid}.kineto.json.gz",
    ]


def _mounted(directory: Path, size: str) -> None:
    directory.mkdir(exist_ok=True)
    command = ["mount", "-t", "tmpfs", "-o", f"size={size},mode=711", "tmpfs", str(directory)]
    if (
        shutil.which("mount") is None
        or subprocess.run(command, capture_output=True, check=False).returncode
    ):
        pytest.skip("no disk can be mounted here")


@pytest.mark.thorough
@pytest.mark.skipif(os.geteuid() != 0, reason="only root mounts disks")
def test_disks_that_are_full_or_read_only(tmp_path: Path) -> None:
    """A trace that does not fit fails with `disk-full` or `cannot-write`; the next one, with room, is kept."""
    traces, ballast = tmp_path / "traces", tmp_path / "traces" / "ballast"
    _mounted(traces, "1m")
    agent = None
    try:
        agent = Running(tmp_path, SETTINGS)
        process = Traced(agent)
        try:
            for fault in ("disk-full", "cannot-write"):
                process.ask()
                process.configured()
                process.comes_to("delivered")
                agent.process.send_signal(
                    signal.SIGSTOP
                )  # so that the disk changes before it looks
                process.write()
                if fault == "disk-full":
                    with ballast.open("wb", buffering=0) as file, contextlib.suppress(OSError):
                        while True:
                            file.write(b"\0" * 4096)
                else:
                    subprocess.run(["mount", "-o", "remount,ro", str(traces)], check=True)
                agent.process.send_signal(signal.SIGCONT)
                assert process.comes_to("failed")["reason"] == fault
                if fault == "cannot-write":
                    with pytest.raises(TraceloomError) as refusal:
                        process.ask()
                    assert refusal.value.slug == "cannot-write"
                    subprocess.run(["mount", "-o", "remount,rw", str(traces)], check=True)
                ballast.unlink(missing_ok=True)
                process.ask()
                process.configured()
                process.write()
                process.comes_to("kept", mask=1)
        finally:
            process.process.close()
    finally:
        if agent is not None:
            agent.process.send_signal(signal.SIGCONT)
            assert agent.end() == 0
        subprocess.run(["umount", "--lazy", str(traces)], check=True)
    assert "Traceback" not in (tmp_path / "log").read_text(encoding="utf-8")


@pytest.mark.thorough
@needs_faketime
def test_a_clock_that_jumps_while_requests_run(tmp_path: Path) -> None:
    """Without an instant nothing depends on the clock; an instant that has passed is handed to nobody."""
    clock = tmp_path / "clock"
    clock.write_text("+0", encoding="ascii")
    environment = as_file_says(clock)
    agent = Running(tmp_path, SETTINGS, environment=environment)
    processes = [Traced(agent) for _ in range(4)]
    try:
        alone, waits, *pair = processes
        alone.ask()
        alone.configured()
        alone.comes_to("delivered")
        waits.poll(1)
        waits.ask()
        waits.comes_to("queued", "own-profiler", mask=1)
        for process in pair:
            process.poll()
        request = agent.client.post(
            "requests", {"pids": [process.pid for process in pair], "duration_s": 0.5}
        )["id"]
        for process in pair:
            process.request = request
        until(lambda: all(process.target["start_ns"] for process in pair))
        clock.write_text("+3600", encoding="ascii")
        until(lambda: float(agent.client.get("status")["now_ns"]) > time.time_ns() + 1800e9)
        for process in pair:
            assert process.comes_to("failed", mask=3)["reason"] == "expired"
            assert not process.configurations
        waits.configured()
        for process in (alone, waits):
            process.write()
            process.comes_to("kept", mask=1)
    finally:
        for process in processes:
            process.process.close()
        agent.end(signal.SIGKILL)  # sleeps, which an end in order needs, fail under libfaketime
    assert "Traceback" not in (tmp_path / "log").read_text(encoding="utf-8")
