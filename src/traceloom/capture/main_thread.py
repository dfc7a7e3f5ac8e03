"""What no hook of PyTorch reports: alarms, the main thread, the first use of a device, the end of
the process.

A daemon thread waits; the work itself runs on the main thread between two bytecodes, because a
recorder of one thread records the one that starts it. A main thread that waits in C does it when it
comes back to Python, or, with a recorder of every thread, the daemon does it.
"""

from __future__ import annotations

import atexit
import contextlib
import importlib
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from types import FrameType
from typing import Any

PAUSE_SECONDS = 0.02
PATIENCE_SECONDS = 1.0
_LATER_DELAY_SECONDS = 0.001

# NVIDIA, NVIDIA under WSL, AMD, Intel.
_DEVICE_FILES = ("/dev/nvidiactl", "/dev/dxg", "/dev/kfd", "/dev/dri")

# Programs that start the ranks. They import torch and compute nothing.
_LAUNCHERS = {
    "torchrun",
    "torchrun.exe",
    "torch.distributed.run",
    "torch.distributed.launch",
    "torch.distributed.elastic",
    "accelerate",
    "accelerate.exe",
    "accelerate.commands.launch",
    "accelerate.commands.accelerate_cli",
    "deepspeed",
    "deepspeed.launcher.launch",
    "deepspeed.launcher.runner",
    "horovodrun",
    "composer",
    "colossalai",
    "ray",
    "tritonrun",
}


def run_on_main_thread(call: Callable[[], None]) -> bool:
    """Let the main thread run `call` soon. False where that is impossible.

    Python allows this through its C interface only; a signal would be visible to the program.
    """
    global _trampoline
    try:
        import ctypes
    except ImportError:
        return False
    if _trampoline is None:
        _trampoline = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_void_p)(_run_next)
    _calls.append(call)
    if _wake_main_thread():
        return True
    with contextlib.suppress(ValueError):  # it has been run after all
        _calls.remove(call)
    return False


def run_on_main_thread_later(call: Callable[[], None]) -> None:
    """As `on_main_thread`, but not within what the main thread runs for us just now."""
    with contextlib.suppress(RuntimeError):  # no threads any more: the interpreter ends
        threading.Timer(_LATER_DELAY_SECONDS, run_on_main_thread, (call,)).start()


_calls: deque[Callable[[], None]] = deque()
_scheduled = threading.Lock()  # held while a pending call waits or runs
_trampoline: Any = None  # a pending call must live until it has run


def _wake_main_thread() -> bool:
    """See to it that the next call is run; False where Python takes no more pending calls."""
    if not _scheduled.acquire(blocking=False):
        return True
    if sys.modules["ctypes"].pythonapi.Py_AddPendingCall(_trampoline, None) == 0:
        return True
    _scheduled.release()
    return False


def _run_next(_: Any) -> int:
    """What Python runs as a pending call.

    Another one must not wait meanwhile: up to 3.11, the first function that is called under a
    profiler of Python would wait for it, and for ever. So there is one at a time, and the next call
    comes a moment later. Only who asks to be asked again is so at once, many times if need be, and
    calls nothing in between.
    """
    call = _calls.popleft() if _calls else None
    with contextlib.suppress(Exception):
        if call is not None:
            call()
    again = len(_calls) == 1 and _calls[0] is call
    if _calls and not again:
        with contextlib.suppress(RuntimeError):
            threading.Timer(_LATER_DELAY_SECONDS, _wake_main_thread).start()
    _scheduled.release()
    if again and _scheduled.acquire(blocking=False):
        sys.modules["ctypes"].pythonapi.Py_AddPendingCall(_trampoline, None)
    return 0


class DeadlineTimer:
    """Calls `tick` at each deadline, on the main thread if that is to be had.

    Args:
        tick: What is to be done.
        deadline: When; None for never.
        anywhere: Whether another thread may do it where the main one waits in C for a second: for its threads, say.
    """

    def __init__(
        self, tick: Callable[[], None], deadline: Callable[[], float | None], *, anywhere: bool
    ) -> None:
        self._tick, self._deadline, self._anywhere = tick, deadline, anywhere
        self._changed = threading.Event()
        self._turn = threading.Lock()  # taken by who ticks
        self._stopped = False
        self._thread = threading.Thread(target=self._watch, name="traceloom-alarm", daemon=True)

    def changed(self) -> None:
        """There may be something else to wait for now; the thread starts when there is something at
        all.
        """
        if self._thread.ident is None and not self._stopped and self._deadline() is not None:
            with contextlib.suppress(RuntimeError):  # no threads any more: the interpreter ends
                self._thread.start()
        self._changed.set()

    def stop(self, *, wait: bool = False) -> None:
        """Never call again; `wait` until the thread is gone."""
        self._stopped = True
        self._changed.set()
        if (
            wait
            and self._thread.ident is not None
            and self._thread is not threading.current_thread()
        ):
            self._thread.join(PATIENCE_SECONDS)

    def _watch(self) -> None:
        while not self._stopped:
            deadline = self._deadline()
            if self._changed.wait(
                None if deadline is None else max(0.0, deadline - time.monotonic())
            ):
                self._changed.clear()
                continue
            ticked = threading.Event()

            def fire(ticked: threading.Event = ticked) -> None:
                with self._turn:
                    if not (ticked.is_set() or self._stopped):
                        ticked.set()
                        self._tick()

            if not (run_on_main_thread(fire) and ticked.wait(PATIENCE_SECONDS)) and self._anywhere:
                fire()
            while not (ticked.wait(PATIENCE_SECONDS) or self._stopped):
                pass
            self._changed.wait(PAUSE_SECONDS)  # never spin


def is_child_of_multiprocessing() -> bool:
    """Whether `multiprocessing` made this process (a rank or a loader worker: nobody knows yet)."""
    return (
        "--multiprocessing-fork" in getattr(sys, "orig_argv", sys.argv)
        or multiprocessing.parent_process() is not None
        or getattr(multiprocessing.current_process(), "_inheriting", False)
    )


def is_loader_worker() -> bool:
    """Whether this process serves a DataLoader."""
    data = sys.modules.get("torch.utils.data")
    return data is not None and data.get_worker_info() is not None


def is_launcher() -> bool:
    """Whether this process only starts the ranks, as far as its command line tells."""
    words = getattr(sys, "orig_argv", sys.argv)
    if len(words) > 2 and "-m" in words[1:]:
        at = words.index("-m") + 1
        return at < len(words) and words[at] in _LAUNCHERS
    return any(
        os.path.basename(word) in _LAUNCHERS  # noqa: PTH119
        for word in words[:3]
        if not word.startswith("-")
    )


def is_device_ready(torch: Any) -> bool:
    """Whether starting Kineto now would not itself create a device context.

    That would cost memory on the wrong device and forbid a later fork. Without an initialised
    device it can only be said of a PyTorch that was built for the processor alone, or of a machine
    without any.
    """
    if sys.platform == "linux" and not any(os.path.exists(path) for path in _DEVICE_FILES):  # noqa: PTH110
        return True
    if torch.version.cuda is None and getattr(torch.version, "hip", None) is None:
        return getattr(torch.version, "xpu", None) is None or torch.xpu.is_initialized()
    if not torch.cuda.is_initialized():
        return False
    return not torch.cuda.is_current_stream_capturing()


def call_on_device_use(torch: Any, call: Callable[[], None]) -> None:
    """Let `call` run on the main thread as soon as the program itself has initialised a device."""
    for backend in (torch.cuda, torch.xpu):
        # Called in the middle of the initialisation, whoever asks for it; it is over when Python
        # goes on.
        backend._lazy_call(lambda: run_on_main_thread(call))  # noqa: SLF001


# How long a program that is busy in C may keep us from answering SIGTERM before it dies as it would
# without us.
SHUTDOWN_PATIENCE_SECONDS = 10.0


class ShutdownHandlers:
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
        """From now on SIGTERM writes before it ends the process.

        Only the main thread may ask for that.
        """
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

        It would have died of SIGTERM without us, so a thread that C tells of each signal sees to it
        that it does.
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
        self._listener = threading.Thread(
            target=self._listen, args=(read,), name="traceloom-signals", daemon=True
        )
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
            run_on_main_thread(self._answered.set)  # where Python runs at all, the handler runs too
            if not self._answered.wait(SHUTDOWN_PATIENCE_SECONDS):
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
            self._recorder.finish(
                f"exception: {type(error).__name__}" if error is not None else "exit"
            )

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
        from traceloom.capture.attach import handle_fork

        handle_fork(recorder)
