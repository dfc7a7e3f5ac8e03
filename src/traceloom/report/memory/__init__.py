"""Whose memory it is, as a document and its views."""

from traceloom.report.memory.document import build
from traceloom.report.memory.options import MemoryOptions

__all__ = ["MemoryOptions", "build"]
