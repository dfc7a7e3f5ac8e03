"""Why was each GPU idle? Every idle nanosecond gets one cause.

A gap is time in a device's window in which no stream runs anything. The work that ends a gap tells why there was one:
its launch came late (then the host's doings until the launch are the causes), the launch itself took its time, or the
work was queued and waited. Exact definitions: docs/concepts/idle-time.md.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import polars as pl

from traceloom.analyze.gaps import Gaps, copies, gaps, gpu_rows
from traceloom.analyze.host_wait import HOST_CAUSES, Stretches, split_by_activity
from traceloom.analyze.intervals import Bools, Ints, overlaps
from traceloom.analyze.producers import producers
from traceloom.analyze.remembered import per_trace
from traceloom.analyze.steps import Tiles, tiles
from traceloom.analyze.waits import stream_waits
from traceloom.model import Trace
from traceloom.model.arrays import column, lookup, on_disk
from traceloom.model.result import Result

LAUNCH_LATENCY = "launch_latency"
DEPENDENCY = "dependency"
KERNEL_TO_KERNEL = "kernel_to_kernel"
GRAPH_INTERNAL = "graph_internal"
UNEXPLAINED = "unexplained"
NOT_RECORDED = "launch_not_recorded"
CAUSES = {
    **HOST_CAUSES,
    LAUNCH_LATENCY: "the launch call ran, and the GPU took up the work",
    DEPENDENCY: "launched in time, but told to wait for another stream",
    KERNEL_TO_KERNEL: "launched in time; the GPU's own pause between two pieces of work",
    GRAPH_INTERNAL: "between two pieces of work of one graph launch",
    UNEXPLAINED: "launched in time and not told to wait, and yet late",
    NOT_RECORDED: "the launch happened before the recording began, or was lost",
}
"""Every cause with its meaning in a few words."""

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

GAP_SCHEMA = pl.Schema(
    {
        "gap": pl.UInt32(),
        "device": pl.Int32(),
        "start_ns": pl.Int64(),
        "duration_ns": pl.Int64(),
        "cause": CauseType,
        "evidence": EvidenceType,
        "before": pl.UInt32(),
        "after": pl.UInt32(),
        "launch": pl.UInt32(),
        "step": pl.Int32(),
        "host_activity": pl.String(),
        "host_event": pl.UInt32(),
        "producer": pl.UInt32(),
        "wait": pl.UInt32(),
    }
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
    called, taken = _calls(trace, all_gaps)
    cut = tiles(trace)
    waiting = _cut(cut, all_gaps.low, called)
    parts = [
        _host_part(trace, all_gaps, waiting),
        _part(
            _cut(cut, called, taken),
            np.full(all_gaps.low.size, _CODES[LAUNCH_LATENCY], like=all_gaps.low),
            np.full(all_gaps.low.size, EVIDENCE.index("correlated"), like=all_gaps.low),
        ),
        _queued_part(trace, all_gaps, _cut(cut, taken, all_gaps.high)),
    ]
    rows = on_disk(trace, _rows(trace, all_gaps, parts))
    return Idle(rows, _added(rows, ["device", "step", "cause"]), _added(rows, ["device", "cause"]))


def _calls(trace: Trace, all_gaps: Gaps) -> tuple[Ints, Ints]:
    """Cut each gap in three: the host before the launch call, the launch, what came after; the two cuts.

    Without a launch of its own (not recorded, or inner work of a graph) all of the gap is the third part.
    """
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
    prompt = caused & ~waits & (back > low) & (high - returned <= LAUNCH_LATENCY_NS)
    return called, np.where(prompt, high, returned)


def _queued_part(trace: Trace, all_gaps: Gaps, cut: Stretches) -> pl.DataFrame:
    """The time in which the work was already submitted; work that waited gets its producer."""
    cause, evidence, waited = _queued(trace, all_gaps)
    awaited = producers(trace, all_gaps, waited, KERNEL_TO_KERNEL_NS)
    return _part(cut, cause, evidence).with_columns(
        pl.Series("producer", awaited.work[cut.gap]), pl.Series("wait", awaited.wait[cut.gap])
    )


def _queued(trace: Trace, all_gaps: Gaps) -> tuple[Ints, Ints, Bools]:
    """Per gap: cause and evidence (as numbers) of the time after the work was submitted, and whether it is a wait."""
    has_wait, recorded = stream_waits(trace, all_gaps.after)
    short = all_gaps.high - all_gaps.low <= KERNEL_TO_KERNEL_NS
    # A short gap after work of the same stream comes from stream order; a long one is a wait only if something ended
    # just before it did: all streams of this device were idle, so nothing on it could have been awaited.
    waited = has_wait & np.where(short, ~all_gaps.same_stream, _something_ended(trace, all_gaps) | recorded)
    choices = (
        (all_gaps.launch < 0, NOT_RECORDED, None),
        (~all_gaps.first, GRAPH_INTERNAL, "correlated"),
        (waited, DEPENDENCY, "measured" if recorded else "inferred"),
        (short, KERNEL_TO_KERNEL, "inferred"),
        (np.ones_like(short), UNEXPLAINED, "assumed"),
    )
    chosen = np.select([choice[0] for choice in choices], range(len(choices)))
    return (
        lookup(np.array([_CODES[choice[1]] for choice in choices]), chosen),
        np.array([_NONE if choice[2] is None else EVIDENCE.index(choice[2]) for choice in choices])[chosen],
        chosen == [choice[1] for choice in choices].index(DEPENDENCY),
    )


def _something_ended(trace: Trace, all_gaps: Gaps) -> Bools:
    """True where GPU work of another device ended shortly before the gap did."""
    work = gpu_rows(trace)
    ends = np.sort(trace.events["start_ns"].to_numpy()[work] + trace.events["duration_ns"].to_numpy()[work])
    first = np.searchsorted(ends, all_gaps.high - KERNEL_TO_KERNEL_NS, side="right")
    return np.searchsorted(ends, all_gaps.high, side="right") > first


def _cut(cut: Tiles, start: Ints, end: Ints) -> Stretches:
    """Cut one stretch per gap at the bounds of steps."""
    shared = overlaps(start, end, cut.spans)
    return Stretches(shared.left, lookup(cut.row, shared.right), shared.start, shared.end)


def _part(cut: Stretches, cause: Ints, evidence: Ints) -> pl.DataFrame:
    return pl.DataFrame(
        {
            "gap": cut.gap,
            "step_row": cut.step_row,
            "start_ns": cut.start,
            "duration_ns": cut.end - cut.start,
            "cause": cause[cut.gap],
            "evidence": evidence[cut.gap],
            "activity": np.full(cut.gap.size, _NONE, like=cut.gap),
            "producer": np.full(cut.gap.size, _NONE, like=cut.gap),
            "wait": np.full(cut.gap.size, _NONE, like=cut.gap),
        }
    )


def _host_part(trace: Trace, all_gaps: Gaps, cut: Stretches) -> pl.DataFrame:
    lane = column(trace, "lane")[all_gaps.launch[cut.gap]].astype(np.int64)
    return split_by_activity(trace, cut, lane, all_gaps.device[cut.gap]).select(
        "gap",
        "step_row",
        "start_ns",
        "duration_ns",
        "cause",
        pl.when(pl.col("sure")).then(EVIDENCE.index("correlated")).otherwise(EVIDENCE.index("inferred")).cast(pl.Int64)
        .alias("evidence"),
        "activity",
        pl.lit(_NONE, dtype=pl.Int64).alias("producer"),
        pl.lit(_NONE, dtype=pl.Int64).alias("wait"),
    )  # fmt: skip


def _rows(trace: Trace, all_gaps: Gaps, frames: list[pl.DataFrame]) -> pl.DataFrame:
    """The parts with names for numbers, by device and start; `frames` is emptied."""
    parts = pl.concat(frames).sort("gap", "start_ns", "cause")
    frames.clear()
    gap = parts["gap"].to_numpy()
    device = pl.Series(all_gaps.device[gap])
    return pl.DataFrame(
        {
            "gap": gap,
            "device": device.set(device < 0, None),
            "start_ns": parts["start_ns"],
            "duration_ns": parts["duration_ns"],
            "cause": pl.Series(list(CAUSES), dtype=CauseType).gather(parts["cause"]),
            "evidence": pl.Series([*EVIDENCE, None], dtype=EvidenceType).gather(
                parts["evidence"] % (len(EVIDENCE) + 1)
            ),
            "before": all_gaps.before[gap],
            "after": all_gaps.after[gap],
            "launch": _or_null(all_gaps.launch[gap]),
            "step": _gather(trace.steps["step"], parts["step_row"].to_numpy()),
            "host_activity": _gather(trace.events["name"], parts["activity"].to_numpy()),
            "host_event": _or_null(parts["activity"].to_numpy()),
            "producer": _or_null(parts["producer"].to_numpy()),
            "wait": _or_null(parts["wait"].to_numpy()),
        }
    ).cast(GAP_SCHEMA)


def _or_null(rows: Ints) -> pl.Series:
    return pl.Series(rows).set(pl.Series(rows < 0), None)


def _gather(values: pl.Series, rows: Ints) -> pl.Series:
    """Values by row; null for -1."""
    return values.gather(_or_null(rows).cast(pl.UInt32))


def _added(rows: pl.DataFrame, keys: list[str]) -> pl.DataFrame:
    """Idle time by the keys, largest cause first."""
    order = keys[:-1]
    return (
        rows.lazy()
        .group_by(keys)
        .agg(
            pl.col("duration_ns").sum().alias("idle_ns"),
            pl.col("gap").n_unique().cast(pl.Int64).alias("gap_count"),
        )
        .sort(*order, "idle_ns", "cause", descending=[*(False for _ in order), True, False], nulls_last=True)
        .collect()
    )
