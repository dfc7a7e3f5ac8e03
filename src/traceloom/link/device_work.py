"""GPU work in the order of its streams, with the calls that submitted it."""

from __future__ import annotations

import numpy as np
import polars as pl
from msgspec import Struct

from traceloom.array_types import Bools, Ints
from traceloom.link.host_tree import HostTree
from traceloom.model import Trace
from traceloom.model.arrays import column_of
from traceloom.model.category import COMMAND, GPU_WORK, LAUNCHES
from traceloom.read.fields import NULL
from traceloom.read.links import first_by_key

BEFORE = np.iinfo(np.int64).min // 4  # time of a launch that was not recorded: before everything
_SKEW_NS = 1_000_000  # a work that starts earlier than this before its launch is not of that launch


class DeviceWork(Struct, frozen=True):
    """Kernels, copies and fills by stream, and by start on each; arrays of shape (work,).

    Attributes:
        row: Row in `trace.events`.
        lane: Lane of the trace: one per device and stream.
        device: Device index; -1 where the file has none.
        start: Starts, ns.
        end: Ends, ns.
        call: Position (in the tree) of the call that submitted it; -1 where none is recorded.
        asked: Start of that call, ns; BEFORE where none is recorded.
        correlated: Whether the call is known by a shared number; else by an arrow.
        orphans: Why each work without a call has none: number in ORPHANS; -1 for the others.
        op: Position of the op that submitted it, where no call is recorded but the file names the op; else -1.
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
        """The lanes that hold work, and where each begins (with the size at the end)."""
        lanes, first = np.unique(self.lane, return_index=True)
        return lanes.astype(np.int64), np.append(first, self.lane.size)


ORPHANS = (
    "orphan: its launch lies before the window",
    "orphan: it has no correlation",
    "orphan: no recorded call has its correlation",
    "orphan: it starts long before the call of its correlation",
)
BY_OP = len(ORPHANS)


def device_work(trace: Trace, tree: HostTree) -> DeviceWork:
    """The GPU work of a trace with its launches: by correlation, else by arrow."""
    columns = ["event", "lane", "device", "start_ns", "duration_ns", "launch", "correlation", "category", "op"]
    work = trace.events[columns].filter(pl.col("category").is_in([*GPU_WORK, COMMAND]))
    row = work["event"].to_numpy().astype(np.int64)
    start = work["start_ns"].to_numpy()
    end = start + np.maximum(work["duration_ns"].to_numpy(), 0)
    command = (work["category"] == COMMAND).to_numpy()
    launch, named, device = (column_of(work, name, absent=-1, large=False) for name in ("launch", "op", "device"))
    if command.any():
        calls = trace.events.filter(pl.col("category").is_in(LAUNCHES), pl.col("correlation").is_not_null())
        numbers = work["correlation"].fill_null(NULL).to_numpy()
        by_number = first_by_key(calls["correlation"].to_numpy(), calls["event"].cast(pl.Int64).to_numpy(), numbers)
        launch = np.where(command, by_number, launch)
    correlated = launch >= 0
    arrows = trace.flows.filter(
        pl.col("kind") == "launch", pl.col("source").is_not_null(), pl.col("target").is_not_null()
    )
    arrow_from = np.full(trace.events.height + 1, -1, dtype=np.int64)
    arrow_from[arrows["target"].to_numpy()] = arrows["source"].to_numpy()
    launch = np.where(correlated, launch, arrow_from[row])
    call = np.where(launch >= 0, tree.position[launch], -1) if tree.position.size else np.full(row.size, -1)
    has_call = call >= 0
    called = np.full(row.size, BEFORE, dtype=np.int64)
    called[has_call] = tree.start[call[has_call]]
    wrong = has_call & (start < called - _SKEW_NS)
    call[wrong], called[wrong] = -1, BEFORE
    orphans = np.full(row.size, -1)
    lost = call < 0
    unnumbered = work["correlation"].is_null().to_numpy()
    orphans[lost] = np.where(unnumbered[lost], 1, 2)
    # what runs before any work with a launch does on its stream was launched before the window
    lane = work["lane"].to_numpy()
    earliest = np.full(int(lane.max(initial=0)) + 1, np.iinfo(np.int64).max)
    np.minimum.at(earliest, lane[~lost], start[~lost])
    orphans[lost & ~unnumbered & (start <= earliest[lane])] = 0
    orphans[wrong] = 3
    # the op that the file names for a work without a call, where it began before the work
    op = np.where(lost & (named >= 0), tree.position[named], -1) if tree.position.size else np.full(row.size, -1)
    later = op >= 0
    later[later] = tree.start[op[later]] > start[later]
    op[later] = -1
    orphans[op >= 0] = BY_OP
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
