"""What is compared: the whole steps of a run, and how the time of its devices is spent in them, to the nanosecond."""

from __future__ import annotations

import numpy as np
import polars as pl
from msgspec import Struct
from numpy.typing import NDArray

from traceloom.analyze.classify import gpu_work
from traceloom.analyze.idle import idle
from traceloom.analyze.idle_causes import CAUSES
from traceloom.analyze.intervals import EMPTY, Spans, coverage, merge, overlaps, union
from traceloom.analyze.steps import tiles
from traceloom.model import Trace
from traceloom.model.frames import schema

Ints = NDArray[np.int64]

COMPUTE, COMMUNICATION, COPIES = "compute", "communication", "copies"
BUSY = (COMPUTE, COMMUNICATION, COPIES)
"""Kinds of busy time, in the order in which a nanosecond with several of them is counted."""
KIND_OF = {"compute": COMPUTE, "communication": COMMUNICATION, "memory": COPIES}  # by category of the work
EDGE = "edge"
_EDGE_MEANING = "before the first and after the last GPU work"


class ComparedSteps(Struct, frozen=True):
    """The steps of one trace that are compared.

    Attributes:
        trace: The trace.
        step: Number of each step; the one row of a trace without steps has none (null).
        spans: When each begins and ends: ascending, disjoint; neighbours may touch.
    """

    trace: Trace
    step: pl.Series
    spans: Spans

    @property
    def durations(self) -> Ints:
        """Length of each step, ns."""
        lengths: Ints = self.spans.end - self.spans.start
        return lengths


def samples(trace: Trace) -> ComparedSteps:
    """The whole steps of a trace; where none is whole all that take time, and without steps its window."""
    cut = tiles(trace)
    whole = trace.steps["complete"].to_numpy()
    stepped = cut.row >= 0
    chosen = stepped & np.append(whole, False)[cut.row]
    chosen = chosen if chosen.any() else stepped
    if not chosen.any():
        none = pl.Series("step", [None], dtype=pl.Int32)
        return ComparedSteps(trace, none, Spans(cut.spans.start[:1], cut.spans.end[-1:]))
    at = np.flatnonzero(chosen)
    return ComparedSteps(trace, trace.steps["step"].gather(cut.row[at]), Spans(cut.spans.start[at], cut.spans.end[at]))


WORK = schema("event sample ns", {"sample": pl.Int64})
WAITING = schema("cause ns")


class DeviceTime(Struct, frozen=True):
    """How the devices of a trace spend the compared steps.

    Attributes:
        devices: Number of devices with GPU work.
        work: `event`, `sample` (row of the step), `ns`: time in the step that counts to this piece of GPU work. A
            nanosecond in which several run counts to one of them: computing before communicating before copying, and of
            these to the one that began first.
        waiting: `cause`, `ns`: idle time by cause; `edge` is before the first and after the last GPU work. Together
            with `work` it is the number of devices times the length of the steps.
    """

    devices: int
    work: pl.DataFrame
    waiting: pl.DataFrame


def device_time(of: ComparedSteps) -> DeviceTime:
    """Account for the time of every device in the compared steps."""
    work = gpu_work(of.trace)
    columns = work.select("event", "device", "start_ns", "end_ns", pl.col("category").cast(pl.String))
    pieces, ends, devices = [], [], 0
    for _, rows in columns.sort("device", "start_ns", "event").group_by("device", maintain_order=True):
        devices += 1
        covered = EMPTY
        for category in KIND_OF:
            of_category = rows.filter(pl.col("category") == category)
            start, end = of_category["start_ns"].to_numpy(), of_category["end_ns"].to_numpy()
            # the time of each piece, without what earlier ones and other categories take
            reach = np.append(np.iinfo(np.int64).min, np.maximum.accumulate(end))[: end.size]
            shared = overlaps(np.maximum(start, reach), end, of.spans)
            ns = shared.end - shared.start - coverage(covered, shared.start, shared.end)
            event = of_category["event"].to_numpy()[shared.left]
            exclusive = pl.DataFrame({"event": event, "sample": shared.right, "ns": ns}).filter(pl.col("ns") > 0)
            pieces.append(exclusive.cast(WORK))
            covered = merge(covered, union(start, end))
        first, last = int(rows["start_ns"].min()), int(rows["end_ns"].max())  # type: ignore[arg-type]
        outside = np.minimum(of.spans.end, first) - of.spans.start
        after = of.spans.end - np.maximum(of.spans.start, last)
        ends.append(int(np.maximum(outside, 0).sum() + np.maximum(after, 0).sum()))
    if not devices:
        return DeviceTime(0, pl.DataFrame(schema=WORK), pl.DataFrame(schema=WAITING))
    idle_time = idle(of.trace)
    inside = pl.col("step").is_in(of.step.implode())
    causes = idle_time.totals if of.step.null_count() else idle_time.causes.filter(inside)
    summed = causes.group_by(pl.col("cause").cast(pl.String)).agg(pl.col("idle_ns").sum().alias("ns"))
    waiting = pl.DataFrame([*summed.sort("cause").rows(), (EDGE, sum(ends))], schema=WAITING, orient="row")
    return DeviceTime(devices, pl.concat(pieces), waiting.filter(pl.col("ns") > 0))


def meaning(cause: str) -> str:
    """What a cause of idle time means, in a few words."""
    return _EDGE_MEANING if cause == EDGE else CAUSES.get(cause, cause)
