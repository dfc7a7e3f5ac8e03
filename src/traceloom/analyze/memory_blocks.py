"""Blocks of memory: allocations paired with frees, their lifetimes, and levels over time."""

from itertools import pairwise
from typing import Any

import numpy as np
import polars as pl
from msgspec import Struct
from numpy.typing import NDArray

from traceloom.analyze.memory import SHARED_MEMORY, is_shared_memory, read_first_census
from traceloom.trace.array_types import Array, Bools, Ints
from traceloom.trace.frames import build_schema
from traceloom.trace.trace import Trace

_INDEX_TYPE: Any = np.int32  # of numbers of rows and blocks: half of the memory
STILL_ALIVE = np.iinfo(np.int64).max
"""End of a block that is not freed during the recording."""
EXISTED_BEFORE = np.iinfo(np.int64).min
"""Start of a block that existed when the recording began."""


class Pool(Struct, frozen=True):
    """One memory that has a total of its own: a device's, or the shared memory of loader workers.

    Attributes:
        device_type: cpu, cuda, ...; `cpu-shared` for shared memory of loader workers.
        device: Number; -1 where the device has none.
        start_bytes: The allocator's own total before the first event; None where it keeps none.
    """

    device_type: str
    device: int
    start_bytes: int | None


class Blocks(Struct, frozen=True):
    """Paired allocations, in the order in which they were made; arrays of shape (blocks,).

    Attributes:
        pools: The memories that `pool` numbers.
        pool: Number of the memory.
        made: Row of the allocation in `trace.allocations`; -1 for a block that existed before,
            known by its free.
        ended: Row of the event that ends it, its free if that was recorded; the number of rows
            where nothing ends it.
        start_ns: Time of the allocation; `EXISTED` for one from before.
        end_ns: Time of the free; `ALIVE` where there is none.
        bytes: Size, > 0.
        address: Address; 0 where it is unknown.
        owner: Row of the census with the owner of a block from before; -1 for none.
        lost_frees: Allocations at an address that was still given out: its free was not recorded.
            The older block ends there.
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
        """Raises AssertionError where a block ends before it begins, or is neither made nor
        ended.
        """
        assert (self.end_ns >= self.start_ns).all()
        assert (self.ended > self.made).all()
        assert (self.bytes > 0).all()

    def alive(self, row: int) -> Bools:
        """Returns which blocks exist just after a row of `trace.allocations`; -1 for before the
        first.
        """
        return (self.made <= row) & (self.ended > row)

    def levels(self, pool: int, rows: int) -> Ints:
        """Returns bytes of all blocks of one memory after each row, shape (rows + 1,); the first is
        before the first row.
        """
        in_pool = self.pool == pool
        change = np.zeros(rows + 1, dtype=np.int64)
        made_inside = self.made >= 0
        change[0] = self.bytes[in_pool & ~made_inside].sum()
        selected = np.flatnonzero(in_pool & made_inside)
        # A row makes one block at most, and ends one at most
        change[self.made[selected] + 1] += self.bytes[selected]
        selected = np.flatnonzero(in_pool & (self.ended < rows))
        change[self.ended[selected] + 1] -= self.bytes[selected]
        return np.cumsum(change, out=change)


def build_blocks(trace: Trace) -> Blocks:
    """Pairs allocations and frees of each memory by address over time.

    An address is given out again after a free, so at each address events alternate. Two allocations
    in a row mean that a free was not recorded: the older block ends with the younger one's start. A
    free without an allocation is of a block from before the recording.

    Events without an address (writers of 2021) are paired by size: a free ends the youngest block
    of its size. Sums are still those of the events, but which of several equal blocks stays is a
    guess.
    """
    rows = trace.allocations
    if (rows["bytes"] == 0).any():
        rows = rows.with_row_index("row").filter(pl.col("bytes") != 0)
    # Allocations before all others
    early = read_first_census(trace) if rows.height else read_first_census(trace).clear()
    early_count = early.height
    pools, pool = _find_pools(early, rows)
    address = rows["address"].to_numpy()
    address = np.concatenate([early["address"].to_numpy(), address]) if early_count else address
    size, time = rows["bytes"].to_numpy(), rows["time_ns"].to_numpy()
    is_free = np.concatenate([np.zeros(early_count, dtype=np.bool_), size < 0])
    following, after_one = _find_neighbours(pool, address, is_free)
    without = np.flatnonzero(address[early_count:] == 0) + early_count
    if without.size:
        rank_by_size = _places_by_size(pool[without], size[without - early_count])
        next_one, after_one[without] = _find_neighbours(
            pool[without], rank_by_size, is_free[without]
        )
        following[without] = np.where(next_one >= 0, without[next_one], -1)
    lone_frees, make = np.flatnonzero(is_free & ~after_one), np.flatnonzero(~is_free)
    # Blocks from before come first: those of the census, then those known by their free.
    first = early_count + lone_frees.size
    event = np.concatenate(
        [make[:early_count], lone_frees, make[early_count:]], dtype=_INDEX_TYPE, casting="same_kind"
    )
    del make, after_one
    end = following[event]
    end[early_count:first] = lone_frees
    has_end = end >= 0
    freed = has_end & is_free[end]
    del following
    number = (
        rows["row"].to_numpy().astype(_INDEX_TYPE)
        if "row" in rows.columns
        else np.arange(rows.height, dtype=_INDEX_TYPE)
    )
    created, start_ns = (
        np.full(event.size, -1, dtype=_INDEX_TYPE),
        np.full(event.size, EXISTED_BEFORE),
    )
    created[first:], start_ns[first:] = (
        number[event[first:] - early_count],
        time[event[first:] - early_count],
    )
    ended, end_ns = (
        np.full(event.size, trace.allocations.height, dtype=_INDEX_TYPE),
        np.full(event.size, STILL_ALIVE),
    )
    ended[has_end], end_ns[has_end] = (
        number[end[has_end] - early_count],
        time[end[has_end] - early_count],
    )
    block_bytes = np.concatenate(
        [early["bytes"].to_numpy(), np.abs(size[event[early_count:] - early_count])]
    )
    owner = np.full(event.size, -1, dtype=_INDEX_TYPE)
    owner[:early_count] = np.arange(early_count)
    return Blocks(
        pools,
        pool[event],
        created,
        ended,
        start_ns,
        end_ns,
        block_bytes,
        address[event],
        owner,
        lost_frees=int((has_end & ~freed & (created >= 0)).sum()),
        resized=int((block_bytes[freed] != -size[end[freed] - early_count]).sum()),
    )


def _find_neighbours(pool: Array, address: Array, is_free: Bools) -> tuple[Array, Bools]:
    """Returns the next event at the same address of the same memory, -1 for none; and whether the
    one before it made a block.

    Nothing follows at address 0, which means an unknown address.
    """
    order = np.argsort(address, kind="stable").astype(_INDEX_TYPE)
    if pool.size and (pool != pool[0]).any():
        order = order[np.argsort(pool[order], kind="stable")]
    addresses = address[order]
    follows = (addresses[1:] == addresses[:-1]) & (addresses[1:] != 0)
    del addresses
    pools = pool[order]
    follows &= pools[1:] == pools[:-1]
    del pools
    first, second = order[:-1][follows], order[1:][follows]
    following = np.full(address.size, -1, dtype=_INDEX_TYPE)
    following[first] = second
    after_one = np.zeros(address.size, dtype=np.bool_)
    after_one[second] = ~is_free[first]
    return following, after_one


def _places_by_size(pool: Array, size: Ints) -> NDArray[np.uint64]:
    """Returns numbers, from 1 on, to use as addresses: allocations and frees of each alternate,
    whatever their order.

    A number encodes one size and one count of blocks of that size: an allocation raises the
    count to it, and the next free that lowers the count from it is of that block.
    """
    events = pl.DataFrame({"pool": pool, "bytes": np.abs(size), "change": np.sign(size)})
    count = pl.col("change").cum_sum().over("pool", "bytes") + (pl.col("change") < 0)
    return (
        events.select(pl.struct("pool", "bytes", count).rank("dense").cast(pl.UInt64))
        .to_series()
        .to_numpy()
    )


def _find_pools(early: pl.DataFrame, rows: pl.DataFrame) -> tuple[tuple[Pool, ...], Array]:
    """Returns the memories, and the memory of each storage of the census and of each event."""
    key = ["device_type", "device", "shared"]
    shared = is_shared_memory(rows).alias("shared")
    events = rows.select("device_type", pl.col("device").fill_null(-1), shared)
    events = pl.concat(
        [early.select("device_type", "device", pl.lit(False).alias("shared")), events]
    )
    kinds = events.unique(maintain_order=True)
    # Types of devices in order of first appearance
    first_row = pl.int_range(pl.len()).first().over("device_type")
    kinds = kinds.sort(first_row, "shared", "device").with_row_index("pool")
    if kinds.height == 1:
        pool = np.zeros(events.height, dtype=np.int16)
    else:
        pool = events.join(
            kinds.cast({"pool": pl.Int16}), on=key, how="left", maintain_order="left"
        )["pool"].to_numpy()
    pools = []
    for number, kind, device, is_shared in kinds.select("pool", *key).rows():
        first = np.flatnonzero(pool[early.height :] == number)[:1].tolist() if kind != "cpu" else []
        total = rows["allocated_bytes"][first[0]] if first else None
        start = None if total is None else total - rows["bytes"][first[0]]
        pools.append(Pool(SHARED_MEMORY if is_shared else kind, device, start))
    return tuple(pools), pool


LIFETIMES = build_schema("from_ns to_ns block_count bytes")
_MAX_DECADES = 13  # up to 10^12 ns, a quarter of an hour


def count_by_lifetime(blocks: Blocks) -> pl.DataFrame:
    """Counts blocks by the decade of their lifetime, without those that start or end outside the
    recording.

    Returns:
        `LIFETIMES`: [from_ns, to_ns), the shortest first; decades without blocks are left out.
    """
    complete = np.flatnonzero((blocks.start_ns != EXISTED_BEFORE) & (blocks.end_ns != STILL_ALIVE))
    life = np.maximum(blocks.end_ns[complete] - blocks.start_ns[complete], 1)
    decade = np.minimum(
        np.searchsorted(10 ** np.arange(1, _MAX_DECADES, dtype=np.int64), life, side="right"),
        _MAX_DECADES - 1,
    )
    count = np.bincount(decade, minlength=_MAX_DECADES)
    size = np.bincount(decade, weights=blocks.bytes[complete], minlength=_MAX_DECADES).astype(
        np.int64
    )
    lows = 10 ** np.arange(_MAX_DECADES, dtype=np.int64)
    lows[0] = 0
    return pl.DataFrame(
        {
            "from_ns": lows,
            "to_ns": 10 ** np.arange(1, _MAX_DECADES + 1, dtype=np.int64),
            "block_count": count,
            "bytes": size,
        },
        schema=LIFETIMES,
    ).filter(pl.col("block_count") > 0)


MAX_INSTANTS = 480
"""Approximate number of instants of a curve; the highest of all is among them."""


def choose_instants(levels: Ints, max_instants: int = MAX_INSTANTS) -> Ints:
    """Returns rows at which a curve is drawn: first and highest of each of equal parts, and the
    last row.

    Args:
        levels: Bytes after each row, with the start before the first row, as `Blocks.levels` gives
            them.
        max_instants: Approximate number of instants.

    Returns:
        Row numbers, sorted; -1 is the start.
    """
    size = levels.size
    if size <= max_instants:
        return np.arange(size) - 1
    bounds = -(-np.arange(max_instants // 2 + 1) * size // (max_instants // 2))
    highest = bounds[:-1] + [
        int(levels[low:high].argmax()) for low, high in pairwise(bounds.tolist())
    ]
    return np.unique(np.concatenate([bounds[:-1], highest, [size - 1]])) - 1


def compute_levels(blocks: Blocks, key: Ints, keys: int, rows: Ints, pool: int) -> Ints:
    """Returns bytes of the blocks of one memory by key just after each of the rows, shape (keys,
    rows).

    Args:
        blocks: The blocks.
        key: A number from 0 below `keys` for each block.
        keys: Number of keys.
        rows: Sorted row numbers; -1 for before the first.
        pool: Number of the memory.
    """
    in_pool = np.flatnonzero(blocks.pool == pool)
    width = rows.size + 1
    present = np.bincount(key[in_pool], minlength=keys) > 0
    used = np.flatnonzero(present)
    # Offset of each block's key among those in use
    first = ((np.cumsum(present) - 1) * width)[key[in_pool]]
    change = np.zeros(used.size * width)
    for change_rows, sign in ((blocks.made[in_pool], 1), (blocks.ended[in_pool], -1)):
        # Weights are summed as doubles, which are exact below 2^53 bytes.
        cell = first + np.searchsorted(rows, change_rows)
        change += sign * np.bincount(cell, weights=blocks.bytes[in_pool], minlength=change.size)
    levels = np.zeros((keys, rows.size), dtype=np.int64)
    levels[used] = np.cumsum(change.astype(np.int64).reshape(used.size, width)[:, :-1], axis=1)
    return levels


def select_largest_keys(levels: Ints, max_keys: int) -> tuple[Ints, Ints]:
    """Returns the keys with the highest levels, and a row that sums all others.

    Returns:
        Their numbers (at most `max_keys`, the highest first), and the levels of these and of the
        rest, shape (<= max_keys + 1, rows); the last row is the rest.
    """
    order = np.argsort(-levels.max(axis=1, initial=0), kind="stable")
    largest = order[:max_keys]
    remainder = levels[order[max_keys:]].sum(axis=0, keepdims=True)
    return largest, np.concatenate([levels[largest], remainder])
