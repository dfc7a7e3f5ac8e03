"""Remembering what several analyses of one trace need, as long as the trace lives."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import wraps
from typing import TypeVar

from traceloom.model import Trace

T = TypeVar("T")
MOST_EVENTS = 1_000_000
"""Events of the traces whose results are kept at once (about 70 bytes each): small ranks all, so that what asks rank
after rank again (the findings after the sections) finds them; of large ones the last alone, so that a run needs the
memory of one."""


def per_trace(function: Callable[[Trace], T]) -> Callable[[Trace], T]:
    """Remember the function's results by identity: for the last trace, and those before it up to `MOST_EVENTS`.

    A result is forgotten together with its trace. It is shared: nobody may change it.
    """
    kept: dict[int, tuple[weakref.ref[Trace], T]] = {}  # by the trace's id, the least recently used first

    @wraps(function)
    def remembering(trace: Trace) -> T:
        key = id(trace)
        entry = kept.pop(key, None)
        if entry is None:
            value = function(trace)
            entry = (weakref.ref(trace, lambda _: kept.pop(key, None)), value)
        kept[key] = entry
        events = 0
        for other, (reference, _) in reversed(list(kept.items())):
            held = reference()
            events += 0 if held is None else held.events.height
            if events > MOST_EVENTS and other != key:
                kept.pop(other, None)
        return entry[1]

    return remembering
