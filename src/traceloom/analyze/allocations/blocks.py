"""Blocks: each allocation with its free, paired by address over time."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import polars as pl
from numpy.typing import NDArray

from traceloom.analyze.allocations.census import census
from traceloom.analyze.intervals import Bools, Ints
from traceloom.analyze.memory import SHARED, shared_memory
from traceloom.model import Trace

ALIVE = np.iinfo(np.int64).max
"""End of a block that nobody frees while the recording lasts."""
EXISTED = np.iinfo(np.int64).min
"""Start of a block that existed when the recording began."""


@dataclass(frozen=True, slots=True)
class Pool:
    """One memory that has a total of its own: a device's, or the shared memory of loader workers.

    Attributes:
        device_type: cpu, cuda, ...; `cpu-shared` for shared memory of loader workers.
        device: Number; -1 where the device has none.
        start_bytes: The allocator's own total before the first event; None where it keeps none.
    """

    device_type: str
    device: int
    start_bytes: int | None


@dataclass(frozen=True, slots=True)
class Blocks:
    """Paired allocations, in the order in which they were made; arrays of shape (blocks,).

    Attributes:
        pools: What `pool` counts.
        pool: Which memory.
        made: Row of the allocation in `trace.allocations`; -1 for a block that existed before, known by its free.
        ended: Row of the event that ends it, its free if that was recorded; the number of rows where nothing ends it.
        start_ns: Time of the allocation; `EXISTED` for one from before.
        end_ns: Time of the free; `ALIVE` where there is none.
        bytes: Size, > 0.
        address: Where.
        owner: Number of the row of the census that tells whose a block from before is; -1 for none.
        lost_frees: Allocations at an address that was still given out: its free was not recorded. The older block ends
            there.
        resized: Frees whose size is not that of the allocation.
    """

    pools: tuple[Pool, ...]
    pool: Ints
    made: Ints
    ended: Ints
    start_ns: Ints
    end_ns: Ints
    bytes: Ints
    address: NDArray[np.uint64]
    owner: Ints
    lost_frees: int
    resized: int

    def check(self) -> None:
        """Raise AssertionError where a block ends before it begins, or is neither made nor ended."""
        assert (self.end_ns >= self.start_ns).all()
        assert (self.ended > self.made).all()
        assert (self.bytes > 0).all()

    def alive(self, row: int) -> Bools:
        """Which blocks exist just after a row of `trace.allocations`; -1 for before the first."""
        there: Bools = (self.made <= row) & (self.ended > row)
        return there

    def levels(self, pool: int, rows: int) -> Ints:
        """Bytes of all blocks of one memory after each row, shape (rows + 1,); the first is before the first row."""
        mine = self.pool == pool
        size = self.bytes[mine]
        made = np.bincount(self.made[mine] + 1, weights=size, minlength=rows + 2)  # exact below 2^53 bytes
        ended = np.bincount(self.ended[mine] + 1, weights=size, minlength=rows + 2)
        levels: Ints = np.cumsum((made - ended).astype(np.int64)[: rows + 1])
        return levels


def blocks(trace: Trace) -> Blocks:
    """Pair allocations and frees of each memory by address over time.

    An address is given out again after a free, so at each address events alternate. Two allocations in a row mean that
    a free went unrecorded: the older block ends with the younger one's start. A free without an allocation is of a
    block from before the recording.
    """
    rows = _events(trace)
    pools, pool = _pools(rows)
    order = _by_address(pool, rows["address"].to_numpy())
    size, time = rows["bytes"].to_numpy()[order], rows["time_ns"].to_numpy()[order]
    address, row, of = rows["address"].to_numpy()[order], rows["row"].to_numpy()[order], pool[order]
    owner = rows["owner"].to_numpy()[order]
    follows = np.zeros(order.size + 1, dtype=np.bool_)  # whether an event is about the same address as the one before
    follows[1:-1] = (of[1:] == of[:-1]) & (address[1:] == address[:-1]) & (address[1:] != 0)
    is_free = size < 0
    make = np.flatnonzero(~is_free)
    ends = follows[make + 1]
    following = np.minimum(make + 1, max(order.size - 1, 0))
    freed = ends & is_free[following]
    alone = np.flatnonzero(is_free & ~(follows[:-1] & np.append(True, ~is_free[:-1])[: order.size]))
    start_ns = np.concatenate([time[make], np.full(alone.size, EXISTED)])
    made = np.concatenate([row[make], np.full(alone.size, -1)])
    turn = np.lexsort((made, start_ns))
    return Blocks(
        pools,
        np.concatenate([of[make], of[alone]])[turn],
        made[turn],
        np.concatenate([np.where(ends, row[following], trace.allocations.height), row[alone]])[turn],
        start_ns[turn],
        np.concatenate([np.where(ends, time[following], ALIVE), time[alone]])[turn],
        np.concatenate([size[make], -size[alone]])[turn],
        np.concatenate([address[make], address[alone]])[turn],
        np.concatenate([owner[make], np.full(alone.size, -1)])[turn],
        lost_frees=int((ends & ~freed & (row[make] >= 0)).sum()),
        resized=int((size[make[freed]] != -size[following[freed]]).sum()),
    )


def _events(trace: Trace) -> pl.DataFrame:
    """The storages of the census as allocations before all others (row -1), then allocations and frees."""
    rows = (
        trace.allocations.with_row_index("row")
        .filter(pl.col("bytes") != 0)
        .with_columns(pl.col("row").cast(pl.Int64), owner=pl.lit(-1, pl.Int64), shared=pl.lit(None, pl.Boolean))
    )
    rows = rows.with_columns(shared=shared_memory(rows)) if rows.height else rows
    counted = census(trace).drop("owner").with_row_index("owner")
    if not counted.height:
        return rows
    before = counted.select(
        pl.lit(-1, pl.Int64).alias("row"), pl.lit(EXISTED).alias("time_ns"), "address", "bytes", "device_type",
        pl.when(pl.col("device") < 0).then(None).otherwise(pl.col("device")).alias("device"),
        pl.lit(None, pl.Int64).alias("allocated_bytes"), pl.col("owner").cast(pl.Int64),
        pl.lit(False).alias("shared"),
    )  # fmt: skip
    numbered = rows.select("device_type", "device").unique().filter(pl.col("device") == -1)["device_type"]
    unnumbered = pl.col("device").is_null() & pl.col("device_type").is_in(numbered.implode())
    before = before.with_columns(device=pl.when(unnumbered).then(-1).otherwise("device").cast(pl.Int32))
    return pl.concat([before, rows.select(before.columns)])


def _by_address(pool: Ints, address: NDArray[np.uint64]) -> Ints:
    """Rows by pool and address, in time order within one (they come in time order)."""
    order: Ints = np.argsort(address, kind="stable")
    return order[np.argsort(pool[order], kind="stable")] if pool.size and (pool != pool[0]).any() else order


def _pools(rows: pl.DataFrame) -> tuple[tuple[Pool, ...], Ints]:
    """The memories, and which of them each event is about."""
    if not rows.height:
        return (), np.zeros(0, dtype=np.int64)
    shared = rows["shared"].to_numpy()
    kinds = rows["device_type"].cast(pl.Categorical).to_physical().cast(pl.Int64).to_numpy() * 2 + shared
    number = rows["device"].fill_null(-1).to_numpy().astype(np.int64)
    code = (kinds << 32) + number + 1
    if code.min() == code.max():
        first, pool = np.zeros(1, dtype=np.int64), np.zeros(code.size, dtype=np.int64)
    else:
        _, first, pool = np.unique(code, return_index=True, return_inverse=True)
    recorded = rows["row"].to_numpy() >= 0
    pools = []
    for at, mine in zip(first.tolist(), range(first.size), strict=True):
        kind = SHARED if shared[at] else str(rows["device_type"][at])
        told = np.flatnonzero(recorded & (pool == mine))[:1]
        total = rows["allocated_bytes"][int(told[0])] if told.size and kind not in ("cpu", SHARED) else None
        start = None if total is None else total - rows["bytes"][int(told[0])]
        pools.append(Pool(kind, int(number[at]), start))
    return tuple(pools), pool.astype(np.int64)
