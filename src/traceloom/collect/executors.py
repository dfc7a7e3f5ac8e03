"""Tasks in processes beside this one, and which engine an address names.

A process of a task knows no secret of the service: it gets files, never where they are kept.
"""

from __future__ import annotations

import importlib.util
import signal
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

from traceloom.collect.engine import MEMORY_BYTES, Engine, EngineTask, TaskError
from traceloom.collect.scratch import in_scratch
from traceloom.errors import InputError, UsageError
from traceloom.workers import Worker, cores

if TYPE_CHECKING:
    from traceloom.collect.cluster import EngineTls

_TASKS_OF_A_PROCESS = 200  # then it is replaced: what little each leaves behind does not add up
_ENDS = "the service ends"


class ProcessEngine:
    """Tasks in processes of this host, used again: one that crashes, hangs or swells is replaced.

    Args:
        slots: How many at once; None: one for each core but one.
        memory_bytes: Of data that a process may have.
        main: The module that a process runs.
        temporary: Where files of tasks are brought; None: the system's temporary directory.
    """

    def __init__(
        self, slots: int | None = None, *, memory_bytes: int = MEMORY_BYTES, main: str = "traceloom.collect.worker",
        temporary: Path | None = None,
    ) -> None:  # fmt: skip
        self.slots = slots or max(1, cores() - 1)
        self._memory_bytes = memory_bytes
        self._main = main
        self._temporary = temporary
        self._pool = ThreadPoolExecutor(self.slots, "traceloom-task")
        self._lock = threading.Lock()
        self._idle: list[tuple[Worker, int]] = []
        self._running: set[Worker] = set()
        self._closed = False

    def submit(self, task: EngineTask) -> Future[bytes]:
        """Begin a task as soon as a process is free; its result, or an error as of `Engine`."""
        return self._pool.submit(self._run, task)

    def check(self) -> str:
        """How many there are."""
        return f"{self.slots} at once, in processes of this host"

    def close(self) -> None:
        """Kill what runs, and wait for its end."""
        with self._lock:
            self._closed = True
            workers = [*self._running, *(worker for worker, _ in self._idle)]
            self._idle.clear()
        for worker in workers:
            worker.kill()
        self._pool.shutdown(cancel_futures=True)
        for worker in workers:
            worker.ended()

    def _run(self, task: EngineTask) -> bytes:
        end_s = time.monotonic() + task.seconds

        def go_on() -> None:
            if self._closed:
                raise TaskError(_ENDS)
            if time.monotonic() > end_s:
                raise TaskError(f"`{task.name}` took longer than {task.seconds:g} s")

        return in_scratch(task, lambda arguments: self._work(task, arguments, end_s), go_on, self._temporary)

    def _work(self, task: EngineTask, arguments: dict[str, Any], end_s: float) -> None:
        worker, done = self._taken()
        late = threading.Event()

        def give_up() -> None:
            late.set()
            worker.kill()

        timer = threading.Timer(max(0.0, end_s - time.monotonic()), give_up)
        timer.daemon = True
        timer.start()
        try:
            worker.send({"task": task.name, "arguments": arguments})
            answer = next(worker.answers(), None)
        except ValueError:
            answer = None  # it was cut while it wrote
        finally:
            timer.cancel()
        with self._lock:
            self._running.discard(worker)
            again = answer is not None and not late.is_set() and done + 1 < _TASKS_OF_A_PROCESS and not self._closed
            if again:
                self._idle.append((worker, done + 1))
        if not again:
            worker.kill()
            code = worker.ended()
        if answer is None:
            names = {int(number): number.name for number in signal.Signals}
            if late.is_set():
                reason = f"`{task.name}` took longer than {task.seconds:g} s"
            elif code >= 0:
                reason = f"its process ended with exit code {code}"
            else:
                reason = f"its process was ended by {names.get(-code, f'signal {-code}')}"
            raise TaskError(reason)
        if "error" in answer:
            raise TaskError(answer["error"], final=answer["final"])

    def _taken(self) -> tuple[Worker, int]:
        with self._lock:
            if self._closed:
                raise TaskError(_ENDS)
            if self._idle:
                worker, done = self._idle.pop()
            else:
                try:
                    worker, done = Worker(self._main, quiet=True, environment={}), 0
                except OSError as error:
                    raise TaskError(f"no process could be started: {error}") from error
                worker.send({"memory_bytes": self._memory_bytes})
            self._running.add(worker)
            return worker, done


def engine_of(address: str, slots: int | None = None, tls: EngineTls | None = None) -> Engine:
    """Make the engine of an address: `processes` or `dask://HOST:PORT`.

    Args:
        address: Which it is.
        slots: How many tasks at once.
        tls: For a cluster.

    Raises:
        InputError: `no-extra`: its package is not installed; `tls-unusable`.
        UsageError: `unknown-engine`, `engine-without-tls`, `wrong-usage`.
    """
    if address == "processes":
        return ProcessEngine(slots)
    scheme, _, scheduler = address.partition("://")
    if scheme != "dask":
        raise UsageError(
            f"there is no engine `{address[:80]}`", slug="unknown-engine",
            hint="it has `processes` and `dask://HOST:PORT`",
        )  # fmt: skip
    if importlib.util.find_spec("distributed") is None:
        hint = "pip install 'traceloom[fleet,dask]'"
        raise InputError("the engine dask needs the package distributed", slug="no-extra", hint=hint)
    from traceloom.collect.cluster import DaskEngine

    return DaskEngine(scheduler, slots, tls)
