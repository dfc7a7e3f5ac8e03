"""Which GPU work was told to wait for another stream before it could run?"""

from __future__ import annotations

import numpy as np
import polars as pl

from traceloom.analyze.classify import gpu_work
from traceloom.analyze.remembered import per_trace
from traceloom.array_types import Bools
from traceloom.model import Trace
from traceloom.model.arrays import column
from traceloom.model.category import LAUNCHES

CALL = "StreamWaitEvent"  # cudaStreamWaitEvent, hipStreamWaitEvent, cuStreamWaitEvent
RECORD = "Stream Wait Event"


def call_times(trace: Trace) -> pl.DataFrame:
    """When each launch call began: correlation, call_ns."""
    launches = trace.events.lazy().filter(pl.col("category").is_in(LAUNCHES), pl.col("correlation").is_not_null())
    calls = launches.select("correlation", pl.col("start_ns").alias("call_ns"))
    return calls.unique("correlation", keep="first", maintain_order=True).collect()


def asked(trace: Trace, waits: pl.DataFrame) -> pl.DataFrame:
    """Recorded waits with their device, and `wait_ns`: when the host asked for it, without its call the record."""
    return (
        waits.join(trace.events[["event", "device", "correlation", "start_ns"]], on="event", how="left")
        .join(call_times(trace), on="correlation", how="left")
        .with_columns(pl.coalesce("call_ns", "start_ns").alias("wait_ns"))
    )


@per_trace
def stream_waits(trace: Trace) -> tuple[Bools, bool]:
    """Was a wait for an event put on the stream between the launches of its previous work and of this one?

    Returns:
        One boolean per event, shape (events,), and whether the waits themselves are recorded. Else they are known from
        calls of the launching thread, which do not say on which stream.
    """
    waits = trace.syncs.filter(pl.col("kind") == RECORD)
    if waits.height:
        keys = ["device", "stream"]
        waits = asked(trace, waits).select(*keys, "wait_ns")
    else:
        keys = ["lane"]
        is_wait = pl.col("category").is_in(LAUNCHES) & pl.col("name").str.contains(CALL, literal=True)
        waits = trace.events.lazy().filter(is_wait).select("lane", pl.col("start_ns").alias("wait_ns")).collect()
    recorded = keys != ["lane"]
    waited = np.zeros(trace.events.height, dtype=np.bool_, like=column(trace, "start_ns"))
    if not waits.height:
        return waited, recorded

    # device, stream, lane and start of the launch call of each work, and that of the work before it
    work = gpu_work(trace)[["event", "device", "stream", "launch"]]
    called = trace.events[["lane", "start_ns"]][work["launch"]].get_columns()
    previous = pl.col("start_ns").shift(1).over("device", "stream").fill_null(np.iinfo(np.int64).min)
    work = work.hstack(called).with_columns(previous_ns=previous).drop_nulls("start_ns")
    wait_times = {part[keys].row(0): part["wait_ns"].sort().to_numpy() for part in waits.partition_by(keys)}
    for part in work.partition_by(keys):
        if (times := wait_times.get(part[keys].row(0))) is not None:
            before = np.searchsorted(times, part["start_ns"].to_numpy(), side="left")
            after = np.searchsorted(times, part["previous_ns"].to_numpy(), side="right")
            waited[part["event"].to_numpy()] = before > after
    return waited, recorded
