"""Where tasks run: anything with `submit(task) -> Future`. Here: processes beside this one.

A task is a pure function of files. Its process knows no secret of the service: it gets files, never where they are
kept.
"""

from __future__ import annotations

import signal
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Literal, Protocol

import msgspec

from traceloom.errors import TraceloomError, UsageError
from traceloom.workers import Worker, cores

TaskName = Literal["check", "analyse", "render", "render_timeline", "compare"]

MEMORY_BYTES = 8 << 30
_TASKS_OF_A_PROCESS = 200  # then it is replaced: what little each leaves behind does not add up


class EngineTask(msgspec.Struct, frozen=True):
    """What is to be done: a function of `traceloom.collect.tasks`, its keywords, and how long it may take."""

    name: TaskName
    arguments: dict[str, Any]
    seconds: float


class TaskError(TraceloomError):
    """A task gave no result. `final`: it would not at the next try either, as the files are refused."""

    def __init__(self, message: str, *, final: bool = False) -> None:
        super().__init__(message, slug="task-failed")
        self.final = final


class Engine(Protocol):
    """Runs tasks; `slots` at once."""

    slots: int

    def submit(self, task: EngineTask) -> Future[None]:
        """Begin a task. The future fails with `TaskError`."""

    def close(self) -> None:
        """End what runs."""


class Processes:
    """Tasks in processes of this host, used again: one that crashes, hangs or swells is replaced.

    Args:
        slots: How many at once; None: one for each core but one.
        memory_bytes: Of data that a process may have.
        main: The module that a process runs.
    """

    def __init__(
        self, slots: int | None = None, *, memory_bytes: int = MEMORY_BYTES, main: str = "traceloom.collect.worker"
    ) -> None:
        self.slots = slots or max(1, cores() - 1)
        self._memory_bytes = memory_bytes
        self._main = main
        self._pool = ThreadPoolExecutor(self.slots, "traceloom-task")
        self._lock = threading.Lock()
        self._idle: list[tuple[Worker, int]] = []
        self._running: set[Worker] = set()
        self._closed = False

    def submit(self, task: EngineTask) -> Future[None]:
        """Begin a task as soon as a process is free. The future fails with `TaskError`."""
        return self._pool.submit(self._run, task)

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

    def _run(self, task: EngineTask) -> None:
        worker, done = self._taken()
        late = threading.Event()

        def give_up() -> None:
            late.set()
            worker.kill()

        timer = threading.Timer(task.seconds, give_up)
        timer.daemon = True
        timer.start()
        try:
            worker.send({"task": task.name, "arguments": task.arguments})
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
            raise TaskError(f"`{task.name}` took longer than {task.seconds:g} s" if late.is_set() else _ended(code))
        if "error" in answer:
            raise TaskError(answer["error"], final=answer["final"])

    def _taken(self) -> tuple[Worker, int]:
        with self._lock:
            if self._closed:
                raise TaskError("the service ends")
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


def _ended(code: int) -> str:
    """Why a process ended, by its exit code."""
    if code >= 0:
        return f"its process ended with exit code {code}"
    try:
        return f"its process was ended by {signal.Signals(-code).name}"
    except ValueError:
        return f"its process was ended by signal {-code}"


def engine_of(address: str, slots: int | None = None) -> Engine:
    """The engine of an address: `processes`.

    Raises:
        UsageError: `unknown-engine`.
    """
    if address == "processes":
        return Processes(slots)
    raise UsageError(f"there is no engine `{address[:80]}`", slug="unknown-engine", hint="it has `processes`")
