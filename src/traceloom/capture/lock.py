"""Says that a directory is being recorded into. The system itself gives the lock back, however its holder ends."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import sys
from pathlib import Path

from traceloom.errors import OutputError

if sys.platform != "win32":
    import fcntl

NAME = "lock"


class Lock:
    """One recording's claim to a directory.

    Args:
        path: The lock's file.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._handle: int | None = None
        self._process = os.getpid()

    @property
    def held(self) -> bool:
        """Whether this process has it."""
        return self._handle is not None and self._process == os.getpid()

    def take(self) -> None:
        """Take it; a lock whose holder is gone is free.

        Raises:
            OutputError: slug `being-recorded`.
            OSError: There can be no such file.
        """
        while self._handle is None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            handle = os.open(self._path, os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0), 0o644)
            is_free = True
            if sys.platform != "win32":
                try:
                    fcntl.lockf(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except OSError as error:  # where a file system has no locks, nobody holds one
                    is_free = not isinstance(error, (BlockingIOError, PermissionError))
            if not is_free:
                holder = ""
                with contextlib.suppress(OSError, ValueError, KeyError, TypeError):  # it is being written just now
                    about = json.loads(os.read(handle, 1000))
                    holder = f" (process {int(about['process'])} on {about['host']})"
                os.close(handle)
                raise OutputError(
                    f"another recording into this directory is running{holder}",
                    slug="being-recorded",
                    where=str(self._path.parent.parent),
                    hint="wait for its end, or choose another directory",
                )
            with contextlib.suppress(OSError):  # its last holder may have removed it just now: then it is none any more
                if os.path.samestat(self._path.stat(), os.fstat(handle)):
                    os.truncate(handle, 0)
                    os.write(handle, json.dumps({"process": os.getpid(), "host": socket.gethostname()}).encode())
                    self._handle = handle
                    return
            os.close(handle)

    def release(self) -> None:
        """Give it back."""
        if self.held:  # not of a fork, which does not hold what its parent does
            with contextlib.suppress(OSError):
                self._path.unlink()
        handle, self._handle = self._handle, None
        if handle is not None:
            os.close(handle)


def check_free(notes: Path, pattern: str) -> None:
    """Refuse where one of these locks is held; those whose holders are gone are removed.

    Raises:
        OutputError: slug `being-recorded`.
    """
    for path in notes.glob(pattern):
        other = Lock(path)
        with contextlib.suppress(OSError):  # gone meanwhile
            other.take()
        other.release()
