"""Processes that work beside this one: fresh interpreters, so that no script of the user's is run again."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import traceloom
from traceloom import leaving

# `-I`: the current directory, which may be an archive of a stranger, has no say in what is imported. Where this process
# imports from comes with the job.
_START = (
    "import json, sys; line = sys.stdin.readline(); line.endswith('\\n') or sys.exit(); job = json.loads(line); "
    "sys.path[:] = job['imports']; from importlib import import_module; import_module(job['main']).main(job)"
)


def cores() -> int:
    """How many processes can work at once."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class Workers:
    """Processes, to end them all."""

    def __init__(self) -> None:
        self._running: set[subprocess.Popen[str]] = set()
        self._stopped = False
        self._lock = threading.RLock()  # a handler of signals may need it while this thread has it

    def start(self, main: str, job: dict[str, Any], *, threads: int = 1, quiet: bool = False) -> subprocess.Popen[str]:
        """One more process, which calls `main(job)` of a module; what it prints is to be read.

        Ctrl-C in a terminal reaches all processes, but this one ends the others: call it with signals blocked.

        Args:
            main: The module.
            job: What it is given, as JSON.
            threads: Of the libraries that it uses.
            quiet: What it says of a fault of ours goes nowhere: the caller does the work again.

        Raises:
            OSError: There are no more to be had, or all are to end.
        """
        with self._lock:
            if self._stopped:
                raise InterruptedError
            process = subprocess.Popen(
                [sys.executable, "-I", "-c", _START],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL if quiet else None,
                text=True,
                env={"POLARS_MAX_THREADS": str(threads), **os.environ},
            )
            self._running.add(process)
        imports = [*filter(os.path.isabs, sys.path), str(Path(traceloom.__file__).parents[1])]
        assert process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it has ended already
            process.stdin.write(json.dumps({**job, "main": main, "imports": imports}) + "\n")
            process.stdin.close()
        return process

    def ended(self, process: subprocess.Popen[str]) -> None:
        """A process has ended by itself."""
        with self._lock:
            self._running.discard(process)

    def stop(self) -> None:
        """End all that run, and let none begin."""
        with self._lock:
            self._stopped = True
            for process in self._running:
                process.kill()


@contextlib.contextmanager
def workers() -> Iterator[tuple[Workers, Path]]:
    """Processes, and a folder of their own for what is handed over; neither outlives what is done inside.

    Raises:
        OSError: There is no room for the folder.
    """
    folder = Path(tempfile.gettempdir()) / f"traceloom-{os.urandom(8).hex()}"
    started = Workers()
    remove = partial(shutil.rmtree, folder, ignore_errors=True)
    with leaving.undone_on_leaving(remove), leaving.undone_on_leaving(started.stop):
        try:
            folder.mkdir(mode=0o700)
            yield started, folder
        finally:
            started.stop()
            remove()
