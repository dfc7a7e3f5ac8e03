"""What a block is for: parameters, gradients, optimizer state, activations, inputs, temporaries; and who says so."""

from __future__ import annotations

from typing import Any

import numpy as np
import polars as pl
from msgspec import Struct

from traceloom.analyze.allocations.blocks import EXISTED
from traceloom.analyze.allocations.named import Named
from traceloom.analyze.allocations.owners import BlockOwners
from traceloom.analyze.ancestry import forest
from traceloom.analyze.memory import SHARED
from traceloom.analyze.phases import LOADING, OPTIMIZER, meaning
from traceloom.array_types import Bools, Ints
from traceloom.model import Trace

CATEGORIES = (
    "parameter", "buffer", "gradient", "optimizer_state", "activation", "input", "temporary", "before_recording",
    "unknown",
)  # fmt: skip
EVIDENCE = ("census", "inferred", "none")
PARAMETER, BUFFER, GRADIENT, STATE, ACTIVATION, INPUT, TEMPORARY, BEFORE, UNKNOWN = range(len(CATEGORIES))
CENSUS, INFERRED, NONE = range(len(EVIDENCE))
_PIECE = 1 << 19
_SMALL: Any = np.int8
_OWNERS = {
    "parameter": PARAMETER, "buffer": BUFFER, "gradient": GRADIENT, "optimizer_state": STATE, "activation": ACTIVATION,
    "other": UNKNOWN,
}  # fmt: skip


class Categories(Struct, frozen=True):
    """Category and evidence of every block (numbers in `CATEGORIES` and `EVIDENCE`); arrays of shape (blocks,)."""

    category: Ints
    evidence: Ints


def categories(trace: Trace, named: Named, whose: BlockOwners) -> Categories:
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
    tree, phase, blocks = forest(trace), meaning(trace).phase, named.blocks
    # of each host event (the last entry is of none): its phase, when the outermost optimizer step around it ends
    opener = tree.nearest_or_self(phase >= 0)  # the innermost event at or above each that opens a phase
    phase_of = np.append(np.append(phase, -1)[opener], -1)
    optimizer_end_ns = np.append(np.append(tree.end_ns, EXISTED)[tree.outermost_or_self(phase == OPTIMIZER)], EXISTED)
    in_backward = np.append(named.places.backward, False)
    # starts of backward nodes, sorted: a block with none of them in its life saw no backward pass
    passes = np.sort(tree.start_ns[tree.topmost(named.places.backward)])
    shared = np.array([pool.device_type == SHARED for pool in blocks.pools], dtype=np.bool_)
    owner = whose.table["owner"].replace_strict(_OWNERS, default=UNKNOWN, return_dtype=pl.Int64).to_numpy()
    owner = np.append(owner, UNKNOWN)
    size = named.position.size
    out = Categories(np.empty(size, dtype=_SMALL), np.empty(size, dtype=_SMALL))
    for low in range(0, size, _PIECE):
        piece = slice(low, low + _PIECE)
        position, start_ns, end_ns = named.position[piece], blocks.start_ns[piece], blocks.end_ns[piece]
        early = start_ns == EXISTED
        alive = blocks.ended[piece] >= trace.allocations.height
        made_in = phase_of[position]
        freed_in_backward = in_backward[named.freed[piece]] & ~alive
        optimizer = made_in == OPTIMIZER
        survives = end_ns > optimizer_end_ns[position]
        unbroken = np.searchsorted(passes, start_ns) == np.searchsorted(passes, end_ns)
        owned, listed = owner[whose.of[piece]], whose.of[piece] >= 0
        kept = owned == ACTIVATION
        counted = ~kept & ((owned != UNKNOWN) | (listed & (blocks.made[piece] < 0)))
        backward = named.backward[piece]
        rules: list[tuple[Bools, Ints | int]] = [
            (counted, owned),
            (kept & early, ACTIVATION),
            (early, BEFORE),
            (shared[blocks.pool[piece]], INPUT),
            (made_in == LOADING, INPUT),
            (kept, ACTIVATION),  # inputs are saved for the backward pass, too
            (optimizer & survives, STATE),
            (optimizer, TEMPORARY),
            (backward & freed_in_backward, TEMPORARY),
            (backward, GRADIENT),
            (freed_in_backward, ACTIVATION),
            (~alive & unbroken, TEMPORARY),
        ]
        category = np.select([rule for rule, _ in rules], [number for _, number in rules], UNKNOWN)
        from_census = counted | (kept & (category == ACTIVATION))
        evidence = np.where(from_census, CENSUS, INFERRED)
        out.category[piece] = category
        out.evidence[piece] = np.where((category == UNKNOWN) | (category == BEFORE), NONE, evidence)
    return out
