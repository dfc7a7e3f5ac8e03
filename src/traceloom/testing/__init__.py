"""Builders of small traces, for tests."""

from traceloom.testing.host_trace_builder import HostTraceBuilder
from traceloom.testing.trace_builder import TraceBuilder

__all__ = ["HostTraceBuilder", "TraceBuilder"]
