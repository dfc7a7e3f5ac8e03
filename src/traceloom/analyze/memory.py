"""Memory per device: levels and peaks over time, the state of allocators, and censuses of live
storages.
"""

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import polars as pl

from traceloom.trace.frames import Result, build_schema, cast_to_schema
from traceloom.trace.session import MemorySnapshot
from traceloom.trace.trace import Trace

DEVICES = build_schema(
    "device_type device peak_bytes peak_time_ns start_bytes end_bytes allocation_count free_count evidence",
    {"evidence": pl.Enum(["allocator-totals", "census-and-sum", "running-sum"])},
)
CURVE = build_schema("device_type device time_ns allocated_bytes reserved_bytes")
SHARED_MEMORY = "cpu-shared"
"""Device type of shared memory that DataLoader workers made and this process maps."""

MAX_POINTS = 4000
_KEY = ["device_type", "device"]


@dataclass(frozen=True)
class Memory(Result):
    """Memory of each device; empty where allocations were not recorded.

    Attributes:
        devices: `evidence` is `allocator-totals` where the allocator's own running total was
            recorded with every event: it includes what existed before the window (`start_bytes`).
            The CPU's allocator keeps no total: its events are summed, starting from the live
            tensors that `traceloom record` counted at the start (`census-and-sum`) or, without a
            count, from an unknown amount taken as 0 (`running-sum`; `start_bytes` is null and the
            figures relative). That sum includes neither memory of other threads, nor the freeing of
            what existed before the window.
        curve: Memory after each event, in time order, at most 4000 points per device; where there
            are more events, each of 1000 parts keeps its first, last, lowest and highest.
            `reserved_bytes` is null where unknown.
    """

    devices: pl.DataFrame
    curve: pl.DataFrame


def memory(trace: Trace) -> Memory:
    """Computes the memory of each device through the trace (recorded with `profile_memory`)."""
    if not trace.allocations.height:
        return Memory(DEVICES.to_frame(), CURVE.to_frame())
    census = (trace.meta.capture or {}).get("live_bytes_at_start")
    live = census.get("cpu") if isinstance(census, dict) else None
    # Each event with `level` (memory in use after it), `before` (before it; null where unknown) and
    # `known`.
    allocations = trace.allocations.with_row_index("row")
    counted = allocations.with_columns(
        pl.when(is_shared_memory(allocations))
        .then(pl.lit(SHARED_MEMORY))
        .otherwise("device_type")
        .alias("device_type"),
        pl.col("device").fill_null(-1),
    )
    totals = pl.col("allocated_bytes").is_not_null().all().over(_KEY) & ~pl.col(
        "device_type"
    ).is_in(["cpu", SHARED_MEMORY])
    counted_before = pl.col("device_type") == "cpu"
    start = pl.when(counted_before).then(
        pl.lit(live if isinstance(live, int) else None, dtype=pl.Int64)
    )
    summed = pl.col("bytes").cum_sum().over(_KEY) + start.fill_null(0)
    events = counted.with_columns(totals.alias("known")).with_columns(
        pl.when("known").then("allocated_bytes").otherwise(summed).alias("level"),
        pl.when("known")
        .then(pl.col("allocated_bytes") - pl.col("bytes"))
        .otherwise(start)
        .alias("before"),
        pl.when("known").then("reserved_bytes").alias("reserved_bytes"),
    )
    devices = events.group_by(_KEY, maintain_order=True).agg(
        pl.max_horizontal(pl.col("level").max(), pl.col("before").first().fill_null(0)).alias(
            "peak_bytes"
        ),
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
    selected_rows = []
    for part in events.select("row", "level", *_KEY).partition_by(_KEY, include_key=False):
        row, level = part["row"].to_numpy(), part["level"].to_numpy()
        # First, last, lowest and highest of each of equal parts, which may be the same
        if row.size > MAX_POINTS:
            bounds = -(-np.arange(MAX_POINTS // 4 + 1) * level.size // (MAX_POINTS // 4))
            bin_levels = [level[low:high] for low, high in pairwise(bounds)]
            lowest = bounds[:-1] + [int(part.argmin()) for part in bin_levels]
            highest = bounds[:-1] + [int(part.argmax()) for part in bin_levels]
            row = row[np.concatenate([bounds[:-1], bounds[1:] - 1, lowest, highest])]
        selected_rows.append(row)
    curve_events = events[np.unique(np.concatenate(selected_rows))].sort(*_KEY, "row")
    curve = curve_events.select(
        *_KEY, "time_ns", pl.col("level").alias("allocated_bytes"), "reserved_bytes"
    ).pipe(cast_to_schema, CURVE)
    return Memory(devices.pipe(cast_to_schema, DEVICES).sort(_KEY), curve)


def is_shared_memory(allocations: pl.DataFrame) -> pl.Series:
    """Returns which events are about shared memory of DataLoader workers.

    The map allocator reports a new block with its size as the reserved total and nothing as the
    allocated one, which no other allocator of the CPU does; its free shows both as 0, so that it is
    recognized by the block's address. A free of a block from before the window is reported by this
    allocator alone.
    """
    is_shared = (
        pl.when(pl.col("bytes") > 0)
        .then((pl.col("reserved_bytes") == pl.col("bytes")) & (pl.col("allocated_bytes") == 0))
        .fill_null(pl.when(pl.col("bytes") > 0).then(pl.lit(False)))
    )
    nothing = (pl.col("reserved_bytes") == 0) & (pl.col("allocated_bytes") == 0)
    on_cpu = pl.col("device_type") == "cpu"
    if not allocations.select((on_cpu & (is_shared | nothing)).any()).item():
        return pl.repeat(False, allocations.height, eager=True)
    columns = ("device_type", "process", "address", "bytes", "allocated_bytes", "reserved_bytes")
    rows = (
        allocations.select(columns)
        .with_row_index("at")
        .filter(on_cpu)
        .with_columns(is_shared.alias("shared"))
    )
    rows = rows.select(
        "at",
        shared=pl.col("shared")
        .forward_fill()
        .over("process", "address")
        .fill_null(nothing)
        .fill_null(False),
    )
    shared = np.zeros(allocations.height, dtype=np.bool_)
    shared[rows["at"].to_numpy()] = rows["shared"].to_numpy()
    return pl.Series(shared)


FRAGMENTATION_SCHEMA = build_schema(
    "device reserved_bytes allocated_bytes requested_bytes pending_bytes",
    "free_bytes largest_free_bytes split_bytes segment_count fragmentation",
)
_IS_ALLOCATED = pl.col("state") == "active_allocated"
_IS_FREE = pl.col("state") == "inactive"


def compute_fragmentation(snapshot: MemorySnapshot) -> pl.DataFrame:
    """Returns the state of each device's allocator when the snapshot was taken.

    Returns:
        `FRAGMENTATION_SCHEMA`, one row per device: reserved_bytes (all segments), allocated_bytes (blocks
        given out, as rounded by the allocator), requested_bytes (the requested size of these),
        pending_bytes (given back, but another stream may still use them), free_bytes,
        largest_free_bytes (the largest free block: what could be given out without new memory from
        the device), split_bytes (free blocks in segments that also hold others: they cannot be
        returned to the device), fragmentation (1 - largest_free / free; null where nothing is
        free).
    """
    blocks = snapshot.blocks.with_columns(whole=(~_IS_FREE).sum().over("segment") == 0)
    device_blocks = blocks.group_by("device").agg(
        allocated_bytes=pl.col("bytes").filter(_IS_ALLOCATED).sum(),
        requested_bytes=pl.col("requested_bytes").filter(_IS_ALLOCATED).sum(),
        pending_bytes=pl.col("bytes").filter(~_IS_ALLOCATED & ~_IS_FREE).sum(),
        free_bytes=pl.col("bytes").filter(_IS_FREE).sum(),
        largest_free_bytes=pl.col("bytes").filter(_IS_FREE).max().fill_null(0),
        split_bytes=pl.col("bytes").filter(_IS_FREE & ~pl.col("whole")).sum(),
    )
    device_segments = snapshot.segments.group_by("device").agg(
        reserved_bytes=pl.col("bytes").sum(), segment_count=pl.len().cast(pl.Int64)
    )
    both = device_segments.join(device_blocks, on="device", how="left").with_columns(
        pl.col(name).fill_null(0) for name in device_blocks.columns if name != "device"
    )
    states = both.with_columns(
        fragmentation=pl.when(pl.col("free_bytes") > 0).then(
            1 - pl.col("largest_free_bytes") / pl.col("free_bytes")
        )
    )
    return states.pipe(cast_to_schema, FRAGMENTATION_SCHEMA).sort("device")


CENSUS = build_schema("address bytes device_type device owner name", {"address": pl.UInt64})

ACTIVATION_PREFIX = "kept for backward by "
"""Prefix of the name of an activation, which a node of a graph has saved for its backward pass."""


def read_first_census(trace: Trace) -> pl.DataFrame:
    """Returns the live storages at the start, `CENSUS`; no rows where there is no valid census."""
    return parse_census((trace.meta.capture or {}).get("live_storages_at_start"))


def read_last_census(trace: Trace) -> pl.DataFrame:
    """Returns the live storages when the recording ended, `CENSUS`; no rows where they were not
    counted.
    """
    return parse_census((trace.meta.capture or {}).get("live_storages_at_end"))


def parse_census(columns: Any) -> pl.DataFrame:
    """Returns the columns of a census as a frame; malformed rows are left out.

    Rows without an address (many small storages summed) are kept; else each address of a device
    occurs once.
    """
    if not isinstance(columns, dict):
        return CENSUS.to_frame()
    lists = [columns.get(name) for name in CENSUS]
    if (
        not all(isinstance(values, list) for values in lists)
        or len({len(values) for values in lists if values}) > 1
    ):
        return CENSUS.to_frame()
    try:
        rows = pl.DataFrame(dict(zip(CENSUS, lists, strict=True)), schema=CENSUS, strict=False)
    except (pl.exceptions.PolarsError, OverflowError, TypeError):
        return CENSUS.to_frame()
    once = (pl.col("address") == 0) | pl.struct(
        "address", "device_type", "device"
    ).is_first_distinct()
    return rows.drop_nulls().filter(pl.col("bytes") > 0).filter(once)
