"""Streams that wait for events of other streams."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from traceloom.link import calls
from traceloom.link.device_work import DeviceWork
from traceloom.link.edges import Edges
from traceloom.link.host_tree import HostTree
from traceloom.link.order_of_work import WorkByTime
from traceloom.link.sync_records import UNKNOWN, SyncRecords
from traceloom.link.syncs import last_of_thread
from traceloom.model import Trace

Ints = NDArray[np.int64]

_CLOCK_NS = 2_000  # streams of one device agree about time this well


def wait_edges(edges: Edges, tree: HostTree, times: WorkByTime, work_node: Ints, records: SyncRecords) -> None:
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
    source, target = _possible(times, source[valid], target[valid])
    _add(edges, work_node, source, target, "measured")
    waits = np.flatnonzero(tree.call)
    waits = waits[tree.named(calls.STREAM_EVENT_WAITS, waits)]
    waits = waits[~np.isin(waits, recorded.call[complete])]
    source, target = _inferred(tree, times, waits)
    _add(edges, work_node, source, target, "inferred")


def _add(edges: Edges, work_node: Ints, source: Ints, target: Ints, evidence: str) -> None:
    edges.add("wait", evidence, work_node[source], work_node[target], from_end=True, to_end=False)


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


def _possible(times: WorkByTime, source: Ints, target: Ints) -> tuple[Ints, Ints]:
    """Only pairs whose source had ended when the target started."""
    possible = times.work.end[source] <= times.work.start[target] + _CLOCK_NS
    return source[possible], target[possible]


def _inferred(tree: HostTree, times: WorkByTime, waits: Ints) -> tuple[Ints, Ints]:
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
    records = records[tree.named(calls.RECORDS, records)]
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
    return _possible(times, candidates[stream, column], target[column])
