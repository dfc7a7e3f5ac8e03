"""Batch: frames of several ranks with `part` first, `memo`; a trace cut to some steps.

A query of a small frame takes nearly as long for one rank as for eight. An analysis that is a function of several
traces (`of_each`) works out at once what is to be looked at `together`; who asks about one trace sees no difference.

The column `trace` says which of the traces a row is of. What rows of one trace are grouped, joined and sorted by, those
of several are grouped, joined and sorted by together with it.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from contextlib import contextmanager
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import wraps
from itertools import pairwise
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar

import numpy as np
import polars as pl
from msgspec import Struct
from numpy.typing import NDArray

from traceloom.errors import UsageError
from traceloom.trace.arrays import nest
from traceloom.trace.frames import cast_to_schema
from traceloom.trace.session import Session
from traceloom.trace.trace import Event, Trace

_REFERENCES = ("parent", "op", "launch")


def of_steps(session: Session, steps: tuple[int, int]) -> Session:
    """The session with only the work of the steps numbered `steps[0]` to `steps[1]`, both included.

    Host events belong to the step they start in, GPU work to the step that launched it, so that launches keep their
    kernels. A rank that has none of these steps has no events left.

    Raises:
        UsageError: slug `no-such-step`, where no rank has any of these steps.
    """
    traces = tuple(cut(trace, steps) for trace in session.traces)
    if not any(trace.steps.height for trace in traces):
        numbers = sorted({number for trace in session.traces for number in trace.steps["step"].to_list()})
        have = f"it has {numbers[0]} to {numbers[-1]}" if numbers else "it has no steps"
        requested = f"step {steps[0]} is" if steps[0] == steps[1] else f"steps {steps[0]} to {steps[1]} are"
        raise UsageError(f"{requested} not in this run; {have}", slug="no-such-step")
    return replace(session, traces=traces)


def cut(trace: Trace, steps: tuple[int, int]) -> Trace:
    """One rank's part of `of_steps`."""
    chosen = pl.col("step").is_between(*steps)
    kept = trace.events.filter(chosen)
    row = np.full(trace.events.height, -1, dtype=np.int64)
    row[kept["event"].to_numpy()] = np.arange(kept.height)
    events = renumbered(kept.with_row_index("new").drop("event").rename({"new": "event"}), row, _REFERENCES)
    frames: dict[str, Any] = {
        name: renumbered(frame, row, ("event",)).drop_nulls("event")
        for name, frame in trace.frames().items()
        if name != "events" and "event" in frame.columns
    }
    frames["flows"] = renumbered(trace.flows, row, ("source", "target")).drop_nulls(["source", "target"])
    kept_steps = trace.steps.filter(chosen)
    start, end = kept_steps["start_ns"].min(), kept_steps["end_ns"].max()
    inside = pl.col("time_ns").is_between(start, end, closed="left") if kept_steps.height else pl.lit(False)
    for name in ("allocations", "counters", "marks"):
        frames[name] = getattr(trace, name).filter(inside)
    frames["allocations"] = renumbered(frames["allocations"], row, ("op",))
    # Parents and depths anew: an event whose parents began before the first step is a root now.
    nesting_lanes = trace.lanes.filter(pl.col("kind").is_in(["host", "other"]))["lane"]
    nesting = nest(
        events["lane"].to_numpy().astype(np.int64),
        events["start_ns"].to_numpy(),
        events["nested_end_ns"].to_numpy(),
        events["lane"].is_in(nesting_lanes.implode()).to_numpy(),
    )
    events = events.select(trace.events.columns).with_columns(
        pl.Series("parent", nesting.parent).replace(-1, None).cast(Event),
        pl.Series("depth", nesting.depth).cast(pl.UInt16),
    )
    # The lanes with the counts and busy times of the events that are left
    roots = events.select("lane", "start_ns", end_ns="nested_end_ns").sort("lane", "start_ns", maintain_order=True)
    reached = pl.col("end_ns").cum_max().shift(1).over("lane").fill_null(pl.col("start_ns"))
    counted = roots.group_by("lane").agg(pl.len().cast(pl.UInt32).alias("events"))
    busy = (
        roots.with_columns(reached.alias("reached"))
        .with_columns(added=(pl.col("end_ns") - pl.max_horizontal("start_ns", "reached")).clip(lower_bound=0))
        .group_by("lane")
        .agg(busy_ns=pl.col("added").sum())
    )
    return replace(
        trace,
        events=events,
        steps=kept_steps,
        lanes=trace.lanes.drop("events", "busy_ns")
        .join(counted, on="lane", how="left", maintain_order="left")
        .join(busy, on="lane", how="left", maintain_order="left")
        .with_columns(pl.col("events").fill_null(0), pl.col("busy_ns").fill_null(0))
        .select(trace.lanes.columns),
        **frames,
    )


def renumbered(frame: pl.DataFrame, row: NDArray[np.int64], columns: tuple[str, ...]) -> pl.DataFrame:
    """The frame with its references to events pointing to their new rows; null where the event is gone."""
    new = pl.Series(row).replace(-1, None).cast(Event)
    return frame.with_columns(new.gather(frame[column]).alias(column) for column in columns)


S = TypeVar("S")
T = TypeVar("T")
P = ParamSpec("P")
MOST_BYTES = 48 << 20
"""Of one function's results: where those of all ranks fit, whoever asks rank after rank again (the findings after the
sections) finds them; where they do not, only those of the last rank and what is looked at together with it are kept, so
that a run needs the memory of these."""
MAX_BATCH_EVENTS = 250_000
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
            room = MAX_BATCH_EVENTS - trace.events.height
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


TRACE = "trace"


def stacked(frames: Iterable[pl.DataFrame]) -> pl.DataFrame:
    """The rows of each trace, one trace after the other, first the column `trace` (UInt32)."""
    parts = []
    for number, frame in enumerate(frames):
        numbers = pl.Series(TRACE, [number], dtype=pl.UInt32).new_from_index(0, frame.height)
        parts.append(frame.clone().insert_column(0, numbers))
    return pl.concat(parts)


def unstacked(
    rows: pl.DataFrame, traces: Sized, columns: Mapping[str, pl.DataType | type[pl.DataType]] | None = None
) -> list[pl.DataFrame]:
    """The rows of each trace without the column `trace`, by which they are sorted.

    Args:
        rows: Of `stacked`, or made from such.
        traces: Whose rows they are.
        columns: Which columns of which types (see `as_declared`); all as they are where none are named.
    """
    bounds = np.searchsorted(rows[TRACE].to_numpy(), np.arange(len(traces) + 1)).tolist()
    others = [name for name in rows.columns if name != TRACE]
    every = rows[others] if columns is None else rows.pipe(cast_to_schema, columns)
    return [every[low:high] for low, high in pairwise(bounds)]


def gathered(columns: Sequence[pl.Series], rows: pl.DataFrame, by: str) -> pl.Series:
    """From the column of each trace the value at the place `by` of each row; null where that is null."""
    parts = unstacked(rows[[TRACE, by]], columns)
    return pl.concat([column[part[by]] for column, part in zip(columns, parts, strict=True)])


def of_events(traces: Sequence[Trace], rows: pl.DataFrame, by: str, name: str) -> pl.Series:
    """A column of the traces' events, for the event in the column `by` of each row; null where that is null."""
    return gathered([trace.events[name] for trace in traces], rows, by)


def divide_by_part(value: pl.Expr, by: pl.Expr) -> pl.Expr:
    """A column divided by what is one number in each trace, with the digits of the rows of that trace alone.

    Polars multiplies a column with the reciprocal of a number, but divides a single row by it.
    """
    return pl.when(pl.len().over(TRACE) == 1).then(value / by).otherwise(value * (1.0 / by))
