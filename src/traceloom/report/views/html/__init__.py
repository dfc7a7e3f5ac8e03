"""The report as one self-contained HTML page."""

from traceloom.report.views.html.page import render

__all__ = ["render"]
