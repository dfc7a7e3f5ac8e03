"""All blocks as a table with names, in slices: there may be ten million."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import polars as pl

from traceloom.analyze.allocations.blocks import ALIVE, EXISTED
from traceloom.analyze.allocations.categories import CATEGORIES, EVIDENCE, Categories
from traceloom.analyze.allocations.named import Named
from traceloom.analyze.allocations.owners import Owners
from traceloom.analyze.ancestry import forest
from traceloom.analyze.intervals import Ints
from traceloom.model import Trace
from traceloom.model import category as cat

SLICE = 250_000
SHORT = ("name", "bytes")
LONG = pl.Schema(
    {
        "name": pl.String,
        "bytes": pl.Int64,
        "time_ns": pl.Int64,
        "lifetime_ns": pl.Int64,
        "device": pl.String,
        "category": pl.String,
        "evidence": pl.String,
        "backward": pl.Boolean,
        "step": pl.Int32,
        "site": pl.String,
        "innermost_op": pl.String,
        "owner": pl.String,
        "stack": pl.String,
    }
)
_FRAME = " < "


def names(named: Named, whose: Owners, rows: np.ndarray, *, sites: bool = False) -> pl.Series:
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
    whose: Owners,
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
        stacks = _stacks_of(trace, named)
    first = 0 if whole else int((blocks.made < 0).sum())  # blocks from before stand first
    for low in range(first, max(blocks.made.size, first + 1), SLICE):
        rows = np.arange(low, min(low + SLICE, blocks.made.size))
        frame = pl.DataFrame({"name": names(named, whose, rows), "bytes": blocks.bytes[rows]})
        if not whole or stacks is None:
            yield frame
            continue
        made = np.maximum(blocks.made[rows], 0)
        known = pl.Series(blocks.made[rows] >= 0)
        inside = trace.allocations[made] if trace.allocations.height else trace.allocations
        whole_life = pl.Series((blocks.start_ns[rows] != EXISTED) & (blocks.end_ns[rows] != ALIVE))
        life = np.where(whole_life, blocks.end_ns[rows], 0) - np.where(whole_life, blocks.start_ns[rows], 0)
        yield (
            frame.with_columns(
                time_ns=pl.Series(blocks.start_ns[rows]).replace(EXISTED, None),
                lifetime_ns=pl.Series(life).set(~whole_life, None),
                device=pl.Series([_device(p.device_type, p.device) for p in blocks.pools], dtype=pl.String).gather(
                    blocks.pool[rows]
                ),
                category=pl.Series(CATEGORIES).gather(kinds.category[rows]),
                evidence=pl.Series(EVIDENCE).gather(kinds.evidence[rows]),
                backward=pl.Series(named.backward[rows]),
                step=inside["step"].set(~known, None),
                site=names(named, whose, rows, sites=True),
                innermost_op=trace.events["name"].gather(inside["op"]).set(~known, None),
                owner=whose.table["name"].gather(pl.Series(whose.of[rows]).replace(-1, None).cast(pl.UInt32)),
                stack=stacks(rows),
            )
            .select(list(LONG))
            .cast(LONG)
        )


def _stacks_of(trace: Trace, named: Named) -> Callable[[Ints], pl.Series]:
    stacks = Stacks(trace)
    return lambda rows: stacks.of(named.position[rows])


def _device(kind: str, number: int) -> str:
    return kind if number < 0 else f"{kind}:{number}"


class Stacks:
    """Python stacks as text, made once per innermost frame."""

    def __init__(self, trace: Trace) -> None:
        self._tree = forest(trace)
        self._name = trace.events["name"]
        python = trace.events["category"].to_physical().to_numpy()[self._tree.row] == cat.CATEGORIES.index(cat.PYTHON)
        self._frame = self._tree.nearest_or_self(python)
        self._above = self._tree.nearest(python)
        self._known: dict[int, str | None] = {-1: None}

    def of(self, position: np.ndarray) -> pl.Series:
        """The stack of each position; null where no frames were recorded."""
        frame = np.append(self._frame, -1)[position]
        distinct, number = np.unique(frame, return_inverse=True)
        texts = [self._text(at) for at in distinct.tolist()]
        return pl.Series(texts, dtype=pl.String).gather(number) if texts else pl.Series([], dtype=pl.String)

    def _text(self, at: int) -> str | None:
        if at not in self._known:
            path = []
            up = at
            while up >= 0 and up not in self._known:
                path.append(up)
                up = int(self._above[up])
            for one in reversed(path):
                outer = self._known[int(self._above[one])]
                mine = str(self._name[int(self._tree.row[one])])
                self._known[one] = mine if outer is None else f"{mine}{_FRAME}{outer}"
        return self._known[at]
