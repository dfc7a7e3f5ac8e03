"""A process that removes the agent's sockets when the agent has ended, however it ended.

A socket file without a listener delays the end of every job that uses it by seconds. The guard
waits for the end of a pipe whose other end the agent holds; nothing else ends it. It uses only the
standard library and runs as `python -I -S guard.py` in its own session, so that signals to the
agent's group do not end it.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import IO


class SocketGuard:
    """The agent's side: starts the guard process, and restarts it if it has ended.

    Raises:
        OSError: No process can be started.
    """

    def __init__(self) -> None:
        self._watched: dict[str, tuple[int, ...] | None] = {}
        self._process = self._start()

    @property
    def pid(self) -> int:
        return self._process.pid

    def watch(self, path: Path) -> None:
        """Have this socket removed at the end, but not another file that replaces it."""
        self._watched[str(path)] = get_file_identity(str(path))
        self._send(str(path))

    def check(self) -> bool:
        """Whether the guard was alive; a dead one is replaced."""
        if self._process.poll() is None:
            return True
        self._close_pipe()
        self._process = self._start()
        for path in self._watched:
            self._send(path)
        return False

    def close(self) -> None:
        """Make the guard remove the remaining sockets, and wait for it."""
        self._close_pipe()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=5)

    def _start(self) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-I", "-S", __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            encoding="utf-8",
            start_new_session=True,
            cwd="/",
        )

    def _send(self, path: str) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):  # it has ended; `check` sends everything to the next one
            self._process.stdin.write(json.dumps([path, self._watched[path]]) + "\n")
            self._process.stdin.flush()

    def _close_pipe(self) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):  # it ended before reading the buffered lines
            self._process.stdin.close()


def get_file_identity(path: str) -> tuple[int, ...] | None:
    """Returns an identity of a file that differs from that of any file that replaces it; None if
    there is none.
    """
    try:
        status = os.lstat(path)
    except OSError:
        return None
    return (
        status.st_dev,
        status.st_ino,
        status.st_ctime_ns,
    )  # inode numbers are reused at once


def main(lines: IO[str]) -> None:
    """Read the sockets to watch until the agent is gone, then remove them."""
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    watched: dict[str, tuple[int, ...] | None] = {}
    for line in lines:
        # The last line of a killed agent may be incomplete.
        with contextlib.suppress(ValueError):
            path, before = json.loads(line)
            watched[path] = before and tuple(before)
    for path, before in watched.items():
        if before is not None and get_file_identity(path) == before:
            with contextlib.suppress(OSError):
                os.unlink(path)  # noqa: PTH108  (pathlib costs the guard 2 MB)


if __name__ == "__main__":
    main(sys.stdin)
