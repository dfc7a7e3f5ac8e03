"""The history that CUDA's allocator keeps of itself: which line made each block, from the first one on.

PyTorch's profiler knows only blocks that are made while it records. The allocator's own history goes back to the
process's first block on the device, for two microseconds an allocation.
"""

# ruff: noqa: SLF001  (PyTorch offers these things by private names only)
from __future__ import annotations

import contextlib
import inspect
import os
from pathlib import Path

import torch

from traceloom.capture.messages import say_once
from traceloom.capture.writing import replacing

MOST_ENTRIES = 100_000
"""What the allocator keeps, the newest; blocks that are alive keep their stack however old they are."""
_WANTED = {"context": "alloc", "stacks": "python", "max_entries": MOST_ENTRIES}


class AllocatorHistory:
    """The history of the CUDA (or HIP) allocator in this process. A program's own history is left as it is.

    Attributes:
        problem: Why there is none, in words; empty where nothing went wrong.
    """

    def __init__(self) -> None:
        self.problem = ""
        self._pid = os.getpid()
        self._wanted = False
        self._ours = False

    def begin(self) -> None:
        """Keep a history from the moment on at which the program begins to use the device; that is never our doing."""
        if not self._wanted and torch.backends.cuda.is_built():
            self._wanted = True
            torch.cuda._lazy_call(self._device_is_used)

    def _device_is_used(self) -> None:
        """PyTorch would raise into the program what goes wrong here."""
        if not self._wanted or os.getpid() != self._pid:  # ended meanwhile, or a fork, which has one of its own
            return
        try:
            is_enabled = getattr(torch._C, "_cuda_isHistoryEnabled", None)
            if is_enabled is None or not is_enabled():  # else the program keeps a history already
                supported = inspect.signature(torch.cuda.memory._record_memory_history).parameters
                options = {name: value for name, value in _WANTED.items() if name in supported}
                torch.cuda.memory._record_memory_history("all", **options)
                self._ours = True
        except Exception as error:  # noqa: BLE001  (the boundary to a stranger's program)
            self.problem = f"the allocator keeps no history, so that blocks have no stacks: {error}"
            say_once("no-memory-history", self.problem)

    def save(self, path: Path) -> bool:
        """Write a snapshot with the history, whole or not at all; False where the device is not in use.

        Raises:
            OSError: It could not be written.
            RuntimeError: The allocator in use has no snapshots.
        """
        if not (torch.cuda.is_available() and torch.cuda.is_initialized()):
            return False
        with replacing(path) as temporary:
            torch.cuda.memory._dump_snapshot(str(temporary))
        return True

    def end(self) -> None:
        """Keep no history any more, where it was ours."""
        self._wanted = False
        if self._ours and os.getpid() == self._pid:
            self._ours = False
            with contextlib.suppress(RuntimeError):  # the device may be gone at the end of a process
                torch.cuda.memory._record_memory_history(None)
