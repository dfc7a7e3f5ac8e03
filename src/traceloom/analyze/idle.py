"""Why was each GPU idle? Every idle nanosecond gets one cause.

A gap is time in a device's window in which no stream runs anything. The work that ends a gap tells why there was one:
its launch came late (then the host's doings until the launch are the causes), the launch itself took its time, or the
work was queued and waited, for some other work where it was told to. Exact definitions: docs/concepts/idle-time.md.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import polars as pl

from traceloom.analyze.classify import gpu_work
from traceloom.analyze.gaps import Gaps, copies, gaps, gpu_rows
from traceloom.analyze.host_wait import Stretches, split_by_activity
from traceloom.analyze.idle_causes import (
    CAUSES,
    DEPENDENCY,
    GRAPH_INTERNAL,
    KERNEL_TO_KERNEL,
    LAUNCH_LATENCY,
    NOT_RECORDED,
    UNEXPLAINED,
)
from traceloom.analyze.intervals import overlaps
from traceloom.analyze.remembered import per_trace
from traceloom.analyze.steps import tiles
from traceloom.analyze.waits import CALL, RECORD, asked, call_times, stream_waits
from traceloom.array_types import Bools, Ints
from traceloom.model import Trace
from traceloom.model.arrays import column, lookup, on_disk
from traceloom.model.category import LAUNCHES
from traceloom.model.frames import as_declared, schema
from traceloom.model.result import Result

CauseType = pl.Enum(list(CAUSES))
EVIDENCE = ("measured", "correlated", "inferred", "assumed")
EvidenceType = pl.Enum(EVIDENCE)
_CODES = {cause: code for code, cause in enumerate(CAUSES)}
_NONE = -1

# Longest pause that the hardware needs between two queued pieces of work: 99 % stay below 3 µs on NVIDIA and below
# 18 µs on AMD; none of some 30,000 in complete public traces was longer than 24 µs.
KERNEL_TO_KERNEL_NS = 30_000
# Longest time from the return of a launch call to the start of its work on an idle device that still is latency.
LAUNCH_LATENCY_NS = 100_000
# Work may seem to end this long after what waited for it began.
_CLOCK_NS = 2_000

GAP_SCHEMA = schema(
    "gap device start_ns duration_ns cause evidence before after launch step host_activity host_event producer wait",
    {"cause": CauseType, "evidence": EvidenceType},
)


@dataclass(frozen=True)
class Idle(Result):
    """Idle time of each device by cause; the time before the first and after the last GPU work is not in it.

    Attributes:
        gaps: The parts of each gap, one row per (gap, step, cause), by device and start: gap (number of the gap),
            device, start_ns (first nanosecond of the part), duration_ns (all time of that cause in that gap and step;
            the host's doings alternate, so a part need not be contiguous), cause, evidence, before and after (the GPU
            work around the gap), launch (call that submitted `after`), step, host_activity (the longest thing the host
            did in the part; null where it is not the host's or nothing is recorded).
        causes: device, step (null = outside all steps), cause, idle_ns, gap_count (gaps that have this cause).
        totals: device, cause, idle_ns, gap_count. Adds up to `idle_ns` of `gpu_time`, as does `causes` per step.
    """

    gaps: pl.DataFrame
    causes: pl.DataFrame
    totals: pl.DataFrame


@per_trace
def idle(trace: Trace) -> Idle:
    """Split the idle time of every device by cause."""
    all_gaps = gaps(trace)
    # Cut each gap in three: the host before the launch call, the launch, what came after
    low, high = all_gaps.low, all_gaps.high
    start, duration = (column(trace, name) for name in ("start_ns", "duration_ns"))
    caused = (all_gaps.launch >= 0) & all_gaps.first
    call = np.where(caused, start[all_gaps.launch], low) if start.size else low
    back = np.where(caused, call + np.maximum(duration[all_gaps.launch], 0), low) if start.size else low
    # a copy whose call waits for the end of the copy was submitted when the call began
    ended = start[all_gaps.after] + duration[all_gaps.after]
    waits = copies(trace, all_gaps.after) & (back >= ended) & (call < low)
    called = np.clip(call, low, high)
    returned = np.where(waits, low, np.clip(back, called, high))
    # a call that takes longer than work takes to begin keeps the host: it loads code, say
    called = np.where(~waits & (returned - called > LAUNCH_LATENCY_NS), returned, called)
    prompt = caused & ~waits & (back > low) & (high - returned <= LAUNCH_LATENCY_NS)
    taken = np.where(prompt, high, returned)
    steps = tiles(trace)

    # What the host did until its launch call.
    shared = overlaps(all_gaps.low, called, steps.spans)
    cut = Stretches(shared.left, lookup(steps.row, shared.right), shared.start, shared.end)
    lane = column(trace, "lane")[all_gaps.launch[cut.gap]].astype(np.int64)
    sure = pl.when("sure").then(EVIDENCE.index("correlated")).otherwise(EVIDENCE.index("inferred")).cast(pl.Int64)
    none = pl.lit(_NONE, dtype=pl.Int64)
    parts = [
        split_by_activity(trace, cut, lane, all_gaps.device[cut.gap]).select(
            "gap", "step_row", "start_ns", "duration_ns", "cause", sure.alias("evidence"), "activity",
            producer=none, wait=none,
        )
    ]  # fmt: skip

    # The launch; then the time in which the work was already submitted: work that waited gets its producer.
    nothing = np.full(all_gaps.low.size, _NONE, like=all_gaps.low)
    latency = np.full(all_gaps.low.size, _CODES[LAUNCH_LATENCY], like=all_gaps.low)
    correlated = np.full(all_gaps.low.size, EVIDENCE.index("correlated"), like=all_gaps.low)
    queued_cause, queued_evidence, waited = _queued(trace, all_gaps)
    awaited, wait = _producers(trace, all_gaps, waited)
    for start, end, cause, evidence, producer, wait_row in (
        (called, taken, latency, correlated, nothing, nothing),
        (taken, all_gaps.high, queued_cause, queued_evidence, awaited, wait),
    ):
        shared = overlaps(start, end, steps.spans)
        gap = shared.left
        parts.append(
            pl.DataFrame(
                {
                    "gap": gap,
                    "step_row": lookup(steps.row, shared.right),
                    "start_ns": shared.start,
                    "duration_ns": shared.end - shared.start,
                    "cause": cause[gap],
                    "evidence": evidence[gap],
                    "activity": nothing[gap],
                    "producer": producer[gap],
                    "wait": wait_row[gap],
                }
            )
        )
    rows = on_disk(trace, _rows(trace, all_gaps, parts))
    causes, totals = (  # the largest cause first
        rows.lazy()
        .group_by(*keys, "cause")
        .agg(pl.col("duration_ns").sum().alias("idle_ns"), pl.col("gap").n_unique().cast(pl.Int64).alias("gap_count"))
        .sort(*keys, "idle_ns", "cause", descending=[*(False for _ in keys), True, False], nulls_last=True)
        .collect()
        for keys in (["device", "step"], ["device"])
    )
    return Idle(rows, causes, totals)


def _queued(trace: Trace, all_gaps: Gaps) -> tuple[Ints, Ints, Bools]:
    """Per gap: cause and evidence (as numbers) of the time after the work was submitted, and whether it is a wait."""
    waited, recorded = stream_waits(trace)
    has_wait = waited[all_gaps.after]
    short = all_gaps.high - all_gaps.low <= KERNEL_TO_KERNEL_NS
    work = gpu_rows(trace)
    ends = np.sort(trace.events["start_ns"].to_numpy()[work] + trace.events["duration_ns"].to_numpy()[work])
    earlier = np.searchsorted(ends, all_gaps.high - KERNEL_TO_KERNEL_NS, side="right")
    something_ended = np.searchsorted(ends, all_gaps.high, side="right") > earlier
    # A short gap after work of the same stream comes from stream order; a long one is a wait only if something ended
    # just before it did: all streams of this device were idle, so nothing on it could have been awaited.
    waited = has_wait & np.where(short, ~all_gaps.same_stream, something_ended | recorded)
    choices = (
        (all_gaps.launch < 0, NOT_RECORDED, None),
        (~all_gaps.first, GRAPH_INTERNAL, "correlated"),
        (waited, DEPENDENCY, "measured" if recorded else "inferred"),
        (short, KERNEL_TO_KERNEL, "inferred"),
        (np.ones_like(short), UNEXPLAINED, "assumed"),
    )
    chosen = np.select([choice[0] for choice in choices], range(len(choices)))
    causes, evidence = [choice[1] for choice in choices], [choice[2] for choice in choices]
    return (
        lookup(np.array([_CODES[cause] for cause in causes]), chosen),
        np.array([_NONE if name is None else EVIDENCE.index(name) for name in evidence])[chosen],
        chosen == causes.index(DEPENDENCY),
    )


def _producers(trace: Trace, gaps: Gaps, waited: Bools) -> tuple[Ints, Ints]:
    """What the work after those gaps that are waits had waited for; rows of `events`, -1 for none; shape (gaps,).

    A recorded wait names the stream and the record of the event: the last work that was launched on that stream before
    the event was recorded is what was waited for; of several waits the one whose work ended last. Without a record it
    is the work of another stream that ended last before the gap, else the work of another device that ended shortly
    before the end of the gap.

    Returns:
        The GPU work that had to end first, and the record of the wait, or the last call before the launch, on its
        thread, that asked for one.
    """
    producer, wait = (np.full(waited.size, _NONE, dtype=np.int64) for _ in range(2))
    at = np.flatnonzero(waited)
    if not at.size:
        return producer, wait
    producer[at] = np.where(gaps.same_stream[at], _NONE, gaps.before[at])
    row = gpu_rows(trace)
    device = column(trace, "device", _NONE)[row]
    if int(device.min(initial=0)) != int(device.max(initial=0)):
        end = column(trace, "start_ns")[row] + np.maximum(column(trace, "duration_ns")[row], 0)
        alone = at[gaps.same_stream[at]]
        for gap_device in np.unique(gaps.device[alone]).tolist():
            own, others = alone[gaps.device[alone] == gap_device], np.flatnonzero(device != gap_device)
            others = others[np.argsort(end[others], kind="stable")]
            last = np.searchsorted(end[others], gaps.high[own], side="right") - 1
            own, last = own[last >= 0], others[last[last >= 0]]
            near = end[last] > gaps.high[own] - KERNEL_TO_KERNEL_NS
            producer[own[near]] = row[last[near]]

    launch = gaps.launch[at]
    lane, start = column(trace, "lane")[launch], column(trace, "start_ns")[launch]
    calls = trace.events.lazy().filter(
        pl.col("category").is_in(LAUNCHES), pl.col("name").str.contains(CALL, literal=True)
    )
    for part in calls.select("lane", "event", "start_ns").collect().partition_by("lane"):
        own = np.flatnonzero((lane == part["lane"][0]) & (launch >= 0))
        last = np.searchsorted(part["start_ns"].to_numpy(), start[own], side="left") - 1
        wait[at[own[last >= 0]]] = part["event"].to_numpy()[last[last >= 0]]

    records = _recorded_waits(trace)
    if records.height:
        index = np.searchsorted(records["after"].to_numpy(), gaps.after[at])
        index = np.minimum(index, records.height - 1)
        matched = records["after"].to_numpy()[index] == gaps.after[at]
        wait[at[matched]] = records["wait"].to_numpy()[index[matched]]
        matched &= records["producer_end"].to_numpy()[index] <= gaps.high[at] + _CLOCK_NS
        producer[at[matched]] = records["producer"].to_numpy()[index[matched]]
    return producer, wait


def _rows(trace: Trace, all_gaps: Gaps, frames: list[pl.DataFrame]) -> pl.DataFrame:
    """The parts with names for numbers, by device and start; `frames` is emptied."""
    parts = pl.concat(frames).sort("gap", "start_ns", "cause")
    frames.clear()
    gap = parts["gap"].to_numpy()
    activity = _or_null(parts["activity"].to_numpy())
    return pl.DataFrame(
        {
            "gap": gap,
            "device": _or_null(all_gaps.device[gap]),
            "start_ns": parts["start_ns"],
            "duration_ns": parts["duration_ns"],
            "cause": pl.Series(list(CAUSES), dtype=CauseType)[parts["cause"]],
            "evidence": pl.Series([*EVIDENCE, None], dtype=EvidenceType).gather(
                parts["evidence"] % (len(EVIDENCE) + 1)
            ),
            "before": all_gaps.before[gap],
            "after": all_gaps.after[gap],
            "launch": _or_null(all_gaps.launch[gap]),
            "step": trace.steps["step"][_or_null(parts["step_row"].to_numpy()).cast(pl.UInt32)],
            "host_activity": trace.events["name"][activity.cast(pl.UInt32)],
            "host_event": activity,
            "producer": _or_null(parts["producer"].to_numpy()),
            "wait": _or_null(parts["wait"].to_numpy()),
        }
    ).pipe(as_declared, GAP_SCHEMA)


def _or_null(rows: Ints) -> pl.Series:
    return pl.Series(rows).set(pl.Series(rows < 0), None)


def _recorded_waits(trace: Trace) -> pl.DataFrame:
    """Recorded waits: after (work that waited, ascending), wait (row of the record), producer, producer_end."""
    waits = trace.syncs.filter(pl.col("kind") == RECORD)
    if not waits.height:
        return pl.DataFrame(schema=dict.fromkeys(("after", "wait", "producer", "producer_end"), pl.Int64))
    recorded = call_times(trace).select(record_correlation="correlation", recorded_ns="call_ns")
    requests = (
        asked(trace, waits[["event", "stream", "awaited_stream", "record_correlation"]])
        .join(recorded, on="record_correlation", how="left")
        .with_columns(pl.coalesce("recorded_ns", "wait_ns").alias("recorded_ns"))
    )
    work = gpu_work(trace)[["event", "device", "stream", "launch", "end_ns"]]
    work = work.with_columns(trace.events["start_ns"].gather(work["launch"]).alias("asked_ns")).drop_nulls("asked_ns")
    after = work.select("device", "stream", "asked_ns", pl.col("event").alias("after")).sort("asked_ns")
    made = work.select("device", pl.col("stream").alias("awaited_stream"), "asked_ns",
                       pl.col("event").alias("producer"), producer_end="end_ns").sort("asked_ns")  # fmt: skip
    return (
        requests.sort("wait_ns")
        .join_asof(
            after,
            left_on="wait_ns",
            right_on="asked_ns",
            by=["device", "stream"],
            strategy="forward",
            check_sortedness=False,
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
