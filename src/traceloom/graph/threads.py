"""Hand-offs of work between threads: which thread waits for which, also inside the self time of an
event.
"""

from __future__ import annotations

import numpy as np
from msgspec import Struct

from traceloom.graph.edges import Edges
from traceloom.graph.host_tree import (
    AUTOGRAD,
    COLLECTIVE,
    HOST_BACKENDS,
    MESSAGES,
    PLAIN_OP,
    WORKER_LOADERS,
    HostTree,
    Segments,
    mark_own_work,
)
from traceloom.trace.array_types import Bools, Ints
from traceloom.trace.session import ThreadClock, read_thread_clocks
from traceloom.trace.trace import Trace

_MIN_QUIET_NS = 20_000  # a thread that does nothing named for this long may be waiting
# Of a quiet time that another thread's work must fill to be what was waited for
_MIN_FILLED_SHARE = 0.5
_MIN_BUSY_SHARE = 0.3  # of that work's span in which something is recorded
_MAX_WAKEUP_NS = 30_000  # the awaited thread woke the main thread, which goes on this soon
_MAX_WAKEUP_SHARE = 0.15  # or after this share of its quiet time
_MIN_AUTOGRAD_SHARE = 0.9  # of a thread's outermost events are of the backward pass
_DOMINANCE_FACTOR = 10  # times as many calls and operators
_MIN_IDLE_NS = 100_000  # a thread that has had nothing to do for this long was given something
_MAX_WAKER_AGE_NS = 1_000_000  # by what ended no longer ago than this
_MIN_WORKED_SHARE = 0.5  # in which it ran at least: it worked
_MIN_LOADER_WAIT_NS = 100_000  # a call for a batch that takes so long,
_MIN_LOADER_WAIT_SHARE = 0.05  # and this share of the usual time between two, waits


class ThreadHandOffs(Struct, frozen=True):
    """Segments after quiet times were cut, and the hand-offs between them.

    Attributes:
        host: The segments.
        waits: Segments in which a thread waits for another.
        source: Segment whose end hands over, one per hand-off.
        target: Segment that is held back.
        to_end: Whether its end is held back (it waits), else its start.
        certain: Whether a hand-off is more than a guess.
        unknown: Segments in which a thread waits for an unknown cause: they keep their measured
            end.
    """

    host: Segments
    waits: Ints
    source: Ints
    target: Ints
    to_end: Bools
    certain: Bools
    unknown: Ints


class _Wakeups(Struct, frozen=True):
    """Work that begins after an idle time, with the activity of another thread that handed it over.

    Attributes:
        head: Segments that begin such work.
        source: For each the segment of another thread that hands over; -1 where it is unknown.
        cut_ns: Time of the hand-off, inside a quiet time of that thread; -1 where it is at its end.
        certain: Whether that is more than a guess.
    """

    head: Ints
    source: Ints
    cut_ns: Ints
    certain: Bools

    def of(self, selected: Bools) -> _Wakeups:
        return _Wakeups(
            self.head[selected],
            self.source[selected],
            self.cut_ns[selected],
            self.certain[selected],
        )


class _BusyIntervals(Struct, frozen=True):
    """Busy intervals of one thread, disjoint and ascending.

    Attributes:
        start: Starts, ns.
        end: Ends, ns.
        first: First segment of each.
        last: Last segment of each.
    """

    start: Ints
    end: Ints
    first: Ints
    last: Ints


def find_hand_offs(trace: Trace, tree: HostTree, host: Segments) -> ThreadHandOffs:
    """Finds where the main thread waits for others, and where others begin work that was handed to
    them.

    A quiet time of the main thread (a gap, or self time of an annotation) that another thread's
    work fills is cut in three: until that work begins, which is when it was handed over; the
    waiting; and what the main thread did alone after it. A worker's work after a gap waits for
    that, else for the thread that woke it (see `_find_wakeups`). In its self time any thread may
    wait for communication that another one does.

    Args:
        trace: The trace.
        tree: Its host events.
        host: Their segments.
    """
    lanes = np.unique(host.lane)
    nothing = np.zeros(0, dtype=np.int64)
    if lanes.size < 2:
        never = np.zeros(0, dtype=np.bool_)
        return ThreadHandOffs(host, nothing, nothing, nothing, never, never, nothing)
    quiet = _find_unexplained_segments(trace, tree, host)
    cpu = CpuTime.of(trace)
    gap = (host.owner < 0) & (host.end - host.start >= _MIN_QUIET_NS)
    autograd = np.unique(tree.lane[tree.named(AUTOGRAD)])
    main = _find_main_lane(trace, tree, lanes)
    backend = np.flatnonzero(tree.named(HOST_BACKENDS) & ~tree.call & (tree.lane != main))
    busy_intervals = {}
    for lane in np.setdiff1d(lanes, [main, *tree.lane[backend]]).tolist():
        if lane in autograd:
            root = np.flatnonzero((tree.lane == lane) & (tree.parent < 0))
            busy_intervals[lane] = _BusyIntervals(
                tree.start[root], tree.end[root], host.first[root], host.last[root]
            )
        else:  # segments that follow each other without a gap
            rows = np.flatnonzero((host.lane == lane) & ~gap)
            opens = np.append(True, np.diff(rows) > 1) if rows.size else np.zeros(0, dtype=np.bool_)
            first, last = rows[opens], rows[np.append(opens[1:], True)] if rows.size else rows
            busy_intervals[lane] = _BusyIntervals(host.start[first], host.end[last], first, last)
    segment = np.flatnonzero(quiet & (host.lane == main))
    start, done, head, tail = _explain_by_other_threads(
        host, segment, busy_intervals, set(autograd.tolist())
    )
    explained = _explain_by_communication(tree, host, segment, backend, (start, done, head, tail))
    filled = [(segment, start, done, head, tail)]
    is_unexplained = (
        quiet & (host.owner >= 0) & (host.lane != main) & ~np.isin(host.lane, tree.lane[backend])
    )
    backend = np.setdiff1d(backend, explained)
    # Quiet self times of other threads that end about when communication of another one does.
    for lane in lanes[lanes != main]:
        segment = np.flatnonzero(is_unexplained & (host.lane == lane))
        start, done, head, tail = (np.full(segment.size, -1, dtype=np.int64) for _ in range(4))
        if segment.size and backend.size:
            _explain_by_communication(tree, host, segment, backend, (start, done, head, tail))
            low, high = host.start[segment], host.end[segment]
            done[high - done > np.maximum(_MAX_WAKEUP_NS, _MAX_WAKEUP_SHARE * (high - low))] = -1
        filled.append((segment, start, done, head, tail))
    segment, start, done, head, tail = (
        np.concatenate(column) for column in zip(*filled, strict=True)
    )
    order = np.argsort(segment, kind="stable")
    order = order[done[order] >= 0]
    segment, start, done, head, tail = (
        column[order] for column in (segment, start, done, head, tail)
    )
    cut, number = host.cut(np.repeat(segment, 2), np.stack([start, done], axis=1).ravel())
    waiting = number[segment] + 1
    handed_over = head >= 0
    heads, source_parts = number[head[handed_over]], number[segment[handed_over]]
    source = np.concatenate(
        [number[tail] + _count_following_parts(host, number, tail), source_parts]
    )
    still = _find_unexplained_segments(trace, tree, cut)
    still[waiting] = False
    works = np.isin(host.lane[tail], list(busy_intervals))  # not communication, which waits itself
    # Segments that begin while another thread waits for their thread's work: it was busy, with or
    # without a recorded name.
    awaited, worker = [heads], host.lane[tail[works]]
    for thread in np.unique(worker).tolist():
        thread_segments = np.flatnonzero(cut.lane == thread)
        begun = np.searchsorted(
            np.sort(start[works][worker == thread]), cut.start[thread_segments], side="left"
        )
        ended = np.searchsorted(
            np.sort(done[works][worker == thread]), cut.start[thread_segments], side="left"
        )
        awaited.append(thread_segments[begun > ended])
    working = np.unique(np.concatenate(awaited))
    return _add_wakeups(
        cut, waiting, source, heads, _find_wakeups(cut, tree, still, working, main, cpu)
    )


def find_loader_waits(trace: Trace, tree: HostTree, host: Segments) -> Ints:
    """Returns the segments in which a thread waits for a batch that other processes make.

    A batch is ready when its worker has made it, however early the step asks for it. Short calls
    found it ready, and those in which the thread ran took it over.
    """
    call: Ints = np.flatnonzero(tree.named(WORKER_LOADERS) & ~tree.call)
    call = call[
        np.append(True, call[1:] >= np.maximum.accumulate(tree.stop[call])[:-1])[: call.size]
    ]
    if not call.size:
        return call
    # The longest segment of each call
    first, count = host.first[call], host.last[call] + 1 - host.first[call]
    offsets = np.cumsum(count) - count
    segment = np.repeat(first - offsets, count) + np.arange(int(count.sum()))
    length = (host.end - host.start)[segment]
    owner = np.repeat(np.arange(call.size), count)
    longest: Ints = segment[np.lexsort((length, owner))[offsets + count - 1]]
    span = host.end[longest] - host.start[longest]
    period = float(np.median(np.diff(tree.start[call]))) if call.size > 1 else 0.0
    waits = span >= max(_MIN_LOADER_WAIT_NS, _MIN_LOADER_WAIT_SHARE * period)
    waits &= ~CpuTime.of(trace).worked(host.lane[longest], host.start[longest], host.end[longest])
    return longest[waits]


def _find_main_lane(trace: Trace, tree: HostTree, lanes: Ints) -> int:
    """Returns the thread that runs the program: the one that has the process's number, or another
    that does far more.

    Some programs train in other threads, while the first one waits or serves. The threads of the
    backward pass only do what they are given.
    """
    if not lanes.size:
        return -1
    root = tree.parent < 0
    size = int(lanes.max()) + 1
    roots = np.bincount(tree.lane[root], minlength=size)
    autograd_roots = np.bincount(tree.lane[root & tree.named(AUTOGRAD)], minlength=size)
    candidates = lanes[autograd_roots[lanes] < _MIN_AUTOGRAD_SHARE * np.maximum(roots[lanes], 1)]
    candidates = candidates if candidates.size else lanes
    done = np.bincount(tree.lane[tree.call | tree.named(PLAIN_OP)], minlength=size)
    busiest = int(candidates[done[candidates].argmax()])
    main_named = candidates[(trace.lanes["name"] == "main thread").to_numpy()[candidates]]
    return (
        int(main_named[0])
        if main_named.size and done[main_named[0]] * _DOMINANCE_FACTOR >= done[busiest]
        else busiest
    )


def _find_unexplained_segments(trace: Trace, tree: HostTree, host: Segments) -> Bools:
    """Returns gaps and self times of some length in which it is unknown what the thread does."""
    works = mark_own_work(trace, tree) | tree.named(HOST_BACKENDS)
    return ~np.append(works, False)[host.owner] & (host.end - host.start >= _MIN_QUIET_NS)


def _explain_by_other_threads(
    host: Segments, segment: Ints, busy_intervals: dict[int, _BusyIntervals], autograd: set[int]
) -> tuple[Ints, Ints, Ints, Ints]:
    """Returns for each quiet segment when the work that fills it begins and ends (-1: none does),
    and the segments of that work.

    The first segment of that work is -1 where it had begun before the quiet time.
    """
    low, high = host.start[segment], host.end[segment]
    filled_start, done, head, tail = (np.full(segment.size, -1, dtype=np.int64) for _ in range(4))
    for lane, intervals in busy_intervals.items():
        if not intervals.start.size:
            continue
        # The first interval that ends inside or later
        first = np.searchsorted(intervals.end, low, side="right")
        # The last one that ends inside
        last = np.searchsorted(intervals.end, high, side="right") - 1
        overlaps = (first <= last) & (last >= 0)
        first, last = np.minimum(first, intervals.end.size - 1), np.maximum(last, 0)
        running = intervals.start[first] < low
        start, end = np.maximum(intervals.start[first], low), intervals.end[last]
        after = np.minimum(last + 1, intervals.start.size - 1)
        goes_on = (last + 1 < intervals.start.size) & (intervals.start[after] < high)
        covered = np.concatenate([[0], np.cumsum(intervals.end - intervals.start)])
        busy = covered[last + 1] - covered[first]
        fits = overlaps & (end - start >= _MIN_FILLED_SHARE * (high - low))
        if lane not in autograd:
            fits &= ~goes_on & (busy >= _MIN_BUSY_SHARE * (end - start))
            fits &= high - end <= np.maximum(_MAX_WAKEUP_NS, _MAX_WAKEUP_SHARE * (high - low))
        better = fits & (end - start > done - filled_start)
        filled_start, done = np.where(better, start, filled_start), np.where(better, end, done)
        head = np.where(better, np.where(running, -1, intervals.first[first]), head)
        tail = np.where(better, intervals.last[last], tail)
    return filled_start, done, head, tail


def _explain_by_communication(
    tree: HostTree,
    host: Segments,
    segment: Ints,
    backend: Ints,
    filled: tuple[Ints, Ints, Ints, Ints],
) -> Ints:
    """Fills in the quiet times in which another thread communicates, in place; returns the
    communication that was waited for.

    Of all quiet times that a communication overlaps and fills, the one in which it ends waited for
    it, else the one that overlaps it most: that may end before, since the communicating thread
    wakes the waiting one, and ends its own event when it is scheduled again.
    """
    filled_start, done, head, tail = filled
    low, high = host.start[segment], host.end[segment]
    first = np.searchsorted(high, tree.start[backend], side="right")
    count = np.maximum(np.searchsorted(low, tree.end[backend], side="left") - first, 0)
    event: Ints = np.repeat(backend, count)
    quiet = (
        np.arange(event.size) - np.repeat(np.cumsum(count) - count, count) + np.repeat(first, count)
    )
    call = np.repeat(find_framework_calls(tree, backend), count)
    # Before the quiet time: all of it is waiting
    early = (call >= 0) & (tree.start[np.maximum(call, 0)] < low[quiet])
    since = np.where(early, low[quiet], np.maximum(tree.start[event], low[quiet]))
    until = np.minimum(tree.end[event], high[quiet])
    fits = until - since >= np.maximum(
        _MIN_QUIET_NS, _MIN_FILLED_SHARE * (high[quiet] - low[quiet])
    )
    ends_inside = fits & (tree.end[event] <= high[quiet])
    order = np.lexsort((since - until, ~ends_inside, event))
    order = order[np.append(True, event[order[1:]] != event[order[:-1]])[: order.size]]
    order = order[np.argsort(until[order], kind="stable")]  # of several in one quiet time the last
    event, quiet, since, until, early, fits = (
        x[order] for x in (event, quiet, since, until, early, fits)
    )
    event, quiet = event[fits], quiet[fits]
    filled_start[quiet], done[quiet] = since[fits], until[fits]
    head[quiet] = np.where((tree.start[event] >= low[quiet]) & ~early[fits], host.first[event], -1)
    tail[quiet] = host.last[event]
    return event


def _find_wakeups(  # noqa: PLR0917
    host: Segments, tree: HostTree, quiet: Bools, has_waker: Ints, main: int, cpu: CpuTime
) -> _Wakeups:
    """Finds which thread woke the threads other than the main one: a thread with nothing to do
    waits for that, however long it takes.

    Communication was handed over by the call of the framework that began last before it. Other work
    was handed over by what ended last on another thread; where that is long ago, by the same
    thread, at that moment: it may have handed over in Python, which nothing records. What ended
    before the idle time began woke no thread.

    Args:
        host: All segments.
        tree: Their events.
        quiet: Segments in which it is unknown what the thread does, shape (segments,).
        has_waker: Segments whose waker is known already.
        main: The main thread.
        cpu: How long threads ran: one that ran all the time was not idle.
    """
    # Between messages a lane of messages does nothing
    is_idle = np.isin(host.lane, tree.lane[tree.named(MESSAGES)])
    gap = (host.owner < 0) & (is_idle | (host.end - host.start >= _MIN_IDLE_NS))
    gap &= ~cpu.worked(host.lane, host.start, host.end)
    first = np.flatnonzero(np.append(True, host.lane[1:] != host.lane[:-1]))
    after = np.flatnonzero(gap[:-1] & (host.lane[1:] == host.lane[:-1])) + 1
    head = np.setdiff1d(np.concatenate([first, after]), has_waker)
    head = head[host.lane[head] != main]
    starts_idle = np.zeros(host.owner.size, dtype=np.bool_)
    starts_idle[after] = True
    since = np.where(starts_idle[head], host.start[np.maximum(head - 1, 0)], np.iinfo(np.int64).min)
    # For work that is communication, the call that started it, after the idle time had begun; else
    # -1.
    called = np.full(head.size, -1, dtype=np.int64)
    owner = host.owner[head]
    backend = np.flatnonzero((owner >= 0) & tree.named(HOST_BACKENDS)[np.maximum(owner, 0)])
    event = find_framework_calls(tree, owner[backend])
    fits = (event >= 0) & (tree.end[np.maximum(event, 0)] >= since[backend])
    called[backend[fits]] = event[fits]
    # The event of another thread that ended last before each head, after its idle time had begun;
    # else -1. Where the event that ended last is of the head's own thread, it is the one before the
    # run of that thread's events.
    end_order = np.argsort(tree.end, kind="stable")
    lane = tree.lane[end_order]
    opens = np.append(True, lane[1:] != lane[:-1])[: lane.size]
    before_run = np.maximum.accumulate(np.where(opens, np.arange(lane.size), 0)) - 1
    index = np.searchsorted(tree.end[end_order], host.start[head], side="right") - 1
    index = np.where((index >= 0) & (lane[index] == host.lane[head]), before_run[index], index)
    ended = np.where(index >= 0, end_order[index], -1)
    ended[(ended >= 0) & (tree.end[ended] < since)] = -1
    has_previous = ended >= 0
    has_previous[has_previous] = (
        host.start[head[has_previous]] - tree.end[ended[has_previous]] <= _MAX_WAKER_AGE_NS
    )
    event = np.where(called >= 0, called, ended)
    source = np.where(event >= 0, host.last[np.maximum(event, 0)], -1)
    certain = (called >= 0) | has_previous
    # Where that is a guess, the quiet segment of its thread within which the head begins; else -1.
    in_segment = np.full(head.size, -1, dtype=np.int64)
    guessed = np.where(certain | (event < 0), -1, tree.lane[np.maximum(event, 0)])
    for number in np.unique(guessed[guessed >= 0]).tolist():
        segments = np.flatnonzero(host.lane == number)
        heads = np.flatnonzero(guessed == number)
        time = host.start[head[heads]]
        index = segments[
            np.maximum(np.searchsorted(host.start[segments], time, side="right") - 1, 0)
        ]
        within = quiet[index] & (host.start[index] < time) & (time < host.end[index])
        in_segment[heads[within]] = index[within]
    cut = np.where(in_segment >= 0, host.start[head], -1)
    woken = _Wakeups(head, np.where(in_segment >= 0, in_segment, source), cut, certain)
    # The first work of a thread may have begun by itself
    return woken.of(starts_idle[head] | certain)


def find_framework_calls(tree: HostTree, backend: Ints) -> Ints:
    """Returns the framework's call on another thread that began last before each communication; -1
    where there is none.
    """
    calls = np.flatnonzero(tree.named(COLLECTIVE) & ~tree.call)
    if not calls.size:
        return np.full(backend.size, -1, dtype=np.int64)
    calls = calls[np.argsort(tree.start[calls], kind="stable")]
    index = np.searchsorted(tree.start[calls], tree.start[backend], side="right") - 1
    event = calls[np.maximum(index, 0)]
    return np.where((index >= 0) & (tree.lane[event] != tree.lane[backend]), event, -1)


def _add_wakeups(
    cut: Segments, waiting: Ints, source: Ints, heads: Ints, woken: _Wakeups
) -> ThreadHandOffs:
    """Collects all hand-offs: those of quiet times that work fills, and those that woke idle
    threads.

    Args:
        cut: Segments.
        waiting: Those in which a thread waits for work that is known.
        source: What ends those waits, one for each; then what hands over that work.
        heads: The work that is handed over.
        woken: Other work that was handed over.
    """
    nothing_known = woken.of(woken.source < 0)
    woken = woken.of(woken.source >= 0)
    cut_again = np.flatnonzero(woken.cut_ns >= 0)
    cut_again = cut_again[np.lexsort((woken.cut_ns[cut_again], woken.source[cut_again]))]
    segment = woken.source[cut_again]
    host, number = cut.cut(segment, woken.cut_ns[cut_again])
    source_parts = number[woken.source] + _count_following_parts(cut, number, woken.source)
    first = np.searchsorted(segment, segment, side="left")
    source_parts[cut_again] = number[segment] + np.arange(segment.size) - first
    target, to_end = _find_held_back(host, number[np.concatenate([heads, woken.head])])
    unknown, idle = _find_held_back(host, number[nothing_known.head])
    waiting = number[waiting]
    all_certain = np.ones(source.size, dtype=np.bool_)
    return ThreadHandOffs(
        host,
        waits=np.unique(np.concatenate([waiting, target[to_end], unknown[idle]])),
        source=np.concatenate(
            [number[source] + _count_following_parts(cut, number, source), source_parts]
        ),
        target=np.concatenate([waiting, target]),
        to_end=np.concatenate([np.ones(waiting.size, dtype=np.bool_), to_end]),
        certain=np.concatenate([all_certain, woken.certain]),
        unknown=unknown[idle],
    )


def _count_following_parts(host: Segments, number: Ints, segment: Ints) -> Ints:
    bounds = np.append(number, number[-1] + 1 if number.size else 0)
    last = segment + 1 == host.owner.size
    return np.where(
        last, 0, bounds[np.minimum(segment + 1, host.owner.size - 1)] - number[segment] - 1
    )


def _find_held_back(host: Segments, head: Ints) -> tuple[Ints, Bools]:
    """Returns what is held back on a head's thread: the gap before it, which waits; or its start,
    where there is no gap.
    """
    before = np.maximum(head - 1, 0)
    gap = (head > 0) & (host.lane[before] == host.lane[head]) & (host.owner[before] < 0)
    return np.where(gap, before, head), gap


def add_hand_off_edges(edges: Edges, hand_offs: ThreadHandOffs, segment_node: Ints) -> None:
    """Adds edges from the end of what hands over to what it holds back; from the origin where that
    is unknown.
    """
    edges.add(
        "cross-thread",
        np.where(hand_offs.certain, "inferred", "assumed"),
        segment_node[hand_offs.source],
        segment_node[hand_offs.target],
        from_end=True,
        to_end=hand_offs.to_end,
    )
    edges.add(
        "origin",
        "assumed",
        np.zeros_like(hand_offs.unknown),
        segment_node[hand_offs.unknown],
        from_end=True,
        to_end=True,
    )


class CpuTime(Struct, frozen=True):
    """Processor time of the threads of a trace.

    Attributes:
        lanes: By lane, the clocks of the threads that were sampled.
    """

    lanes: dict[int, ThreadClock]

    @classmethod
    def of(cls, trace: Trace) -> CpuTime:
        """Returns the samples of a trace; empty where its clock is not that of the samples, or
        there are none.
        """
        if trace.meta.clock != "unix":
            return cls({})
        samples = read_thread_clocks(trace.meta)
        hosts = (
            trace.lanes.filter(trace.lanes["kind"] == "host").select("lane", "thread").rows()
            if samples
            else []
        )
        return cls({lane: samples[thread] for lane, thread in hosts if thread in samples})

    def worked(self, lane: Ints, low: Ints, high: Ints) -> Bools:
        """Returns in which intervals the thread certainly ran most of the time."""
        min_ran_ns = np.zeros_like(low)
        for number, samples in self.lanes.items():
            rows = np.flatnonzero(lane == number)
            min_ran_ns[rows] = samples.bound_cpu_time(low[rows], high[rows])[0]
        return (min_ran_ns >= _MIN_WORKED_SHARE * (high - low)) & (high > low)
