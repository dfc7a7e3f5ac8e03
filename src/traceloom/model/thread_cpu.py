"""How long each thread of a recorded run had run, sampled in its window, from its part of capture.json."""

from __future__ import annotations

from typing import Any

import numpy as np
from msgspec import Struct

from traceloom.array_types import Ints
from traceloom.model.step_log import captured_table
from traceloom.model.trace import Meta


class ThreadClock(Struct, frozen=True):
    """ThreadClock of one thread, ascending in time.

    Attributes:
        time_ns: When, Unix time, shape (samples,).
        ran_ns: How long the thread had run until then, never falling, shape (samples,).
    """

    time_ns: Ints
    ran_ns: Ints

    def ran(self, low: Ints, high: Ints) -> tuple[Ints, Ints]:
        """How long the thread ran between two times, at least and at most, ns.

        The samples inside tell the least, those around them the most; where none is before or behind, the most is all.

        Args:
            low: Beginnings, ns, shape (spans,).
            high: Ends, not before them, ns, shape (spans,).
        """
        last = self.time_ns.size - 1
        first_inside = np.searchsorted(self.time_ns, low, side="left")
        last_inside = np.searchsorted(self.time_ns, high, side="right") - 1
        inside = last_inside > first_inside
        within = self.ran_ns[np.maximum(last_inside, 0)] - self.ran_ns[np.minimum(first_inside, last)]
        least = np.minimum(np.where(inside, within, 0), high - low)
        before = np.searchsorted(self.time_ns, low, side="right") - 1
        behind = np.searchsorted(self.time_ns, high, side="left")
        around = self.ran_ns[np.minimum(behind, last)] - self.ran_ns[np.maximum(before, 0)]
        most = np.where((before >= 0) & (behind <= last), np.minimum(around, high - low), high - low)
        return least, np.maximum(most, least)


def thread_samples(meta: Meta) -> dict[str, ThreadClock]:
    """The samples of each thread with at least two, by the system's thread id; none where nobody took any."""
    return samples_of(meta.capture, meta.path)


def samples_of(capture: dict[str, Any] | None, path: str) -> dict[str, ThreadClock]:
    """The same from a rank's part of capture.json, and the path of its trace."""
    table = captured_table(capture, path, "thread_cpu") or {}
    columns = [table.get(name) for name in ("thread", "time_ns", "cpu_ns")]
    lists = [column for column in columns if isinstance(column, list)]
    if len(lists) < len(columns) or len({len(column) for column in lists}) != 1:
        return {}
    if not all(isinstance(value, int) and 0 <= value < 1 << 62 for column in lists for value in column):
        return {}
    thread, time, ran = (np.array(column, dtype=np.int64) for column in lists)
    order = np.lexsort((time, thread))
    thread, time, ran = thread[order], time[order], ran[order]
    bounds = np.flatnonzero(np.diff(thread)) + 1
    parts = zip(*(np.split(column, bounds) for column in (thread, time, ran)), strict=True)
    return {
        str(threads[0]): ThreadClock(times, np.maximum.accumulate(ran_ns))
        for threads, times, ran_ns in parts
        if threads.size > 1
    }
