"""Which files a process has mapped, and where."""

from __future__ import annotations

import errno
import os
import re
import stat
from pathlib import Path
from typing import NamedTuple

from traceloom.agent.collect import read
from traceloom.agent.collect.processes import MOST_MAPS

_LINE = re.compile(
    rb"^([0-9a-f]{1,16})-([0-9a-f]{1,16}) ..(.). ([0-9a-f]{1,16}) [0-9a-f]+:[0-9a-f]+ (\d{1,20}) +(/[^\n]*)$",
    re.MULTILINE,
)


class Mapping(NamedTuple):
    """A part of a file in a process's memory."""

    start: int
    end: int
    executable: bool
    offset: int
    inode: int
    path: str


def mappings(process: int, proc: Path = Path("/proc")) -> list[Mapping]:
    """The files that a process has mapped, by address.

    Raises:
        OSError: It has ended, or is not ours to look at.
    """
    return [
        Mapping(int(start, 16), int(end, 16), executable == b"x", int(offset, 16), int(inode), os.fsdecode(path))
        for start, end, executable, offset, inode, path in _LINE.findall(read(f"{proc}/{process}/maps", MOST_MAPS))
    ]


def open_mapped(process: int, mapping: Mapping, proc: Path = Path("/proc")) -> int:
    """Open the file of a mapping, where the kernel lets us also one that was replaced or removed since; the descriptor.

    Raises:
        OSError: It is gone, cannot be read, or another file lies there now.
    """
    # A process may put a pipe there, which would wait for a writer, or a link to what it may not read itself.
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK
    try:
        return _checked(os.open(f"{proc}/{process}/root{mapping.path}", flags | os.O_NOFOLLOW), mapping)
    except OSError:
        mapped = f"{proc}/{process}/map_files/{mapping.start:x}-{mapping.end:x}"
        try:  # whatever lies at its path: the kernel leads to the file itself
            return _checked(os.open(mapped, flags), mapping)
        except OSError:
            pass
        raise


def _checked(descriptor: int, mapping: Mapping) -> int:
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode) or status.st_ino != mapping.inode:
        os.close(descriptor)
        raise OSError(errno.ESTALE, f"{mapping.path} is another file by now")
    return descriptor
