"""Step times, cuts at the bounds of steps, and spreads (mean, min and max) per step."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import polars as pl
from msgspec import Struct

from traceloom.analyze.intervals import Spans, find_overlaps
from traceloom.analyze.kernel_rules import select_gpu_work_with_steps
from traceloom.trace.array_types import Bools, Ints
from traceloom.trace.arrays import gather_rows
from traceloom.trace.batch import (
    TRACE_COLUMN,
    cache_per_trace,
    concatenate_by_trace,
    divide_by_trace_total,
    run_in_batches,
    split_by_trace,
)
from traceloom.trace.frames import Result, build_schema, cast_to_schema
from traceloom.trace.trace import REQUEST, Trace

SCHEMA = build_schema(
    "step name start_ns duration_ns device_period_ns complete lag_ns launch_count"
)
MIN_HOST_LEAD = 0.05
"""Share of a step by which the GPU must lag behind the host, and its periods exceed the host's
steps, before the periods are the steps.
"""


@dataclass(frozen=True)
class StepTimes(Result):
    """The steps of a trace and their spread. The statistics are over complete steps; None without
    any.

    Attributes:
        steps: step, name, start_ns, duration_ns (on the host, to the start of the next step),
            device_period_ns (from the end of the last GPU work that was launched in the step before
            to the end of that launched in this one; of the first step from the start of its first
            GPU work; null without GPU work), complete, lag_ns (from the end of the step to the end
            of the last GPU work launched in it, 0 where that ended before; null without GPU work),
            launch_count (calls in the step that submitted GPU work).
        clock: `device` where the host runs ahead of the GPU, so that a step takes its period on the
            device; else `host`.
        count: Number of complete steps.
        median_ns: Median duration, rounded down.
        min_ns: Shortest.
        max_ns: Longest.
        spread_fraction: (third quartile - first quartile) / median.
        evidence: The source of the steps: profiler-step, mark, annotation, request, or none.
    """

    steps: pl.DataFrame
    clock: str
    count: int
    median_ns: int | None
    min_ns: int | None
    max_ns: int | None
    spread_fraction: float | None
    evidence: str

    @property
    def durations(self) -> pl.Series:
        """How long each step takes, by the clock that sets the pace."""
        return self.steps["device_period_ns" if self.clock == DEVICE else "duration_ns"]

    def select(self, first: int, last: int) -> StepTimes:
        """Returns the steps of these numbers, both included, and their spread."""
        steps = self.steps.filter(pl.col("step").is_between(first, last))
        return _compute_spread(steps, self.clock, self.evidence)


HOST, DEVICE = "host", "device"


def has_request_steps(trace: Trace) -> bool:
    """Whether the steps are requests, with waits between them."""
    return bool(trace.steps.height) and str(trace.steps["evidence"][0]) == REQUEST


@dataclass(frozen=True)
class Tiles:
    """The whole trace, cut at the bounds of its steps: disjoint, sorted, without gaps.

    Attributes:
        row: Row of `trace.steps` for each tile; -1 outside all steps.
        spans: Start and end of each tile. (Neighbours touch, unlike in other Spans; `find_overlaps`
            allows that.)
    """

    row: Ints
    spans: Spans


def build_tiles(trace: Trace) -> Tiles:
    """Cuts the time of the trace, first start to last end, at its steps.

    Steps that overlap are cut at the next start.
    """
    return _build_tiles(trace, trace.steps["start_ns"].to_numpy(), trace.steps["end_ns"].to_numpy())


def _build_tiles(trace: Trace, start: Ints, end: Ints) -> Tiles:
    """Cuts the time of the trace at the starts and ends of the rows of its steps."""
    order = np.argsort(start, kind="stable")
    start, end = start[order], end[order]
    end = np.maximum(np.minimum(end, np.append(start[1:], np.iinfo(np.int64).max)), start)
    low, high = trace.start_ns, trace.end_ns
    low, high = min([low, *start[:1].tolist()]), max([high, *end.tolist()[-1:]])
    outside_start, outside_end = np.append(low, end), np.append(start, high)
    row = np.concatenate((order, np.full(outside_start.size, -1)))
    tile_start = np.concatenate((start, outside_start)).astype(np.int64)
    tile_end = np.concatenate((end, outside_end)).astype(np.int64)
    nonempty = np.flatnonzero(tile_end > tile_start)
    if not nonempty.size:  # a trace without any length is one moment, outside all steps
        nonempty = np.array([row.size - 1])
    nonempty = nonempty[np.argsort(tile_start[nonempty], kind="stable")]
    return Tiles(row[nonempty], Spans(tile_start[nonempty], tile_end[nonempty]))


def find_step_spans(trace: Trace) -> pl.DataFrame:
    """Returns the steps as they are paced: where the host runs ahead, start_ns and end_ns are those
    of the device's periods.
    """
    if step_times(trace).clock == HOST:
        return trace.steps
    return (
        _collect_device_steps([trace])
        .with_columns(start_ns="low_ns", end_ns="high_ns")
        .select(trace.steps.columns)
    )


def build_device_tiles(trace: Trace) -> Tiles:
    """Cuts the time of the trace where its devices go from step to step: where the host runs ahead
    at the end of the last GPU work of each step, else at the bounds of the host's steps.
    """
    steps = find_step_spans(trace)
    return _build_tiles(trace, steps["start_ns"].to_numpy(), steps["end_ns"].to_numpy())


@cache_per_trace
def step_times(trace: Trace) -> StepTimes:
    """Returns durations of the steps, their spread, and the lag of the GPU behind each."""
    return _compute_step_times(trace)


@run_in_batches
def _compute_step_times(traces: Sequence[Trace]) -> Iterable[StepTimes]:
    host_ns = pl.col("end_ns") - pl.col("start_ns")
    period_ns = pl.col("high_ns") - pl.col("low_ns")
    steps = _collect_device_steps(traces).with_columns(
        duration_ns=host_ns,
        device_period_ns=pl.when(pl.col("launch_count") > 0).then(period_ns),
        lag_ns=(pl.col("last_end_ns") - pl.col("end_ns")).clip(lower_bound=0),
    )
    times = []
    for trace, rows in zip(traces, split_by_trace(steps, traces), strict=True):
        trace_steps = rows.pipe(cast_to_schema, SCHEMA)
        evidence = str(trace.steps["evidence"][0]) if trace.steps.height else "none"
        clock = HOST if evidence == REQUEST else _choose_clock(trace_steps)
        times.append(_compute_spread(trace_steps, clock, evidence))
    return times


def _collect_device_steps(traces: Sequence[Trace]) -> pl.DataFrame:
    """Returns the steps of all traces with the GPU work that they launched, whenever it ran:
    launch_count, last_end_ns, and the time from low_ns to high_ns in which devices were at it.

    A device is at a step from the end of the work of the step before; where the host paused between
    the two, at the earliest from the start of the step.
    """
    launched = (
        select_gpu_work_with_steps(traces)[[TRACE_COLUMN, "launch", "start_ns", "end_ns", "step"]]
        .drop_nulls(["launch", "step"])
        .group_by(TRACE_COLUMN, "step")
        .agg(
            first_start_ns=pl.col("start_ns").min(),
            last_end_ns=pl.col("end_ns").max(),
            launch_count=pl.col("launch").n_unique().cast(pl.Int64),
        )
    )
    steps = concatenate_by_trace(trace.steps for trace in traces).join(
        launched, on=[TRACE_COLUMN, "step"], how="left", maintain_order="left"
    )
    ended_ns = pl.col("last_end_ns").forward_fill().shift(1).over(TRACE_COLUMN)
    began_ns = pl.col("first_start_ns").backward_fill().over(TRACE_COLUMN)
    continues = pl.col("end_ns").shift(1).over(TRACE_COLUMN) == pl.col("start_ns")
    low_ns = pl.when(continues).then(ended_ns).otherwise(pl.max_horizontal(ended_ns, "start_ns"))
    return steps.with_columns(
        pl.col("launch_count").fill_null(0),
        low_ns=pl.when(ended_ns.is_null()).then(began_ns).otherwise(low_ns),
    ).with_columns(high_ns=pl.coalesce("last_end_ns", "low_ns"))


def _compute_spread(steps: pl.DataFrame, clock: str, evidence: str) -> StepTimes:
    whole = steps.filter("complete")
    durations = whole["device_period_ns" if clock == DEVICE else "duration_ns"].to_numpy()
    if not durations.size:
        return StepTimes(steps, clock, 0, None, None, None, None, evidence)
    first, median, third = np.percentile(durations, (25, 50, 75))
    return StepTimes(
        steps,
        clock,
        count=int(durations.size),
        median_ns=int(median),
        min_ns=int(durations.min()),
        max_ns=int(durations.max()),
        spread_fraction=float((third - first) / median) if median else None,
        evidence=evidence,
    )


def _choose_clock(steps: pl.DataFrame) -> str:
    """Returns whose steps set the pace: the device's where the host runs ahead of it."""
    whole = steps.filter(pl.col("complete") | ~pl.col("complete").any())
    lengths = whole[["duration_ns", "device_period_ns", "lag_ns"]]
    if not lengths.height or lengths["device_period_ns"].null_count():
        return HOST
    if steps.select(pl.col("device_period_ns").min() < 0).item():
        return HOST  # work of a later step ended first: there is no order of steps on the device
    host_ns, device_ns, lag_ns = lengths.median().row(0)
    is_ahead = host_ns > 0 and lag_ns > MIN_HOST_LEAD * host_ns
    return DEVICE if is_ahead and device_ns > (1 + MIN_HOST_LEAD) * host_ns else HOST


NO_STEP = np.int64(-(2**31))


class CutStretches(Struct, frozen=True):
    """Intervals cut into pieces; `source` is the index of the interval each piece comes from."""

    source: Ints
    start_ns: Ints
    end_ns: Ints


def cut(start_ns: Ints, end_ns: Ints, at_ns: Ints) -> CutStretches:
    """Cuts every interval [start, end) at the sorted instants `at_ns` that lie strictly inside
    it.
    """
    first = np.searchsorted(at_ns, start_ns, side="right")
    cut_count = np.maximum(np.searchsorted(at_ns, end_ns, side="left") - first, 0)
    if not cut_count.any():
        return CutStretches(np.arange(start_ns.size, like=start_ns), start_ns, end_ns)
    count = cut_count + 1
    source = np.repeat(np.arange(start_ns.size, like=start_ns), count)
    first_piece = np.cumsum(count) - count
    piece_number = np.arange(source.size, like=source) - first_piece[source]
    cuts = first[source] + piece_number
    low, high = start_ns[source], end_ns[source]
    low = np.where(piece_number > 0, gather_rows(at_ns, np.clip(cuts - 1, 0, at_ns.size - 1)), low)
    high = np.where(
        piece_number < cut_count[source], gather_rows(at_ns, np.clip(cuts, 0, at_ns.size - 1)), high
    )
    return CutStretches(source, low, high)


def split_at_steps(
    trace: Trace, start_ns: Ints, end_ns: Ints, *, by_device: bool = False
) -> tuple[CutStretches, Ints]:
    """Cuts every interval at the bounds of steps, on the host or as devices go through them;
    returns the pieces, and the step of each (NO_STEP outside all steps).

    The intervals lie in the trace's window and are not empty; whole ones come first, in their
    order.
    """
    plan = build_device_tiles(trace) if by_device else build_tiles(trace)
    steps = np.append(trace.steps["step"].cast(pl.Int64).to_numpy(), NO_STEP)[plan.row]
    if not steps.size:
        return CutStretches(np.zeros(0, dtype=np.int64), start_ns[:0], end_ns[:0]), steps
    first = np.searchsorted(plan.spans.start, start_ns, side="right") - 1
    crossing = end_ns > gather_rows(plan.spans.end, first)
    rows = np.flatnonzero(crossing)
    if not rows.size:
        return CutStretches(np.arange(start_ns.size, like=start_ns), start_ns, end_ns), gather_rows(
            steps, first
        )
    uncut = np.flatnonzero(~crossing)
    shared = find_overlaps(start_ns[rows], end_ns[rows], plan.spans)
    stretches = CutStretches(
        np.concatenate([uncut, rows[shared.left]]),
        np.concatenate([start_ns[uncut], shared.start]),
        np.concatenate([end_ns[uncut], shared.end]),
    )
    return stretches, np.concatenate(
        [gather_rows(steps, first[uncut]), gather_rows(steps, shared.right)]
    )


def contains(spans: Spans, time_ns: Ints) -> Bools:
    if not spans.start.size:
        return np.zeros(time_ns.size, dtype=np.bool_)
    index = np.searchsorted(spans.start, time_ns, side="right") - 1
    return (index >= 0) & (time_ns < gather_rows(spans.end, np.maximum(index, 0)))


@cache_per_trace
def select_whole_steps(trace: Trace) -> pl.DataFrame:
    """Returns the completely recorded steps, which a spread is computed over: step (Int32), how
    `many` there are.
    """
    return trace.steps.filter("complete").select("step", many=pl.len())


def list_told_steps(trace: Trace) -> pl.Series:
    """Returns the numbers of the steps that answers are about: the whole ones, or all, where none
    is whole.
    """
    return trace.steps.filter(pl.col("complete") | ~pl.col("complete").any())["step"]


def summarize_durations(ns: pl.Expr) -> list[pl.Expr]:
    """Returns number, sum, mean (rounded down), min and max of the durations in a group."""
    values = {"total": ns.sum(), "mean": ns.sum() // pl.len(), "min": ns.min(), "max": ns.max()}
    return [pl.len().alias("count"), *(value.alias(f"{name}_ns") for name, value in values.items())]


def build_spread_schema(*values: str) -> pl.Schema:
    """Returns the columns that `summarize_per_step` adds for these values, without the keys."""
    return build_schema(
        *(f"{statistic}_{value}" for value in values for statistic in ("mean", "min", "max")),
        "step_count",
    )


def summarize_per_step(
    frame: pl.DataFrame, keys: Sequence[str], values: Sequence[str], steps: pl.DataFrame
) -> pl.DataFrame:
    """Returns mean, min and max over the steps of the sums per key and step.

    Args:
        frame: Rows with the `keys`, a column `step` (null outside all steps; such rows are left
            out) and `values`.
        keys: The columns that identify a row of the result.
        values: Integer columns to add up, each named `something_ns`, `something_bytes` or
            `something_count`.
        steps: The result of `select_whole_steps`. A step in which a key does not occur counts as 0.
            With the steps of several traces the frame has the column `trace`, too, which is one of
            the keys.

    Returns:
        The keys, then for every value `mean_<value>` (Float64), `min_<value>` and `max_<value>`
        (Int64), and `step_count` (steps in which the key occurs). Without whole steps: no rows.
    """
    if not steps.height:
        return pl.DataFrame(
            schema={**{key: frame.schema[key] for key in keys}, **build_spread_schema(*values)}
        )
    in_steps = frame.join(steps, on=steps.columns[:-1], how="inner", maintain_order="left")
    count_column = pl.col("many").first()
    sums = in_steps.group_by(*keys, "step", maintain_order=True).agg(
        pl.col(values).sum().cast(pl.Int64), count_column
    )
    everywhere = pl.len() == count_column
    spread = sums.group_by(*keys, maintain_order=True).agg(
        *(
            statistic
            for v in values
            for statistic in (
                pl.col(v).sum().alias(f"mean_{v}"),
                pl.when(everywhere)
                .then(pl.col(v).min())
                .otherwise(0)
                .cast(pl.Int64)
                .alias(f"min_{v}"),
                pl.col(v).max().alias(f"max_{v}"),
            )
        ),
        count_column,
        step_count=pl.len().cast(pl.Int64),
    )
    step_count: int = steps["many"][0]
    totals = [pl.col(f"mean_{v}") for v in values]
    means = [
        divide_by_trace_total(total, pl.col("many")) if TRACE_COLUMN in keys else total / step_count
        for total in totals
    ]
    spread = spread.with_columns(means)
    spread.drop_in_place("many")
    return spread
