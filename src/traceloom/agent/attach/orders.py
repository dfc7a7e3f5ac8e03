"""The file by which the agent and a process that it has attached to speak: the process appends how far it is.

It lies in a directory of the user's, who may put anything there. While it is there the order stands.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import Literal

import msgspec

from traceloom.agent.requests.places import drop

_MOST_BYTES = 1 << 16
_MOST_DETAIL = 300
_LATEST_NS = 2**61


class OrderNews(msgspec.Struct, frozen=True, kw_only=True):
    """How far an order is. Times are what the process says, ns of the wall clock; 0: it says none."""

    state: Literal["", "began", "waiting", "ready", "recording", "written", "failed"] = ""
    slug: str = ""
    detail: str = ""
    start_ns: int = 0
    end_ns: int = 0
    held_ns: int = 0


_NEWS = msgspec.json.Decoder(OrderNews)


class OrderFile:
    """The file of one order; blocks for as long as a small file takes.

    Args:
        folder: The user's directory.
        name: Of the result.
        uid: The user.
    """

    def __init__(self, folder: Path, name: str, uid: int) -> None:
        self.folder, self.name, self.uid = folder, name, uid

    def create(self) -> None:
        """Give the order.

        Raises:
            FileExistsError: There is one of this name.
            OSError: It cannot be written.
        """
        self._write(f"{self.name}.order", b"")

    def begin(self, at_ns: int) -> None:
        """Say when it is to begin; errors as of `create`."""
        self._write(f"{self.name}.begin", str(at_ns).encode())

    def exists(self) -> bool:
        """Whether it stands."""
        return os.path.lexists(self.folder / f"{self.name}.order")

    def news(self) -> OrderNews:
        """The last line that is one; nothing where there is none, or where the file is none of the user's."""
        try:
            directory = os.open(self.folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                handle = os.open(f"{self.name}.order", os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=directory)
            finally:
                os.close(directory)
        except OSError:
            return OrderNews()
        try:
            status = os.fstat(handle)
            if not stat.S_ISREG(status.st_mode) or status.st_uid != self.uid or status.st_nlink != 1:
                return OrderNews()
            lines = os.read(handle, _MOST_BYTES).split(b"\n")
        finally:
            os.close(handle)
        for line in reversed(lines[:-1]):
            try:
                news = _NEWS.decode(line)
            except msgspec.DecodeError:
                continue
            if all(0 <= time < _LATEST_NS for time in (news.start_ns, news.end_ns, news.held_ns)):
                return msgspec.structs.replace(news, detail=news.detail[:_MOST_DETAIL])
        return OrderNews()

    def drop(self) -> None:
        """Take it back, with all that was written for it."""
        for name in (f"{self.name}.order", f"{self.name}.begin", self.name):
            drop(self.folder, name)

    def _write(self, name: str, content: bytes) -> None:
        directory = os.open(self.folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        try:
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
            handle = os.open(f"{name}.new", flags, 0o600, dir_fd=directory)
            try:
                os.write(handle, content)
                if os.geteuid() != self.uid:
                    os.fchown(handle, self.uid, -1)
            finally:
                os.close(handle)
            os.link(f"{name}.new", name, src_dir_fd=directory, dst_dir_fd=directory, follow_symlinks=False)
        finally:
            try:
                os.unlink(f"{name}.new", dir_fd=directory)
            except FileNotFoundError:
                pass
            finally:
                os.close(directory)
