"""However a process ends, what was recorded is written first. Only SIGKILL cannot be met."""

from __future__ import annotations

import atexit
import importlib
import os
import signal
import sys
import threading
from types import FrameType
from typing import Any

from traceloom.capture.moments import on_main_thread

# How long a program that is busy in C may keep us from answering SIGTERM before it dies as it would without us.
PATIENCE_SECONDS = 10.0


class Endings:
    """The exits of one process: normal, exception, `os._exit`, SIGTERM, and the fork that is none."""

    def __init__(self, recorder: Any) -> None:
        self._recorder = recorder
        self._pid = os.getpid()
        self._previous: Any = None
        self._watching = False
        self._answered = threading.Event()
        self._pipe: tuple[int, int] | None = None
        self._listener: threading.Thread | None = None
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
        self._close_pipe()
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
        if previous is signal.SIG_DFL:
            self._watch_for_deafness()

    def _watch_for_deafness(self) -> None:
        """A program that hangs in C (a collective whose peer is gone) never runs a Python handler.

        It would have died of SIGTERM without us, so a thread that C tells of each signal sees to it that it does.
        """
        if sys.platform == "win32":
            return
        read, write = os.pipe()
        os.set_blocking(write, False)
        before = signal.set_wakeup_fd(write, warn_on_full_buffer=False)
        if before != -1:  # an event loop wants to know itself
            signal.set_wakeup_fd(before)
            os.close(read)
            os.close(write)
            return
        self._pipe = (read, write)
        self._listener = threading.Thread(target=self._listen, args=(read,), name="traceloom-signals", daemon=True)
        self._listener.start()

    def suspend(self) -> None:
        """Have no thread of ours for a while: then a program that hangs in C is deaf to SIGTERM."""
        self._close_pipe()
        if self._listener is not None:
            self._listener.join(1.0)

    def resume(self) -> None:
        """Listen again."""
        if (
            self._watching
            and self._previous is signal.SIG_DFL
            and threading.current_thread() is threading.main_thread()
        ):
            self._watch_for_deafness()

    def _listen(self, read: int) -> None:
        while True:
            numbers = os.read(read, 64)
            if not numbers:
                os.close(read)
                return
            if signal.SIGTERM not in numbers:
                continue
            on_main_thread(self._answered.set)  # where Python runs at all, the handler runs too
            if not self._answered.wait(PATIENCE_SECONDS):
                ctypes = importlib.import_module("ctypes")
                ctypes.CDLL(None).signal(int(signal.SIGTERM), 0)
                os.kill(os.getpid(), signal.SIGTERM)
            self._answered.clear()

    def _close_pipe(self) -> None:
        """The listening thread ends with the pipe; it closes its own side."""
        pipe, self._pipe = self._pipe, None
        if pipe is None:
            return
        read, write = pipe
        if threading.current_thread() is threading.main_thread():
            now = signal.set_wakeup_fd(-1)
            if now not in (-1, write):
                signal.set_wakeup_fd(now)
        os.close(write)
        if self._pid != os.getpid():  # in a forked child there is no such thread
            os.close(read)

    def _at_exit(self) -> None:
        error = getattr(sys, "last_value", None)
        if self._here():
            self._recorder.finish(f"exception: {type(error).__name__}" if error is not None else "exit")

    def _exit_at_once(self, status: int) -> Any:
        if self._here():
            self._recorder.finish("os._exit")
        return self._os_exit(status)

    def _terminated(self, number: int, frame: FrameType | None) -> None:
        self._answered.set()
        if self._here() and self._recorder.after_work(lambda: self._terminated(number, frame)):
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
        from traceloom.capture.inject import forked

        forked(recorder)
