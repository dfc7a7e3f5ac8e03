"""Which GPU work was told to wait for another stream before it could run?"""

from __future__ import annotations

import numpy as np
import polars as pl

from traceloom.array_types import Bools, Ints
from traceloom.model import Trace
from traceloom.model.category import LAUNCHES

CALL = "StreamWaitEvent"  # cudaStreamWaitEvent, hipStreamWaitEvent, cuStreamWaitEvent
RECORD = "Stream Wait Event"


def stream_waits(trace: Trace, work: Ints) -> tuple[Bools, bool]:
    """Was a wait for an event put on the stream between the launches of its previous work and of this one?

    Args:
        trace: One process's trace.
        work: Rows of GPU work.

    Returns:
        One boolean per row of `work`, and whether the waits themselves are recorded. Else they are known from calls
        of the launching thread, which do not say on which stream.
    """
    waits = trace.syncs.filter(pl.col("kind") == RECORD).select("event", "stream")
    launches = trace.events.lazy().filter(pl.col("category").is_in(LAUNCHES))
    if waits.height:
        # device, stream, and when the host asked for it (or, without its call, the record)
        keys = ["device", "stream"]
        calls = (
            launches.filter(pl.col("correlation").is_not_null())
            .select("correlation", pl.col("start_ns").alias("call_ns"))
            .unique("correlation", keep="first", maintain_order=True)
            .collect()
        )
        waits = (
            waits.join(trace.events.select("event", "device", "correlation", "start_ns"), on="event", how="left")
            .join(calls, on="correlation", how="left")
            .select(*keys, pl.coalesce("call_ns", "start_ns").alias("wait_ns"))
        )
    else:
        keys = ["lane"]
        wait_calls = launches.filter(pl.col("name").str.contains(CALL, literal=True))
        waits = wait_calls.select("lane", pl.col("start_ns").alias("wait_ns")).collect()
    recorded, waited = keys != ["lane"], np.zeros(work.size, dtype=np.bool_)
    if not waits.height:
        return waited, recorded

    # device, stream, lane and start of the launch call of each row of `work`, and that of the work before it
    ordered = trace.gpu_work().select("event", "device", "stream", "launch")
    ordered = ordered.with_columns(
        trace.events["lane"].gather(ordered["launch"]),
        trace.events["start_ns"].gather(ordered["launch"]).alias("call_ns"),
    ).with_columns(pl.col("call_ns").shift(1).over("device", "stream").alias("previous_ns"))
    of_work = ordered[np.searchsorted(ordered["event"].to_numpy(), work)].select(*keys, "call_ns", "previous_ns")
    wait_times = {key: part["wait_ns"].sort().to_numpy() for key, part in waits.group_by(keys)}
    for key, part in of_work.with_row_index("row").filter(pl.col("call_ns").is_not_null()).group_by(keys):
        if (times := wait_times.get(key)) is not None:
            earliest = part["previous_ns"].fill_null(np.iinfo(np.int64).min).to_numpy()
            before = np.searchsorted(times, part["call_ns"].to_numpy(), side="left")
            waited[part["row"].to_numpy()] = before > np.searchsorted(times, earliest, side="right")
    return waited, recorded
