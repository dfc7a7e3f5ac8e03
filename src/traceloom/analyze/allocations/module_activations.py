"""Activations by module, and what recomputing them in the backward pass would save and cost."""

from __future__ import annotations

import numpy as np
import polars as pl

from traceloom.analyze.allocations.categories import ACTIVATION
from traceloom.analyze.allocations.explained import Explained
from traceloom.analyze.allocations.naming import module_calls
from traceloom.analyze.ancestry import forest
from traceloom.model.frames import as_declared, schema

ACTIVATIONS = schema("module call_count bytes block_count saved_bytes host_ns device_ns")


def module_activations(explained: Explained, pool: int, row: int) -> pl.DataFrame:
    """Activations alive at an instant by the module that made them.

    Args:
        explained: The blocks.
        pool: Which memory.
        row: The instant: just after this row of `trace.allocations`.

    Returns:
        `ACTIVATIONS`, the largest saving first: module, call_count (calls that hold some), bytes and block_count (made
        inside these calls, with modules inside), saved_bytes (what checkpointing the module would free: all but the
        last block of each call, which is taken for its output), host_ns and device_ns (what recomputing costs: the time
        of these calls on their threads, and of the GPU work that they launched). Rows of a module and of the modules
        inside it overlap.
    """
    blocks, places = explained.named.blocks, explained.named.places
    if explained.stacks is not None or not places.path.size:
        return ACTIVATIONS.to_frame()
    tree = forest(explained.trace)
    held = (blocks.pool == pool) & blocks.alive(row) & (explained.kinds.category == ACTIVATION) & (blocks.made >= 0)
    # every pair of a module call and a block that was made in it, at any depth
    is_call = module_calls(explained.trace, tree)
    above = tree.nearest(is_call)
    block = np.flatnonzero(held)
    at = np.append(tree.nearest_or_self(is_call, above), -1)[explained.named.position[block]]
    calls, made_in = [at[:0]], [block[:0]]
    while (at >= 0).any():
        inside = np.flatnonzero(at >= 0)
        at, block = at[inside], block[inside]
        calls.append(at)
        made_in.append(block)
        at = above[at]
    block = np.concatenate(made_in)
    pairs = pl.DataFrame({"call": np.concatenate(calls), "bytes": blocks.bytes[block], "made": blocks.made[block]})
    by_call = pairs.group_by("call").agg(
        pl.col("bytes").sum(), pl.len().cast(pl.Int64).alias("block_count"),
        output=pl.col("bytes").sort_by("made").last(),
    )  # fmt: skip
    work = explained.trace.gpu_work().select("launch", "duration_ns").drop_nulls()
    position = tree.position[work["launch"].to_numpy()] if work.height else np.zeros(0, dtype=np.int64)
    has_launch = position >= 0
    launched_ns = np.zeros(tree.row.size, dtype=np.int64)  # of the GPU work that each host event launched itself
    np.add.at(launched_ns, position[has_launch], np.maximum(work["duration_ns"].to_numpy()[has_launch], 0))
    call = by_call["call"].to_numpy()
    paths = pl.Series(places.modules, dtype=pl.String)
    call_costs = by_call.with_columns(
        module=paths.gather(places.path[call]),
        host_ns=pl.Series(tree.span_ns()[call]),
        device_ns=pl.Series(tree.subtree_sums(launched_ns)[call]),
    )
    summed = call_costs.group_by("module").agg(
        pl.len().cast(pl.Int64).alias("call_count"),
        pl.col("bytes", "block_count", "host_ns", "device_ns").sum(),
        saved_bytes=(pl.col("bytes") - pl.col("output")).sum(),
    )
    chosen = summed.filter(pl.col("saved_bytes") > 0).pipe(as_declared, ACTIVATIONS)
    return chosen.sort("saved_bytes", "module", descending=[True, False])
