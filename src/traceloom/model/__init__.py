"""The data model: what a trace, a session and a graph are, how notices and units look.

Names are loaded when they are first used: not everything that tells a notice needs the frames of a graph.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from traceloom.lazy import lazy

if TYPE_CHECKING:
    from traceloom.model.graph import Graph as Graph
    from traceloom.model.notice import Notice as Notice
    from traceloom.model.result import Result as Result
    from traceloom.model.session import Session as Session
    from traceloom.model.trace import Meta as Meta
    from traceloom.model.trace import Trace as Trace

lazy(
    __name__,
    {
        "Graph": ".graph",
        "Meta": ".trace",
        "Notice": ".notice",
        "Result": ".result",
        "Session": ".session",
        "Trace": ".trace",
    },
)
