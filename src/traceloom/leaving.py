"""Ctrl-C: a command ends at once, whatever it is doing, with one word and without anything half done left behind.

Unwinding by `KeyboardInterrupt` would do for most lines of a program, not for all: within an import, a callback or a
destructor Python prints a traceback or swallows it, and other threads work on. So a command leaves from the signal's
handler. Whoever makes something that must not outlive the command says how it is undone (`undone_on_leaving`).
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Callable, Iterator
from typing import Any

INTERRUPTED = 130
_SIGNALS = (signal.SIGINT, signal.SIGTERM)

_tasks: dict[object, Callable[[], object]] = {}
_reasons_to_wait: dict[object, None] = {}
_waiting: list[int] = []


def begin() -> None:
    """From now on Ctrl-C and SIGTERM end this process in good order; where they are ignored they stay ignored."""
    for number in _SIGNALS:
        if signal.getsignal(number) in {signal.SIG_DFL, signal.default_int_handler}:
            signal.signal(number, _leave)


@contextlib.contextmanager
def undone_on_leaving(undo: Callable[[], object]) -> Iterator[None]:
    """Call `undo` should the process leave from within; it may be called before what it undoes is done."""
    key = object()
    _tasks[key] = undo
    try:
        yield
    finally:
        _tasks.pop(key, None)


@contextlib.contextmanager
def put_off() -> Iterator[None]:
    """Leave only after what is done inside, which is short. Processes that are started inside do not hear of it."""
    before = block()
    key = object()
    _reasons_to_wait[key] = None
    try:
        yield
    finally:
        _reasons_to_wait.pop(key)
        if before is not None:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        if _waiting and not _reasons_to_wait:
            _leave(_waiting[0], None)


def block() -> set[int] | None:
    """Let neither this thread nor the processes that it starts hear of it; returns what was blocked before."""
    if not hasattr(signal, "pthread_sigmask"):
        return None
    return set(signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS))


def forget() -> None:
    """In a forked process: what is to be undone is its parent's business."""
    _tasks.clear()
    _reasons_to_wait.clear()
    for number in _SIGNALS:
        if signal.getsignal(number) is _leave:
            signal.signal(number, signal.SIG_DFL)


def _leave(number: int, _frame: Any) -> None:
    if _reasons_to_wait:
        _waiting.append(number)
        return
    for each in _SIGNALS:
        signal.signal(each, signal.SIG_IGN)
    for undo in reversed(list(_tasks.values())):
        with contextlib.suppress(Exception):  # the next one counts as much
            undo()
    with contextlib.suppress(OSError, AttributeError, ValueError):
        wipe = b"\r\x1b[K" if sys.stderr.isatty() else b""
        os.write(2, wipe + b"traceloom: interrupted\n")
    if number == signal.SIGINT:
        os._exit(INTERRUPTED)
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)
