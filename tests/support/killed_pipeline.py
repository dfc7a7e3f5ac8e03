"""A process that works on what waits, and kills itself at a point of the way: `STATE STORE POINT before|after`."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from support.fleet import Places, opened
from traceloom.fleet.service import worker
from traceloom.fleet.service.pipeline import CapturePipeline
from traceloom.fleet.service.tasks import EngineTask, run_in_scratch


class Here:
    """An engine that works in this process, so that a kill takes the worker too."""

    slots = 1

    def submit(self, task: EngineTask) -> Future[bytes]:
        """Do it at once."""
        done: Future[bytes] = Future()
        done.set_result(
            run_in_scratch(task, lambda keywords: worker.TASKS[task.name](**keywords), lambda: None)
        )
        return done

    def check(self) -> str:
        """It works."""
        return "this process"

    def close(self) -> None:
        """Nothing runs."""


def main(state: str, store: str, point: str, when: str) -> None:
    """Bring all tasks as far as it goes; the process is gone at the point."""
    stores = opened(Places(state, store))
    owner = getattr(stores, point.partition(".")[0])
    name = point.partition(".")[2]
    real: Callable[..., Any] = getattr(owner, name)

    def deadly(*arguments: Any, **named: Any) -> None:
        if when == "after":
            real(*arguments, **named)
        os.kill(os.getpid(), signal.SIGKILL)

    setattr(owner, name, deadly)
    pipeline = CapturePipeline(*stores, Here(), lease_s=60)
    pipeline.lead()
    while pipeline.work():
        pass
    pipeline.commit()
    sys.exit("it was not killed")


if __name__ == "__main__":
    main(*sys.argv[1:])
