"""Edges that hold GPU work back (its launch, its stream, events of other streams, a full device),
and launches that a full queue holds back.

Every function adds the edges of its kind.
"""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

import numpy as np

from traceloom.graph import host_tree
from traceloom.graph.device_work import DeviceWork, WorkTimeline
from traceloom.graph.edges import Edges
from traceloom.graph.host_tree import HostTree, Segments
from traceloom.graph.syncs import MISSING_VALUE, SyncRecords, find_last_on_thread
from traceloom.trace.array_types import Bools, Ints
from traceloom.trace.trace import Trace
from traceloom.trace.vocabulary import CLOCK_JITTER_NS

# A call this long did more than submit: it loaded code, or waited for room in the queue
_MIN_LONG_CALL_NS = 50_000
_MAX_EARLY_START_NS = 10_000  # its work can start this long before it returns
_CLOCK_TOLERANCE_NS = 2_000  # streams of one device agree about time this well

_MIN_QUEUE_DEPTH = 900  # launches that are pending when a queue is full (about 1,022 on CUDA)
# A launch that is longer than others of its name by this, and this many times, was held up
_MIN_HELD_UP_NS = 8_000
_HELD_UP_FACTOR = 2.5
# Of the launches into a deep queue must be consistent with its inferred capacity
_MIN_CONSISTENT_SHARE = 0.95
_MAX_RETURN_DELAY_NS = 100_000  # it returns this soon after the work that made room

# Work that starts this long after all that is known to hold it back waits for something else
_MIN_LATE_NS = 100_000
_MAX_START_DELAY_NS = 10_000  # it starts this soon after room was made
_MAX_TAIL_NS = 20_000  # or this long before the other ends: its last blocks leave room
_MAX_TAIL_SHARE = 0.03  # or this share of the other's duration
# Of the window: work launched this early can be queued behind work from before
BEGINNING_SHARE = 0.05
MIN_NOTICED_SHARE = 0.01  # of the window: unexplained time from here on gets a notice


def add_launch_edges(  # noqa: PLR0917  (both ends of the edges)
    edges: Edges,
    tree: HostTree,
    work: DeviceWork,
    awaited: Bools,
    host: Segments,
    segment_node: Ints,
    work_node: Ints,
) -> None:
    """Adds edges from each launch to the start of each work that it submitted.

    The work can begin before the call returns, so the call's start holds it back, except where a
    call was long and its work began when it returned. One graph launch submits all the kernels of
    its graph. Where calls are not recorded, the op that the file names replaces them.

    Args:
        edges: Where to add.
        tree: Host events.
        work: The GPU work.
        awaited: Host events that wait for GPU work; their own starts before they end.
        host: Segments of the host events.
        segment_node: Node of each segment.
        work_node: Node of each work.
    """
    has_call = work.call >= 0
    call = work.call[has_call]
    submits_last = (
        (tree.span()[call] >= _MIN_LONG_CALL_NS)
        & (work.start[has_call] >= tree.end[call] - _MAX_EARLY_START_NS)
        & ~awaited[call]
    )
    edges.add(
        "launch",
        np.where(work.correlated[has_call], "correlated", "measured"),
        segment_node[np.where(submits_last, host.last[call], host.first[call])],
        work_node[has_call],
        from_end=submits_last,
        to_end=False,
        firm=True,
    )
    has_op = work.op >= 0
    edges.add(
        "launch",
        "correlated",
        segment_node[host.first[work.op[has_op]]],
        work_node[has_op],
        from_end=False,
        to_end=False,
        firm=True,
    )


def add_stream_edges(edges: Edges, work: DeviceWork, work_node: Ints) -> int:
    """Orders the work of each stream.

    A work starts after the end of the one before it, give or take the jitter of the clock. Where works of one stream overlap, it starts
    after the start of the one it overlaps, and after the end of the last one that had ended. Where
    it ended after the overlapped one, its end is ordered, too: work that a programmatic launch lets
    begin early waits for the end of the work before it.

    Returns:
        The number of pairs of neighbours that overlap.
    """
    size = work.row.size
    before = np.arange(-1, size - 1)
    # For each work the one before it on its stream that ends last; -1 for the first.
    longest = np.full(size, -1, dtype=np.int64)
    _, bounds = work.lanes()
    for low, high in pairwise(bounds.tolist()):
        sets = work.end[low:high] >= np.maximum.accumulate(work.end[low:high])
        longest[low + 1 : high] = np.maximum.accumulate(np.where(sets, np.arange(low, high), -1))[
            :-1
        ]
    follows = before >= 0
    follows[follows] = work.lane[before[follows]] == work.lane[follows]
    rows = np.flatnonzero(follows)
    previous, reaching = before[rows], longest[rows]
    # For a reached work that has not ended, the starts of its neighbours decide
    ended = work.end[reaching] <= work.start[rows] + CLOCK_JITTER_NS
    pairs = np.concatenate([previous, reaching[ended]])
    target = np.concatenate([rows, rows[ended]])
    done = work.end[pairs] <= work.start[target] + CLOCK_JITTER_NS
    edges.add(
        "stream",
        "measured",
        work_node[pairs],
        work_node[target],
        from_end=done,
        to_end=False,
        firm=True,
    )
    overlaps = work.end[previous] > work.start[rows] + CLOCK_JITTER_NS
    later = np.flatnonzero(overlaps & (work.end[previous] <= work.end[rows]))
    edges.add(
        "stream",
        "inferred",
        work_node[previous[later]],
        work_node[rows[later]],
        from_end=True,
        to_end=True,
        firm=True,
    )
    return int(overlaps.sum())


def wait_edges(
    edges: Edges, tree: HostTree, times: WorkTimeline, work_node: Ints, records: SyncRecords
) -> None:
    """Adds edges from the work before a recorded event to the first work after the wait for it.

    Where the file does not say which event was awaited, it is inferred: of the work that other
    streams had been given when the event was recorded, the one that ends last before the waiting
    work starts.
    """
    if not work_node.size:
        return
    recorded = records.of("Stream Wait Event")
    complete = (
        (recorded.lane != MISSING_VALUE)
        & (recorded.awaited != MISSING_VALUE)
        & (recorded.recorded != MISSING_VALUE)
    )
    source = times.launched_before(recorded.awaited[complete], recorded.recorded[complete])
    target = times.launches_on_after(recorded.lane[complete], tree.start[recorded.call[complete]])
    valid = (source >= 0) & (target >= 0)
    waits = np.flatnonzero(tree.call)
    waits = waits[tree.named(host_tree.STREAM_EVENT_WAITS, waits)]
    waits = waits[~np.isin(waits, recorded.call[complete])]
    for evidence, (before, after) in (
        ("measured", (source[valid], target[valid])),
        ("inferred", _infer_stream_waits(tree, times, waits)),
    ):
        # Only pairs whose source had ended when the target started.
        possible = times.work.end[before] <= times.work.start[after] + _CLOCK_TOLERANCE_NS
        edges.add(
            "wait",
            evidence,
            work_node[before[possible]],
            work_node[after[possible]],
            from_end=True,
            to_end=False,
        )


def _infer_stream_waits(tree: HostTree, times: WorkTimeline, waits: Ints) -> tuple[Ints, Ints]:
    """Returns one source per wait: with k waits before a work, the k streams whose fitting work
    ends last.

    The stream that waits is the one that the thread submits to next; its next work waits, whichever
    thread submits it, as the backward pass does on a thread of its own.
    """
    own_lane = times.thread_launches_after(tree.lane[waits], tree.start[waits])
    target = times.launches_on_after(
        np.where(own_lane >= 0, times.work.lane[own_lane], MISSING_VALUE), tree.start[waits]
    )
    waits, target = waits[target >= 0], target[target >= 0]
    if not waits.size:
        return waits, target
    records = np.flatnonzero(tree.call)
    records = records[tree.named(host_tree.RECORDS, records)]
    before = find_last_on_thread(tree, records, waits)
    until = np.where(before >= 0, tree.start[before], tree.start[waits])
    # For each waiting work the last record it can mean, and how many waits come before it.
    target, index, count = np.unique(target, return_inverse=True, return_counts=True)
    latest = np.full(target.size, np.iinfo(np.int64).min)
    np.maximum.at(latest, index, until)
    start = times.work.start[target]
    own_lane = times.work.lane[target]
    candidates = np.full((times.lanes.size, target.size), -1, dtype=np.int64)
    for row, number in enumerate(times.lanes.tolist()):
        lane = np.full(target.size, number)
        launched = times.launched_before(lane, latest)
        ended = times.ended_by(lane, start + _CLOCK_TOLERANCE_NS)
        # Of the two, the earlier in the stream's order: the recorded work, as far as it was done.
        source = np.where(times.work.end[launched] <= times.work.end[ended], launched, ended)
        candidates[row] = np.where((launched < 0) | (ended < 0) | (own_lane == number), -1, source)
    end_ns = np.where(candidates >= 0, times.work.end[candidates], np.iinfo(np.int64).min // 2)
    order = np.argsort(-end_ns, axis=0, kind="stable")
    rank = np.empty_like(order)
    np.put_along_axis(
        rank, order, np.arange(times.lanes.size)[:, None] * np.ones_like(order), axis=0
    )
    stream, column = np.nonzero((candidates >= 0) & (rank < count[None, :]))
    return candidates[stream, column], target[column]


def add_command_waits(edges: Edges, trace: Trace, work: DeviceWork, work_node: Ints) -> Ints:
    """Adds edges into commands that hold their stream until an event of another stream, from the
    last event recorded before they end.

    Returns:
        Numbers of the commands that wait.
    """
    row = np.flatnonzero(work.command)
    if not row.size:
        return row
    names = trace.events["name"].gather(work.row[row])
    waits, records = (
        row[(names == "event_wait").to_numpy()],
        row[(names == "event_record").to_numpy()],
    )
    records = records[np.argsort(work.end[records], kind="stable")]
    best = np.full(waits.size, -1, dtype=np.int64)
    for lane in np.unique(work.lane[records]).tolist():
        lane_records = records[work.lane[records] == lane]
        index = (
            np.searchsorted(
                work.end[lane_records], work.end[waits] + _CLOCK_TOLERANCE_NS, side="right"
            )
            - 1
        )
        candidate = np.where(
            (index >= 0) & (work.lane[waits] != lane), lane_records[np.maximum(index, 0)], -1
        )
        best = np.where(
            (candidate >= 0) & ((best < 0) | (work.end[candidate] > work.end[best])),
            candidate,
            best,
        )
    is_delayed = (best >= 0) & (work.end[best] > work.start[waits])
    edges.add(
        "wait",
        "inferred",
        work_node[best[is_delayed]],
        work_node[waits[is_delayed]],
        from_end=True,
        to_end=True,
    )
    delayed: Ints = waits[is_delayed]
    return delayed


def add_queue_edges(
    edges: Edges, tree: HostTree, work: DeviceWork, last_node: Ints, work_node: Ints
) -> int:
    """Adds edges from the end of the work that makes room in a queue to the end of the launch that
    needs it.

    The capacity of a queue is taken from the launches that were held up; where there are none, it
    is unknown, and there are no edges. Launches that found room wait for the work which, by that
    capacity, made it, as long as the launches are consistent with it.

    Args:
        edges: Where to add.
        tree: Host events.
        work: GPU work.
        last_node: Node of the last segment of each host event.
        work_node: Node of each work.

    Returns:
        The number of launches that were held up.
    """
    # Work whose call submitted nothing else: graph launches have a cost of their own.
    is_only_work = work.call >= 0
    is_only_work[is_only_work] = np.bincount(work.call[is_only_work])[work.call[is_only_work]] == 1
    held_up = 0
    _, bounds = work.lanes()
    for low, high in pairwise(bounds.tolist()):
        rows = np.arange(low, high)
        rows = rows[np.argsort(work.asked[low:high], kind="stable")]  # in the order of launches
        sorted_ends = np.maximum.accumulate(np.sort(work.end[low:high]))
        end_order = rows[np.argsort(work.end[rows], kind="stable")]
        number = np.flatnonzero(is_only_work[rows])
        launch = work.call[rows[number]]
        returned, span = tree.end[launch], tree.span()[launch]
        done = np.searchsorted(sorted_ends, returned + _CLOCK_TOLERANCE_NS, side="right")
        pending = number + 1 - done
        freed = np.where(done > 0, sorted_ends[np.maximum(done - 1, 0)], np.iinfo(np.int64).min)
        deep = pending >= _MIN_QUEUE_DEPTH
        if not deep.any():
            continue
        # For each launch the median duration of those of its name that found room; 0 for names
        # without any.
        sample = np.arange(launch.size) if deep.all() else np.flatnonzero(~deep)
        code = tree.word[launch]
        sample = sample[np.lexsort((span[sample], code[sample]))]
        medians = np.zeros(tree.words.len(), dtype=np.int64)
        names = np.flatnonzero(np.diff(code[sample], prepend=-1, append=-1))
        for start, end in pairwise(names.tolist()):
            medians[code[sample[start]]] = span[sample[(start + end) // 2]]
        typical = medians[code]
        is_held_up = deep & (
            span >= np.maximum(typical + _MIN_HELD_UP_NS, _HELD_UP_FACTOR * typical)
        )
        is_held_up &= (returned - freed <= _MAX_RETURN_DELAY_NS) & (freed > tree.start[launch])
        if not is_held_up.any():
            continue
        held_up += int(is_held_up.sum())
        counts, often = np.unique(pending[is_held_up], return_counts=True)
        queue_depth = int(counts[::-1][often[::-1].argmax()])
        is_consistent = (pending[deep] <= queue_depth + 1).mean() >= _MIN_CONSISTENT_SHARE
        maker = np.where(is_held_up, done - 1, number - queue_depth)
        valid = (maker >= 0) & (is_held_up | is_consistent)
        maker = np.where(valid, end_order[np.maximum(maker, 0)], 0)
        valid &= work.end[maker] <= returned + _CLOCK_TOLERANCE_NS
        edges.add(
            "queue",
            "inferred",
            work_node[maker[valid]],
            last_node[launch[valid]],
            from_end=True,
            to_end=True,
        )
    return held_up


class LateWork(NamedTuple):
    """Work that started long after all that is known to hold it back.

    Attributes:
        crowded: How many works found the device full.
        unexplained: Numbers of the work that nothing recorded explains.
        waited_ns: How long each of those had been ready.
        before: Numbers of the first work of streams that work from before the window must have held
            back.
        before_ns: How long each of those had been ready.
    """

    crowded: int
    unexplained: Ints
    waited_ns: Ints
    before: Ints
    before_ns: Ints


def add_occupancy_edges(
    edges: Edges, work: DeviceWork, kernel: Bools, work_node: Ints, times: Ints
) -> LateWork:
    """Adds edges from the end of long work of one stream to the start of work of another that had
    been ready for long.

    Kernels wait for kernels, copies for copies.

    Args:
        edges: All edges so far; those into work determine when it was ready.
        work: GPU work.
        kernel: Which of it runs on multiprocessors (kernels and fills), not on copy engines.
        work_node: Node of each work.
        times: Measured time of each point, ns.

    Returns:
        The work that waited for room, and the work whose waiting nothing explains.
    """
    lanes, bounds = work.lanes()
    begun = times[2 * work_node]
    # For each point the latest time of what holds it back; the earliest time of all where nothing
    # does.
    held_until = np.full(times.size, times.min(initial=0))
    for source, target in zip(edges.source, edges.target, strict=True):
        np.maximum.at(held_until, target, times[source])
    ready = held_until[2 * work_node] + work.start - begun  # on the clock of the trace
    late = np.flatnonzero((work.start - ready >= _MIN_LATE_NS) & (work.call >= 0) & ~work.command)
    best = np.full(late.size, -1, dtype=np.int64)
    distance = np.full(late.size, np.iinfo(np.int64).max)
    start = work.start[late]
    for lane, (low, high) in zip(lanes.tolist(), pairwise(bounds.tolist()), strict=True):
        end_order = low + np.argsort(work.end[low:high], kind="stable")
        index = np.searchsorted(work.end[end_order], start - _MAX_START_DELAY_NS)
        other = end_order[np.minimum(index, end_order.size - 1)]
        length = work.end[other] - work.start[other]
        before = work.end[other] - start
        fits = (
            (index < end_order.size)
            & (work.lane[late] != lane)
            & (work.device[other] == work.device[late])
        )
        fits &= (
            (kernel[other] == kernel[late])
            & (work.start[other] < start)
            & (work.end[other] > ready[late])
        )
        fits &= before <= np.maximum(_MAX_TAIL_NS, _MAX_TAIL_SHARE * length)
        better = fits & (np.abs(before) < distance)
        best, distance = np.where(better, other, best), np.where(better, np.abs(before), distance)
    is_explained = best >= 0
    edges.add(
        "occupancy",
        "inferred",
        work_node[best[is_explained]],
        work_node[late[is_explained]],
        from_end=True,
        to_end=False,
    )
    unexplained = late[~is_explained]
    # First of its stream, launched at the window's beginning, and ready while nothing was recorded
    # on its device: the device was busy with work launched before the window.
    first, last = int(times.min(initial=0)), int(times.max(initial=0))
    launched_ns = work.asked[unexplained] - work.start[unexplained] + begun[unexplained]
    early = np.isin(unexplained, bounds[:-1]) & (
        launched_ns - first <= BEGINNING_SHARE * (last - first)
    )
    for device in np.unique(work.device).tolist():
        on_device = work.device == device
        starts, sorted_ends = np.sort(work.start[on_device]), np.sort(work.end[on_device])
        ended = np.searchsorted(sorted_ends, work.start[unexplained], side="right")
        idle = ended == np.searchsorted(sorted_ends, ready[unexplained], side="right")
        idle &= np.searchsorted(starts, work.start[unexplained]) == ended
        early &= (work.device[unexplained] != device) | idle
    before, unexplained = unexplained[early], unexplained[~early]
    nothing = np.zeros(before.size, dtype=np.int64)
    edges.add(
        "origin", "assumed", nothing, work_node[before], from_end=True, to_end=False, firm=True
    )
    waited = work.start - ready
    return LateWork(
        int(is_explained.sum()), unexplained, waited[unexplained], before, waited[before]
    )
