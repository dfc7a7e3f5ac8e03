"""How launches reach the GPU: launch delays, queues, calls that were held up, kernels shorter than their launch.

Definitions: docs/concepts/launches.md.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import polars as pl

from traceloom.analyze.per_step import per_step, spread_schema, whole_steps
from traceloom.analyze.queue_depth import QUEUES, HeldCalls, curve, held_up, of_devices, queues
from traceloom.analyze.remembered import of_each
from traceloom.analyze.stacked import TRACE, gathered, stacked, unstacked
from traceloom.analyze.submissions import UNKNOWN, Submissions, plain, submissions
from traceloom.analyze.vocabulary import vocabulary
from traceloom.analyze.waits import stream_waits
from traceloom.array_types import Bools
from traceloom.model import Trace
from traceloom.model.arrays import column, nullable, row_numbers
from traceloom.model.frames import as_declared, schema
from traceloom.model.result import Result

LONG_CALL_NS = 50_000
"""A launch call this long is listed: it usually takes 2 to 10 µs."""
LONG_DELAY_NS = 100_000
"""Work that starts this long after nothing held it back any more is listed."""

_TIMES = ("delay", "span", "latency")
_STATISTICS = [f"{name}_{how}_ns" for name in _TIMES for how in ("median", "p95", "max")]
TOTALS = schema("device work_count launch_count graph_work_count unknown_count early_count", *_STATISTICS, "late_count")
NAMES = schema("name launch_count", *_STATISTICS, "late_count")
CALLS = schema("name call_count total_ns median_ns p95_ns max_ns long_count long_ns")
OUTLIERS = schema(
    "kind duration_ns start_ns device stream step work work_name launch launch_name",
    {"kind": pl.Enum(["late work", "waiting work", "long call", "full queue"])},
)
_PER_STEP = ("launch_count", "work_count", "call_ns", "short_count", "held_ns")
STEPS = schema("device", spread_schema(*_PER_STEP))

_EDGES = 1_000 << np.arange(15)  # 1 µs, 2 µs, ... 16.4 ms
BINS = schema("low_ns high_ns kernel_count total_ns short_count")
"""Kernels with low_ns <= duration < high_ns (null: no upper bound), their summed time, and how many of them are shorter
than their launch call. The bounds double from 1 µs on; the counts add up to all kernels of the trace."""
SHORT = schema("name short_count kernel_count short_ns call_ns kernel_ns")
"""Kernels by name: how many are shorter than their launch call, of how many that were launched one by one; time of the
short ones, time of their calls, time of all. Graph launches are not in it: their call submits many kernels."""


@dataclass(frozen=True)
class Launches(Result):
    """Launching of one trace. Times are of the first GPU work of each launch on its device.

    Attributes:
        totals: Per device: work_count (all GPU work), launch_count (calls whose work is recorded), graph_work_count
            (work after the first of its launch), unknown_count (work whose launch is not recorded), early_count (work
            that seems to start before its call returned); then median, 95th percentile and maximum of delay (start of
            the work - end of the call, at least 0), span (start - start of the call) and latency (the part of the
            delay in which no earlier work of the stream ran), and late_count (latency >= 100 µs). Null without one.
        names: The same per name of GPU work, the largest total delay first.
        operators: The same per name of the operator that launched it (the innermost around the call; null where there
            is none): what each operator's kernels wait for.
        calls: Launch calls by name: call_count, total_ns, median_ns, p95_ns, max_ns, long_count and long_ns (calls of
            at least 50 µs).
        outliers: Work with a latency of at least 100 µs (late work; waiting work where its stream was told to wait for
            another before it), calls of at least 50 µs, and calls held up by a full queue,
            the longest first; a call that was held up is not listed as long, too.
        queues: Per stream, see `queue_depth.QUEUES`.
        curve: device, stream, time_ns, launches and works (how many are pending from then on), by stream and time.
        device_queues: The same of each device as a whole (its streams together; `stream` is null): a launch is pending
            until the first of its work starts on any stream.
        device_curve: The curve of each device as a whole.
        bins: Histogram of kernel durations, see `BINS`.
        short: Kernels shorter than their launch call, by name, see `SHORT`.
        steps: Per device what a whole step launches, as mean, min and max over the steps.
    """

    totals: pl.DataFrame
    names: pl.DataFrame
    operators: pl.DataFrame
    calls: pl.DataFrame
    outliers: pl.DataFrame
    queues: pl.DataFrame
    curve: pl.DataFrame
    device_queues: pl.DataFrame
    device_curve: pl.DataFrame
    bins: pl.DataFrame
    short: pl.DataFrame
    steps: pl.DataFrame


def launches(trace: Trace) -> Launches:
    """Look at the way of every launch from the call to the start of its work."""
    return _of_each(trace)


@of_each
def _of_each(traces: Sequence[Trace]) -> Iterable[Launches]:
    all_made = [submissions(trace) for trace in traces]
    all_held = [held_up(trace, made) for trace, made in zip(traces, all_made, strict=True)]
    names = [vocabulary(trace).names for trace in traces]  # gathered by code: those of all events would fill the memory
    pairs = list(zip(traces, all_made, strict=True))
    keys = [TRACE, "device"]
    times = stacked(_times(*pair) for pair in pairs)
    work = stacked(
        pl.DataFrame({"device": made.device, "known": made.known, "inner": made.known & ~made.first})
        for made in all_made
    )
    totals = (
        work.group_by(keys)
        .agg(
            pl.len().alias("work_count"),
            pl.col("inner").sum().alias("graph_work_count"),
            (~pl.col("known")).sum().alias("unknown_count"),
        )
        .join(
            times.group_by(keys, maintain_order=True).agg(*_OF_TIMES, pl.col("early").sum().alias("early_count")),
            on=keys,
            how="left",
        )
        .sort(keys)
        .with_columns(_or_null("device"), pl.col("launch_count", "late_count", "early_count").fill_null(0))
    )
    calls = stacked(_calls(*pair) for pair in pairs)
    call, long = pl.col("call_ns"), pl.col("call_ns") >= LONG_CALL_NS
    by_call = calls.group_by(TRACE, "code", maintain_order=True).agg(
        pl.len().alias("call_count"),
        call.sum().alias("total_ns"),
        call.median().floor().alias("median_ns"),
        call.quantile(0.95, "nearest").alias("p95_ns"),
        call.max().alias("max_ns"),
        long.sum().alias("long_count"),
        call.filter(long).sum().alias("long_ns"),
    )
    by_call = by_call.hstack([gathered(names, by_call, "code").alias("name")])
    late = unstacked(times.filter(pl.col("latency") >= LONG_DELAY_NS), traces)
    of_held = stacked(pl.DataFrame({"at": held.at}, schema={"at": pl.Int64}) for held in all_held)
    long_calls = calls.filter(long).join(of_held, on=[TRACE, "at"], how="anti", maintain_order="left")
    outliers = stacked(map(_outliers, traces, all_made, late, unstacked(long_calls, traces), all_held))
    spread = per_step(
        stacked(map(_stepped, traces, all_made, all_held)), keys, _PER_STEP, stacked(map(whole_steps, traces))
    )
    frames = {
        "totals": (totals, TOTALS),
        "names": (_by_name(names, times, "code"), NAMES),
        "operators": (_by_name(names, times, "op"), NAMES),
        "calls": (by_call.sort(TRACE, "total_ns", "name", descending=[False, True, False]), CALLS),
        "outliers": (
            outliers.sort(TRACE, "duration_ns", "start_ns", "kind", descending=[False, True, False, False]), OUTLIERS
        ),
        "short": (_short_by_name(names, stacked(_alone(*pair) for pair in pairs)), SHORT),
        "steps": (spread.sort(keys).with_columns(_or_null("device")), STEPS),
    }  # fmt: skip
    parts = {name: unstacked(frame, traces, columns) for name, (frame, columns) in frames.items()}
    for number, (made, held) in enumerate(zip(all_made, all_held, strict=True)):
        whole = of_devices(made)
        yield Launches(
            **{name: of_traces[number] for name, of_traces in parts.items()},
            queues=queues(made, held),
            curve=curve(made),
            device_queues=queues(whole, held),
            device_curve=curve(whole),
            bins=_histogram(made),
        )


def _times(trace: Trace, made: Submissions) -> pl.DataFrame:
    """One row per launch and device: its first work (`at`), delay, span and latency."""
    at = np.flatnonzero(made.first)
    start, returned = made.start[at], made.call_end[at]
    # what the stream did before: the end of everything that began earlier on it
    reach = np.zeros(made.row.size, dtype=np.int64)
    for low, high in zip(made.bounds()[:-1].tolist(), made.bounds()[1:].tolist(), strict=True):
        reach[low + 1 : high] = np.maximum.accumulate(made.end[low:high])[:-1]
    free = np.maximum(returned, reach[at])
    code = plain(vocabulary(trace).code)
    op = plain(column(trace, "op", -1))[made.row[at]]
    return pl.DataFrame(
        {
            "at": at,
            "device": made.device[at],
            "code": code[made.row[at]].astype(np.int64),
            "op": np.where(op >= 0, code[np.maximum(op, 0)].astype(np.int64), -1) if at.size else at,
            "delay": np.maximum(start - returned, 0),
            "span": np.maximum(start - made.call_start[at], 0),
            "latency": np.maximum(start - free, 0),
            "early": start < returned,
        }
    )


def _calls(trace: Trace, made: Submissions) -> pl.DataFrame:
    """Every call that submitted GPU work: its first work (`at`), its row, the code of its name, its duration."""
    at = np.flatnonzero(made.first)
    launch, first_index = np.unique(made.launch[at], return_index=True)
    first_at = at[first_index]
    length = made.call_end[first_at] - made.call_start[first_at]
    return pl.DataFrame(
        {"at": first_at, "launch": launch, "code": plain(vocabulary(trace).code)[launch], "call_ns": length}
    )


_OF_TIMES = (
    pl.len().cast(pl.Int64).alias("launch_count"),
    *(
        statistic
        for name in _TIMES
        for statistic in (
            pl.col(name).median().floor().cast(pl.Int64).alias(f"{name}_median_ns"),
            pl.col(name).quantile(0.95, "nearest").cast(pl.Int64).alias(f"{name}_p95_ns"),
            pl.col(name).max().alias(f"{name}_max_ns"),
        )
    ),
    (pl.col("latency") >= LONG_DELAY_NS).sum().cast(pl.Int64).alias("late_count"),
)


def _by_name(names: Sequence[pl.Series], times: pl.DataFrame, key: str) -> pl.DataFrame:
    """Statistics by name of the work (`code`) or of its operator (`op`), the largest sum of delays first."""
    code = pl.when(pl.col(key) >= 0).then(key).cast(pl.UInt32).alias("code")
    table = times.group_by(TRACE, code, maintain_order=True).agg(*_OF_TIMES, pl.col("delay").sum().alias("sum"))
    table = table.hstack([gathered(names, table, "code").alias("name")])
    return table.sort(TRACE, "sum", "name", descending=[False, True, False])


def _or_null(name: str) -> pl.Expr:
    return pl.when(pl.col(name) >= 0).then(pl.col(name)).alias(name)


def _outliers(trace: Trace, made: Submissions, late: pl.DataFrame, long: pl.DataFrame, held: HeldCalls) -> pl.DataFrame:
    at = np.concatenate([late["at"].to_numpy(), long["at"].to_numpy(), held.at])
    kind = np.repeat(["late work", "long call", "full queue"], [late.height, long.height, held.at.size]).astype("<U12")
    if late.height:
        has_wait = stream_waits(trace)[0][made.row[late["at"].to_numpy()]]
        kind[: late.height][has_wait] = "waiting work"
    length = np.concatenate([late["latency"].to_numpy(), long["call_ns"].to_numpy(), held.ns])
    names = trace.events["name"]
    steps = trace.steps["step"]
    step = made.step[at]
    return pl.DataFrame(
        {
            "kind": pl.Series(kind, dtype=pl.String),
            "duration_ns": length,
            "start_ns": np.where(np.arange(at.size) < late.height, made.start[at] - length, made.call_start[at]),
            "device": nullable(made.device[at], absent=UNKNOWN),
            "stream": nullable(made.stream[at], absent=UNKNOWN),
            "step": steps[row_numbers(step)],
            "work": made.row[at],
            "work_name": names[made.row[at]],
            "launch": made.launch[at],
            "launch_name": names[made.launch[at]],
        }
    )


def _stepped(trace: Trace, made: Submissions, held: HeldCalls) -> pl.DataFrame:
    """Of work in steps: whether it is a launch's first, time in launch calls, short kernels, time held up."""
    stepped = np.flatnonzero(made.step >= 0)
    held_ns = np.zeros(made.row.size, dtype=np.int64)
    held_ns[held.at] = held.ns
    call = made.call_end - made.call_start
    short: Bools = made.first & made.kernel & ~made.many & (made.end - made.start < call)
    return pl.DataFrame(
        {
            "device": made.device[stepped],
            "step": trace.steps["step"][made.step[stepped]],
            "launch_count": made.first[stepped].astype(np.int64),
            "work_count": np.ones(stepped.size, dtype=np.int64),
            "call_ns": np.where(made.first, call, 0)[stepped],
            "short_count": short[stepped].astype(np.int64),
            "held_ns": held_ns[stepped],
        }
    )


def _histogram(made: Submissions) -> pl.DataFrame:
    """Durations of kernels in bins that double: `BINS`."""
    length = (made.end - made.start)[made.kernel]
    call = (made.call_end - made.call_start)[made.kernel]
    alone = (made.first & ~made.many)[made.kernel]
    short = alone & (length < call)  # than a launch call of its own
    bin_index = np.searchsorted(_EDGES, length, side="right")
    order = np.argsort(bin_index, kind="stable")
    at = np.searchsorted(bin_index[order], np.arange(_EDGES.size + 2))
    total = np.concatenate([[0], np.cumsum(length[order])])
    return pl.DataFrame(
        {
            "low_ns": [0, *_EDGES.tolist()],
            "high_ns": [*_EDGES.tolist(), None],
            "kernel_count": np.diff(at),
            "total_ns": np.diff(total[at]),
            "short_count": np.bincount(bin_index[short], minlength=_EDGES.size + 1),
        }
    ).pipe(as_declared, BINS)


def _alone(trace: Trace, made: Submissions) -> pl.DataFrame:
    """Kernels that were launched one by one: the code of their name, their duration, that of the call."""
    at = np.flatnonzero(made.kernel & made.first & ~made.many)
    length, call = (made.end - made.start)[at], (made.call_end - made.call_start)[at]
    return pl.DataFrame({"code": plain(vocabulary(trace).code)[made.row[at]], "length": length, "call": call})


def _short_by_name(names: Sequence[pl.Series], alone: pl.DataFrame) -> pl.DataFrame:
    """Kernels shorter than their launch, by name, the most time in calls first: `SHORT`."""
    short = pl.col("length") < pl.col("call")
    by_code = (
        alone.group_by(TRACE, "code", maintain_order=True)
        .agg(
            short.sum().alias("short_count"),
            pl.len().alias("kernel_count"),
            pl.col("length").filter(short).sum().alias("short_ns"),
            pl.col("call").filter(short).sum().alias("call_ns"),
            pl.col("length").sum().alias("kernel_ns"),
        )
        .filter(pl.col("short_count") > 0)
    )
    by_code = by_code.hstack([gathered(names, by_code, "code").alias("name")])
    return by_code.sort(TRACE, "call_ns", "name", descending=[False, True, False])


__all__ = ["BINS", "CALLS", "NAMES", "OUTLIERS", "QUEUES", "SHORT", "STEPS", "TOTALS", "Launches", "launches"]
