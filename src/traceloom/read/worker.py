"""The process that reads files: jobs on standard input, answers on standard output, the trace of each in its folder.

It is started by `traceloom.read.ranks`, with nothing on its import path that the current directory could decide.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from traceloom.errors import InputError
from traceloom.model import trace_store
from traceloom.read.sources import source_of

_EVERY_BYTES = 1 << 21  # how often to say how far it is


def main() -> None:
    """Read one file after the other, until there are no more."""
    for line in sys.stdin:
        _read(json.loads(line))


def _read(job: dict[str, Any]) -> None:
    reported = 0

    def step(read: int, _text: int) -> None:
        nonlocal reported
        if read - reported >= _EVERY_BYTES:
            reported = read
            _say({"read": read})

    try:
        trace = source_of(job["path"]).read(job["path"], capture=job["capture"], step=step, processes=job["processes"])
    except InputError as error:
        _say({"refused": error.to_dict()})
        return
    trace_store.save(trace, Path(job["folder"]), kept=False)
    _say({"done": True})


def _say(line: dict[str, Any]) -> None:
    try:
        sys.stdout.write(json.dumps(line) + "\n")
        sys.stdout.flush()
    except BrokenPipeError:  # who has started it is gone
        os._exit(1)
