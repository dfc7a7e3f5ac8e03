"""Builders of small traces, for tests."""

from traceloom.testing.builder import TraceBuilder
from traceloom.testing.host_trace import HostTraceBuilder

__all__ = ["HostTraceBuilder", "TraceBuilder"]
