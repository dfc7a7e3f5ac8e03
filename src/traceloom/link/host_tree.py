"""The host events that make nodes, as a forest in lane order: ops, annotations, runtime and driver calls."""

from __future__ import annotations

import numpy as np
import polars as pl
from msgspec import Struct

from traceloom.array_types import Array, Bools, Ints
from traceloom.link.calls import HOST_BACKENDS, OF_HOST, POLLS, named, words_of
from traceloom.model import Trace
from traceloom.model import category as cat
from traceloom.model.arrays import NO_ROW, column_of, innermost, subtree_stops
from traceloom.model.letter_case import contain
from traceloom.read.nesting import nesting_depths

_KEPT = (cat.OP, cat.ANNOTATION, cat.RUNTIME, cat.DRIVER, cat.COLLECTIVE)
_POLLING = 0.5  # share of a thread's calls; such a thread holds nothing else


class HostTree(Struct, frozen=True):
    """Host events in lane order, in which the descendants of an event follow it; arrays of shape (events kept,).

    Attributes:
        row: Row in `trace.events`.
        position: For every row of `trace.events` its position here; a driver call inside another call, and what lies
            inside a communication on the host, have the position of that; -1 for what is not here.
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
        polling: Events left out, because their threads only ask again and again whether something is done.
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
        """Durations, >= 0."""
        return self.end - self.start

    def named(self, pattern: str, position: Ints | None = None) -> Bools:
        """Which events, of all or of those at some positions, have a name that holds a pattern of `calls.OF_HOST`."""
        hits = contain(self.words, OF_HOST)[OF_HOST.index(pattern)].to_numpy()
        matches: Bools = hits[self.word if position is None else self.word[position]]
        return matches


def host_tree(trace: Trace) -> HostTree:
    """The host events of a trace that make nodes.

    Python frames are left out (they name what others measure), so are driver calls inside other calls, what lies inside
    a communication that the host does itself (the call as a whole waits for its peers), and threads that only poll.
    """
    events = trace.events
    category, parent = column_of(events, "category", large=False), column_of(events, "parent", NO_ROW, large=False)
    lane_of = events["lane"].to_numpy().astype(np.int64)
    call = np.isin(cat.CATEGORIES, (cat.RUNTIME, cat.DRIVER))[category]
    kept = np.isin(cat.CATEGORIES, _KEPT)[category] & (trace.lanes["kind"] == "host").to_numpy()[lane_of]
    # of each driver call the nearest call around it
    driver = np.flatnonzero(category == cat.CATEGORIES.index(cat.DRIVER))
    above = parent[driver]
    todo = np.flatnonzero(above >= 0)
    while (todo := todo[~call[above[todo]]]).size:  # one turn per level of nesting
        above[todo] = parent[above[todo]]
        todo = todo[above[todo] >= 0]
    outer = np.full(parent.size, -1, dtype=np.int64)
    outer[driver] = above
    around = _communications_around(trace, parent, call)
    outer = np.where(around >= 0, around, outer)
    kept &= outer < 0
    polls = _polling_lanes(trace, kept, call)
    left_out = kept & polls[lane_of]
    kept &= ~left_out
    row = np.flatnonzero(kept)
    row = row[np.argsort(lane_of[row], kind="stable")]
    position = np.full(events.height, -1, dtype=np.int64)
    position[row] = np.arange(row.size)
    inside = np.flatnonzero(outer >= 0)
    # the outermost call: the nearest one may itself stand in another
    while inside.size and (outer[outer[inside]] >= 0).any():
        outer[inside] = np.where(outer[outer[inside]] >= 0, outer[outer[inside]], outer[inside])
    position[inside] = position[outer[inside]]
    lane, start = lane_of[row], events["start_ns"].to_numpy()[row]
    end = events["nested_end_ns"].to_numpy()[row]
    stop = subtree_stops(lane, start, end)
    above = innermost(np.arange(row.size), stop, row.size)
    name = events["name"][row]
    words, word = words_of(name)
    durations = events["nested_end_ns"].to_numpy() - events["start_ns"].to_numpy()
    return HostTree(
        row=row,
        position=position,
        lane=lane,
        start=start,
        end=end,
        parent=above,
        depth=nesting_depths(above),
        stop=stop,
        call=call[row],
        name=name,
        words=words,
        word=word,
        polling=int(left_out.sum()),
        polling_ns=int(durations[left_out].sum()),
    )


def _communications_around(trace: Trace, parent: Ints, call: Bools) -> Ints:
    """For each event the outermost communication on the host around it; -1 for none.

    One in which something calls a device does not count: what it gives the device to do is work of its own.
    """
    outer = np.full(parent.size, -1, dtype=np.int64)
    chosen = named(trace.events["name"], HOST_BACKENDS) & (trace.events["category"] != cat.PYTHON).to_numpy()
    if not chosen.any():
        return outer
    nested = np.flatnonzero(parent >= 0)
    above = parent[nested]
    while nested.size:  # one turn per level of nesting: the last communication met is the outermost
        outer[nested] = np.where(chosen[above], above, outer[nested])
        above = parent[above]
        nested, above = nested[above >= 0], above[above >= 0]
    on_device = np.zeros(parent.size, dtype=np.bool_)
    calling = outer[call & (outer >= 0)]
    on_device[calling] = True
    outer[(outer >= 0) & on_device[outer]] = -1
    return outer


def _polling_lanes(trace: Trace, kept: Bools, call: Bools) -> Bools:
    """Lanes that hold calls and nothing else, most of them polls for completion."""
    lanes = trace.lanes.height
    lane_of = trace.events["lane"].to_numpy()
    polls = np.zeros(lane_of.size, dtype=np.bool_)
    rows = np.flatnonzero(call & kept)
    polls[rows] = named(trace.events["name"][rows], POLLS)
    count = np.bincount(lane_of[kept], minlength=lanes)
    calls = np.bincount(lane_of[rows], minlength=lanes)
    poll_count = np.bincount(lane_of[polls], minlength=lanes)
    polling: Bools = (poll_count > _POLLING * count) & (calls == count) & (count > 0)
    return polling
