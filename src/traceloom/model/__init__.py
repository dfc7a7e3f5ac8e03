"""The data model: what a trace and a session are, how notices and units look."""

from traceloom.model.notice import Notice
from traceloom.model.result import Result
from traceloom.model.session import Session
from traceloom.model.trace import Meta, Trace

__all__ = ["Meta", "Notice", "Result", "Session", "Trace"]
