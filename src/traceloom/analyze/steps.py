"""How long did each step take, and how far behind did the GPU run?"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import polars as pl

from traceloom.analyze.classify import stepped_work
from traceloom.analyze.intervals import Spans
from traceloom.analyze.remembered import of_each, per_trace
from traceloom.analyze.stacked import TRACE, stacked, unstacked
from traceloom.array_types import Ints
from traceloom.model import Trace
from traceloom.model.frames import as_declared, schema
from traceloom.model.result import Result
from traceloom.model.schema import REQUEST

SCHEMA = schema("step name start_ns duration_ns complete lag_ns launch_count")


@dataclass(frozen=True)
class StepTimes(Result):
    """The steps of a trace and their spread. The statistics are over complete steps; None without any.

    Attributes:
        steps: step, name, start_ns, duration_ns (to the start of the next step), complete, lag_ns (from the end of the
            step to the end of the last GPU work launched in it, 0 where that ended before; null without GPU work),
            launch_count (calls in the step that submitted GPU work).
        count: Number of complete steps.
        median_ns: Median duration, rounded down.
        min_ns: Shortest.
        max_ns: Longest.
        spread_fraction: (third quartile - first quartile) / median.
        evidence: What the steps were taken from: profiler-step, mark, annotation, request, or none.
    """

    steps: pl.DataFrame
    count: int
    median_ns: int | None
    min_ns: int | None
    max_ns: int | None
    spread_fraction: float | None
    evidence: str


def of_requests(trace: Trace) -> bool:
    """Whether the steps are requests, with waits between them."""
    return bool(trace.steps.height) and str(trace.steps["evidence"][0]) == REQUEST


@dataclass(frozen=True)
class Tiles:
    """The whole trace, cut at the bounds of its steps: disjoint, sorted, without holes.

    Attributes:
        row: Row of `trace.steps` for each tile; -1 outside all steps.
        spans: Start and end of each tile. (Neighbours touch, unlike in other Spans; `overlaps` allows that.)
    """

    row: Ints
    spans: Spans


def tiles(trace: Trace) -> Tiles:
    """Cut the time of the trace, first start to last end, at its steps.

    Steps that overlap are cut at the next start.
    """
    start = trace.steps["start_ns"].to_numpy()
    order = np.argsort(start, kind="stable")
    start, end = start[order], trace.steps["end_ns"].to_numpy()[order]
    end = np.maximum(np.minimum(end, np.append(start[1:], np.iinfo(np.int64).max)), start)
    low, high = trace.start_ns, trace.end_ns
    low, high = min([low, *start[:1].tolist()]), max([high, *end.tolist()[-1:]])
    outside_start, outside_end = np.append(low, end), np.append(start, high)
    row = np.concatenate((order, np.full(outside_start.size, -1)))
    tile_start = np.concatenate((start, outside_start)).astype(np.int64)
    tile_end = np.concatenate((end, outside_end)).astype(np.int64)
    keep = np.flatnonzero(tile_end > tile_start)
    if not keep.size:  # a trace without any length is one moment, outside all steps
        keep = np.array([row.size - 1])
    keep = keep[np.argsort(tile_start[keep], kind="stable")]
    return Tiles(row[keep], Spans(tile_start[keep], tile_end[keep]))


@per_trace
def step_times(trace: Trace) -> StepTimes:
    """Durations of the steps, their spread, and the lag of the GPU behind each."""
    return _of_each(trace)


@of_each
def _of_each(traces: Sequence[Trace]) -> Iterable[StepTimes]:
    launched = (  # in each step, whenever it ran
        stepped_work(traces)[[TRACE, "launch", "end_ns", "step"]]
        .drop_nulls(["launch", "step"])
        .group_by(TRACE, "step")
        .agg(last_end_ns=pl.col("end_ns").max(), launch_count=pl.col("launch").n_unique().cast(pl.Int64))
    )
    steps = (
        stacked(trace.steps for trace in traces)
        .join(launched, on=[TRACE, "step"], how="left", maintain_order="left")
        .with_columns(
            (pl.col("end_ns") - pl.col("start_ns")).alias("duration_ns"),
            (pl.col("last_end_ns") - pl.col("end_ns")).clip(lower_bound=0).alias("lag_ns"),
            pl.col("launch_count").fill_null(0),
        )
    )
    return map(_spread, traces, (own.pipe(as_declared, SCHEMA) for own in unstacked(steps, traces)))


def _spread(trace: Trace, steps: pl.DataFrame) -> StepTimes:
    durations = steps["duration_ns"].to_numpy()[steps["complete"].to_numpy()]
    evidence = str(trace.steps["evidence"][0]) if trace.steps.height else "none"
    if not durations.size:
        return StepTimes(steps, 0, None, None, None, None, evidence)
    first, median, third = np.percentile(durations, (25, 50, 75))
    return StepTimes(
        steps,
        count=int(durations.size),
        median_ns=int(median),
        min_ns=int(durations.min()),
        max_ns=int(durations.max()),
        spread_fraction=float((third - first) / median) if median else None,
        evidence=evidence,
    )
