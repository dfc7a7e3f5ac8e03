"""A file is decoded on a second core while this process loads its libraries, which takes as long.

Python does one thing at a time in a process, so another one is needed. It is a fork, which costs a hundredth of what a
new interpreter would; a process may be forked safely as long as it has one thread, as it has before Polars is loaded.
Whatever goes wrong there is no loss: the file is decoded here then.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from traceloom.read.decoding import Decoded, decode

if TYPE_CHECKING:
    from traceloom.read.cache import Cache

_LEAST = 1 << 17  # bytes of a file: less is decoded at once
_MOST = 1 << 23  # more is not worth handing over: the libraries are loaded long before it is decoded

_running: dict[Path, _Fork] = {}


@contextlib.contextmanager
def decoding(paths: Sequence[str | Path], cache: Cache | None) -> Iterator[None]:
    """Decode the largest of these files beside what is done inside; `taken` has it then.

    Args:
        paths: What the user gave. Whether it is a trace at all is for the reader to say.
        cache: What it holds is not decoded.
    """
    path = max(map(Path, paths), key=_size, default=Path())
    if not _LEAST <= _size(path) <= _MOST or not _has_room() or (cache and cache.holds(path)):
        yield
        return
    with contextlib.suppress(OSError):  # there may be no more processes, files or memory to be had
        _running[path] = _Fork(path)
    try:
        yield
    finally:
        if fork := _running.pop(path, None):
            fork.stop()


def taken(path: str | Path) -> Decoded | None:
    """The content of a file, if it was decoded ahead and nobody took it yet."""
    fork = _running.pop(Path(path), None)
    return None if fork is None else fork.answer()


class _Fork:
    """The process that decodes a file."""

    def __init__(self, path: Path) -> None:
        self._answer, into = os.pipe()
        try:
            self._process = os.fork()
            if not self._process:
                _decode_into(path, into)
        except OSError:
            os.close(self._answer)
            raise
        finally:
            os.close(into)

    def answer(self) -> Decoded | None:
        """What it found, when it has; None where it failed."""
        with open(self._answer, "rb") as pipe:  # noqa: PTH123  (no path)
            try:
                found: Decoded = pickle.load(pipe)  # noqa: S301  (written by this very program)
            except (EOFError, pickle.UnpicklingError):
                found = None  # type: ignore[assignment]
        self._gone()
        return found

    def stop(self) -> None:
        """Nobody wants to know any more."""
        os.close(self._answer)
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._process, signal.SIGKILL)
        self._gone()

    def _gone(self) -> None:
        with contextlib.suppress(ChildProcessError):  # where somebody ignores SIGCHLD, the system has seen to it
            os.waitpid(self._process, 0)


def _decode_into(path: Path, into: int) -> NoReturn:
    """What the fork does, and nothing else of what this process had in mind."""
    try:
        nowhere = os.open(os.devnull, os.O_RDWR)
        for stream in range(3):  # who waits for the end of our output shall not wait for this process
            os.dup2(nowhere, stream)
        found = decode(path)
        found.columns.joined()
        with open(into, "wb") as pipe:
            pickle.dump(found, pipe, pickle.HIGHEST_PROTOCOL)
    finally:
        os._exit(0)


def _size(path: Path) -> int:
    """Bytes of a file; 0 of what is none."""
    try:
        return path.stat().st_size if path.is_file() else 0
    except OSError:
        return 0


def _has_room() -> bool:
    """Whether there is something to do meanwhile, a core for it, and no other thread that a fork would cut off."""
    if sys.platform != "linux" or "polars" in sys.modules or len(os.sched_getaffinity(0)) < 2:
        return False
    try:
        return len(os.listdir("/proc/self/task")) == 1  # noqa: PTH208  (of names alone)
    except OSError:
        return False
