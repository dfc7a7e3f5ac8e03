"""Reports: one document per run, and the views drawn from it.

Names are loaded when they are first used: who only draws a graph does not load the analyses.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from traceloom.lazy import lazy

if TYPE_CHECKING:
    from traceloom.report.document import build as build
    from traceloom.report.document import build_runs as build_runs
    from traceloom.report.document import selected as selected
    from traceloom.report.options import SORT_KEYS as SORT_KEYS
    from traceloom.report.options import ReportOptions as ReportOptions

lazy(
    __name__,
    {
        "SORT_KEYS": ".options",
        "ReportOptions": ".options",
        "build": ".document",
        "build_runs": ".document",
        "selected": ".document",
    },
)
