"""The data model: what a trace, a session and a graph are, how notices and units look."""

from traceloom.model.graph import Graph
from traceloom.model.notice import Notice
from traceloom.model.result import Result
from traceloom.model.session import Session
from traceloom.model.trace import Meta, Trace

__all__ = ["Graph", "Meta", "Notice", "Result", "Session", "Trace"]
