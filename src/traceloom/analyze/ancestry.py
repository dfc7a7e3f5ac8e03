"""Ancestry of host events: nearest and outermost ancestors, subtree sums, self times, segments and
pieces of lanes.

All arrays are in lane order (by lane, then start), in which the descendants of a row follow it
without a gap. That turns most operations on the forest into running maxima and prefix sums, with no
step per event or per level.
"""

from typing import Any

import numpy as np
import polars as pl
from msgspec import Struct

from traceloom.analyze.steps import split_at_steps
from traceloom.trace.array_types import Bools, Ints
from traceloom.trace.arrays import (
    find_innermost_stretch,
    find_nearest_ancestor,
    find_subtree_stops,
    gather_rows,
    get_event_column,
)
from traceloom.trace.batch import cache_per_trace
from traceloom.trace.trace import Trace

# Where fewer than one in this many events is selected, visiting these alone is faster than jumping
# over others
_SPARSE_FACTOR = 4
# For positions of events that are kept long or used in pairs: half of the memory
_POSITION_TYPE: Any = np.int32


class HostSegments(Struct, frozen=True):
    """Segments of lanes, each with its innermost event; they tile every lane's window.

    Attributes:
        owner: Position (in the forest) of the innermost event; -1 where nothing is recorded.
        lane: Lane of each segment.
        start_ns: Starts.
        end_ns: Ends, > starts.
    """

    owner: Ints
    lane: Ints
    start_ns: Ints
    end_ns: Ints


class HostPieces(Struct, frozen=True):
    """Pieces of one innermost event and one step; together they are the recorded (busy) time of all
    host threads.

    Attributes:
        owner: Position (in the forest) of the innermost event.
        lane: Lane of each piece.
        ns: Lengths, > 0.
        step: Number of the step; `splitting.NO_STEP` outside all steps.
    """

    owner: Ints
    lane: Ints
    ns: Ints
    step: Ints


class Forest(Struct, frozen=True):
    """The events of the host lanes in lane order; arrays of shape (host events,).

    Attributes:
        row: Row of each event in `trace.events`.
        position: For every row of `trace.events` its position here; -1 for what is on no host lane.
        lane: Lane of each event.
        start_ns: Starts.
        end_ns: Ends, clipped to the parents'.
        parent: Position of the parent; -1 for roots.
        stop: Position after the last descendant.
    """

    row: Ints
    position: Ints
    lane: Ints
    start_ns: Ints
    end_ns: Ints
    parent: Ints
    stop: Ints

    def nearest(self, mask: Bools) -> Ints:
        """Returns the position of the nearest selected proper ancestor; -1 where there is none."""
        positions = np.flatnonzero(mask)
        if type(self.stop) is not np.ndarray or positions.size * _SPARSE_FACTOR > mask.size:
            return find_nearest_ancestor(self.parent, mask)
        return find_innermost_stretch(positions, self.stop[positions], mask.size)

    def nearest_or_self(self, mask: Bools, ancestor: Ints | None = None) -> Ints:
        """Returns the position of the event itself where it is selected, else of its nearest
        selected ancestor; -1 for none.

        `ancestor` is `nearest(mask)`, where it is known already.
        """
        return np.where(
            mask,
            np.arange(mask.size, like=mask),
            self.nearest(mask) if ancestor is None else ancestor,
        )

    def topmost(self, mask: Bools) -> Bools:
        """Returns which selected events have no selected ancestor."""
        positions = np.flatnonzero(mask)
        free = np.zeros(mask.size, dtype=np.bool_, like=mask)
        # An event is free where it begins after all subtrees of the selected events before it
        if positions.size:
            reach = np.maximum.accumulate(self.stop[positions])
            free[positions[positions >= np.concatenate([[0], reach[:-1]])]] = True
        return free

    def topmost_of_kind(self, kind: Ints) -> Bools:
        """Returns which events have no ancestor of their own kind; kinds are numbers >= 0."""
        size = kind.size
        # Numbers this short are radix-sorted instead of compared.
        short = size and type(kind) is np.ndarray and kind.max() < 1 << 16
        order = np.argsort(kind.astype(np.uint16) if short else kind, kind="stable")
        base = kind[order] * (size + 1)
        reach = np.maximum.accumulate(self.stop[order] + base) if size else base
        free = order + base >= np.concatenate([[0], reach[:-1]])
        out = np.zeros(size, dtype=np.bool_, like=kind)
        out[order] = free
        return out

    def outermost_or_self(self, mask: Bools) -> Ints:
        """Returns the position of the outermost selected event among an event and its ancestors; -1
        for none.
        """
        top = np.flatnonzero(self.topmost(mask))
        out = np.full(mask.size, -1, dtype=np.int64, like=mask)
        size = self.stop[top] - top
        top_index = np.repeat(np.arange(top.size, like=top), size)
        out[np.arange(top_index.size, like=top) - (np.cumsum(size) - size - top)[top_index]] = top[
            top_index
        ]
        return out

    def subtree_sums(self, values: Ints) -> Ints:
        """Returns for each event the sum of `values` over it and all its descendants."""
        total: Ints = np.concatenate([[0], np.cumsum(values)])
        return total[self.stop] - total[:-1]

    def span_ns(self) -> Ints:
        """Returns the durations, clipped to the parents' ends; >= 0."""
        return self.end_ns - self.start_ns

    def self_ns(self, mask: Bools, ancestor: Ints) -> Ints:
        """Returns for selected events the time in which they are the innermost selected event; 0
        for others.

        `ancestor` is `nearest(mask)`.
        """
        span = np.where(mask, self.span_ns(), 0)
        child = np.flatnonzero(mask & (ancestor >= 0))
        np.subtract.at(span, ancestor[child], self.span_ns()[child])
        return span

    def segments(self, lanes: Ints, start_ns: int, end_ns: int) -> HostSegments:
        """Tiles each of `lanes` from start to end with segments of one innermost event.

        A segment begins where an event begins (it is then innermost) or ends (then its parent is),
        and lasts until the next child begins or the innermost event ends. `lanes` are the host
        lanes in ascending order.
        """
        positions = np.arange(self.row.size, dtype=_POSITION_TYPE, like=self.row)
        next_start = np.append(self.start_ns, end_ns)
        lead_end = np.where(positions + 1 < self.stop, next_start[1:], self.end_ns)
        # The event after a subtree on its lane begins in the parent, or else after the parent's
        # end.
        follows = np.append(self.lane, -1)[self.stop] == self.lane
        after_end = np.where(follows, next_start[self.stop], end_ns)
        after_end = np.minimum(after_end, np.append(self.end_ns, end_ns)[self.parent])
        first = np.searchsorted(self.lane, lanes)
        lane_lead = np.full(lanes.size, end_ns, dtype=np.int64)
        used = np.searchsorted(self.lane, lanes, side="right") > first
        lane_lead[used] = self.start_ns[first[used]]
        start = np.concatenate([np.full(lanes.size, start_ns), self.start_ns, self.end_ns])
        end = np.concatenate([lane_lead, lead_end, after_end])
        del next_start, lead_end, follows, after_end
        nonempty = np.flatnonzero(end > start)
        start, end = start[nonempty], end[nonempty]
        lane = np.concatenate(
            [lanes, self.lane, self.lane], dtype=_POSITION_TYPE, casting="same_kind"
        )[nonempty]
        owner = np.concatenate(
            [np.full(lanes.size, -1, _POSITION_TYPE), positions, self.parent],
            dtype=_POSITION_TYPE,
            casting="same_kind",
        )
        return HostSegments(owner[nonempty], lane, start, end)


@cache_per_trace
def build_forest(trace: Trace) -> Forest:
    """Returns the host events of a trace, in lane order."""
    host = trace.lanes.filter(pl.col("kind") == "host")["lane"].to_numpy()
    events = trace.events
    lane_of = get_event_column(trace, "lane")
    is_host = np.zeros(trace.lanes.height + int(lane_of.max(initial=0)) + 1, dtype=np.bool_)
    is_host[host] = True
    row = np.flatnonzero(gather_rows(is_host, lane_of))
    row = row[np.argsort(lane_of[row], kind="stable")]
    position = np.full(events.height, -1, dtype=np.int64, like=lane_of)
    position[row] = np.arange(row.size, like=row)
    lane = lane_of[row].astype(np.int64)
    start = get_event_column(trace, "start_ns")[row]
    end = get_event_column(trace, "nested_end_ns")[row]
    parent_row = get_event_column(trace, "parent", -1)[row]
    parent = np.where(parent_row >= 0, position[parent_row], -1)
    return Forest(row, position, lane, start, end, parent, find_subtree_stops(lane, start, end))


@cache_per_trace
def build_host_segments(trace: Trace) -> HostSegments:
    """Returns the window of the trace on every host lane, tiled by innermost events."""
    lanes = trace.lanes.filter(pl.col("kind") == "host")["lane"].cast(pl.Int64).sort().to_numpy()
    return build_forest(trace).segments(lanes, trace.start_ns, trace.end_ns)


@cache_per_trace
def build_host_pieces(trace: Trace) -> HostPieces:
    """Returns the recorded segments of the host threads, cut at the bounds of steps."""
    segments = build_host_segments(trace)
    rows = np.flatnonzero(segments.owner >= 0)
    step_spans, step = split_at_steps(trace, segments.start_ns[rows], segments.end_ns[rows])
    source = rows[step_spans.source]
    return HostPieces(
        segments.owner[source], segments.lane[source], step_spans.end_ns - step_spans.start_ns, step
    )
