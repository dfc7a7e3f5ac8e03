"""Control of this process: signals and clean-up at exit, CPU pinning, garbage collection, and
memory.

Unwinding by `KeyboardInterrupt` is not reliable: within an import, a callback or a destructor
Python prints a traceback or swallows it, and other threads go on. So a command exits from the
signal handler, and code that creates something that must not outlive the command registers its
clean-up (`clean_up_on_exit`).
"""

import contextlib
import ctypes
import gc
import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from traceloom.errors import UsageError
from traceloom.system import units

EXIT_INTERRUPTED = 130
MIN_FREE_BYTES = 1 << 28  # what grows step by step leaves this to the system
_SIGNALS = (signal.SIGINT, signal.SIGTERM)

_exit_tasks: dict[object, Callable[[], object]] = {}
_signal_holds: dict[object, None] = {}
_pending_signals: list[int] = []


def install_signal_handlers() -> None:
    """Make SIGINT and SIGTERM run the registered clean-up and end this process; ignored signals
    stay ignored.
    """
    for number in _SIGNALS:
        if signal.getsignal(number) in {signal.SIG_DFL, signal.default_int_handler}:
            signal.signal(number, _exit_on_signal)


@contextlib.contextmanager
def clean_up_on_exit(undo: Callable[[], object]) -> Iterator[None]:
    """Call `undo` if the process exits by a signal within this context, even if what it undoes is
    not complete yet.
    """
    key = object()
    _exit_tasks[key] = undo
    try:
        yield
    finally:
        _exit_tasks.pop(key, None)


@contextlib.contextmanager
def defer_signals() -> Iterator[None]:
    """Delay an exit by a signal until the end of this context, which has to be short.

    Processes started within it inherit the blocked signals.
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
    """Block the exit signals for this thread and the processes that it starts; returns the previous
    signal mask.
    """
    if not hasattr(signal, "pthread_sigmask"):
        return None
    return set(signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS))


def forget_in_child() -> None:
    """Drop the clean-up tasks in a forked process: they are the parent's."""
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
        with contextlib.suppress(Exception):  # a failing task must not prevent the next one
            undo()
    with contextlib.suppress(OSError, AttributeError, ValueError):
        wipe = b"\r\x1b[K" if sys.stderr.isatty() else b""
        os.write(2, wipe + b"traceloom: interrupted\n")
    if number == signal.SIGINT:
        os._exit(EXIT_INTERRUPTED)
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)


MAX_PINNED_EVENTS = 500_000
"""Analyses of up to so many events are short enough to run on one core."""


@contextlib.contextmanager
def pin_to_one_core(events: int = 0) -> Iterator[None]:
    """Keep all threads of this process on the current core within this context.

    Waking a thread on another core takes longer than an operation on a few thousand rows. Processes
    started within the context stay on the core, too. Nothing happens if the system does not support
    affinity.

    Args:
        events: Number of events to analyse; above `MAX_PINNED_EVENTS` nothing happens.
    """
    tasks = Path("/proc/self/task")
    saved_affinity: dict[int, set[int]] = {}
    with contextlib.suppress(OSError, AttributeError, ValueError, IndexError):
        if events <= MAX_PINNED_EVENTS and len(os.sched_getaffinity(0)) > 1:
            # The 37th field after the program name, which may contain any characters.
            core = int(Path("/proc/thread-self/stat").read_bytes().rpartition(b")")[2].split()[36])
            for thread in [int(task.name) for task in tasks.iterdir()]:
                with contextlib.suppress(ProcessLookupError):  # it has ended since
                    saved_affinity[thread] = os.sched_getaffinity(thread)
                    os.sched_setaffinity(thread, {core})
    try:
        yield
    finally:
        all_cores = set().union(*saved_affinity.values())
        for thread in [int(task.name) for task in tasks.iterdir()] if saved_affinity else ():
            with contextlib.suppress(OSError):
                os.sched_setaffinity(thread, saved_affinity.get(thread, all_cores))


@contextlib.contextmanager
def pause_gc() -> Iterator[None]:
    """Disable cyclic garbage collection: for code that creates many objects and no cycles."""
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()


def get_free_memory() -> int | None:
    """Returns the bytes that this process can still take; None if the system does not report it."""
    free = []
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        free += [1024 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable:")]
        limit, used = (
            Path("/sys/fs/cgroup", name).read_text(encoding="ascii").strip()
            for name in ("memory.max", "memory.current")
        )
        free += [max(0, int(limit) - int(used))] if limit.isdigit() else []
    except (OSError, ValueError):
        pass
    return min(free, default=None)


_MIN_TRIM_KIB = 1 << 19  # peak memory in KiB below which trimming is not worth its cost


def trim_memory() -> None:
    """Make the C library return free pages to the system, if it can.

    Otherwise memory freed between blocks in use stays with the process: after reading a trace,
    about a quarter of what it held. Small processes are skipped: they will need their pages again,
    and each page fault costs time.
    """
    if sys.platform == "linux":
        import resource  # Windows has none

        if resource.getrusage(resource.RUSAGE_SELF).ru_maxrss < _MIN_TRIM_KIB:
            return
        with contextlib.suppress(OSError, AttributeError):  # only glibc has `malloc_trim`
            ctypes.CDLL(None).malloc_trim(0)


def require_memory(needed: int, what: str, hint: str) -> None:
    """Checks that memory is free before it is taken.

    Args:
        needed: Bytes.
        what: What takes them, as the beginning of a sentence: `8 nodes need`.
        hint: How to need less.

    Raises:
        UsageError: `no-memory-left`: less is free than is needed.
    """
    free = get_free_memory()
    if free is not None and free < needed:
        raise UsageError(
            f"{what} {units.format_size(needed)} of memory, and {units.format_size(free)} are free",
            slug="no-memory-left",
            hint=hint,
        )
