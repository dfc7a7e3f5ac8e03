"""Which runtime and driver calls make their thread wait?"""

from __future__ import annotations

import numpy as np
import polars as pl
from numpy.typing import NDArray

from traceloom.model import Trace
from traceloom.model.arrays import column
from traceloom.model.category import COPY, GPU_WORK, LAUNCHES

# Waiting for the device, copying synchronously, and what the driver does under its own lock (it may stall the device).
BY_NAME = (
    r"(?i:synchronize)|QueueFinish|Events?Wait$"
    r"|Memcpy|Memset|Malloc|Free|HostAlloc|HostRegister|HostUnregister"
    r"|ModuleLoad|ModuleUnload|LibraryLoad|LibraryUnload"
)


def blocking_calls(trace: Trace) -> NDArray[np.bool_]:
    """True for every event that is a blocking runtime or driver call; shape (events,).

    Blocking are, by name, synchronising calls, copies and fills that are not asynchronous, and allocations; and, by
    what happened, asynchronous copies that returned no earlier than their copy ended (copies of pageable memory).
    """
    events = trace.events.lazy()
    calls = events.filter(pl.col("category").is_in(LAUNCHES)).select(
        "event", "name", (pl.col("start_ns") + pl.col("duration_ns")).alias("return_ns")
    )
    name = pl.col("name")
    by_name = calls.filter(name.str.contains(BY_NAME), ~name.str.contains("Async", literal=True)).select("event")
    copied = (
        events.filter(pl.col("category").is_in(GPU_WORK), pl.col("launch").is_not_null())
        .group_by("launch")
        .agg((pl.col("start_ns") + pl.col("duration_ns")).max().alias("end_ns"), (pl.col("category") == COPY).all())
        .filter("category")
    )
    waited = (
        calls.join(copied, left_on="event", right_on="launch")
        .filter(pl.col("return_ns") >= pl.col("end_ns"))
        .select("event")
    )
    rows = pl.concat([by_name, waited]).collect()["event"].to_numpy()
    blocking = np.zeros(trace.events.height, dtype=np.bool_, like=column(trace, "start_ns"))
    blocking[rows] = True
    return blocking
