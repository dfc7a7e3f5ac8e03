"""Which runtime and driver calls make their thread wait?"""

from __future__ import annotations

import numpy as np
import polars as pl
from numpy.typing import NDArray

from traceloom.analyze.classify import gpu_work
from traceloom.analyze.intervals import coverage, union
from traceloom.analyze.remembered import per_trace
from traceloom.model import Trace
from traceloom.model.arrays import column
from traceloom.model.category import COPY, GPU_WORK, LAUNCHES

# Waiting for the device, copying synchronously, and what the driver does under its own lock (it may stall the device).
BY_NAME = (
    r"(?i:synchronize)|QueueFinish|Events?Wait$"
    r"|Memcpy|Memset|Malloc|Free|HostAlloc|HostRegister|HostUnregister"
    r"|ModuleLoad|ModuleUnload|LibraryLoad|LibraryUnload"
)
# Longer than a thread is kept from running now and then.
_STARTS_NS = 5_000_000
_BUSY = 0.1  # of a call at most: no device had anything to do
_BEFORE_FREES = "Malloc|Event|Synchronize|LastError|MemGetInfo"  # what PyTorch's allocator calls before it frees


@per_trace
def blocking_calls(trace: Trace) -> NDArray[np.bool_]:
    """True for every event that is a blocking runtime or driver call; shape (events,).

    Blocking are, by name, synchronising calls, copies and fills that are not asynchronous, and allocations; and, by
    what happened, asynchronous copies that returned no earlier than their copy ended (copies of pageable memory), and
    calls that start the device.
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
    return blocking | starting_calls(trace)


@per_trace
def starting_calls(trace: Trace) -> NDArray[np.bool_]:
    """True for every call of CUDA or HIP in which the device is set up or code is loaded; shape (events,).

    The first call that needs it does it, whatever it is called: it takes 5 ms and more though no device has anything
    to do. Calls that wait by name are none, but for the `cudaFree` of an operator that did not ask for memory or look
    at events right before: the allocator gives back only then, and libraries call it to have the device set up.
    """
    starting = np.zeros(trace.events.height, dtype=np.bool_)
    work = gpu_work(trace)
    name, is_free = pl.col("name"), pl.col("name").str.contains("^(cuda|hip)Free$")
    before = pl.when(~is_free).then(name).shift(1).forward_fill().over("lane").fill_null("")  # several may be freed
    frees = is_free & ~before.str.contains(_BEFORE_FREES) & pl.col("op").is_not_null()
    calls = (
        trace.events.lazy()
        .filter(pl.col("category").is_in(LAUNCHES))
        .select("event", "lane", "op", "start_ns", "duration_ns", name.cast(pl.String))
        .sort("lane", "start_ns")
        .filter(~name.str.contains(BY_NAME) | name.str.contains("Async", literal=True) | frees)
        .filter(name.str.contains("^(cuda|cu|hip)[A-Z]"), pl.col("duration_ns") >= _STARTS_NS)
        .collect()
    )
    if not work.height or not calls.height:
        return starting
    start, duration = calls["start_ns"].to_numpy(), calls["duration_ns"].to_numpy()
    busy = union(work["start_ns"].to_numpy(), work["end_ns"].to_numpy())
    idle = coverage(busy, start, start + duration) <= _BUSY * duration
    starting[calls["event"].to_numpy()[idle]] = True
    return starting
