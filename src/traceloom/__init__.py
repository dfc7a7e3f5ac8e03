"""Traceloom: record AI workloads, account for every nanosecond, show where the time went.

`import traceloom` imports nothing but the standard library; each name below is loaded when first used, so that
recording never drags the reading half into a training process.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.2.0"

_HOME = {
    # in the user's process
    "record": "traceloom.capture",
    "step": "traceloom.capture",
    "scope": "traceloom.capture",
    # reading and understanding
    "analyze": "traceloom.analyze",
    "load": "traceloom.read",
    "load_runs": "traceloom.read",
    "findings": "traceloom.findings",
    "link": "traceloom.link",
    "retime": "traceloom.retime",
    "whatif": "traceloom.simulate",
    "show": "traceloom.report.notebook",
    "Graph": "traceloom.model",
    "Session": "traceloom.model",
    "Trace": "traceloom.model",
    "Notice": "traceloom.model",
    # errors
    "TraceloomError": "traceloom.errors",
    "UsageError": "traceloom.errors",
    "InputError": "traceloom.errors",
    "OutputError": "traceloom.errors",
    "CaptureError": "traceloom.errors",
    "PartialError": "traceloom.errors",
    "CheckError": "traceloom.errors",
    "InvariantError": "traceloom.errors",
}

__all__ = ["__version__", *sorted(_HOME)]  # noqa: PLE0604  (the names are the keys above)

if TYPE_CHECKING:
    from traceloom import analyze as analyze
    from traceloom import findings as findings
    from traceloom import link as link
    from traceloom import retime as retime
    from traceloom.capture import record as record
    from traceloom.capture import step as step
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
    from traceloom.report.notebook import show as show
    from traceloom.simulate.whatif import whatif as whatif


def __getattr__(name: str) -> Any:
    home = _HOME.get(name)
    if home is None:
        raise AttributeError(f"module 'traceloom' has no attribute {name!r}")
    module = importlib.import_module(home)
    value = module if home.endswith(f".{name}") else getattr(module, name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
