"""Reports: one document per run, and the views drawn from it.

Names are loaded when they are first used: code that only draws a graph does not load the analyses.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from traceloom.system.lazy_import import lazy

if TYPE_CHECKING:
    from traceloom.report.document import SORT_KEYS as SORT_KEYS, ReportOptions as ReportOptions
    from traceloom.report.run import build as build, build_runs as build_runs, selected as selected

lazy(
    __name__,
    {
        "SORT_KEYS": ".document",
        "ReportOptions": ".document",
        "build": ".run",
        "build_runs": ".run",
        "selected": ".run",
    },
)
