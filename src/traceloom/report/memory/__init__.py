"""Whose memory it is, as a document and its views."""

from traceloom.report.memory.document import build, document_of
from traceloom.report.memory.options import MemoryOptions
from traceloom.report.memory.sources import find

__all__ = ["MemoryOptions", "build", "document_of", "find"]
