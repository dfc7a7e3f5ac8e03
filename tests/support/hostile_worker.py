"""A worker of the service whose analysis does what a capture's text asks for: it hangs, crashes or swells."""

from __future__ import annotations

import os
import signal
from pathlib import Path

from traceloom.collect import tasks, worker


def analyse(**arguments: object) -> None:
    """The real one, but for captures that name a disaster."""
    text = b"".join(path.read_bytes()[:40] for path in Path(str(arguments["folder"])).iterdir())
    if b"hang" in text:
        signal.pause()
    if b"crash" in text:
        os.kill(os.getpid(), signal.SIGSEGV)
    if b"exit" in text:
        os._exit(7)
    if b"swell" in text:
        bytearray(16 << 30)
    tasks.analyse(**arguments)  # type: ignore[arg-type]


def main() -> None:
    """As of the real worker."""
    worker.main({**worker.TASKS, "analyse": analyse})
