"""Who owns each block, where a census says so: a parameter, a gradient, a state of an optimizer, by name."""

from __future__ import annotations

import numpy as np
import polars as pl
from msgspec import Struct

from traceloom.analyze.allocations.blocks import Blocks
from traceloom.analyze.allocations.census import CENSUS, census, last_census
from traceloom.array_types import Ints
from traceloom.model import Trace


class BlockOwners(Struct, frozen=True):
    """What the censuses say.

    Attributes:
        table: `CENSUS`: that of the start, then that of the end.
        of: Row of the table for each block, shape (blocks,); -1 where no census knows it.
        unseen: Rows of the table: storages alive at the end that no block explains. Their allocation was not recorded:
            a thread that is not recorded made them, or another allocator than PyTorch's.
        gone: Numbers of blocks that the first census found and that nothing freed, but that the last one misses.
    """

    table: pl.DataFrame
    of: Ints
    unseen: Ints
    gone: Ints


def owners(trace: Trace, blocks: Blocks) -> BlockOwners:
    """Find the owners: a block from before is known by the first census, one alive at the end by the last, by address.

    The last one also shows what became of blocks from before.
    """
    first, last = census(trace), last_census(trace)
    table = pl.concat([first, last]) if last.height else first
    of, none = blocks.owner.copy(), np.zeros(0, dtype=np.int64)
    if not last.height:
        return BlockOwners(table.select(list(CENSUS)), of, none, none)
    alive = np.flatnonzero(blocks.ended >= trace.allocations.height)
    kinds = pl.Series([pool.device_type.removesuffix("-shared") for pool in blocks.pools], dtype=pl.String)
    alive_blocks = pl.DataFrame(
        {"address": blocks.address[alive], "device_type": kinds.gather(blocks.pool[alive]), "block": alive}
    )
    listed = last.with_row_index("row", first.height).filter(pl.col("address") != 0)
    listed = listed.unique(["address", "device_type"], keep="first", maintain_order=True)
    matches = alive_blocks.join(listed, on=["address", "device_type"])
    of[matches["block"].to_numpy()] = matches["row"].cast(pl.Int64).to_numpy()
    recorded = kinds.unique()
    unseen = listed.join(alive_blocks, on=["address", "device_type"], how="anti", maintain_order="left")
    # nothing is known of devices without events
    unseen = unseen.filter(pl.col("device_type").is_in(recorded.implode()))
    counted = alive[blocks.owner[alive] >= 0]
    whole = listed.height == last.height  # small ones may be added up in a row without an address
    gone = counted[(of[counted] < first.height) & (blocks.address[counted] != 0)] if whole else none
    return BlockOwners(table.select(list(CENSUS)), of, unseen["row"].cast(pl.Int64).to_numpy(), gone)
