"""Where traces lie: below one root, one directory per user.

    ROOT/UID/incoming/      the user's own: libkineto writes there, as its process
    ROOT/UID/REQUEST/       the agent's: what was read back, verified and compressed
    ROOT/UID/hangs/HANG/    written by the agent, then the user's: what is kept of a job that hangs

What lies in `incoming` is the user's to change at any time: it is opened once, without following links, and only the
copy counts.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

from traceloom.errors import OutputError

INCOMING = "incoming"
_HANGS = "hangs"
_LEFT_OVER_S = 3600.0


class Places:
    """The directories below the root; blocks, so it is called in a thread.

    Args:
        root: Of all; nothing is written elsewhere.
    """

    def __init__(self, root: Path) -> None:
        self.root = root

    def incoming(self, uid: int) -> Path:
        """Where the processes of a user write."""
        return self.root / str(uid) / INCOMING

    def of_request(self, uid: int, request: str) -> Path:
        """Where the result of a request lies."""
        return self.root / str(uid) / request

    def prepare(self, uid: int, request: str) -> None:
        """Make the directories for a request.

        Raises:
            OutputError: `cannot-write`.
        """
        with _writing(self.root):
            self._make(uid, self.of_request(uid, request))
            path = self.incoming(uid)
            with contextlib.suppress(FileExistsError):
                path.mkdir(mode=0o700)
            handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                if os.geteuid() != uid:
                    os.fchown(handle, uid, -1)
                os.fchmod(handle, 0o700)
            finally:
                os.close(handle)

    def hangs(self, uid: int) -> Path:
        """Where the bundles of a user's jobs that hang lie."""
        return self.root / str(uid) / _HANGS

    def prepare_hang(self, uid: int, hang: str) -> Path:
        """Make the directory of a bundle.

        Raises:
            OutputError: `cannot-write`.
        """
        path = self.hangs(uid) / hang
        with _writing(self.root):
            self._make(uid, path.parent, path)
        return path

    def hand_over(self, uid: int, directory: Path) -> None:
        """Give a bundle that is whole to its user.

        Raises:
            OutputError: `cannot-write`.
        """
        if os.geteuid() == uid:
            return
        with _writing(self.root), _opened(directory) as handle:
            for name in os.listdir(handle):  # noqa: PTH208  (of what is open, whatever has its name)
                os.chown(name, uid, -1, dir_fd=handle, follow_symlinks=False)
            os.fchown(handle, uid, -1)

    def _make(self, uid: int, *paths: Path) -> None:
        """Make the directory of a user, and of these, which lie in it, the last for the agent alone."""
        shared = 0o700 if os.geteuid() == uid else 0o711
        modes = [(self.root, 0o711), (self.root / str(uid), shared), *((path, shared) for path in paths[:-1])]
        for path, mode in (*modes, (paths[-1], 0o700)):
            path.mkdir(mode=mode, parents=True, exist_ok=True)
            if path.is_symlink() or path.stat().st_uid != os.geteuid():
                raise OutputError("that directory is not the agent's", slug="cannot-write", where=str(path))

    def remove(self, uid: int, request: str) -> None:
        """Delete the result of a request."""
        shutil.rmtree(self.of_request(uid, request), ignore_errors=True)

    def sweep(self) -> None:
        """Delete what was left in the directories of users: traces that nobody waits for any more."""
        old = time.time() - _LEFT_OVER_S
        with contextlib.suppress(OSError):
            for path in self.root.iterdir():
                folder = path / INCOMING
                with contextlib.suppress(OSError), _opened(folder) as handle, os.scandir(handle) as entries:
                    for entry in entries:
                        with contextlib.suppress(OSError):  # a directory, or gone meanwhile
                            if entry.stat(follow_symlinks=False).st_mtime < old:
                                os.unlink(entry.name, dir_fd=handle)


def drop(folder: Path, name: str) -> None:
    """Delete what a process wrote under a name, whole or not; no link is followed."""
    for part in (name, f"{name}.tmp"):
        with contextlib.suppress(OSError), _opened(folder) as handle:
            os.unlink(part, dir_fd=handle)


@contextlib.contextmanager
def _writing(root: Path) -> Iterator[None]:
    """Say what could not be written."""
    try:
        yield
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise OutputError(
            f"traces cannot be written: {reason}", slug="cannot-write", where=str(error.filename or root),
            hint="`paths.traces` of agent.toml",
        ) from error  # fmt: skip


@contextlib.contextmanager
def _opened(folder: Path) -> Iterator[int]:
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        yield handle
    finally:
        os.close(handle)
