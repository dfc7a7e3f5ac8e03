"""What was recorded beside the traces, put into them, so that it is drawn on the same time axis as their events.

Only views do this: no analysis takes stack samples for events, or telemetry for counters of the trace.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from itertools import groupby
from operator import itemgetter
from typing import Any, NamedTuple

import msgspec
import numpy as np
import polars as pl

from traceloom.model import Session, Trace
from traceloom.model.category import OTHER
from traceloom.model.schema import SCHEMAS
from traceloom.report.window import renumbered

_PREFIX = "traceloom_"
# Of some hundred series those whose shape explains a timeline; the others are in the telemetry file.
_DRAWN = (
    "gpu_power_watts", "gpu_sm_active_ratio", "gpu_dram_active_ratio", "gpu_busy_ratio",
    "host_cpu_seconds_total", "host_network_bytes_total", "rdma_bytes_total", "host_disk_bytes_total",
    "process_cpu_seconds_total", "process_disk_bytes_total",
)  # fmt: skip
# A call as it is shown: the function first, and of its file what is not the place where packages, or programs, are.
_SHORTER = (
    (r"^.*/(?:site-packages|dist-packages|lib/python3\.\d+)/", ""),
    (r"^/.*/", ""),
    (r"^(.+?)\((\d+)\): (.+)$", "$3 ($1:$2)"),
)
_SPANS = {
    "name": pl.String, "start_ns": pl.Int64, "nested_end_ns": pl.Int64, "depth": pl.UInt16, "parent": pl.Int64,
    "lane": pl.UInt32,
}  # fmt: skip
_IDLE = ("idle", "iowait")
_REFERENCES = ("parent", "op", "launch")


class _Span(NamedTuple):
    """A call that was seen; `caller` is its number among those of the thread."""

    name: str
    start_ns: int
    end_ns: int
    depth: int
    caller: int | None


def with_beside(session: Session) -> Session:
    """The session with stack samples as spans of lanes of their own; telemetry and allocated memory as counters.

    All are cut to the time of the trace. The counters of a host stand in the first of its traces; counters that only
    grow become rates per second.
    """
    if not session.samples.height and not session.telemetry.height and not session.allocations.height:
        return session
    traces, hosts = [], set()
    for trace in session.traces:
        if trace.events.height:
            if trace.meta.host not in hosts:
                trace = _with_telemetry(trace, session.telemetry)  # noqa: PLW2901
            hosts.add(trace.meta.host)
            of_rank = pl.col("rank").eq_missing(trace.rank)
            trace = _with_allocations(trace, session.allocations.filter(of_rank))  # noqa: PLW2901
            trace = _with_samples(trace, session.samples.filter(of_rank))  # noqa: PLW2901
        traces.append(trace)
    return replace(session, traces=tuple(traces))


def _with_samples(trace: Trace, samples: pl.DataFrame) -> Trace:
    spans = [
        (*span, len(trace.lanes) + lane)
        for lane, (_, rows) in enumerate(
            groupby(samples.select("thread", "time_ns", "period_ns", "stack").iter_rows(), key=itemgetter(0))
        )
        for span in _spans((row[1:] for row in rows), trace.start_ns, trace.end_ns)
    ]
    if not spans:
        return trace
    of_spans = pl.DataFrame(spans, schema=_SPANS, orient="row")
    for pattern, shorter in _SHORTER:
        of_spans = of_spans.with_columns(pl.col("name").str.replace(pattern, shorter))
    first = trace.events.height
    # A parent is the number of a span in its lane, from 0.
    begins = of_spans.with_row_index("at").group_by("lane", maintain_order=True).agg(pl.col("at").min().alias("base"))
    of_spans = of_spans.join(begins, on="lane", how="left", maintain_order="left").with_columns(
        parent=(pl.col("parent") + pl.col("base").cast(pl.Int64) + first).cast(pl.UInt32),
        category=pl.lit(OTHER), duration_ns=pl.col("nested_end_ns") - pl.col("start_ns"),
    )  # fmt: skip
    schema = SCHEMAS["events"]
    added = of_spans.select(
        (pl.col(name) if name in of_spans.columns else pl.lit(None)).cast(kind).alias(name)
        for name, kind in schema.items()
    ).with_columns(event=pl.int_range(first, first + pl.len(), dtype=pl.UInt32))
    events = pl.concat([trace.events, added])
    order = np.argsort(events["start_ns"].to_numpy(), kind="stable")  # those of the trace keep their order
    row = np.empty(events.height, dtype=np.int64)
    row[order] = np.arange(events.height)
    events = renumbered(events[order].with_columns(event=pl.int_range(pl.len(), dtype=pl.UInt32)), row, _REFERENCES)
    frames: dict[str, Any] = {
        name: renumbered(frame, row, ("event",))
        for name, frame in trace.frames().items()
        if name != "events" and "event" in frame.columns
    }
    if trace.sources.height == first:  # a row for each event, found by its number
        nowhere = added.select("event", offset=pl.lit(0, pl.Int64), length=pl.lit(0, pl.Int32))
        sources = pl.concat([trace.sources, nowhere])[order]
        frames["sources"] = sources.with_columns(event=pl.int_range(pl.len(), dtype=pl.UInt32))
    frames["flows"] = renumbered(trace.flows, row, ("source", "target"))
    frames["allocations"] = renumbered(trace.allocations, row, ("op",))
    lanes = _lanes(samples, of_spans, len(trace.lanes))
    return replace(trace, events=events, lanes=pl.concat([trace.lanes, lanes]), **frames)


def _spans(samples: Iterable[tuple[int, int, list[str]]], low: int, high: int) -> list[_Span]:
    """Calls from the samples of a thread (time, period, stack), in order of their start, between two times.

    A call goes on for as long as it is seen in sample after sample with the same callers.
    """
    spans: list[_Span] = []
    open_calls: list[int] = []  # numbers of spans, the outermost first
    reached = low
    for time_ns, period_ns, stack in samples:
        start, end = max(time_ns, reached), min(time_ns + period_ns, high)
        if end <= start:
            continue
        same = 0
        if start == reached:
            while same < min(len(open_calls), len(stack)) and spans[open_calls[same]].name == stack[same]:
                same += 1
        del open_calls[same:]
        for depth in range(same, len(stack)):
            caller = open_calls[-1] if open_calls else None
            open_calls.append(len(spans))
            spans.append(_Span(stack[depth], start, end, depth, caller))
        for number in open_calls:
            spans[number] = spans[number]._replace(end_ns=end)
        reached = end
    return spans


def _lanes(samples: pl.DataFrame, spans: pl.DataFrame, first: int) -> pl.DataFrame:
    counted = spans.group_by("lane").agg(
        events=pl.len(), busy_ns=pl.col("duration_ns").filter(pl.col("depth") == 0).sum()
    )
    name = pl.when(pl.col("thread_name") == "").then(pl.format("thread {}", "thread")).otherwise("thread_name")
    threads = samples.group_by("thread", maintain_order=True).agg(pl.col("thread_name").first())
    rows = threads.with_row_index("lane", offset=first)
    rows = rows.with_columns(kind=pl.lit("host"), name=pl.format("stacks · {}", name))
    rows = rows.join(counted, on="lane", how="left", maintain_order="left").with_columns(
        pl.col("events", "busy_ns").fill_null(0)
    )
    # Without a process it stands behind the threads of the trace, and is none of them.
    return rows.select(
        (pl.col(name) if name in rows.columns else pl.lit(None)).cast(kind).alias(name)
        for name, kind in SCHEMAS["lanes"].items()
    )


def _with_telemetry(trace: Trace, telemetry: pl.DataFrame) -> Trace:
    hosts = telemetry["host"].unique().to_list()
    own = telemetry if len(hosts) == 1 else telemetry.filter(pl.col("host") == (trace.meta.host or ""))
    chosen = own.filter(pl.col("metric").is_in([_PREFIX + name for name in _DRAWN]))
    curves = []
    for (metric, labels, kind), curve in chosen.group_by("metric", "labels", "kind", maintain_order=True):
        values = msgspec.json.decode(str(labels), type=dict[str, str])
        if values.get("mode") in _IDLE or values.get("interface") == "lo":
            continue
        name = str(metric).removeprefix(_PREFIX)
        curve = curve.unique("time_ns", keep="last", maintain_order=True)  # noqa: PLW2901
        if kind == "counter":
            # What grew between two readings is known at the second; a value holds from its time on.
            rate = pl.col("value").diff().shift(-1) / pl.col("time_ns").diff().shift(-1) * 1e9
            curve = curve.with_columns(value=rate).drop_nulls("value").filter(pl.col("value") >= 0)  # noqa: PLW2901
            name = name.removesuffix("_total") + "/s"
        curves.append((name, " ".join(values.values()), curve))
    return _with_counters(trace, curves)


def _with_allocations(trace: Trace, allocations: pl.DataFrame) -> Trace:
    """The bytes that each allocator has given out: as it says itself, else since the recording began."""
    curves = []
    for (device,), events in allocations.group_by("device_name", maintain_order=True):
        value = pl.coalesce("allocated_bytes", pl.col("bytes").cum_sum()).cast(pl.Float64).alias("value")
        curves.append(("allocated_bytes", str(device), events.select("time_ns", value)))
    return _with_counters(trace, curves)


def _with_counters(trace: Trace, curves: list[tuple[str, str, pl.DataFrame]]) -> Trace:
    """The trace with curves (name, key, values by time) among its counters, cut to its time."""
    added = []
    for name, key, curve in curves:
        # The last value before the trace holds at its start.
        before = (
            curve.filter(pl.col("time_ns") < trace.start_ns)
            .tail(1)
            .with_columns(time_ns=pl.lit(trace.start_ns, dtype=pl.Int64))
        )
        inside = pl.concat([before, curve.filter(pl.col("time_ns").is_between(trace.start_ns, trace.end_ns))])
        added.append(inside.select("time_ns", "value", name=pl.lit(name), key=pl.lit(key)))
    if not added:
        return trace
    rows = pl.concat(added)
    rows = rows.select(
        (pl.col(name) if name in rows.columns else pl.lit(None)).cast(kind).alias(name)
        for name, kind in SCHEMAS["counters"].items()
    )
    return replace(trace, counters=pl.concat([trace.counters, rows]).sort("time_ns", maintain_order=True))
