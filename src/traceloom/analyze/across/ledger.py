"""What one rank did up to each moment that matters to the others: running sums that two ranks can be compared by."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import polars as pl

from traceloom.analyze.classify import gpu_work
from traceloom.analyze.host import main_lane
from traceloom.analyze.host_wait import HOST_CAUSES, Stretches, split_by_activity
from traceloom.analyze.idle import CAUSES, idle
from traceloom.analyze.intervals import Ints, Spans, coverage, merge, union
from traceloom.model import Trace

COMPUTE = "compute"
COMMUNICATION = "communication"
MEMORY = "copies"
CLASSES = (COMPUTE, COMMUNICATION, MEMORY, *CAUSES)
"""What the time of a rank is split into: its device's busy time, then its idle time by cause."""

ClassType = pl.Enum(CLASSES)
DETAIL_SCHEMA = pl.Schema({"stretch": pl.Int64(), "class": ClassType, "name": pl.String(), "ns": pl.Int64()})
_NUMBER = {name: number for number, name in enumerate(CLASSES)}
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


def ledger(trace: Trace, calls: pl.DataFrame) -> Ledger:
    """Account for the time of a rank.

    Args:
        trace: Its trace.
        calls: Its communication, of `collectives(...).calls`.
    """
    work = gpu_work(trace)
    device = _device(work, calls)
    own_calls = (
        calls.filter(pl.col("device") == device) if device is not None else calls.filter(pl.col("where") == "host")
    )
    starts = own_calls["start_ns"].to_numpy()
    ends = starts + own_calls["duration_ns"].to_numpy()
    edges = np.array([trace.start_ns, trace.end_ns], dtype=np.int64)
    steps = [trace.steps[name].to_numpy() for name in ("start_ns", "end_ns")]
    moments = np.unique(np.concatenate([starts, ends, edges, *steps]))
    if device is None:
        sums, details = _of_host(trace, moments, union(starts, ends))
    else:
        sums, details = _of_device(trace, work.filter(pl.col("device") == device), moments, device)
    named = (details if calls.height else details.clear()).filter(pl.col("name").is_not_null())
    summed = named.group_by("stretch", "class", "name").agg(pl.col("ns").sum())
    largest = (
        summed.sort("stretch", "class", "ns", "name", descending=[False, False, True, False])
        .group_by("stretch", "class", maintain_order=True)
        .head(_MOST_NAMES)
        .select(list(DETAIL_SCHEMA))
        .cast(dict(DETAIL_SCHEMA))  # type: ignore[arg-type]
    )
    return Ledger(moments, sums, largest, device)


def _device(work: pl.DataFrame, calls: pl.DataFrame) -> int | None:
    """The device that communicates most, else the one that works most; one whose work takes no time is none."""
    work = work.filter(pl.col("end_ns") > pl.col("start_ns"))
    talking = calls.filter(pl.col("device").is_in(work["device"].unique().implode()))
    of = talking.select("device", ns="duration_ns")
    if not talking.height:
        of = work.filter(pl.col("device").is_not_null()).select("device", ns=pl.col("end_ns") - pl.col("start_ns"))
    sums = of.group_by("device").agg(pl.col("ns").sum()).sort("ns", "device", descending=[True, False])
    return int(sums["device"][0]) if sums.height else None


def _of_device(trace: Trace, work: pl.DataFrame, moments: Ints, device: int) -> tuple[Ints, pl.DataFrame]:
    start, end = work["start_ns"].to_numpy(), work["end_ns"].to_numpy()
    category = work["category"].to_physical().to_numpy()
    compute, talk, memory = (union(start[category == code], end[category == code]) for code in range(3))
    visible = merge(compute, talk)
    busy = merge(visible, memory)
    low = np.full(moments.size, moments[0])
    computed, seen, worked = (coverage(spans, low, moments) for spans in (compute, visible, busy))
    sums = np.zeros((moments.size, len(CLASSES)), dtype=np.int64)
    sums[:, 0], sums[:, 1], sums[:, 2] = computed, seen - computed, worked - seen
    gaps = idle(trace).gaps.filter(pl.col("device") == device)
    idling = gaps.select("start_ns", "duration_ns", pl.col("cause").cast(pl.String), name="host_activity")
    waits = pl.concat([idling, _edges(trace, busy, moments)])
    stretch = np.searchsorted(moments, waits["start_ns"].to_numpy(), side="right") - 1
    _add(sums, stretch, waits)
    ran = work.select(
        pl.Series("stretch", np.searchsorted(moments, start, side="right") - 1, dtype=pl.Int64),
        pl.Series("class", np.array(CLASSES[:3])[category]),
        "name",
        ns=pl.col("end_ns") - pl.col("start_ns"),
    )
    return sums, pl.concat([ran, _did(waits, stretch)])


def _add(sums: Ints, stretch: Ints, waits: pl.DataFrame) -> None:
    """Add waits, which lie in the stretches numbered `stretch`, to the running sums from the next moment on."""
    each = np.zeros_like(sums)
    cause = waits["cause"].replace_strict(_NUMBER, return_dtype=pl.Int64).to_numpy()
    np.add.at(each, (np.minimum(stretch + 1, sums.shape[0] - 1), cause), waits["duration_ns"].to_numpy())
    sums += np.cumsum(each, axis=0)


def _edges(trace: Trace, busy: Spans, moments: Ints) -> pl.DataFrame:
    """What the main thread did before the first and after the last GPU work, cut at the moments."""
    first, last = int(busy.start[0]), int(busy.end[-1])
    low, high = moments[:-1], moments[1:]
    before = np.flatnonzero(low < first)
    after = np.flatnonzero(high > last)
    start = np.concatenate([low[before], np.maximum(low[after], last)])
    end = np.concatenate([np.minimum(high[before], first), high[after]])
    keep = end > start
    return _main_thread(trace, start[keep], end[keep])


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
    names = trace.events["name"].gather(np.maximum(activity, 0))
    return parts.select(
        pl.Series("start_ns", start[parts["gap"].to_numpy()], dtype=pl.Int64),
        pl.col("duration_ns").cast(pl.Int64),
        pl.Series("cause", _HOST_NAMES).gather(parts["cause"].to_numpy()).alias("cause"),
        names.set(pl.Series(activity < 0), None).cast(pl.String).alias("name"),
    )


def _of_host(trace: Trace, moments: Ints, talk: Spans) -> tuple[Ints, pl.DataFrame]:
    """The main thread's time; where it waits while another thread communicates, that is communication."""
    sums = np.zeros((moments.size, len(CLASSES)), dtype=np.int64)
    waits = _main_thread(trace, moments[:-1], moments[1:])
    stretch = np.searchsorted(moments, waits["start_ns"].to_numpy(), side="right") - 1
    talks = coverage(talk, moments[:-1], moments[1:]) > 0
    waiting = waits["cause"].is_in(["host_unobserved", "host_blocking_call", "host_lock"]).to_numpy()
    meant = pl.Series(talks[np.minimum(stretch, max(talks.size - 1, 0))] & waiting if talks.size else waiting)
    waits = waits.with_columns(pl.when(meant).then(pl.lit(COMMUNICATION)).otherwise("cause").alias("cause"))
    _add(sums, stretch, waits)
    return sums, _did(waits, stretch)


def _did(waits: pl.DataFrame, stretch: Ints) -> pl.DataFrame:
    """Waits as details of the stretches they lie in."""
    return waits.select(
        pl.Series("stretch", stretch, dtype=pl.Int64), pl.col("cause").alias("class"), "name", ns="duration_ns"
    )
