"""The answer to where the time of a run goes: one sentence, and parts that add up to the whole."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import polars as pl

from traceloom.analyze.data_loading import DataLoading, data_loading
from traceloom.analyze.gpu_time import (
    DeviceAccount,
    GpuTime,
    build_device_account,
    gpu_time,
    has_step_time,
)
from traceloom.analyze.host_time import HostTime, host
from traceloom.analyze.idle import CAUSES, HOST_CAUSES, Idle, find_edge_causes, idle
from traceloom.analyze.kernels import Operators, operators
from traceloom.analyze.quality import check_sampled_operators, check_unused_device
from traceloom.analyze.steps import (
    DEVICE,
    StepTimes,
    has_request_steps,
    list_told_steps,
    step_times,
)
from traceloom.system.units import format_count, format_duration, format_share
from traceloom.trace.frames import Result, build_schema, cast_to_schema
from traceloom.trace.session import Session, read_run_steps
from traceloom.trace.trace import Trace

PARTS = build_schema("label kind ns fraction")
_EDGE = "before the first and after the last GPU work"
_GPU_PARTS = (  # kind, its label, its field of the account
    ("compute", "compute", "compute_ns"),
    ("communication", "exposed communication", "exposed_communication_ns"),
    ("memory", "exposed copies and fills", "exposed_memory_ns"),
)
_GPU_VERBS = {
    "compute": "computing",
    "communication": "only communicating",
    "memory": "only copying",
    "idle": "idle",
}
_REASONS = {
    **{cause: f"launches came late because {meaning}" for cause, meaning in HOST_CAUSES.items()},
    "host_unobserved": "launches came late, and nothing is recorded of what the host did meanwhile",
    "launch_latency": "the GPU took its time to begin work that was just launched",
    "dependency": "work had to wait for another stream",
    "kernel_to_kernel": "short pauses between pieces of work that were launched in time",
    "graph_internal": "pauses inside a graph launch",
    "unexplained": "work was launched in time and yet began late, for no recorded reason",
    "launch_not_recorded": (
        "the launches, or those of the work before, lie before the recording or are lost"
    ),
}
_ACTIVITIES = {
    "op": "operators",
    "launch": "runtime calls",
    "blocking_call": "blocking calls",
    "python": "Python",
    "unobserved": "nothing recorded",
}
_ACTIVITY_CLAUSES = {
    "op": "the CPU runs operators",
    "launch": "the CPU is in runtime calls",
    "blocking_call": "the main thread waits in blocking calls",
    "python": "the CPU runs Python",
    "unobserved": "nothing is recorded of what the main thread does",
}
_AWAITED_CLAUSES = {
    "backward": "the backward pass on another thread",
    "communication": "communication",
    "loading": "data",
}
_MIN_SHARE = 0.005
_MIN_IDLE_SHARE = 0.05
_MAX_RUNNING_SHARE = 0.8  # of the time that a thread runs at most: it also waits
# Of the longer one: steps of two ranks that a sentence does not distinguish
_MAX_STEP_DIFFERENCE = 0.02
_MAX_STEP_RATIO = 1.5  # times the shortest step: the median does not represent the longest
_MAX_MEAN_RATIO = 1.25  # of the mean step to the median or the reverse: one of them tells the other
_MIN_STEPS = 4  # steps that determine the length of a usual one
_MIN_FIRST_STEP_EXCESS = 2.0  # usual steps by which the first one takes longer,
_MIN_RUN_SHARE = 0.05  # and of the time of all steps: reported from here on


@dataclass(frozen=True, eq=False)
class AnswerInputs:
    """The analyses that the answer is made of, for one trace; a report that has them already passes
    them on.
    """

    trace: Trace
    gpu: GpuTime
    idle: Idle
    host: HostTime
    operators: Operators
    data_loading: DataLoading
    step_times: StepTimes

    @cached_property
    def account(self) -> DeviceAccount:
        return build_device_account(self.trace, self.gpu, self.idle)


@dataclass(frozen=True)
class Answer(Result):
    """Where the time of a run goes.

    Attributes:
        sentence: One sentence for people.
        parts: label, kind (compute, communication, memory, idle for GPUs; op, launch,
            blocking_call, python, unobserved for the main threads of a run without GPU work), ns,
            fraction; the largest first. They add up to `whole_ns` exactly.
        step_ns: The median of the whole steps of all ranks (of all steps, where none is whole);
            None without steps.
        whole_ns: Time of all devices (without GPU work: of all main threads) in all whole steps; without
            steps, from the first to the last GPU work of each device (without GPU work: the window
            of the traces).
    """

    sentence: str
    parts: pl.DataFrame
    step_ns: int | None
    whole_ns: int


def gather_inputs(trace: Trace) -> AnswerInputs:
    return AnswerInputs(
        trace,
        gpu_time(trace),
        idle(trace),
        host(trace),
        operators(trace),
        data_loading(trace),
        step_times(trace),
    )


def answer(session: Session, facts_of_traces: Sequence[AnswerInputs] | None = None) -> Answer:
    """Describes where the time of a run goes, for any number of ranks, with or without GPUs and
    steps.

    Args:
        session: The run.
        facts_of_traces: The analyses of its traces, where they exist already.
    """
    all_facts = (
        [gather_inputs(trace) for trace in session.traces]
        if facts_of_traces is None
        else list(facts_of_traces)
    )
    processes = dict(zip(all_facts, session.process_numbers, strict=True))
    on_gpu = [fact for fact in all_facts if fact.gpu.devices.height]
    rows: list[tuple[str, str, int]] = []  # label, kind, ns
    for fact in on_gpu:  # work of the devices in the window of the account; idle time by cause
        account = fact.account
        rows += [
            (label, kind, int(account.devices[field].sum())) for kind, label, field in _GPU_PARTS
        ]
        rows += [
            (f"idle: {CAUSES[cause]}", "idle", ns)
            for cause, ns in account.idle[["cause", "idle_ns"]].rows()
        ]
        rows.append((f"idle: {_EDGE}", "idle", int(account.devices["edge_idle_ns"].sum())))
    # Activity of the main thread in the steps (without: in the whole window)
    for fact in () if on_gpu else all_facts:
        threads = fact.host.threads.filter("main")[["lane"]]
        if has_request_steps(fact.trace):  # whichever thread serves it
            served = fact.host.account.filter(
                pl.col("activity").cast(pl.String) == "op", pl.col("ns") > 0
            )
            threads = served[["lane", "step"]].drop_nulls()
        did = fact.host.account.join(threads, on=threads.columns, how="semi")
        if has_step_time(fact.trace):
            did = did.filter(pl.col("step").is_in(list_told_steps(fact.trace).implode()))
        for phase, kind, ns in (
            did.group_by(pl.col("phase", "activity").cast(pl.String)).agg(pl.col("ns").sum()).rows()
        ):
            # Only a thread that records nothing while another one communicates has this pair: see
            # `host`.
            waits = phase == "communication" and kind == "unobserved"
            rows.append(
                ("communication: waiting" if waits else f"{phase}: {_ACTIVITIES[kind]}", kind, ns)
            )
    parts = pl.DataFrame(
        rows, schema={name: PARTS[name] for name in ("label", "kind", "ns")}, orient="row"
    )
    parts = parts.group_by("label", "kind").agg(pl.col("ns").sum()).filter(pl.col("ns") > 0)
    fraction = pl.col("ns") / pl.max_horizontal(pl.col("ns").sum(), 1)
    parts = (
        parts.with_columns(fraction.alias("fraction"))
        .sort(["ns", "label"], descending=[True, False])
        .pipe(cast_to_schema, PARTS)
    )
    total_ns = int(parts["ns"].sum())
    if not total_ns:
        return Answer("Nothing to account for: the traces hold no timed events.", parts, None, 0)
    summary = (
        _describe_gpus(parts, total_ns, on_gpu, [processes[fact] for fact in on_gpu])
        if on_gpu
        else _describe_threads(parts, total_ns, all_facts)
    )
    sentence = f"{_describe_scope(on_gpu or all_facts, processes)}: {summary}.{_describe_first_step(all_facts)}"
    return Answer(
        sentence,
        parts,
        _compute_median_step_ns(on_gpu or all_facts),
        total_ns,
    )


def _describe_first_step(all_facts: list[AnswerInputs]) -> str:
    """Returns the cost of the first step of the run, where the answer does not cover it and it took
    unusually long.

    The first step compiles, loads code and allocates, and is in no usual window. A usual step is
    the median of the steps after it that the recorder did not disturb.
    """
    costs = []
    for fact in all_facts:
        steps = read_run_steps(fact.trace.meta)
        if steps is None or steps.duration_ns.size < _MIN_STEPS:
            continue
        durations = zip(steps.duration_ns[1:].tolist(), steps.state[1:], strict=True)
        normal_ns = [
            duration_ns for duration_ns, state in durations if state in ("unrecorded", "recorded")
        ]
        if normal_ns:
            first, median_ns = int(steps.duration_ns[0]), int(np.median(normal_ns))
            costs.append((max(first - median_ns, 0), first, median_ns, steps, fact.trace.rank))
    if not costs:
        return ""
    excess_ns, first, median_ns, steps, rank = max(costs, key=lambda cost: cost[0])
    run = int(steps.duration_ns.sum())
    if (
        steps.state[0] == "recorded"
        or excess_ns < _MIN_FIRST_STEP_EXCESS * median_ns
        or excess_ns < _MIN_RUN_SHARE * run
    ):
        return ""
    rank_label = f" (rank {rank})" if len(all_facts) > 1 and rank is not None else ""
    return (
        f" The first step of the run{rank_label}, which is not among them, took {format_duration(first)}, as long as "
        f"{format_count(round(first / max(median_ns, 1)))} usual ones: {format_share(excess_ns, run)} of "
        "all steps of the run went into starting (compiling, loading code, allocating)."
    )


def _describe_scope(
    all_facts: list[AnswerInputs], process_numbers: Mapping[AnswerInputs, int]
) -> str:
    """Returns the ranks, and the time that the parts add up to: `Ranks 0-7, 5 steps of 212 ms`."""
    traces = [fact.trace for fact in all_facts]
    ranks = sorted({trace.rank for trace in traces if trace.rank is not None})
    windows = Counter(process_numbers[fact] for fact in all_facts)
    if len(ranks) == 1 and len(windows) == 1 and (traces[0].meta.world_size or 1) == 1:
        ranks = []
    step_ns = _compute_median_step_ns(all_facts)
    span = (
        _describe_window(all_facts)
        if step_ns is None
        else _describe_steps(all_facts, process_numbers, step_ns)
    )
    if len(ranks) == 1:
        return f"Rank {ranks[0]}, {span}"
    if ranks:
        without_hole = ranks[-1] - ranks[0] == len(ranks) - 1
        ranks_label = (
            f"Ranks {ranks[0]}–{ranks[-1]}"
            if without_hole
            else f"{len(ranks)} ranks ({ranks[0]} to {ranks[-1]})"
        )
        return f"{ranks_label}, {span}"
    return (
        f"{format_count(len(windows))} processes, {span}"
        if len(windows) > 1
        else span[0].upper() + span[1:]
    )


def _describe_steps(
    all_facts: list[AnswerInputs], process_numbers: Mapping[AnswerInputs, int], step_ns: int
) -> str:
    """Returns the number and length of the steps, and how far apart they are."""
    stepped = [fact for fact in all_facts if has_step_time(fact.trace)]
    counts: Counter[int] = Counter()
    for fact in stepped:
        counts[process_numbers[fact]] += list_told_steps(fact.trace).len()
    number = max(counts.values(), default=1)
    serves = any(has_request_steps(fact.trace) for fact in all_facts)
    word = f"{'request' if serves else 'step'}{'s' if number > 1 else ''}"
    span = f"{format_count(number)} {word} of {format_duration(step_ns)}"
    processes: dict[int, list[AnswerInputs]] = {}
    for fact in all_facts:
        processes.setdefault(process_numbers[fact], []).append(fact)
    window_count = max(map(len, processes.values()))
    if window_count > 1:
        span += f" in {window_count} windows of the recording"
    lengths = _collect_step_durations(all_facts)
    by_rank = [ns for ns in map(_compute_median_step_ns, processes.values()) if ns is not None]
    if max(by_rank) - min(by_rank) > _MAX_STEP_DIFFERENCE * max(by_rank):
        span += f" ({format_duration(min(by_rank))} to {format_duration(max(by_rank))} by rank)"
    elif (min_ns := int(lengths.min())) * _MAX_STEP_RATIO < (max_ns := int(lengths.max())):  # type: ignore[arg-type]
        mean_ns = int(lengths.mean())  # type: ignore[arg-type]
        span += f" ({format_duration(min_ns)} to {format_duration(max_ns)}"
        is_usual = step_ns < _MAX_MEAN_RATIO * mean_ns and mean_ns < _MAX_MEAN_RATIO * step_ns
        span += ")" if is_usual else f", {format_duration(mean_ns)} on average)"
    ahead = [fact.step_times.steps for fact in all_facts if fact.step_times.clock == DEVICE]
    if ahead:
        launched = pl.concat(steps.filter("complete")["duration_ns"] for steps in ahead)
        span += (
            f" on the GPU (the host runs ahead: it launches one in "
            f"{format_duration(int(launched.median() or 0))})"  # type: ignore[arg-type]
        )
    if serves:  # there is none in the rest of the window
        served_ns = sum(
            int((fact.trace.steps["end_ns"] - fact.trace.steps["start_ns"]).sum())
            for fact in stepped
        )
        window = max(fact.trace.end_ns - fact.trace.start_ns for fact in all_facts)
        served = f"{format_share(served_ns, window)} of a window of {format_duration(window)}"
        span += f" ({served}; the program waits between them)"
    return span


def _describe_window(all_facts: list[AnswerInputs]) -> str:
    """Returns the longest window; with GPU work its part from the first to the last of it, which
    the shares refer to.
    """
    window = max(fact.trace.end_ns - fact.trace.start_ns for fact in all_facts)
    span = f"a window of {format_duration(window)}"
    longest = max(
        (int(ns) for fact in all_facts for ns in fact.gpu.devices["window_ns"]), default=0
    )
    if longest and not span.endswith(f" {format_duration(longest)}"):
        span = f"from first to last GPU work, {format_duration(longest)} of {span}"
    return span


def _compute_median_step_ns(all_facts: list[AnswerInputs]) -> int | None:
    middle = _collect_step_durations(all_facts).median()
    return None if middle is None else int(middle)  # type: ignore[arg-type]


def _collect_step_durations(all_facts: list[AnswerInputs]) -> pl.Series:
    """Returns durations of the whole steps of all ranks; of all steps, where none is whole."""
    all_times = [fact.step_times for fact in all_facts]
    steps = pl.concat(
        [times.steps.select(times.durations.alias("ns"), "complete") for times in all_times]
    )
    is_complete = pl.col("complete") | ~pl.col("complete").any()
    return steps.filter(is_complete, pl.col("ns") > 0)["ns"]


def _describe_gpus(
    parts: pl.DataFrame, total_ns: int, all_facts: list[AnswerInputs], process_numbers: list[int]
) -> str:
    sums = (
        parts.group_by("kind").agg(pl.col("ns").sum()).sort("ns", "kind", descending=[True, False])
    )
    devices = len(
        {
            (process, device)
            for process, fact in zip(process_numbers, all_facts, strict=True)
            for device in fact.gpu.devices["device"]
        }
    )
    name = (
        f"GPU {all_facts[0].gpu.devices['device'][0]} is"
        if devices == 1
        else f"the {devices} GPUs are"
    )
    clauses = [
        f"{_GPU_VERBS[kind]} {format_share(ns, total_ns)}"
        for kind, ns in sums.rows()
        if ns >= _MIN_SHARE * total_ns
    ]
    clauses[0] += " of the time"
    text = f"{name} {_join_items(clauses)}"
    idling = parts.filter(pl.col("kind") == "idle")
    idle_ns = int(idling["ns"].sum())
    if idle_ns < _MIN_IDLE_SHARE * total_ns:
        return text
    checks = [check_sampled_operators(fact.trace) for fact in all_facts]
    if any(check is not None and check.affected for check in checks):
        return f"{text}; why it is idle, and whether it is, cannot be told: most operators were left out of the file"
    reasons = {
        f"idle: {description}": _REASONS.get(cause, description)
        for cause, description in CAUSES.items()
    }
    label, ns = idling[["label", "ns"]].row(0)
    if label == f"idle: {_EDGE}":
        causes = pl.concat(find_edge_causes(fact.trace) for fact in all_facts)
        sums = causes.group_by("cause").agg(pl.col("ns").sum()).sort("ns", "cause")
        cause, longest_ns = sums.row(-1)
        reasons[label] = (
            "there was no GPU work yet, or no more, at the edges of the steps "
            f"({format_share(longest_ns, ns)} of that while {HOST_CAUSES[cause]})"
        )
    return f"{text}; the main cause of the idle time ({format_share(ns, idle_ns)} of it): {reasons[label]}"


def _describe_threads(parts: pl.DataFrame, total_ns: int, all_facts: list[AnswerInputs]) -> str:
    """Returns the main activity with its phase and largest operator, then communication and the
    DataLoader.
    """
    sums = (
        parts.group_by("kind").agg(pl.col("ns").sum()).sort("ns", "kind", descending=[True, False])
    )
    # The waits for batches in the steps, where there are steps: one number wherever it is told.
    waits = [
        fact.data_loading.steps["wait_ns"].sum()
        if has_step_time(fact.trace)
        else fact.data_loading.total_ns or 0
        for fact in all_facts
        if fact.data_loading.total_ns is not None
    ]
    waited = format_share(int(sum(waits)), total_ns)
    kind, ns = str(sums["kind"][0]), int(sums["ns"][0])
    label, largest = parts.filter(pl.col("kind") == kind)[["label", "ns"]].row(0)
    phase = label.split(":")[0]
    if waits and phase == "loading" and 2 * largest > ns:
        text = f"{waited} of the time the main thread waits for data"
    elif kind == "unobserved" and phase in _AWAITED_CLAUSES and 2 * largest > ns:
        text = f"{format_share(largest, total_ns)} of the time the main thread waits for {_AWAITED_CLAUSES[phase]}"
    else:
        text = f"{format_share(ns, total_ns)} of the time {_ACTIVITY_CLAUSES[kind]}"
        if phase != "other" and 2 * largest > ns:
            text += f", mostly in the {phase} phase"
    if kind == "op":  # by self time over all traces
        rows = pl.concat([fact.operators.operators[["name", "self_ns"]] for fact in all_facts])
        rows = (
            rows.group_by("name")
            .agg(pl.col("self_ns").sum())
            .sort("self_ns", "name", descending=[True, False])
        )
        in_operators = int(rows["self_ns"].sum())
        if in_operators:
            largest_share = format_share(int(rows["self_ns"][0]), in_operators)
            text += f"; the largest is {rows['name'][0]} ({largest_share} of that)"
    clauses = []
    talking = int(parts.filter(pl.col("label").str.starts_with("communication:"))["ns"].sum())
    if talking >= _MIN_SHARE * total_ns and "communication" not in text:
        clauses.append(f"{format_share(talking, total_ns)} is spent on communication")
    if waits and not text.endswith("waits for data"):
        clauses.append(f"{waited} is spent waiting on the DataLoader")
    if any(check_unused_device(fact.trace) for fact in all_facts):
        clauses.append("no launch on the GPU that the process sees is recorded")
    ran = _compute_run_time(all_facts)
    if ran is not None and ran[0] < _MAX_RUNNING_SHARE * ran[1]:
        clauses.append(
            f"the main thread runs on a processor {format_share(*ran)} of the time (else it waits, or others run)"
        )
    return f"{text}; {_join_items(clauses)}" if clauses else text


def _compute_run_time(all_facts: list[AnswerInputs]) -> tuple[int, int] | None:
    """Returns the time that the threads of the recorded steps ran, and the duration of these steps;
    None where any is unknown.
    """
    ran = total_ns = 0
    for fact in all_facts:
        steps = read_run_steps(fact.trace.meta)
        if steps is None:
            return None
        for step_ns, state, ran_ns in zip(
            steps.duration_ns.tolist(), steps.state, steps.ran_ns, strict=True
        ):
            if state == "recorded":
                if ran_ns is None:
                    return None
                ran, total_ns = ran + min(ran_ns, step_ns), total_ns + step_ns
    return (ran, total_ns) if total_ns else None


def _join_items(items: list[str]) -> str:
    """Returns `a`, `a and b`, `a, b and c`."""
    return items[0] if len(items) == 1 else f"{', '.join(items[:-1])} and {items[-1]}"
