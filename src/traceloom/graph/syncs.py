"""Waits of the host for the device: which work each call, copy or spin waits for."""

from __future__ import annotations

import numpy as np
import polars as pl
from msgspec import Struct
from numpy.typing import NDArray

from traceloom.graph import host_tree
from traceloom.graph.device_work import DeviceWork, WorkTimeline
from traceloom.graph.host_tree import HostTree, Segments
from traceloom.trace.array_types import Ints
from traceloom.trace.trace import Trace
from traceloom.trace.vocabulary import LAUNCHES

MISSING_VALUE = -1


class SyncRecords(Struct, frozen=True):
    """Recorded waits with their calls; arrays of shape (records,).

    Attributes:
        kind: Context Sync, Stream Sync, Event Sync or Stream Wait Event.
        call: Position (in the tree) of the call.
        device: Device; -1 where it is unknown.
        lane: Lane (of the trace) of the stream that the host waits for, or that is made to wait; -1
            unknown.
        awaited: Lane of the stream whose event is awaited; -1 unknown.
        recorded: When the awaited event was recorded: start of the call, ns; -1 unknown.
    """

    kind: pl.Series
    call: Ints
    device: Ints
    lane: Ints
    awaited: Ints
    recorded: Ints

    def of(self, kind: str) -> SyncRecords:
        rows = np.flatnonzero((self.kind == kind).to_numpy())
        arrays = (self.call, self.device, self.lane, self.awaited, self.recorded)
        return SyncRecords(self.kind[rows], *(array[rows] for array in arrays))


def sync_records(trace: Trace, tree: HostTree) -> SyncRecords:
    """Returns the records of waits whose calls are recorded as well."""
    if not trace.syncs.height:
        none: Ints = np.zeros(0, dtype=np.int64)
        return SyncRecords(trace.syncs["kind"], none, none, none, none, none)
    event_fields = trace.events.select("event", "device", "correlation")
    calls = (
        trace.events.lazy()
        .filter(pl.col("category").is_in(LAUNCHES), pl.col("correlation").is_not_null())
        .select("correlation", pl.col("event").alias("call"), pl.col("start_ns").alias("call_ns"))
        .unique("correlation", keep="first", maintain_order=True)
        .collect()
    )
    streams = trace.lanes.filter(pl.col("kind") == "device").select("device", "stream", "lane")
    frame = (
        trace.syncs.join(event_fields, on="event", how="left", maintain_order="left")
        .join(calls, on="correlation", how="inner", maintain_order="left")
        .join(
            calls.select(
                pl.col("correlation").alias("record_correlation"),
                pl.col("call_ns").alias("recorded"),
            ),
            on="record_correlation",
            how="left",
            maintain_order="left",
        )
        .join(streams, on=["device", "stream"], how="left", maintain_order="left")
        .join(
            streams.rename({"stream": "awaited_stream", "lane": "awaited"}),
            on=["device", "awaited_stream"],
            how="left",
            maintain_order="left",
        )
    )
    position = (
        tree.position[frame["call"].to_numpy()] if frame.height else np.zeros(0, dtype=np.int64)
    )
    frame = frame.with_columns(pl.Series("position", position)).filter(pl.col("position") >= 0)
    numbers = [
        frame[name].cast(pl.Int64).fill_null(MISSING_VALUE).to_numpy()
        for name in ("position", "device", "lane", "awaited", "recorded")
    ]
    return SyncRecords(frame["kind"], *numbers)


_Pairs = tuple[Ints, Ints, str]  # calls, the work that each waits for (-1: none), evidence

# A call may return, by its clock, this long before what it awaited is done
_MAX_EARLY_RETURN_NS = 20_000
_MAX_RETURN_DELAY_NS = 25_000  # a call that waited returns within this time
_MIN_WAIT_NS = 20_000  # a call this long did wait

_MIN_SPIN_NS = 200_000
# Of the segment's length: the largest distance between its end and the work's, which the next two
# limit as well
_MAX_DISTANCE_SHARE = 0.05
_MAX_BEFORE_NS = 100_000  # the polled value is in memory before the kernel that writes it has ended
_MAX_AFTER_NS = 20_000


class SyncTargets(Struct, frozen=True):
    """The work that calls wait for.

    Attributes:
        call: Position (in the tree) of the waiting call, one per pair.
        work: Number of the work that it waits for.
        evidence: One word per pair.
        calls: Positions of all calls that synchronise, including those that found everything done.
        unknown: Those of them that took long although it is unknown what they waited for.
    """

    call: Ints
    work: Ints
    evidence: NDArray[np.str_]
    calls: Ints
    unknown: Ints


def find_awaited_work(
    trace: Trace, tree: HostTree, work: DeviceWork, times: WorkTimeline, records: SyncRecords
) -> SyncTargets:
    """Finds the work that each synchronising call and each blocking copy waits for.

    Records of what was awaited are used where the file has them. Else a device is awaited on all
    its streams, and which stream or event was meant is inferred from the work that ends when the
    call returns, or, where the call did not wait, from the last launch of its thread.
    """
    position = np.flatnonzero(tree.call)
    device, stream, event = (
        position[tree.named(pattern, position)]
        for pattern in (host_tree.DEVICE_WAITS, host_tree.STREAM_WAITS, host_tree.EVENT_WAITS)
    )
    waiting = np.concatenate([device, stream, event])
    parts: list[_Pairs] = []
    if work.row.size:
        # Records of stream and event synchronisation; queries that do not wait have such records,
        # too.
        stream_records, event_records = records.of("Stream Sync"), records.of("Event Sync")
        call = np.concatenate([stream_records.call, event_records.call])
        lane = np.concatenate([stream_records.lane, event_records.awaited])
        until = np.concatenate([tree.start[stream_records.call], event_records.recorded])
        usable = (lane != MISSING_VALUE) & (until != MISSING_VALUE) & np.isin(call, waiting)
        recorded = call[usable], times.launched_before(lane[usable], until[usable]), "measured"
        in_records = recorded[0][recorded[1] >= 0]
        stream, event = (part[~np.isin(part, in_records)] for part in (stream, event))
        has_record = np.isin(device, records.of("Context Sync").call)
        parts = [
            recorded,
            _wait_for_device(tree, times, device[has_record], records),
            _wait_for_device(tree, times, device[~has_record], None),
            _wait_for_stream(tree, times, stream, until_event=False),
            _wait_for_stream(tree, times, event, until_event=True),
            _find_blocking_copies(trace, tree, work),
        ]
    nothing = np.zeros(0, dtype=np.int64)
    call = np.concatenate([nothing, *(part[0] for part in parts)])
    awaited = np.concatenate([nothing, *(part[1] for part in parts)])
    evidence = np.concatenate(
        [np.zeros(0, dtype=np.str_), *(np.full(part[0].size, part[2]) for part in parts)]
    )
    # A call is only held back by work that can end no later than it returns.
    possible = awaited >= 0
    possible[possible] = (
        work.end[awaited[possible]] <= tree.end[call[possible]] + _MAX_EARLY_RETURN_NS
    )
    call, awaited, evidence = call[possible], awaited[possible], evidence[possible]
    _, first = np.unique(call * (work.row.size + 1) + awaited, return_index=True)
    call, awaited, evidence = call[first], awaited[first], evidence[first]
    synchronising = np.unique(waiting)
    without = synchronising[~np.isin(synchronising, call)]
    return SyncTargets(
        call, awaited, evidence, synchronising, without[tree.span()[without] >= _MIN_WAIT_NS]
    )


def _wait_for_device(
    tree: HostTree, times: WorkTimeline, call: Ints, records: SyncRecords | None
) -> _Pairs:
    """Returns the last work of every stream; of one thread's calls only the first after a work
    waits for it.
    """
    call = np.repeat(call, times.lanes.size)
    lane = np.tile(times.lanes, call.size // max(times.lanes.size, 1))
    awaited = times.launched_before(lane, tree.start[call])
    valid = awaited >= 0
    if records is not None:
        device_records = records.of("Context Sync")
        device = np.full(tree.row.size, MISSING_VALUE)
        device[device_records.call] = device_records.device
        valid &= (device[call] == MISSING_VALUE) | (times.work.device[awaited] == device[call])
    call, awaited = call[valid], awaited[valid]
    order = np.lexsort((call, awaited, tree.lane[call]))
    call, awaited = call[order], awaited[order]
    repeated = np.zeros(call.size, dtype=np.bool_)
    repeated[1:] = (awaited[1:] == awaited[:-1]) & (tree.lane[call[1:]] == tree.lane[call[:-1]])
    return call[~repeated], awaited[~repeated], "inferred" if records is None else "measured"


def _wait_for_stream(
    tree: HostTree, times: WorkTimeline, call: Ints, *, until_event: bool
) -> _Pairs:
    """Returns the work that calls which wait for one stream wait for: all work submitted to it, or
    the work up to an event of it.

    Where a call waited, it is the work, on any stream, that was launched before and ended when the
    call returned; else the last work that its thread had launched (`until_event`: before the last
    event was recorded, which may be much earlier).
    """
    explains = np.full(call.size, -1, dtype=np.int64)
    # The streams on which work ends when a long call returns: indices into `call`, and lanes.
    long = np.flatnonzero(tree.end[call] - tree.start[call] >= _MIN_WAIT_NS)
    returned = tree.end[call[long]]
    end_order = np.argsort(times.work.end, kind="stable")
    sorted_ends = times.work.end[end_order]
    low = np.searchsorted(sorted_ends, returned - _MAX_RETURN_DELAY_NS, side="left")
    count = np.searchsorted(sorted_ends, returned + _MAX_EARLY_RETURN_NS, side="right") - low
    index = np.arange(int(count.sum())) - np.repeat(np.cumsum(count) - count - low, count)
    call_index, lane = np.unique(
        np.stack([np.repeat(long, count), times.work.lane[end_order[index]]]), axis=1
    )
    start, end = tree.start[call[call_index]], tree.end[call[call_index]]
    awaited = times.launched_before(lane, start)
    if until_event:
        done = times.ended_by(lane, end + _MAX_EARLY_RETURN_NS // 10)
        awaited = np.where((done >= 0) & (times.work.asked[done] < start), done, awaited)
    finished = times.work.end[awaited]
    fits = np.flatnonzero(
        (awaited >= 0)
        & (finished <= end + _MAX_EARLY_RETURN_NS)
        & (finished >= end - _MAX_RETURN_DELAY_NS)
    )
    # The last assignment wins: the latest end, and the first stream of those that end at once.
    order = fits[np.lexsort((-lane[fits], finished[fits]))]
    explains[call_index[order]] = awaited[order]
    until, end = tree.start[call], tree.end[call]
    if until_event:
        records = np.flatnonzero(tree.call)
        before = find_last_on_thread(tree, records[tree.named(host_tree.RECORDS, records)], call)
        until = np.where(before >= 0, tree.start[before], until)
    last_launched = times.thread_launched_before(tree.lane[call], until)
    last = times.launched_before(
        np.where(last_launched >= 0, times.work.lane[last_launched], MISSING_VALUE), until
    )
    use_last = explains < 0
    if not until_event:  # its own stream explains the return as well as any other
        finished = times.work.end[last]
        use_last |= (
            (last >= 0)
            & (finished <= end + _MAX_EARLY_RETURN_NS)
            & (finished >= end - _MAX_RETURN_DELAY_NS)
        )
    return call, np.where(use_last, last, explains), "inferred"


def find_last_on_thread(tree: HostTree, events: Ints, call: Ints) -> Ints:
    """Returns the last of `events` (positions, ascending) on the thread of each call before it; -1
    where there is none.
    """
    index = np.searchsorted(events, call) - 1
    last = np.where(index >= 0, events[index] if events.size else -1, -1)
    return np.where((last >= 0) & (tree.lane[last] == tree.lane[call]), last, -1)


def _find_blocking_copies(trace: Trace, tree: HostTree, work: DeviceWork) -> _Pairs:
    """Returns copies whose calls return when they are done: those of pageable memory to the host,
    and calls that never return early.

    Copies from pageable memory to the device are staged: the call returns when the last piece is in
    the buffer.
    """
    number = np.full(trace.events.height + 1, -1, dtype=np.int64)
    number[work.row] = np.arange(work.row.size)
    copy_work = number[trace.copies["event"].to_numpy()]
    launched = copy_work >= 0
    launched[launched] = work.call[copy_work[launched]] >= 0
    copy_work, copies = copy_work[launched], trace.copies[np.flatnonzero(launched)]
    call = work.call[copy_work]
    blocking = tree.named(host_tree.BLOCKING_COPIES, call)
    to_host, pinned = (
        column.to_numpy()
        for column in copies.select(
            to_host=(pl.col("kind") == "DtoH") & pl.col("target_memory").eq_missing("pageable"),
            pinned=pl.col("source_memory").is_in(["pinned", "device"]).fill_null(value=False),
        )
    )
    # A call that returned no earlier than its copy ended did wait.
    waited = (
        ~pinned
        & (tree.end[call] >= work.end[copy_work])
        & (tree.end[call] - work.end[copy_work] < _MAX_RETURN_DELAY_NS)
    )
    # A synchronisation right behind a call that returned before waits in its place.
    behind = np.minimum(tree.stop[call], tree.row.size - 1)
    awaited_after = tree.named(host_tree.STREAM_WAITS, behind) & (
        tree.lane[behind] == tree.lane[call]
    )
    awaited_after &= tree.end[call] < work.end[copy_work]
    is_blocking = blocking | (to_host & ~awaited_after) | waited
    return call[is_blocking], copy_work[is_blocking], "inferred"


def find_spin_waits(
    trace: Trace, tree: HostTree, host: Segments, times: WorkTimeline, waits: Ints
) -> tuple[Ints, Ints]:
    """Finds long self time, right after a launch, that ends when the work of that launch does.

    DeepEP's dispatch does this: the host reads from memory how much will arrive, as soon as a
    kernel has written it.

    Args:
        trace: The trace.
        tree: Its host events.
        host: Their segments.
        times: GPU work by time.
        waits: Segments that wait for another thread.

    Returns:
        Numbers of the segments, and of the work that each waits for.
    """
    if not times.work.row.size or not host.owner.size:
        nothing = np.zeros(0, dtype=np.int64)
        return nothing, nothing
    fits = ~np.append(host_tree.mark_own_work(trace, tree), True)[host.owner] & (
        host.end - host.start >= _MIN_SPIN_NS
    )
    fits[waits] = False
    submits = np.zeros(tree.row.size + 1, dtype=np.bool_)
    submits[times.work.call[times.work.call >= 0]] = True
    # Right after a call that submitted GPU work.
    before = np.append(-1, host.owner[:-1])
    fits &= submits[before] & np.append(False, host.lane[1:] == host.lane[:-1])
    segments = np.flatnonzero(fits)
    awaited = times.thread_launched_before(host.lane[segments], host.start[segments])
    close = np.minimum(
        _MAX_DISTANCE_SHARE * (host.end[segments] - host.start[segments]), _MAX_BEFORE_NS
    )
    late = times.work.end[awaited] - host.end[segments]
    matches = (
        (awaited >= 0)
        & (late <= close)
        & (-late <= np.minimum(close, _MAX_AFTER_NS))
        & (times.work.end[awaited] > host.start[segments])
    )
    return segments[matches], awaited[matches]
