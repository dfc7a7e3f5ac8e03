"""How long do allocations live?"""

from __future__ import annotations

import numpy as np
import polars as pl

from traceloom.analyze.allocations.blocks import ALIVE, EXISTED, Blocks
from traceloom.model.frames import schema

LIFETIMES = schema("from_ns to_ns block_count bytes")
_DECADES = 13  # up to 10^12 ns, a quarter of an hour


def lifetimes(blocks: Blocks) -> pl.DataFrame:
    """Blocks by the decade of their lifetime; those whose start or end lies outside the recording are not among them.

    Returns:
        `LIFETIMES`: [from_ns, to_ns), the shortest first; decades without blocks are left out.
    """
    complete = np.flatnonzero((blocks.start_ns != EXISTED) & (blocks.end_ns != ALIVE))
    life = np.maximum(blocks.end_ns[complete] - blocks.start_ns[complete], 1)
    decade = np.minimum(np.searchsorted(10 ** np.arange(1, _DECADES, dtype=np.int64), life, side="right"), _DECADES - 1)
    count = np.bincount(decade, minlength=_DECADES)
    size = np.bincount(decade, weights=blocks.bytes[complete], minlength=_DECADES).astype(np.int64)
    lows = 10 ** np.arange(_DECADES, dtype=np.int64)
    lows[0] = 0
    return pl.DataFrame(
        {
            "from_ns": lows,
            "to_ns": 10 ** np.arange(1, _DECADES + 1, dtype=np.int64),
            "block_count": count,
            "bytes": size,
        },
        schema=LIFETIMES,
    ).filter(pl.col("block_count") > 0)
