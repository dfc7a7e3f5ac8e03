"""Checks of events, GPU side, clocks.

Rules 1 to 4 of PyTorch's trace validator are among them (`torch/profiler/_trace_validator.py`, torch 2.13), made with
correlation ids, which say more than the external ids used there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import numpy as np
import polars as pl
from msgspec import Struct

from traceloom.analyze.autograd import ENGINE
from traceloom.analyze.gpu_work import gpu_rows
from traceloom.analyze.host_events import OURS
from traceloom.analyze.intervals import union
from traceloom.analyze.kernel_efficiency import kernel_launches
from traceloom.analyze.names import vocabulary
from traceloom.graph.device_edges import BEGINNING, MUCH
from traceloom.system.units import count, duration, share
from traceloom.trace import vocabulary as cat
from traceloom.trace.arrays import column
from traceloom.trace.batch import TRACE, of_each, of_events, per_trace, stacked, unstacked
from traceloom.trace.notice import NoticeSeverity
from traceloom.trace.trace import Trace


class QualityCheck(Struct, frozen=True):
    """One check: `affected` of `total` things are so; the message is for when some are.

    Attributes:
        affected: How many were found.
        total: Of how many.
        severity: How bad it is, if any were found.
        message: One sentence with its numbers.
        slug: Name of the check and of its notice.
    """

    affected: int
    total: int
    severity: NoticeSeverity
    message: str
    slug: str


def grade(affected: int, total: int, limit: float) -> NoticeSeverity:
    """`warning` where the share is above the limit, else `info`."""
    return "warning" if total and affected > limit * total else "info"


def many(number: int, singular: str, plural: str | None = None) -> str:
    """`1 piece`, `2 pieces`."""
    return f"{count(number)} {singular if number == 1 else plural or singular + 's'}"


_ENOUGH_IDS = 500  # operators
_SAMPLED = 0.05  # of the numbers are in the file: recorded traces have 13 % and more
ABSURD_NS = 24 * 3600 * 10**9
"""A span this long is no measurement: profiles last seconds, and overflowed counters give days."""


def missing_ops(trace: Trace) -> QualityCheck | None:
    """GPU work or calls without a single framework operator."""
    seen = _count(trace, *cat.GPU_WORK, *cat.LAUNCHES)
    if not seen:
        return None
    ops = _count(trace, cat.OP)
    message = (
        "no framework operators were recorded (the profiler's CPU activity was off): operators, modules and phases are "
        "unknown, only calls and GPU work are shown"
    )
    return QualityCheck(0 if ops else seen, seen, "warning", message, slug="no-operators")


def operators_left_out(trace: Trace) -> QualityCheck | None:
    """Operators that were numbered one by one, of which a file holds a few: what lies between them is unknown."""
    ids = trace.events["external_id"].filter(trace.events["category"] == cat.OP).drop_nulls()
    if ids.len() < _ENOUGH_IDS:
        return None
    numbered = int(ids.max()) - int(ids.min()) + 1  # type: ignore[arg-type]
    held = ids.n_unique()
    message = (
        f"{count(held)} operators are in the file, with numbers that are {count(numbered)} apart: the others were left "
        "out (a sampled trace), so that idle time, and time between operators, may be theirs"
    )
    return QualityCheck(numbered - held if held < _SAMPLED * numbered else 0, numbered, "warning", message,
                 slug="operators-left-out")  # fmt: skip


def missing_shapes(trace: Trace) -> QualityCheck | None:
    """Ops without the shapes of their inputs."""
    is_op = (trace.events["category"] == cat.OP).to_numpy() & ~vocabulary(trace).events(OURS)
    ops = int(is_op.sum())
    if not ops:
        return None
    shaped = np.zeros(is_op.size, dtype=np.bool_)
    shaped[trace.tensors["event"].to_numpy()] = True
    without = ops - int((is_op & shaped).sum())
    message = (
        f"{count(without)} of {count(ops)} operators have no input shapes: they cannot be distinguished by size; "
        "record with shapes to see them"
    )
    # where shapes are on, some operators still have no tensors to speak of
    affected = without if without == ops else 0
    return QualityCheck(affected, ops, "info", message, slug="missing-shapes")


def missing_stacks(trace: Trace) -> QualityCheck | None:
    """No Python frames: what runs between operators is unknown."""
    ops = _count(trace, cat.OP)
    if not ops:
        return None
    frames = _count(trace, cat.PYTHON)
    message = (
        "no Python stacks were recorded: host time between operators shows as unobserved, and modules only as far as "
        "annotations go; record with stacks to see them, at some cost"
    )
    return QualityCheck(0 if frames else ops, ops, "info", message, slug="missing-stacks")


def shortened_events(trace: Trace) -> QualityCheck | None:
    """Events that overran the one they lie in."""
    host = trace.lanes["lane"].filter(trace.lanes["kind"] == "host")
    on_host = np.isin(column(trace, "lane"), host.to_numpy())
    events = int(on_host.sum())
    if not events:
        return None
    over = column(trace, "start_ns") + column(trace, "duration_ns") - column(trace, "nested_end_ns")
    lost = over[on_host & (over > 0)]
    message = (
        f"{count(lost.size)} of {many(events, 'host event')} crossed another one and are cut short, by "
        f"{duration(int(lost.sum()))} in all, so that no time counts twice"
    )
    return QualityCheck(lost.size, events, grade(lost.size, events, 0.01), message, slug="crossing-spans")


def negative_durations(trace: Trace) -> QualityCheck | None:
    """Events that end before they start."""
    total = trace.events.height
    affected = int((trace.events["duration_ns"] < 0).sum())
    message = f"{many(affected, 'event')} with a negative duration, counted as 0 ns: the recording is damaged there"
    return QualityCheck(affected, total, "warning", message, slug="negative-duration") if total else None


def absurd_durations(trace: Trace) -> QualityCheck | None:
    """Events of a day and more."""
    total = trace.events.height
    affected = int((trace.events["duration_ns"] >= ABSURD_NS).sum())
    message = (
        f"{many(affected, 'event')} longer than a day, which is a counter that overflowed: the window of the trace "
        "and every share of it are wrong"
    )
    return QualityCheck(affected, total, "error", message, slug="absurd-duration") if total else None


def unknown_categories(trace: Trace) -> QualityCheck | None:
    """Events of a category that this version does not know."""
    total = trace.events.height
    unknown = trace.events["name"].filter(trace.events["category"] == cat.OTHER)
    names = ", ".join(sorted(unknown.unique().to_list())[:3])
    message = (
        f"{many(unknown.len(), 'event')} of a category unknown to this version of Traceloom (for example {names!r}): "
        "shown in the timeline, counted nowhere"
    )
    return QualityCheck(unknown.len(), total, "info", message, slug="unknown-category") if total else None


def profiler_overhead(trace: Trace) -> QualityCheck | None:
    """Time that the profiler says it took itself."""
    window = trace.end_ns - trace.start_ns
    if not window:
        return None
    own = trace.events["category"] == cat.OVERHEAD
    start, duration_ns = (trace.events[name].filter(own).to_numpy() for name in ("start_ns", "duration_ns"))
    taken = union(start, start + duration_ns).total
    message = (
        f"the profiler reports {many(start.size, 'pause')} of its own (flushing buffers, allocating them), "
        f"{duration(taken)} or {share(taken, window)} of the window: this time is not the program's"
    )
    return QualityCheck(start.size, trace.events.height, grade(taken, window, 0.05), message, slug="profiler-overhead")


_DETAILS = {"kind": "kind", "element_type": "type", "in_elements": "size", "group_size": "group"}


def collectives_without_details(trace: Trace) -> QualityCheck | None:
    """Collective calls that do not say what they move (rule 5 of PyTorch's trace validator)."""
    calls = np.flatnonzero(vocabulary(trace).events(r"^record_param_comms$"))
    if not calls.size:
        return None
    present = np.zeros((trace.events.height + 1, len(_DETAILS)), dtype=np.bool_)  # of each event, and of none
    events = trace.collectives["event"].to_numpy()
    details = trace.collectives.select(pl.col(list(_DETAILS)).is_not_null()).to_numpy()
    np.logical_or.at(present, events, details)
    # what a call does not say itself, an annotation inside it may: `nccl:all_reduce`
    np.logical_or.at(present, column(trace, "parent", -1)[events], details)
    missing = ~present[calls]
    lacking = dict(zip(_DETAILS.values(), missing.sum(axis=0).tolist(), strict=True))
    counts = {word: number for word, number in lacking.items() if number}
    parts = [f"{', '.join(w for w, n in counts.items() if n == number)} in {count(number)}" for number in
             sorted(set(counts.values()), reverse=True)]  # fmt: skip
    affected = int(missing.any(axis=1).sum())
    message = (
        f"{count(affected)} of {count(calls.size)} collective calls do not say all that they move (missing: "
        f"{'; '.join(parts)}; an older PyTorch, or shapes were off): bytes and bandwidth of these may be unknown"
    )
    return QualityCheck(affected, calls.size, "info", message, slug="collectives-without-details")


def ambiguous_backward(trace: Trace) -> QualityCheck | None:
    """Sequence numbers with more than one backward op (rule 6 of PyTorch's trace validator)."""
    names = _names_of_sequence_numbers(trace)
    if not names.len():
        return None
    affected = int((names > 1).sum())
    message = (
        f"{count(affected)} of {count(names.len())} autograd sequence numbers belong to several backward operators: "
        "the forward operator of these is uncertain"
    )
    return QualityCheck(affected, names.len(), "info", message, slug="ambiguous-backward")


@of_each
def _names_of_sequence_numbers(traces: Sequence[Trace]) -> Iterable[pl.Series]:
    """For each sequence number of the backward pass how many names its nodes have."""
    parts = []
    for trace in traces:
        nodes = np.flatnonzero(vocabulary(trace).events(ENGINE) & (column(trace, "sequence", -1) >= 0))
        parts.append(trace.events[["name", "process", "forward_thread", "sequence"]][nodes])
    keys = [TRACE, "process", "forward_thread", "sequence"]
    names = stacked(parts).group_by(keys, maintain_order=True).agg(pl.col("name").n_unique())
    return [of_trace["name"] for of_trace in unstacked(names, traces)]


def _count(trace: Trace, *categories: str) -> int:
    return int(np.isin(column(trace, "category"), [cat.CATEGORIES.index(name) for name in categories]).sum())


EVENT_CHECKS: tuple[Callable[[Trace], QualityCheck | None], ...] = (
    missing_ops,
    operators_left_out,
    missing_shapes,
    missing_stacks,
    shortened_events,
    negative_durations,
    absurd_durations,
    unknown_categories,
    profiler_overhead,
    collectives_without_details,
    ambiguous_backward,
)

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
    severity = grade(work.orphan_count, work.work_count, 0.05)
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
        lost.size, launches.height, grade(lost.size, launches.height, 0.01), message, slug="launches-without-work"
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
    return QualityCheck(affected, total, grade(affected, total, 0.1), message, slug="instant-gpu-work")


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
