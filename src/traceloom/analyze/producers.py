"""What did GPU work wait for that was told to wait for another stream?"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import polars as pl

from traceloom.analyze.gaps import Gaps, gpu_rows
from traceloom.analyze.intervals import Bools, Ints
from traceloom.analyze.waits import CALL, RECORD
from traceloom.model import Trace
from traceloom.model.arrays import column
from traceloom.model.category import LAUNCHES

_NONE = -1
_STREAM = ["device", "stream"]
_CLOCK_NS = 2_000  # a piece of work may seem to end this long after what waited for it began


class Producers(NamedTuple):
    """What the work after each gap waited for; rows of `events`, -1 where it is not known; arrays of shape (gaps,).

    Attributes:
        work: The GPU work that had to end first.
        wait: The record of the wait, or the call that asked for it.
        recorded: True where stream and event are taken from the record; else the work is inferred from its end.
    """

    work: Ints
    wait: Ints
    recorded: Bools


def producers(trace: Trace, gaps: Gaps, waited: Bools, near_ns: int) -> Producers:
    """Find the awaited work of the gaps that are waits.

    A recorded wait names the stream and the record of the event: the last work that was launched on that stream before
    the event was recorded is what was waited for; of several waits the one whose work ended last. Without a record it
    is the work of another stream that ended last before the gap, else the work of another device that ended within
    `near_ns` before the end of the gap.
    """
    nothing = np.full(waited.size, _NONE, dtype=np.int64)
    work, wait, recorded = nothing, nothing.copy(), np.zeros(waited.size, dtype=np.bool_)
    at = np.flatnonzero(waited)
    if not at.size:
        return Producers(work, wait, recorded)
    work[at] = np.where(gaps.same_stream[at], _last_elsewhere(trace, gaps, at, near_ns), gaps.before[at])
    wait[at] = _last_call(trace, gaps.launch[at])
    records = _recorded(trace)
    if records.height:
        index = np.searchsorted(records["after"].to_numpy(), gaps.after[at])
        index = np.minimum(index, records.height - 1)
        matched = records["after"].to_numpy()[index] == gaps.after[at]
        wait[at[matched]] = records["wait"].to_numpy()[index[matched]]
        matched &= records["producer_end"].to_numpy()[index] <= gaps.high[at] + _CLOCK_NS
        work[at[matched]] = records["producer"].to_numpy()[index[matched]]
        recorded[at[matched]] = True
    return Producers(work, wait, recorded)


def _last_elsewhere(trace: Trace, gaps: Gaps, at: Ints, near_ns: int) -> Ints:
    """The work of another device that ended last within `near_ns` before the end of each gap; -1 for none."""
    row = gpu_rows(trace)
    device = column(trace, "device", _NONE)[row]
    end = column(trace, "start_ns")[row] + np.maximum(column(trace, "duration_ns")[row], 0)
    out = np.full(at.size, _NONE, dtype=np.int64)
    if int(device.min(initial=0)) == int(device.max(initial=0)):
        return out
    for gap_device in np.unique(gaps.device[at]).tolist():
        own, others = np.flatnonzero(gaps.device[at] == gap_device), np.flatnonzero(device != gap_device)
        others = others[np.argsort(end[others], kind="stable")]
        last = np.searchsorted(end[others], gaps.high[at[own]], side="right") - 1
        has_work = np.flatnonzero(last >= 0)
        own, last = own[has_work], others[last[has_work]]
        near = end[last] > gaps.high[at[own]] - near_ns
        out[own[near]] = row[last[near]]
    return out


def _last_call(trace: Trace, launch: Ints) -> Ints:
    """The last call before each launch, on its thread, that made a stream wait; -1 for none."""
    calls = trace.events.lazy().filter(
        pl.col("category").is_in(LAUNCHES), pl.col("name").str.contains(CALL, literal=True)
    )
    waits = calls.select("lane", "event", "start_ns").collect()
    out = np.full(launch.size, _NONE, dtype=np.int64)
    lane, start = column(trace, "lane")[launch], column(trace, "start_ns")[launch]
    for (thread,), part in waits.group_by("lane"):
        own = np.flatnonzero((lane == thread) & (launch >= 0))
        last = np.searchsorted(part["start_ns"].to_numpy(), start[own], side="left") - 1
        out[own[last >= 0]] = part["event"].to_numpy()[last[last >= 0]]
    return out


def _recorded(trace: Trace) -> pl.DataFrame:
    """Recorded waits: after (work that waited, ascending), wait (row of the record), producer, producer_end."""
    waits = trace.syncs.filter(pl.col("kind") == RECORD)
    if not waits.height:
        return pl.DataFrame(
            schema={"after": pl.Int64, "wait": pl.Int64, "producer": pl.Int64, "producer_end": pl.Int64}
        )
    calls = (
        trace.events.filter(pl.col("category").is_in(LAUNCHES), pl.col("correlation").is_not_null())
        .select("correlation", pl.col("start_ns").alias("call_ns"))
        .unique("correlation", keep="first", maintain_order=True)
    )
    requests = (
        waits.select("event", "stream", "awaited_stream", "record_correlation")
        .join(trace.events.select("event", "device", "correlation", "start_ns"), on="event", how="left")
        .join(calls, on="correlation", how="left")
        .join(
            calls.rename({"correlation": "record_correlation", "call_ns": "recorded_ns"}),
            on="record_correlation",
            how="left",
        )
        .with_columns(pl.coalesce("call_ns", "start_ns").alias("wait_ns"))
        .with_columns(pl.coalesce("recorded_ns", "wait_ns").alias("recorded_ns"))
    )
    work = trace.gpu_work().select("event", "device", "stream", "launch", "start_ns", "duration_ns")
    work = work.with_columns(
        trace.events["start_ns"].gather(work["launch"]).alias("asked_ns"),
        (pl.col("start_ns") + pl.col("duration_ns").clip(lower_bound=0)).alias("producer_end"),
    ).filter(pl.col("asked_ns").is_not_null())
    after = work.select(*_STREAM, "asked_ns", pl.col("event").alias("after")).sort("asked_ns")
    made = work.select("device", pl.col("stream").alias("awaited_stream"), "asked_ns",
                       pl.col("event").alias("producer"), "producer_end").sort("asked_ns")  # fmt: skip
    return (
        requests.sort("wait_ns")
        .join_asof(
            after, left_on="wait_ns", right_on="asked_ns", by=_STREAM, strategy="forward", check_sortedness=False
        )
        .sort("recorded_ns")
        .join_asof(
            made,
            left_on="recorded_ns",
            right_on="asked_ns",
            by=["device", "awaited_stream"],
            strategy="backward",
            check_sortedness=False,
        )
        .filter(pl.col("after").is_not_null(), pl.col("producer").is_not_null())
        .sort("after", "producer_end")
        .unique("after", keep="last", maintain_order=True)
        .select("after", pl.col("event").alias("wait"), "producer", "producer_end")
        .cast(pl.Int64)
    )
