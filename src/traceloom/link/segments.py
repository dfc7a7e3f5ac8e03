"""Host threads as segments: the self time of events before, between and after their children, and the gaps."""

from __future__ import annotations

import numpy as np
from msgspec import Struct

from traceloom.array_types import Ints
from traceloom.link.host_tree import HostTree


class Segments(Struct, frozen=True):
    """Consecutive stretches of host threads, each with its innermost event; arrays of shape (segments,).

    Every thread is tiled from its first event to the end of its last one. Each event has one segment that begins where
    it begins, be it without length, so that nothing is lost and the order is that of the calls.

    Attributes:
        owner: Position (in the tree) of the innermost event; -1 in gaps.
        lane: Lane of the trace; segments are sorted by lane, then in the order of time.
        start: Starts, ns.
        end: Ends, ns; that of one is the start of the next on its lane.
        first: For each event of the tree its first segment.
        last: For each event the last segment of it and its descendants; ends where the event ends.
    """

    owner: Ints
    lane: Ints
    start: Ints
    end: Ints
    first: Ints
    last: Ints

    def cut(self, at: Ints, times: Ints) -> tuple[Segments, Ints]:
        """Cut segments in two.

        Args:
            at: Segments, ascending; one may stand several times.
            times: Where to cut each, ascending for one segment, within it.

        Returns:
            The new segments, and for each old one the number of its first part. A cut of old segment s at the k-th
            time makes the parts `number[s] + k` and `number[s] + k + 1`.
        """
        pieces = np.bincount(at, minlength=self.owner.size) + 1
        number = np.cumsum(pieces) - pieces
        of = np.repeat(np.arange(self.owner.size), pieces)
        start, end = self.start[of], self.end[of]
        behind = np.arange(at.size) + 1 + at  # each cut before, and each whole segment before, is one part
        start[behind] = times
        end[behind - 1] = times
        after = number + pieces - 1
        last = after[self.last]
        return Segments(self.owner[of], self.lane[of], start, end, number[self.first], last), number


def segments(tree: HostTree) -> Segments:
    """Tile each host thread with segments."""
    size = tree.row.size
    events = np.arange(size)
    # Place of every begin and end in a walk around the forest: what began before it plus what ended before it.
    begins = 2 * events - tree.depth
    ends = 2 * tree.stop - 1 - tree.depth
    # Ancestors belong to one lane, so that lanes follow each other in this numbering.
    owner, time, lane = (np.full(2 * size, -1, dtype=np.int64) for _ in range(3))
    owner[begins], owner[ends] = events, tree.parent
    time[begins], time[ends] = tree.start, tree.end
    lane[begins], lane[ends] = tree.lane, tree.lane
    closes = np.zeros(2 * size, dtype=np.bool_)
    closes[ends] = True
    until = np.append(time[1:], 0)
    follows = np.append(lane[1:] == lane[:-1], False) if size else np.zeros(0, dtype=np.bool_)
    kept = ~closes | (follows & (until > time))
    number = np.cumsum(kept) - 1
    return Segments(
        owner=owner[kept],
        lane=lane[kept],
        start=time[kept],
        end=until[kept],
        first=number[begins],
        last=number[ends - 1] if size else begins,
    )
