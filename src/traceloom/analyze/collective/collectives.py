"""Every collective of a trace: what it moved, how fast, over which link, and how much of it held compute up."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import polars as pl

from traceloom.analyze.blocking import blocking_calls
from traceloom.analyze.classify import Rule, gpu_work
from traceloom.analyze.collective.bandwidth import with_peaks, with_sizes
from traceloom.analyze.collective.calls import PhaseType, WhereType, communication_calls, sum_or_null
from traceloom.analyze.collective.kernel_names import with_names
from traceloom.analyze.intervals import Spans, coverage, union
from traceloom.analyze.per_step import per_step, whole_steps
from traceloom.analyze.remembered import of_each, per_trace
from traceloom.analyze.stacked import TRACE, of_events, stacked, unstacked
from traceloom.analyze.waits import stream_waits
from traceloom.array_types import Bools, Ints
from traceloom.errors import InputError
from traceloom.model import Session, Trace
from traceloom.model.arrays import column
from traceloom.model.frames import schema
from traceloom.model.result import Result
from traceloom.read.again import readable, stretches

CALL_SCHEMA = schema(
    "rank event where device stream step phase start_ns duration_ns kind backend name group",
    "group_size members sequence peer element_type in_bytes out_bytes in_splits out_splits",
    "size_bytes bus_factor algorithm_gb_per_s bus_gb_per_s link link_peak_gb_per_s link_fraction",
    "algorithm protocol name_certain channels exposed_ns blocking_ns launch launch_ns",
    {"where": WhereType, "phase": PhaseType, "members": pl.List(pl.Int32())},
    {"in_splits": pl.List(pl.Int64()), "out_splits": pl.List(pl.Int64())},
)
SUMMARY_KEYS = ("where", "kind", "group", "group_size", "size_bytes")
SUMMARY_SCHEMA = schema(
    *SUMMARY_KEYS,
    "count total_ns min_ns median_ns max_ns bus_gb_per_s best_bus_gb_per_s link_fraction",
    "exposed_ns blocking_ns mean_total_ns min_total_ns max_total_ns mean_call_count step_count",
    {"where": WhereType},
)

_SUBMITS = ("nccl", "rccl", "hccl", "xccl", "oneccl")  # back ends whose host calls only submit kernels
# Work that was ready starts this soon after what it waited for; later, something else held it back.
_PROMPT_NS = 30_000
# A host call that waits for a stream returns this soon after the stream's work is done.
_RETURN_NS = 100_000
_GRID = re.compile(rb'"grid"\s*:\s*\[\s*(\d{1,18})')
_MOST_BYTES = 256 << 20  # of text: to read more of it a second time is not worth this number


@dataclass(frozen=True)
class Collectives(Result):
    """The collectives of one trace. Definitions: docs/concepts/collectives.md.

    Attributes:
        calls: One row per communication kernel, and per collective that runs on a host thread, by start. `size_bytes`
            is the message that bandwidth is defined on; `algorithm_gb_per_s` and `bus_gb_per_s` (10^9 bytes/s) are
            over the whole duration, waiting for other ranks included; `link_fraction` is of the link's peak in one
            direction, null where the group may leave the host; `name_certain` says whether the library launches
            kernels of that name for nothing else; `exposed_ns` and `blocking_ns` are null on the host.
        summary: One row per place, kind, group and size, largest total first, with the spread of single calls
            (min_ns, median_ns, max_ns), the median and best bus bandwidth, and per whole step mean_total_ns,
            min_total_ns, max_total_ns, mean_call_count.
    """

    calls: pl.DataFrame
    summary: pl.DataFrame


def collectives(trace: Trace, rules: Iterable[Rule] = (), *, peak_gb_per_s: float | None = None) -> Collectives:
    """Describe every collective of a trace.

    Args:
        trace: One process's trace.
        rules: Kernel rules of the user's, before the built-in table.
        peak_gb_per_s: Peak of the link of one device in one direction, for groups of which it is not known.
    """
    if peak_gb_per_s is None and not rules:
        return _summed(trace)
    return next(iter(_collectives([trace], _rows([trace], tuple(rules), peak_gb_per_s))))


@of_each
def _summed(traces: Sequence[Trace]) -> Iterable[Collectives]:
    return _collectives(traces, [_without_rules(trace) for trace in traces])


def _collectives(traces: Sequence[Trace], calls: Sequence[pl.DataFrame]) -> Iterable[Collectives]:
    rows = stacked(calls)
    keys = [TRACE, *SUMMARY_KEYS]
    duration = pl.col("duration_ns")
    sums = rows.group_by(keys, maintain_order=True).agg(
        pl.len().alias("count"),
        duration.sum().alias("total_ns"),
        duration.min().alias("min_ns"),
        duration.median().cast(pl.Int64).alias("median_ns"),
        duration.max().alias("max_ns"),
        pl.col("bus_gb_per_s").median(),
        pl.col("bus_gb_per_s").max().alias("best_bus_gb_per_s"),
        pl.col("link_fraction").median(),
        sum_or_null("exposed_ns"),
        sum_or_null("blocking_ns"),
    )
    counted = rows.select(*keys, "step", duration.alias("total_ns"), pl.lit(1, pl.Int64).alias("call_count"))
    spread = per_step(counted, keys, ["total_ns", "call_count"], stacked(map(whole_steps, traces)))
    summary = sums.join(spread, on=keys, how="left", nulls_equal=True, maintain_order="left").sort(
        TRACE, "total_ns", "kind", "size_bytes", descending=[False, True, False, False], nulls_last=True
    )
    return map(Collectives, calls, unstacked(summary, traces, SUMMARY_SCHEMA))


def collectives_of(session: Session) -> pl.DataFrame:
    """The calls of all traces of a session in one frame, with `trace` (its place in `session.traces`) before them."""
    return pl.concat(
        [
            _without_rules(trace).select(pl.lit(number, pl.Int64).alias("trace"), pl.all())
            for number, trace in enumerate(session.traces)
        ]
    )


def _rows(
    traces: Sequence[Trace], rules: tuple[Rule, ...] = (), peak_gb_per_s: float | None = None
) -> list[pl.DataFrame]:
    calls = stacked(communication_calls(trace, rules) for trace in traces)
    # where kernels communicate, host calls that only submit them communicate nothing themselves
    on_device = pl.col("where") == "device"
    calls = calls.filter(on_device | ~on_device.any().over(TRACE) | ~pl.col("backend").is_in(_SUBMITS))
    if not calls.height:
        return [CALL_SCHEMA.to_frame() for _ in traces]
    duration = pl.col("end_ns") - pl.col("start_ns")
    submits = (pl.col("where") == "host") & pl.col("backend").is_in(_SUBMITS)  # its duration is not the transfer's
    # bytes per ns are 10^9 bytes per second
    rate = pl.when(duration > 0, ~submits).then(pl.col("size_bytes") / duration)
    calls = with_sizes(_with_channels(with_names(calls), traces)).with_columns(
        rate.alias("algorithm_gb_per_s"), (rate * pl.col("bus_factor")).alias("bus_gb_per_s")
    )
    calls = with_peaks(calls, traces, peak_gb_per_s)
    kernels = calls.filter(on_device)
    # Communication that compute does not hide, and the part of it that the next compute really waited for
    exposed_ns, blocking_ns = np.zeros((2, kernels.height), dtype=np.int64)
    work = stacked(gpu_work(trace, rules) for trace in traces)
    columns = [TRACE, "event", "device", "stream", "start_ns", "end_ns", "launch"]
    compute = work.filter(pl.col("category") == "compute")[columns]
    of_device = compute.partition_by(TRACE, "device", as_dict=True)
    for part in kernels.with_row_index("row").partition_by(TRACE, "device"):
        row = part["row"].to_numpy()
        number, device = part[[TRACE, "device"]].row(0)
        beside = of_device.get((number, device))
        start, end = part["start_ns"].to_numpy(), part["end_ns"].to_numpy()
        if beside is None:
            exposed_ns[row] = end - start
            continue
        spans = union(beside["start_ns"].to_numpy(), beside["end_ns"].to_numpy())
        exposed_ns[row] = end - start - coverage(spans, start, end)
        blocking_ns[row] = _blocking(traces[number], part, beside, spans)
    times = kernels[[TRACE, "event"]].hstack(
        [pl.Series("exposed_ns", exposed_ns), pl.Series("blocking_ns", blocking_ns)]
    )
    described = (
        calls.join(times, on=[TRACE, "event"], how="left", maintain_order="left")
        .with_columns(
            pl.Series("rank", [trace.rank for trace in traces], dtype=pl.Int32)[calls[TRACE]],
            duration.alias("duration_ns"),
            pl.col("blocking_ns").replace(-1, None),
            of_events(traces, calls, "launch", "start_ns").alias("launch_ns"),
        )
        .sort(TRACE, "start_ns", "event")
    )
    return unstacked(described, traces, CALL_SCHEMA)


_without_rules = per_trace(of_each(_rows))


def _with_channels(calls: pl.DataFrame, traces: Sequence[Trace]) -> pl.DataFrame:
    """Add `channels`: NCCL and RCCL launch one thread block per channel; null for other back ends and without a grid.

    The grid is in no column of a trace: it is read again from the file, in one pass and for the communication kernels
    alone; also null where the file is gone or above 256 MiB.
    """
    kernels = calls.filter(pl.col("where") == "device", pl.col("backend").is_in(["nccl", "rccl"])).sort(TRACE, "event")
    channels: list[tuple[int, int, int]] = []
    for number, (trace, own) in enumerate(zip(traces, unstacked(kernels, traces), strict=True)):
        if not own.height or not readable(trace) or trace.meta.file_bytes > _MOST_BYTES:
            continue
        in_file = own["event"][trace.sources["offset"][own["event"]].arg_sort()]
        try:
            for event, text in zip(in_file, stretches(trace, in_file.to_numpy()), strict=False):
                grid = _GRID.search(text)
                if grid:
                    channels.append((number, event, min(int(grid[1]), np.iinfo(np.int32).max)))
        except (InputError, OSError):
            pass
    table = pl.DataFrame(channels, {TRACE: pl.UInt32(), "event": pl.UInt32(), "channels": pl.Int32()}, orient="row")
    return calls.join(table, on=[TRACE, "event"], how="left", maintain_order="left")


def _blocking(trace: Trace, kernels: pl.DataFrame, compute: pl.DataFrame, spans: Spans) -> Ints:
    """Of the exposed time at the end of each kernel, what the compute that follows waited for."""
    start, end = kernels["start_ns"].to_numpy(), kernels["end_ns"].to_numpy()
    begins = compute["start_ns"].to_numpy()
    order = np.argsort(begins, kind="stable")
    begins = begins[order]
    after = np.searchsorted(begins, end, side="left")
    exists = after < begins.size
    following = order[np.minimum(after, begins.size - 1)]
    ends = np.append(np.iinfo(np.int64).min, spans.end)  # of the compute that began before, if any did (or took time)
    quiet = np.maximum(ends[np.searchsorted(spans.start, end, side="left")], start)
    open_end = quiet < end  # no compute runs when the kernel ends
    prompt = exists & open_end & (begins[np.minimum(after, begins.size - 1)] - end <= _PROMPT_NS)
    next_event = compute["event"].to_numpy()[following].astype(np.int64)
    # several kernels may have the same next compute: it is looked up once, and in the order of rows
    different, inverse = np.unique(next_event, return_inverse=True)
    waited = stream_waits(trace)[0][different]
    streams = compute["stream"].fill_null(-1).to_numpy()[following]
    same = streams == kernels["stream"].fill_null(-1).to_numpy()
    launch = compute["launch"].cast(pl.Int64).fill_null(-1).to_numpy()[following]
    called = column(trace, "start_ns")[np.maximum(launch, 0)]
    waits = same | waited[inverse]
    held = np.clip(end - np.maximum(quiet, called), 0, None)
    by_host, since = _host_waited(trace, launch, end)
    held_by_host = np.clip(end - np.maximum(quiet, since), 0, None)
    late = exists & open_end & ~prompt & by_host
    blocking = np.where(prompt & waits, np.where(called <= end, held, 0), 0)
    blocking = np.where((blocking == 0) & (prompt | late) & by_host, held_by_host, blocking)
    return np.where(prompt & (launch < 0), -1, blocking)


def _host_waited(trace: Trace, launch: Ints, end: Ints) -> tuple[Bools, Ints]:
    """Whether the launching thread was in a waiting call that ended with the kernel, and since when."""
    calls = np.flatnonzero(blocking_calls(trace))
    none = np.zeros(launch.size, dtype=np.bool_)
    if not calls.size:
        return none, end
    lane = column(trace, "lane").astype(np.int64)
    starts = column(trace, "start_ns")
    backs = starts[calls] + np.maximum(column(trace, "duration_ns")[calls], 0)
    waited, since = none.copy(), end.copy()
    lanes = np.where(launch >= 0, lane[np.maximum(launch, 0)], -1)
    for thread in np.unique(lanes[lanes >= 0]).tolist():
        own_calls = calls[lane[calls] == thread]
        if not own_calls.size:
            continue
        on_thread = np.flatnonzero(lanes == thread)
        back = backs[lane[calls] == thread]
        order = np.argsort(back, kind="stable")
        at = np.searchsorted(back[order], end[on_thread], side="left")
        inside = at < back.size
        call = order[np.minimum(at, back.size - 1)]
        begun = starts[own_calls[call]]
        launched = starts[launch[on_thread]]
        ok = inside & (begun < end[on_thread]) & (back[call] - end[on_thread] <= _RETURN_NS) & (launched >= back[call])
        waited[on_thread], since[on_thread] = ok, np.where(ok, begun, end[on_thread])
    return waited, since
