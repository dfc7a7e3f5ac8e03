"""Host code that waits for GPU work by looking at memory, without any call: self time that ends with the work."""

from __future__ import annotations

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from traceloom.link.host_tree import HostTree
from traceloom.link.order_of_work import WorkByTime
from traceloom.link.segments import Segments
from traceloom.model import Trace

Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]

_LONG_NS = 200_000
_CLOSE = 0.05  # of the segment's length, and not more than the next two, lie between its end and the work's
_BEFORE_NS = 100_000  # the count that is looked for stands in memory before the kernel that writes it has ended
_AFTER_NS = 20_000
_PLAIN_OP = r"^(?:aten|c10d)::"  # does its own work


class Spins(Struct, frozen=True):
    """Segments that wait for GPU work; arrays of shape (segments found,).

    Attributes:
        segment: Number of the segment.
        work: Number of the work that it waits for.
    """

    segment: Ints
    work: Ints


def spins(trace: Trace, tree: HostTree, host: Segments, times: WorkByTime, waits: Ints) -> Spins:
    """Find long self time, right after a launch, that ends when the work of that launch does.

    DeepEP's dispatch is such: the host reads from memory how much will arrive, as soon as a kernel has written that.

    Args:
        trace: The trace.
        tree: Its host events.
        host: Their segments.
        times: GPU work by time.
        waits: Segments that wait for another thread.
    """
    nothing = np.zeros(0, dtype=np.int64)
    if not times.work.row.size or not host.owner.size:
        return Spins(nothing, nothing)
    category = trace.events["category"].gather(tree.row)
    plain = (category == "op").to_numpy() & tree.named(_PLAIN_OP)
    fits = ~np.append(tree.call | plain, True)[host.owner] & (host.end - host.start >= _LONG_NS)
    fits[waits] = False
    submits = np.zeros(tree.row.size + 1, dtype=np.bool_)
    submits[times.work.call[times.work.call >= 0]] = True
    before = np.append(-1, host.owner[:-1])
    # right after a call that submitted GPU work
    fits &= submits[before] & np.append(False, host.lane[1:] == host.lane[:-1])
    at = np.flatnonzero(fits)
    of = times.thread_launched_before(host.lane[at], host.start[at])
    close = np.minimum(_CLOSE * (host.end[at] - host.start[at]), _BEFORE_NS)
    late = times.work.end[of] - host.end[at]
    matches = (
        (of >= 0) & (late <= close) & (-late <= np.minimum(close, _AFTER_NS)) & (times.work.end[of] > host.start[at])
    )
    return Spins(at[matches], of[matches])
