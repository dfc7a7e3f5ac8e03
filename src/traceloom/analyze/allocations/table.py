"""All blocks as a table with names, in slices: there may be ten million."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import polars as pl

from traceloom.analyze.allocations.blocks import ALIVE, EXISTED
from traceloom.analyze.allocations.categories import CATEGORIES, EVIDENCE, Categories
from traceloom.analyze.allocations.named import Named
from traceloom.analyze.allocations.owners import BlockOwners
from traceloom.analyze.ancestry import forest
from traceloom.analyze.vocabulary import vocabulary
from traceloom.array_types import Ints
from traceloom.model import Trace
from traceloom.model import category as cat
from traceloom.model.arrays import column, distinct
from traceloom.model.frames import as_declared, schema

SLICE = 250_000
SHORT = ("name", "bytes")
LONG = schema(
    "name bytes time_ns lifetime_ns device category evidence backward step site innermost_op owner stack",
    {"device": pl.String},
)
_FRAME = " < "


def names(named: Named, whose: BlockOwners, rows: np.ndarray, *, sites: bool = False) -> pl.Series:
    """Names of some blocks; those from before the recording are called by their owner, where a census knows it."""
    plain = named.names(rows, sites=sites)
    early = named.blocks.made[rows] < 0
    if not early.any():
        return plain
    owner = whose.table["name"].gather(pl.Series(whose.of[rows]).replace(-1, None).cast(pl.UInt32))
    before = pl.Series(early)
    return pl.select(
        pl.when(before).then(pl.concat_str(pl.lit("before."), owner.fill_null("unknown"))).otherwise(plain)
    ).to_series()


def slices(
    trace: Trace,
    named: Named,
    kinds: Categories,
    whose: BlockOwners,
    stacks: Callable[[Ints], pl.Series] | None = None,
    *,
    whole: bool,
) -> Iterator[pl.DataFrame]:
    """The table of blocks in the order they were made: `name` and `bytes` of those made in the recording.

    With `whole` all columns of `LONG`, and the blocks from before the recording too.

    `time_ns` is null for blocks from before the recording, `lifetime_ns` for those and for blocks alive at its end.
    `stack` lists Python frames, the innermost first; `stacks` gives those of some blocks where the trace has none.
    """
    blocks = named.blocks
    if whole and stacks is None:
        stacks = Stacks(trace).reader(named.position)
    devices = pl.Series(
        [pool.device_type if pool.device < 0 else f"{pool.device_type}:{pool.device}" for pool in blocks.pools],
        dtype=pl.String,
    )
    first = 0 if whole else int((blocks.made < 0).sum())  # blocks from before stand first
    for low in range(first, max(blocks.made.size, first + 1), SLICE):
        rows = np.arange(low, min(low + SLICE, blocks.made.size))
        frame = pl.DataFrame({"name": names(named, whose, rows), "bytes": blocks.bytes[rows]})
        if not whole or stacks is None:
            yield frame
            continue
        made = np.maximum(blocks.made[rows], 0)
        recorded = pl.Series(blocks.made[rows] >= 0)
        inside = trace.allocations[made] if trace.allocations.height else trace.allocations
        whole_life = pl.Series((blocks.start_ns[rows] != EXISTED) & (blocks.end_ns[rows] != ALIVE))
        life = np.where(whole_life, blocks.end_ns[rows], 0) - np.where(whole_life, blocks.start_ns[rows], 0)
        yield (
            frame.with_columns(
                time_ns=pl.Series(blocks.start_ns[rows]).replace(EXISTED, None),
                lifetime_ns=pl.Series(life).set(~whole_life, None),
                device=devices.gather(blocks.pool[rows]),
                category=pl.Series(CATEGORIES).gather(kinds.category[rows]),
                evidence=pl.Series(EVIDENCE).gather(kinds.evidence[rows]),
                backward=pl.Series(named.backward[rows]),
                step=inside["step"].set(~recorded, None),
                site=names(named, whose, rows, sites=True),
                innermost_op=trace.events["name"].gather(inside["op"]).set(~recorded, None),
                owner=whose.table["name"].gather(pl.Series(whose.of[rows]).replace(-1, None).cast(pl.UInt32)),
                stack=stacks(rows),
            ).pipe(as_declared, LONG)
        )


class Stacks:
    """Python stacks as text, made once per stack."""

    def __init__(self, trace: Trace) -> None:
        self._tree = forest(trace)
        self._words = vocabulary(trace)
        self._python = column(trace, "category")[self._tree.row] == cat.CATEGORIES.index(cat.PYTHON)
        self._above = self._tree.nearest(self._python)

    def reader(self, position: Ints) -> Callable[[Ints], pl.Series]:
        """Gives the stacks of some blocks by the position of each block."""
        return lambda rows: self.of(position[rows])

    def of(self, position: np.ndarray) -> pl.Series:
        """The stack of each position; null where no frames were recorded."""
        texts, number = self.divided(position)
        return pl.Series(texts, dtype=pl.String).gather(number)

    def divided(self, position: np.ndarray) -> tuple[list[str | None], Ints]:
        """The distinct stacks of some positions, null where no frames were recorded, and the number of each position's.

        Goes down level by level: a stack is known by that of its caller and the name of its frame, so that the steps
        are as many as levels and stacks, not as frames.
        """
        frame = np.where(np.append(self._python, False)[position], position, np.append(self._above, -1)[position])
        if not (frame >= 0).any():
            return [None] * bool(frame.size), np.zeros(frame.size, dtype=np.int64)
        stack = np.zeros(self._above.size + 1, dtype=np.int64)  # 0 is none; so is what stands at -1
        pairs, count, width = [np.zeros(1, dtype=np.int64)], 1, len(self._words.names)
        for level in self._levels(frame):
            key = stack[self._above[level]] * width + self._words.code[self._tree.row[level]]
            new, number = np.unique(key, return_inverse=True)
            stack[level] = count + number
            pairs.append(new)
            count += new.size
        used, number = np.unique(stack[frame], return_inverse=True)
        callers, frames = np.divmod(np.concatenate(pairs), width)
        outer, name = callers.tolist(), self._words.names.gather(frames).to_list()
        texts: list[str | None] = []
        for at in used.tolist():
            path, up = [], at
            while up:
                path.append(str(name[up]))
                up = outer[up]
            texts.append(_FRAME.join(path) if path else None)
        return texts, number

    def _levels(self, frame: Ints) -> Iterator[Ints]:
        """These frames and those above them, by the number of frames above each, from 0."""
        needed = np.zeros(self._above.size, dtype=np.bool_)
        new = distinct(frame[frame >= 0])
        while new.size:
            needed[new] = True
            above = self._above[new]
            above = above[above >= 0]
            new = distinct(above[~needed[above]])
        frames = np.flatnonzero(self._python)
        change = np.bincount(frames + 1, minlength=needed.size + 1)
        change -= np.bincount(self._tree.stop[frames], minlength=needed.size + 1)
        rows = np.flatnonzero(needed)
        depth = np.cumsum(change)[rows]
        rows = rows[np.argsort(depth, kind="stable")]
        yield from np.split(rows, np.cumsum(np.bincount(depth))[:-1])
