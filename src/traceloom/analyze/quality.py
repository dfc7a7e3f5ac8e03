"""Quality of a capture: its checks, of recorded events, GPU work, launches, synchronisations, clocks,
steps, ranks and the cost of recording, and which results each fault weakens.

Rules 1 to 4 of PyTorch's trace validator are among them (`torch/profiler/_trace_validator.py`,
torch 2.13), based on correlation ids, which carry more information than the external ids used
there.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TypedDict

import numpy as np
import polars as pl
from msgspec import Struct

from traceloom.analyze.autograd import ENGINE_NODE_PATTERN
from traceloom.analyze.gpu_work import find_gpu_event_rows, find_work_behind_unrecorded
from traceloom.analyze.host_events import TRACELOOM_ANNOTATION_PATTERN
from traceloom.analyze.intervals import merge_intervals
from traceloom.analyze.kernel_efficiency import find_launch_calls
from traceloom.analyze.names import build_vocabulary
from traceloom.analyze.steps import find_step_spans
from traceloom.graph.device_edges import MIN_NOTICED_SHARE
from traceloom.system.units import format_count, format_duration, format_share
from traceloom.trace import vocabulary as vocab
from traceloom.trace.arrays import get_event_column
from traceloom.trace.batch import (
    TRACE_COLUMN,
    cache_per_trace,
    concatenate_by_trace,
    gather_event_column,
    run_in_batches,
    split_by_trace,
)
from traceloom.trace.frames import Result, build_schema
from traceloom.trace.notice import Notice, NoticeSeverity, sort_by_severity
from traceloom.trace.trace import Trace


class QualityCheck(Struct, frozen=True):
    """One check: `affected` of `total` things were found; the message applies when there are any.

    Attributes:
        affected: How many were found.
        total: Of how many.
        severity: The severity if any were found.
        message: One sentence with its numbers.
        slug: Name of the check and of its notice.
    """

    affected: int
    total: int
    severity: NoticeSeverity
    message: str
    slug: str


def choose_severity(affected: int, total: int, limit: float) -> NoticeSeverity:
    """Returns `warning` where the share is above the limit, else `info`."""
    return "warning" if total and affected > limit * total else "info"


def format_counted(number: int, singular: str, plural: str | None = None) -> str:
    """Returns `1 piece`, `2 pieces`."""
    return f"{format_count(number)} {singular if number == 1 else plural or singular + 's'}"


_MIN_IDS = 500  # operators
_MAX_SAMPLED_SHARE = 0.05  # of the numbers are in the file: recorded traces have 13 % and more


def check_missing_ops(trace: Trace) -> QualityCheck | None:
    """Reports GPU work or calls without a single framework operator."""
    work_count = _count(trace, *vocab.GPU_WORK, *vocab.LAUNCHES)
    if not work_count:
        return None
    ops = _count(trace, vocab.OP)
    message = (
        "no framework operators were recorded (the profiler's CPU activity was off): operators, modules and phases are "
        "unknown, only calls and GPU work are shown"
    )
    return QualityCheck(
        0 if ops else work_count, work_count, "warning", message, slug="no-operators"
    )


def check_sampled_operators(trace: Trace) -> QualityCheck | None:
    """Reports operators that were numbered one by one, of which a file holds a few, so that it is
    unknown what lies between them.
    """
    ids = trace.events["external_id"].filter(trace.events["category"] == vocab.OP).drop_nulls()
    if ids.len() < _MIN_IDS:
        return None
    numbered = int(ids.max()) - int(ids.min()) + 1  # type: ignore[arg-type]
    recorded = ids.n_unique()
    message = (
        f"{format_count(recorded)} operators are in the file, with numbers that are {format_count(numbered)} apart: the others were left "
        "out (a sampled trace), so that idle time, and time between operators, may be theirs"
    )
    return QualityCheck(
        numbered - recorded if recorded < _MAX_SAMPLED_SHARE * numbered else 0,
        numbered,
        "warning",
        message,
        slug="operators-left-out",
    )


def check_missing_shapes(trace: Trace) -> QualityCheck | None:
    """Reports ops without the shapes of their inputs."""
    is_op = (trace.events["category"] == vocab.OP).to_numpy() & ~build_vocabulary(trace).events(
        TRACELOOM_ANNOTATION_PATTERN
    )
    ops = int(is_op.sum())
    if not ops:
        return None
    shaped = np.zeros(is_op.size, dtype=np.bool_)
    shaped[trace.tensors["event"].to_numpy()] = True
    without = ops - int((is_op & shaped).sum())
    message = (
        f"{format_count(without)} of {format_count(ops)} operators have no input shapes: they cannot be distinguished by size; "
        "record with shapes to see them"
    )
    # Where shapes are on, some operators still have no tensors.
    affected = without if without == ops else 0
    return QualityCheck(affected, ops, "info", message, slug="missing-shapes")


def check_missing_stacks(trace: Trace) -> QualityCheck | None:
    """Reports missing Python frames, without which it is unknown what runs between operators."""
    ops = _count(trace, vocab.OP)
    if not ops:
        return None
    frames = _count(trace, vocab.PYTHON)
    message = (
        "no Python stacks were recorded: host time between operators shows as unobserved, and modules only as far as "
        "annotations go; record with stacks to see them, at some cost"
    )
    return QualityCheck(0 if frames else ops, ops, "info", message, slug="missing-stacks")


def check_profiler_overhead(trace: Trace) -> QualityCheck | None:
    """Reports time that the profiler itself took, by its own record."""
    window = trace.end_ns - trace.start_ns
    if not window:
        return None
    is_overhead = trace.events["category"] == vocab.OVERHEAD
    start, duration_ns = (
        trace.events[name].filter(is_overhead).to_numpy() for name in ("start_ns", "duration_ns")
    )
    overhead_ns = merge_intervals(start, start + duration_ns).total
    message = (
        f"the profiler reports {format_counted(start.size, 'pause')} of its own (flushing buffers, allocating them), "
        f"{format_duration(overhead_ns)} or {format_share(overhead_ns, window)} of the window: this time is not the program's"
    )
    return QualityCheck(
        start.size,
        trace.events.height,
        choose_severity(overhead_ns, window, 0.05),
        message,
        slug="profiler-overhead",
    )


_DETAIL_LABELS = {
    "kind": "kind",
    "element_type": "type",
    "in_elements": "size",
    "group_size": "group",
}


def check_collective_details(trace: Trace) -> QualityCheck | None:
    """Reports collective calls without a description of what they move (rule 5 of PyTorch's trace
    validator).
    """
    calls = np.flatnonzero(build_vocabulary(trace).events(r"^record_param_comms$"))
    if not calls.size:
        return None
    # Of each event, and of none
    present = np.zeros((trace.events.height + 1, len(_DETAIL_LABELS)), dtype=np.bool_)
    events = trace.collectives["event"].to_numpy()
    details = trace.collectives.select(pl.col(list(_DETAIL_LABELS)).is_not_null()).to_numpy()
    np.logical_or.at(present, events, details)
    # The description that a call lacks may be in an annotation inside it: `nccl:all_reduce`.
    np.logical_or.at(present, get_event_column(trace, "parent", -1)[events], details)
    missing = ~present[calls]
    missing_counts = dict(zip(_DETAIL_LABELS.values(), missing.sum(axis=0).tolist(), strict=True))
    counts = {word: number for word, number in missing_counts.items() if number}
    parts = [
        f"{', '.join(w for w, n in counts.items() if n == number)} in {format_count(number)}"
        for number in sorted(set(counts.values()), reverse=True)
    ]
    affected = int(missing.any(axis=1).sum())
    message = (
        f"{format_count(affected)} of {format_count(calls.size)} collective calls do not say all that they move (missing: "
        f"{'; '.join(parts)}; an older PyTorch, or shapes were off): bytes and bandwidth of these may be unknown"
    )
    return QualityCheck(affected, calls.size, "info", message, slug="collectives-without-details")


def check_ambiguous_backward(trace: Trace) -> QualityCheck | None:
    """Reports sequence numbers with more than one backward op (rule 6 of PyTorch's trace
    validator).
    """
    names = _count_names_by_sequence(trace)
    if not names.len():
        return None
    affected = int((names > 1).sum())
    message = (
        f"{format_count(affected)} of {format_count(names.len())} autograd sequence numbers belong to several backward operators: "
        "the forward operator of these is uncertain"
    )
    return QualityCheck(affected, names.len(), "info", message, slug="ambiguous-backward")


@run_in_batches
def _count_names_by_sequence(traces: Sequence[Trace]) -> Iterable[pl.Series]:
    """Returns for each sequence number of the backward pass how many names its nodes have."""
    parts = []
    for trace in traces:
        nodes = np.flatnonzero(
            build_vocabulary(trace).events(ENGINE_NODE_PATTERN)
            & (get_event_column(trace, "sequence", -1) >= 0)
        )
        parts.append(trace.events[["name", "process", "forward_thread", "sequence"]][nodes])
    names = (
        concatenate_by_trace(parts)
        .group_by(TRACE_COLUMN, "process", "forward_thread", "sequence", maintain_order=True)
        .agg(pl.col("name").n_unique())
    )
    return [trace_names["name"] for trace_names in split_by_trace(names, traces)]


def _count(trace: Trace, *categories: str) -> int:
    return int(
        np.isin(
            get_event_column(trace, "category"),
            [vocab.CATEGORIES.index(name) for name in categories],
        ).sum()
    )


EVENT_CHECKS: tuple[Callable[[Trace], QualityCheck | None], ...] = (
    check_missing_ops,
    check_sampled_operators,
    check_missing_shapes,
    check_missing_stacks,
    check_profiler_overhead,
    check_collective_details,
    check_ambiguous_backward,
)

# Without fills: those of size 0 (cuBLAS makes them) submit no work.
_SUBMITTING_CALLS = r"LaunchKernel|LaunchCooperativeKernel|GraphLaunch|Memcpy"
_STREAM_WAIT = "Stream Wait Event"
_WAITS = r"(Device|Stream|Event|Ctx)Synchronize$"
_MAX_COLD_START_NS = 200_000  # the first launch of a kernel may take this long until it runs


_MIN_CONTRADICTION_NS = 200_000  # a wait may end this long before or after what it waits for


class _WorkFigures(Struct, frozen=True):
    """Sums over the GPU work of a trace: counts of pieces, times in ns."""

    work_count: int = 0
    orphan_count: int = 0  # of no recorded launch
    orphan_ns: int = 0
    early_count: int = 0  # before their launch, and by how much at most
    early_ns: int = 0
    timed_count: int = 0
    overlapping_count: int = 0  # with the work before on the same stream
    instant_count: int = 0


def check_orphan_gpu_work(trace: Trace) -> QualityCheck | None:
    """Reports GPU work without a launch in the file."""
    work = _compute_figures(trace)
    if not work.work_count:
        return None
    message = (
        f"the launch of {format_count(work.orphan_count)} of {format_counted(work.work_count, 'piece')} of GPU work "
        f"({format_duration(work.orphan_ns)}) is not in the file, mostly because the recording began later: the time counts, "
        "but no operator, module or step can be named for it"
    )
    return QualityCheck(
        work.orphan_count,
        work.work_count,
        choose_severity(work.orphan_count, work.work_count, 0.05),
        message,
        slug="orphan-work",
    )


def check_missing_gpu_work(trace: Trace) -> QualityCheck | None:
    """Reports launches in a trace without work on a GPU."""
    launches = _list_submitting_calls(trace)
    if not launches.height or _select_gpu_work(trace).height:
        return None
    message = (
        f"{format_counted(launches.height, 'launch', 'launches')} recorded, but no GPU work: the profiler could not trace "
        "the GPU (another profiler held it, or it was not asked to), so that device times are unknown, not zero"
    )
    return QualityCheck(
        launches.height, launches.height, "warning", message, slug="gpu-work-missing"
    )


def check_unused_device(trace: Trace) -> QualityCheck | None:
    """Reports devices that the process saw, where it launched nothing on any."""
    devices = trace.devices
    if _select_gpu_work(trace).height or _list_submitting_calls(trace).height or not devices.height:
        return None
    message = (
        f"no launch and no GPU work is recorded, though the process sees {format_counted(devices.height, 'GPU')} "
        f"({devices['name'][0] or 'of an unknown model'}): the model ran on the CPU, or the recording left the GPU out"
    )
    return QualityCheck(devices.height, devices.height, "info", message, slug="gpu-not-used")


def check_busy_before_window(trace: Trace) -> QualityCheck | None:
    """Reports GPUs without recorded work at first, though work had been launched (`link` takes that
    time as given).
    """
    devices = _select_gpu_work(trace)["device"].n_unique()
    if not devices:
        return None
    window = max(trace.end_ns - trace.start_ns, 1)
    least_ns = max(MIN_NOTICED_SHARE * window, _MAX_COLD_START_NS)
    late = find_work_behind_unrecorded(trace).filter(pl.col("waited_ns") >= least_ns)
    longest = int(late["waited_ns"].max() or 0)  # type: ignore[arg-type]
    message = (
        f"for {format_duration(longest)} ({format_share(longest, window)} of the window) a GPU did nothing that is recorded, though "
        "work had been launched: it was behind what was launched before the recording; that time counts as idle, and "
        "no change of recorded work moves it"
    )
    return QualityCheck(
        late["device"].n_unique(), devices, "warning", message, slug="busy-before-window"
    )


def check_launches_without_work(trace: Trace) -> QualityCheck | None:
    """Reports launches whose GPU work is not in the file."""
    work = _select_gpu_work(trace)
    launches = _list_submitting_calls(trace)
    if not work.height or not launches.height:
        return None
    # By correlation: a driver call inside a runtime call repeats its number.
    done = np.isin(launches["correlation"].to_numpy(), work["correlation"].drop_nulls().to_numpy())
    lost = launches["start_ns"].to_numpy()[~done]
    # Some files give several kernels of single launches one number: there is as much work as calls.
    called = trace.events["name"].gather(work["launch"].drop_nulls()).cast(pl.String)
    if work.height >= launches.height and not called.str.contains("Graph", literal=True).any():
        lost = lost[:0]
    late = int((lost > work["start_ns"].to_numpy().max()).sum())
    last = f" ({format_count(late)} of them after the last piece of GPU work)" if late else ""
    message = (
        f"the GPU work of {format_count(lost.size)} of {format_counted(launches.height, 'launch', 'launches')} is not in the file"
        f"{last}: the recording ended first, or events were dropped; "
        "GPU time is missing there"
    )
    return QualityCheck(
        lost.size,
        launches.height,
        choose_severity(lost.size, launches.height, 0.01),
        message,
        slug="launches-without-work",
    )


def check_work_before_launch(trace: Trace) -> QualityCheck | None:
    """Reports GPU work that starts before its launch: the two clocks disagree (rule 1)."""
    work = _compute_figures(trace)
    launched = work.work_count - work.orphan_count
    if not launched:
        return None
    message = (
        f"{format_counted(work.early_count, 'piece')} of GPU work started before the launch, by up to {format_duration(work.early_ns)}: "
        "the clocks of host and GPU disagree by that much, and so do launch delays and idle causes"
    )
    return QualityCheck(
        work.early_count, launched, "warning", message, slug="gpu-work-before-launch"
    )


def check_waits_against_work(trace: Trace) -> QualityCheck | None:
    """Reports synchronisations that end long after all recorded GPU work, or long before work that
    they waited for.
    """
    work = _select_gpu_work(trace).drop_nulls("launch")
    waits = trace.events.filter(
        pl.col("category").is_in(vocab.LAUNCHES),
        pl.col("name").cast(pl.String).str.contains(_WAITS),
    )
    if not waits.height or not work.height:
        return None
    start = waits["start_ns"].to_numpy()
    end = start + waits["duration_ns"].to_numpy()
    work_end = (work["start_ns"] + work["duration_ns"]).to_numpy()
    before = np.searchsorted(work["start_ns"].to_numpy(), end)  # work that had begun
    reached = np.append(np.iinfo(np.int64).max, np.maximum.accumulate(work_end))[before]
    beyond_ns = end - np.maximum(start, reached)
    # A wait for the device covers all that was launched before, where there is one device.
    called = trace.events["start_ns"].gather(work["launch"]).to_numpy()
    order = np.argsort(called, kind="stable")
    launched = np.append(0, np.maximum.accumulate(work_end[order]))
    launched = launched[np.searchsorted(called[order], start)]
    whole = waits["name"].cast(pl.String).str.contains("Device", literal=True).to_numpy()
    short_ns = np.where(whole & (work["device"].n_unique() == 1), launched - end, 0)
    gap_ns = np.maximum(beyond_ns, short_ns)
    affected = int((gap_ns > _MIN_CONTRADICTION_NS).sum())
    longest = format_duration(int(gap_ns.max()))
    message = (
        f"{format_counted(affected, 'synchronisation')} ended up to {longest} after all recorded GPU work, or before work that "
        "they waited for: the clocks of host and GPU disagree by that much, or work is missing in the file"
    )
    return QualityCheck(affected, waits.height, "warning", message, slug="waits-contradict-work")


def check_overlapping_work(trace: Trace) -> QualityCheck | None:
    """Reports GPU work that begins before the work before it on the same stream has ended."""
    work = _compute_figures(trace)
    if not work.timed_count:
        return None
    message = (
        f"{format_counted(work.overlapping_count, 'piece')} of GPU work overlapped the one before on its own stream "
        "(programmatic launches, or several hardware queues): sums of kernel times exceed the time that passed; unions "
        "are right"
    )
    return QualityCheck(
        work.overlapping_count, work.timed_count, "info", message, slug="overlapping-gpu-work"
    )


def check_instant_work(trace: Trace) -> QualityCheck | None:
    """Reports GPU work that was too short for the clock."""
    work = _compute_figures(trace)
    if not work.work_count:
        return None
    affected, total = work.instant_count, work.work_count
    message = (
        f"{format_count(affected)} of {format_counted(total, 'piece')} of GPU work took no time by the clock of the recording: "
        "they are counted, but take no time in any sum, and have no bandwidth"
    )
    return QualityCheck(
        affected, total, choose_severity(affected, total, 0.1), message, slug="instant-gpu-work"
    )


def check_unpaired_counters(trace: Trace) -> QualityCheck | None:
    """Reports counters of kernels that cannot be joined to launches."""
    ranges = int((trace.events["category"] == vocab.COUNTER_RANGE).sum())
    if not ranges:
        return None
    launched = len(find_launch_calls(trace))
    message = (
        f"{format_counted(ranges, 'kernel')} with counters, but {format_counted(launched, 'launch', 'launches')} of kernels: they "
        "cannot be paired, so the operators of the counters are unknown"
    )
    return QualityCheck(
        0 if ranges == launched else ranges, ranges, "warning", message, slug="unpaired-counters"
    )


def check_waits_without_record(trace: Trace) -> QualityCheck | None:
    """Reports waits for an event that do not state which record they await (rule 2)."""
    kind = trace.syncs["kind"]
    awaited = trace.syncs["record_correlation"].filter(
        (kind == _STREAM_WAIT) | (kind == "Event Sync")
    )
    if not awaited.len():
        return None
    affected = awaited.len() - int((awaited >= 0).sum())
    message = (
        f"{format_count(affected)} of {format_count(awaited.len())} waits for an event do not say which record they await: "
        "dependencies between streams are incomplete"
    )
    return QualityCheck(affected, awaited.len(), "info", message, slug="waits-without-record")


def check_syncs_while_running(trace: Trace) -> QualityCheck | None:
    """Reports stream synchronisations whose recorded start is while a kernel of the stream runs
    (rule 3).
    """
    is_stream_sync = trace.syncs["kind"] == "Stream Sync"
    if not is_stream_sync.any():
        return None
    kernels = _select_gpu_work(trace).filter(pl.col("category") == vocab.KERNEL)
    syncs = (
        trace.syncs.filter(is_stream_sync)
        .join(trace.events[["event", "device", "start_ns"]], on="event")
        .select("device", "stream", "start_ns")
        .drop_nulls()
        .sort("start_ns")
    )
    if not syncs.height or not kernels.height:
        return None
    kernel_ends = kernels.select(
        "device",
        "stream",
        pl.col("start_ns") + 1,
        end_ns=pl.col("start_ns") + pl.col("duration_ns"),
    ).sort("start_ns")
    matched = syncs.join_asof(
        kernel_ends, on="start_ns", by=["device", "stream"], check_sortedness=False
    )
    affected = int(matched.select((pl.col("end_ns") > pl.col("start_ns")).sum()).item())
    message = (
        f"{format_count(affected)} of {format_count(syncs.height)} stream synchronisations are recorded as begun while a kernel of "
        "their stream still ran: their times cannot be trusted"
    )
    return QualityCheck(affected, syncs.height, "info", message, slug="syncs-while-running")


def check_waits_for_unknown_record(trace: Trace) -> QualityCheck | None:
    """Reports waits whose event record is not in the file, or lies in the future (rule 4)."""
    awaits = (trace.syncs["kind"] == _STREAM_WAIT) & (trace.syncs["record_correlation"] >= 0)
    if not awaits.any():
        return None
    waits = (
        trace.syncs.filter(awaits)
        .join(trace.events[["event", "start_ns"]], on="event")
        .select("record_correlation", "start_ns")
    )
    calls = trace.events[["category", "name", "correlation", "start_ns"]].filter(
        pl.col("category").is_in(vocab.LAUNCHES), pl.col("name").str.contains("EventRecord")
    )
    records = calls.group_by("correlation").agg(pl.col("start_ns").min().alias("recorded_ns"))
    met = waits.join(records, left_on="record_correlation", right_on="correlation", how="left")
    unknown = pl.col("recorded_ns").is_null() | (pl.col("recorded_ns") > pl.col("start_ns"))
    affected = int(met.select(unknown.sum()).item())
    message = (
        f"{format_count(affected)} of {format_count(waits.height)} waits between streams await an event record that is not in the "
        "file or comes later: dependencies between streams are incomplete"
    )
    return QualityCheck(affected, waits.height, "info", message, slug="waits-for-unknown-record")


@cache_per_trace
def _select_gpu_work(trace: Trace) -> pl.DataFrame:
    columns = ["category", "start_ns", "duration_ns", "device", "stream", "correlation", "launch"]
    return trace.events[columns][find_gpu_event_rows(trace)]


@run_in_batches
def _compute_figures(traces: Sequence[Trace]) -> Iterable[_WorkFigures]:
    work = concatenate_by_trace(map(_select_gpu_work, traces))
    work = work.hstack([gather_event_column(traces, work, "launch", "start_ns").alias("called_ns")])
    start, ns = pl.col("start_ns"), pl.col("duration_ns")
    orphan, early = pl.col("launch").is_null(), pl.col("called_ns") - start
    reach = (
        pl.when(ns > 0)
        .then(start + ns)
        .cum_max()
        .forward_fill()
        .shift(1)
        .over(TRACE_COLUMN, "device", "stream")
    )
    sums = (
        work.with_columns(((ns > 0) & (start + vocab.CLOCK_JITTER_NS < reach)).alias("overlaps"))
        .group_by(TRACE_COLUMN)
        .agg(
            work_count=pl.len(),
            orphan_count=orphan.sum(),
            orphan_ns=ns.filter(orphan).clip(lower_bound=0).sum(),
            early_count=(early > vocab.CLOCK_JITTER_NS).sum(),
            early_ns=early.clip(lower_bound=0).max().fill_null(0),
            timed_count=(ns > 0).sum(),
            overlapping_count=pl.col("overlaps").sum(),
            instant_count=(ns == 0).sum(),
        )
    )
    figures_by_trace = {row.pop(TRACE_COLUMN): _WorkFigures(**row) for row in sums.to_dicts()}
    return [figures_by_trace.get(number, _WorkFigures()) for number in range(len(traces))]


@cache_per_trace
def _list_submitting_calls(trace: Trace) -> pl.DataFrame:
    is_call = np.isin(
        get_event_column(trace, "category"),
        [vocab.CATEGORIES.index(name) for name in vocab.LAUNCHES],
    )
    rows = np.flatnonzero(is_call & build_vocabulary(trace).events(_SUBMITTING_CALLS))
    return trace.events[["correlation", "start_ns"]][rows].drop_nulls("correlation")


GPU_CHECKS: tuple[Callable[[Trace], QualityCheck | None], ...] = (
    check_orphan_gpu_work,
    check_missing_gpu_work,
    check_unused_device,
    check_busy_before_window,
    check_launches_without_work,
    check_work_before_launch,
    check_waits_against_work,
    check_overlapping_work,
    check_instant_work,
    check_unpaired_counters,
    check_waits_without_record,
    check_syncs_while_running,
    check_waits_for_unknown_record,
)


_LAUNCHES_WEAKENED = "delays and queue depths leave such work out"
_DEVICE_TIME_WEAKENED = "device time of operators is too small by this work"
_NO_OWNER = "rows without operator"

EFFECTS: dict[str, dict[str, str]] = {
    "orphan-work": {
        "ranks[*].idle": "gaps before such work have no launch to explain them",
        "operators": _DEVICE_TIME_WEAKENED,
        "modules": "device time of modules is too small by this work",
        "kernel_shapes": _NO_OWNER,
        "kinds": "where a name alone is ambiguous the kind is a guess: optimizer work counts as elementwise",
        "roofline": "such work has no model",
        "launches": _LAUNCHES_WEAKENED,
        "per_step": "such work belongs to no step",
        "critical_path": "nothing on the host leads to such work",
    },
    "gpu-work-missing": {
        "ranks[*].devices": "GPU time is unknown, not zero",
        "kernels": "there is none to show",
        "operators": "device time is unknown",
        "answer": "it can only speak of the host",
    },
    "gpu-not-used": {"answer": "it speaks of the host alone"},
    "impossible-duration": {
        "answer": "such events count as long as most of their name",
        "ranks[*].devices": "busy time is a guess for such work",
        "kernels": "sums hold a guess for such work",
    },
    "busy-before-window": {
        "ranks[*].idle": "what the GPU did there is unknown, not idle",
        "answer": "the GPU was busier than it says",
        "findings": "no fix saves that time",
        "critical_path": "that time is taken as given",
    },
    "launches-without-work": {
        "ranks[*].devices": "busy time is too small, idle time too large",
        "ranks[*].idle": "gaps may hold work that was not recorded",
        "kernels": "counts and sums are too small",
        "kinds": "sums are too small",
        "operators": _DEVICE_TIME_WEAKENED,
        "launches": "queues seem to empty too late: such work never starts",
    },
    "gpu-work-before-launch": {
        "ranks[*].idle": "causes compare the clocks of host and GPU: off by as much",
        "launches": "delays are off by as much; negative ones count as 0",
        "critical_path": "edges between host and GPU are off by as much",
    },
    "waits-contradict-work": {
        "answer": "idle time, and what the host did meanwhile, are off by as much",
        "ranks[*].idle": "causes compare the clocks of host and GPU: off by as much",
        "findings": "savings of waits and of idle time are off by as much",
        "critical_path": "edges between host and GPU are off by as much",
    },
    "overlapping-gpu-work": {
        "kernels": "sums exceed the time that passed",
        "kinds": "sums exceed exclusive times, which are right",
        "operators": "device times exceed the time that passed",
        "roofline": "kernels that share the GPU seem slower than they are",
    },
    "instant-gpu-work": {
        "kernels": "counts hold such work, sums do not",
        "copies": "such copies are in no bandwidth",
        "roofline": "such work seems free",
    },
    "unpaired-counters": {"counters": "operators of the counters are unknown"},
    "waits-without-record": {
        "critical_path": "dependencies between streams are guessed from order",
        "ranks[*].idle": "waits for another stream may have another cause",
    },
    "syncs-while-running": {"critical_path": "what the host waited for there is uncertain"},
    "waits-for-unknown-record": {
        "critical_path": "dependencies between streams are incomplete",
        "ranks[*].idle": "waits for another stream may have another cause",
    },
    "no-operators": {
        "operators": "there are none",
        "modules": "there are none",
        "kernel_shapes": _NO_OWNER,
        "kinds": "names alone decide",
        "roofline": "nothing has a model",
        "ranks[*].host": "phases and activities are unknown",
    },
    "missing-shapes": {
        "kernel_shapes": "all shapes of an operator share a row",
        "kinds": "bounds are unknown",
        "roofline": "nothing has a model",
        "operators": "not distinguished by size",
    },
    "operators-left-out": {
        "operators": "most are missing",
        "ranks[*].host": "time between operators may be that of operators that are not in the file",
        "ranks[*].idle": "idle time may be that of work that is not in the file",
    },
    "missing-stacks": {
        "modules": "only annotations name modules",
        "ranks[*].host": "time between operators is unobserved",
        "ranks[*].idle": "gaps that Python causes show as unobserved",
    },
    "crossing-spans": {
        "operators": "host times of cut events are too small",
        "ranks[*].host": "the cut time counts for whoever follows",
    },
    "negative-duration": {
        "kernels": "such events count as 0",
        "operators": "such events count as 0",
    },
    "absurd-duration": {
        "answer": "the window is wrong, and so is every share of it",
        "ranks[*].devices": "the window is wrong, and so is every share of it",
        "kernels": "totals are wrong",
        "operators": "totals are wrong",
    },
    "unknown-category": {"answer": "such events are counted nowhere"},
    "profiler-overhead": {
        "ranks[*].host": "this time is the profiler's",
        "ranks[*].idle": "some idle time is the profiler's",
        "ranks[*].step_times": "steps in which it falls are too long",
    },
    "collectives-without-details": {"communication": "bytes, groups and bandwidths are unknown"},
    "ambiguous-backward": {
        "modules": "the backward time of such operators may stand with another module"
    },
    "no-steps": {
        "ranks[*].steps": "there are none",
        "per_step": "there is no usual step",
        "kinds": "no spread over steps",
        "critical_path": "the whole recording is one step",
    },
    "warm-up-step": {
        "ranks[*].step_times": "means are too large; medians are right",
        "per_step": "means and maxima are too large",
    },
    "uneven-steps": {
        "per_step": "the mean step stands for none",
        "ranks[*].step_times": "the spread is wide",
    },
    "cut-steps": {
        "ranks[*].step_times": "cut steps are left out",
        "per_step": "cut steps are left out",
    },
    "rank-unknown": {
        "communication": "ranks cannot be compared",
        "critical_path": "other ranks are unseen",
    },
    "rank-outside-world": {
        "communication": "ranks cannot be matched",
        "critical_path": "ranks cannot be matched",
    },
    "recording-cost": {
        "ranks[*].step_times": "steps are too long by that",
        "ranks[*].idle": "some idle time is the recording's",
        "ranks[*].host": "times are too long by that",
    },
    "coarse-clock": {
        "kernels": "times of short kernels are rounded",
        "operators": "times of short operators are rounded",
        "copies": "bandwidths of short copies are rounded, or missing where the duration is 0",
        "ranks[*].idle": "short gaps are rounded",
    },
    "cut-file": {
        "ranks[*].devices": "the end of the recording is missing",
        "ranks[*].steps": "the last steps may be missing",
    },
    "cut-gzip": {
        "ranks[*].devices": "the end of the recording is missing",
        "ranks[*].steps": "the last steps may be missing",
    },
    "corrupt-gzip": {"ranks[*].devices": "what follows the damage is missing"},
    "lost-events": {
        "kernels": "counts and sums may be too small",
        "operators": "counts and sums may be too small",
    },
    "missing-ranks": {
        "communication": "what the missing ranks did is unseen",
        "critical_path": "other ranks are unseen",
    },
    "duplicate-rank": {"communication": "ranks cannot be matched"},
}
"""Slug of a notice -> part of the report -> how it is weakened."""


class Effect(TypedDict):
    """The effect of a notice: a part of the document, and how it is weakened."""

    part: str
    how: str


def list_affected(slug: str) -> list[Effect]:
    """Returns the effects of a notice, as in report JSON: `part` of the document and `how`; empty
    for none.
    """
    return [{"part": part, "how": effect} for part, effect in EFFECTS.get(slug, {}).items()]


CHECKS = build_schema(
    "check affected_count total_count severity message affects",
    {"severity": pl.Enum(["ok", "info", "warning", "error"]), "affects": pl.List(pl.String())},
)

UNEVEN_FACTOR = 1.5
"""A step is uneven where it is this many times longer or shorter than the median."""

MIN_OVERHEAD_RATIO = 1.05
"""Recording that makes steps this many times longer is reported; twice that excess is a warning."""


@dataclass(frozen=True)
class Quality(Result):
    """The checks of a capture, and the notices for the user.

    Attributes:
        notices: One for each check that found something and that the reader has not reported
            (`trace.notices`), the worst first.
        checks: Every check that applies to this trace, with how many of how many events it found;
            severity `ok` where it found none. A check that cannot be made here (no GPU work, no
            collectives) has no row. `affects` states which parts of the report are weaker for what
            it found, and how; empty where it found nothing.
    """

    notices: tuple[Notice, ...]
    checks: pl.DataFrame


def quality(trace: Trace) -> Quality:
    """Checks the capture. The checks and their limits: docs/concepts/capture-quality.md."""
    results = (rule(trace) for rule in (*GPU_CHECKS, *EVENT_CHECKS, *_RUN_CHECKS))
    done: list[QualityCheck] = [check for check in results if check is not None]
    rows = [
        {
            "check": check.slug,
            "affected_count": check.affected,
            "total_count": check.total,
            "severity": check.severity if check.affected else "ok",
            "message": check.message if check.affected else "",
            "affects": [f"{part}: {effect}" for part, effect in EFFECTS[check.slug].items()]
            if check.affected
            else [],
        }
        for check in done
    ]
    reported = {notice.slug for notice in trace.notices}
    notices = tuple(
        Notice(check.slug, check.severity, check.message, count=check.affected, rank=trace.rank)
        for check in done
        if check.affected and check.slug not in reported
    )
    return Quality(sort_by_severity(notices), pl.DataFrame(rows, schema=CHECKS))


def check_missing_steps(trace: Trace) -> QualityCheck | None:
    """Reports a trace without steps, which allows no results per step."""
    if not trace.events.height:
        return None
    message = (
        "no steps are marked: figures are for the whole window, with whatever ran before and after the steady state; "
        "`traceloom record` marks steps, and so does `prof.step()` of PyTorch's profiler"
    )
    return QualityCheck(0 if trace.steps.height else 1, 1, "info", message, slug="no-steps")


def check_warm_up_step(trace: Trace) -> QualityCheck | None:
    """Reports a first step that is much longer than the others."""
    lengths = _compute_step_lengths(trace)
    if len(lengths) < 3:
        return None
    median_ns = lengths[1:].median()
    assert isinstance(median_ns, float)
    message = (
        f"the first step took {format_duration(int(lengths[0]))}, the others {format_duration(int(median_ns))} (median): it looks like a "
        "warm-up and raises the averages; leave it out with `--steps`"
    )
    return QualityCheck(
        int(lengths[0] > UNEVEN_FACTOR * median_ns), 1, "warning", message, slug="warm-up-step"
    )


def check_uneven_steps(trace: Trace) -> QualityCheck | None:
    """Reports steps far from the median, without the first one, which `check_warm_up_step`
    covers.
    """
    lengths = _compute_step_lengths(trace)
    if len(lengths) < 3:
        return None
    later = lengths[1:]
    median = lengths.median()
    assert isinstance(median, float)
    affected = int(((later > UNEVEN_FACTOR * median) | (later * UNEVEN_FACTOR < median)).sum())
    message = (
        f"{format_count(affected)} of {format_count(len(later))} later steps differ from the median step ({format_duration(int(median))}) "
        f"by more than a factor of {UNEVEN_FACTOR:g}: an average step stands for none of them"
    )
    return QualityCheck(affected, len(later), "warning", message, slug="uneven-steps")


def cut_steps(trace: Trace) -> QualityCheck | None:
    """Reports steps that the recording cuts off."""
    if not trace.steps.height:
        return None
    affected = int((~trace.steps["complete"]).sum())
    message = f"{format_count(affected)} of {format_count(trace.steps.height)} steps are cut off by the edge of the recording"
    return QualityCheck(affected, trace.steps.height, "info", message, slug="cut-steps")


def check_unknown_rank(trace: Trace) -> QualityCheck | None:
    """Reports a trace of a distributed job that does not state its rank."""
    if (trace.meta.world_size or 1) <= 1 and not trace.collectives.height:
        return None
    message = (
        "the file belongs to a distributed job but does not say its rank: ranks cannot be compared; the rank may stand "
        "in the file name"
    )
    return QualityCheck(int(trace.rank is None), 1, "warning", message, slug="rank-unknown")


def check_rank_outside_world(trace: Trace) -> QualityCheck | None:
    """Reports a rank that the job cannot have."""
    size = trace.meta.world_size
    if trace.rank is None or size is None:
        return None
    message = (
        f"the file says rank {trace.rank} of {size} ranks, which cannot be: one of the two is wrong"
    )
    return QualityCheck(
        int(not 0 <= trace.rank < size), 1, "warning", message, slug="rank-outside-world"
    )


def check_recording_cost(trace: Trace) -> QualityCheck | None:
    """Reports the cost of recording, as `traceloom record` measured it against unrecorded steps."""
    overhead = (trace.meta.capture or {}).get("overhead")
    ratio = overhead.get("ratio") if isinstance(overhead, dict) else None
    if not isinstance(ratio, (int, float)):
        return None
    message = f"recorded steps took {ratio:.2f} times as long as unrecorded ones: absolute times are too long by that"
    severity: NoticeSeverity = "warning" if ratio > 1 + 2 * (MIN_OVERHEAD_RATIO - 1) else "info"
    return QualityCheck(
        int(ratio > MIN_OVERHEAD_RATIO), 1, severity, message, slug="recording-cost"
    )


def check_coarse_clock(trace: Trace) -> QualityCheck | None:
    """Reports times in whole microseconds, which round short events."""
    if trace.meta.unit_ns <= 1:
        return None
    has_times = np.isin(
        get_event_column(trace, "category"),
        [vocab.CATEGORIES.index(name) for name in (*vocab.GPU_WORK, vocab.OP)],
    )
    lengths = get_event_column(trace, "duration_ns")[has_times]
    short = int((lengths < 10 * trace.meta.unit_ns).sum())
    message = (
        f"times are whole microseconds (a PyTorch before 2024): {format_count(short)} of {format_count(lengths.size)} operators and "
        "pieces of GPU work are shorter than 10 µs, so that theirs are off by 5 % and more"
    )
    return QualityCheck(short, lengths.size, "info", message, slug="coarse-clock")


def _compute_step_lengths(trace: Trace) -> pl.Series:
    steps = find_step_spans(trace).filter("complete").sort("start_ns", maintain_order=True)
    return steps["end_ns"] - steps["start_ns"]


_RUN_CHECKS = (
    check_missing_steps,
    check_warm_up_step,
    check_uneven_steps,
    cut_steps,
    check_unknown_rank,
    check_rank_outside_world,
    check_recording_cost,
    check_coarse_clock,
)
