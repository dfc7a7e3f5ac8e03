"""Host events that become nodes, the names of runtime calls, and the segments of host threads."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import polars as pl
from msgspec import Struct

from traceloom.trace import vocabulary as vocab
from traceloom.trace.array_types import Array, Bools, Ints
from traceloom.trace.arrays import (
    NO_ROW,
    build_event_column,
    build_nesting,
    compute_nesting_depths,
    encode_names,
    extract_column,
    find_innermost_stretch,
    find_subtree_stops,
    to_series,
)
from traceloom.trace.frames import contains, contains_any
from traceloom.trace.trace import Trace

# cuda, cu, hip, ze, ur, pi, sycl and mtia spellings; matched with upper and lower case alike.
LAUNCHES = (
    r"(?i)launch|memcpy|memset|mem_?copy|mem_?fill|enqueue|append(memory|launch)|eventsbarrier|prefetchasync"
    r"|usmfill|usmcopy|graphexec"
)
NOT_LAUNCHES = r"(?i)configure|callconfiguration|hostfunc|getlast|attribute|occupancy|launchbounds|symboladdress"
# The call returns when the device, the stream or the event has been reached.
DEVICE_WAITS = r"(?i)(device|ctx|thread)_?synchronize|^synchronize$"
STREAM_WAITS = r"(?i)stream_?synchronize|synchronize_?stream|queue_?(finish|synchronize)|commandlisthostsynchronize"
EVENT_WAITS = r"(?i)event_?(host)?_?synchronize|^(ur|pi|ze|sycl)events?wait|fencehostsynchronize"
# Copies that return when they are done, whatever the kind of memory.
BLOCKING_COPIES = (
    r"(?i)^(cuda|hip|mu)memcpy(2d|3d|peer|(to|from)(symbol|array))?(_ptsz?|_ptds)?$"
    r"|^cuMemcpy(htod|dtoh|dtod|htoa|atoh|2d|3d|peer)?(_v2)?(_ptds)?$|memcpywithstream"
)
RECORDS = r"(?i)event_?record|^record_?event"
STREAM_EVENT_WAITS = r"(?i)stream_?wait_?event|wait_?on_?event"
# Not a call: an annotation of a back end that communicates from the host itself.
HOST_BACKENDS = r"^(?:gloo|mpi|ucc):"
MESSAGES = r"^(?:gloo|mpi|ucc):(?:send|recv)"
POLLS = r"(?i)(event|stream)_?query|eventgetinfo|eventquerystatus"

AUTOGRAD = r"^autograd::engine::evaluate_function"
PLAIN_OP = r"^(?:aten|c10d)::"  # does its work itself, or hands it over and goes on
COLLECTIVE = r"^c10d::"
WORKER_LOADERS = r"_MultiProcessing[A-Za-z]*Iter"  # batches are made by other processes
HOST_PATTERNS = (
    LAUNCHES,
    NOT_LAUNCHES,
    DEVICE_WAITS,
    STREAM_WAITS,
    EVENT_WAITS,
    BLOCKING_COPIES,
    RECORDS,
    STREAM_EVENT_WAITS,
    HOST_BACKENDS,
    MESSAGES,
    AUTOGRAD,
    PLAIN_OP,
    COLLECTIVE,
    WORKER_LOADERS,
)
"""All patterns of names of host events, matched together, which is faster than one by one."""


def encode_distinct_names(names: pl.Series) -> tuple[pl.Series, Array]:
    """Returns the distinct names, and the index into them of each name, shape (names,); a missing
    name counts as an empty one.
    """
    return encode_names(names.fill_null("") if names.null_count() else names)


def match_names(names: pl.Series, pattern: str) -> Bools:
    """Returns which names match the pattern, evaluated once per distinct name; shape (names,)."""
    distinct_names, word = encode_distinct_names(names)
    return contains(distinct_names, pattern).to_numpy()[word]


_NODE_CATEGORIES = (vocab.OP, vocab.ANNOTATION, vocab.RUNTIME, vocab.DRIVER, vocab.COLLECTIVE)
_MIN_POLLING_SHARE = 0.5  # share of a thread's calls; such a thread holds nothing else


class HostTree(Struct, frozen=True):
    """Host events in lane order, each followed by its descendants; arrays of shape (events kept,).

    Attributes:
        row: Row in `trace.events`.
        position: For every row of `trace.events` its position here; a driver call inside another
            call, and events inside a communication on the host, have the position of that; -1 for
            events that are left out.
        lane: Lane of the trace.
        start: Starts, ns.
        end: Ends, clipped to the parents'.
        parent: Position of the parent; -1 for roots.
        depth: 0 for roots.
        stop: Position after the last descendant.
        call: Which are runtime or driver calls.
        name: Names.
        words: The distinct names.
        word: For each event the index of its name in `words`.
        polling: Number of events left out, because their threads only poll for completion.
        polling_ns: Their time.
    """

    row: Ints
    position: Ints
    lane: Ints
    start: Ints
    end: Ints
    parent: Ints
    depth: Ints
    stop: Ints
    call: Bools
    name: pl.Series
    words: pl.Series
    word: Array
    polling: int
    polling_ns: int

    def span(self) -> Ints:
        return self.end - self.start

    def named(self, pattern: str, position: Ints | None = None) -> Bools:
        """Returns which events, of all or of those at some positions, have a name that matches one
        of `HOST_PATTERNS`.
        """
        is_match = contains_any(self.words, HOST_PATTERNS)[HOST_PATTERNS.index(pattern)].to_numpy()
        return is_match[self.word if position is None else self.word[position]]


def mark_own_work(trace: Trace, tree: HostTree) -> Bools:
    """Returns which events are calls, or operators that work themselves; shape (events kept,)."""
    is_op = (trace.events["category"][tree.row] == vocab.OP).to_numpy()
    return tree.call | is_op & tree.named(PLAIN_OP)


def separate_messages(trace: Trace) -> Trace:
    """Puts messages that threads of the host send and receive on lanes of their own: they last from
    the call to the end of the transfer, while the thread goes on and may send others.
    """
    events = trace.events
    lane = events["lane"].to_numpy().astype(np.int64)
    is_host = (trace.lanes["kind"] == "host").to_numpy()[lane]
    is_message = is_host & (events["category"] != vocab.PYTHON).to_numpy()
    is_message &= match_names(events["name"], MESSAGES)
    if not is_message.any():
        return trace
    start = events["start_ns"].to_numpy()
    end = start + np.maximum(events["duration_ns"].to_numpy(), 0)
    lanes, threads = [trace.lanes], np.unique(lane[is_message])
    affected = np.flatnonzero(np.isin(lane, threads))
    for thread in threads.tolist():
        left = np.flatnonzero(is_message & (lane == thread))
        while left.size:  # once for each of the messages that are on their way at a time
            follows = np.append(np.searchsorted(start[left], end[left]), left.size)
            chain = _find_chain(np.maximum(follows, np.arange(1, left.size + 2)))
            lane[left[chain]] = sum(frame.height for frame in lanes)
            lanes.append(
                trace.lanes[[thread]].with_columns(pl.col("name") + f" messages {len(lanes)}")
            )
            left = np.delete(left, chain)
    nesting = build_nesting(
        lane[affected], start[affected], end[affected], np.ones(affected.size, dtype=np.bool_)
    )
    parent, depth, nested_end = (
        extract_column(events, name, NO_ROW, large=False).copy()
        for name in ("parent", "depth", "nested_end_ns")
    )
    parent[affected] = np.where(nesting.parent >= 0, affected[nesting.parent], NO_ROW)
    depth[affected], nested_end[affected] = nesting.depth, nesting.nested_end_ns
    return replace(
        trace,
        events=events.with_columns(
            to_series(lane, pl.UInt32).alias("lane"),
            build_event_column(parent).alias("parent"),
            to_series(depth, pl.UInt16).alias("depth"),
            to_series(nested_end, pl.Int64).alias("nested_end_ns"),
        ),
        lanes=pl.concat(lanes).with_columns(lane=pl.int_range(pl.len(), dtype=pl.UInt32)),
    )


def _find_chain(follows: Ints) -> Ints:
    """Returns the rows that are reached from the first by going from each to the one that follows
    it; the last of `follows` stands for the end.
    """
    reached = np.zeros(1, dtype=np.int64)
    follows = np.minimum(follows, follows.size - 1)
    while reached[-1] < follows.size - 1:
        reached = np.unique(np.append(reached, follows[reached]))
        follows = follows[follows]
    return reached[:-1]


def build_host_tree(trace: Trace) -> HostTree:
    """Collects the host events of a trace that make nodes.

    Python frames are left out (they name what others measure), as are driver calls inside other
    calls, events inside a communication that the host does itself (the call as a whole waits for
    its peers), and threads that only poll.
    """
    events = trace.events
    category, parent = (
        extract_column(events, "category", large=False),
        extract_column(events, "parent", NO_ROW, large=False),
    )
    lane_of = events["lane"].to_numpy().astype(np.int64)
    call = np.isin(vocab.CATEGORIES, (vocab.RUNTIME, vocab.DRIVER))[category]
    retained = (
        np.isin(vocab.CATEGORIES, _NODE_CATEGORIES)[category]
        & (trace.lanes["kind"] == "host").to_numpy()[lane_of]
    )
    # For each driver call the nearest call around it.
    driver = np.flatnonzero(category == vocab.CATEGORIES.index(vocab.DRIVER))
    ancestor = parent[driver]
    todo = np.flatnonzero(ancestor >= 0)
    while (todo := todo[~call[ancestor[todo]]]).size:  # one iteration per level of nesting
        ancestor[todo] = parent[ancestor[todo]]
        todo = todo[ancestor[todo] >= 0]
    outer = np.full(parent.size, -1, dtype=np.int64)
    outer[driver] = ancestor
    enclosing = _find_enclosing_communication(trace, parent, call)
    outer = np.where(enclosing >= 0, enclosing, outer)
    retained &= outer < 0
    omitted = retained & _find_polling_lanes(trace, retained, call)[lane_of]
    retained &= ~omitted
    row = np.flatnonzero(retained)
    row = row[np.argsort(lane_of[row], kind="stable")]
    position = np.full(events.height, -1, dtype=np.int64)
    position[row] = np.arange(row.size)
    nested = np.flatnonzero(outer >= 0)
    # The outermost call: the nearest one may itself be nested in another.
    while nested.size and (outer[outer[nested]] >= 0).any():
        outer[nested] = np.where(outer[outer[nested]] >= 0, outer[outer[nested]], outer[nested])
    position[nested] = position[outer[nested]]
    lane, start = lane_of[row], events["start_ns"].to_numpy()[row]
    end = events["nested_end_ns"].to_numpy()[row]
    stop = find_subtree_stops(lane, start, end)
    ancestor = find_innermost_stretch(np.arange(row.size), stop, row.size)
    name = events["name"][row]
    distinct_names, word = encode_distinct_names(name)
    durations = events["nested_end_ns"].to_numpy() - events["start_ns"].to_numpy()
    return HostTree(
        row=row,
        position=position,
        lane=lane,
        start=start,
        end=end,
        parent=ancestor,
        depth=compute_nesting_depths(ancestor),
        stop=stop,
        call=call[row],
        name=name,
        words=distinct_names,
        word=word,
        polling=int(omitted.sum()),
        polling_ns=int(durations[omitted].sum()),
    )


def _find_enclosing_communication(trace: Trace, parent: Ints, call: Bools) -> Ints:
    """Returns for each event the outermost communication on the host around it; -1 for none.

    A communication in which something calls a device does not count: the device work is its own.
    """
    outer = np.full(parent.size, -1, dtype=np.int64)
    is_communication = (
        match_names(trace.events["name"], HOST_BACKENDS)
        & (trace.events["category"] != vocab.PYTHON).to_numpy()
    )
    if not is_communication.any():
        return outer
    nested = np.flatnonzero(parent >= 0)
    ancestor = parent[nested]
    # One iteration per level of nesting: the last communication met is the outermost
    while nested.size:
        outer[nested] = np.where(is_communication[ancestor], ancestor, outer[nested])
        ancestor = parent[ancestor]
        nested, ancestor = nested[ancestor >= 0], ancestor[ancestor >= 0]
    on_device = np.zeros(parent.size, dtype=np.bool_)
    on_device[outer[call & (outer >= 0)]] = True
    outer[(outer >= 0) & on_device[outer]] = -1
    return outer


def _find_polling_lanes(trace: Trace, retained: Bools, call: Bools) -> Bools:
    """Returns the lanes that hold calls and nothing else, most of them polls for completion."""
    lanes = trace.lanes.height
    lane_of = trace.events["lane"].to_numpy()
    polls = np.zeros(lane_of.size, dtype=np.bool_)
    rows = np.flatnonzero(call & retained)
    polls[rows] = match_names(trace.events["name"][rows], POLLS)
    count = np.bincount(lane_of[retained], minlength=lanes)
    calls = np.bincount(lane_of[rows], minlength=lanes)
    poll_count = np.bincount(lane_of[polls], minlength=lanes)
    polling: Bools = (poll_count > _MIN_POLLING_SHARE * count) & (calls == count) & (count > 0)
    return polling


class Segments(Struct, frozen=True):
    """Consecutive segments of host threads, each with its innermost event; arrays of shape
    (segments,).

    Every thread is tiled from its first event to the end of its last one. Each event has one
    segment that begins where it begins, even if of length 0, so that no event is lost and the order
    is that of the calls.

    Attributes:
        owner: Position (in the tree) of the innermost event; -1 in gaps.
        lane: Lane of the trace; segments are sorted by lane, then in the order of time.
        start: Starts, ns.
        end: Ends, ns; the end of one is the start of the next on its lane.
        first: For each event of the tree its first segment.
        last: For each event the last segment of it and its descendants; it ends where the event
            ends.
    """

    owner: Ints
    lane: Ints
    start: Ints
    end: Ints
    first: Ints
    last: Ints

    def cut(self, segments: Ints, times: Ints) -> tuple[Segments, Ints]:
        """Cuts segments in two.

        Args:
            segments: Segments, ascending; one may occur several times.
            times: Where to cut each, ascending for one segment, within it.

        Returns:
            The new segments, and for each old one the number of its first part. A cut of old
            segment s at the k-th time makes the parts `number[s] + k` and `number[s] + k + 1`.
        """
        part_counts = np.bincount(segments, minlength=self.owner.size) + 1
        number = np.cumsum(part_counts) - part_counts
        source_segment = np.repeat(np.arange(self.owner.size), part_counts)
        start, end = self.start[source_segment], self.end[source_segment]
        # Each earlier cut, and each whole segment before, adds one part
        part_index = np.arange(segments.size) + 1 + segments
        start[part_index] = times
        end[part_index - 1] = times
        last = (number + part_counts - 1)[self.last]
        return Segments(
            self.owner[source_segment],
            self.lane[source_segment],
            start,
            end,
            number[self.first],
            last,
        ), number


def build_segments(tree: HostTree) -> Segments:
    size = tree.row.size
    events = np.arange(size)
    # Index of every begin and end in a walk around the forest: the number of begins and ends before
    # it.
    start_index = 2 * events - tree.depth
    end_index = 2 * tree.stop - 1 - tree.depth
    # The ancestors of an event belong to one lane, so that lanes follow each other in this
    # numbering.
    owner, time, lane = (np.full(2 * size, -1, dtype=np.int64) for _ in range(3))
    owner[start_index], owner[end_index] = events, tree.parent
    time[start_index], time[end_index] = tree.start, tree.end
    lane[start_index], lane[end_index] = tree.lane, tree.lane
    closes = np.zeros(2 * size, dtype=np.bool_)
    closes[end_index] = True
    until = np.append(time[1:], 0)
    follows = np.append(lane[1:] == lane[:-1], False) if size else np.zeros(0, dtype=np.bool_)
    retained = ~closes | (follows & (until > time))
    number = np.cumsum(retained) - 1
    return Segments(
        owner=owner[retained],
        lane=lane[retained],
        start=time[retained],
        end=until[retained],
        first=number[start_index],
        last=number[end_index - 1] if size else start_index,
    )
