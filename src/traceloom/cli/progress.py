"""Progress on stderr: only where a terminal watches, and only for work that takes longer than a second."""

from __future__ import annotations

import sys
import threading
import time
from types import TracebackType

from traceloom.harmless import harmless, steering

_PATIENCE_S = 1.0
_TICK_S = 0.2
_WHEEL = "|/-\\"


class Progress:
    """A line that says what is being done, and is wiped off when all is done.

    Args:
        shown: False to stay silent whatever happens.
    """

    def __init__(self, *, shown: bool) -> None:
        self._shown = shown and sys.stderr.isatty()
        self._what = ""
        self._begin = time.monotonic()
        self._done = threading.Event()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Progress:  # noqa: PYI034  (typing.Self is younger than Python 3.10)
        if self._shown:
            self._thread = threading.Thread(target=self._turn, name="traceloom progress", daemon=True)
            self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._done.set()
        if self._thread is not None:
            self._thread.join()

    def say(self, what: str) -> None:
        """What is being done from now on."""
        self._what = harmless(what)

    def _turn(self) -> None:
        if self._done.wait(_PATIENCE_S):
            return
        turns, stream = 0, steering(sys.stderr)
        while not self._done.wait(_TICK_S):
            passed = time.monotonic() - self._begin
            stream.write(f"\r\x1b[K{_WHEEL[turns % 4]} {self._what} ({passed:.0f} s)")
            stream.flush()
            turns += 1
        stream.write("\r\x1b[K")
        stream.flush()
