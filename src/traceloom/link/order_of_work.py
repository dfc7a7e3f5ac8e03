"""Questions about GPU work by time: what had been launched, what had ended, who launched last."""

from __future__ import annotations

from itertools import pairwise

import numpy as np

from traceloom.array_types import Ints
from traceloom.link.device_work import DeviceWork
from traceloom.link.host_tree import HostTree


class WorkByTime:
    """GPU work sorted for questions of "before when"; every answer is a number of a work, or -1 for none."""

    def __init__(self, work: DeviceWork, tree: HostTree) -> None:
        self.work = work
        self.lanes, bounds = work.lanes()
        self._streams = [_StreamWork(work, low, high) for low, high in pairwise(bounds.tolist())]
        self._by_lane = dict(zip(self.lanes.tolist(), self._streams, strict=True))
        submitted = np.flatnonzero(work.call >= 0)
        thread = tree.lane[work.call[submitted]]
        order = np.lexsort((work.start[submitted], work.asked[submitted], thread))
        self._submitted, self._thread, self._asked = submitted[order], thread[order], work.asked[submitted][order]

    def launched_before(self, lane: Ints, time: Ints) -> Ints:
        """Of the work of a stream that was launched before a time, the one that ends last; shapes as given."""
        return self._asked_streams("launched_before", lane, time)

    def ended_by(self, lane: Ints, time: Ints) -> Ints:
        """Of the work of a stream that had ended by a time, the one that ends last; shapes as given."""
        return self._asked_streams("ended_by", lane, time)

    def launches_on_after(self, lane: Ints, time: Ints) -> Ints:
        """The first work of a stream that is launched at or after a time; shapes as given."""
        return self._asked_streams("launched_after", lane, time)

    def _asked_streams(self, question: str, lane: Ints, time: Ints) -> Ints:
        """Of each stream at once; only those that are asked for are looked at."""
        out = np.full(lane.shape, -1, dtype=np.int64)
        if not lane.size:
            return out
        order = np.argsort(lane, kind="stable")
        lanes = lane[order]
        bounds = np.flatnonzero(np.diff(lanes, prepend=lanes[0] - 1, append=lanes[-1] + 1))
        for low, high in pairwise(bounds.tolist()):
            stream = self._by_lane.get(int(lanes[low]))
            if stream is not None:
                rows = order[low:high]
                out[rows] = getattr(stream, question)(time[rows])
        return out

    def thread_launched_before(self, thread: Ints, time: Ints) -> Ints:
        """The last work that a host thread launched before a time."""
        at = self._insertion_point(thread, time) - 1
        valid = at >= 0
        valid[valid] = self._thread[at[valid]] == thread[valid]
        return np.where(valid, self._submitted[at] if self._submitted.size else -1, -1)

    def thread_launches_after(self, thread: Ints, time: Ints) -> Ints:
        """The first work that a host thread launches at or after a time."""
        at = self._insertion_point(thread, time)
        valid = at < self._thread.size
        valid[valid] = self._thread[at[valid]] == thread[valid]
        at = np.where(valid, at, 0)
        return np.where(valid, self._submitted[at] if self._submitted.size else -1, -1)

    def _insertion_point(self, thread: Ints, time: Ints) -> Ints:
        """Where (thread, time) would stand among the launches."""
        out = np.zeros(thread.size, dtype=np.int64)
        for number in np.unique(thread).tolist():
            own = thread == number
            low = np.searchsorted(self._thread, number, "left")
            high = np.searchsorted(self._thread, number, "right")
            out[own] = low + np.searchsorted(self._asked[low:high], time[own])
        return out


class _StreamWork:
    """One stream's work: what of it ends last among all that was launched, or had ended, before a time."""

    def __init__(self, work: DeviceWork, low: int, high: int) -> None:
        launched, end = work.asked[low:high], work.end[low:high]
        order = np.argsort(launched, kind="stable")
        reach = np.maximum.accumulate(end[order])
        holder = np.maximum.accumulate(np.where(end[order] >= reach, np.arange(high - low), 0))
        self.asked = launched[order]
        self.by_asked = order + low
        self.lasting = order[holder] + low
        by_end = np.argsort(end, kind="stable")
        self.ends = end[by_end]
        self.by_end = by_end + low

    def launched_before(self, time: Ints) -> Ints:
        count = np.searchsorted(self.asked, time, side="left")
        return np.where(count > 0, self.lasting[np.maximum(count - 1, 0)], -1)

    def launched_after(self, time: Ints) -> Ints:
        count = np.searchsorted(self.asked, time, side="left")
        return np.where(count < self.asked.size, self.by_asked[np.minimum(count, self.asked.size - 1)], -1)

    def ended_by(self, time: Ints) -> Ints:
        count = np.searchsorted(self.ends, time, side="right")
        return np.where(count > 0, self.by_end[np.maximum(count - 1, 0)], -1)
