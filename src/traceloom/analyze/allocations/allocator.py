"""What the allocator holds of the device and cannot use: reserved against allocated, the largest free block."""

from __future__ import annotations

import polars as pl

from traceloom.model.frames import as_declared, schema
from traceloom.model.snapshot import Snapshot

FRAGMENTS = schema(
    "device reserved_bytes allocated_bytes requested_bytes pending_bytes",
    "free_bytes largest_free_bytes split_bytes segment_count fragmentation",
)
_ALLOCATED = pl.col("state") == "active_allocated"
_FREE = pl.col("state") == "inactive"


def fragments(snapshot: Snapshot) -> pl.DataFrame:
    """The state of each device's allocator when the snapshot was taken.

    Returns:
        `FRAGMENTS`, one row per device: reserved_bytes (all segments), allocated_bytes (blocks given out, as rounded by
        the allocator), requested_bytes (what was asked for in them), pending_bytes (given back, but another stream may
        still use them), free_bytes, largest_free_bytes (the largest free block: what could be given out without new
        memory from the device), split_bytes (free blocks in segments that also hold others: they cannot be returned to
        the device), fragmentation (1 - largest_free / free; null where nothing is free).
    """
    blocks = snapshot.blocks.with_columns(whole=(~_FREE).sum().over("segment") == 0)
    by_device = blocks.group_by("device").agg(
        allocated_bytes=pl.col("bytes").filter(_ALLOCATED).sum(),
        requested_bytes=pl.col("requested_bytes").filter(_ALLOCATED).sum(),
        pending_bytes=pl.col("bytes").filter(~_ALLOCATED & ~_FREE).sum(),
        free_bytes=pl.col("bytes").filter(_FREE).sum(),
        largest_free_bytes=pl.col("bytes").filter(_FREE).max().fill_null(0),
        split_bytes=pl.col("bytes").filter(_FREE & ~pl.col("whole")).sum(),
    )
    held = snapshot.segments.group_by("device").agg(
        reserved_bytes=pl.col("bytes").sum(), segment_count=pl.len().cast(pl.Int64)
    )
    both = held.join(by_device, on="device", how="left").with_columns(
        pl.col(name).fill_null(0) for name in by_device.columns if name != "device"
    )
    states = both.with_columns(
        fragmentation=pl.when(pl.col("free_bytes") > 0).then(1 - pl.col("largest_free_bytes") / pl.col("free_bytes"))
    )
    return states.pipe(as_declared, FRAGMENTS).sort("device")
