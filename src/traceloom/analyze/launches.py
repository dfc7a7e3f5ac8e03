"""Launches of GPU work: delays, latencies, queue depths, and calls that a full queue held up.

Definitions: docs/concepts/launches.md.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import polars as pl
from msgspec import structs

from traceloom.analyze.gpu_work import (
    MISSING_VALUE,
    LaunchedWork,
    collect_launched_work,
    convert_to_ndarray,
    find_stream_waits,
)
from traceloom.analyze.names import build_vocabulary
from traceloom.analyze.steps import build_spread_schema, select_whole_steps, summarize_per_step
from traceloom.trace.array_types import Bools, Ints
from traceloom.trace.arrays import build_event_column, get_event_column, to_nullable_series
from traceloom.trace.batch import (
    TRACE_COLUMN,
    concatenate_by_trace,
    gather_by_trace,
    run_in_batches,
    split_by_trace,
)
from traceloom.trace.frames import Result, build_schema, cast_to_schema
from traceloom.trace.trace import Trace

MIN_QUEUE_DEPTH = 900
"""Pending launches from which on a queue is (nearly) full: CUDA takes about 1,022 to 1,024 per
stream.
"""
# A launch that is longer than others of its name by this, and by this factor, was held up
_MIN_HELD_UP_NS = 8_000
_HELD_UP_FACTOR = 2.5
_MAX_RETURN_DELAY_NS = 100_000  # it returns this soon after the work that made room
_CLOCK_TOLERANCE_NS = 2_000

QUEUES = build_schema(
    "device stream launch_count work_count unknown_count max_launches mean_launches",
    "max_works mean_works window_ns empty_ns deep_ns held_count held_ns capacity",
)
"""Per stream: its launches, its work, work of unknown launches (not in the depths); the largest
number of pending launches and pieces of work and their means over the window (first call or work
... last end); empty_ns in which nothing is pending, deep_ns with at least 900 launches pending;
launch calls that were held up by a full queue, for how long beyond the usual, and how many launches
the queue held then (null where none was held up).
"""
CURVE = build_schema("device stream time_ns launches works")


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


def build_depth_curve(submitted: LaunchedWork) -> pl.DataFrame:
    """Returns how many launches and pieces of work are pending on each stream after every change:
    `CURVE`.
    """
    depths = _compute_depths(submitted)
    bounds = submitted.bounds()[:-1]
    lane_start = bounds[depths.lane] if bounds.size else depths.lane
    return pl.DataFrame(
        {
            "device": to_nullable_series(submitted.device[lane_start], pl.Int32, MISSING_VALUE),
            "stream": to_nullable_series(submitted.stream[lane_start], pl.Int64, MISSING_VALUE),
            "time_ns": depths.time,
            "launches": depths.launches,
            "works": depths.works,
        },
        schema=CURVE,
    )


def _compute_depths(submitted: LaunchedWork) -> _Curve:
    """Computes depths from +1 where a call begins and -1 where its work starts: per piece of work,
    and per launch where its first work starts.

    Work that seems to start before its call (clocks differ) starts with it, so that no depth is
    negative.
    """
    recorded = np.flatnonzero(submitted.known)
    # 1 for the first work of its launch on its lane
    first = np.zeros(recorded.size, dtype=np.int64)
    if recorded.size:
        pair = (
            submitted.launch[recorded] * (int(submitted.lane.max()) + 1) + submitted.lane[recorded]
        )
        order = np.lexsort((submitted.start[recorded], pair))
        first[order[np.flatnonzero(np.diff(pair[order], prepend=-1))]] = 1
    begun = submitted.call_start[recorded]
    started = np.maximum(submitted.start[recorded], begun)
    lane = np.tile(submitted.lane[recorded], 2)
    time = np.concatenate([begun, started])
    works = np.repeat([1, -1], recorded.size)
    launches = works * np.tile(first, 2)
    order = np.lexsort((time, lane))
    lane, time = lane[order], time[order]
    last = np.ones(lane.size, dtype=np.bool_)
    last[:-1] = (lane[1:] != lane[:-1]) | (time[1:] != time[:-1])
    # Every +1 has its -1 on the same lane: the running sums begin and end at 0 on each.
    return _Curve(
        lane[last], time[last], np.cumsum(launches[order])[last], np.cumsum(works[order])[last]
    )


def merge_streams(submitted: LaunchedWork) -> LaunchedWork:
    """Returns the same with all streams of a device as one lane, whose stream is null: for the
    depths of whole devices.
    """
    opens = np.diff(submitted.device, prepend=submitted.device[:1] - 1) != 0
    return structs.replace(
        submitted,
        lane=np.cumsum(opens) - 1,
        stream=np.full(submitted.row.size, MISSING_VALUE, dtype=np.int64),
    )


def find_blocked_launches(trace: Trace, submitted: LaunchedWork) -> BlockedLaunches:
    """Finds launch calls that a full queue held up.

    Such a call finds at least 900 launches pending, is longer than calls of its name usually are
    (by 8 µs and 2.5 times), and returns within 100 µs after the end of earlier work of its stream,
    which made room.
    """
    lanes = [
        (low, high)
        for low, high in pairwise(submitted.bounds().tolist())
        if high - low >= MIN_QUEUE_DEPTH
    ]
    nothing = np.zeros(0, dtype=np.int64)
    parts = [(nothing, nothing, nothing)]
    typical_ns = nothing
    # For each work the median duration of the calls that have the name of its call; 0 without a
    # call
    if lanes:
        typical_ns = np.zeros(submitted.row.size, dtype=np.int64)
        launch_rows = np.flatnonzero(submitted.first)
        code = convert_to_ndarray(build_vocabulary(trace).code)[
            submitted.launch[launch_rows]
        ].astype(np.int64)
        span = submitted.call_end[launch_rows] - submitted.call_start[launch_rows]
        order = np.lexsort((span, code))
        bounds = np.flatnonzero(np.diff(code[order], prepend=-1, append=-1))
        for low, high in pairwise(bounds.tolist()):  # names
            typical_ns[launch_rows[order[low:high]]] = span[order[(low + high) // 2]]
    for low, high in lanes:
        # In the order of launches
        call_order = low + np.argsort(submitted.call_start[low:high], kind="stable")
        end_times = np.maximum.accumulate(np.sort(submitted.end[low:high]))
        number = np.flatnonzero(submitted.first[call_order] & ~submitted.many[call_order])
        launch_rows = call_order[number]
        returned = submitted.call_end[launch_rows]
        span = returned - submitted.call_start[launch_rows]
        done = np.searchsorted(end_times, returned + _CLOCK_TOLERANCE_NS, side="right")
        pending = number + 1 - done
        freed = np.where(done > 0, end_times[np.maximum(done - 1, 0)], np.iinfo(np.int64).min)
        is_held = (pending >= MIN_QUEUE_DEPTH) & (
            span
            >= np.maximum(
                typical_ns[launch_rows] + _MIN_HELD_UP_NS, _HELD_UP_FACTOR * typical_ns[launch_rows]
            )
        )
        is_held &= (returned - freed <= _MAX_RETURN_DELAY_NS) & (
            freed > submitted.call_start[launch_rows]
        )
        parts.append(
            (launch_rows[is_held], (span - typical_ns[launch_rows])[is_held], pending[is_held])
        )
    return BlockedLaunches(*(np.concatenate(arrays) for arrays in zip(*parts, strict=True)))


def summarize_queues(submitted: LaunchedWork, blocked: BlockedLaunches) -> pl.DataFrame:
    """Returns the queues of all streams: `QUEUES`."""
    depths = _compute_depths(submitted)
    bounds = submitted.bounds()
    changes = np.searchsorted(depths.lane, np.arange(bounds.size))
    rows = []
    for lane, (low, high) in enumerate(pairwise(bounds.tolist())):
        _, time, launches, works = (values[changes[lane] : changes[lane + 1]] for values in depths)
        on_lane = (blocked.at >= low) & (blocked.at < high)
        counts, often = np.unique(blocked.pending[on_lane], return_counts=True)
        start = min(int(submitted.start[low:high].min()), int(submitted.call_start[low:high].min()))
        end = int(submitted.end[low:high].max())
        window = end - start
        durations = np.maximum(np.diff(time, append=end), 0)
        recorded = submitted.known[low:high]
        rows.append(
            {
                "device": int(submitted.device[low]) if submitted.device[low] >= 0 else None,
                "stream": int(submitted.stream[low]) if submitted.stream[low] >= 0 else None,
                "launch_count": int(np.unique(submitted.launch[low:high][recorded]).size),
                "work_count": high - low,
                "unknown_count": int((~recorded).sum()),
                "max_launches": int(launches.max(initial=0)),
                "mean_launches": float((launches * durations).sum() / window) if window else 0.0,
                "max_works": int(works.max(initial=0)),
                "mean_works": float((works * durations).sum() / window) if window else 0.0,
                "window_ns": window,
                "empty_ns": window - int(durations[launches > 0].sum()),
                "deep_ns": int(durations[launches >= MIN_QUEUE_DEPTH].sum()),
                "held_count": int(on_lane.sum()),
                "held_ns": int(blocked.ns[on_lane].sum()),
                "capacity": int(counts[::-1][often[::-1].argmax()]) if counts.size else None,
            }
        )
    return pl.DataFrame(rows, schema=QUEUES)


def reduce_curve(curve: pl.DataFrame, points: int) -> pl.DataFrame:
    """Returns a `CURVE` with at most `points` rows per stream: of each equal part of the window its
    first time and the max.
    """
    keys = ["device", "stream"]
    time = pl.col("time_ns")
    low, span = time.min().over(keys), (time.max() - time.min()).over(keys)
    part = (
        pl.when(span > 0)
        .then((time - low) * (points - 1) // pl.max_horizontal(span, 1))
        .otherwise(0)
    )
    parts = curve.with_columns(part.alias("part")).group_by(*keys, "part", maintain_order=True)
    return parts.agg(time.first(), pl.col("launches").max(), pl.col("works").max())[list(CURVE)]


LONG_CALL_NS = 50_000
"""Launch calls from this length on are listed: a call usually takes 2 to 10 µs."""
LONG_DELAY_NS = 100_000
"""Work that starts this long after nothing held it back any more is listed."""

_TIMES = ("delay", "span", "latency")
_STATISTICS = [f"{name}_{how}_ns" for name in _TIMES for how in ("median", "p95", "max")]
TOTALS = build_schema(
    "device work_count launch_count graph_work_count unknown_count early_count",
    *_STATISTICS,
    "late_count",
)
NAMES = build_schema("name launch_count", *_STATISTICS, "late_count")
CALLS = build_schema("name call_count total_ns median_ns p95_ns max_ns long_count long_ns")
OUTLIERS = build_schema(
    "kind duration_ns start_ns device stream step work work_name launch launch_name",
    {"kind": pl.Enum(["late work", "waiting work", "long call", "full queue"])},
)
_PER_STEP = ("launch_count", "work_count", "call_ns", "short_count", "held_ns")
STEPS = build_schema("device", build_spread_schema(*_PER_STEP))

_BIN_EDGES = 1_000 << np.arange(15)  # 1 µs, 2 µs, ... 16.4 ms
BINS = build_schema("low_ns high_ns kernel_count total_ns short_count")
"""Kernels with low_ns <= duration < high_ns (null: no upper bound), their summed time, and how many
of them are shorter than their launch call. The bounds double from 1 µs on; the counts add up to all
kernels of the trace.
"""
SHORT_KERNELS = build_schema("name short_count kernel_count short_ns call_ns kernel_ns")
"""Kernels by name: how many are shorter than their launch call, of how many that were launched one
by one; time of the short ones, time of their calls, time of all. Graph launches are not in it:
their call submits many kernels.
"""


@dataclass(frozen=True)
class Launches(Result):
    """Launching of one trace. Times are of the first GPU work of each launch on its device.

    Attributes:
        totals: Per device: work_count (all GPU work), launch_count (calls whose work is recorded),
            graph_work_count (work after the first of its launch), unknown_count (work whose launch
            is not recorded), early_count (work that seems to start before its call returned); then
            median, 95th percentile and maximum of delay (start of the work - end of the call, at
            least 0), span (start - start of the call) and latency (the part of the delay in which
            no earlier work of the stream ran), and late_count (latency >= 100 µs). Null without
            one.
        names: The same per name of GPU work, the largest total delay first.
        operators: The same per name of the operator that launched it (the innermost around the
            call; null where there is none).
        calls: Launch calls by name: call_count, total_ns, median_ns, p95_ns, max_ns, long_count and
            long_ns (calls of at least 50 µs).
        outliers: Work with a latency of at least 100 µs (late work; waiting work where its stream
            had to wait for another before it), calls of at least 50 µs, and calls held up by a full
            queue, the longest first; a call that was held up is not listed as long, too.
        queues: Per stream, see `QUEUES`.
        curve: device, stream, time_ns, launches and works (how many are pending from then on), by
            stream and time.
        device_queues: The same of each device as a whole (its streams together; `stream` is null):
            a launch is pending until the first of its work starts on any stream.
        device_curve: The curve of each device as a whole.
        bins: Histogram of kernel durations, see `BINS`.
        short: Kernels shorter than their launch call, by name, see `SHORT`.
        steps: Launches of a whole step per device, as mean, min and max over the steps.
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
    """Measures every launch from the call to the start of its work."""
    return _summarize_launches(trace)


@run_in_batches
def _summarize_launches(traces: Sequence[Trace]) -> Iterable[Launches]:
    all_made = [collect_launched_work(trace) for trace in traces]
    all_held = [
        find_blocked_launches(trace, submitted)
        for trace, submitted in zip(traces, all_made, strict=True)
    ]
    # Gathered by code: those of all events would fill the memory
    names = [build_vocabulary(trace).names for trace in traces]
    pairs = list(zip(traces, all_made, strict=True))
    keys = [TRACE_COLUMN, "device"]
    times = concatenate_by_trace(_measure_launch_times(*pair) for pair in pairs)
    work = concatenate_by_trace(
        pl.DataFrame(
            {
                "device": submitted.device,
                "known": submitted.known,
                "inner": submitted.known & ~submitted.first,
            }
        )
        for submitted in all_made
    )
    totals = (
        work.group_by(keys)
        .agg(
            pl.len().alias("work_count"),
            pl.col("inner").sum().alias("graph_work_count"),
            (~pl.col("known")).sum().alias("unknown_count"),
        )
        .join(
            times.group_by(keys, maintain_order=True).agg(
                *_TIME_STATISTICS, pl.col("early").sum().alias("early_count")
            ),
            on=keys,
            how="left",
        )
        .sort(keys)
        .with_columns(
            _replace_negative_with_null("device"),
            pl.col("launch_count", "late_count", "early_count").fill_null(0),
        )
    )
    calls = concatenate_by_trace(_list_calls(*pair) for pair in pairs)
    call, long = pl.col("call_ns"), pl.col("call_ns") >= LONG_CALL_NS
    call_table = calls.group_by(TRACE_COLUMN, "code", maintain_order=True).agg(
        pl.len().alias("call_count"),
        call.sum().alias("total_ns"),
        call.median().floor().alias("median_ns"),
        call.quantile(0.95, "nearest").alias("p95_ns"),
        call.max().alias("max_ns"),
        long.sum().alias("long_count"),
        call.filter(long).sum().alias("long_ns"),
    )
    call_table = call_table.hstack([gather_by_trace(names, call_table, "code").alias("name")])
    late = split_by_trace(times.filter(pl.col("latency") >= LONG_DELAY_NS), traces)
    blocked_rows = concatenate_by_trace(
        pl.DataFrame({"at": blocked.at}, schema={"at": pl.Int64}) for blocked in all_held
    )
    long_calls = calls.filter(long).join(
        blocked_rows, on=[TRACE_COLUMN, "at"], how="anti", maintain_order="left"
    )
    outliers = concatenate_by_trace(
        map(_list_outliers, traces, all_made, late, split_by_trace(long_calls, traces), all_held)
    )
    spread = summarize_per_step(
        concatenate_by_trace(map(_select_stepped_work, traces, all_made, all_held)),
        keys,
        _PER_STEP,
        concatenate_by_trace(map(select_whole_steps, traces)),
    )
    frames = {
        "totals": (totals, TOTALS),
        "names": (_summarize_by_name(names, times, "code"), NAMES),
        "operators": (_summarize_by_name(names, times, "op"), NAMES),
        "calls": (
            call_table.sort(TRACE_COLUMN, "total_ns", "name", descending=[False, True, False]),
            CALLS,
        ),
        "outliers": (
            outliers.sort(
                TRACE_COLUMN,
                "duration_ns",
                "start_ns",
                "kind",
                descending=[False, True, False, False],
            ),
            OUTLIERS,
        ),
        "short": (
            _list_short_kernels(
                names, concatenate_by_trace(_select_single_launches(*pair) for pair in pairs)
            ),
            SHORT_KERNELS,
        ),
        "steps": (spread.sort(keys).with_columns(_replace_negative_with_null("device")), STEPS),
    }
    parts = {
        name: split_by_trace(frame, traces, columns) for name, (frame, columns) in frames.items()
    }
    for number, (submitted, blocked) in enumerate(zip(all_made, all_held, strict=True)):
        merged = merge_streams(submitted)
        yield Launches(
            **{name: trace_tables[number] for name, trace_tables in parts.items()},
            queues=summarize_queues(submitted, blocked),
            curve=build_depth_curve(submitted),
            device_queues=summarize_queues(merged, blocked),
            device_curve=build_depth_curve(merged),
            bins=_build_histogram(submitted),
        )


def _measure_launch_times(trace: Trace, submitted: LaunchedWork) -> pl.DataFrame:
    """Returns one row per launch and device: its first work (`at`), delay, span and latency."""
    first_rows = np.flatnonzero(submitted.first)
    start, returned = submitted.start[first_rows], submitted.call_end[first_rows]
    # The end of everything that began earlier on the stream.
    reach = np.zeros(submitted.row.size, dtype=np.int64)
    for low, high in zip(
        submitted.bounds()[:-1].tolist(), submitted.bounds()[1:].tolist(), strict=True
    ):
        reach[low + 1 : high] = np.maximum.accumulate(submitted.end[low:high])[:-1]
    free = np.maximum(returned, reach[first_rows])
    code = convert_to_ndarray(build_vocabulary(trace).code)
    op = convert_to_ndarray(get_event_column(trace, "op", -1))[submitted.row[first_rows]]
    return pl.DataFrame(
        {
            "at": first_rows,
            "device": submitted.device[first_rows],
            "code": code[submitted.row[first_rows]].astype(np.int64),
            "op": np.where(op >= 0, code[np.maximum(op, 0)].astype(np.int64), -1)
            if first_rows.size
            else first_rows,
            "delay": np.maximum(start - returned, 0),
            "span": np.maximum(start - submitted.call_start[first_rows], 0),
            "latency": np.maximum(start - free, 0),
            "early": start < returned,
        }
    )


def _list_calls(trace: Trace, submitted: LaunchedWork) -> pl.DataFrame:
    """Returns every call that submitted GPU work: its first work (`at`), its row, the code of its
    name, its duration.
    """
    first_rows = np.flatnonzero(submitted.first)
    launch, first_index = np.unique(submitted.launch[first_rows], return_index=True)
    first_at = first_rows[first_index]
    length = submitted.call_end[first_at] - submitted.call_start[first_at]
    return pl.DataFrame(
        {
            "at": first_at,
            "launch": launch,
            "code": convert_to_ndarray(build_vocabulary(trace).code)[launch],
            "call_ns": length,
        }
    )


_TIME_STATISTICS = (
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


def _summarize_by_name(names: Sequence[pl.Series], times: pl.DataFrame, key: str) -> pl.DataFrame:
    """Returns statistics by name of the work (`code`) or of its operator (`op`), the largest sum of
    delays first.
    """
    code = pl.when(pl.col(key) >= 0).then(key).cast(pl.UInt32).alias("code")
    table = times.group_by(TRACE_COLUMN, code, maintain_order=True).agg(
        *_TIME_STATISTICS, pl.col("delay").sum().alias("sum")
    )
    table = table.hstack([gather_by_trace(names, table, "code").alias("name")])
    return table.sort(TRACE_COLUMN, "sum", "name", descending=[False, True, False])


def _replace_negative_with_null(name: str) -> pl.Expr:
    return pl.when(pl.col(name) >= 0).then(pl.col(name)).alias(name)


def _list_outliers(
    trace: Trace,
    submitted: LaunchedWork,
    late: pl.DataFrame,
    long: pl.DataFrame,
    blocked: BlockedLaunches,
) -> pl.DataFrame:
    outlier_rows = np.concatenate([late["at"].to_numpy(), long["at"].to_numpy(), blocked.at])
    kind = np.repeat(
        ["late work", "long call", "full queue"], [late.height, long.height, blocked.at.size]
    ).astype("<U12")
    if late.height:
        has_wait = find_stream_waits(trace)[0][submitted.row[late["at"].to_numpy()]]
        kind[: late.height][has_wait] = "waiting work"
    length = np.concatenate([late["latency"].to_numpy(), long["call_ns"].to_numpy(), blocked.ns])
    names = trace.events["name"]
    steps = trace.steps["step"]
    step = submitted.step[outlier_rows]
    return pl.DataFrame(
        {
            "kind": pl.Series(kind, dtype=pl.String),
            "duration_ns": length,
            "start_ns": np.where(
                np.arange(outlier_rows.size) < late.height,
                submitted.start[outlier_rows] - length,
                submitted.call_start[outlier_rows],
            ),
            "device": to_nullable_series(submitted.device[outlier_rows], absent=MISSING_VALUE),
            "stream": to_nullable_series(submitted.stream[outlier_rows], absent=MISSING_VALUE),
            "step": steps[build_event_column(step)],
            "work": submitted.row[outlier_rows],
            "work_name": names[submitted.row[outlier_rows]],
            "launch": submitted.launch[outlier_rows],
            "launch_name": names[submitted.launch[outlier_rows]],
        }
    )


def _select_stepped_work(
    trace: Trace, submitted: LaunchedWork, blocked: BlockedLaunches
) -> pl.DataFrame:
    """Returns work in steps: whether it is a launch's first, time in launch calls, short kernels,
    time held up.
    """
    stepped = np.flatnonzero(submitted.step >= 0)
    held_ns = np.zeros(submitted.row.size, dtype=np.int64)
    held_ns[blocked.at] = blocked.ns
    call = submitted.call_end - submitted.call_start
    short: Bools = (
        submitted.first
        & submitted.kernel
        & ~submitted.many
        & (submitted.end - submitted.start < call)
    )
    return pl.DataFrame(
        {
            "device": submitted.device[stepped],
            "step": trace.steps["step"][submitted.step[stepped]],
            "launch_count": submitted.first[stepped].astype(np.int64),
            "work_count": np.ones(stepped.size, dtype=np.int64),
            "call_ns": np.where(submitted.first, call, 0)[stepped],
            "short_count": short[stepped].astype(np.int64),
            "held_ns": held_ns[stepped],
        }
    )


def _build_histogram(submitted: LaunchedWork) -> pl.DataFrame:
    """Returns durations of kernels in bins that double: `BINS`."""
    length = (submitted.end - submitted.start)[submitted.kernel]
    call = (submitted.call_end - submitted.call_start)[submitted.kernel]
    is_single = (submitted.first & ~submitted.many)[submitted.kernel]
    short = is_single & (length < call)  # than a launch call of its own
    bin_index = np.searchsorted(_BIN_EDGES, length, side="right")
    order = np.argsort(bin_index, kind="stable")
    bin_bounds = np.searchsorted(bin_index[order], np.arange(_BIN_EDGES.size + 2))
    total = np.concatenate([[0], np.cumsum(length[order])])
    return pl.DataFrame(
        {
            "low_ns": [0, *_BIN_EDGES.tolist()],
            "high_ns": [*_BIN_EDGES.tolist(), None],
            "kernel_count": np.diff(bin_bounds),
            "total_ns": np.diff(total[bin_bounds]),
            "short_count": np.bincount(bin_index[short], minlength=_BIN_EDGES.size + 1),
        }
    ).pipe(cast_to_schema, BINS)


def _select_single_launches(trace: Trace, submitted: LaunchedWork) -> pl.DataFrame:
    """Returns kernels that were launched one by one: the code of their name, their duration, that
    of the call.
    """
    single_rows = np.flatnonzero(submitted.kernel & submitted.first & ~submitted.many)
    length, call = (
        (submitted.end - submitted.start)[single_rows],
        (submitted.call_end - submitted.call_start)[single_rows],
    )
    return pl.DataFrame(
        {
            "code": convert_to_ndarray(build_vocabulary(trace).code)[submitted.row[single_rows]],
            "length": length,
            "call": call,
        }
    )


def _list_short_kernels(names: Sequence[pl.Series], single_launches: pl.DataFrame) -> pl.DataFrame:
    """Returns kernels shorter than their launch, by name, the most time in calls first: `SHORT`."""
    short = pl.col("length") < pl.col("call")
    code_table = (
        single_launches.group_by(TRACE_COLUMN, "code", maintain_order=True)
        .agg(
            short.sum().alias("short_count"),
            pl.len().alias("kernel_count"),
            pl.col("length").filter(short).sum().alias("short_ns"),
            pl.col("call").filter(short).sum().alias("call_ns"),
            pl.col("length").sum().alias("kernel_ns"),
        )
        .filter(pl.col("short_count") > 0)
    )
    code_table = code_table.hstack([gather_by_trace(names, code_table, "code").alias("name")])
    return code_table.sort(TRACE_COLUMN, "call_ns", "name", descending=[False, True, False])
