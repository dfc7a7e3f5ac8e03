"""What one rank did up to each moment that matters to the others: running sums that two ranks can be compared by."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import polars as pl

from traceloom.analyze.classify import stepped_work
from traceloom.analyze.host import main_lane
from traceloom.analyze.host_wait import Stretches, split_by_activity
from traceloom.analyze.idle import idle
from traceloom.analyze.idle_causes import CAUSES, HOST_CAUSES
from traceloom.analyze.intervals import coverage, merge, union
from traceloom.analyze.stacked import TRACE, stacked, unstacked
from traceloom.array_types import Ints
from traceloom.model import Trace
from traceloom.model.frames import schema

COMPUTE = "compute"
COMMUNICATION = "communication"
MEMORY = "copies"
CLASSES = (COMPUTE, COMMUNICATION, MEMORY, *CAUSES)
"""What the time of a rank is split into: its device's busy time, then its idle time by cause."""

ClassType = pl.Enum(CLASSES)
DETAIL_SCHEMA = schema("stretch class name ns", {"class": ClassType})
_HOST_NAMES = list(HOST_CAUSES)
_MOST_NAMES = 6  # per stretch and class: what else ran there is in the sums


@dataclass(frozen=True)
class Ledger:
    """The account of one rank between its first and its last event.

    Attributes:
        time_ns: Moments, ascending: starts and ends of communication and of steps; shape (moments,).
        sums: Nanoseconds of each of `CLASSES` from the first moment to each; shape (moments, classes). The sums of a
            row add up to the time since the first moment.
        details: stretch (from that moment to the next), class, name (kernel, copy or what the host did), ns: the
            largest of each stretch and class. Kernels count where they start. Empty without communication, where
            there is nothing to compare.
        device: The device it is about; None for a rank without GPU work, whose main thread it is then about.
    """

    time_ns: Ints
    sums: Ints
    details: pl.DataFrame
    device: int | None

    def at(self, time_ns: Ints) -> Ints:
        """Place of each time, which must be one of the moments."""
        return np.searchsorted(self.time_ns, time_ns)


def ledgers(traces: Sequence[Trace], calls: pl.DataFrame) -> list[Ledger]:
    """Account for the time of each rank.

    Args:
        traces: Their traces.
        calls: Their communication, of `collectives(...).calls` (`stacked`).
    """
    work = stepped_work(traces)
    # the device that communicates most, else the one that works most; one whose work takes no time is none
    keys = [TRACE, "device"]
    timed = work.filter(pl.col("ns") > 0).drop_nulls("device")
    talking = calls.join(timed[keys].unique(), on=keys, how="semi")
    of = pl.concat(
        [talking.select(*keys, talks=True, ns="duration_ns"), timed.select(*keys, pl.lit(False).alias("talks"), "ns")]
    )
    most = (
        of.group_by(*keys, "talks")
        .agg(pl.col("ns").sum())
        .sort(TRACE, "talks", "ns", "device", descending=[False, True, True, False])
    )
    devices = dict(reversed(most[keys].rows()))  # the first of each trace
    by_device = work.partition_by(keys, as_dict=True)
    accounts = []
    for number, (trace, own) in enumerate(zip(traces, unstacked(calls, traces), strict=True)):
        device = devices.get(number)
        of_device = None if device is None else by_device[number, device]
        accounts.append(_account(trace, own, of_device))
    named = stacked(details for *_, details in accounts).filter(pl.col("name").is_not_null())
    summed = named.group_by(TRACE, "stretch", "class", "name").agg(pl.col("ns").sum())
    largest = (
        summed.sort(TRACE, "stretch", "class", "ns", "name", descending=[False, False, False, True, False])
        .group_by(TRACE, "stretch", "class", maintain_order=True)
        .head(_MOST_NAMES)
    )
    of_each = zip(accounts, unstacked(largest, traces, DETAIL_SCHEMA), strict=True)
    return [
        Ledger(moments, sums, details, devices.get(number))
        for number, ((moments, sums, _), details) in enumerate(of_each)
    ]


def _account(trace: Trace, calls: pl.DataFrame, work: pl.DataFrame | None) -> tuple[Ints, Ints, pl.DataFrame]:
    """The moments and sums of a `Ledger`, and all that ran in its stretches: stretch, class, name, ns.

    Args:
        trace: The trace.
        calls: Its communication.
        work: The work of the device that the account is about; None for that of the main thread.
    """
    device = None if work is None else work["device"][0]
    own_calls = calls.filter(pl.col("where") == "host" if device is None else pl.col("device") == device)
    starts = own_calls["start_ns"].to_numpy()
    ends = starts + own_calls["duration_ns"].to_numpy()
    edges = np.array([trace.start_ns, trace.end_ns], dtype=np.int64)
    steps = [trace.steps[name].to_numpy() for name in ("start_ns", "end_ns")]
    moments = np.unique(np.concatenate([starts, ends, edges, *steps]))
    sums = np.zeros((moments.size, len(CLASSES)), dtype=np.int64)
    details = []
    if work is None:  # the main thread's time
        waits = _main_thread(trace, moments[:-1], moments[1:])
    else:
        sums[:, :3], ran = _busy(work, moments)
        details.append(ran)
        gaps = idle(trace).gaps.filter(pl.col("device") == device)
        idling = gaps.select("start_ns", "duration_ns", pl.col("cause").cast(pl.String), name="host_activity")
        # before the first and after the last GPU work: what the main thread did, cut at the moments
        first, last = work["start_ns"].to_numpy().min(), work["end_ns"].to_numpy().max()
        before, after = moments[:-1] < first, moments[1:] > last
        start = np.concatenate([moments[:-1][before], np.maximum(moments[:-1][after], last)])
        end = np.concatenate([np.minimum(moments[1:][before], first), moments[1:][after]])
        waits = pl.concat([idling, _main_thread(trace, start[end > start], end[end > start])])
    stretch = np.searchsorted(moments, waits["start_ns"].to_numpy(), side="right") - 1
    if work is None:  # where it waits while another thread communicates, that is communication
        talks = coverage(union(starts, ends), moments[:-1], moments[1:]) > 0
        waiting = waits["cause"].is_in(["host_unobserved", "host_blocking_call", "host_lock"]).to_numpy()
        meant = pl.Series(talks[np.minimum(stretch, max(talks.size - 1, 0))] & waiting if talks.size else waiting)
        waits = waits.with_columns(pl.when(meant).then(pl.lit(COMMUNICATION)).otherwise("cause").alias("cause"))
    cause = waits["cause"].cast(ClassType).to_physical().to_numpy()
    waited = np.zeros_like(sums)  # a wait counts from the end of its stretch on
    np.add.at(waited, (np.minimum(stretch + 1, moments.size - 1), cause), waits["duration_ns"].to_numpy())
    sums += np.cumsum(waited, axis=0)
    in_stretch = pl.Series("stretch", stretch, dtype=pl.Int64)
    details.append(waits.select(in_stretch, pl.col("cause").alias("class"), "name", ns="duration_ns"))
    every = pl.concat(details)
    return moments, sums, every if calls.height else every.clear()


def _busy(work: pl.DataFrame, moments: Ints) -> tuple[Ints, pl.DataFrame]:
    """What a device does: the sums of its three busy classes at each moment, and its work as details."""
    start, end = work["start_ns"].to_numpy(), work["end_ns"].to_numpy()
    category = work["category"].to_physical().to_numpy()
    compute, communication, memory = (union(start[category == code], end[category == code]) for code in range(3))
    visible = merge(compute, communication)
    busy = merge(visible, memory)
    low = np.full(moments.size, moments[0])
    computed, seen, worked = (coverage(spans, low, moments) for spans in (compute, visible, busy))
    ran = work.select(
        pl.Series("stretch", np.searchsorted(moments, start, side="right") - 1, dtype=pl.Int64),
        pl.Series("class", np.array(CLASSES[:3])[category]),
        "name",
        "ns",
    )
    return np.stack([computed, seen - computed, worked - seen], axis=1), ran


def _main_thread(trace: Trace, start: Ints, end: Ints) -> pl.DataFrame:
    """start_ns (of the stretch), duration_ns, cause, name: what the main thread did in each stretch."""
    lane = main_lane(trace)
    if lane is None or not start.size:
        plain = {"start_ns": start, "duration_ns": end - start}
        return pl.DataFrame(plain).select(
            pl.all().cast(pl.Int64), pl.lit("host_unobserved").alias("cause"), pl.lit(None, pl.String).alias("name")
        )
    number = np.arange(start.size)
    waiting = Stretches(number, np.full(start.size, -1), start, end)
    parts = split_by_activity(trace, waiting, np.full(start.size, lane), np.zeros(start.size, dtype=np.int64))
    activity = parts["activity"].to_numpy()
    names = trace.events["name"][np.maximum(activity, 0)]
    return parts.select(
        pl.Series("start_ns", start[parts["gap"].to_numpy()], dtype=pl.Int64),
        pl.col("duration_ns").cast(pl.Int64),
        pl.Series("cause", _HOST_NAMES)[parts["cause"].to_numpy()].alias("cause"),
        names.set(pl.Series(activity < 0), None).cast(pl.String).alias("name"),
    )
