"""How was each kernel launched: its grid, its blocks, what a thread needs, and how full of it is the device?"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import polars as pl

from traceloom.model import Trace
from traceloom.model.category import KERNEL
from traceloom.model.frames import schema
from traceloom.model.result import Result
from traceloom.read.again import numbers, readable

_AXES: dict[str, str | tuple[str, int]] = {
    f"{what}_{axis}": (what, position) for what in ("grid", "block") for position, axis in enumerate("xyz")
}
_KEYS = {**_AXES, "registers": "registers per thread", "shared_bytes": "shared memory"}
LAUNCHES_SCHEMA = schema("event", *_KEYS, "blocks_per_sm warps_per_sm occupancy")


@dataclass(frozen=True)
class KernelLaunches(Result):
    """The launch of each kernel, as the profiler recorded it.

    Attributes:
        rows: One row per kernel, in the order of events: event; grid_x, grid_y, grid_z (blocks); block_x, block_y,
            block_z (threads); registers (per thread); shared_bytes (per block); blocks_per_sm, warps_per_sm (of the
            whole grid, over the multiprocessors of the device); occupancy (estimated by the profiler, 0 to 1). Null
            where not recorded.
        absent: Why grids, blocks, registers and shared memory are all unknown: `no-file`, since they are read again
            from it, or `not-recorded`; None where some are known.
    """

    rows: pl.DataFrame
    absent: str | None


def kernel_launches(trace: Trace) -> KernelLaunches:
    """Grid, block, registers, shared memory and occupancy of each kernel; the file is read again for them."""
    kernel = (trace.events["category"] == KERNEL).to_numpy()
    events = np.flatnonzero(kernel).astype(np.int64)
    rows = trace.events.select("event").filter(kernel)
    if readable(trace) and events.size:
        rows = rows.join(numbers(trace, events, _KEYS), on="event", how="left", maintain_order="left")
    else:
        rows = rows.with_columns(pl.lit(None, dtype=pl.Float64).alias(name) for name in _KEYS)
    filling = trace.kernels.with_columns(occupancy=pl.col("occupancy_percent") / 100).drop("occupancy_percent")
    rows = rows.join(filling, on="event", how="left", maintain_order="left").cast(LAUNCHES_SCHEMA, strict=False)
    unknown = all(rows[name].null_count() == rows.height for name in _KEYS)
    return KernelLaunches(rows, None if not unknown else "not-recorded" if readable(trace) else "no-file")
