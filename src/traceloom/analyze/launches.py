"""Launch delay, queue depth, held calls.

Definitions: docs/concepts/launches.md.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import polars as pl
from msgspec import structs

from traceloom.analyze.gpu_work import UNKNOWN, SubmittedWork, as_plain_array, stream_waits, submissions
from traceloom.analyze.names import vocabulary
from traceloom.analyze.steps import per_step, spread_schema, whole_steps
from traceloom.trace.array_types import Bools, Ints
from traceloom.trace.arrays import column, row_numbers, to_nullable_series
from traceloom.trace.batch import TRACE, gathered, of_each, stacked, unstacked
from traceloom.trace.frames import Result, cast_to_schema, schema
from traceloom.trace.trace import Trace

DEEP = 900
"""Launches that are pending where a queue is (nearly) full: CUDA takes about 1,022 to 1,024 per stream."""
_LONGER_NS = 8_000  # a launch that is longer than others of its name by this, and this many times, was held up
_QUEUE_TIMES = 2.5
_AT_ONCE_NS = 100_000  # it returns this soon after the work that made room
_CLOCK_NS = 2_000

QUEUES = schema(
    "device stream launch_count work_count unknown_count max_launches mean_launches",
    "max_works mean_works window_ns empty_ns deep_ns held_count held_ns capacity",
)
"""Per stream: its launches, its work, work of unknown launches (not in the depths); the largest number of pending
launches and pieces of work and their means over the window (first call or work .. last end); empty_ns in which nothing
is pending, deep_ns with at least 900 launches pending; launch calls that were held up by a full queue, for how long
beyond the usual, and how many launches the queue held then (null where none was held up)."""
CURVE = schema("device stream time_ns launches works")


class BlockedLaunches(NamedTuple):
    """Launch calls that a full queue held up; arrays of one length, by position.

    Attributes:
        at: Position in the submissions.
        ns: For how long beyond the usual duration of such a call.
        pending: How many launches were pending when the call returned.
    """

    at: Ints
    ns: Ints
    pending: Ints


class _Curve(NamedTuple):
    """Changes of the depths, by lane and time; one row per instant."""

    lane: Ints
    time: Ints
    launches: Ints
    works: Ints


def curve(made: SubmittedWork) -> pl.DataFrame:
    """How many launches and pieces of work are pending on each stream after every change: `CURVE`."""
    depths = _curve(made)
    bounds = made.bounds()[:-1]
    lane_start = bounds[depths.lane] if bounds.size else depths.lane
    return pl.DataFrame(
        {
            "device": to_nullable_series(made.device[lane_start], pl.Int32, UNKNOWN),
            "stream": to_nullable_series(made.stream[lane_start], pl.Int64, UNKNOWN),
            "time_ns": depths.time,
            "launches": depths.launches,
            "works": depths.works,
        },
        schema=CURVE,
    )


def _curve(made: SubmittedWork) -> _Curve:
    """+1 where a call begins, -1 where its work starts: per piece of work, and per launch where its first one starts.

    Work that seems to start before its call (clocks differ) starts with it, so that no depth is negative.
    """
    recorded = np.flatnonzero(made.known)
    first = np.zeros(recorded.size, dtype=np.int64)  # 1 for the first work of its launch on its lane
    if recorded.size:
        pair = made.launch[recorded] * (int(made.lane.max()) + 1) + made.lane[recorded]
        order = np.lexsort((made.start[recorded], pair))
        first[order[np.flatnonzero(np.diff(pair[order], prepend=-1))]] = 1
    begun = made.call_start[recorded]
    started = np.maximum(made.start[recorded], begun)
    lane = np.tile(made.lane[recorded], 2)
    time = np.concatenate([begun, started])
    works = np.repeat([1, -1], recorded.size)
    launches = works * np.tile(first, 2)
    order = np.lexsort((time, lane))
    lane, time = lane[order], time[order]
    last = np.ones(lane.size, dtype=np.bool_)
    last[:-1] = (lane[1:] != lane[:-1]) | (time[1:] != time[:-1])
    # every +1 has its -1 on the same lane: the running sums begin and end at 0 on each
    return _Curve(lane[last], time[last], np.cumsum(launches[order])[last], np.cumsum(works[order])[last])


def merge_streams(made: SubmittedWork) -> SubmittedWork:
    """The same with all streams of a device as one lane: for the depths of whole devices, whose stream is null."""
    opens = np.diff(made.device, prepend=made.device[:1] - 1) != 0
    return structs.replace(made, lane=np.cumsum(opens) - 1, stream=np.full(made.row.size, UNKNOWN, dtype=np.int64))


def find_blocked_launches(trace: Trace, made: SubmittedWork) -> BlockedLaunches:
    """Launch calls that a full queue held up.

    Such a call finds at least 900 launches pending, is longer than calls of its name usually are (by 8 µs and 2.5
    times), and returns within 100 µs after the end of earlier work of its stream, which made room.
    """
    lanes = [(low, high) for low, high in pairwise(made.bounds().tolist()) if high - low >= DEEP]
    nothing = np.zeros(0, dtype=np.int64)
    parts = [(nothing, nothing, nothing)]
    usual = nothing
    if lanes:  # for each work the median duration of the calls that have the name of its call; 0 without a call
        usual = np.zeros(made.row.size, dtype=np.int64)
        at = np.flatnonzero(made.first)
        code = as_plain_array(vocabulary(trace).code)[made.launch[at]].astype(np.int64)
        span = made.call_end[at] - made.call_start[at]
        order = np.lexsort((span, code))
        bounds = np.flatnonzero(np.diff(code[order], prepend=-1, append=-1))
        for low, high in pairwise(bounds.tolist()):  # names
            usual[at[order[low:high]]] = span[order[(low + high) // 2]]
    for low, high in lanes:
        by_call = low + np.argsort(made.call_start[low:high], kind="stable")  # in the order of launches
        ends = np.maximum.accumulate(np.sort(made.end[low:high]))
        number = np.flatnonzero(made.first[by_call] & ~made.many[by_call])
        at = by_call[number]
        returned = made.call_end[at]
        span = returned - made.call_start[at]
        done = np.searchsorted(ends, returned + _CLOCK_NS, side="right")
        pending = number + 1 - done
        freed = np.where(done > 0, ends[np.maximum(done - 1, 0)], np.iinfo(np.int64).min)
        held = (pending >= DEEP) & (span >= np.maximum(usual[at] + _LONGER_NS, _QUEUE_TIMES * usual[at]))
        held &= (returned - freed <= _AT_ONCE_NS) & (freed > made.call_start[at])
        parts.append((at[held], (span - usual[at])[held], pending[held]))
    return BlockedLaunches(*(np.concatenate(arrays) for arrays in zip(*parts, strict=True)))


def queues(made: SubmittedWork, held: BlockedLaunches) -> pl.DataFrame:
    """The queues of all streams: `QUEUES`."""
    depths = _curve(made)
    bounds = made.bounds()
    changes = np.searchsorted(depths.lane, np.arange(bounds.size))
    rows = []
    for lane, (low, high) in enumerate(pairwise(bounds.tolist())):
        _, time, launches, works = (values[changes[lane] : changes[lane + 1]] for values in depths)
        on_lane = (held.at >= low) & (held.at < high)
        counts, often = np.unique(held.pending[on_lane], return_counts=True)
        start = min(int(made.start[low:high].min()), int(made.call_start[low:high].min()))
        end = int(made.end[low:high].max())
        window = end - start
        lasts = np.maximum(np.diff(time, append=end), 0)
        recorded = made.known[low:high]
        rows.append(
            {
                "device": int(made.device[low]) if made.device[low] >= 0 else None,
                "stream": int(made.stream[low]) if made.stream[low] >= 0 else None,
                "launch_count": int(np.unique(made.launch[low:high][recorded]).size),
                "work_count": high - low,
                "unknown_count": int((~recorded).sum()),
                "max_launches": int(launches.max(initial=0)),
                "mean_launches": float((launches * lasts).sum() / window) if window else 0.0,
                "max_works": int(works.max(initial=0)),
                "mean_works": float((works * lasts).sum() / window) if window else 0.0,
                "window_ns": window,
                "empty_ns": window - int(lasts[launches > 0].sum()),
                "deep_ns": int(lasts[launches >= DEEP].sum()),
                "held_count": int(on_lane.sum()),
                "held_ns": int(held.ns[on_lane].sum()),
                "capacity": int(counts[::-1][often[::-1].argmax()]) if counts.size else None,
            }
        )
    return pl.DataFrame(rows, schema=QUEUES)


def downsample(curve: pl.DataFrame, points: int) -> pl.DataFrame:
    """A `CURVE` with at most `points` rows per stream: of each equal part of the window its first time and the most."""
    keys = ["device", "stream"]
    time = pl.col("time_ns")
    low, span = time.min().over(keys), (time.max() - time.min()).over(keys)
    part = pl.when(span > 0).then((time - low) * (points - 1) // pl.max_horizontal(span, 1)).otherwise(0)
    parts = curve.with_columns(part.alias("part")).group_by(*keys, "part", maintain_order=True)
    return parts.agg(time.first(), pl.col("launches").max(), pl.col("works").max())[list(CURVE)]


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
    all_held = [find_blocked_launches(trace, made) for trace, made in zip(traces, all_made, strict=True)]
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
        whole = merge_streams(made)
        yield Launches(
            **{name: of_traces[number] for name, of_traces in parts.items()},
            queues=queues(made, held),
            curve=curve(made),
            device_queues=queues(whole, held),
            device_curve=curve(whole),
            bins=_histogram(made),
        )


def _times(trace: Trace, made: SubmittedWork) -> pl.DataFrame:
    """One row per launch and device: its first work (`at`), delay, span and latency."""
    at = np.flatnonzero(made.first)
    start, returned = made.start[at], made.call_end[at]
    # what the stream did before: the end of everything that began earlier on it
    reach = np.zeros(made.row.size, dtype=np.int64)
    for low, high in zip(made.bounds()[:-1].tolist(), made.bounds()[1:].tolist(), strict=True):
        reach[low + 1 : high] = np.maximum.accumulate(made.end[low:high])[:-1]
    free = np.maximum(returned, reach[at])
    code = as_plain_array(vocabulary(trace).code)
    op = as_plain_array(column(trace, "op", -1))[made.row[at]]
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


def _calls(trace: Trace, made: SubmittedWork) -> pl.DataFrame:
    """Every call that submitted GPU work: its first work (`at`), its row, the code of its name, its duration."""
    at = np.flatnonzero(made.first)
    launch, first_index = np.unique(made.launch[at], return_index=True)
    first_at = at[first_index]
    length = made.call_end[first_at] - made.call_start[first_at]
    return pl.DataFrame(
        {"at": first_at, "launch": launch, "code": as_plain_array(vocabulary(trace).code)[launch], "call_ns": length}
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


def _outliers(
    trace: Trace, made: SubmittedWork, late: pl.DataFrame, long: pl.DataFrame, held: BlockedLaunches
) -> pl.DataFrame:
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
            "device": to_nullable_series(made.device[at], absent=UNKNOWN),
            "stream": to_nullable_series(made.stream[at], absent=UNKNOWN),
            "step": steps[row_numbers(step)],
            "work": made.row[at],
            "work_name": names[made.row[at]],
            "launch": made.launch[at],
            "launch_name": names[made.launch[at]],
        }
    )


def _stepped(trace: Trace, made: SubmittedWork, held: BlockedLaunches) -> pl.DataFrame:
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


def _histogram(made: SubmittedWork) -> pl.DataFrame:
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
    ).pipe(cast_to_schema, BINS)


def _alone(trace: Trace, made: SubmittedWork) -> pl.DataFrame:
    """Kernels that were launched one by one: the code of their name, their duration, that of the call."""
    at = np.flatnonzero(made.kernel & made.first & ~made.many)
    length, call = (made.end - made.start)[at], (made.call_end - made.call_start)[at]
    return pl.DataFrame({"code": as_plain_array(vocabulary(trace).code)[made.row[at]], "length": length, "call": call})


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
