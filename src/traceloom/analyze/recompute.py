"""What runs a second time: forward work that activation checkpointing repeats inside the backward pass."""

from __future__ import annotations

import numpy as np
from msgspec import Struct

from traceloom.analyze.ancestry import Forest, forest
from traceloom.analyze.autograd import backward_of
from traceloom.analyze.remembered import per_trace
from traceloom.analyze.vocabulary import vocabulary
from traceloom.array_types import Bools
from traceloom.model import Trace
from traceloom.model import category as cat
from traceloom.model.arrays import column, lookup

# The frame that repeats the forward (use_reentrant=False), and the backward of the older way, whose node says it.
FRAME = r"(^|/)torch/utils/checkpoint\.py\(\d+\): recompute_fn$"
REENTRANT = r"^CheckpointFunctionBackward$"
# What the checkpoint does itself: our own marks around each checkpointed part, and its frames.
MARK = r"^traceloom\.checkpoint$"
OWN_FRAME = r"(^|/)torch/utils/checkpoint\.py\(\d+\): (_checkpoint_without_reentrant_generator|pack_hook|unpack_hook)$"
ENGINE = r"^autograd::engine::evaluate_function: "
_MOST_NODES = 0.5  # that may hold forward ops; where more do, the backward pass is being recorded for a second one


class Recompute(Struct, frozen=True):
    """Repeated forward work.

    Attributes:
        root: For each host event whether a repetition begins with it; what lies below is part of it, except the
            backward pass that the older way of checkpointing runs inside. Shape (host events,).
        own: For each host event whether it is what the checkpoint does itself, mostly in the forward pass: keeping the
            state of chance, making contexts, hooks. Told by the marks of `traceloom record`, and by frames.
        evidence: `frames` where Python frames or autograd nodes name it, `operators` where it is inferred from ops that
            autograd recorded inside the backward pass, `none`.
    """

    root: Bools
    own: Bools
    evidence: str


@per_trace
def recomputed(trace: Trace) -> Recompute:
    """Recognise repeated forward work by its frame or its autograd node, else by forward ops inside the backward pass.

    An op inside a backward node that has a sequence number and no forward thread was recorded by autograd there. That
    happens when a checkpoint repeats its forward; and in a backward pass that is itself to be differentiated, which is
    told apart by two things: then most nodes hold such ops, and their sequence numbers come back in a later backward.
    """
    tree = forest(trace)
    words = vocabulary(trace)
    code = words.code[tree.row]
    category = column(trace, "category")[tree.row]
    python = category == cat.CATEGORIES.index(cat.PYTHON)
    frame = lookup(words.matching(FRAME), code) & python
    node = lookup(words.matching(REENTRANT), code) & (category == cat.CATEGORIES.index(cat.OP))
    named = tree.topmost(frame | node)
    inferred = _inferred(trace, tree, lookup(words.matching(ENGINE), code))
    inferred &= tree.nearest_or_self(named) < 0
    evidence = "frames" if named.any() else "operators" if inferred.any() else "none"
    own = lookup(words.matching(MARK), code) & (category == cat.CATEGORIES.index(cat.ANNOTATION))
    own |= lookup(words.matching(OWN_FRAME), code) & python
    return Recompute(named | inferred, own, evidence)


def _inferred(trace: Trace, tree: Forest, engine: Bools) -> Bools:
    """Outermost ops that autograd recorded inside a backward node, and that no later backward belongs to."""
    events = trace.events
    of_autograd = lookup(events["sequence"].is_not_null().to_numpy(), tree.row)
    of_autograd &= column(trace, "category")[tree.row] == cat.CATEGORIES.index(cat.OP)
    backward = column(trace, "forward_thread", 0)[tree.row] > 0
    above = tree.nearest(engine | backward)
    repeated: Bools = of_autograd & ~backward & ~engine & (above >= 0)
    rows = np.flatnonzero(repeated)
    if not rows.size:
        return repeated
    nodes = tree.topmost(engine | backward)
    holding = np.unique(tree.outermost_or_self(engine | backward)[rows])
    if holding.size > _MOST_NODES * np.count_nonzero(nodes):
        return np.zeros_like(repeated)
    joined = backward_of(trace)
    if joined is not None:
        # not those that carry the sequence number of an op on their lane whose backward is recorded
        lanes = int(tree.lane.max(initial=0)) + 1
        number = column(trace, "sequence", -1)[tree.row] * lanes + tree.lane
        repeated &= ~np.isin(number, number[joined.forward])
    return tree.topmost(repeated)
