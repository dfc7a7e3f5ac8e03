"""How much memory was in use on each device, and when most."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import polars as pl

from traceloom.model import Trace
from traceloom.model.frames import as_declared, schema
from traceloom.model.result import Result

DEVICES = schema(
    "device_type device peak_bytes peak_time_ns start_bytes end_bytes allocation_count free_count evidence",
    {"evidence": pl.Enum(["allocator-totals", "census-and-sum", "running-sum"])},
)
CURVE = schema("device_type device time_ns allocated_bytes reserved_bytes")
SHARED = "cpu-shared"
"""Device type given to shared memory that DataLoader workers made and this process maps."""

POINTS = 4000
_KEY = ["device_type", "device"]


@dataclass(frozen=True)
class Memory(Result):
    """Memory of each device; empty where allocations were not recorded.

    Attributes:
        devices: `evidence` is `allocator-totals` where the allocator's own running total was recorded with every event:
            it knows what existed before the window (`start_bytes`). The CPU's allocator keeps no total: its events are
            added up, onto the live tensors that `traceloom record` counted at the start (`census-and-sum`) or, without
            a count, onto an unknown amount taken as 0 (`running-sum`; `start_bytes` is null and the figures relative).
            Memory of other threads is not seen there, nor the freeing of what existed before the window.
        curve: Memory after each event, in time order, at most 4000 points per device; where there are more events,
            each of 1000 parts keeps its first, last, lowest and highest. `reserved_bytes` is null where unknown.
    """

    devices: pl.DataFrame
    curve: pl.DataFrame


def memory(trace: Trace) -> Memory:
    """Follow the memory of each device through the trace (recorded with `profile_memory`)."""
    if not trace.allocations.height:
        return Memory(DEVICES.to_frame(), CURVE.to_frame())
    census = (trace.meta.capture or {}).get("live_bytes_at_start")
    live = census.get("cpu") if isinstance(census, dict) else None
    # Each event with `level` (memory in use after it), `before` (before it; null where unknown) and `known`
    allocations = trace.allocations.with_row_index("row")
    counted = allocations.with_columns(
        pl.when(shared_memory(allocations)).then(pl.lit(SHARED)).otherwise("device_type").alias("device_type"),
        pl.col("device").fill_null(-1),
    )
    totals = pl.col("allocated_bytes").is_not_null().all().over(_KEY) & ~pl.col("device_type").is_in(["cpu", SHARED])
    counted_before = pl.col("device_type") == "cpu"
    start = pl.when(counted_before).then(pl.lit(live if isinstance(live, int) else None, dtype=pl.Int64))
    summed = pl.col("bytes").cum_sum().over(_KEY) + start.fill_null(0)
    events = counted.with_columns(totals.alias("known")).with_columns(
        pl.when("known").then("allocated_bytes").otherwise(summed).alias("level"),
        pl.when("known").then(pl.col("allocated_bytes") - pl.col("bytes")).otherwise(start).alias("before"),
        pl.when("known").then("reserved_bytes").alias("reserved_bytes"),
    )
    devices = events.group_by(_KEY, maintain_order=True).agg(
        pl.max_horizontal(pl.col("level").max(), pl.col("before").first().fill_null(0)).alias("peak_bytes"),
        pl.col("time_ns").gather(pl.col("level").arg_max()).first().alias("peak_time_ns"),
        pl.col("before").first().alias("start_bytes"),
        pl.col("level").last().alias("end_bytes"),
        (pl.col("bytes") > 0).sum().alias("allocation_count"),
        (pl.col("bytes") < 0).sum().alias("free_count"),
        pl.when(pl.col("known").first())
        .then(pl.lit("allocator-totals"))
        .when(pl.col("before").first().is_not_null())
        .then(pl.lit("census-and-sum"))
        .otherwise(pl.lit("running-sum"))
        .alias("evidence"),
    )
    chosen = []
    for part in events.select("row", "level", *_KEY).partition_by(_KEY, include_key=False):
        row, level = part["row"].to_numpy(), part["level"].to_numpy()
        if row.size > POINTS:  # first, last, lowest and highest of each of equal parts, which may be the same
            bounds = -(-np.arange(POINTS // 4 + 1) * level.size // (POINTS // 4))
            inside = [level[low:high] for low, high in pairwise(bounds)]
            lowest = bounds[:-1] + [int(part.argmin()) for part in inside]
            highest = bounds[:-1] + [int(part.argmax()) for part in inside]
            row = row[np.concatenate([bounds[:-1], bounds[1:] - 1, lowest, highest])]
        chosen.append(row)
    kept = events[np.unique(np.concatenate(chosen))].sort(*_KEY, "row")
    curve = kept.select(*_KEY, "time_ns", pl.col("level").alias("allocated_bytes"), "reserved_bytes").pipe(
        as_declared, CURVE
    )
    return Memory(devices.pipe(as_declared, DEVICES).sort(_KEY), curve)


def shared_memory(allocations: pl.DataFrame) -> pl.Series:
    """Which events are about shared memory of DataLoader workers.

    The map allocator reports a new block with its size as the reserved total and nothing as the allocated one, which no
    other allocator of the CPU does; its free shows both as 0, so that it is known by the block's address. A free of a
    block from before the window is reported by this allocator alone.
    """
    made = (
        pl.when(pl.col("bytes") > 0)
        .then((pl.col("reserved_bytes") == pl.col("bytes")) & (pl.col("allocated_bytes") == 0))
        .fill_null(pl.when(pl.col("bytes") > 0).then(pl.lit(False)))
    )
    nothing = (pl.col("reserved_bytes") == 0) & (pl.col("allocated_bytes") == 0)
    on_cpu = pl.col("device_type") == "cpu"
    if not allocations.select((on_cpu & (made | nothing)).any()).item():
        return pl.repeat(False, allocations.height, eager=True)
    columns = ("device_type", "process", "address", "bytes", "allocated_bytes", "reserved_bytes")
    rows = allocations.select(columns).with_row_index("at").filter(on_cpu).with_columns(made.alias("shared"))
    rows = rows.select(
        "at", shared=pl.col("shared").forward_fill().over("process", "address").fill_null(nothing).fill_null(False)
    )
    shared = np.zeros(allocations.height, dtype=np.bool_)
    shared[rows["at"].to_numpy()] = rows["shared"].to_numpy()
    return pl.Series(shared)
