"""The process of a command: `python -m traceloom` and the script `traceloom`."""

import atexit
import gc
import os
import sys

from traceloom.system import process

_ALLOCATIONS = (
    300_000  # between two looks for cycles; after the usual 700, loading modules alone has dozens
)
_LARGE = (
    4 << 20
)  # until glibc has seen such a block freed, it hands memory back at once, and every column faults anew


def console() -> int:
    """Run the command line of this process; returns the exit code.

    Garbage collector and allocator are tuned here, and not in `main`, which others call from
    processes of their own.
    """
    process.install_signal_handlers()
    # Import nothing from the current directory, which may be an archive of a stranger. `python -m`
    # puts it first by itself, and so does an empty entry of PYTHONPATH.
    home = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))  # noqa: PTH100, PTH120  (pathlib is not loaded)
    try:
        current = os.getcwd()  # noqa: PTH109
    except OSError:
        current = ""  # it is gone
    sys.path[:] = [entry for entry in sys.path if entry == home or entry not in {"", current}]
    from traceloom.cli import main
    from traceloom.system.sanitize import sanitize_standard_streams

    gc.set_threshold(_ALLOCATIONS)
    bytes(_LARGE)
    sanitize_standard_streams()
    code = main()
    try:
        atexit._run_exitfuncs()  # noqa: SLF001  (what libraries have to do at the end)
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
    except (OSError, ValueError, AttributeError):
        return code  # Python says what it has to say about a stream that is closed or full
    # What the process holds goes back to the system at once; Python would free it piece by piece
    # before.
    os._exit(code)


if __name__ == "__main__":
    sys.exit(console())
