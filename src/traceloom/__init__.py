"""Traceloom: record AI workloads, account for every nanosecond, show where the time went.

`import traceloom` imports nothing but the standard library; each name below is loaded when first
used, so that recording never drags the reading half into a training process.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from traceloom.system.lazy_import import lazy

__version__ = "0.2.0"

lazy(
    __name__,
    {
        # in the user's process
        "record": ".capture",
        "step": ".capture",
        "scope": ".capture",
        "autoprofile": ".capture.autoprofile",
        # reading and understanding
        "analyze": None,
        "load": ".formats",
        "load_runs": ".formats",
        "findings": None,
        "graph": None,
        "whatif": ".changes.whatif",
        "show": ".report.views.markdown",
        "Graph": ".graph.graph",
        "Session": ".trace.session",
        "Trace": ".trace.trace",
        "Notice": ".trace.notice",
        # errors
        "TraceloomError": ".errors",
        "UsageError": ".errors",
        "InputError": ".errors",
        "OutputError": ".errors",
        "CaptureError": ".errors",
        "PartialError": ".errors",
        "CheckError": ".errors",
        "InvariantError": ".errors",
    },
)

if TYPE_CHECKING:
    from traceloom import analyze as analyze, findings as findings, graph as graph
    from traceloom.capture import record as record, step as step
    from traceloom.capture.autoprofile import autoprofile as autoprofile
    from traceloom.capture.scope import scope as scope
    from traceloom.changes.whatif import whatif as whatif
    from traceloom.errors import (
        CaptureError as CaptureError,
        CheckError as CheckError,
        InputError as InputError,
        InvariantError as InvariantError,
        OutputError as OutputError,
        PartialError as PartialError,
        TraceloomError as TraceloomError,
        UsageError as UsageError,
    )
    from traceloom.formats import load as load, load_runs as load_runs
    from traceloom.graph.graph import Graph as Graph
    from traceloom.report.views.markdown import show as show
    from traceloom.trace.notice import Notice as Notice
    from traceloom.trace.session import Session as Session
    from traceloom.trace.trace import Trace as Trace
