"""How this process ends, forks and waits: exits, forks, deadlines, launchers, devices."""

# ruff: noqa: SLF001  (PyTorch and Python offer these things by private names only)
from __future__ import annotations

import _thread
import atexit
import contextlib
import ctypes
import multiprocessing
import os
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

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
_POLL_SECONDS = 0.02
_QUIET_SECONDS, _QUICK_TURNS = 0.1, 5


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


def may_use_device(torch: Any) -> bool:
    """Whether the program may yet begin to use an accelerator of this machine.

    A session that begins before that would not see the device, and must not be what creates a
    context on it.
    """
    if sys.platform == "linux" and not any(os.path.exists(path) for path in _DEVICE_FILES):  # noqa: PTH110
        return False
    version = torch.version
    if version.cuda is None and getattr(version, "hip", None) is None:
        return getattr(version, "xpu", None) is not None and not torch.xpu.is_initialized()
    return not torch.cuda.is_initialized()


def call_on_device_use(torch: Any, call: Callable[[], None]) -> None:
    """Lets `call` run when the program itself initialises a device, in the midst of that."""
    for backend in (torch.cuda, torch.xpu):
        backend._lazy_call(call)


def run_on_main_thread(call: Callable[[], None]) -> bool:
    """Lets the main thread run `call` between two bytecodes; False where Python takes no more."""

    def run(_: Any) -> int:
        _pending.pop(0)
        call()
        return 0

    trampoline = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_void_p)(run)
    _pending.append(trampoline)
    return bool(ctypes.pythonapi.Py_AddPendingCall(trampoline, None) == 0)


_pending: list[Any] = []  # a pending call must live until it has run


class Watch:
    """Looks at a recording now and then, while no step of the program does.

    It is a thread that `threading` does not know, and exists only before the first step and in
    recordings by time.
    """

    def __init__(self, check: Callable[[], bool]) -> None:
        self._check = check
        self._running = False

    def start(self) -> None:
        """Looks from now on, until `check` says that there is no more to see."""
        if self._running:
            return
        self._running = True
        self._wake = _thread.allocate_lock()
        self._ended = _thread.allocate_lock()
        self._wake.acquire()
        self._ended.acquire()
        try:
            _thread.start_new_thread(self._run, (self._wake, self._ended))
        except RuntimeError:  # no thread can be had
            self._running = False

    @property
    def running(self) -> bool:
        return self._running

    def stop(self) -> None:
        if not self._running:
            return
        self._running = False
        with contextlib.suppress(RuntimeError):
            self._wake.release()
        self._ended.acquire(timeout=1.0)

    def _run(self, wake: Any, ended: Any) -> None:
        try:
            while not wake.acquire(timeout=_POLL_SECONDS) and self._check():
                pass
        finally:
            if self._wake is wake:
                self._running = False
            ended.release()


def fork_quietly() -> int:
    """Forks without the at-fork handlers of Python; 0 in the child, which may not return.

    The child holds the interpreter, and would wait for ever for a thread that asked for it, so no
    other thread may do so while it is made.

    Returns:
        Negative where that cannot be had: other threads keep Python busy, or the system refuses.
    """
    interval = sys.getswitchinterval()
    deadline, quick = time.perf_counter() + _QUIET_SECONDS, 0
    while quick < _QUICK_TURNS:
        began = time.perf_counter()
        if began > deadline:
            return -1
        time.sleep(0)  # whoever asked for the interpreter has it now, and a busy thread keeps it
        quick = quick + 1 if time.perf_counter() - began < interval / 5 else 0
    sys.setswitchinterval(60.0)
    try:
        return int(ctypes.PyDLL(None).fork())
    finally:
        sys.setswitchinterval(interval)


class Exits:
    """The ends of one process: normal, exception, `os._exit`, and its forks."""

    def __init__(self, recorder: Any) -> None:
        self._recorder = recorder
        self._pid = os.getpid()
        atexit.register(self._at_exit)
        self._os_exit = os._exit
        os._exit = self._exit_at_once
        os.register_at_fork(
            before=self._before_fork,
            after_in_parent=self._in_parent,
            after_in_child=self._in_child,
        )

    def remove(self) -> None:
        atexit.unregister(self._at_exit)
        if os._exit == self._exit_at_once:
            os._exit = self._os_exit
        self._recorder = None

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

    def _here(self) -> bool:
        return self._recorder is not None and self._pid == os.getpid()

    def _before_fork(self) -> None:
        if self._recorder is not None:
            self._recorder.before_fork()

    def _in_parent(self) -> None:
        if self._recorder is not None:
            self._recorder.after_fork()

    def _in_child(self) -> None:
        recorder, self._recorder = self._recorder, None
        if recorder is None:
            return
        from traceloom.capture.attach import handle_fork

        handle_fork(recorder)


def is_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()
