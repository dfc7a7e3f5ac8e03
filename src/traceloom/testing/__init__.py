"""Public builders for tests: traces written by hand, damage, big files, random traces."""

from traceloom.testing.builder import TraceBuilder
from traceloom.testing.host_trace import HostTraceBuilder

__all__ = ["HostTraceBuilder", "TraceBuilder"]
