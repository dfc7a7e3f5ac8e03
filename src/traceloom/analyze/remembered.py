"""Remembering what several analyses of a trace need, as long as the trace lives.

A query of a small frame takes nearly as long for one rank as for eight. An analysis that is a function of several
traces (`of_each`) works out at once what is to be looked at `together`; who asks about one trace sees no difference.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, is_dataclass
from functools import wraps
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar

import numpy as np
import polars as pl
from msgspec import Struct

from traceloom.model import Trace

S = TypeVar("S")
T = TypeVar("T")
P = ParamSpec("P")
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


_Group = tuple[list[Trace], dict[Any, tuple[list[Trace], list[Any]]]]
# By a trace's id: it and those beside it; by function the traces that it was last given, and its results.
_groups: dict[int, _Group] = {}


@contextmanager
def together(traces: Iterable[Trace]) -> Iterator[None]:
    """Meanwhile, look at those of the traces at once that follow each other, up to `MOST_EVENTS` events."""
    groups: list[list[Trace]] = []
    room = -1
    for trace in traces:
        room -= trace.events.height
        if room < 0:
            groups.append([])
            room = MOST_EVENTS - trace.events.height
        groups[-1].append(trace)
    results: dict[Any, tuple[list[Trace], list[Any]]] = {}
    members = {id(trace): (group, results) for group in groups if len(group) > 1 for trace in group}
    _groups.update(members)
    try:
        yield
    finally:
        for key in members:
            _groups.pop(key, None)


def of_each(function: Callable[Concatenate[Sequence[Trace], P], Iterable[T]]) -> Callable[Concatenate[Trace, P], T]:
    """The function of one trace whose results for several `function` gives at once, in their order.

    The results of the traces that are looked at `together` with the last one are remembered until that ends. With a
    choice of the user's (rules, peaks: an argument that is not None or empty), a trace is looked at alone.
    """

    @wraps(function)
    def of_one(trace: Trace, /, *choices: P.args, **more: P.kwargs) -> T:
        if any(choice is not None and choice != () for choice in (*choices, *more.values())):
            return next(iter(function([trace], *choices, **more)))
        group, results = _groups.get(id(trace), ([trace], {}))
        last, values = results.get(function, (None, []))
        if last is not group:
            values = list(function(group, *choices, **more))
            results[function] = group, values
        value: T = next(value for each, value in zip(group, values, strict=True) if each is trace)
        return value

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
                beside, _ = _groups.get(key, ([], {}))
                for earlier in kept.keys() - map(id, beside):
                    kept.pop(earlier, None)
        kept[key] = _Result(weakref.ref(trace, lambda _: kept.pop(key, None)), value)
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
