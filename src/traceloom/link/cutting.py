"""One step of a trace, with what is needed around it, so that it can be linked without the rest."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import polars as pl
from msgspec import Struct
from numpy.typing import NDArray

from traceloom.model import Trace
from traceloom.model.arrays import nullable
from traceloom.model.category import COMMAND, GPU_WORK
from traceloom.model.schema import empty

Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]

_POINTING = {"collectives": "event", "copies": "event", "syncs": "event", "python": "event", "tensors": "event"}
_NOT_LINKED = ("allocations", "kernels", "sources")
_BY_TIME = ("counters", "marks")
_REFERENCES = ("parent", "op", "launch")
_MOMENT = 0.01  # of the step: GPU work from before that goes on for less needs no lead


class Part(Struct, frozen=True):
    """A part of a trace.

    Attributes:
        trace: The part, with rows of its own. It is for linking: accounts of lanes are those of the whole trace.
        row: Row in the whole trace of each of its events, shape (events of the part,).
    """

    trace: Trace
    row: Ints


def step_bounds(trace: Trace, step: int) -> tuple[int, int] | None:
    """Start and end of a step on the trace's clock, ns; None where the trace does not have it."""
    rows = trace.steps.filter(pl.col("step") == step)
    return (int(rows["start_ns"][0]), int(rows["end_ns"][0])) if rows.height else None


def cut_to_step(trace: Trace, low: int, high: int) -> Part:
    """Cut a trace to [low, high) of its host time, to the GPU work that belongs to that, and to a lead.

    Kept are: what the host does until `high`; GPU work that it launched, however late it runs, and GPU work launched
    before that still runs. The lead begins where the first GPU work that still runs in
    the step was launched, at most as long before the step as the step is long: waits between streams are told by calls
    that come before the work. Where such work goes on for a moment only there is no lead: it would hold what the host
    did meanwhile, up to a whole step of one rank without its peers. Host events that cross a bound are shortened to it.

    Args:
        trace: The whole trace.
        low: Start of the step, ns.
        high: Its end, ns.
    """
    events = trace.events
    start = events["start_ns"].to_numpy()
    end = start + np.maximum(events["duration_ns"].to_numpy(), 0)
    device = events["category"].is_in([*GPU_WORK, COMMAND]).to_numpy()
    launch = events["launch"].cast(pl.Int64).fill_null(-1).to_numpy()
    from_ns = _lead(start, end, device, launch, low, high)
    launched_ns = np.where(launch >= 0, start[launch], start) if start.size else start
    own_work = device & (launched_ns >= from_ns) & (launched_ns < high)
    until = max(high, int(end[own_work].max(initial=high)))
    # What was launched after the step came after its work on each stream: it held nothing of it back.
    ran = device & (end > from_ns) & (start < until) & ((launch < 0) | (launched_ns < high))
    host = (trace.lanes["kind"] == "host").to_numpy()[events["lane"].to_numpy()] if events.height else device
    bound = np.where(host, high, until)
    # What has no length counts where it stands; the first moment belongs to the part, the last does not.
    kept = own_work | ran | (~device & (start < bound) & ((end > from_ns) | (start >= from_ns)))
    parent = events["parent"].cast(pl.Int64).fill_null(-1).to_numpy()
    # parents stand above all children that stood under them
    while (missing := parent[kept & (parent >= 0) & ~kept[parent]]).size:
        kept[missing] = True
    row = np.flatnonzero(kept)
    first = np.where(host[row], np.maximum(start[row], from_ns), start[row])
    row = row[np.argsort(first, kind="stable")]
    return Part(_part(trace, row, host[row], from_ns, high), row)


def _lead(start: Ints, end: Ints, device: Bools, launch: Ints, low: int, high: int) -> int:  # noqa: PLR0917
    """Where the part begins: at the launch of the first GPU work that still runs in the step, within limits."""
    running = device & (start < high) & (end > low) & (launch >= 0)
    before = running.copy()
    before[running] = start[launch[running]] < low
    if int(end[before].max(initial=low)) - low < _MOMENT * (high - low):
        return low
    earliest = int(start[launch[running]].min(initial=low)) if running.any() else low
    return max(min(earliest, low), low - (high - low))


def _part(trace: Trace, row: Ints, host: Bools, low: int, high: int) -> Trace:
    number = np.full(trace.events.height + 1, -1, dtype=np.int64)  # the last for rows that are null
    number[row] = np.arange(row.size)
    events = trace.events[row]
    start, duration = events["start_ns"].to_numpy(), events["duration_ns"].to_numpy()
    first = np.where(host, np.maximum(start, low), start)
    last = np.where(host, np.minimum(start + duration, high), start + duration)
    nested = np.where(host, np.minimum(events["nested_end_ns"].to_numpy(), high), events["nested_end_ns"].to_numpy())
    events = events.with_columns(
        pl.int_range(row.size, dtype=pl.UInt32).alias("event"),
        pl.Series("start_ns", first),
        # Negative durations of damaged files stay; others end at the bound, never before they begin.
        pl.Series("duration_ns", np.where(duration < 0, duration, np.maximum(last - first, 0))),
        pl.Series("nested_end_ns", np.maximum(nested, first)),
        *(_moved(events[column], number).alias(column) for column in _REFERENCES),
    )
    frames: dict[str, Any] = {"events": events, **{name: empty(name) for name in _NOT_LINKED}}
    for name, column in _POINTING.items():
        frame = getattr(trace, name)
        frames[name] = frame.with_columns(_moved(frame[column], number)).drop_nulls(column)
    flows = trace.flows.with_columns(_moved(trace.flows[end], number) for end in ("source", "target"))
    frames["flows"] = flows.drop_nulls(["source", "target"])
    for name in _BY_TIME:
        frames[name] = getattr(trace, name).filter(pl.col("time_ns").is_between(low, high, closed="left"))
    return replace(trace, **frames)


def _moved(rows: pl.Series, number: Ints) -> pl.Series:
    """References to rows of the whole trace as rows of the part; null where the row is not in it."""
    old = rows.fill_null(number.size - 1).to_numpy()
    return nullable(number[old], pl.UInt32, absent=-1).alias(rows.name)
