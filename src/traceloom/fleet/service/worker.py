"""The worker process of tasks: reads and writes lines of JSON, and ends with the process that
started it.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import resource
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TextIO

from traceloom.errors import InputError, TraceloomError, UsageError
from traceloom.fleet.service import tasks
from traceloom.system.process import pin_to_one_core

_SMALL_BYTES = 8 << 20  # of packed files: about half a million events

TASKS: Mapping[str, Callable[..., None]] = {
    "check": tasks.check,
    "analyse": tasks.analyse,
    "render": tasks.render,
    "render_timeline": tasks.render_timeline,
    "compare": tasks.compare,
}


def main(functions: Mapping[str, Callable[..., None]] = TASKS) -> None:
    """Runs tasks until standard input ends."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # output that libraries print must not mix with answers
    memory = json.loads(sys.stdin.readline())["memory_bytes"]
    # Limits allocated memory, not mapped files.
    resource.setrlimit(resource.RLIMIT_DATA, (memory, memory))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    for job in read_jobs(sys.stdin):
        answer: dict[str, object] = {}
        try:
            arguments = job["arguments"]
            files = Path(str(arguments["folder"])).rglob("*") if "folder" in arguments else ()
            # Too little work for several cores.
            is_small = sum(path.lstat().st_size for path in files) <= _SMALL_BYTES
            with pin_to_one_core() if is_small else contextlib.nullcontext():
                functions[job["task"]](**arguments)
        except MemoryError:
            answer = {
                "error": f"`{job['task']}` needs more than {memory / 1e9:.1f} GB of memory",
                "final": False,
            }
        except TraceloomError as error:
            refused = isinstance(error, (InputError, UsageError)) and error.slug != "unreadable"
            answer = {"error": f"{error} [{error.slug}]", "final": refused}
        except Exception as error:  # noqa: BLE001  (reported to the caller)
            answer = {"error": f"{type(error).__name__}: {error}", "final": False}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


def read_jobs(lines: TextIO) -> Iterator[dict[str, Any]]:
    """Yields jobs as they arrive, forever.

    This process ends as soon as standard input does, even during a job.
    """
    waiting: queue.Queue[str] = queue.Queue()

    def read() -> None:
        for line in lines:
            waiting.put(line)
        os._exit(0)  # nobody waits for the running job

    threading.Thread(target=read, daemon=True).start()
    while True:
        yield json.loads(waiting.get())
