"""Traceloom: record AI workloads, account for every nanosecond, show where the time went.

`import traceloom` imports nothing but the standard library; each name below is loaded when first used, so that
recording never drags the reading half into a training process.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from traceloom.lazy import lazy

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
        "load": ".read",
        "load_runs": ".read",
        "findings": None,
        "link": None,
        "retime": None,
        "whatif": ".simulate",
        "show": ".report.views.notebook",
        "Graph": ".model",
        "Session": ".model",
        "Trace": ".model",
        "Notice": ".model",
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
    from traceloom import analyze as analyze
    from traceloom import findings as findings
    from traceloom import link as link
    from traceloom import retime as retime
    from traceloom.capture import record as record
    from traceloom.capture import step as step
    from traceloom.capture.autoprofile import autoprofile as autoprofile
    from traceloom.capture.scope import scope as scope
    from traceloom.errors import CaptureError as CaptureError
    from traceloom.errors import CheckError as CheckError
    from traceloom.errors import InputError as InputError
    from traceloom.errors import InvariantError as InvariantError
    from traceloom.errors import OutputError as OutputError
    from traceloom.errors import PartialError as PartialError
    from traceloom.errors import TraceloomError as TraceloomError
    from traceloom.errors import UsageError as UsageError
    from traceloom.model import Graph as Graph
    from traceloom.model import Notice as Notice
    from traceloom.model import Session as Session
    from traceloom.model import Trace as Trace
    from traceloom.read import load as load
    from traceloom.read import load_runs as load_runs
    from traceloom.report.views.notebook import show as show
    from traceloom.simulate.whatif import whatif as whatif
