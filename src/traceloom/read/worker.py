"""The process that reads one file: a job on standard input, lines of JSON on standard output, the trace in a folder."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from traceloom.errors import InputError
from traceloom.read import store
from traceloom.read.kineto import read_kineto

_EVERY_BYTES = 1 << 21  # how often to say how far it is


def main() -> None:
    """Read the file that standard input names."""
    job = json.load(sys.stdin)
    told = 0

    def step(read: int, _text: int) -> None:
        nonlocal told
        if read - told >= _EVERY_BYTES:
            told = read
            _say({"read": read})

    try:
        trace = read_kineto(job["path"], capture=job["capture"], step=step, processes=job["processes"])
    except InputError as error:
        _say({"refused": error.to_dict()})
        return
    store.save(trace, Path(job["folder"]), compressed=False)
    _say({"done": True})


def _say(line: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(line) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    # Each core has a process of its own, so its libraries need no threads of theirs.
    os.environ.setdefault("POLARS_MAX_THREADS", "1")
    main()
