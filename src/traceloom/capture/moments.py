"""When something has to happen that no hook of PyTorch reports: moments in time, and the first use of a device.

A daemon thread waits; the work itself runs on the main thread between two bytecodes, because a recorder of one thread
records the one that starts it. A main thread that waits in C does it when it comes back to Python, or, with a recorder
of every thread, the daemon does it.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

PAUSE_SECONDS = 0.02
PATIENCE_SECONDS = 1.0
_BREATH_SECONDS = 0.001

# NVIDIA, NVIDIA under WSL, AMD, Intel.
_DEVICE_FILES = ("/dev/nvidiactl", "/dev/dxg", "/dev/kfd", "/dev/dri")

# Programs that start the ranks. They import torch and compute nothing.
_LAUNCHERS = {
    "torchrun", "torchrun.exe", "torch.distributed.run", "torch.distributed.launch", "torch.distributed.elastic",
    "accelerate", "accelerate.exe", "accelerate.commands.launch", "accelerate.commands.accelerate_cli", "deepspeed",
    "deepspeed.launcher.launch", "deepspeed.launcher.runner", "horovodrun", "composer", "colossalai", "ray",
    "tritonrun",
}  # fmt: skip


def on_main_thread(call: Callable[[], None]) -> bool:
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
    if _ring():
        return True
    with contextlib.suppress(ValueError):  # it has been run after all
        _calls.remove(call)
    return False


def on_main_thread_later(call: Callable[[], None]) -> None:
    """As `on_main_thread`, but not within what the main thread runs for us just now."""
    with contextlib.suppress(RuntimeError):  # no threads any more: the interpreter ends
        threading.Timer(_BREATH_SECONDS, on_main_thread, (call,)).start()


_calls: deque[Callable[[], None]] = deque()
_scheduled = threading.Lock()  # held while a pending call waits or runs
_trampoline: Any = None  # a pending call must live until it has run


def _ring() -> bool:
    """See to it that the next call is run; False where Python takes no more pending calls."""
    if not _scheduled.acquire(blocking=False):
        return True
    if sys.modules["ctypes"].pythonapi.Py_AddPendingCall(_trampoline, None) == 0:
        return True
    _scheduled.release()
    return False


def _run_next(_: Any) -> int:
    """What Python runs as a pending call.

    Another one must not wait meanwhile: up to 3.11, the first function that is called under a profiler of Python would
    wait for it, and for ever. So there is one at a time, and the next call comes a moment later. Only who asks to be
    asked again is so at once, many times if need be, and calls nothing in between.
    """
    call = _calls.popleft() if _calls else None
    with contextlib.suppress(Exception):
        if call is not None:
            call()
    again = len(_calls) == 1 and _calls[0] is call
    if _calls and not again:
        with contextlib.suppress(RuntimeError):
            threading.Timer(_BREATH_SECONDS, _ring).start()
    _scheduled.release()
    if again and _scheduled.acquire(blocking=False):
        sys.modules["ctypes"].pythonapi.Py_AddPendingCall(_trampoline, None)
    return 0


class Alarm:
    """Calls `tick` at each deadline, on the main thread if that is to be had.

    Args:
        tick: What is to be done.
        deadline: When; None for never.
        anywhere: Whether another thread may do it where the main one waits in C for a second: for its threads, say.
    """

    def __init__(self, tick: Callable[[], None], deadline: Callable[[], float | None], *, anywhere: bool) -> None:
        self._tick, self._deadline, self._anywhere = tick, deadline, anywhere
        self._changed = threading.Event()
        self._turn = threading.Lock()  # taken by who ticks
        self._stopped = False
        self._thread = threading.Thread(target=self._watch, name="traceloom-alarm", daemon=True)

    def changed(self) -> None:
        """There may be something else to wait for now; the thread starts when there is something at all."""
        if self._thread.ident is None and not self._stopped and self._deadline() is not None:
            with contextlib.suppress(RuntimeError):  # no threads any more: the interpreter ends
                self._thread.start()
        self._changed.set()

    def stop(self, *, wait: bool = False) -> None:
        """Never call again; `wait` until the thread is gone."""
        self._stopped = True
        self._changed.set()
        if wait and self._thread.ident is not None and self._thread is not threading.current_thread():
            self._thread.join(PATIENCE_SECONDS)

    def _watch(self) -> None:
        while not self._stopped:
            deadline = self._deadline()
            if self._changed.wait(None if deadline is None else max(0.0, deadline - time.monotonic())):
                self._changed.clear()
                continue
            ticked = threading.Event()

            def fire(ticked: threading.Event = ticked) -> None:
                with self._turn:
                    if not (ticked.is_set() or self._stopped):
                        ticked.set()
                        self._tick()

            if not (on_main_thread(fire) and ticked.wait(PATIENCE_SECONDS)) and self._anywhere:
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
    return any(os.path.basename(word) in _LAUNCHERS for word in words[:3] if not word.startswith("-"))  # noqa: PTH119


def device_is_ready(torch: Any) -> bool:
    """Whether starting Kineto now would not itself create a device context.

    That would cost memory on the wrong device and forbid a later fork. Without an initialised device it can only be
    said of a PyTorch that was built for the processor alone, or of a machine without any.
    """
    if sys.platform == "linux" and not any(os.path.exists(path) for path in _DEVICE_FILES):  # noqa: PTH110
        return True
    if torch.version.cuda is None and getattr(torch.version, "hip", None) is None:
        return getattr(torch.version, "xpu", None) is None or torch.xpu.is_initialized()
    if not torch.cuda.is_initialized():
        return False
    return not torch.cuda.is_current_stream_capturing()


def when_device_is_used(torch: Any, call: Callable[[], None]) -> None:
    """Let `call` run on the main thread as soon as the program itself has initialised a device."""
    for backend in (torch.cuda, torch.xpu):
        # Called in the middle of the initialisation, whoever asks for it; it is over when Python goes on.
        backend._lazy_call(lambda: on_main_thread(call))  # noqa: SLF001
