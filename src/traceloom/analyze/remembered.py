"""Remembering what several analyses of one trace need, as long as the trace lives."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import wraps
from typing import TypeVar

from traceloom.model import Trace

T = TypeVar("T")


def per_trace(function: Callable[[Trace], T]) -> Callable[[Trace], T]:
    """Remember the function's result for the last trace, by identity: analyses run one trace after the other.

    One entry only, so that a run of many ranks does not hold all their intermediate arrays at once. It is forgotten
    together with the trace. The result is shared: nobody may change it.
    """
    kept: tuple[weakref.ref[Trace], T] | None = None

    def forget(gone: weakref.ref[Trace]) -> None:
        nonlocal kept
        if kept is not None and kept[0] is gone:
            kept = None

    @wraps(function)
    def remembering(trace: Trace) -> T:
        nonlocal kept
        last = kept
        if last is not None and last[0]() is trace:
            return last[1]
        value = function(trace)
        kept = (weakref.ref(trace, forget), value)
        return value

    return remembering
