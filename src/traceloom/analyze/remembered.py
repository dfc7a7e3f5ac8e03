"""Remembering what several analyses of one trace need, as long as the trace lives."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import wraps
from typing import Generic, TypeVar

from traceloom.model import Trace

T = TypeVar("T")


class _Last(Generic[T]):
    """The result for the trace asked for last, forgotten together with the trace."""

    def __init__(self, function: Callable[[Trace], T]) -> None:
        self._function = function
        self._kept: tuple[weakref.ref[Trace], T] | None = None

    def __call__(self, trace: Trace) -> T:
        kept = self._kept
        if kept is not None and kept[0]() is trace:
            return kept[1]
        value = self._function(trace)
        self._kept = (weakref.ref(trace, self._forget), value)
        return value

    def _forget(self, gone: weakref.ref[Trace]) -> None:
        kept = self._kept
        if kept is not None and kept[0] is gone:
            self._kept = None


def per_trace(function: Callable[[Trace], T]) -> Callable[[Trace], T]:
    """Remember the function's result for the last trace, by identity: analyses run one trace after the other.

    One entry only, so that a run of many ranks does not hold all their intermediate arrays at once. The result is
    shared: nobody may change it.
    """
    last = _Last(function)

    @wraps(function)
    def remembering(trace: Trace) -> T:
        return last(trace)

    return remembering
