"""This process: Ctrl-C and clean-up at exit, cores, garbage collector paused, memory given back.

Unwinding by `KeyboardInterrupt` would do for most lines of a program, not for all: within an
import, a callback or a destructor Python prints a traceback or swallows it, and other threads work
on. So a command leaves from the signal's handler. Whoever makes something that must not outlive the
command says how it is undone (`undone_on_leaving`).

Where that thread sleeps on another core, waking it takes longer than a step of a few thousand rows
does.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

EXIT_INTERRUPTED = 130
_SIGNALS = (signal.SIGINT, signal.SIGTERM)

_exit_tasks: dict[object, Callable[[], object]] = {}
_signal_holds: dict[object, None] = {}
_pending_signals: list[int] = []


def install_signal_handlers() -> None:
    """From now on Ctrl-C and SIGTERM end this process in good order; where they are ignored they
    stay ignored.
    """
    for number in _SIGNALS:
        if signal.getsignal(number) in {signal.SIG_DFL, signal.default_int_handler}:
            signal.signal(number, _exit_on_signal)


@contextlib.contextmanager
def clean_up_on_exit(undo: Callable[[], object]) -> Iterator[None]:
    """Call `undo` should the process leave from within; it may be called before what it undoes is
    done.
    """
    key = object()
    _exit_tasks[key] = undo
    try:
        yield
    finally:
        _exit_tasks.pop(key, None)


@contextlib.contextmanager
def defer_signals() -> Iterator[None]:
    """Leave only after what is done inside, which is short.

    Processes that are started inside do not hear of it.
    """
    before = block_signals()
    key = object()
    _signal_holds[key] = None
    try:
        yield
    finally:
        _signal_holds.pop(key)
        if before is not None:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        if _pending_signals and not _signal_holds:
            _exit_on_signal(_pending_signals[0], None)


def block_signals() -> set[int] | None:
    """Let neither this thread nor the processes that it starts hear of it; returns what was blocked
    before.
    """
    if not hasattr(signal, "pthread_sigmask"):
        return None
    return set(signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS))


def forget_in_child() -> None:
    """In a forked process: what is to be undone is its parent's business."""
    _exit_tasks.clear()
    _signal_holds.clear()
    for number in _SIGNALS:
        if signal.getsignal(number) is _exit_on_signal:
            signal.signal(number, signal.SIG_DFL)


def _exit_on_signal(number: int, _frame: Any) -> None:
    if _signal_holds:
        _pending_signals.append(number)
        return
    for signal_number in _SIGNALS:
        signal.signal(signal_number, signal.SIG_IGN)
    for undo in reversed(list(_exit_tasks.values())):
        with contextlib.suppress(Exception):  # the next one counts as much
            undo()
    with contextlib.suppress(OSError, AttributeError, ValueError):
        wipe = b"\r\x1b[K" if sys.stderr.isatty() else b""
        os.write(2, wipe + b"traceloom: interrupted\n")
    if number == signal.SIGINT:
        os._exit(EXIT_INTERRUPTED)
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)


MAX_PINNED_EVENTS = 500_000
"""Events whose analysis is small work; the steps of more are worth several cores."""


@contextlib.contextmanager
def pin_to_one_core(events: int = 0) -> Iterator[None]:
    """Keep all threads of this process on the core where it runs now, as long as what is inside
    goes on.

    Processes that are started inside stay on it, too. Nothing happens where the system does not let
    threads be kept.

    Args:
        events: So many are worked on; of more than `MOST_EVENTS` nothing happens.
    """
    tasks = Path("/proc/self/task")
    saved_affinity: dict[int, set[int]] = {}
    with contextlib.suppress(OSError, AttributeError, ValueError, IndexError):
        if events <= MAX_PINNED_EVENTS and len(os.sched_getaffinity(0)) > 1:
            # Behind the name of the program, which may hold anything, it is the 37th field.
            core = int(Path("/proc/thread-self/stat").read_bytes().rpartition(b")")[2].split()[36])
            for thread in [int(task.name) for task in tasks.iterdir()]:
                with contextlib.suppress(ProcessLookupError):  # it has ended since
                    saved_affinity[thread] = os.sched_getaffinity(thread)
                    os.sched_setaffinity(thread, {core})
    try:
        yield
    finally:
        everywhere = set().union(*saved_affinity.values())
        for thread in [int(task.name) for task in tasks.iterdir()] if saved_affinity else ():
            with contextlib.suppress(OSError):
                os.sched_setaffinity(thread, saved_affinity.get(thread, everywhere))


@contextlib.contextmanager
def pause_gc() -> Iterator[None]:
    """Look for no cycles meanwhile: for what makes many objects, and no cycles."""
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()


_MIN_TRIM_KIB = (
    1 << 19
)  # KiB of memory that a process never exceeded: it has nothing to give back that anyone would miss


def trim_memory() -> None:
    """Let the C library return the pages it keeps for later; nothing where it has no way to do so.

    What is freed between two blocks in use stays with the process otherwise: after a trace is read,
    about a quarter of what it held. Small processes keep their pages: they will need them again,
    and each costs time to come by.
    """
    if sys.platform == "linux":
        import resource  # Windows has none

        if resource.getrusage(resource.RUSAGE_SELF).ru_maxrss < _MIN_TRIM_KIB:
            return
        with contextlib.suppress(
            OSError, AttributeError
        ):  # other C libraries have no such function
            ctypes.CDLL(None).malloc_trim(0)
