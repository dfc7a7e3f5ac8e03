"""Remembering what several analyses of a trace need, as long as the trace lives.

A query of a small frame takes nearly as long for one rank as for eight. An analysis that is a function of several
traces (`of_each`) works out at once what is to be looked at `together`; who asks about one trace sees no difference.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from functools import partial, wraps
from typing import Any, Generic, TypeVar

import numpy as np
import polars as pl
from msgspec import Struct

from traceloom.model import Trace

S = TypeVar("S")
T = TypeVar("T")
MOST_BYTES = 48 << 20
"""Of one function's results: where those of all ranks fit, whoever asks rank after rank again (the findings after the
sections) finds them; where they do not, only those of the last rank and what is looked at together with it are kept, so
that a run needs the memory of these."""
MOST_EVENTS = 250_000
"""Of traces that are looked at together; a larger one is looked at alone."""


@dataclass(slots=True)
class _Result(Generic[T]):
    """The result of one trace, and its size, which is known when the next one is made: some grow by use."""

    trace: weakref.ref[Trace]
    value: T
    size: int = 0


_groups: dict[int, list[weakref.ref[Trace]]] = {}  # by the trace's id: what is looked at together with it, and itself


def together(traces: Iterable[Trace]) -> None:
    """Look from now on at those of the traces together that follow each other, up to `MOST_EVENTS` events at once."""
    group: list[weakref.ref[Trace]] = []
    room = 0
    for trace in traces:
        room -= trace.events.height
        if room < 0:
            group, room = [], MOST_EVENTS - trace.events.height
        group.append(weakref.ref(trace, partial(_forget, _groups, id(trace))))
        _groups[id(trace)] = group


def _forget(kept: dict[int, Any], key: int, _gone: weakref.ref[Trace]) -> None:
    kept.pop(key, None)


def _group_of(trace: Trace) -> list[Trace]:
    """What is looked at together with a trace, and itself."""
    return [each for member in _groups.get(id(trace), ()) if (each := member()) is not None] or [trace]


def of_each(function: Callable[[Sequence[Trace]], Iterable[T]]) -> Callable[[Trace], T]:
    """The function of one trace whose results for several `function` gives at once, in their order.

    Those of the traces that are looked at together with the last one are remembered, for as long as these live.
    """
    kept: dict[int, _Result[T]] = {}

    @wraps(function)
    def of_one(trace: Trace) -> T:
        if id(trace) in kept:
            return kept[id(trace)].value
        traces = _group_of(trace)
        values = list(function(traces))
        if len(traces) > 1:
            kept.clear()
            for each, value in zip(traces, values, strict=True):
                kept[id(each)] = _Result(weakref.ref(each, partial(_forget, kept, id(each))), value)
        return values[[each is trace for each in traces].index(True)]

    return of_one


def per_trace(function: Callable[[Trace], T]) -> Callable[[Trace], T]:
    """Remember the function's results by identity: of the last trace, and of those before it up to `MOST_BYTES`.

    A result is forgotten together with its trace. It is shared: nobody may change it.
    """
    kept: dict[int, _Result[T]] = {}  # by the trace's id, the oldest first

    @wraps(function)
    def remembering(trace: Trace) -> T:
        key = id(trace)
        if key in kept:
            return kept[key].value
        value = function(trace)
        if results := list(kept.values()):
            results[-1].size = size_of(results[-1].value)
            if sum(result.size for result in results) > MOST_BYTES:
                for earlier in kept.keys() - map(id, _group_of(trace)):
                    kept.pop(earlier, None)
        kept[key] = _Result(weakref.ref(trace, partial(_forget, kept, key)), value)
        return value

    return remembering


def made_from(function: Callable[[Trace, S], T]) -> Callable[[Trace, S], T]:
    """Remember of each trace the last result, for as long as it is made from the same second argument, by identity."""

    @per_trace
    def kept(_trace: Trace) -> list[tuple[S, T]]:
        return []

    @wraps(function)
    def remembering(trace: Trace, source: S) -> T:
        last = kept(trace)
        if not last or last[0][0] is not source:
            last[:] = [(source, function(trace, source))]
        return last[0][1]

    return remembering


def size_of(value: Any) -> int:
    """Bytes of the arrays and frames in a result; its texts and single numbers do not count."""
    if isinstance(value, np.ndarray):
        return value.nbytes
    if isinstance(value, (pl.DataFrame, pl.Series)):
        return int(value.estimated_size())
    if isinstance(value, Struct) or is_dataclass(value):
        names = value.__struct_fields__ if isinstance(value, Struct) else [field.name for field in fields(value)]
        return sum(size_of(getattr(value, name)) for name in names)
    if isinstance(value, Mapping):
        return sum(map(size_of, value.values()))
    if isinstance(value, Sequence) and not isinstance(value, str):
        return sum(map(size_of, value))
    return 0
