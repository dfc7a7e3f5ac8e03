"""Reports: one document per run, and the views drawn from it."""

from __future__ import annotations

from traceloom.report.document import build, build_runs, selected
from traceloom.report.options import SORT_KEYS, ReportOptions

__all__ = ["SORT_KEYS", "ReportOptions", "build", "build_runs", "selected"]
