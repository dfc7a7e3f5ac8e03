"""Edges that hold GPU work back (its launch, its stream, events of other streams, a full device),
and launches that a full queue holds back.

Every function adds the edges of its kind.
"""

from itertools import pairwise
from typing import NamedTuple

import numpy as np
import polars as pl

from traceloom.graph import host_tree
from traceloom.graph.device_work import DeviceWork, WorkTimeline
from traceloom.graph.edges import Edges
from traceloom.graph.host_tree import HostTree, Segments
from traceloom.graph.syncs import MISSING_VALUE, SyncRecords
from traceloom.trace.array_types import Bools, Ints
from traceloom.trace.trace import Trace
from traceloom.trace.vocabulary import BEGINNING_SHARE, CLOCK_JITTER_NS

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
    # Behind work that had not ended by then, the stream says when it begins.
    begun = tree.end[call] - _MAX_EARLY_START_NS
    before = np.append(np.iinfo(np.int64).min, work.end[:-1])
    before[1:][work.lane[1:] != work.lane[:-1]] = np.iinfo(np.int64).min
    submits_last = (
        (tree.span()[call] >= _MIN_LONG_CALL_NS)
        & (work.start[has_call] >= begun)
        & (before[has_call] < begun)
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
    edges: Edges,
    tree: HostTree,
    times: WorkTimeline,
    work_node: Ints,
    records: SyncRecords,
    *,
    communication: Ints,
) -> None:
    """Adds edges from the work before a recorded event to the first work after the wait for it.

    Where the file does not say which event was awaited, it is inferred; `communication` are the
    numbers of the work that communicates.
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
        ("inferred", _infer_stream_waits(tree, times, waits, communication)),
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


class _CallSequence(NamedTuple):
    """Launches, records and waits of all threads, each thread's in the order of its calls; arrays
    of shape (calls,).

    Attributes:
        position: Positions in the tree.
        kind: _LAUNCH, _RECORD or _WAIT.
        stream: Lane of the stream that it is about.
        ends: Which records follow the launch of a communication, whose end they mark, and are
            awaited later.
        record: For waits directly behind the record that they wait for, its index; else -1.
    """

    position: Ints
    kind: Ints
    stream: Ints
    ends: Bools
    record: Ints


_LAUNCH, _RECORD, _WAIT = range(3)


def _find_streams_of_calls(
    tree: HostTree, work: DeviceWork, waits: Ints, communication: Ints
) -> _CallSequence:
    """Finds the streams of records and waits by the launches around them.

    A record behind a launch is of the launch's stream, and a wait is of the stream of the launch
    behind it. Others are of the stream that the thread computes on: that of its last launch of no
    communication.
    """
    launched = np.flatnonzero(work.call >= 0)
    calls, first = np.unique(work.call[launched], return_index=True)
    records = np.flatnonzero(tree.call)
    records = records[tree.named(host_tree.RECORDS, records)]
    position = np.concatenate([calls, records, waits])
    order = np.argsort(position, kind="stable")
    kind = np.repeat([_LAUNCH, _RECORD, _WAIT], (calls.size, records.size, waits.size))[order]
    # The work of each launch; that of others is of no stream
    work_of = np.append(launched[first], np.full(records.size + waits.size, -1))[order]
    stream, position = np.append(work.lane, -1)[work_of], position[order]
    computes = (kind == _LAUNCH) & ~np.isin(work_of, communication)
    thread, index = tree.lane[position], np.arange(position.size)
    current = np.full(index.size, np.bincount(work.lane).argmax())
    for near in (
        np.minimum.accumulate(np.where(computes, index, index.size - 1)[::-1])[::-1],
        np.maximum.accumulate(np.where(computes, index, 0)),
    ):
        found = computes[near] & (thread[near] == thread)
        current[found] = stream[near[found]]
    before = np.maximum(index - 1, 0)
    behind = np.where(kind == _WAIT, index.size - 1, index)
    behind = np.minimum.accumulate(behind[::-1])[::-1]
    follows = (thread[before] == thread) & (index > 0)
    after_launch = follows & (kind == _RECORD) & (kind[before] == _LAUNCH)
    before_launch = (kind == _WAIT) & (kind[behind] == _LAUNCH) & (thread[behind] == thread)
    stream = np.select(
        [kind == _LAUNCH, after_launch, before_launch],
        [stream, stream[before], stream[behind]],
        current,
    )
    paired = follows & (kind == _WAIT) & (kind[before] == _RECORD) & (stream[before] != stream)
    ends = after_launch & ~computes[before]
    ends[before[paired]] = False
    return _CallSequence(position, kind, stream, ends, np.where(paired, before, -1))


def _pair_latest_first(opens: Bools) -> Ints:
    """Returns for each close of a sequence of opens and closes the index of the latest open that no
    close before it has taken; -1 for opens, and where there is none.
    """
    depth = np.cumsum(np.where(opens, 1, -1))
    # A close without an open takes nothing
    depth -= np.minimum(np.minimum.accumulate(depth), 0)
    level = depth + ~opens
    order = np.lexsort((np.arange(opens.size), level))
    is_pair = opens[order[:-1]] & ~opens[order[1:]] & (level[order[:-1]] == level[order[1:]])
    pairs = np.flatnonzero(is_pair)
    partner = np.full(opens.size, -1)
    partner[order[pairs + 1]] = order[pairs]
    return partner


def _infer_stream_waits(
    tree: HostTree, times: WorkTimeline, waits: Ints, communication: Ints
) -> tuple[Ints, Ints]:
    """Returns the work that each wait waits for, and the work that it holds back.

    A wait directly behind a record waits for that. Others wait for a communication: for the stream
    that was given the latest one that nobody has waited for, and there for the earliest. Where that
    is impossible, or leaves unexplained when the work begins, it is the work of any stream that
    ended last before.
    """
    if not waits.size:
        return waits, waits
    work = times.work
    calls = _find_streams_of_calls(tree, work, waits, communication)
    record = calls.record.copy()
    ordered = np.flatnonzero(calls.ends | ((calls.kind == _WAIT) & (record < 0)))
    ordered = ordered[np.argsort(tree.start[calls.position[ordered]], kind="stable")]
    partner = _pair_latest_first(calls.ends[ordered])
    late = np.flatnonzero(partner >= 0)
    given = ordered[partner[late]]
    # The k-th wait for a stream is for its k-th record.
    record[ordered[late[np.argsort(calls.stream[given], kind="stable")]]] = given[
        np.lexsort((tree.start[calls.position[given]], calls.stream[given]))
    ]
    wait = np.flatnonzero(calls.kind == _WAIT)
    record, now = record[wait], tree.start[calls.position[wait]]
    recorded = np.where(record >= 0, tree.start[calls.position[record]], now)
    source = np.where(record >= 0, times.launched_before(calls.stream[record], recorded), -1)
    target = times.launches_on_after(calls.stream[wait], now)
    valid = target >= 0
    # A pair the other way round, where what should have been awaited ended too late
    back = (calls.record[wait] >= 0) & (source >= 0) & valid
    back &= work.end[source] > work.start[target] + _CLOCK_TOLERANCE_NS
    other = times.launched_before(np.where(back, calls.stream[wait], MISSING_VALUE), recorded)
    held = times.launches_on_after(np.where(back, calls.stream[record], MISSING_VALUE), now)
    back &= (other >= 0) & (held >= 0)
    back &= work.end[other] <= work.start[held] + _CLOCK_TOLERANCE_NS
    source, target = np.where(back, other, source)[valid], np.where(back, held, target)[valid]
    recorded = recorded[valid]
    possible = (source >= 0) & (work.end[source] <= work.start[target] + _CLOCK_TOLERANCE_NS)
    # When the work could have begun by its stream, its launch and what it waits for
    previous = np.arange(work.row.size) - 1
    ends = np.where(work.lane[previous] == work.lane, work.end[previous], work.asked)
    ready = np.maximum(ends, work.asked)
    np.maximum.at(ready, target[possible], work.end[source[possible]])
    open_ = ~possible | (work.start[target] - ready[target] > _MAX_START_DELAY_NS)
    last, held = _find_last_ended(times, target[open_], recorded[open_])
    return np.append(source[possible], last), np.append(target[possible], held)


def _find_last_ended(times: WorkTimeline, target: Ints, until: Ints) -> tuple[Ints, Ints]:
    """Returns for works the work of other streams that was given before a time and ended last
    before each began; for a target with k entries that of the last k streams.
    """
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


def add_dependency_edges(edges: Edges, trace: Trace, work: DeviceWork, work_node: Ints) -> None:
    """Adds the dependencies between nodes of a CUDA graph, where the file has arrows for them."""
    arrows = trace.flows.filter(pl.col("kind") == "dependency").drop_nulls()
    number = np.full(trace.events.height, -1, dtype=np.int64)
    number[work.row] = np.arange(work.row.size)
    before, after = number[arrows["source"].to_numpy()], number[arrows["target"].to_numpy()]
    possible = (before >= 0) & (after >= 0)
    possible &= work.end[before] <= work.start[after] + _CLOCK_TOLERANCE_NS
    before, after = work_node[before[possible]], work_node[after[possible]]
    edges.add("wait", "measured", before, after, from_end=True, to_end=False)


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
