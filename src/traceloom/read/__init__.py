"""Reading: from files of strangers to traces and sessions."""

from __future__ import annotations

import os
from pathlib import Path

from traceloom.model import Session
from traceloom.read.kineto import read_kineto

__all__ = ["load", "load_runs", "read_kineto"]


def load_runs(*paths: str | os.PathLike[str]) -> list[Session]:
    """First version: every path is one trace; all of them are one run."""
    traces = tuple(read_kineto(Path(path)) for path in paths)
    return [Session(traces, name=str(paths[0]))]


def load(*paths: str | os.PathLike[str]) -> Session:
    """Load one run."""
    return load_runs(*paths)[0]
