"""Cutting a trace to some steps, and running analyses for a batch of traces at once.

A query on a small frame takes nearly as long for one rank as for eight. An analysis written for
several traces (`run_in_batches`) therefore computes a whole batch at once (`enable_batching`);
callers that pass a single trace see no difference.

The column `trace` is the index of the trace that a row belongs to. Where rows of one trace are
grouped, joined or sorted by some columns, rows of several traces use `trace` as an additional key.
"""

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
from traceloom.trace.arrays import build_nesting
from traceloom.trace.frames import cast_to_schema
from traceloom.trace.session import Session
from traceloom.trace.trace import Event, Trace

_EVENT_REFERENCE_COLUMNS = ("parent", "op", "launch")


def cut_session_to_steps(session: Session, steps: tuple[int, int]) -> Session:
    """Returns the session with only the work of the steps numbered `steps[0]` to `steps[1]`, both
    included.

    Host events belong to the step they start in, GPU work to the step that launched it, so that
    launches keep their kernels. A rank without any of these steps has no events left.

    Raises:
        UsageError: slug `no-such-step`, where no rank has any of these steps.
    """
    traces = tuple(cut_trace_to_steps(trace, steps) for trace in session.traces)
    if not any(trace.steps.height for trace in traces):
        numbers = sorted(
            {number for trace in session.traces for number in trace.steps["step"].to_list()}
        )
        available = f"it has {numbers[0]} to {numbers[-1]}" if numbers else "it has no steps"
        requested = (
            f"step {steps[0]} is" if steps[0] == steps[1] else f"steps {steps[0]} to {steps[1]} are"
        )
        raise UsageError(f"{requested} not in this run; {available}", slug="no-such-step")
    return replace(session, traces=traces)


def cut_trace_to_steps(trace: Trace, steps: tuple[int, int]) -> Trace:
    """One rank's part of `cut_session_to_steps`."""
    is_chosen_step = pl.col("step").is_between(*steps)
    kept_events = trace.events.filter(is_chosen_step)
    new_row = np.full(trace.events.height, -1, dtype=np.int64)
    new_row[kept_events["event"].to_numpy()] = np.arange(kept_events.height)
    events = update_event_rows(
        kept_events.with_row_index("new").drop("event").rename({"new": "event"}),
        new_row,
        _EVENT_REFERENCE_COLUMNS,
    )
    frames: dict[str, Any] = {
        name: update_event_rows(frame, new_row, ("event",)).drop_nulls("event")
        for name, frame in trace.frames().items()
        if name != "events" and "event" in frame.columns
    }
    frames["flows"] = update_event_rows(trace.flows, new_row, ("source", "target")).drop_nulls(
        ["source", "target"]
    )
    retained_steps = trace.steps.filter(is_chosen_step)
    start, end = retained_steps["start_ns"].min(), retained_steps["end_ns"].max()
    is_in_window = (
        pl.col("time_ns").is_between(start, end, closed="left")
        if retained_steps.height
        else pl.lit(False)
    )
    for name in ("allocations", "counters", "marks"):
        frames[name] = getattr(trace, name).filter(is_in_window)
    frames["allocations"] = update_event_rows(frames["allocations"], new_row, ("op",))
    # Recompute parents and depths: an event whose parents began before the first step is a root.
    host_lanes = trace.lanes.filter(pl.col("kind").is_in(["host", "other"]))["lane"]
    nesting = build_nesting(
        events["lane"].to_numpy().astype(np.int64),
        events["start_ns"].to_numpy(),
        events["nested_end_ns"].to_numpy(),
        events["lane"].is_in(host_lanes.implode()).to_numpy(),
    )
    events = events.select(trace.events.columns).with_columns(
        pl.Series("parent", nesting.parent).replace(-1, None).cast(Event),
        pl.Series("depth", nesting.depth).cast(pl.UInt16),
    )
    # Recount the events and busy times of each lane.
    roots = events.select("lane", "start_ns", end_ns="nested_end_ns").sort(
        "lane", "start_ns", maintain_order=True
    )
    previous_end = pl.col("end_ns").cum_max().shift(1).over("lane").fill_null(pl.col("start_ns"))
    event_counts = roots.group_by("lane").agg(pl.len().cast(pl.UInt32).alias("events"))
    busy = (
        roots.with_columns(previous_end.alias("reached"))
        .with_columns(
            added=(pl.col("end_ns") - pl.max_horizontal("start_ns", "reached")).clip(lower_bound=0)
        )
        .group_by("lane")
        .agg(busy_ns=pl.col("added").sum())
    )
    return replace(
        trace,
        events=events,
        steps=retained_steps,
        lanes=trace.lanes.drop("events", "busy_ns")
        .join(event_counts, on="lane", how="left", maintain_order="left")
        .join(busy, on="lane", how="left", maintain_order="left")
        .with_columns(pl.col("events").fill_null(0), pl.col("busy_ns").fill_null(0))
        .select(trace.lanes.columns),
        **frames,
    )


def update_event_rows(
    frame: pl.DataFrame, new_row: NDArray[np.int64], columns: tuple[str, ...]
) -> pl.DataFrame:
    """Returns the frame with its references to events renumbered; null where the event is gone."""
    row_series = pl.Series(new_row).replace(-1, None).cast(Event)
    return frame.with_columns(row_series.gather(frame[column]).alias(column) for column in columns)


S = TypeVar("S")
T = TypeVar("T")
P = ParamSpec("P")
MAX_CACHED_BYTES = 48 << 20
"""Limit of one function's cached results. Where the results of all ranks fit, a second pass over
the ranks (the findings after the sections) finds them; otherwise only the results of the last rank
and its batch are kept, which bounds the memory of a run.
"""
MAX_BATCH_EVENTS = 250_000
"""Limit of events in a batch of traces; a larger trace is analyzed alone."""


@dataclass(slots=True)
class _CachedResult(Generic[T]):
    """The result of one trace and its size, which is measured when the next one is made since some
    results grow by use.
    """

    trace: weakref.ref[Trace]
    value: T
    size: int = 0


_TraceBatch = tuple[list[Trace], dict[Any, tuple[list[Trace], list[Any]]]]
# By id of a trace: its batch, and by function the batch it was last called with and its results.
_batches_by_trace_id: dict[int, _TraceBatch] = {}


@contextmanager
def enable_batching(traces: Iterable[Trace]) -> Iterator[None]:
    """While active, analyzes consecutive traces together, up to `MAX_BATCH_EVENTS` events per
    batch.
    """
    batches: list[list[Trace]] = []
    events_left = -1
    for trace in traces:
        events_left -= trace.events.height
        if events_left < 0:
            batches.append([])
            events_left = MAX_BATCH_EVENTS - trace.events.height
        batches[-1].append(trace)
    results: dict[Any, tuple[list[Trace], list[Any]]] = {}
    batch_by_trace_id = {
        id(trace): (group, results) for group in batches if len(group) > 1 for trace in group
    }
    _batches_by_trace_id.update(batch_by_trace_id)
    try:
        yield
    finally:
        for key in batch_by_trace_id:
            _batches_by_trace_id.pop(key, None)


def run_in_batches(
    function: Callable[Concatenate[Sequence[Trace], P], Iterable[T]],
) -> Callable[Concatenate[Trace, P], T]:
    """Decorates `function`, which returns one result per trace in order, as a function of one
    trace.

    The results of a batch (see `enable_batching`) are kept until the batching ends. If the user
    chose options (rules, peaks: an argument that is not None or empty), the trace is analyzed
    alone.
    """

    @wraps(function)
    def of_one(trace: Trace, /, *choices: P.args, **options: P.kwargs) -> T:
        if any(choice is not None and choice != () for choice in (*choices, *options.values())):
            return next(iter(function([trace], *choices, **options)))
        batch, results = _batches_by_trace_id.get(id(trace), ([trace], {}))
        cached_batch, values = results.get(function, (None, []))
        if cached_batch is not batch:
            values = list(function(batch, *choices, **options))
            results[function] = batch, values
        value: T = next(
            value for member, value in zip(batch, values, strict=True) if member is trace
        )
        return value

    return of_one


def cache_per_trace(
    function: Callable[Concatenate[Trace, P], T],
) -> Callable[Concatenate[Trace, P], T]:
    """Caches results by identity of the trace: that of the last trace, and earlier ones up to
    `MAX_CACHED_BYTES`.

    A result is dropped together with its trace. It is shared and must not be modified. With options
    that the user chose it is not cached.
    """
    cache: dict[int, _CachedResult[T]] = {}  # by id of the trace, the oldest first

    @wraps(function)
    def remembering(trace: Trace, /, *choices: P.args, **options: P.kwargs) -> T:
        if any(choice not in (None, ()) for choice in (*choices, *options.values())):
            return function(trace, *choices, **options)
        key = id(trace)
        if key in cache:
            return cache[key].value
        value = function(trace, *choices, **options)
        if results := list(cache.values()):
            results[-1].size = estimate_array_bytes(results[-1].value)
            if sum(result.size for result in results) > MAX_CACHED_BYTES:
                batch, _ = _batches_by_trace_id.get(key, ([], {}))
                for old_key in cache.keys() - map(id, batch):
                    cache.pop(old_key, None)
        cache[key] = _CachedResult(weakref.ref(trace, lambda _: cache.pop(key, None)), value)
        return value

    return remembering


def cache_last_result(function: Callable[[Trace, S], T]) -> Callable[[Trace, S], T]:
    """Caches the last result per trace, as long as the second argument is the same object."""

    @cache_per_trace
    def kept(_trace: Trace) -> list[tuple[S, T]]:
        return []

    @wraps(function)
    def remembering(trace: Trace, source: S) -> T:
        cached = kept(trace)
        if not cached or cached[0][0] is not source:
            cached[:] = [(source, function(trace, source))]
        return cached[0][1]

    return remembering


def estimate_array_bytes(value: Any) -> int:
    """Returns the bytes of the arrays and frames in a result, ignoring texts and single numbers."""
    if isinstance(value, np.ndarray):
        return value.nbytes
    if isinstance(value, (pl.DataFrame, pl.Series)):
        return int(value.estimated_size())
    if isinstance(value, Struct) or is_dataclass(value):
        names = (
            value.__struct_fields__
            if isinstance(value, Struct)
            else [field.name for field in fields(value)]
        )
        return sum(estimate_array_bytes(getattr(value, name)) for name in names)
    if isinstance(value, Mapping):
        return sum(map(estimate_array_bytes, value.values()))
    if isinstance(value, Sequence) and not isinstance(value, str):
        return sum(map(estimate_array_bytes, value))
    return 0


TRACE_COLUMN = "trace"


def concatenate_by_trace(frames: Iterable[pl.DataFrame]) -> pl.DataFrame:
    """Concatenates the frames of the traces in order, with the index of the trace as first column
    `trace` (UInt32).
    """
    parts = []
    for number, frame in enumerate(frames):
        numbers = pl.Series(TRACE_COLUMN, [number], dtype=pl.UInt32).new_from_index(0, frame.height)
        parts.append(frame.clone().insert_column(0, numbers))
    return pl.concat(parts)


def split_by_trace(
    rows: pl.DataFrame,
    traces: Sized,
    schema: Mapping[str, pl.DataType | type[pl.DataType]] | None = None,
) -> list[pl.DataFrame]:
    """Splits rows, which are sorted by the column `trace`, into one frame per trace without it.

    Args:
        rows: Rows from `concatenate_by_trace`, or derived from such.
        traces: The traces that the rows belong to.
        schema: Columns and types of the result (see `cast_to_schema`); None to keep all columns.
    """
    bounds = np.searchsorted(rows[TRACE_COLUMN].to_numpy(), np.arange(len(traces) + 1)).tolist()
    other_columns = [name for name in rows.columns if name != TRACE_COLUMN]
    all_rows = rows[other_columns] if schema is None else rows.pipe(cast_to_schema, schema)
    return [all_rows[low:high] for low, high in pairwise(bounds)]


def gather_by_trace(
    columns: Sequence[pl.Series], rows: pl.DataFrame, index_column: str
) -> pl.Series:
    """Returns, for each row, the value in its trace's column at the position `index_column`; null
    where that is null.
    """
    parts = split_by_trace(rows[[TRACE_COLUMN, index_column]], columns)
    return pl.concat(
        [column[part[index_column]] for column, part in zip(columns, parts, strict=True)]
    )


def gather_event_column(
    traces: Sequence[Trace], rows: pl.DataFrame, index_column: str, name: str
) -> pl.Series:
    """Returns an event column of the traces for the event in `index_column` of each row; null where
    that is null.
    """
    return gather_by_trace([trace.events[name] for trace in traces], rows, index_column)


def divide_by_trace_total(numerator: pl.Expr, denominator: pl.Expr) -> pl.Expr:
    """Divides a column by a per-trace constant, with exactly the digits that the rows of one trace
    alone would have.

    Polars multiplies a column with the reciprocal of a number, but divides a single row by it.
    """
    return (
        pl.when(pl.len().over(TRACE_COLUMN) == 1)
        .then(numerator / denominator)
        .otherwise(numerator * (1.0 / denominator))
    )
