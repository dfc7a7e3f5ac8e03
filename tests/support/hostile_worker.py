"""A worker of the service whose analysis does what a capture's text asks for: it hangs, crashes, swells, or waits."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path

from traceloom.fleet.service import tasks, worker


def analyse(**arguments: object) -> None:
    """The real one, but for captures that name a disaster."""
    text = b"".join(path.read_bytes()[:400] for path in Path(str(arguments["folder"])).iterdir())
    if text == b"hang":
        signal.pause()
    if text == b"crash":
        os.kill(os.getpid(), signal.SIGSEGV)
    if text == b"exit":
        os._exit(7)
    if text == b"swell":
        bytearray(16 << 30)
    if once := re.search(rb'"wait once": "([^"]+)"', text):
        noted = Path(once[1].decode())
        if not noted.exists():
            noted.write_text(f"{os.getpid()} {os.getppid()}\n")
            signal.pause()
    tasks.analyse(**arguments)  # type: ignore[arg-type]


def main() -> None:
    """As of the real worker."""
    worker.main({**worker.TASKS, "analyse": analyse})
