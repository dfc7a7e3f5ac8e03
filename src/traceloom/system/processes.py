"""Processes that work beside this one: fresh interpreters, so that no script of the user's is run
again.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import traceloom
from traceloom.system import process

# `-I`: the current directory, which may be an archive of a stranger, has no say in what is
# imported. Where this process imports from comes in the first line.
_BOOTSTRAP = (
    "import json, sys; line = sys.stdin.readline(); line.endswith('\\n') or sys.exit(); first = json.loads(line); "
    "sys.path[:] = first['imports']; from importlib import import_module; import_module(first['main']).main()"
)


def count_cores() -> int:
    """How many processes can work at once."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class WorkerProcess:
    """A process that runs `main()` of a module: jobs come in lines of JSON, and so do answers.

    Args:
        main: The module.
        threads: Of the libraries that it uses.
        quiet: What it says of a fault of ours goes nowhere: the caller does the work again.
        user: Number of the user who it runs as, which only root may choose: it reads what this user may read. Nothing
            of this process's environment reaches it.
        environment: Variables that it has beside those that every program needs; None: those of this process.

    Raises:
        OSError: There are no more processes to be had, or this user cannot run Python as it is installed.
    """

    def __init__(
        self,
        main: str,
        *,
        threads: int = 1,
        quiet: bool = False,
        user: int | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        bare = {"POLARS_MAX_THREADS": str(threads), "PATH": os.defpath, "LANG": "C.UTF-8"}
        variables = (
            {"POLARS_MAX_THREADS": str(threads), **os.environ}
            if environment is None
            else bare | {**environment}
        )
        identity: dict[str, Any] = {}
        if user is not None:
            variables = bare
            identity = {"user": user, "group": _find_group(user), "extra_groups": (), "cwd": "/"}
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-c", _BOOTSTRAP, main],  # its name stands in lists of processes
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL if quiet else None,
            encoding="utf-8",
            env=variables,
            **identity,
        )
        imports = [*filter(os.path.isabs, sys.path), str(Path(traceloom.__file__).parents[1])]
        self.send({"main": main, "imports": imports})

    def send(self, job: dict[str, Any]) -> None:
        """One more line for it."""
        assert self._process.stdin is not None
        with contextlib.suppress(
            BrokenPipeError
        ):  # it has ended already, which is seen where its answer is read
            self._process.stdin.write(json.dumps(job) + "\n")
            self._process.stdin.flush()

    def answers(self) -> Iterator[dict[str, Any]]:
        """What it says, until it ends."""
        assert self._process.stdout is not None
        return map(json.loads, self._process.stdout)

    def kill(self) -> None:
        """End it."""
        self._process.kill()

    def ended(self) -> int:
        """Wait for its end; its exit code, negative where a signal ended it."""
        with (
            contextlib.suppress(BrokenPipeError),
            self._process,
        ):  # of a job that it did not read to its end
            self._process.wait()
        return self._process.wait()


def _find_group(user: int) -> int:
    import pwd

    try:
        return pwd.getpwuid(user).pw_gid
    except KeyError:  # in a container users often have no name
        return user


class ProcessPool:
    """Processes of one kind, which are used again, and ended together; threads may share them."""

    def __init__(self, main: str) -> None:
        self._main = main
        self._running: list[WorkerProcess] = []
        self._idle: list[WorkerProcess] = []
        self._stopped = False
        self._lock = threading.RLock()  # a handler of signals may need it while this thread has it

    @contextlib.contextmanager
    def idle(self) -> Iterator[WorkerProcess]:
        """A process that has nothing to do, for what is done inside.

        Ctrl-C in a terminal reaches all processes, but this one ends the others: call it with
        signals blocked.

        Raises:
            OSError: There are no more to be had, or all are to end.
        """
        with self._lock:
            if self._stopped:
                raise InterruptedError
            if not self._idle:
                self._running.append(WorkerProcess(self._main))
                self._idle.append(self._running[-1])
            worker = self._idle.pop()
        yield worker
        self._idle.append(worker)

    def stop(self) -> None:
        """End all that run, and let none begin."""
        with self._lock:
            self._stopped = True
            for worker in self._running:
                worker.kill()

    def ended(self) -> None:
        """Wait for the end of all."""
        for worker in self._running:
            worker.ended()


@contextlib.contextmanager
def start_workers(main: str) -> Iterator[ProcessPool]:
    """Processes that do not outlive what is done inside."""
    started = ProcessPool(main)
    with process.clean_up_on_exit(started.stop):
        try:
            yield started
        finally:
            started.stop()
            started.ended()


@contextlib.contextmanager
def create_shared_directory() -> Iterator[Path]:
    """A folder for what processes hand over, which does not outlive what is done inside.

    Raises:
        OSError: There is no room for it.
    """
    directory = Path(tempfile.gettempdir()) / f"traceloom-{os.urandom(8).hex()}"
    remove = partial(shutil.rmtree, directory, ignore_errors=True)
    with process.clean_up_on_exit(remove):
        try:
            directory.mkdir(mode=0o700)
            yield directory
        finally:
            remove()
