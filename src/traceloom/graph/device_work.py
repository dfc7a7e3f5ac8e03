"""GPU work of a trace with the calls that submitted it, and look-ups of it by stream, thread and
time.
"""

from itertools import pairwise

import numpy as np
import polars as pl
from msgspec import Struct

from traceloom.formats.kineto_fields import NULL
from traceloom.formats.links import find_first_rows
from traceloom.graph.host_tree import HostTree
from traceloom.trace.array_types import Bools, Ints
from traceloom.trace.arrays import extract_column
from traceloom.trace.trace import Trace
from traceloom.trace.vocabulary import COMMAND, FROM_COMMAND, GPU_WORK, LAUNCHES

# Time of a launch that was not recorded: before everything
BEFORE_WINDOW = np.iinfo(np.int64).min // 4
# A work that starts earlier than this before its launch is not of that launch
_MAX_SKEW_NS = 1_000_000


class DeviceWork(Struct, frozen=True):
    """Kernels, copies and fills by stream, and by start on each; arrays of shape (work,).

    Attributes:
        row: Row in `trace.events`.
        lane: Lane of the trace: one per device and stream.
        device: Device index; -1 where the file has none.
        start: Starts, ns.
        end: Ends, ns.
        call: Position (in the tree) of the call that submitted it; -1 where none is recorded.
        asked: Start of that call, ns; BEFORE_WINDOW where none is recorded.
        correlated: Whether the call is known by a correlation id; else by an arrow.
        orphans: Why each work without a call has none: number in ORPHANS; -1 for the others.
        op: Position of the op that submitted it, where no call is recorded but the file names the
            op; else -1.
        command: Whether it is a command of an accelerator's command processor.
    """

    row: Ints
    lane: Ints
    device: Ints
    start: Ints
    end: Ints
    call: Ints
    asked: Ints
    correlated: Bools
    orphans: Ints
    op: Ints
    command: Bools

    def lanes(self) -> tuple[Ints, Ints]:
        """Returns the lanes that hold work, and the index at which each begins (with the size at
        the end).
        """
        lanes, first = np.unique(self.lane, return_index=True)
        return lanes.astype(np.int64), np.append(first, self.lane.size)


ORPHANS = (
    "orphan: its launch lies before the window",
    "orphan: it has no correlation",
    "orphan: no recorded call has its correlation",
    "orphan: it starts long before the call of its correlation",
)
LAUNCHED_BY_OP = len(ORPHANS)


def collect_device_work(trace: Trace, tree: HostTree) -> DeviceWork:
    """Collects the GPU work of a trace with its launches, by correlation, else by arrow."""
    columns = [
        "event",
        "name",
        "lane",
        "device",
        "start_ns",
        "duration_ns",
        "launch",
        "correlation",
        "category",
        "op",
    ]
    work = trace.events[columns].filter(pl.col("category").is_in([*GPU_WORK, COMMAND]))
    calls = trace.events.filter(
        pl.col("category").is_in(LAUNCHES), pl.col("correlation").is_not_null()
    )
    if (work["category"] == COMMAND).any():
        # Of a CUDA graph whose launch is not recorded only the work counts.
        is_node = (pl.col("category") == COMMAND) & ~pl.col("name").is_in([*FROM_COMMAND])
        work = work.filter(~is_node | pl.col("correlation").is_in(calls["correlation"].implode()))
    row = work["event"].to_numpy().astype(np.int64)
    start = work["start_ns"].to_numpy()
    end = start + np.maximum(work["duration_ns"].to_numpy(), 0)
    command = (work["category"] == COMMAND).to_numpy()
    launch, named_op, device = (
        extract_column(work, name, absent=-1, large=False) for name in ("launch", "op", "device")
    )
    if command.any():
        numbers = work["correlation"].fill_null(NULL).to_numpy()
        correlated_rows = find_first_rows(
            calls["correlation"].to_numpy(), calls["event"].cast(pl.Int64).to_numpy(), numbers
        )
        launch = np.where(command, correlated_rows, launch)
    correlated = launch >= 0
    arrows = trace.flows.filter(
        pl.col("kind") == "launch", pl.col("source").is_not_null(), pl.col("target").is_not_null()
    )
    arrow_from = np.full(trace.events.height + 1, -1, dtype=np.int64)
    arrow_from[arrows["target"].to_numpy()] = arrows["source"].to_numpy()
    launch = np.where(correlated, launch, arrow_from[row])
    call = (
        np.where(launch >= 0, tree.position[launch], -1)
        if tree.position.size
        else np.full(row.size, -1)
    )
    has_call = call >= 0
    called = np.full(row.size, BEFORE_WINDOW, dtype=np.int64)
    called[has_call] = tree.start[call[has_call]]
    wrong = has_call & (start < called - _MAX_SKEW_NS)
    call[wrong], called[wrong] = -1, BEFORE_WINDOW
    orphans = np.full(row.size, -1)
    lost = call < 0
    unnumbered = work["correlation"].is_null().to_numpy()
    orphans[lost] = np.where(unnumbered[lost], 1, 2)
    # Work before the first work with a launch on its stream was launched before the window.
    lane = work["lane"].to_numpy()
    earliest = np.full(int(lane.max(initial=0)) + 1, np.iinfo(np.int64).max)
    np.minimum.at(earliest, lane[~lost], start[~lost])
    orphans[lost & ~unnumbered & (start <= earliest[lane])] = 0
    orphans[wrong] = 3
    # The op that the file names for a work without a call, where it began before the work.
    op = (
        np.where(lost & (named_op >= 0), tree.position[named_op], -1)
        if tree.position.size
        else np.full(row.size, -1)
    )
    later = op >= 0
    later[later] = tree.start[op[later]] > start[later]
    op[later] = -1
    orphans[op >= 0] = LAUNCHED_BY_OP
    order = np.lexsort((row, end, called, start, lane))
    return DeviceWork(
        row=row[order],
        lane=lane.astype(np.int64)[order],
        device=device[order],
        start=start[order],
        end=end[order],
        call=call[order],
        asked=called[order],
        correlated=correlated[order],
        orphans=orphans[order],
        op=op[order],
        command=command[order],
    )


class WorkTimeline:
    """GPU work sorted for look-ups by time; every result is the number of a work, or -1 for
    none.
    """

    def __init__(self, work: DeviceWork, tree: HostTree) -> None:
        self.work = work
        self.lanes, bounds = work.lanes()
        self._streams = [_StreamWork(work, low, high) for low, high in pairwise(bounds.tolist())]
        self._by_lane = dict(zip(self.lanes.tolist(), self._streams, strict=True))
        submitted = np.flatnonzero(work.call >= 0)
        thread = tree.lane[work.call[submitted]]
        order = np.lexsort((work.start[submitted], work.asked[submitted], thread))
        self._submitted, self._thread, self._asked = (
            submitted[order],
            thread[order],
            work.asked[submitted][order],
        )

    def launched_before(self, lane: Ints, time: Ints) -> Ints:
        """Returns, of the work of a stream that was launched before a time, the one that ends last;
        shapes as given.
        """
        return self._asked_streams("launched_before", lane, time)

    def ended_by(self, lane: Ints, time: Ints) -> Ints:
        """Returns, of the work of a stream that had ended by a time, the one that ends last; shapes
        as given.
        """
        return self._asked_streams("ended_by", lane, time)

    def launches_on_after(self, lane: Ints, time: Ints) -> Ints:
        """Returns the first work of a stream that is launched at or after a time; shapes as
        given.
        """
        return self._asked_streams("launched_after", lane, time)

    def _asked_streams(self, question: str, lane: Ints, time: Ints) -> Ints:
        """Looks up all times of one stream at once, with the method `question` of `_StreamWork`."""
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
        """Returns the last work that a host thread launched before a time."""
        out = np.full(thread.size, -1, dtype=np.int64)
        for number in np.unique(thread).tolist():
            on_thread = np.flatnonzero(thread == number)
            low, high = (np.searchsorted(self._thread, number, side) for side in ("left", "right"))
            index = low + np.searchsorted(self._asked[low:high], time[on_thread]) - 1
            found = index >= low
            out[on_thread[found]] = self._submitted[index[found]]
        return out


class _StreamWork:
    """The work of one stream, sorted by launch and by end."""

    def __init__(self, work: DeviceWork, low: int, high: int) -> None:
        launched, end = work.asked[low:high], work.end[low:high]
        order = np.argsort(launched, kind="stable")
        reach = np.maximum.accumulate(end[order])
        holder = np.maximum.accumulate(np.where(end[order] >= reach, np.arange(high - low), 0))
        self.asked = launched[order]
        self.by_asked = order + low
        self.lasting = order[holder] + low
        end_order = np.argsort(end, kind="stable")
        self.ends = end[end_order]
        self.by_end = end_order + low

    def launched_before(self, time: Ints) -> Ints:
        count = np.searchsorted(self.asked, time, side="left")
        return np.where(count > 0, self.lasting[np.maximum(count - 1, 0)], -1)

    def launched_after(self, time: Ints) -> Ints:
        count = np.searchsorted(self.asked, time, side="left")
        return np.where(
            count < self.asked.size, self.by_asked[np.minimum(count, self.asked.size - 1)], -1
        )

    def ended_by(self, time: Ints) -> Ints:
        count = np.searchsorted(self.ends, time, side="right")
        return np.where(count > 0, self.by_end[np.maximum(count - 1, 0)], -1)
