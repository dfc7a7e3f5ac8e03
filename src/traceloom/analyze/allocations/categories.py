"""What a block is for: parameters, gradients, optimizer state, activations, inputs, temporaries; and who says so."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import polars as pl

from traceloom.analyze.allocations.blocks import EXISTED
from traceloom.analyze.allocations.context import innermost
from traceloom.analyze.allocations.named import Named
from traceloom.analyze.allocations.owners import Owners
from traceloom.analyze.ancestry import forest
from traceloom.analyze.intervals import Bools, Ints
from traceloom.analyze.memory import SHARED
from traceloom.analyze.phases import LOADING, OPTIMIZER, meaning
from traceloom.model import Trace

CATEGORIES = (
    "parameter", "buffer", "gradient", "optimizer_state", "activation", "input", "temporary", "before_recording",
    "unknown",
)  # fmt: skip
EVIDENCE = ("census", "inferred", "none")
PARAMETER, BUFFER, GRADIENT, STATE, ACTIVATION, INPUT, TEMPORARY, BEFORE, UNKNOWN = range(len(CATEGORIES))
CENSUS, INFERRED, NONE = range(len(EVIDENCE))
_OWNERS = {
    "parameter": PARAMETER, "buffer": BUFFER, "gradient": GRADIENT, "optimizer_state": STATE, "activation": ACTIVATION,
    "other": UNKNOWN,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Categories:
    """Category and evidence of every block (numbers in `CATEGORIES` and `EVIDENCE`); arrays of shape (blocks,)."""

    category: Ints
    evidence: Ints


def categories(trace: Trace, named: Named, whose: Owners) -> Categories:
    """Tell what each block is for, from the part of the step that made it and the part that freed it.

    What a census knows by its owner is known; else:

    - made inside an optimizer's step: optimizer state where it outlives that step, else temporary;
    - made by the backward pass: a gradient where it outlives the pass, else temporary;
    - made by a data loader: input;
    - made otherwise and freed by the backward pass: an activation that was kept for it;
    - made and freed with no backward pass between: temporary.

    All of these are inferred. What is alive at the end without a reason, or lived through a backward pass that did not
    need it, is unknown.
    """
    blocks, tree = named.blocks, forest(trace)
    phase = _phase(trace)
    rows = trace.allocations.select("time_ns", "process", "thread")
    where = innermost(trace, tree, rows)
    made_in = np.append(phase, -1)[named.position]
    ends = np.flatnonzero(blocks.ended < rows.height)
    freed_at = np.full(blocks.made.size, -1, dtype=np.int64)
    freed_at[ends] = where[blocks.ended[ends]]
    freed_in_backward = np.append(named.places.backward, False)[freed_at]
    pools = np.array([pool.device_type == SHARED for pool in blocks.pools], dtype=np.bool_)
    optimizer = made_in == OPTIMIZER
    survives = _outlives(trace, named)
    passed = _passes(trace, named)
    before, after = np.searchsorted(passed, blocks.start_ns), np.searchsorted(passed, blocks.end_ns)
    alive = blocks.ended >= rows.height
    owner = whose.table["owner"].replace_strict(_OWNERS, default=UNKNOWN, return_dtype=pl.Int64).to_numpy()
    owned = np.append(owner, UNKNOWN)[whose.of]
    kept = owned == ACTIVATION
    counted = ((owned != UNKNOWN) & ~kept) | ((whose.of >= 0) & (blocks.made < 0) & ~kept)
    rules: list[tuple[Bools, int]] = [
        *((counted & (owned == number), number) for number in set(_OWNERS.values())),
        (kept & (blocks.start_ns == EXISTED), ACTIVATION),
        (blocks.start_ns == EXISTED, BEFORE),
        (pools[blocks.pool] if pools.size else np.zeros(0, dtype=np.bool_), INPUT),
        (made_in == LOADING, INPUT),
        (kept, ACTIVATION),  # inputs are saved for the backward pass, too
        (optimizer & survives, STATE),
        (optimizer, TEMPORARY),
        (named.backward & (freed_in_backward & ~alive), TEMPORARY),
        (named.backward, GRADIENT),
        (freed_in_backward & ~alive, ACTIVATION),
        (~alive & (before == after), TEMPORARY),
    ]
    category = np.select([rule for rule, _ in rules], [number for _, number in rules], UNKNOWN)
    asked = counted | (kept & (category == ACTIVATION))
    evidence = np.where((category == UNKNOWN) | (category == BEFORE), NONE, np.where(asked, CENSUS, INFERRED))
    return Categories(category, evidence)


def _phase(trace: Trace) -> Ints:
    """The phase that each host event stands in: that of the innermost event at or above it which opens one; -1."""
    tree, says = forest(trace), meaning(trace).phase
    return np.append(says, -1)[tree.nearest_or_self(says >= 0)]


def _outlives(trace: Trace, named: Named) -> Bools:
    """Which blocks live longer than the phase (the outermost event of it) that made them."""
    tree = forest(trace)
    opens = meaning(trace).phase == OPTIMIZER
    top = tree.outermost_or_self(opens)
    end = np.append(tree.end_ns, EXISTED)[np.append(top, -1)[named.position]]
    longer: Bools = named.blocks.end_ns > end
    return longer


def _passes(trace: Trace, named: Named) -> Ints:
    """Starts of the backward nodes, sorted: a block with none of them in its life saw no backward pass."""
    tree = forest(trace)
    backward = named.places.backward
    top = tree.topmost(backward)
    return np.sort(tree.start_ns[top])
