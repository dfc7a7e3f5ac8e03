"""PyTorch's execution trace observer for one step, where that is safe.

It ends programs whose forward passes run on several threads, that hold tensors without strides, or
that use an observer of their own; so it is only asked for (`--graph`), and left out with a notice
where one of these may be.
"""

from __future__ import annotations

import contextlib
import gc
import os
import threading
import time
from pathlib import Path
from typing import Any

import torch
from torch._C._profiler import _remove_execution_trace_observer
from torch.profiler import ExecutionTraceObserver

from traceloom.capture.session import hide_log_lines, require_whole

_WITHOUT_STRIDES = tuple(
    layout
    for name in ("sparse_csr", "sparse_csc", "sparse_bsr", "sparse_bsc")
    if (layout := getattr(torch, name, None)) is not None
)
_HELPERS = ("QueueFeederThread", "tqdm", "TMonitor", "Thread-QueueManager")


class _Observer(ExecutionTraceObserver):  # type: ignore[misc]
    """PyTorch's observer without its copies of Triton's kernels, for which it imports the compiler."""

    _registered: bool

    def unregister_callback(self) -> None:
        if self._registered:
            self.stop()
            _remove_execution_trace_observer()
            self._registered = False


class HostTrace:
    """The host trace of one step, within the session.

    Args:
        path: The file.
        step: The step that is traced.
    """

    def __init__(self, path: Path, step: int) -> None:
        self.path, self.step = path, step
        self.start_ns = self.end_ns = 0
        self._observer: Any = _Observer()

    def owns(self, observer: Any) -> bool:
        return observer is self._observer

    @staticmethod
    def find_danger(threads: set[int]) -> str:
        """Says why the observer could harm this program; empty where it could not.

        Args:
            threads: Those that have made steps or backward passes so far.
        """
        if len(threads) > 1:
            return "more than one thread trains"
        others = [
            thread.name
            for thread in threading.enumerate()
            if thread.ident not in threads and not thread.name.startswith(_HELPERS)
        ]
        if any(name != "MainThread" for name in others):
            return f"other threads run, which may compute (`{others[-1]}`)"
        for value in gc.get_objects():
            if issubclass(type(value), ExecutionTraceObserver):
                return "the program has an execution trace observer of its own"
            if type(value) in {torch.Tensor, torch.nn.Parameter} and (
                value.layout in _WITHOUT_STRIDES
                or (value.is_nested and value.layout is torch.strided)
            ):
                return "it holds tensors without strides"
        return ""

    def start(self) -> None:
        """Observes from now on.

        Raises:
            OSError: The file cannot be written there.
        """
        self.path.touch()
        self.start_ns = time.time_ns()
        with hide_log_lines():
            self._observer.register_callback(str(self.path))
            self._observer.start()

    def stop(self, hooks: Any) -> None:
        """Ends; the file is whole afterwards."""
        with hide_log_lines():
            self._observer.stop()
        if hooks is not None and hooks.annotations is not None:
            # What is open would be looked for by the next observer, which may be the program's.
            hooks.annotations.close()
        with hide_log_lines():
            self._observer.unregister_callback()
        self.end_ns = time.time_ns()

    def abandon(self) -> None:
        """Ends after a failure."""
        with contextlib.suppress(Exception):
            self._observer.stop()

    def check(self) -> None:
        """Checks the file.

        Raises:
            OSError: It could not be written whole.
        """
        require_whole(self.path)

    def redirect_in_child(self) -> None:
        """In a forked child: the observer's descriptor must not reach the parent's file any more."""
        try:
            target = self.path.stat()
        except OSError:
            return
        null = os.open(os.devnull, os.O_WRONLY)
        try:
            names = os.listdir("/proc/self/fd")  # noqa: PTH208
        except OSError:
            names = [str(number) for number in range(3, 256)]
        for name in names:
            with contextlib.suppress(OSError, ValueError):  # it was the one that listed them
                if os.path.samestat(os.fstat(int(name)), target):
                    os.dup2(null, int(name))
        os.close(null)
