"""Idle time of devices by cause, the activity of the host meanwhile, and the longest gaps.

A gap is time in a device's window in which no stream runs anything. The work that ends a gap
determines its cause: its launch came late (then the host's activities until the launch are the
causes), the launch itself took its time, or the work was queued and waited, possibly for other
work. Exact definitions: docs/concepts/idle-time.md.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import polars as pl

from traceloom.analyze.ancestry import build_forest, build_host_segments
from traceloom.analyze.gpu_work import (
    STREAM_WAIT_CALL,
    STREAM_WAIT_RECORD,
    IdleGaps,
    add_wait_times,
    collect_call_times,
    find_gpu_event_rows,
    find_idle_gaps,
    find_stream_waits,
    find_work_behind_unrecorded,
    is_copy,
)
from traceloom.analyze.host_events import (
    BLOCKING_CALL,
    DEVICE_ALLOCATION_PATTERN,
    LAUNCH,
    LOADING,
    OP,
    PYTHON,
    classify_activity,
    classify_events,
    mark_device_setup_calls,
)
from traceloom.analyze.host_time import find_main_lane
from traceloom.analyze.intervals import Spans, find_overlaps
from traceloom.analyze.kernel_rules import select_gpu_work
from traceloom.analyze.names import build_vocabulary
from traceloom.analyze.steps import build_device_tiles, list_told_steps
from traceloom.trace.array_types import Bools, Ints
from traceloom.trace.arrays import gather_rows, get_event_column, move_columns_to_disk
from traceloom.trace.batch import (
    TRACE_COLUMN,
    cache_per_trace,
    concatenate_by_trace,
    gather_event_column,
    split_by_trace,
)
from traceloom.trace.frames import Result, build_schema, cast_to_schema
from traceloom.trace.trace import Trace
from traceloom.trace.vocabulary import LAUNCHES

HOST_CAUSES = {
    "host_data_loading": "the host waited for or made the next batch",
    "host_garbage_collection": "Python collected garbage",
    "host_lock": "the host waited for a lock",
    "host_setup": "the host loaded code onto the device or set it up",
    "host_allocation": "the host took memory from the device or gave it back",
    "host_blocking_call": "the host stood in a call that waits",
    "host_launch": "the host was in runtime calls",
    "host_op": "the host worked inside framework operators",
    "host_python": "the host ran Python",
    "host_unobserved": "nothing is recorded of what the host did",
}
"""Activities of the host when a launch came late."""

LAUNCH_LATENCY = "launch_latency"
DEPENDENCY = "dependency"
KERNEL_TO_KERNEL = "kernel_to_kernel"
GRAPH_INTERNAL = "graph_internal"
UNEXPLAINED = "unexplained"
NOT_RECORDED = "launch_not_recorded"
CAUSES = {
    **HOST_CAUSES,
    LAUNCH_LATENCY: "the launch call ran, and the GPU took up the work",
    DEPENDENCY: "launched in time, but ordered after another stream",
    KERNEL_TO_KERNEL: "launched in time; the GPU's own pause between two pieces of work",
    GRAPH_INTERNAL: "between two pieces of work of one graph launch",
    UNEXPLAINED: "launched in time, not ordered after another stream, and late all the same",
    NOT_RECORDED: "launched before the recording began, or behind such work, or the launch was lost",
}
"""Every cause with its meaning in a few words."""

_HOST_CAUSE_NAMES = list(HOST_CAUSES)
_CAUSE_BY_ACTIVITY = {
    BLOCKING_CALL: _HOST_CAUSE_NAMES.index("host_blocking_call"),
    LAUNCH: _HOST_CAUSE_NAMES.index("host_launch"),
    OP: _HOST_CAUSE_NAMES.index("host_op"),
    PYTHON: _HOST_CAUSE_NAMES.index("host_python"),
}
_UNOBSERVED = len(_HOST_CAUSE_NAMES) - 1
# Names of garbage collections in recordings: Python's own event, annotations of it, and calls of
# `gc.collect`.
GARBAGE_COLLECTION_PATTERN = (
    r"^(Python )?GC\b|^gc($|[.: (])|^garbage[ _]collect"
    r"|^<built-in (function|method) collect( of module '?gc'?.*)?>$|(^|/)gc\.py\(\d+\): "
)
# Waits for a lock, a condition or a semaphore; `run_backward` and synchronisations are not locks.
LOCK_PATTERN = (
    r"^<built-in method (acquire|__enter__|_acquire_restore) of _?(thread|multiprocessing|threading)\."
    r"|(^|/)threading\.py\(\d+\): (acquire|wait|wait_for|_wait_for_tstate_lock|_acquire_restore|join)$"
    r"|(^|/)(multiprocessing/(synchronize|queues)|queue)\.py\(\d+\): (acquire|__enter__|wait|get)$"
    r"|\bLock\.acquire\b|(?i:\bfutex|pthread_(mutex|rwlock|cond)_[a-z_]*(lock|wait)|\bsem_(timed)?wait\b)"
)


class GapIntervals(NamedTuple):
    """Contiguous parts of gaps, each in one step, by gap and start; arrays of one length.

    Attributes:
        gap: Row of the gap.
        step_row: Row of the step in `trace.steps`; -1 outside.
        start: Starts.
        end: Ends, > starts.
    """

    gap: Ints
    step_row: Ints
    start: Ints
    end: Ints


class _WaitParts(NamedTuple):
    """Parts of intervals with one innermost host event each; arrays of one length.

    Attributes:
        part: Row of the interval.
        owner: Position of the event in the forest; -1 where none is open.
        start: Starts.
        end: Ends.
        other: True where the event is the main thread's, not the launching thread's.
    """

    part: Ints
    owner: Ints
    start: Ints
    end: Ints
    other: Bools


def split_by_activity(
    trace: Trace, waiting: GapIntervals, lane: Ints, device: Ints
) -> pl.DataFrame:
    """Splits time in which the GPU waited for a launch by the activity of the launching thread.

    Where the launching thread has nothing open (an autograd thread before its first work, for
    example), the activity of the main thread is used instead, and is not sure.

    Args:
        trace: One process's trace.
        waiting: The time until the launches.
        lane: Lane of the launching thread of each interval.
        device: Device of each interval; those of one device are disjoint.

    Returns:
        Columns gap, step_row, start_ns, duration_ns, cause (number in HOST_CAUSES), sure, activity
        (row of the longest innermost event, -1 where none is open); durations add up to those of
        `waiting`.
    """
    tree = build_forest(trace)
    wait_parts = _split_by_innermost_event(trace, waiting, lane, device)
    cause = np.full(wait_parts.owner.size, _UNOBSERVED)
    observed = wait_parts.owner >= 0
    # The cause of each host event, by itself and its enclosing events.
    vocabulary, activities = build_vocabulary(trace), classify_activity(trace)
    cause_of = np.full(tree.row.size, _UNOBSERVED, like=tree.row)
    for code, number in _CAUSE_BY_ACTIVITY.items():
        cause_of[activities == code] = number
    for pattern, name in (
        (DEVICE_ALLOCATION_PATTERN, "host_allocation"),
        (LOCK_PATTERN, "host_lock"),
        (GARBAGE_COLLECTION_PATTERN, "host_garbage_collection"),
    ):
        matching = vocabulary.matching(pattern)
        if matching.any():
            cause_of[
                tree.outermost_or_self(gather_rows(matching, vocabulary.code[tree.row])) >= 0
            ] = _HOST_CAUSE_NAMES.index(name)
    cause_of[mark_device_setup_calls(trace)[tree.row]] = _HOST_CAUSE_NAMES.index("host_setup")
    cause_of[tree.outermost_or_self(classify_events(trace).phase == LOADING) >= 0] = (
        _HOST_CAUSE_NAMES.index("host_data_loading")
    )
    cause[observed] = cause_of[wait_parts.owner[observed]]
    rows = tree.row[wait_parts.owner] if tree.row.size else wait_parts.owner
    event_row = np.where(observed, rows, -1)
    length = wait_parts.end - wait_parts.start
    kind = wait_parts.part * len(_HOST_CAUSE_NAMES) + cause
    order = np.lexsort((-length, kind))  # The longest of each part and cause first.
    first = np.flatnonzero(np.diff(kind[order], prepend=-1))
    part = wait_parts.part[order[first]]
    sure = ~wait_parts.other & (cause != _UNOBSERVED)
    return pl.DataFrame(
        {
            "gap": waiting.gap[part],
            "step_row": waiting.step_row[part],
            "start_ns": np.minimum.reduceat(wait_parts.start[order], first),
            "duration_ns": np.add.reduceat(length[order], first),
            "cause": cause[order[first]],
            "sure": np.logical_and.reduceat(sure[order], first),
            "activity": event_row[order[first]],
        }
    )


def _split_by_innermost_event(
    trace: Trace, waiting: GapIntervals, lane: Ints, device: Ints
) -> _WaitParts:
    """Cuts the intervals at every change of the innermost event of the launching thread.

    Where that thread has nothing open, the main thread's events are used. The main thread's wait
    for autograd's threads does not count: those are the launching threads.
    """
    nothing = np.zeros(0, dtype=np.int64)
    parts = [_WaitParts(nothing, nothing, nothing, nothing, np.zeros(0, dtype=np.bool_))]
    tree, segments, main = build_forest(trace), build_host_segments(trace), find_main_lane(trace)

    def on_lane(lane_number: int, part: Ints, spans: Spans) -> _WaitParts:
        rows = np.flatnonzero(segments.lane == lane_number)
        shared = find_overlaps(segments.start_ns[rows], segments.end_ns[rows], spans)
        owner = segments.owner[rows[shared.left]]
        return _WaitParts(
            part[shared.right],
            owner,
            shared.start,
            shared.end,
            np.zeros(owner.size, dtype=np.bool_),
        )

    pair = device * (int(lane.max(initial=0)) + 1) + lane
    for group in np.unique(pair):
        part = np.flatnonzero(pair == group)
        launch_lane = int(lane[part[0]])
        lane_parts = on_lane(launch_lane, part, Spans(waiting.start[part], waiting.end[part]))
        if main is None or launch_lane == main:
            parts.append(lane_parts)
            continue
        blank = np.flatnonzero(lane_parts.owner < 0)
        blank = blank[np.argsort(lane_parts.start[blank], kind="stable")]
        main_parts = on_lane(
            main, lane_parts.part[blank], Spans(lane_parts.start[blank], lane_parts.end[blank])
        )
        names = trace.events["name"][tree.row[np.maximum(main_parts.owner, 0)]]
        counts = (main_parts.owner >= 0) & ~names.str.starts_with(
            "<built-in method run_backward"
        ).to_numpy()
        has_owner = lane_parts.owner >= 0
        parts.append(
            _WaitParts(
                lane_parts.part[has_owner],
                lane_parts.owner[has_owner],
                lane_parts.start[has_owner],
                lane_parts.end[has_owner],
                lane_parts.other[has_owner],
            )
        )
        parts.append(
            main_parts._replace(owner=np.where(counts, main_parts.owner, -1), other=counts)
        )
    return _WaitParts(*(np.concatenate(arrays) for arrays in zip(*parts, strict=True)))


CauseType = pl.Enum(list(CAUSES))
EVIDENCE = ("measured", "correlated", "inferred", "assumed")
EvidenceType = pl.Enum(EVIDENCE)
_CAUSE_CODES = {cause: code for code, cause in enumerate(CAUSES)}
_NONE = -1

# Longest pause that the hardware needs between two queued pieces of work: 99 % are below 3 µs on
# NVIDIA and below 18 µs on AMD; none of some 30,000 in complete public traces was longer than 24
# µs.
KERNEL_TO_KERNEL_NS = 30_000
# Longest time from the return of a launch call to the start of its work on an idle device that
# still is latency.
LAUNCH_LATENCY_NS = 100_000
# Work may seem to end this long after what waited for it began.
_CLOCK_TOLERANCE_NS = 2_000

GAP_SCHEMA = build_schema(
    "gap device start_ns duration_ns cause evidence before after launch step host_activity host_event producer wait",
    {"cause": CauseType, "evidence": EvidenceType},
)


@dataclass(frozen=True)
class Idle(Result):
    """Idle time of each device by cause, without the time before the first and after the last GPU
    work.

    Attributes:
        gaps: The parts of each gap, one row per (gap, step, cause), by device and start: gap
            (number of the gap), device, start_ns (first nanosecond of the part), duration_ns (all
            time of that cause in that gap and step; the host's activities alternate, so a part need
            not be contiguous), cause, evidence, before and after (the GPU work around the gap),
            launch (call that submitted `after`), step, host_activity (the longest activity of the
            host in the part; null where the cause is not the host's or nothing is recorded).
        causes: device, step (null = outside all steps), cause, idle_ns, gap_count (gaps that have
            this cause).
        totals: device, cause, idle_ns, gap_count. Adds up to `idle_ns` of `gpu_time`, as does
            `causes` per step.
    """

    gaps: pl.DataFrame
    causes: pl.DataFrame
    totals: pl.DataFrame


@cache_per_trace
def idle(trace: Trace) -> Idle:
    """Splits the idle time of every device by cause."""
    all_gaps = find_idle_gaps(trace)
    # Cut each gap in three: the host before the launch call, the launch, and the time after.
    low, high = all_gaps.low, all_gaps.high
    start, duration = (get_event_column(trace, name) for name in ("start_ns", "duration_ns"))
    caused = (all_gaps.launch >= 0) & all_gaps.first
    call = np.where(caused, start[all_gaps.launch], low) if start.size else low
    back = (
        np.where(caused, call + np.maximum(duration[all_gaps.launch], 0), low)
        if start.size
        else low
    )
    # A copy whose call waits for the end of the copy was submitted when the call began.
    ended = start[all_gaps.after] + duration[all_gaps.after]
    waits = is_copy(trace, all_gaps.after) & (back >= ended) & (call < low)
    called = np.clip(call, low, high)
    returned = np.where(waits, low, np.clip(back, called, high))
    # A call that takes longer than work takes to begin keeps the host busy: it loads code, for
    # example.
    called = np.where(~waits & (returned - called > LAUNCH_LATENCY_NS), returned, called)
    prompt = caused & ~waits & (back > low) & (high - returned <= LAUNCH_LATENCY_NS)
    queued_ns = np.where(prompt, high, returned)
    steps = build_device_tiles(trace)

    # The activity of the host until its launch call.
    shared = find_overlaps(all_gaps.low, called, steps.spans)
    cut = GapIntervals(shared.left, gather_rows(steps.row, shared.right), shared.start, shared.end)
    lane = get_event_column(trace, "lane")[all_gaps.launch[cut.gap]].astype(np.int64)
    sure = (
        pl.when("sure")
        .then(EVIDENCE.index("correlated"))
        .otherwise(EVIDENCE.index("inferred"))
        .cast(pl.Int64)
    )
    none = pl.lit(_NONE, dtype=pl.Int64)
    parts = [
        split_by_activity(trace, cut, lane, all_gaps.device[cut.gap]).select(
            "gap",
            "step_row",
            "start_ns",
            "duration_ns",
            "cause",
            sure.alias("evidence"),
            "activity",
            producer=none,
            wait=none,
        )
    ]

    # The launch; then the time in which the work was already submitted: work that waited gets its
    # producer.
    nothing = np.full(all_gaps.low.size, _NONE, like=all_gaps.low)
    latency = np.full(all_gaps.low.size, _CAUSE_CODES[LAUNCH_LATENCY], like=all_gaps.low)
    correlated = np.full(all_gaps.low.size, EVIDENCE.index("correlated"), like=all_gaps.low)
    queued_cause, queued_evidence, waited = _classify_queued(trace, all_gaps)
    awaited, wait = _find_producers(trace, all_gaps, waited)
    for start, end, cause, evidence, producer, wait_row in (
        (called, queued_ns, latency, correlated, nothing, nothing),
        (queued_ns, all_gaps.high, queued_cause, queued_evidence, awaited, wait),
    ):
        shared = find_overlaps(start, end, steps.spans)
        gap = shared.left
        parts.append(
            pl.DataFrame(
                {
                    "gap": gap,
                    "step_row": gather_rows(steps.row, shared.right),
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
    rows = move_columns_to_disk(trace, _build_gap_rows(trace, all_gaps, parts))
    causes, totals = (  # the largest cause first
        rows.lazy()
        .group_by(*keys, "cause")
        .agg(
            pl.col("duration_ns").sum().alias("idle_ns"),
            pl.col("gap").n_unique().cast(pl.Int64).alias("gap_count"),
        )
        .sort(
            *keys,
            "idle_ns",
            "cause",
            descending=[*(False for _ in keys), True, False],
            nulls_last=True,
        )
        .collect()
        for keys in (["device", "step"], ["device"])
    )
    return Idle(rows, causes, totals)


def find_edge_causes(trace: Trace) -> pl.DataFrame:
    """Returns what the main thread did in the steps before the first and after the last GPU work of
    each device: cause (a name of HOST_CAUSES), ns; the most first.
    """
    main, tiles = find_main_lane(trace), build_device_tiles(trace)
    work = (
        select_gpu_work(trace)
        .group_by("device")
        .agg(pl.col("start_ns").min(), pl.col("end_ns").max())
    )
    told = np.isin(trace.steps["step"].to_numpy(), list_told_steps(trace).to_numpy())
    low, high = (side[np.append(told, False)[tiles.row]] for side in tiles.spans)
    device, start, end = (
        np.concatenate(columns)
        for columns in zip(
            *(
                (
                    np.full(low.size * 2, number),
                    np.append(low, np.maximum(low, last)),
                    np.append(np.minimum(high, first), high),
                )
                for number, (_, first, last) in enumerate(work.rows())
            ),
            strict=True,
        )
    )
    rows = np.flatnonzero(end > start)
    edges = GapIntervals(np.arange(rows.size), np.zeros_like(rows), start[rows], end[rows])
    lane = np.full(rows.size, 0 if main is None else main)
    parts = split_by_activity(trace, edges, lane, device[rows])
    names = pl.col("cause").replace_strict(dict(enumerate(HOST_CAUSES)), return_dtype=pl.String)
    return parts.group_by(names).agg(ns=pl.col("duration_ns").sum()).sort("ns", descending=True)


def _classify_queued(trace: Trace, all_gaps: IdleGaps) -> tuple[Ints, Ints, Bools]:
    """Returns per gap cause and evidence (as numbers) of the time after the work was submitted, and
    whether it is a wait.
    """
    waited, recorded = find_stream_waits(trace)
    has_wait = waited[all_gaps.after]
    short = all_gaps.high - all_gaps.low <= KERNEL_TO_KERNEL_NS
    work = find_gpu_event_rows(trace)
    work_ends = np.sort(
        trace.events["start_ns"].to_numpy()[work] + trace.events["duration_ns"].to_numpy()[work]
    )
    earlier = np.searchsorted(work_ends, all_gaps.high - KERNEL_TO_KERNEL_NS, side="right")
    something_ended = np.searchsorted(work_ends, all_gaps.high, side="right") > earlier
    # A short gap after work of the same stream comes from stream order; a long one is a wait only
    # if something ended just before it did: all streams of this device were idle, so nothing on it
    # could have been awaited.
    waited = has_wait & np.where(short, ~all_gaps.is_same_stream, something_ended | recorded)
    choices = (
        (all_gaps.launch < 0, NOT_RECORDED, None),
        (~all_gaps.first, GRAPH_INTERNAL, "correlated"),
        (waited, DEPENDENCY, "measured" if recorded else "inferred"),
        (short, KERNEL_TO_KERNEL, "inferred"),
        (np.isin(all_gaps.after, find_work_behind_unrecorded(trace)["event"]), NOT_RECORDED, None),
        (np.ones_like(short), UNEXPLAINED, "assumed"),
    )
    choice_index = np.select([choice[0] for choice in choices], range(len(choices)))
    causes, evidence = [choice[1] for choice in choices], [choice[2] for choice in choices]
    return (
        gather_rows(np.array([_CAUSE_CODES[cause] for cause in causes]), choice_index),
        np.array([_NONE if name is None else EVIDENCE.index(name) for name in evidence])[
            choice_index
        ],
        choice_index == causes.index(DEPENDENCY),
    )


def _find_producers(trace: Trace, gaps: IdleGaps, waited: Bools) -> tuple[Ints, Ints]:
    """Returns what the work after those gaps that are waits had waited for; rows of `events`, -1
    for none; shape (gaps,).

    A recorded wait names the stream and the record of the event: the last work that was launched on
    that stream before the event was recorded is what was waited for; of several waits the one whose
    work ended last. Without a record it is the work of another stream that ended last before the
    gap, else the work of another device that ended shortly before the end of the gap.

    Returns:
        The GPU work that had to end first, and the record of the wait, or the last call before the
        launch, on its thread, that requested one.
    """
    producer, wait = (np.full(waited.size, _NONE, dtype=np.int64) for _ in range(2))
    waited_gaps = np.flatnonzero(waited)
    if not waited_gaps.size:
        return producer, wait
    producer[waited_gaps] = np.where(
        gaps.is_same_stream[waited_gaps], _NONE, gaps.before[waited_gaps]
    )
    row = find_gpu_event_rows(trace)
    device = get_event_column(trace, "device", _NONE)[row]
    if int(device.min(initial=0)) != int(device.max(initial=0)):
        end = get_event_column(trace, "start_ns")[row] + np.maximum(
            get_event_column(trace, "duration_ns")[row], 0
        )
        same_stream_gaps = waited_gaps[gaps.is_same_stream[waited_gaps]]
        for gap_device in np.unique(gaps.device[same_stream_gaps]).tolist():
            gap_rows, other_rows = (
                same_stream_gaps[gaps.device[same_stream_gaps] == gap_device],
                np.flatnonzero(device != gap_device),
            )
            other_rows = other_rows[np.argsort(end[other_rows], kind="stable")]
            last = np.searchsorted(end[other_rows], gaps.high[gap_rows], side="right") - 1
            gap_rows, last = gap_rows[last >= 0], other_rows[last[last >= 0]]
            is_near = end[last] > gaps.high[gap_rows] - KERNEL_TO_KERNEL_NS
            producer[gap_rows[is_near]] = row[last[is_near]]

    launch = gaps.launch[waited_gaps]
    lane, start = (
        get_event_column(trace, "lane")[launch],
        get_event_column(trace, "start_ns")[launch],
    )
    calls = trace.events.lazy().filter(
        pl.col("category").is_in(LAUNCHES),
        pl.col("name").str.contains(STREAM_WAIT_CALL, literal=True),
    )
    for part in calls.select("lane", "event", "start_ns").collect().partition_by("lane"):
        gap_rows = np.flatnonzero((lane == part["lane"][0]) & (launch >= 0))
        last = np.searchsorted(part["start_ns"].to_numpy(), start[gap_rows], side="left") - 1
        wait[waited_gaps[gap_rows[last >= 0]]] = part["event"].to_numpy()[last[last >= 0]]

    records = _find_recorded_waits(trace)
    if records.height:
        index = np.searchsorted(records["after"].to_numpy(), gaps.after[waited_gaps])
        index = np.minimum(index, records.height - 1)
        matched = records["after"].to_numpy()[index] == gaps.after[waited_gaps]
        wait[waited_gaps[matched]] = records["wait"].to_numpy()[index[matched]]
        matched &= (
            records["producer_end"].to_numpy()[index]
            <= gaps.high[waited_gaps] + _CLOCK_TOLERANCE_NS
        )
        producer[waited_gaps[matched]] = records["producer"].to_numpy()[index[matched]]
    return producer, wait


def _build_gap_rows(trace: Trace, all_gaps: IdleGaps, frames: list[pl.DataFrame]) -> pl.DataFrame:
    """Returns the parts with names for numbers, by device and start; `frames` is emptied."""
    parts = pl.concat(frames).sort("gap", "start_ns", "cause")
    frames.clear()
    gap = parts["gap"].to_numpy()
    activity = _replace_negative_with_null(parts["activity"].to_numpy())
    return pl.DataFrame(
        {
            "gap": gap,
            "device": _replace_negative_with_null(all_gaps.device[gap]),
            "start_ns": parts["start_ns"],
            "duration_ns": parts["duration_ns"],
            "cause": pl.Series(list(CAUSES), dtype=CauseType)[parts["cause"]],
            "evidence": pl.Series([*EVIDENCE, None], dtype=EvidenceType).gather(
                parts["evidence"] % (len(EVIDENCE) + 1)
            ),
            "before": all_gaps.before[gap],
            "after": all_gaps.after[gap],
            "launch": _replace_negative_with_null(all_gaps.launch[gap]),
            "step": trace.steps["step"][
                _replace_negative_with_null(parts["step_row"].to_numpy()).cast(pl.UInt32)
            ],
            "host_activity": trace.events["name"][activity.cast(pl.UInt32)],
            "host_event": activity,
            "producer": _replace_negative_with_null(parts["producer"].to_numpy()),
            "wait": _replace_negative_with_null(parts["wait"].to_numpy()),
        }
    ).pipe(cast_to_schema, GAP_SCHEMA)


def _replace_negative_with_null(rows: Ints) -> pl.Series:
    return pl.Series(rows).set(pl.Series(rows < 0), None)


def _find_recorded_waits(trace: Trace) -> pl.DataFrame:
    """Returns recorded waits: after (work that waited, ascending), wait (row of the record),
    producer, producer_end.
    """
    waits = trace.syncs.filter(pl.col("kind") == STREAM_WAIT_RECORD)
    if not waits.height:
        return pl.DataFrame(
            schema=dict.fromkeys(("after", "wait", "producer", "producer_end"), pl.Int64)
        )
    recorded = collect_call_times(trace).select(
        record_correlation="correlation", recorded_ns="call_ns"
    )
    requests = (
        add_wait_times(trace, waits[["event", "stream", "awaited_stream", "record_correlation"]])
        .join(recorded, on="record_correlation", how="left")
        .with_columns(pl.coalesce("recorded_ns", "wait_ns").alias("recorded_ns"))
    )
    work = select_gpu_work(trace)[["event", "device", "stream", "launch", "end_ns"]]
    work = work.with_columns(
        trace.events["start_ns"].gather(work["launch"]).alias("asked_ns")
    ).drop_nulls("asked_ns")
    after = work.select("device", "stream", "asked_ns", pl.col("event").alias("after")).sort(
        "asked_ns"
    )
    wait_requests = work.select(
        "device",
        pl.col("stream").alias("awaited_stream"),
        "asked_ns",
        pl.col("event").alias("producer"),
        producer_end="end_ns",
    ).sort("asked_ns")
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
            wait_requests,
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


PARTS_SCHEMA = build_schema(
    "gap device step start_ns duration_ns cause cause_ns evidence before before_name after after_name",
    "launch launch_name host_event host_activity stack producer producer_name wait wait_name",
    {"cause": CauseType, "evidence": EvidenceType, "stack": pl.List(pl.String())},
)
_MAX_FRAMES = 64
_EVENT_COLUMNS = ("before", "after", "launch", "producer", "wait")


def longest_gaps(trace: Trace, idle_time: Idle, count: int = 20) -> pl.DataFrame:
    """Returns the longest gaps, longest first, with their main cause and its event.

    Args:
        trace: The trace.
        idle_time: The result of `idle` for it.
        count: Number of gaps.

    Returns:
        One row per gap: gap, device, step (of its main part), start_ns, duration_ns (of the whole
        gap), cause (the one with most of the gap's time), cause_ns (its time in the gap), evidence;
        then rows of `trace.events` with their names: before and after (the GPU work around it),
        launch (the call that submitted `after`), host_event (the longest activity of the host in
        the cause's time) with host_activity (its name) and stack (names of its enclosing events,
        outermost first), producer (the GPU work that a dependency waited for), wait (the record of
        the wait or the call that requested it). Null where there is none.
    """
    return next(iter(find_longest_gaps([trace], [idle_time], count)))


def find_longest_gaps(
    traces: Sequence[Trace], idle_times: Iterable[Idle], count: int
) -> Iterable[pl.DataFrame]:
    parts = concatenate_by_trace(idle_time.gaps for idle_time in idle_times)
    keys = [TRACE_COLUMN, "gap"]
    order, falling = [TRACE_COLUMN, "whole_ns", "gap"], [False, True, False]
    gap_totals = (
        parts.group_by(keys)
        .agg(
            pl.col("duration_ns").sum().alias("whole_ns"), pl.col("start_ns").min().alias("from_ns")
        )
        .sort(order, descending=falling)
        .group_by(TRACE_COLUMN, maintain_order=True)
        .head(count)
    )
    rows = (
        parts.join(gap_totals, on=keys, how="inner")
        .with_columns(pl.col("duration_ns").sum().over(*keys, "cause").alias("cause_ns"))
        .sort("cause_ns", "duration_ns", "start_ns", descending=[True, True, False])
        .unique(keys, keep="first", maintain_order=True)
        .sort(order, descending=falling)
    )
    described = rows.select(
        TRACE_COLUMN,
        "gap",
        "device",
        "step",
        pl.col("from_ns").alias("start_ns"),
        pl.col("whole_ns").alias("duration_ns"),
        *("cause", "cause_ns", "evidence", "host_event", "host_activity"),
        *_EVENT_COLUMNS,
        *(
            gather_event_column(traces, rows, name, "name").alias(f"{name}_name")
            for name in _EVENT_COLUMNS
        ),
    )
    for trace, gaps in zip(traces, split_by_trace(described, traces), strict=True):
        stacks = [_list_enclosing_events(trace, event) for event in gaps["host_event"].to_list()]
        stack = pl.Series("stack", stacks, dtype=pl.List(pl.String))
        yield gaps.hstack([stack]).pipe(cast_to_schema, PARTS_SCHEMA)


def _list_enclosing_events(trace: Trace, event: int | None) -> list[str] | None:
    """Returns names of the events around an event, outermost first, without the event itself."""
    if event is None:
        return None
    parent, name = trace.events["parent"], trace.events["name"]
    rows: list[int] = []
    ancestor = parent[event]
    while ancestor is not None and len(rows) < _MAX_FRAMES:
        rows.append(ancestor)
        ancestor = parent[ancestor]
    return [name[row] for row in reversed(rows)]
