"""A what-if as a page: the timeline before, and under it after."""

from traceloom.report.before_after.page import render
from traceloom.report.before_after.payload import BeforeAfter, build

__all__ = ["BeforeAfter", "build", "render"]
