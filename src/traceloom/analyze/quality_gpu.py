"""Checks of the GPU side: orphans, clocks, edges of the window, overlaps, synchronisation records.

Rules 1 to 4 of PyTorch's trace validator are among them (`torch/profiler/_trace_validator.py`, torch 2.13), made with
correlation ids, which say more than the external ids used there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import numpy as np
import polars as pl
from msgspec import Struct

from traceloom.analyze.counters import kernel_launches
from traceloom.analyze.gaps import gpu_rows
from traceloom.analyze.remembered import of_each, per_trace
from traceloom.analyze.stacked import TRACE, of_events, stacked
from traceloom.analyze.verdict import QualityCheck, graded, many
from traceloom.analyze.vocabulary import vocabulary
from traceloom.link.device_edges import BEGINNING, MUCH
from traceloom.model import Trace
from traceloom.model import category as cat
from traceloom.model.arrays import column
from traceloom.model.units import count, duration, share

# Not fills: those of nothing (cuBLAS makes them) submit no work.
_SUBMITS = r"LaunchKernel|LaunchCooperativeKernel|GraphLaunch|Memcpy"
_STREAM_WAIT = "Stream Wait Event"
_COLD_NS = 200_000  # the first launch of a kernel may take so long until it runs


class _Figures(Struct, frozen=True):
    """Sums over the GPU work of a trace: counts of pieces, times in ns."""

    work_count: int = 0
    orphan_count: int = 0  # of no recorded launch
    orphan_ns: int = 0
    early_count: int = 0  # before their launch, and by how much at most
    early_ns: int = 0
    timed_count: int = 0
    overlapping_count: int = 0  # with the work before on the same stream
    instant_count: int = 0


def orphan_gpu_work(trace: Trace) -> QualityCheck | None:
    """GPU work that no launch in the file explains."""
    work = _figures(trace)
    if not work.work_count:
        return None
    message = (
        f"the launch of {count(work.orphan_count)} of {many(work.work_count, 'piece')} of GPU work "
        f"({duration(work.orphan_ns)}) is not in the file, mostly because the recording began later: the time counts, "
        "but no operator, module or step can be named for it"
    )
    severity = graded(work.orphan_count, work.work_count, 0.05)
    return QualityCheck(work.orphan_count, work.work_count, severity, message, slug="orphan-work")


def gpu_work_missing(trace: Trace) -> QualityCheck | None:
    """Launches were recorded, but nothing that ran on a GPU."""
    launches = _submissions(trace)
    if not launches.height or _work(trace).height:
        return None
    message = (
        f"{many(launches.height, 'launch', 'launches')} recorded, but no GPU work: the profiler could not trace "
        "the GPU (another profiler held it, or it was not asked to), so that device times are unknown, not zero"
    )
    return QualityCheck(launches.height, launches.height, "warning", message, slug="gpu-work-missing")


def busy_before_window(trace: Trace) -> QualityCheck | None:
    """GPUs that did nothing recorded at first, though work had been launched (`link` takes that time as given)."""
    work = _work(trace)
    if not work.height:
        return None
    window = max(trace.end_ns - trace.start_ns, 1)
    first = work.sort("start_ns").unique("device", keep="first", maintain_order=True).drop_nulls("launch")
    call = trace.events[first["launch"].to_list()][["start_ns", "duration_ns"]]
    early = call["start_ns"] - trace.start_ns <= BEGINNING * window
    waited = (first["start_ns"] - call["start_ns"] - call["duration_ns"]).filter(early)
    long = waited.filter(waited >= max(MUCH * window, _COLD_NS))
    longest = int(long.max() or 0)  # type: ignore[arg-type]
    message = (
        f"for {duration(longest)} ({share(longest, window)} of the window) a GPU did nothing that is recorded, though "
        "work had been launched: it was behind what was launched before the recording; that time counts as idle, and "
        "no change of recorded work moves it"
    )
    return QualityCheck(long.len(), work["device"].n_unique(), "warning", message, slug="busy-before-window")


def launches_without_work(trace: Trace) -> QualityCheck | None:
    """Launches whose GPU work is not in the file."""
    work = _work(trace)
    launches = _submissions(trace)
    if not work.height or not launches.height:
        return None
    # by correlation: a driver call inside a runtime call repeats its number
    done = np.isin(launches["correlation"].to_numpy(), work["correlation"].drop_nulls().to_numpy())
    lost = launches["start_ns"].to_numpy()[~done]
    late = int((lost > work["start_ns"].to_numpy().max()).sum())
    last = f" ({count(late)} of them after the last piece of GPU work)" if late else ""
    message = (
        f"the GPU work of {count(lost.size)} of {many(launches.height, 'launch', 'launches')} is not in the file"
        f"{last}: the recording ended first, or events were dropped; "
        "GPU time is missing there"
    )
    return QualityCheck(
        lost.size, launches.height, graded(lost.size, launches.height, 0.01), message, slug="launches-without-work"
    )


def work_before_launch(trace: Trace) -> QualityCheck | None:
    """GPU work that starts before its launch: the two clocks disagree (rule 1)."""
    work = _figures(trace)
    launched = work.work_count - work.orphan_count
    if not launched:
        return None
    message = (
        f"{many(work.early_count, 'piece')} of GPU work started before the launch, by up to {duration(work.early_ns)}: "
        "the clocks of host and GPU disagree by that much, and so do launch delays and idle causes"
    )
    return QualityCheck(work.early_count, launched, "warning", message, slug="gpu-work-before-launch")


def overlapping_work(trace: Trace) -> QualityCheck | None:
    """GPU work that begins before the work before it on the same stream has ended."""
    work = _figures(trace)
    if not work.timed_count:
        return None
    message = (
        f"{many(work.overlapping_count, 'piece')} of GPU work overlapped the one before on its own stream "
        "(programmatic launches, or several hardware queues): sums of kernel times exceed the time that passed; unions "
        "are right"
    )
    return QualityCheck(work.overlapping_count, work.timed_count, "info", message, slug="overlapping-gpu-work")


def instant_work(trace: Trace) -> QualityCheck | None:
    """GPU work that was too short for the clock."""
    work = _figures(trace)
    if not work.work_count:
        return None
    affected, total = work.instant_count, work.work_count
    message = (
        f"{count(affected)} of {many(total, 'piece')} of GPU work took no time by the clock of the recording: "
        "they are counted, but take no time in any sum, and have no bandwidth"
    )
    return QualityCheck(affected, total, graded(affected, total, 0.1), message, slug="instant-gpu-work")


def unpaired_counters(trace: Trace) -> QualityCheck | None:
    """Counters of kernels that cannot be joined to launches."""
    ranges = int((trace.events["category"] == cat.COUNTER_RANGE).sum())
    if not ranges:
        return None
    launched = len(kernel_launches(trace))
    message = (
        f"{many(ranges, 'kernel')} with counters, but {many(launched, 'launch', 'launches')} of kernels: they "
        "cannot be paired, so the operators of the counters are unknown"
    )
    return QualityCheck(0 if ranges == launched else ranges, ranges, "warning", message, slug="unpaired-counters")


def waits_without_record(trace: Trace) -> QualityCheck | None:
    """Waits for an event that do not say which record they await (rule 2)."""
    kind = trace.syncs["kind"]
    awaited = trace.syncs["record_correlation"].filter((kind == _STREAM_WAIT) | (kind == "Event Sync"))
    if not awaited.len():
        return None
    affected = awaited.len() - int((awaited >= 0).sum())
    message = (
        f"{count(affected)} of {count(awaited.len())} waits for an event do not say which record they await: "
        "dependencies between streams are incomplete"
    )
    return QualityCheck(affected, awaited.len(), "info", message, slug="waits-without-record")


def syncs_while_running(trace: Trace) -> QualityCheck | None:
    """Stream synchronisations that are said to begin while a kernel of the stream runs (rule 3)."""
    of_stream = trace.syncs["kind"] == "Stream Sync"
    if not of_stream.any():
        return None
    kernels = _work(trace).filter(pl.col("category") == cat.KERNEL)
    syncs = (
        trace.syncs.filter(of_stream)
        .join(trace.events[["event", "device", "start_ns"]], on="event")
        .select("device", "stream", "start_ns")
        .drop_nulls()
        .sort("start_ns")
    )
    if not syncs.height or not kernels.height:
        return None
    ends = kernels.select(
        "device", "stream", pl.col("start_ns") + 1, end_ns=pl.col("start_ns") + pl.col("duration_ns")
    ).sort("start_ns")
    met = syncs.join_asof(ends, on="start_ns", by=["device", "stream"], check_sortedness=False)
    affected = int(met.select((pl.col("end_ns") > pl.col("start_ns")).sum()).item())
    message = (
        f"{count(affected)} of {count(syncs.height)} stream synchronisations are recorded as begun while a kernel of "
        "their stream still ran: their times cannot be trusted"
    )
    return QualityCheck(affected, syncs.height, "info", message, slug="syncs-while-running")


def waits_for_unknown_record(trace: Trace) -> QualityCheck | None:
    """Waits whose event record is not in the file, or lies in the future (rule 4)."""
    awaits = (trace.syncs["kind"] == _STREAM_WAIT) & (trace.syncs["record_correlation"] >= 0)
    if not awaits.any():
        return None
    waits = (
        trace.syncs.filter(awaits)
        .join(trace.events[["event", "start_ns"]], on="event")
        .select("record_correlation", "start_ns")
    )
    called = trace.events[["category", "name", "correlation", "start_ns"]].filter(
        pl.col("category").is_in(cat.LAUNCHES)
    )
    calls = called.filter(pl.col("name").str.contains("EventRecord"))
    records = calls.group_by("correlation").agg(pl.col("start_ns").min().alias("recorded_ns"))
    met = waits.join(records, left_on="record_correlation", right_on="correlation", how="left")
    unknown = pl.col("recorded_ns").is_null() | (pl.col("recorded_ns") > pl.col("start_ns"))
    affected = int(met.select(unknown.sum()).item())
    message = (
        f"{count(affected)} of {count(waits.height)} waits between streams await an event record that is not in the "
        "file or comes later: dependencies between streams are incomplete"
    )
    return QualityCheck(affected, waits.height, "info", message, slug="waits-for-unknown-record")


@per_trace
def _work(trace: Trace) -> pl.DataFrame:
    columns = ["category", "start_ns", "duration_ns", "device", "stream", "correlation", "launch"]
    return trace.events[columns][gpu_rows(trace)]


@of_each
def _figures(traces: Sequence[Trace]) -> Iterable[_Figures]:
    work = stacked(map(_work, traces))
    work = work.hstack([of_events(traces, work, "launch", "start_ns").alias("called_ns")])
    start, ns = pl.col("start_ns"), pl.col("duration_ns")
    orphan, early = pl.col("launch").is_null(), pl.col("called_ns") - start
    reach = pl.when(ns > 0).then(start + ns).cum_max().forward_fill().shift(1).over(TRACE, "device", "stream")
    sums = (
        work.with_columns(((ns > 0) & (start < reach)).alias("overlaps"))
        .group_by(TRACE)
        .agg(
            work_count=pl.len(),
            orphan_count=orphan.sum(),
            orphan_ns=ns.filter(orphan).clip(lower_bound=0).sum(),
            early_count=(early > 0).sum(),
            early_ns=early.clip(lower_bound=0).max().fill_null(0),
            timed_count=(ns > 0).sum(),
            overlapping_count=pl.col("overlaps").sum(),
            instant_count=(ns == 0).sum(),
        )
    )
    of_trace = {row.pop(TRACE): _Figures(**row) for row in sums.to_dicts()}
    return [of_trace.get(number, _Figures()) for number in range(len(traces))]


@per_trace
def _submissions(trace: Trace) -> pl.DataFrame:
    is_call = np.isin(column(trace, "category"), [cat.CATEGORIES.index(name) for name in cat.LAUNCHES])
    rows = np.flatnonzero(is_call & vocabulary(trace).events(_SUBMITS))
    return trace.events[["correlation", "start_ns"]][rows].drop_nulls("correlation")


GPU_CHECKS: tuple[Callable[[Trace], QualityCheck | None], ...] = (
    orphan_gpu_work,
    gpu_work_missing,
    busy_before_window,
    launches_without_work,
    work_before_launch,
    overlapping_work,
    instant_work,
    unpaired_counters,
    waits_without_record,
    syncs_while_running,
    waits_for_unknown_record,
)
