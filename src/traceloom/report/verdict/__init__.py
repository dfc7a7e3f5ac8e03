"""The verdict of a check in every view, and baselines to hold runs against."""

from traceloom.report.verdict.document import build

__all__ = ["build"]
