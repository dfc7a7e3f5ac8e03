"""The process of a command: `python -m traceloom` and the script `traceloom`."""

from __future__ import annotations

import gc
import io
import sys

from traceloom.cli import main

_ALLOCATIONS = 100_000  # between two looks for cycles; after the usual 700, loading modules alone has dozens
_LARGE = 4 << 20  # until glibc has seen such a block freed, it hands memory back at once, and every column faults anew


def console() -> int:
    """Run the command line of this process; returns the exit code.

    Garbage collector and allocator are tuned here, and not in `main`, which others call from processes of their own.
    """
    gc.set_threshold(_ALLOCATIONS)
    bytes(_LARGE)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            # A letter that the terminal's encoding lacks, or a file name that is no text, is spelled, not a failure.
            stream.reconfigure(errors="backslashreplace")
    try:
        return main()
    finally:
        # The process ends: what it still holds need not be looked through for cycles again and again.
        gc.freeze()


if __name__ == "__main__":
    sys.exit(console())
