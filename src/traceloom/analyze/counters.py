"""Which hardware counters were recorded, over time and per kernel, and whose are they?"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import polars as pl

from traceloom.analyze.vocabulary import vocabulary
from traceloom.array_types import Ints
from traceloom.model import Trace
from traceloom.model import category as cat
from traceloom.model.arrays import column
from traceloom.model.frames import as_declared, schema
from traceloom.model.result import Result
from traceloom.read.again import readable, whole

KERNEL_LAUNCH = r"LaunchKernel|LaunchCooperativeKernel|ModuleLaunch"
SERIES_SCHEMA = schema("source counter samples first_ns last_ns min mean max", {"source": pl.String})
RANGE_SCHEMA = schema("range kernel launch op counter value")
OP_SCHEMA = schema("op counter ranges value")


@dataclass(frozen=True)
class Counters(Result):
    """Recorded counters. Definitions: docs/concepts/counters.md.

    Attributes:
        series: Counters sampled over time (`hardware_counters` and others): source (the process they stand under),
            counter, samples, first_ns, last_ns, min, mean (of the samples), max.
        ranges: Counters of single kernels, as CUPTI's range profiler writes them (`cuda_profiler_range`): range (its
            number, in order), kernel (null where the writer could not name it), launch (row of the call that launched
            it), op (the operator around the launch), counter, value. The times of such ranges are equal parts of the
            recording, no measurement, so the k-th range belongs to the k-th launch.
        operators: Sums over the ranges of each operator: op, counter, ranges, value.
        unpaired: Why ranges have no launch: `counts-differ` (as many ranges as kernel launches are needed); None where
            they have, or where there are no ranges.
        range_count: Ranges in the trace.
        launch_count: Calls in the trace that launch one kernel.
        absent: Why the values of ranges are unknown: `file-gone`; None where they are known.
    """

    series: pl.DataFrame
    ranges: pl.DataFrame
    operators: pl.DataFrame
    unpaired: str | None
    range_count: int
    launch_count: int
    absent: str | None


def counters(trace: Trace) -> Counters:
    """Gather counters, and pair those of kernels with their launches."""
    rows = np.flatnonzero(column(trace, "category") == cat.CATEGORIES.index(cat.COUNTER_RANGE))
    if not trace.counters.height and not rows.size:
        series, ranges, by_op = (columns.to_frame() for columns in (SERIES_SCHEMA, RANGE_SCHEMA, OP_SCHEMA))
        return Counters(series, ranges, by_op, unpaired=None, range_count=0, launch_count=0, absent=None)
    value = pl.col("value")
    series = (
        trace.counters.drop_nulls("value")
        .with_columns(counter=pl.concat_str(["name", "key"], separator=" ").str.strip_chars())
        .group_by("counter", source="process", maintain_order=True)
        .agg(
            pl.len().alias("samples"),
            pl.col("time_ns").min().alias("first_ns"),
            pl.col("time_ns").max().alias("last_ns"),
            value.min().alias("min"),
            value.mean().alias("mean"),
            value.max().alias("max"),
        )
        .sort("source", "counter", nulls_last=True)
        .pipe(as_declared, SERIES_SCHEMA)
    )
    launches = kernel_launches(trace) if rows.size else rows
    paired = rows.size == launches.size
    readable_ = readable(trace)
    records = []
    if readable_ and rows.size:
        names, ops = trace.events["name"], trace.events["op"]
        nobody: list[Any] = [None] * rows.size
        kernels = [None if name == "__missing__" else name for name in names.gather(rows).to_list()]
        launch_of = launches.tolist() if paired else nobody
        op_of = names.gather(ops.gather(launches)).to_list() if paired else nobody
        records = [  # one per range and counter
            (number, kernel, launch, op, key, float(amount))
            for number, (args, kernel, launch, op) in enumerate(
                zip(whole(trace, rows), kernels, launch_of, op_of, strict=True)
            )
            for key, amount in args.items()
            if isinstance(amount, (int, float)) and not isinstance(amount, bool) and np.isfinite(amount)
        ]
    ranges = pl.DataFrame(records, schema=RANGE_SCHEMA, orient="row")
    by_op = (
        ranges.filter(pl.col("launch").is_not_null())
        .group_by("op", "counter", maintain_order=True)
        .agg(pl.len().alias("ranges"), value.sum())
        .sort("value", "op", "counter", descending=[True, False, False], nulls_last=True)
        .pipe(as_declared, OP_SCHEMA)
    )
    return Counters(
        series,
        ranges,
        by_op,
        unpaired=None if paired else "counts-differ",
        range_count=int(rows.size),
        launch_count=int(launches.size),
        absent="file-gone" if rows.size and not readable_ else None,
    )


def kernel_launches(trace: Trace) -> Ints:
    """Rows of the calls that launch one kernel, by time; a driver call inside a runtime call is the same launch."""
    is_call = np.isin(column(trace, "category"), [cat.CATEGORIES.index(name) for name in cat.LAUNCHES])
    rows = np.flatnonzero(is_call & vocabulary(trace).events(KERNEL_LAUNCH))
    inside = np.isin(column(trace, "parent", -1)[rows], rows)
    launches: Ints = rows[~inside]
    return launches
