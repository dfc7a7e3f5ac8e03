"""What was the host doing while a GPU had nothing to do?"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import polars as pl

from traceloom.analyze.ancestry import forest, host_segments
from traceloom.analyze.host import main_lane
from traceloom.analyze.idle_causes import HOST_CAUSES
from traceloom.analyze.intervals import Spans, overlaps
from traceloom.analyze.phases import BLOCKING_CALL, LAUNCH, LOADING, OP, PYTHON, activity, meaning
from traceloom.analyze.vocabulary import vocabulary
from traceloom.array_types import Bools, Ints
from traceloom.model import Trace
from traceloom.model.arrays import lookup

_CAUSES = list(HOST_CAUSES)
_OF_ACTIVITY = {
    BLOCKING_CALL: _CAUSES.index("host_blocking_call"),
    LAUNCH: _CAUSES.index("host_launch"),
    OP: _CAUSES.index("host_op"),
    PYTHON: _CAUSES.index("host_python"),
}
_UNOBSERVED = len(_CAUSES) - 1
# What the collector is called in recordings: Python's own event, annotations of it, and calls of `gc.collect`.
COLLECTIONS = (
    r"^(Python )?GC\b|^gc($|[.: (])|^garbage[ _]collect"
    r"|^<built-in (function|method) collect( of module '?gc'?.*)?>$|(^|/)gc\.py\(\d+\): "
)
# Waiting for a lock, a condition or a semaphore; `run_backward` and synchronisations are no locks.
LOCKS = (
    r"^<built-in method (acquire|__enter__|_acquire_restore) of _?(thread|multiprocessing|threading)\."
    r"|(^|/)threading\.py\(\d+\): (acquire|wait|wait_for|_wait_for_tstate_lock|_acquire_restore|join)$"
    r"|(^|/)(multiprocessing/(synchronize|queues)|queue)\.py\(\d+\): (acquire|__enter__|wait|get)$"
    r"|\bLock\.acquire\b|(?i:\bfutex|pthread_(mutex|rwlock|cond)_[a-z_]*(lock|wait)|\bsem_(timed)?wait\b)"
)


class Stretches(NamedTuple):
    """Contiguous parts of gaps, each in one step, by gap and start; arrays of one length.

    Attributes:
        gap: Row of the gap.
        step_row: Row of the step in `trace.steps`; -1 outside.
        start: Starts.
        end: Ends, > starts.
    """

    gap: Ints
    step_row: Ints
    start: Ints
    end: Ints


class _WaitParts(NamedTuple):
    """Stretches of stretches with one innermost host event each; arrays of one length.

    Attributes:
        part: Row of the stretches.
        owner: Position of the event in the forest; -1 where none is open.
        start: Starts.
        end: Ends.
        other: True where the event is the main thread's, not the launching thread's.
    """

    part: Ints
    owner: Ints
    start: Ints
    end: Ints
    other: Bools


def split_by_activity(trace: Trace, waiting: Stretches, lane: Ints, device: Ints) -> pl.DataFrame:
    """Split time in which the GPU waited for a launch by what the launching thread did.

    Where the launching thread has nothing open (an autograd thread before its first work, say), what the main thread
    did is taken instead, and is not sure.

    Args:
        trace: One process's trace.
        waiting: The time until the launches.
        lane: Lane of the launching thread of each stretch.
        device: Device of each stretch; those of one device are disjoint.

    Returns:
        Columns gap, step_row, start_ns, duration_ns, cause (number in HOST_CAUSES), sure, activity (row of the
        longest innermost event, -1 where none is open); durations add up to those of `waiting`.
    """
    tree = forest(trace)
    pieces = _observed(trace, waiting, lane, device)
    cause = np.full(pieces.owner.size, _UNOBSERVED)
    observed = pieces.owner >= 0
    # the cause that each host event stands for, by itself and what it stands in
    words, activities = vocabulary(trace), activity(trace)
    cause_of = np.full(tree.row.size, _UNOBSERVED, like=tree.row)
    for code, number in _OF_ACTIVITY.items():
        cause_of[activities == code] = number
    for pattern, name in ((LOCKS, "host_lock"), (COLLECTIONS, "host_garbage_collection")):
        matching = words.matching(pattern)
        if matching.any():
            cause_of[tree.outermost_or_self(lookup(matching, words.code[tree.row])) >= 0] = _CAUSES.index(name)
    cause_of[tree.outermost_or_self(meaning(trace).phase == LOADING) >= 0] = _CAUSES.index("host_data_loading")
    cause[observed] = cause_of[pieces.owner[observed]]
    rows = tree.row[pieces.owner] if tree.row.size else pieces.owner
    event_row = np.where(observed, rows, -1)
    length = pieces.end - pieces.start
    kind = pieces.part * len(_CAUSES) + cause
    order = np.lexsort((-length, kind))  # the longest of each part and cause first
    ordered = kind[order]
    first = np.flatnonzero(np.diff(ordered, prepend=-1))
    part = pieces.part[order[first]]
    sure = ~pieces.other & (cause != _UNOBSERVED)
    return pl.DataFrame(
        {
            "gap": waiting.gap[part],
            "step_row": waiting.step_row[part],
            "start_ns": np.minimum.reduceat(pieces.start[order], first),
            "duration_ns": np.add.reduceat(length[order], first),
            "cause": cause[order[first]],
            "sure": np.logical_and.reduceat(sure[order], first),
            "activity": event_row[order[first]],
        }
    )


def _observed(trace: Trace, waiting: Stretches, lane: Ints, device: Ints) -> _WaitParts:
    """Cut the stretches at every change of the innermost event of the launching thread.

    Where that has nothing open, the main thread's events are taken. That the main thread waits for autograd's threads
    does not count: those are the launching threads.
    """
    nothing = np.zeros(0, dtype=np.int64)
    parts = [_WaitParts(nothing, nothing, nothing, nothing, np.zeros(0, dtype=np.bool_))]
    tree, segments, main = forest(trace), host_segments(trace), main_lane(trace)

    def on_lane(of: int, part: Ints, spans: Spans) -> _WaitParts:
        rows = np.flatnonzero(segments.lane == of)
        shared = overlaps(segments.start_ns[rows], segments.end_ns[rows], spans)
        owner = segments.owner[rows[shared.left]]
        return _WaitParts(part[shared.right], owner, shared.start, shared.end, np.zeros(owner.size, dtype=np.bool_))

    pair = device * (int(lane.max(initial=0)) + 1) + lane
    for group in np.unique(pair):
        part = np.flatnonzero(pair == group)
        launch_lane = int(lane[part[0]])
        own = on_lane(launch_lane, part, Spans(waiting.start[part], waiting.end[part]))
        if main is None or launch_lane == main:
            parts.append(own)
            continue
        blank = np.flatnonzero(own.owner < 0)
        blank = blank[np.argsort(own.start[blank], kind="stable")]
        helped = on_lane(main, own.part[blank], Spans(own.start[blank], own.end[blank]))
        names = trace.events["name"][tree.row[np.maximum(helped.owner, 0)]]
        counts = (helped.owner >= 0) & ~names.str.starts_with("<built-in method run_backward").to_numpy()
        kept = own.owner >= 0
        parts.append(_WaitParts(own.part[kept], own.owner[kept], own.start[kept], own.end[kept], own.other[kept]))
        parts.append(helped._replace(owner=np.where(counts, helped.owner, -1), other=counts))
    return _WaitParts(*(np.concatenate(arrays) for arrays in zip(*parts, strict=True)))
