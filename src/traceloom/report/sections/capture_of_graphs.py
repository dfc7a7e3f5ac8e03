"""The second recording that knows the operators of graph replays, read once for all sections."""

from __future__ import annotations

from functools import lru_cache

from traceloom.model import Session
from traceloom.read import load
from traceloom.report.options import ReportOptions


def capture_of_graphs(options: ReportOptions) -> Session | None:
    """What `graph_capture` names; None where nothing is given."""
    return None if options.graph_capture is None else _read(options.graph_capture, options.cache)


@lru_cache(maxsize=1)
def _read(path: str, cache: bool) -> Session:
    return load(path, cache=cache)
