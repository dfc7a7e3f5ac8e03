"""Worker processes: fresh interpreters, so that no user script is run again."""

import contextlib
import json
import os
import select
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import traceloom
from traceloom.system import process

# `-I`: nothing is imported from the current directory, which may be an untrusted archive. The
# import path of this process comes in the first line.
_BOOTSTRAP = (
    "import json, sys; line = sys.stdin.readline(); line.endswith('\\n') or sys.exit(); first = json.loads(line); "
    "sys.path[:] = first['imports']; from importlib import import_module; import_module(first['main']).main()"
)


def count_cores() -> int:
    """Returns how many processes can run in parallel."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class WorkerProcess:
    """A process that runs `main()` of a module: jobs and answers are lines of JSON.

    Args:
        main: The module.
        threads: Number of threads of its libraries.
        quiet: Discard its stderr: the caller repeats failed work itself.
        user: User id to run as (only root can set it), which limits the files that it can read. It
            inherits nothing of this process's environment.
        environment: Variables in addition to the minimum that every program needs; None: those of
            this process.

    Raises:
        OSError: No more processes can be created, or this user cannot run the installed Python.
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
            [sys.executable, "-I", "-c", _BOOTSTRAP, main],  # `main` is shown in process lists
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
        assert self._process.stdin is not None
        # If it has ended already, that is detected when its answer is read.
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps(job) + "\n")
            self._process.stdin.flush()

    def answers(self) -> Iterator[dict[str, Any]]:
        """Yields its answers, until it ends."""
        assert self._process.stdout is not None
        return map(json.loads, self._process.stdout)

    def read_answer(self, seconds: float, max_bytes: int) -> Any:
        """Returns its first answer; None if it ends without one, or takes longer than that.

        Another user's process cannot be trusted to end, nor to write little: that user may stop it,
        or write with its end of the pipe.

        Raises:
            ValueError: The answer is not whole or larger than that.
        """
        assert self._process.stdout is not None
        poller, end = select.poll(), time.monotonic() + seconds
        poller.register(self._process.stdout, select.POLLIN)
        text = bytearray()
        while not text.endswith(b"\n") and len(text) <= max_bytes:
            if not poller.poll(max(end - time.monotonic(), 0) * 1000):
                return None
            chunk = os.read(self._process.stdout.fileno(), 1 << 16)
            if not chunk:
                break
            text += chunk
        return json.loads(text) if text else None

    def kill(self) -> None:
        """End it at once."""
        self._process.kill()

    def ended(self) -> int:
        """Wait for its end and return its exit code, negative if a signal ended it."""
        # Closing the pipe fails if it did not read its last job completely.
        with contextlib.suppress(BrokenPipeError), self._process:
            self._process.wait()
        return self._process.wait()


def _find_group(user: int) -> int:
    import pwd

    try:
        return pwd.getpwuid(user).pw_gid
    except KeyError:  # in containers user ids often have no passwd entry
        return user


class ProcessPool:
    """Worker processes of one kind, which are reused and ended together; threads may share the
    pool.
    """

    def __init__(self, main: str) -> None:
        self._main = main
        self._running: list[WorkerProcess] = []
        self._idle: list[WorkerProcess] = []
        self._stopped = False
        self._lock = threading.RLock()  # a signal handler may need it while this thread holds it

    @contextlib.contextmanager
    def idle(self) -> Iterator[WorkerProcess]:
        """Lends an idle process, started if necessary, for the duration of this context.

        Ctrl-C in a terminal reaches all processes, but this process ends the others: call it with
        signals blocked.

        Raises:
            OSError: No more processes can be created, or the pool was stopped.
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
        """Kill all processes, and start no more."""
        with self._lock:
            self._stopped = True
            for worker in self._running:
                worker.kill()

    def ended(self) -> None:
        for worker in self._running:
            worker.ended()


@contextlib.contextmanager
def start_workers(main: str) -> Iterator[ProcessPool]:
    """Lends a pool whose processes do not outlive this context."""
    started = ProcessPool(main)
    with process.clean_up_on_exit(started.stop):
        try:
            yield started
        finally:
            started.stop()
            started.ended()


@contextlib.contextmanager
def create_shared_directory() -> Iterator[Path]:
    """Lends a folder for data exchanged between processes, removed at the end of this context.

    Raises:
        OSError: It cannot be created.
    """
    directory = Path(tempfile.gettempdir()) / f"traceloom-{os.urandom(8).hex()}"
    remove = partial(shutil.rmtree, directory, ignore_errors=True)
    with process.clean_up_on_exit(remove):
        try:
            directory.mkdir(mode=0o700)
            yield directory
        finally:
            remove()
