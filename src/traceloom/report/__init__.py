"""Reports: one document per run, and the views drawn from it.

Names are loaded when they are first used: who only draws a graph does not load the analyses.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from traceloom.report.document import build as build
    from traceloom.report.document import build_runs as build_runs
    from traceloom.report.document import selected as selected
    from traceloom.report.options import SORT_KEYS as SORT_KEYS
    from traceloom.report.options import ReportOptions as ReportOptions

_HOMES = {
    "SORT_KEYS": "options",
    "ReportOptions": "options",
    "build": "document",
    "build_runs": "document",
    "selected": "document",
}

__all__ = ["SORT_KEYS", "ReportOptions", "build", "build_runs", "selected"]


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{home}"), name)
