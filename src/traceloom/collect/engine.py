"""What an engine does: tasks, which are pure functions of files, by `submit(task) -> Future`."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Literal, Protocol

import msgspec

from traceloom.errors import TraceloomError

TaskName = Literal["check", "analyse", "render", "render_timeline", "compare"]

MEMORY_BYTES = 8 << 30
RESULT_BYTES = 256 << 20
"""The most that a task may give: rows of a capture, or a page."""


class TaskFile(msgspec.Struct, frozen=True):
    """A file that a task works on.

    Attributes:
        name: In its capture.
        size: Bytes.
        sha256: In hexadecimal.
        at: Where a process that has no credentials gets it: a path, or an address that is signed for a while.
    """

    name: str
    size: int
    sha256: str
    at: str


class EngineTask(msgspec.Struct, frozen=True):
    """What is to be done: a function of `traceloom.collect.tasks`, on which files, and with what else.

    Attributes:
        name: The function.
        files: What it works on.
        arguments: Its other keywords.
        seconds: How long it may take, fetching its files included.
    """

    name: TaskName
    files: tuple[TaskFile, ...]
    arguments: dict[str, str | int]
    seconds: float


class TaskError(TraceloomError):
    """A task gave no result. `final`: it would not at the next try either, as the files are refused."""

    def __init__(self, message: str, *, final: bool = False) -> None:
        super().__init__(message, slug="task-failed")
        self.final = final


class Engine(Protocol):
    """Runs tasks; `slots` at once."""

    slots: int

    def submit(self, task: EngineTask) -> Future[bytes]:
        """Begin a task; the future has its result.

        It fails with `TaskError`, which counts as a try of the task, or with another `TraceloomError` or an `OSError`
        where the engine or a store does not answer, which says nothing of the task.
        """

    def check(self) -> str:
        """See that it works, and say what it has.

        Raises:
            InputError: It does not work.
        """

    def close(self) -> None:
        """End what runs."""
