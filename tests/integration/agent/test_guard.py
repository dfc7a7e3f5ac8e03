"""The guard removes the agent's sockets, however the agent goes; never those of another one."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from traceloom.agent.guard import SocketGuard

AGENT = """
import sys, socket, time
from pathlib import Path
from traceloom.agent.guard import SocketGuard as Guard
guard = Guard()
listener = socket.socket(socket.AF_UNIX)
listener.bind(sys.argv[1])
guard.watch(Path(sys.argv[1]))
print(guard.pid, flush=True)
time.sleep(600)
"""


def _until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < end, "it did not happen within 30 s"
        time.sleep(0.01)


def _bound(path: Path) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(path))
    return listener


def test_an_agent_that_is_killed_leaves_no_socket(tmp_path: Path) -> None:
    path = tmp_path / "agent.sock"
    agent = subprocess.Popen(
        [sys.executable, "-c", AGENT, str(path)],
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert agent.stdout is not None
    guard = int(agent.stdout.readline())
    assert path.exists()
    os.killpg(agent.pid, signal.SIGKILL)  # with its whole group
    agent.wait()
    _until(lambda: not path.exists())
    _until(
        lambda: (
            not Path(f"/proc/{guard}").exists()
            or "Z" in Path(f"/proc/{guard}/stat").read_text(encoding="utf-8")
        )
    )
    agent.stdout.close()


def test_a_socket_of_the_next_agent_stays(tmp_path: Path) -> None:
    path = tmp_path / "agent.sock"
    with _bound(path):
        guard = SocketGuard()
        guard.watch(path)
        path.unlink()
    with _bound(path):
        guard.close()
        assert path.exists()


def test_signals_do_not_end_it_and_a_dead_one_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "agent.sock"
    with _bound(path):
        guard = SocketGuard()
        guard.watch(path)
        time.sleep(0.5)  # signals before it has begun would end it
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            os.kill(guard.pid, number)
        assert guard.check()
        first = guard.pid
        os.kill(first, signal.SIGKILL)
        _until(lambda: not guard.check() or guard.pid != first)
        assert guard.check()
        guard.close()
    assert not path.exists()
