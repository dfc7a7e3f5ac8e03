"""What is left alive by every step, or by every few of them: leaks, caches that grow."""

from __future__ import annotations

import numpy as np
import polars as pl

from traceloom.analyze.allocations.named import Named
from traceloom.model import Trace
from traceloom.model.frames import as_declared, schema

GROWTH = schema(
    "site pool step_count period bytes bytes_per_step block_count first_step last_step example",
    {"first_step": pl.Int64, "last_step": pl.Int64},
)
LEAST_STEPS = 3


def growth(trace: Trace, named: Named) -> pl.DataFrame:
    """Places in the code that leave memory alive in one step after the other, or in every second or third of them.

    A block counts where it was made in a step and is alive when the recording ends, its step being over. The last step
    does not count: what it made may be in use. A place grows where at least `LEAST_STEPS` steps leave something, at
    equal distances but for one that may be up to twice as long, and up to the end of the recording; what only the first
    step leaves (optimizer state, caches) does not grow.

    Returns:
        `GROWTH`, the fastest first: site (name with the counter restarting every step), pool (number of the memory),
        step_count (steps that left something), period (their distance, in steps), bytes and block_count (left in all),
        bytes_per_step (mean over the steps from the first to the last of these and those that belong to the last),
        first_step, last_step, example (a block).
    """
    blocks, steps = named.blocks, trace.steps
    if steps.height < LEAST_STEPS + 1 or not blocks.made.size:
        return GROWTH.to_frame()
    made = np.maximum(blocks.made, 0)
    step = trace.allocations["step"].fill_null(-1).cast(pl.Int64).to_numpy()[made]
    last = int(steps["step"].to_numpy().max())
    left = np.flatnonzero((blocks.made >= 0) & (blocks.ended >= trace.allocations.height) & (step >= 0) & (step < last))
    rows = pl.DataFrame(
        {
            "site": named.names(left, sites=True),
            "pool": blocks.pool[left],
            "step": step[left],
            "bytes": blocks.bytes[left],
            "block": left.astype(np.uint32),
        }
    )
    grown = (
        rows.group_by("site", "pool")
        .agg(
            step_count=pl.col("step").n_unique().cast(pl.Int64),
            bytes=pl.col("bytes").sum(),
            block_count=pl.len().cast(pl.Int64),
            first_step=pl.col("step").min(),
            last_step=pl.col("step").max(),
            example=pl.col("block").last(),
            distances=pl.col("step").unique().sort().diff().drop_nulls(),
        )
        .filter(pl.col("step_count") >= LEAST_STEPS)
        .with_columns(
            period=pl.col("distances").list.min(),
            longest=pl.col("distances").list.max(),
            span=pl.col("last_step") - pl.col("first_step"),
        )
        .filter(
            pl.col("longest") <= 2 * pl.col("period"),
            # All distances but one are the period.
            pl.col("span") == pl.col("period") * (pl.col("step_count") - 2) + pl.col("longest"),
            pl.col("last_step") >= last - 1 - pl.col("period"),
        )
        .with_columns(bytes_per_step=pl.col("bytes") / (pl.col("span") + pl.col("period")))
    )
    return grown.pipe(as_declared, GROWTH).sort("bytes_per_step", "site", descending=[True, False])
