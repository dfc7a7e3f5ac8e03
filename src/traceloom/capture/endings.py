"""However a process ends, what was recorded is written first. Only SIGKILL cannot be met."""

from __future__ import annotations

import atexit
import os
import signal
import sys
import threading
from types import FrameType
from typing import Any

# How long a program that is busy in C may keep us from answering SIGTERM before it dies as it would without us.
PATIENCE_SECONDS = 10.0


class Endings:
    """The exits of one process: normal, exception, `os._exit`, SIGTERM, and the fork that is none."""

    def __init__(self, recorder: Any) -> None:
        self._recorder = recorder
        self._pid = os.getpid()
        self._previous: Any = None
        self._watching = False
        atexit.register(self._at_exit)
        self._os_exit = os._exit
        os._exit = self._exit_at_once
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self._in_child)

    def remove(self) -> None:
        """Leave the exits as they were."""
        atexit.unregister(self._at_exit)
        if os._exit == self._exit_at_once:
            os._exit = self._os_exit
        if self._watching and signal.getsignal(signal.SIGTERM) == self._terminated:
            signal.signal(signal.SIGTERM, self._previous)
        self._watching = False
        self._recorder = None

    def watch_signals(self) -> None:
        """From now on SIGTERM writes before it ends the process. Only the main thread may ask for that."""
        if self._watching or threading.current_thread() is not threading.main_thread():
            return
        previous = signal.getsignal(signal.SIGTERM)
        if previous is None or previous is signal.SIG_IGN:
            return  # a handler in C, or nobody wants to hear of it
        self._previous, self._watching = previous, True
        signal.signal(signal.SIGTERM, self._terminated)

    def _at_exit(self) -> None:
        error = getattr(sys, "last_value", None)
        if self._here():
            self._recorder.finish(f"exception: {type(error).__name__}" if error is not None else "exit")

    def _exit_at_once(self, status: int) -> Any:
        if self._here():
            self._recorder.finish("os._exit")
        return self._os_exit(status)

    def _terminated(self, number: int, frame: FrameType | None) -> None:
        if self._here() and self._recorder.after_turn(lambda: self._terminated(number, frame)):
            return
        if self._here():
            self._recorder.finish("SIGTERM")
        previous = self._previous
        if callable(previous):
            previous(number, frame)
        else:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)

    def _here(self) -> bool:
        return self._recorder is not None and self._pid == os.getpid()

    def _in_child(self) -> None:
        recorder, self._recorder = self._recorder, None
        if recorder is None:
            return
        if self._watching and signal.getsignal(signal.SIGTERM) == self._terminated:
            signal.signal(signal.SIGTERM, self._previous)
        from traceloom.capture.inject import forked

        forked(recorder)
