"""Whose memory is it? Every allocation with its scope, op, category and lifetime."""

from __future__ import annotations

from typing import Any

import numpy as np
import polars as pl
from msgspec import Struct

from traceloom.analyze.allocations.blocks import ALIVE, EXISTED, Blocks, blocks
from traceloom.analyze.allocations.context import innermost
from traceloom.analyze.allocations.naming import EventScopes, places
from traceloom.analyze.ancestry import forest
from traceloom.analyze.remembered import per_trace
from traceloom.array_types import Bools, Ints
from traceloom.model import Trace

MOST_REMEMBERED = 200_000
"""Names of so many allocations are kept for whoever asks again: the section and the findings of one report."""
_SHORT: Any = np.int32  # of what is kept for every block: half of the memory

__all__ = ["ALIVE", "EXISTED", "Blocks", "Named", "named"]


class Named(Struct, frozen=True):
    """Blocks with their names; arrays of shape (blocks,).

    Attributes:
        blocks: The blocks.
        places: Scopes and ops of the host events.
        position: Innermost host event (in the forest) at the allocation; -1 for none or unknown.
        path: Number of the scope path (`places.paths`).
        label: Number of the op's name (`places.labels`).
        counter: Which invocation of that op in that scope path it was, from 1; 0 for blocks from before.
        in_step: The same count, restarting with every step (outside all steps: over all of that).
        extra: Which allocation of that invocation, from 1.
        backward: Whether the backward pass made it.
        freed: Innermost host event at the free; -1 for none or unknown.
    """

    blocks: Blocks
    places: EventScopes
    position: Ints
    path: Ints
    label: Ints
    counter: Ints
    in_step: Ints
    extra: Ints
    backward: Bools
    freed: Ints

    def names(self, rows: Ints | None = None, *, sites: bool = False) -> pl.Series:
        """The identifiers `scope.op.counter` (`#2`, `#3` for further allocations of one invocation) of some blocks.

        With `sites` the counter restarts with every step, so that the same line of code has the same name in each.
        """
        rows = np.arange(self.path.size) if rows is None else rows
        paths, labels = pl.Series(self.places.paths, dtype=pl.String), pl.Series(self.places.labels, dtype=pl.String)
        frame = pl.DataFrame(
            {
                "path": paths.gather(self.path[rows]),
                "label": labels.gather(self.label[rows]),
                "counter": (self.in_step if sites else self.counter)[rows],
                "extra": self.extra[rows],
            }
        )
        dotted = pl.when(pl.col("path") == "").then(pl.lit("")).otherwise(pl.col("path") + ".")
        more = pl.when(pl.col("extra") > 1).then(pl.format("#{}", "extra")).otherwise(pl.lit(""))
        return frame.select(
            pl.concat_str(dotted, "label", pl.lit("."), pl.col("counter").cast(pl.String), more)
        ).to_series()


def named(trace: Trace, *, full_op_names: bool = False) -> Named:
    """Name every block of the trace.

    The counter counts invocations of an op in a scope path over the whole recording, also those that allocate
    nothing; what is allocated outside of any op counts one by one.
    """
    if full_op_names or trace.allocations.height > MOST_REMEMBERED:
        return _named(trace, full_op_names=full_op_names)
    return _remembered(trace)


def _named(trace: Trace, *, full_op_names: bool = False) -> Named:
    tree = forest(trace)
    all_blocks = blocks(trace)
    host_places = places(trace, tree, full_op_names=full_op_names)
    where = innermost(trace, tree, trace.allocations.select("time_ns", "process", "thread"))
    # blocks from before have -1, and where nothing ends a block, that is what stands behind the last row
    where = np.append(where, _SHORT(-1))
    position, freed = where[all_blocks.made], where[all_blocks.ended]
    del where
    path = np.append(host_places.path, 0).astype(_SHORT)[position]
    label = np.append(host_places.label, 0).astype(_SHORT)[position]
    op = np.append(host_places.op, -1).astype(_SHORT)[position]
    extra = np.ones(path.size, dtype=_SHORT)
    inside = np.flatnonzero(op >= 0)
    extra[inside] = turns(op[inside])
    del inside
    outside = np.flatnonzero((op < 0) & (all_blocks.made >= 0))
    step = trace.allocations["step"].gather(all_blocks.made[outside]).fill_null(-1).cast(pl.Int64).to_numpy()
    # which occurrence of its label in its path each counted op is, by start
    ops = np.flatnonzero(host_places.op == np.arange(host_places.op.size))
    ops = ops[np.argsort(tree.start_ns[ops], kind="stable")]
    keys = host_places.path[ops] * len(host_places.labels) + host_places.label[ops]
    op_step = trace.events["step"].fill_null(-1).cast(pl.Int64).to_numpy()[tree.row[ops]]
    different = len(host_places.labels) * len(host_places.paths)
    counters = []
    for restarts in (False, True):
        invocation = np.zeros(host_places.op.size + 1, dtype=_SHORT)  # the last is that of no op
        invocation[ops] = turns(keys + (op_step + 1) * different * restarts)
        counter = invocation[op]
        counter[outside] = turns(path[outside] + (step + 1) * len(host_places.paths) * restarts)
        counter[all_blocks.made < 0] = 0
        counters.append(counter)
    backward = np.append(host_places.backward, False)[position]
    return Named(all_blocks, host_places, position, path, label, counters[0], counters[1], extra, backward, freed)


_remembered = per_trace(_named)


def turns(keys: Ints) -> Ints:
    """1, 2, 3, ... for the occurrences of each key, in order."""
    order = np.argsort(keys, kind="stable")
    ordered = keys[order]
    first = np.flatnonzero(np.append(True, ordered[1:] != ordered[:-1])[: keys.size])
    out = np.empty(keys.size, dtype=np.int64)
    out[order] = np.arange(keys.size) - np.repeat(first, np.diff(np.append(first, keys.size))) + 1
    return out
