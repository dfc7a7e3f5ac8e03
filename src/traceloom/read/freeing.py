"""Giving memory back to the system after much of it was freed."""

from __future__ import annotations

import contextlib
import ctypes
import sys

_LITTLE = 1 << 19  # KiB of memory that a process never exceeded: it has nothing to give back that anyone would miss


def give_back() -> None:
    """Let the C library return the pages it keeps for later; nothing where it has no way to do so.

    What is freed between two blocks in use stays with the process otherwise: after a trace is read, about a quarter of
    what it held. Small processes keep their pages: they will need them again, and each costs time to come by.
    """
    if sys.platform == "linux":
        import resource  # Windows has none

        if resource.getrusage(resource.RUSAGE_SELF).ru_maxrss < _LITTLE:
            return
        with contextlib.suppress(OSError, AttributeError):  # other C libraries have no such function
            ctypes.CDLL(None).malloc_trim(0)
