"""Keeps the log lines of libkineto and of PyTorch's observer from the user, and nothing else.

Their lines come from C++ straight to descriptor 2. While we start or stop them, that descriptor leads to a temporary
file; what is not theirs is passed on at once afterwards.
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
import tempfile
from collections.abc import Iterator

_THEIRS = re.compile(
    rb"^(USDT:|STAGE:|INFO:|WARNING:|ERROR:|\w* ?\[?[\w-]*.{0,80})"
    rb".*(ActivityProfiler|SyncActivityProfilerHandler|execution_trace_observer|Execution ?Trace ?Observer|"
    rb"Kineto|kineto|CuptiActivity|profiler_start|profiler_stop|Memory block of unknown size was allocated before|"
    rb"External init callback must run in same thread|DeviceProperties\.cpp)"
)


@contextlib.contextmanager
def their_lines_hidden() -> Iterator[None]:
    """Run a block in which libkineto's and the observer's lines do not reach standard error."""
    try:
        sys.stderr.flush()
        kept = os.dup(2)
    except (OSError, AttributeError, ValueError):
        yield  # no standard error: nothing to keep from anyone
        return
    with contextlib.ExitStack() as stack:
        stack.callback(os.close, kept)
        try:
            lines = stack.enter_context(tempfile.TemporaryFile())
        except OSError:
            yield  # nowhere to collect the lines: let them through
            return
        os.dup2(lines.fileno(), 2)
        try:
            yield
        finally:
            with contextlib.suppress(OSError, AttributeError, ValueError):
                sys.stderr.flush()
            os.dup2(kept, 2)
            lines.seek(0)
            others = b"".join(line for line in lines if not _THEIRS.match(line))
            if others:
                with contextlib.suppress(OSError):
                    os.write(2, others)
