"""What the host threads did: every nanosecond of a thread has one phase and one activity."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import polars as pl

from traceloom.analyze.ancestry import Forest, forest, host_segments
from traceloom.analyze.intervals import union
from traceloom.analyze.phases import (
    ACTIVITIES,
    BACKWARD,
    COMMUNICATION,
    FORWARD,
    LOADING,
    OPTIMIZER,
    OTHER,
    PHASES,
    UNOBSERVED,
    Meaning,
    activity,
    around_passes,
    meaning,
)
from traceloom.analyze.remembered import per_trace
from traceloom.analyze.splitting import NO_STEP, contains, cut, split_at_steps
from traceloom.array_types import Bools, Ints
from traceloom.model import Trace
from traceloom.model import category as cat
from traceloom.model.arrays import Engine, column, engine, lookup
from traceloom.model.frames import as_declared, schema
from traceloom.model.result import Result

THREADS = schema("lane process thread name window_ns busy_ns event_count main")
ACCOUNT = schema("lane step phase activity ns", {"phase": pl.Enum(PHASES), "activity": pl.Enum(ACTIVITIES)})
_UNKNOWN = -1
_STEP: Any = np.int32
_CODE: Any = np.int8  # of phases and activities


class _LaneParts(NamedTuple):
    """Stretches of lanes, each within one step; arrays of one length."""

    lane: Ints
    start_ns: Ints
    end_ns: Ints
    step: Ints
    phase: Ints
    activity: Ints

    def take(self, rows: Ints) -> _LaneParts:
        """Some of the pieces, in the order of `rows`."""
        return _LaneParts(*(column[rows] for column in self))


@dataclass(frozen=True)
class HostTime(Result):
    """The host account of one trace.

    Attributes:
        threads: One row per host lane. `window_ns` is the trace's (first to last event of any lane), `busy_ns` the
            union of the lane's events; `main` marks the thread that runs the program.
        account: Nanoseconds by lane, step (null outside all steps), phase and activity; the rows of a lane add up to
            its `window_ns`, and those of a lane and step to the step's part of the window.
    """

    threads: pl.DataFrame
    account: pl.DataFrame


def host(trace: Trace) -> HostTime:
    """Account for the time of every host thread.

    The phase is that of the outermost event that says one; the activity that of the innermost event. On the main
    thread, time without a phase of its own is given one by three rules, in this order: another thread of the process
    runs the backward pass meanwhile; the thread records nothing while another one communicates; what lies between two
    stretches of one phase within a step belongs to it. docs/concepts/host-time.md has the definitions.
    """
    lanes = trace.lanes.filter(pl.col("kind") == "host").sort("lane")
    main = main_lane(trace)
    pieces = _pieces(trace, main)
    threads = lanes.select(
        "lane",
        "process",
        "thread",
        "name",
        window_ns=pl.lit(trace.end_ns - trace.start_ns, dtype=pl.Int64),
        busy_ns=pl.col("busy_ns").fill_null(0),
        event_count=pl.col("events").cast(pl.Int64),
        main=(pl.col("lane") == main) if main is not None else pl.lit(False),
    ).pipe(as_declared, THREADS)
    how = engine(trace)
    rows = []
    while pieces:  # no two sets share a lane; each is given up once it is added up
        rows.append(_summed(pieces.pop(), how))
    account = pl.concat(rows).sort("lane", "step", "phase", "activity")
    account = account.with_columns(pl.col("step").replace(int(NO_STEP), None))
    return HostTime(threads, account.pipe(as_declared, ACCOUNT))


@per_trace
def of_passes(trace: Trace) -> Bools:
    """Which host events, in the forest's order, are of the forward or the backward pass."""
    in_passes: Bools = np.isin(_phase(trace, forest(trace), meaning(trace)), (FORWARD, BACKWARD))
    return in_passes


@per_trace
def main_lane(trace: Trace) -> int | None:
    """The lane that runs the program: a process's first thread where it has ops or calls, else the lane with most.

    Ops of the backward pass do not count, so that an autograd thread is never taken for it.
    """
    tree = forest(trace)
    if not tree.row.size:
        return None
    category = column(trace, "category")[tree.row]
    is_work = np.isin(category, [cat.CATEGORIES.index(name) for name in (cat.OP, *cat.LAUNCHES)])
    over = tree.outermost_or_self(meaning(trace).phase == BACKWARD)
    events = np.bincount(tree.lane)
    working = tree.lane[is_work & (over < 0)]
    works = np.bincount(working, minlength=events.size)
    first = set(trace.lanes["lane"].filter(trace.lanes["process"] == trace.lanes["thread"]))
    return max(
        np.flatnonzero(events).tolist(),
        key=lambda lane: (lane in first and works[lane] > 0, works[lane], events[lane], -lane),
    )


def _pieces(trace: Trace, main: int | None) -> list[_LaneParts]:
    """Pieces of lanes with their step, phase and activity; together they tile every lane's window."""
    tree = forest(trace)
    segments = host_segments(trace)
    phase_of = _phase(trace, tree, meaning(trace))
    cuts, step = split_at_steps(trace, segments.start_ns, segments.end_ns)
    owner, lane = segments.owner[cuts.source], segments.lane[cuts.source]
    # one more entry at the end, which the owner -1 (nothing recorded) finds
    phase = np.append(phase_of, _UNKNOWN).astype(_CODE)[owner]
    activity_code = np.append(activity(trace), UNOBSERVED).astype(_CODE)[owner]
    pieces = _LaneParts(lane, cuts.start_ns, cuts.end_ns, step.astype(_STEP), phase, activity_code)
    del cuts, owner, step
    if main is None:
        return [pieces]
    main_rows = np.flatnonzero(lane == main)
    ordered = pieces.take(main_rows[np.argsort(pieces.start_ns[main_rows], kind="stable")])
    return [pieces.take(np.flatnonzero(lane != main)), _infer(trace, tree, phase_of, main, ordered)]


def _phase(trace: Trace, tree: Forest, event_meaning: Meaning) -> Ints:
    """Phase of each host event: that of the outermost event above it that has one; -1 where none does.

    An op that autograd recorded (it has a sequence number and no forward thread) is forward where nothing above it has
    a phase; in a trace without any backward pass every op inside a step is. Inside an optimizer's step the forward and
    the backward pass keep their own phase: a closure runs them (LBFGS, Lightning). So does every part of the step
    inside a region that is named communication.
    """
    events = trace.events
    phase = event_meaning.phase.copy()
    forward_thread = column(trace, "forward_thread", 0)[tree.row]
    recorded = lookup(events["sequence"].is_not_null().to_numpy(), tree.row) & (forward_thread == 0)
    of_closure = np.isin(phase, (FORWARD, BACKWARD)) | (event_meaning.op & recorded & (phase < 0))
    if not (phase == BACKWARD).any():
        recorded |= lookup(events["step"].is_not_null().to_numpy(), tree.row)
    phase[(phase < 0) & event_meaning.op & recorded] = FORWARD
    top = tree.outermost_or_self(phase >= 0)
    of_top = np.append(phase, _UNKNOWN)[top]
    inner = tree.outermost_or_self(of_closure)
    called = (of_top == OPTIMIZER) & (inner >= 0)
    of_event = np.where(called, np.append(phase, _UNKNOWN)[inner], of_top)
    if not around_passes(trace).any():
        return of_event
    part = tree.outermost_or_self(np.isin(event_meaning.phase, (LOADING, FORWARD, BACKWARD, OPTIMIZER)))
    return np.where((of_top == COMMUNICATION) & (part >= 0), np.append(phase, _UNKNOWN)[part], of_event)


def _infer(trace: Trace, tree: Forest, phase_of: Ints, main: int, pieces: _LaneParts) -> _LaneParts:
    """Give phases to the main thread's time that has none (see `host`); pieces are sorted by start."""
    lanes = trace.lanes
    process = lanes.filter(pl.col("lane") == main)["process"][0]
    others = lanes.filter((pl.col("kind") == "host") & (pl.col("process") == process) & (pl.col("lane") != main))
    is_other = np.zeros(int(lanes["lane"].to_numpy().max(initial=0)) + 1, dtype=np.bool_)  # for every lane number
    is_other[others["lane"].to_numpy()] = True
    elsewhere = lookup(is_other, tree.lane)
    for new_phase in (BACKWARD, COMMUNICATION):
        rows = np.flatnonzero(elsewhere & (phase_of == new_phase) & (tree.parent < 0))
        busy = union(tree.start_ns[rows], tree.end_ns[rows])
        if not busy.start.size:
            continue
        unobserved = pieces.activity == UNOBSERVED
        if new_phase == BACKWARD:  # a closure of the optimizer waits for it
            free = (pieces.phase < 0) | ((pieces.phase == OPTIMIZER) & unobserved)
        else:
            free = (pieces.phase < 0) & unobserved
        # the parts of free pieces that lie in the busy time; others are left whole
        narrow = cut(np.where(free, pieces.start_ns, pieces.end_ns), pieces.end_ns, np.unique(np.concatenate(busy)))
        parts, free = pieces.take(narrow.source), free[narrow.source]
        start = np.where(free, narrow.start_ns, parts.start_ns)
        phase = np.where(free & contains(busy, start), new_phase, parts.phase)
        pieces = parts._replace(start_ns=start, end_ns=narrow.end_ns, phase=phase)
    # phaseless pieces between two pieces of one phase in one step take that phase
    phase, step = pieces.phase, pieces.step
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
    return pieces._replace(phase=filled)


def _summed(pieces: _LaneParts, how: Engine) -> pl.DataFrame:
    """Sums by lane, step, phase and activity; one number stands for the four while they are added."""
    lane, start, end, step, phase, activity_code = pieces
    steps = np.unique(step[np.flatnonzero(np.diff(step, prepend=NO_STEP - 1))])  # few: neighbours share theirs
    step_index = np.searchsorted(steps, step)
    kinds = len(PHASES) * len(ACTIVITIES)
    kind = np.where(phase < 0, OTHER, phase) * len(ACTIVITIES) + activity_code
    key = (lane.astype(np.int64) * max(steps.size, 1) + step_index) * kinds + kind
    timed = pl.LazyFrame({"key": key, "ns": end - start}).group_by("key").agg(pl.col("ns").sum())
    summed = timed.collect(engine=how).sort("key")
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
