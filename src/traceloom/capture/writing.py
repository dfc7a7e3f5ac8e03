"""Files of a capture: written beside the steps, whole or not at all, never over one another.

A trace is first exported as plain JSON between two steps, then compressed by a thread of low priority, then renamed.
Where the directory is full or forbidden, the trace goes to the temporary directory, and the user is told.
"""

from __future__ import annotations

import contextlib
import gzip
import json
import os
import queue
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from traceloom.capture.messages import say, say_once

GZIP_LEVEL = 3
_PIECE = 1 << 20
NOTES = ".recording"  # directory of claims and diagnoses, removed at the end


def claim(directory: Path, rank: int | None) -> str:
    """Take a name for this process's files that no other process has taken.

    `rank<N>`; a second process of the same rank (a restart) becomes `rank<N>-pid<P>`, a second process without a rank
    becomes `pid<P>`.
    """
    first = f"rank{rank or 0}"
    second = f"pid{os.getpid()}" if rank is None else f"{first}-pid{os.getpid()}"
    for stem in (first, second):
        if (directory / f"{stem}.capture.json").exists():
            continue
        with contextlib.suppress(FileExistsError):
            (directory / NOTES / stem).open("x").close()
            return stem
    return second


def write_json(path: Path, value: Any) -> None:
    """Write a JSON file atomically.

    Raises:
        OSError: It could not be written; nothing is left behind.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        temporary.write_text(json.dumps(value, separators=(",", ":")) + "\n", encoding="utf-8")
        temporary.replace(path)
    except OSError:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise


def compress(plain: Path) -> str:
    """Replace `x.json` by `x.json.gz`, atomically; give the name of the file that holds the data afterwards.

    Where the compressed file cannot be written, the plain one stays.
    """
    target = plain.with_name(plain.name + ".gz")
    temporary = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        with plain.open("rb") as source, gzip.open(temporary, "wb", compresslevel=GZIP_LEVEL) as sink:
            shutil.copyfileobj(source, sink, _PIECE)
        temporary.replace(target)
    except OSError as error:
        with contextlib.suppress(OSError):
            temporary.unlink()
        say_once("not-compressed", f"`{plain.name}` stays uncompressed: {error.strerror or error}")
        return plain.name
    plain.unlink()
    return target.name


def export(directory: Path, name: str, save: Callable[[Path], None]) -> tuple[Path, str | None]:
    """Let `save` write `name` into the directory, or else into the temporary directory.

    Returns:
        The file, and why it is not where it should be (None where it is).

    Raises:
        OSError: It could not be written in either place.
    """
    try:
        save(directory / name)
    except OSError as error:
        with contextlib.suppress(OSError):
            (directory / name).unlink()
        reason = error.strerror or str(error)
        refuge = Path(tempfile.mkdtemp(prefix="traceloom-")) / name
        try:
            save(refuge)
        except OSError:
            shutil.rmtree(refuge.parent, ignore_errors=True)
            raise error from None
        say_once(
            "capture-moved",
            f"`{directory}` takes no more data ({reason}); what was recorded is in `{refuge.parent}`",
        )
        return refuge, reason
    return directory / name, None


class Writer:
    """Does the slow part of writing in a thread of low priority."""

    def __init__(self) -> None:
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._pending = 0
        self._idle = threading.Condition()

    @property
    def busy(self) -> bool:
        """Whether something is being written just now."""
        return self._pending > 0

    def submit(self, job: Callable[[], None]) -> None:
        """Run `job` beside the program; at once where no thread can be had (the interpreter ends)."""
        with self._idle:
            self._pending += 1
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="traceloom-writer", daemon=True)
            try:
                self._thread.start()
            except RuntimeError:
                self._thread = None
                self._run(job)
                return
        self._jobs.put(job)

    def wait(self) -> None:
        """Wait until everything is written; says so on a terminal when it takes longer than a second."""
        started, said = time.monotonic(), False
        with self._idle:
            while self._pending:
                self._idle.wait(0.25)
                if not said and time.monotonic() - started > 1 and sys.stderr and sys.stderr.isatty():
                    say("writing what was recorded ...")
                    said = True

    def _work(self) -> None:
        if sys.platform == "linux":
            with contextlib.suppress(OSError):  # on Linux a thread has a priority of its own
                os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 10)
        while True:
            job = self._jobs.get()
            if job is not None:
                self._run(job)

    def _run(self, job: Callable[[], None]) -> None:
        try:
            job()
        except Exception as error:  # noqa: BLE001  (the user's program must go on)
            say_once("write-failed", f"a part of the capture could not be written: {error}")
        finally:
            with self._idle:
                self._pending -= 1
                self._idle.notify_all()
