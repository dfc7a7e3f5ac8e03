"""The gaps of each device: time in its window in which no stream runs anything, and what stands around it."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from traceloom.array_types import Bools, Ints
from traceloom.model import Trace
from traceloom.model.arrays import column
from traceloom.model.category import CATEGORIES, COPY, GPU_WORK

_WORK = [CATEGORIES.index(category) for category in GPU_WORK]


class Gaps(Struct, frozen=True):
    """All gaps of all devices, by device and time; arrays of shape (gaps,).

    Attributes:
        device: Device index; -1 where the file gives no number.
        low: Start: the last end so far.
        high: End: the start of the next work.
        before: Row (of `events`) of the work that ended last.
        after: Row of the work that ended the gap.
        launch: Row of the call that submitted `after`; -1 where it is not recorded.
        first: True where `after` is the first work of its launch on this device.
        same_stream: True where `before` and `after` share a stream.
    """

    device: Ints
    low: Ints
    high: Ints
    before: Ints
    after: Ints
    launch: Ints
    first: Bools
    same_stream: Bools


def gaps(trace: Trace) -> Gaps:
    """Find the gaps. Work without duration (or with a negative one, in a damaged file) bounds them like any other."""
    row = gpu_rows(trace)
    device = column(trace, "device", -1)[row]
    order = np.argsort(device, kind="stable")
    row, device = row[order], device[order]
    start = column(trace, "start_ns")[row]
    end = start + np.maximum(column(trace, "duration_ns")[row], 0)
    same = device[1:] == device[:-1]
    latest = np.zeros(start.size, dtype=np.int64, like=start)  # position of the work that ended last
    reach = np.zeros(start.size, dtype=np.int64, like=start)
    bounds = np.concatenate(([0], 1 + np.flatnonzero(~same), [start.size]))
    for low, high in pairwise(bounds):  # devices
        reach[low:high] = np.maximum.accumulate(end[low:high])
        raised = np.where(end[low:high] == reach[low:high], np.arange(low, high, like=start), low)
        latest[low:high] = np.maximum.accumulate(raised)
    after = 1 + np.flatnonzero(same & (start[1:] > reach[:-1]))
    before = latest[after - 1]
    launch = column(trace, "launch", -1)[row]
    first = np.zeros(row.size, dtype=np.bool_, like=row)
    pair = (launch + 1) * (int(device.max(initial=0)) + 2) + device + 1
    first[np.unique(pair, return_index=True)[1]] = True
    stream = column(trace, "stream", -1)[row]
    return Gaps(
        device[after],
        end[before],
        start[after],
        row[before],
        row[after],
        launch[after],
        first[after],
        stream[after] == stream[before],
    )


def gpu_rows(trace: Trace) -> Ints:
    """Rows of `events` that are GPU work."""
    return np.flatnonzero(np.isin(column(trace, "category"), _WORK))


def copies(trace: Trace, row: Ints) -> Bools:
    """True where the rows of `events` are copies."""
    category: NDArray[np.uint8] = trace.events["category"].to_physical().to_numpy()[row]
    return np.equal(category, CATEGORIES.index(COPY))
