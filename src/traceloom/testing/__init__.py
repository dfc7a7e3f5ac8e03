"""Public builders for tests: traces written by hand, damage, big files, random traces."""

from traceloom.testing.builder import TraceBuilder

__all__ = ["TraceBuilder"]
