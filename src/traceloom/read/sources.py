"""Formats of files with the trace of one process. A new one is a module with a `Source`, and a line in `SOURCES`."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from traceloom.files import open_input

if TYPE_CHECKING:
    from traceloom.model import Trace
    from traceloom.read.inputs import Input
    from traceloom.read.runs import Peek

_HEAD = 4096
Step = Callable[[int, int], None]


class Source(Protocol):
    """A format.

    Attributes:
        endings: Names of such files in a directory end so, in lower case.
    """

    endings: tuple[str, ...]

    def matches(self, head: bytes) -> bool:
        """Whether a file with this beginning (4096 bytes or less, unpacked) is of the format."""

    def peek(self, file: Input) -> Peek:
        """What the first part of a file tells about the run it belongs to.

        Raises:
            InputError: It is no such file.
        """

    def read(
        self, path: str | Path, *, capture: dict[str, Any] | None, step: Step | None, processes: int | None
    ) -> Trace:
        """The trace; arguments and errors as of `traceloom.read.read_kineto`."""


class KinetoSource:
    """Kineto traces; of a file that is none, their reader says what it is instead."""

    endings: tuple[str, ...] = (".json", ".json.gz")

    def matches(self, head: bytes) -> bool:  # noqa: ARG002
        """Always: the last of all formats."""
        return True

    def peek(self, file: Input) -> Peek:
        """See `Source`."""
        from traceloom.read.runs import peek

        return peek(file)

    def read(
        self, path: str | Path, *, capture: dict[str, Any] | None, step: Step | None, processes: int | None
    ) -> Trace:
        """See `Source`."""
        from traceloom.read.kineto import read_kineto

        return read_kineto(path, capture=capture, step=step, processes=processes)


SOURCES: list[Source] = [KinetoSource()]  # the first that matches reads a file


def source_of(path: str | Path) -> Source:
    """The format of a file; the last one for standard input, pipes and what cannot be read."""
    head = head_of(Path(path)) if Path(path).is_file() else None
    return SOURCES[-1] if head is None else next(source for source in SOURCES if source.matches(head))


def head_of(path: Path) -> bytes | None:
    """The beginning of a file, unpacked; None where it cannot be read."""
    try:
        with open_input(path) as file:
            head = file.read(_HEAD)
        return zlib.decompressobj(31).decompress(head, _HEAD) if head.startswith(b"\x1f\x8b") else head
    except (OSError, zlib.error):
        return None
