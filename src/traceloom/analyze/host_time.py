"""Time of host threads by step, phase and activity, their roles, and their concurrency."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import polars as pl

from traceloom.analyze.ancestry import Forest, build_forest, build_host_segments
from traceloom.analyze.flame import KINDS as NODE_KINDS, call_tree
from traceloom.analyze.host_events import (
    ACTIVITIES,
    BACKWARD,
    BLOCKING_CALL,
    COMMUNICATION,
    FORWARD,
    LOADING,
    OPTIMIZER,
    OTHER,
    PHASES,
    UNOBSERVED,
    EventClasses,
    classify_activity,
    classify_events,
    mark_communication_scopes,
)
from traceloom.analyze.intervals import invert_spans, merge_intervals
from traceloom.analyze.names import build_vocabulary
from traceloom.analyze.steps import NO_STEP, contains, cut, split_at_steps
from traceloom.trace import vocabulary as vocab
from traceloom.trace.array_types import Bools, Ints
from traceloom.trace.arrays import (
    Engine,
    choose_engine,
    gather_rows,
    get_event_column,
    to_nullable_series,
)
from traceloom.trace.batch import cache_per_trace
from traceloom.trace.frames import Result, build_schema, cast_to_schema
from traceloom.trace.trace import Trace

THREADS = build_schema("lane process thread name window_ns busy_ns event_count main")
ACCOUNT = build_schema(
    "lane step phase activity ns", {"phase": pl.Enum(PHASES), "activity": pl.Enum(ACTIVITIES)}
)
_UNKNOWN = -1
_STEP_TYPE: Any = np.int32
_CODE_TYPE: Any = np.int8  # of phases and activities


class _LaneParts(NamedTuple):
    """Segments of lanes, each within one step; arrays of one length."""

    lane: Ints
    start_ns: Ints
    end_ns: Ints
    step: Ints
    phase: Ints
    activity: Ints

    def take(self, rows: Ints) -> _LaneParts:
        """Returns some of the segments, in the order of `rows`."""
        return _LaneParts(*(column[rows] for column in self))


@dataclass(frozen=True)
class HostTime(Result):
    """The host account of one trace.

    Attributes:
        threads: One row per host lane. `window_ns` is the trace's (first to last event of any
            lane), `busy_ns` the union of the lane's events; `main` marks the thread that runs the
            program.
        account: Nanoseconds by lane, step (null outside all steps), phase and activity; the rows of
            a lane add up to its `window_ns`, and those of a lane and step to the step's part of the
            window.
    """

    threads: pl.DataFrame
    account: pl.DataFrame


def host(trace: Trace) -> HostTime:
    """Accounts for the time of every host thread.

    The phase is that of the outermost event that has one; the activity that of the innermost event.
    On the main thread, time without a phase of its own is given one by three rules, in this order:
    another thread of the process runs the backward pass meanwhile; the thread records nothing while
    another one communicates; time between two segments of one phase within a step belongs to it.
    docs/concepts/host-time.md has the definitions.
    """
    lanes = trace.lanes.filter(pl.col("kind") == "host").sort("lane")
    main = find_main_lane(trace)
    lane_parts = _build_lane_parts(trace, main)
    threads = lanes.select(
        "lane",
        "process",
        "thread",
        "name",
        window_ns=pl.lit(trace.end_ns - trace.start_ns, dtype=pl.Int64),
        busy_ns=pl.col("busy_ns").fill_null(0),
        event_count=pl.col("events").cast(pl.Int64),
        main=(pl.col("lane") == main) if main is not None else pl.lit(False),
    ).pipe(cast_to_schema, THREADS)
    engine = choose_engine(trace)
    rows = []
    while lane_parts:  # no two sets share a lane; each is released once it is summed
        rows.append(_add_up_parts(lane_parts.pop(), engine))
    account = pl.concat(rows).sort("lane", "step", "phase", "activity")
    account = account.with_columns(pl.col("step").replace(int(NO_STEP), None))
    return HostTime(threads, account.pipe(cast_to_schema, ACCOUNT))


@cache_per_trace
def mask_pass_events(trace: Trace) -> Bools:
    """Returns which host events, in the forest's order, are of the forward or the backward pass."""
    in_passes: Bools = np.isin(
        _assign_phases(trace, build_forest(trace), classify_events(trace)), (FORWARD, BACKWARD)
    )
    return in_passes


@cache_per_trace
def find_main_lane(trace: Trace) -> int | None:
    """Returns the lane that runs the program: a process's first thread where it has ops or calls,
    else the lane with the most.

    Ops of the backward pass do not count, so that an autograd thread is never chosen.
    """
    tree = build_forest(trace)
    if not tree.row.size:
        return None
    category = get_event_column(trace, "category")[tree.row]
    is_work = np.isin(
        category, [vocab.CATEGORIES.index(name) for name in (vocab.OP, *vocab.LAUNCHES)]
    )
    backward_event = tree.outermost_or_self(classify_events(trace).phase == BACKWARD)
    events = np.bincount(tree.lane)
    works = np.bincount(tree.lane[is_work & (backward_event < 0)], minlength=events.size)
    first = set(trace.lanes["lane"].filter(trace.lanes["process"] == trace.lanes["thread"]))
    return max(
        np.flatnonzero(events).tolist(),
        key=lambda lane: (lane in first and works[lane] > 0, works[lane], events[lane], -lane),
    )


def _build_lane_parts(trace: Trace, main: int | None) -> list[_LaneParts]:
    """Returns segments of lanes with their step, phase and activity; together they tile every
    lane's window.
    """
    tree = build_forest(trace)
    segments = build_host_segments(trace)
    phase_of = _assign_phases(trace, tree, classify_events(trace))
    cuts, step = split_at_steps(trace, segments.start_ns, segments.end_ns)
    owner, lane = segments.owner[cuts.source], segments.lane[cuts.source]
    # One more entry at the end, for the owner -1 (nothing recorded).
    phase = np.append(phase_of, _UNKNOWN).astype(_CODE_TYPE)[owner]
    activity_code = np.append(classify_activity(trace), UNOBSERVED).astype(_CODE_TYPE)[owner]
    lane_parts = _LaneParts(
        lane, cuts.start_ns, cuts.end_ns, step.astype(_STEP_TYPE), phase, activity_code
    )
    del cuts, owner, step
    if main is None:
        return [lane_parts]
    main_rows = np.flatnonzero(lane == main)
    ordered = lane_parts.take(main_rows[np.argsort(lane_parts.start_ns[main_rows], kind="stable")])
    return [
        lane_parts.take(np.flatnonzero(lane != main)),
        _infer(trace, tree, phase_of, main, ordered),
    ]


def _assign_phases(trace: Trace, tree: Forest, event_meaning: EventClasses) -> Ints:
    """Returns the phase of each host event: that of the outermost event above it that has one; -1
    where none does.

    An op that autograd recorded (it has a sequence number and no forward thread) is forward where
    nothing above it has a phase; in a trace without any backward pass every op inside a step is.
    Inside an optimizer's step the forward and the backward pass keep their own phase: a closure
    runs them (LBFGS, Lightning). So does every part of the step inside a region that is named
    communication.
    """
    events = trace.events
    phase = event_meaning.phase.copy()
    forward_thread = get_event_column(trace, "forward_thread", 0)[tree.row]
    recorded = gather_rows(events["sequence"].is_not_null().to_numpy(), tree.row) & (
        forward_thread == 0
    )
    is_closure = np.isin(phase, (FORWARD, BACKWARD)) | (event_meaning.op & recorded & (phase < 0))
    if not (phase == BACKWARD).any():
        recorded |= gather_rows(events["step"].is_not_null().to_numpy(), tree.row)
    forward = np.flatnonzero((phase < 0) & event_meaning.op & recorded)
    phase[forward[_mark_forward(trace, tree, forward)]] = FORWARD
    top_phase = np.append(phase, _UNKNOWN)[tree.outermost_or_self(phase >= 0)]
    inner = tree.outermost_or_self(is_closure)
    called = (top_phase == OPTIMIZER) & (inner >= 0)
    event_phase = np.where(called, np.append(phase, _UNKNOWN)[inner], top_phase)
    if not mark_communication_scopes(trace).any():
        return event_phase
    part = tree.outermost_or_self(
        np.isin(event_meaning.phase, (LOADING, FORWARD, BACKWARD, OPTIMIZER))
    )
    return np.where(
        (top_phase == COMMUNICATION) & (part >= 0), np.append(phase, _UNKNOWN)[part], event_phase
    )


def _mark_forward(trace: Trace, tree: Forest, events: Ints) -> Bools:
    """Returns which of some recorded ops are of the forward pass: in a step with ops that have a
    backward one those from the first to the last of these; metrics before or behind are none.
    """
    columns = trace.events[["sequence", "forward_thread", "step"]].with_columns(
        returns=(pl.col("forward_thread").fill_null(0) != 0) & pl.col("sequence").is_not_null()
    )
    backward = columns.filter("returns")["sequence"].unique()
    rows = columns[tree.row[events]].with_columns(at=pl.Series(tree.start_ns[events]))
    start = pl.col("at").filter(pl.col("sequence").is_in(backward.implode()))
    inside = pl.col("at").is_between(start.min().over("step"), start.max().over("step"))
    return rows.select(inside.fill_null(value=True)).to_series().to_numpy()


def _infer(
    trace: Trace, tree: Forest, phase_of: Ints, main: int, lane_parts: _LaneParts
) -> _LaneParts:
    """Assigns phases to the main thread's time that has none (see `host`); segments are sorted by
    start.
    """
    lanes = trace.lanes
    process = lanes.filter(pl.col("lane") == main)["process"][0]
    other_lanes = lanes.filter(
        (pl.col("kind") == "host") & (pl.col("process") == process) & (pl.col("lane") != main)
    )
    # For every lane number
    is_other = np.zeros(int(lanes["lane"].to_numpy().max(initial=0)) + 1, dtype=np.bool_)
    is_other[other_lanes["lane"].to_numpy()] = True
    elsewhere = gather_rows(is_other, tree.lane)
    for new_phase in (BACKWARD, COMMUNICATION):
        rows = np.flatnonzero(elsewhere & (phase_of == new_phase) & (tree.parent < 0))
        busy = merge_intervals(tree.start_ns[rows], tree.end_ns[rows])
        if not busy.start.size:
            continue
        unobserved = lane_parts.activity == UNOBSERVED
        if new_phase == BACKWARD:  # a closure of the optimizer waits for it
            free = (lane_parts.phase < 0) | ((lane_parts.phase == OPTIMIZER) & unobserved)
        else:
            free = (lane_parts.phase < 0) & unobserved
        # The parts of free segments that lie in the busy time; others are left whole.
        narrow = cut(
            np.where(free, lane_parts.start_ns, lane_parts.end_ns),
            lane_parts.end_ns,
            np.unique(np.concatenate(busy)),
        )
        parts, free = lane_parts.take(narrow.source), free[narrow.source]
        start = np.where(free, narrow.start_ns, parts.start_ns)
        phase = np.where(free & contains(busy, start), new_phase, parts.phase)
        lane_parts = parts._replace(start_ns=start, end_ns=narrow.end_ns, phase=phase)
    # Segments without a phase between two segments of one phase in one step take that phase.
    phase, step = lane_parts.phase, lane_parts.step
    has_phase = phase >= 0
    positions = np.arange(phase.size, like=phase)
    before = np.maximum.accumulate(np.where(has_phase, positions, -1))
    after = np.minimum.accumulate(np.where(has_phase, positions, phase.size)[::-1])[::-1]
    gap = np.flatnonzero(~has_phase & (before >= 0) & (after < phase.size) & (step != NO_STEP))
    left, right = before[gap], after[gap]
    same = (phase[left] == phase[right]) & np.isin(phase[left], (FORWARD, BACKWARD, OPTIMIZER))
    same &= (step[left] == step[gap]) & (step[right] == step[gap])
    filled = phase.copy()
    filled[gap[same]] = phase[left][same]
    return lane_parts._replace(phase=filled)


def _add_up_parts(lane_parts: _LaneParts, engine: Engine) -> pl.DataFrame:
    """Returns sums by lane, step, phase and activity; one number encodes the four while they are
    summed.
    """
    lane, start, end, step, phase, activity_code = lane_parts
    # Few, since neighbours share theirs
    steps = np.unique(step[np.flatnonzero(np.diff(step, prepend=NO_STEP - 1))])
    step_index = np.searchsorted(steps, step)
    kinds = len(PHASES) * len(ACTIVITIES)
    kind = np.where(phase < 0, OTHER, phase) * len(ACTIVITIES) + activity_code
    key = (lane.astype(np.int64) * max(steps.size, 1) + step_index) * kinds + kind
    durations = (
        pl.LazyFrame({"key": key, "ns": end - start}).group_by("key").agg(pl.col("ns").sum())
    )
    summed = durations.collect(engine=engine).sort("key")
    keys = summed["key"].to_numpy()
    number = steps[(keys // kinds) % max(steps.size, 1)] if steps.size else keys
    return pl.DataFrame(
        {
            "lane": keys // (kinds * max(steps.size, 1)),
            "step": number.astype(np.int64),
            "phase": pl.Series(PHASES, dtype=ACCOUNT["phase"])[keys % kinds // len(ACTIVITIES)],
            "activity": pl.Series(ACTIVITIES, dtype=ACCOUNT["activity"])[keys % len(ACTIVITIES)],
            "ns": summed["ns"],
        }
    )


ROLES = {
    "main": "runs the program",
    "autograd": "runs the backward pass",
    "data_loader": "makes batches in this process",
    "pin_memory": "copies batches into pinned memory",
    "communication": "makes communication calls",
    "compiler": "compiles (torch.compile)",
    "operators": "runs operators for another thread",
    "runtime": "only makes calls of the GPU's runtime",
    "python": "runs other Python",
    "annotations": "holds only annotations",
}
THREAD_SCHEMA = build_schema(
    "lane process thread name role says event_count window_ns busy_ns active_ns",
    *(f"{name}_ns" for name in ACTIVITIES),
    "launch_count",
    {"role": pl.Enum(list(ROLES))},
)
CONCURRENCY = build_schema("step threads ns")
CURVE = build_schema("start_ns active")
CURVE_BUCKETS = 200  # of the window, for the curve

_LOADER_FRAME = r"(^|/)torch/utils/data/(_utils/(worker|fetch|collate)|dataloader)\.py"
_PIN_MEMORY_FRAME = r"(^|/)torch/utils/data/_utils/pin_memory\.py"
_COMPILER_FRAME = r"(^|/)torch/(_inductor|_dynamo|_functorch)/|\(dynamo_timed\)$|^(dynamo|inductor_compile|entire_\w+_compile)$"
_COMMUNICATION_EVENT = (
    r"^(nccl|rccl|gloo|mpi|ucc|xccl|oneccl|hccl):|^_?c10d(_functional)?::|^record_param_comms$"
)
_THREAD_START_FRAME = r"^(threading|concurrent/futures/thread|multiprocessing/\w+)\.py\(\d+\): |^<"


@dataclass(frozen=True)
class Threads(Result):
    """The host threads.

    Attributes:
        threads: One row per host lane, the main thread first, then by busy time. `role` is one of
            `ROLES`; `says` is its evidence: a name recorded on the thread. `busy_ns` is the time
            with any event open, `active_ns` the part of it in which the thread is not in a call
            that waits; the five columns by activity (docs/concepts/host-time.md) add up to
            `window_ns`.
        concurrency: How long exactly this many threads were active at once, by step (null outside
            all steps); adds up to the window of the trace.
        curve: Mean number of active threads in each of up to 200 equal parts of the window.
        most: The largest number of threads active at once.
        mean: Mean number over the window; None for a window without length.
    """

    threads: pl.DataFrame
    concurrency: pl.DataFrame
    curve: pl.DataFrame
    most: int
    mean: float | None


def threads(trace: Trace) -> Threads:
    """Returns the role and activities of every host thread, and how many were active over time."""
    lanes = trace.lanes.filter(pl.col("kind") == "host").sort("lane")
    segments = build_host_segments(trace)
    activity = np.append(classify_activity(trace), UNOBSERVED)[segments.owner]
    ns = segments.end_ns - segments.start_ns
    size = int(trace.lanes["lane"].to_numpy().max(initial=0)) + 1
    activity_ns = np.zeros((size, len(ACTIVITIES)), dtype=np.int64)
    np.add.at(activity_ns, (segments.lane, activity), ns)
    host_lanes = lanes["lane"].to_numpy()
    roles = _infer_roles(trace)
    launches = [vocab.CATEGORIES.index(category) for category in vocab.LAUNCHES]
    calls = np.flatnonzero(np.isin(get_event_column(trace, "category"), launches))
    window = trace.end_ns - trace.start_ns
    busy = lanes["busy_ns"].fill_null(0).to_numpy()
    table = pl.DataFrame(
        {
            "lane": host_lanes,
            "process": lanes["process"],
            "thread": lanes["thread"],
            "name": lanes["name"],
            "role": pl.Series([roles[int(lane)][0] for lane in host_lanes], dtype=pl.String),
            "says": pl.Series([roles[int(lane)][1] for lane in host_lanes], dtype=pl.String),
            "event_count": lanes["events"].cast(pl.Int64),
            "window_ns": np.full(host_lanes.size, window),
            "busy_ns": busy,
            "active_ns": window
            - activity_ns[host_lanes, UNOBSERVED]
            - activity_ns[host_lanes, BLOCKING_CALL],
            **{
                f"{name}_ns": activity_ns[host_lanes, index]
                for index, name in enumerate(ACTIVITIES)
            },
            "launch_count": np.bincount(get_event_column(trace, "lane")[calls], minlength=size)[
                host_lanes
            ],
        }
    ).pipe(cast_to_schema, THREAD_SCHEMA)
    is_main = (pl.col("role") == "main").fill_null(False)
    # A thread is active except while it rests: +1 where it begins to be active, -1 where it ends.
    resting = np.flatnonzero((activity == UNOBSERVED) | (activity == BLOCKING_CALL))
    resting = resting[np.argsort(segments.lane[resting], kind="stable")]
    low, high = (
        np.searchsorted(segments.lane[resting], host_lanes, side=side) for side in ("left", "right")
    )
    times, change = [np.array([trace.start_ns, trace.end_ns])], [np.zeros(2, dtype=np.int64)]
    for first, last in zip(low.tolist(), high.tolist(), strict=True):
        resting_rows = resting[first:last]
        active = invert_spans(
            merge_intervals(segments.start_ns[resting_rows], segments.end_ns[resting_rows]),
            trace.start_ns,
            trace.end_ns,
        )
        times += active
        change += [np.ones_like(active.start), -np.ones_like(active.end)]
    start = np.concatenate(times)
    order = np.argsort(start, kind="stable")
    start, count = start[order], np.cumsum(np.concatenate(change)[order])
    is_last = np.append(start[1:] != start[:-1], True)
    # The instants at which the number changes, and the end
    start, count = (
        start[is_last],
        count[is_last],
    )
    total = int((count[:-1] * np.diff(start)).sum()) if start.size else 0
    if start.size < 2:
        concurrency = CONCURRENCY.to_frame()
    else:
        step_spans, step = split_at_steps(trace, start[:-1], start[1:])
        frame = pl.DataFrame(
            {
                "step": to_nullable_series(step, absent=int(NO_STEP)),
                "threads": count[:-1][step_spans.source],
                "ns": step_spans.end_ns - step_spans.start_ns,
            }
        )
        concurrency = (
            frame.group_by("step", "threads")
            .agg(pl.col("ns").sum())
            .sort("step", "threads")
            .pipe(cast_to_schema, CONCURRENCY)
        )
    return Threads(
        table.sort([~is_main, pl.col("busy_ns"), pl.col("lane")], descending=[False, True, False]),
        concurrency,
        _compute_concurrency_curve(trace, start, count),
        int(count.max(initial=0)),
        total / window if window else None,
    )


def _compute_concurrency_curve(trace: Trace, start: Ints, count: Ints) -> pl.DataFrame:
    window = trace.end_ns - trace.start_ns
    parts = min(CURVE_BUCKETS, window)
    if start.size < 2 or not parts:
        return CURVE.to_frame()
    edges = trace.start_ns + window * np.arange(parts + 1) // parts
    # Thread-nanoseconds up to each instant
    thread_ns = np.concatenate([[0], np.cumsum(count[:-1] * np.diff(start))])
    position = np.searchsorted(start, edges, side="right") - 1
    until = thread_ns[position] + count[position] * (edges - start[position])
    return pl.DataFrame({"start_ns": edges[:-1], "active": np.diff(until) / np.diff(edges)}).pipe(
        cast_to_schema, CURVE
    )


@cache_per_trace
def _infer_roles(trace: Trace) -> dict[int, tuple[str, str | None]]:
    """Returns the role of every host lane, and the name that shows it."""
    tree = build_forest(trace)
    main = find_main_lane(trace)
    vocabulary = build_vocabulary(trace)
    code = vocabulary.code[tree.row]
    category = get_event_column(trace, "category")[tree.row]
    is_op = category == vocab.CATEGORIES.index(vocab.OP)
    backward = (tree.parent < 0) & (classify_events(trace).phase == BACKWARD) & is_op
    launch = np.isin(category, [vocab.CATEGORIES.index(name) for name in vocab.LAUNCHES])
    python = category == vocab.CATEGORIES.index(vocab.PYTHON)
    tests = (
        ("pin_memory", gather_rows(vocabulary.matching(_PIN_MEMORY_FRAME), code)),
        ("data_loader", gather_rows(vocabulary.matching(_LOADER_FRAME), code) & python),
        ("autograd", backward),
        ("compiler", gather_rows(vocabulary.matching(_COMPILER_FRAME), code) & ~launch),
        (
            "communication",
            gather_rows(vocabulary.matching(_COMMUNICATION_EVENT), code) & (tree.parent < 0),
        ),
        ("operators", is_op),
        ("python", python),
        ("runtime", launch),
        ("annotations", category == vocab.CATEGORIES.index(vocab.ANNOTATION)),
    )
    roles: dict[int, tuple[str, str | None]] = {}
    for role, matches in tests:
        rows = np.flatnonzero(matches)
        lanes, first = np.unique(tree.lane[rows], return_index=True)
        for lane, row in zip(lanes.tolist(), rows[first].tolist(), strict=True):
            roles.setdefault(lane, (role, str(vocabulary.names[int(code[row])])))
    for lane in [lane for lane, (role, _) in roles.items() if role == "python"]:
        # The function that it was started to run: its outermost frame that is not part of starting
        # threads.
        folded = call_tree(trace)
        frames = np.flatnonzero((folded.lane == lane) & (folded.kind == NODE_KINDS.index("python")))
        names = folded.names[pl.Series(folded.label[frames], dtype=pl.UInt32)]
        targets = names.filter(~names.str.contains(_THREAD_START_FRAME))
        if targets.len():
            roles[lane] = ("python", str(targets[0]) or roles[lane][1])
    if main is not None:
        roles[main] = ("main", None)
    everything = trace.lanes.filter(pl.col("kind") == "host")["lane"].to_list()
    return {lane: roles.get(lane, ("annotations", None)) for lane in everything}
