"""Two runs against each other, shown: the document, and the terminal, page and Markdown drawn from it."""

from traceloom.report.comparison.document import build

__all__ = ["build"]
