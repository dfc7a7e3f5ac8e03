"""What holds GPU work back: its launch, its stream, events of other streams, a full device; and full queues.

Every function adds edges of its kind.
"""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

import numpy as np

from traceloom.graph import host_tree
from traceloom.graph.device_work import DeviceWork, WorkTimeline
from traceloom.graph.edges import Edges
from traceloom.graph.host_tree import HostTree, Segments
from traceloom.graph.syncs import UNKNOWN, SyncRecords, last_of_thread
from traceloom.trace.array_types import Bools, Ints
from traceloom.trace.trace import Trace

_LONG_NS = 50_000  # a call this long did more than submit: it loaded code, or waited for room in the queue
_BEFORE_NS = 10_000  # its work can start this long before it returns
_CLOCK_NS = 2_000  # streams of one device agree about time this well

_DEEP = 900  # launches that are pending when a queue is full (about 1,022 on CUDA)
_LONGER_NS = 8_000  # a launch that is longer than others of its name by this, and this many times, was held up
_TIMES = 2.5
_CERTAIN = 0.95  # of the launches into a deep queue must keep to what it is said to hold
_AT_ONCE_NS = 100_000  # it returns this soon after the work that made room

_LATE_NS = 100_000  # work that starts this long after all that is known to hold it back waits for something else
_AFTER_NS = 10_000  # it starts this soon after room was made
_TAIL_NS = 20_000  # or this long before the other ends: its last blocks leave room
_TAIL = 0.03  # or this share of the other's duration
BEGINNING = 0.05  # of the window: who was launched so early can be behind what was launched before
MUCH = 0.01  # of the window: time that nothing recorded explains is worth a word


def launch_edges(  # noqa: PLR0917  (both ends of the edges)
    edges: Edges,
    tree: HostTree,
    work: DeviceWork,
    awaited: Bools,
    host: Segments,
    segment_node: Ints,
    work_node: Ints,
) -> None:
    """From each launch to the start of each work that it submitted.

    The work can begin before the call returns, so the call's start is what holds it back; but not where a call was
    long and its work began when it returned. One graph launch submits all the kernels of its graph. Where calls are not
    recorded, the op that the file names stands for them.

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
        (tree.span()[call] >= _LONG_NS) & (work.start[has_call] >= tree.end[call] - _BEFORE_NS) & ~awaited[call]
    )
    edges.add(
        "launch", np.where(work.correlated[has_call], "correlated", "measured"),
        segment_node[np.where(submits_last, host.last[call], host.first[call])], work_node[has_call],
        from_end=submits_last, to_end=False, firm=True,
    )  # fmt: skip
    named = work.op >= 0
    edges.add(
        "launch", "correlated", segment_node[host.first[work.op[named]]], work_node[named],
        from_end=False, to_end=False, firm=True,
    )  # fmt: skip


def stream_edges(edges: Edges, work: DeviceWork, work_node: Ints) -> int:
    """Order the work of each stream.

    A work starts after the end of the one before it. Where works of one stream overlap, it starts after the start of
    the one it overlaps, and after the end of the last one that had ended; and where it ended after that one, that is
    an order, too: what a programmatic launch lets begin early waits for the end of the work before.

    Returns:
        How many pairs of neighbours overlap.
    """
    size = work.row.size
    before = np.arange(-1, size - 1)
    # for each work the one before it on its stream that ends last; -1 for the first
    longest = np.full(size, -1, dtype=np.int64)
    _, bounds = work.lanes()
    for low, high in pairwise(bounds.tolist()):
        sets = work.end[low:high] >= np.maximum.accumulate(work.end[low:high])
        longest[low + 1 : high] = np.maximum.accumulate(np.where(sets, np.arange(low, high), -1))[:-1]
    follows = before >= 0
    follows[follows] = work.lane[before[follows]] == work.lane[follows]
    rows = np.flatnonzero(follows)
    previous, reaching = before[rows], longest[rows]
    ended = work.end[reaching] <= work.start[rows]  # of one that has not, its neighbours' starts tell
    pairs = np.concatenate([previous, reaching[ended]])
    target = np.concatenate([rows, rows[ended]])
    done = work.end[pairs] <= work.start[target]
    edges.add("stream", "measured", work_node[pairs], work_node[target], from_end=done, to_end=False, firm=True)
    overlaps = work.end[previous] > work.start[rows]
    later = np.flatnonzero(overlaps & (work.end[previous] <= work.end[rows]))
    edges.add(
        "stream", "inferred", work_node[previous[later]], work_node[rows[later]], from_end=True, to_end=True, firm=True
    )
    return int(overlaps.sum())


def wait_edges(edges: Edges, tree: HostTree, times: WorkTimeline, work_node: Ints, records: SyncRecords) -> None:
    """From the work before a recorded event to the first work after the wait for it.

    Where the file does not say which event was awaited, it is inferred: of what other streams had been asked to do
    when the event was recorded, the work that ends last before the waiting work starts.
    """
    if not work_node.size:
        return
    recorded = records.of("Stream Wait Event")
    complete = (recorded.lane != UNKNOWN) & (recorded.awaited != UNKNOWN) & (recorded.recorded != UNKNOWN)
    source = times.launched_before(recorded.awaited[complete], recorded.recorded[complete])
    target = times.launches_on_after(recorded.lane[complete], tree.start[recorded.call[complete]])
    valid = (source >= 0) & (target >= 0)
    waits = np.flatnonzero(tree.call)
    waits = waits[tree.named(host_tree.STREAM_EVENT_WAITS, waits)]
    waits = waits[~np.isin(waits, recorded.call[complete])]
    for evidence, (before, after) in (
        ("measured", (source[valid], target[valid])),
        ("inferred", _inferred_waits(tree, times, waits)),
    ):
        # only pairs whose source had ended when the target started
        possible = times.work.end[before] <= times.work.start[after] + _CLOCK_NS
        edges.add(
            "wait", evidence, work_node[before[possible]], work_node[after[possible]], from_end=True, to_end=False
        )


def _inferred_waits(tree: HostTree, times: WorkTimeline, waits: Ints) -> tuple[Ints, Ints]:
    """One source per wait: with k waits before a work, the k streams whose fitting work ends last.

    The stream that waits is the one that the thread submits to next; what waits is what anybody submits to it next, as
    the backward pass does on a thread of its own.
    """
    own = times.thread_launches_after(tree.lane[waits], tree.start[waits])
    target = times.launches_on_after(np.where(own >= 0, times.work.lane[own], UNKNOWN), tree.start[waits])
    waits, target = waits[target >= 0], target[target >= 0]
    if not waits.size:
        return waits, target
    records = np.flatnonzero(tree.call)
    records = records[tree.named(host_tree.RECORDS, records)]
    before = last_of_thread(tree, records, waits)
    until = np.where(before >= 0, tree.start[before], tree.start[waits])
    # of each work that waits: the last record it can mean, and how many waits stand before it
    target, index, count = np.unique(target, return_inverse=True, return_counts=True)
    latest = np.full(target.size, np.iinfo(np.int64).min)
    np.maximum.at(latest, index, until)
    begin = times.work.start[target]
    own = times.work.lane[target]
    candidates = np.full((times.lanes.size, target.size), -1, dtype=np.int64)
    for row, number in enumerate(times.lanes.tolist()):
        lane = np.full(target.size, number)
        launched = times.launched_before(lane, latest)
        ended = times.ended_by(lane, begin + _CLOCK_NS)
        # in a stream's order the earlier of the two: what was recorded, as far as it was done
        of = np.where(times.work.end[launched] <= times.work.end[ended], launched, ended)
        candidates[row] = np.where((launched < 0) | (ended < 0) | (own == number), -1, of)
    ends = np.where(candidates >= 0, times.work.end[candidates], np.iinfo(np.int64).min // 2)
    order = np.argsort(-ends, axis=0, kind="stable")
    rank = np.empty_like(order)
    np.put_along_axis(rank, order, np.arange(times.lanes.size)[:, None] * np.ones_like(order), axis=0)
    stream, column = np.nonzero((candidates >= 0) & (rank < count[None, :]))
    return candidates[stream, column], target[column]


def command_waits(edges: Edges, trace: Trace, work: DeviceWork, work_node: Ints) -> Ints:
    """Commands that hold their stream until an event of another stream: from the last event recorded before they end.

    Returns:
        Numbers of the commands that wait.
    """
    row = np.flatnonzero(work.command)
    if not row.size:
        return row
    names = trace.events["name"].gather(work.row[row])
    waits, records = row[(names == "event_wait").to_numpy()], row[(names == "event_record").to_numpy()]
    records = records[np.argsort(work.end[records], kind="stable")]
    best = np.full(waits.size, -1, dtype=np.int64)
    for lane in np.unique(work.lane[records]).tolist():
        of_lane = records[work.lane[records] == lane]
        at = np.searchsorted(work.end[of_lane], work.end[waits] + _CLOCK_NS, side="right") - 1
        of = np.where((at >= 0) & (work.lane[waits] != lane), of_lane[np.maximum(at, 0)], -1)
        best = np.where((of >= 0) & ((best < 0) | (work.end[of] > work.end[best])), of, best)
    held = (best >= 0) & (work.end[best] > work.start[waits])
    edges.add("wait", "inferred", work_node[best[held]], work_node[waits[held]], from_end=True, to_end=True)
    holds: Ints = waits[held]
    return holds


def queue_edges(edges: Edges, tree: HostTree, work: DeviceWork, last_node: Ints, work_node: Ints) -> int:
    """From the end of the work that makes room to the end of the launch that needs it.

    How much a queue holds is taken from the launches that were held up. Where none was, it is not known, and there
    are no edges. Launches that found room wait for the work which, by that count, made it, as long as the launches
    keep to that count.

    Args:
        edges: Where to add.
        tree: Host events.
        work: GPU work.
        last_node: Node of the last segment of each host event.
        work_node: Node of each work.

    Returns:
        How many launches were held up.
    """
    # work whose call submitted nothing else: graph launches have a cost of their own
    alone = work.call >= 0
    alone[alone] = np.bincount(work.call[alone])[work.call[alone]] == 1
    held_up = 0
    _, bounds = work.lanes()
    for low, high in pairwise(bounds.tolist()):
        at = np.arange(low, high)
        at = at[np.argsort(work.asked[low:high], kind="stable")]  # in the order of launches
        ends = np.maximum.accumulate(np.sort(work.end[low:high]))
        by_end = at[np.argsort(work.end[at], kind="stable")]
        number = np.flatnonzero(alone[at])
        launch = work.call[at[number]]
        returned, span = tree.end[launch], tree.span()[launch]
        done = np.searchsorted(ends, returned + _CLOCK_NS, side="right")
        pending = number + 1 - done
        freed = np.where(done > 0, ends[np.maximum(done - 1, 0)], np.iinfo(np.int64).min)
        deep = pending >= _DEEP
        if not deep.any():
            continue
        # of each launch the median duration of those of its name that found room; 0 for names without any
        sample = np.arange(launch.size) if deep.all() else np.flatnonzero(~deep)
        code = tree.word[launch]
        sample = sample[np.lexsort((span[sample], code[sample]))]
        medians = np.zeros(tree.words.len(), dtype=np.int64)
        names = np.flatnonzero(np.diff(code[sample], prepend=-1, append=-1))
        for begin, end in pairwise(names.tolist()):
            medians[code[sample[begin]]] = span[sample[(begin + end) // 2]]
        usual = medians[code]
        held = deep & (span >= np.maximum(usual + _LONGER_NS, _TIMES * usual))
        held &= (returned - freed <= _AT_ONCE_NS) & (freed > tree.start[launch])
        if not held.any():
            continue
        held_up += int(held.sum())
        counts, often = np.unique(pending[held], return_counts=True)
        holds = int(counts[::-1][often[::-1].argmax()])
        keeps = (pending[deep] <= holds + 1).mean() >= _CERTAIN
        maker = np.where(held, done - 1, number - holds)
        valid = (maker >= 0) & (held | keeps)
        maker = np.where(valid, by_end[np.maximum(maker, 0)], 0)
        valid &= work.end[maker] <= returned + _CLOCK_NS
        edges.add("queue", "inferred", work_node[maker[valid]], last_node[launch[valid]], from_end=True, to_end=True)
    return held_up


class LateWork(NamedTuple):
    """Work that started long after all that is known to hold it back.

    Attributes:
        crowded: How many found the device full.
        unexplained: Numbers of the work that nothing recorded explains.
        waited_ns: How long each of those had been ready.
        before: Numbers of the first work of streams that what lies before the window must have held back.
        before_ns: How long each of those had been ready.
    """

    crowded: int
    unexplained: Ints
    waited_ns: Ints
    before: Ints
    before_ns: Ints


def occupancy_edges(edges: Edges, work: DeviceWork, kernel: Bools, work_node: Ints, times: Ints) -> LateWork:
    """From the end of long work of one stream to the start of work of another that had been ready for long.

    Kernels wait for kernels, copies for copies.

    Args:
        edges: All edges so far; those into work say when it was ready.
        work: GPU work.
        kernel: Which of it runs on multiprocessors (kernels and fills), not on copy engines.
        work_node: Node of each work.
        times: Measured time of each point, ns.

    Returns:
        What waited for room, and what waited for nothing that is known.
    """
    lanes, bounds = work.lanes()
    begun = times[2 * work_node]
    # of each point the latest time of what holds it back; the earliest time there is where nothing does
    held_until = np.full(times.size, times.min(initial=0))
    for source, target in zip(edges.source, edges.target, strict=True):
        np.maximum.at(held_until, target, times[source])
    ready = held_until[2 * work_node] + work.start - begun  # on the clock of the trace
    late = np.flatnonzero((work.start - ready >= _LATE_NS) & (work.call >= 0) & ~work.command)
    best = np.full(late.size, -1, dtype=np.int64)
    distance = np.full(late.size, np.iinfo(np.int64).max)
    start = work.start[late]
    for lane, (low, high) in zip(lanes.tolist(), pairwise(bounds.tolist()), strict=True):
        by_end = low + np.argsort(work.end[low:high], kind="stable")
        at = np.searchsorted(work.end[by_end], start - _AFTER_NS)
        other = by_end[np.minimum(at, by_end.size - 1)]
        length = work.end[other] - work.start[other]
        before = work.end[other] - start
        fits = (at < by_end.size) & (work.lane[late] != lane) & (work.device[other] == work.device[late])
        fits &= (kernel[other] == kernel[late]) & (work.start[other] < start) & (work.end[other] > ready[late])
        fits &= before <= np.maximum(_TAIL_NS, _TAIL * length)
        better = fits & (np.abs(before) < distance)
        best, distance = np.where(better, other, best), np.where(better, np.abs(before), distance)
    held = best >= 0
    edges.add("occupancy", "inferred", work_node[best[held]], work_node[late[held]], from_end=True, to_end=False)
    rest = late[~held]
    # First of its stream, launched at the window's beginning, and ready while its device did nothing that is recorded:
    # the device was busy with what had been launched before.
    first, last = int(times.min(initial=0)), int(times.max(initial=0))
    launched_ns = work.asked[rest] - work.start[rest] + begun[rest]
    early = np.isin(rest, bounds[:-1]) & (launched_ns - first <= BEGINNING * (last - first))
    for device in np.unique(work.device).tolist():
        of_device = work.device == device
        starts, ends = np.sort(work.start[of_device]), np.sort(work.end[of_device])
        ended = np.searchsorted(ends, work.start[rest], side="right")
        idle = ended == np.searchsorted(ends, ready[rest], side="right")
        idle &= np.searchsorted(starts, work.start[rest]) == ended
        early &= (work.device[rest] != device) | idle
    before, rest = rest[early], rest[~early]
    nothing = np.zeros(before.size, dtype=np.int64)
    edges.add("origin", "assumed", nothing, work_node[before], from_end=True, to_end=False, firm=True)
    waited = work.start - ready
    return LateWork(int(held.sum()), rest, waited[rest], before, waited[before])
