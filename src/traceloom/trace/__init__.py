"""What a trace and a session are: columns, units, storage, cache.

Names are loaded when they are first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from traceloom.system.lazy_import import lazy

if TYPE_CHECKING:
    from traceloom.trace.frames import Result as Result
    from traceloom.trace.notice import Notice as Notice
    from traceloom.trace.session import Session as Session
    from traceloom.trace.trace import Meta as Meta, Trace as Trace

lazy(
    __name__,
    {
        "Meta": ".trace",
        "Notice": ".notice",
        "Result": ".frames",
        "Session": ".session",
        "Trace": ".trace",
    },
)
