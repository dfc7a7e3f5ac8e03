"""A process that decodes a part of a file and hands it over.

Python does one thing at a time in a process, so another core needs another process. It is a fork, which costs a
hundredth of what a new interpreter would. Of other threads of this process the fork has nothing but what they held
locked, so decoding keeps to what takes no locks of theirs: Polars has no part in it. Whatever goes wrong there is no
loss: the file is decoded here then.
"""

from __future__ import annotations

import contextlib
import gc
import mmap
import os
import pickle
import select
import signal
import sys
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

from msgspec import Struct

from traceloom import leaving
from traceloom.read.columns import Columns, Known
from traceloom.read.damage import Damage
from traceloom.read.decoding import decode
from traceloom.read.document import TextPart
from traceloom.storage.ondisk import SCRATCH, Array

_MOST_COPIED = 2 << 30  # bytes of memory of a process: the tables of more take longer to copy than is gained
_PATIENCE_S = 30  # beyond what the file has taken so far


class ForkResult(Struct, frozen=True):
    """What a part holds beside its columns; see `Decoded`."""

    known: Known
    metadata: dict[str, Any]
    damage: Damage
    size: int
    began: int | None
    left_at: int | None


class Fork:
    """The process that decodes a part of a file.

    Raises:
        OSError: There is no more process, file or memory to be had.
    """

    def __init__(self, path: Path, part: TextPart) -> None:
        self._since = time.monotonic()
        self._until_stopped = contextlib.ExitStack()
        parent = os.getpid()
        answer, into = os.pipe()
        try:
            with leaving.put_off():
                self._process = _fork()
                if not self._process:
                    _decode_into(path, part, into, parent)
                self._until_stopped.enter_context(leaving.undone_on_leaving(self._kill))
        except OSError:
            os.close(answer)
            raise
        finally:
            os.close(into)
        self._answer = open(answer, "rb")  # noqa: PTH123, SIM115  (no path; open until `stop`)

    def found(self) -> ForkResult | None:
        """What it decoded, once it is done; None if it failed."""
        waiting = select.poll()
        waiting.register(self._answer, select.POLLIN)
        took_s = time.monotonic() - self._since
        if not waiting.poll((_PATIENCE_S + 4 * took_s) * 1000):
            return None
        try:
            decoded: ForkResult = pickle.load(self._answer)  # noqa: S301  (written by this very program)
        except (EOFError, pickle.UnpicklingError):
            return None
        return decoded

    def pieces(self) -> Iterator[tuple[str, str, Array]]:
        """The columns of what it found, as of `Columns.pieces`.

        Raises:
            EOFError: It was ended from outside.
        """
        while (piece := pickle.load(self._answer)) is not None:  # noqa: S301
            yield piece

    def stop(self) -> None:
        """End it, if it has not ended."""
        self._answer.close()
        self._until_stopped.close()
        self._kill()
        with contextlib.suppress(ChildProcessError):  # where somebody ignores SIGCHLD, the system has seen to it
            os.waitpid(self._process, 0)

    def _kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._process, signal.SIGKILL)


def cores() -> int:
    """How many processes may decode at once; 1 where this one may not be forked."""
    if sys.platform != "linux":
        return 1
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return 1 if pages * mmap.PAGESIZE > _MOST_COPIED else len(os.sched_getaffinity(0))


def _fork() -> int:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of other threads: see above
        return os.fork()


def _decode_into(path: Path, part: TextPart, into: int, parent: int) -> NoReturn:
    """What the fork does, in place of anything that its parent was doing."""
    try:
        leaving.forget()
        nowhere = os.open(os.devnull, os.O_RDWR)
        for stream in range(3):  # whoever waits for the end of our output must not wait for this process
            os.dup2(nowhere, stream)
        for descriptor in set(map(int, os.listdir("/proc/self/fd"))) - {0, 1, 2, into}:  # noqa: PTH208  (of names alone)
            with contextlib.suppress(OSError):  # the listing itself is among them
                os.close(descriptor)
        SCRATCH.forget()
        gc.disable()

        def step(_read: int, _text: int) -> None:
            if os.getppid() != parent:
                os._exit(0)  # nobody waits for it any more

        decoded = decode(path, step, part=part)
        with open(into, "wb") as pipe:
            _hand_over(
                decoded.columns,
                ForkResult(
                    decoded.columns.known(),
                    decoded.metadata,
                    decoded.damage,
                    decoded.size,
                    decoded.began,
                    decoded.left_at,
                ),
                pipe,
            )
    finally:
        os._exit(0)


def _hand_over(columns: Columns, decoded: ForkResult, pipe: Any) -> None:
    pickle.dump(decoded, pipe, pickle.HIGHEST_PROTOCOL)
    for piece in columns.pieces():
        pickle.dump(piece, pipe, pickle.HIGHEST_PROTOCOL)
    pickle.dump(None, pipe)
