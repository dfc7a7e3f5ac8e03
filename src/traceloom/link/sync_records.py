"""What the file itself says of waiting: `cuda_sync` records, joined to the calls that waited or asked for it."""

from __future__ import annotations

import numpy as np
import polars as pl
from msgspec import Struct

from traceloom.array_types import Ints
from traceloom.link.host_tree import HostTree
from traceloom.model import Trace
from traceloom.model.category import LAUNCHES

UNKNOWN = -1


class SyncRecords(Struct, frozen=True):
    """Recorded waits with their calls; arrays of shape (records,).

    Attributes:
        kind: Context Sync, Stream Sync, Event Sync or Stream Wait Event.
        call: Position (in the tree) of the call.
        device: Device; -1 where it is not said.
        lane: Lane (of the trace) of the stream it is about: awaited by the host, or made to wait; -1 unknown.
        awaited: Lane of the stream whose event is awaited; -1 unknown.
        recorded: When the awaited event was recorded: start of the call, ns; -1 unknown.
    """

    kind: pl.Series
    call: Ints
    device: Ints
    lane: Ints
    awaited: Ints
    recorded: Ints

    def of(self, kind: str) -> SyncRecords:
        """The records of one kind."""
        rows = np.flatnonzero((self.kind == kind).to_numpy())
        arrays = (self.call, self.device, self.lane, self.awaited, self.recorded)
        return SyncRecords(self.kind[rows], *(array[rows] for array in arrays))


def sync_records(trace: Trace, tree: HostTree) -> SyncRecords:
    """The records of waits whose calls are recorded as well."""
    if not trace.syncs.height:
        none: Ints = np.zeros(0, dtype=np.int64)
        return SyncRecords(trace.syncs["kind"], none, none, none, none, none)
    about = trace.events.select("event", "device", "correlation")
    calls = (
        trace.events.lazy()
        .filter(pl.col("category").is_in(LAUNCHES), pl.col("correlation").is_not_null())
        .select("correlation", pl.col("event").alias("call"), pl.col("start_ns").alias("call_ns"))
        .unique("correlation", keep="first", maintain_order=True)
        .collect()
    )
    streams = trace.lanes.filter(pl.col("kind") == "device").select("device", "stream", "lane")
    frame = (
        trace.syncs.join(about, on="event", how="left", maintain_order="left")
        .join(calls, on="correlation", how="inner", maintain_order="left")
        .join(
            calls.select(pl.col("correlation").alias("record_correlation"), pl.col("call_ns").alias("recorded")),
            on="record_correlation",
            how="left",
            maintain_order="left",
        )
        .join(streams, on=["device", "stream"], how="left", maintain_order="left")
        .join(
            streams.rename({"stream": "awaited_stream", "lane": "awaited"}),
            on=["device", "awaited_stream"],
            how="left",
            maintain_order="left",
        )
    )
    position = tree.position[frame["call"].to_numpy()] if frame.height else np.zeros(0, dtype=np.int64)
    frame = frame.with_columns(pl.Series("position", position)).filter(pl.col("position") >= 0)
    numbers = [
        frame[name].cast(pl.Int64).fill_null(UNKNOWN).to_numpy()
        for name in ("position", "device", "lane", "awaited", "recorded")
    ]
    return SyncRecords(frame["kind"], *numbers)
