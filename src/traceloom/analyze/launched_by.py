"""What stands around the launch of each piece of GPU work, as bits of patterns that operators match."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from traceloom.analyze.intervals import Ints
from traceloom.analyze.vocabulary import vocabulary
from traceloom.model import Trace
from traceloom.model import category as cat
from traceloom.model.arrays import column

Bits = NDArray[np.uint64]
_NAMED = np.array([category in (cat.OP, cat.ANNOTATION) for category in cat.CATEGORIES])


def around(trace: Trace, op: Ints, launch: Ints, bits_of_name: Bits) -> tuple[Bits, Bits]:
    """Bits of the operator that launched each piece of work, and of all operators and annotations around it.

    Args:
        trace: The trace.
        op: Row of the operator of each piece; -1 for none.
        launch: Row of its launch; -1 for none.
        bits_of_name: Bits of each name of `vocabulary(trace)`.

    Returns:
        Two arrays of shape (work,): of the innermost operator, and of it and whatever stands above the launch. Python
        frames have no bits: their names are paths.
    """
    names = vocabulary(trace).code
    if not op.size or not names.size:
        return np.zeros(op.size, dtype=np.uint64), np.zeros(op.size, dtype=np.uint64)
    own = np.where(op >= 0, bits_of_name[names[np.maximum(op, 0)]], 0).astype(np.uint64)
    origin, origin_index = np.unique(np.where(launch >= 0, launch, op), return_inverse=True)
    category, parent = column(trace, "category"), column(trace, "parent", -1)
    gathered = np.zeros(origin.size, dtype=np.uint64)
    at = np.flatnonzero(origin >= 0)
    current = origin[at]
    while at.size:  # one turn per level of nesting
        gathered[at] |= np.where(_NAMED[category[current]], bits_of_name[names[current]], np.uint64(0))
        current = parent[current]
        kept = current >= 0
        at, current = at[kept], current[kept]
    return own, gathered[origin_index] | own
