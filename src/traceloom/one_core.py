"""Small work on one core: libraries of frames hand every step to a thread of their own, and wait for it.

Where that thread sleeps on another core, waking it takes longer than a step of a few thousand rows does.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

MOST_EVENTS = 500_000
"""Events whose analysis is small work; the steps of more are worth several cores."""


@contextlib.contextmanager
def on_one_core(events: int = 0) -> Iterator[None]:
    """Keep all threads of this process on the core where it runs now, as long as what is inside goes on.

    Processes that are started inside stay on it, too. Nothing happens where the system does not let threads be kept.

    Args:
        events: So many are worked on; of more than `MOST_EVENTS` nothing happens.
    """
    tasks = Path("/proc/self/task")
    kept: dict[int, set[int]] = {}
    with contextlib.suppress(OSError, AttributeError, ValueError, IndexError):
        if events <= MOST_EVENTS and len(os.sched_getaffinity(0)) > 1:
            # Behind the name of the program, which may hold anything, it is the 37th field.
            core = int(Path("/proc/thread-self/stat").read_bytes().rpartition(b")")[2].split()[36])
            for thread in [int(task.name) for task in tasks.iterdir()]:
                with contextlib.suppress(ProcessLookupError):  # it has ended since
                    kept[thread] = os.sched_getaffinity(thread)
                    os.sched_setaffinity(thread, {core})
    try:
        yield
    finally:
        everywhere = set().union(*kept.values())
        for thread in [int(task.name) for task in tasks.iterdir()] if kept else ():
            with contextlib.suppress(OSError):
                os.sched_setaffinity(thread, kept.get(thread, everywhere))
