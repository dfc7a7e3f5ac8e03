"""Which region (module, scope, annotation) each host event belongs to, and in which part of the training step.

Forward work belongs to the innermost region around it; backward work to the region of the op that made its autograd
node, wherever it runs; repeated work to the regions it repeats.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from traceloom.analyze.ancestry import Forest, forest
from traceloom.analyze.autograd import Backward, backward_of
from traceloom.analyze.intervals import Bools, Ints
from traceloom.analyze.phases import MODULE_PREFIX, SCOPE_PREFIX, STEP_MARK
from traceloom.analyze.recompute import ENGINE, recomputed
from traceloom.analyze.vocabulary import vocabulary
from traceloom.model import Trace
from traceloom.model import category as cat
from traceloom.model.arrays import column, lookup

KINDS = ("module", "scope", "annotation")
PARTS = ("forward", "backward", "recompute")
FORWARD, BACKWARD, RECOMPUTE = range(3)
MODULE = "nn.Module: "
DEEPEST = 256  # levels of nested regions; what lies deeper counts to the region above

# The compiler's notes on its own phases (torch.compile); they are told under `compiled`.
_COMPILER_NOTE = r"_data: (fn_name=.*, )?compile_id="
_RUN_BACKWARD = r"^<built-in method run_backward "


@dataclass(frozen=True, slots=True)
class Regions:
    """Arrays of shape (host events,), in the forest's order; regions are named by the position of their event.

    Attributes:
        evidence: `python-modules`, `annotations` or `none`.
        kind: Index in KINDS; -1 for events that are no region.
        region: The region of each event; -1 for none. A region is its own.
        above: For regions the region they stand in; -1 for roots and for what is none.
        part: Index in PARTS.
        backward: Whether any backward op could be joined to its forward op.
        recompute: How repeated work was recognised: `frames`, `operators`, `none`.
    """

    evidence: str
    kind: Ints
    region: Ints
    above: Ints
    part: Ints
    backward: bool
    recompute: str


def regions(trace: Trace) -> Regions:
    """Give every host event its region and its part."""
    tree, words = forest(trace), vocabulary(trace)
    code = words.code[tree.row]
    category = column(trace, "category")[tree.row]
    python, op, annotation = (category == cat.CATEGORIES.index(name) for name in (cat.PYTHON, cat.OP, cat.ANNOTATION))
    scope = lookup(words.names.str.starts_with(SCOPE_PREFIX).to_numpy(), code)
    module = python & lookup(words.names.str.starts_with(MODULE).to_numpy(), code)
    left_out = lookup(words.matching(STEP_MARK) | words.matching(_COMPILER_NOTE), code)
    kind = np.full(tree.row.size, -1, like=tree.row)
    kind[module] = KINDS.index("module")
    kind[scope & (op | annotation)] = KINDS.index("scope")
    kind[annotation & ~scope & ~left_out] = KINDS.index("annotation")
    # a module call has a mark of ours, a Python frame, or both: then it counts once
    marked = (op | annotation) & lookup(words.names.str.starts_with(MODULE_PREFIX).to_numpy(), code)
    kind[marked] = -1 if module.any() else KINDS.index("module")
    evidence = "python-modules" if module.any() else "annotations" if (kind >= 0).any() else "none"

    # The part of each event is that of the nearest event (itself or above) with its own part, else forward.
    joined, again = backward_of(trace), recomputed(trace)
    part = np.full(tree.row.size, FORWARD, like=tree.row)
    if joined is not None:
        part[joined.backward] = BACKWARD
    part[lookup(words.matching(ENGINE), code)] = BACKWARD
    part[again.root] = RECOMPUTE
    if again.root.any():  # the older way of checkpointing runs a backward pass of its own inside
        inner = np.flatnonzero(lookup(words.matching(_RUN_BACKWARD), code))
        above = tree.nearest(part != FORWARD)[inner]
        part[inner[(above >= 0) & (part[above] == RECOMPUTE)]] = BACKWARD
    part = np.append(part, FORWARD)[tree.nearest_or_self(part != FORWARD)]

    while True:
        region, above = _resolved(trace, tree, kind, joined, again.root, part)
        level = levels(above, kind >= 0)
        if not (level > DEEPEST).any():
            break
        kind[level > DEEPEST] = -1
    if joined is None:  # then nothing can be told apart inside regions
        part = np.where(region >= 0, FORWARD, part)
    return Regions(evidence, kind, region, above, part, joined is not None, again.evidence)


def levels(above: Ints, wanted: Bools) -> Ints:
    """How many regions stand above each region, at most one more than the deepest level; -1 for what is none."""
    level = np.where(wanted, 0, -1)
    rows = np.flatnonzero(wanted & (above >= 0))
    up = above[rows]
    for depth in range(1, DEEPEST + 2):
        if not rows.size:
            break
        level[rows] = depth
        up = above[up]
        rows, up = rows[up >= 0], up[up >= 0]
    return level


def _resolved(  # noqa: PLR0917
    trace: Trace, tree: Forest, kind: Ints, joined: Backward | None, again: Bools, part: Ints
) -> tuple[Ints, Ints]:
    """The region of each event, and that above each region.

    Marks are regions, joined backward ops and the roots of repetitions; each event takes the region of the nearest
    one. A region is its own, a backward op has that of its forward op, a repetition that around the work it repeats.
    """
    size = tree.row.size
    is_region = kind >= 0
    mark = is_region | again
    forward = np.full(size, -1, like=tree.row)
    if joined is not None:
        forward[joined.backward] = joined.forward
        mark = mark | (forward >= 0)
    above = tree.nearest(mark)
    nearest = tree.nearest_or_self(mark, above)
    source = np.full(size, -1, like=tree.row)  # the mark whose region another mark takes
    made = np.flatnonzero((forward >= 0) & ~is_region)
    source[made] = nearest[forward[made]]
    up = above.copy()  # the mark above each region
    repeats = np.flatnonzero(again & ~is_region)
    if repeats.size:
        enclosing = above[repeats]
        source[repeats] = np.where(forward[repeats] >= 0, source[repeats], enclosing)
        inner = np.flatnonzero(is_region & (above >= 0) & np.append(again & ~is_region, False)[above])
        original = _original(trace, tree, kind, part, inner)
        has_original = original >= 0
        inner, original = inner[has_original], original[has_original]
        up[inner] = above[original]
        source[above[inner][::-1]] = above[original][::-1]  # the first region inside shows where the repetition belongs
    # Follow `source` from every mark to a region; -1 where it ends without one.
    settled = np.where(is_region, np.arange(size, like=source), source)
    open_rows = np.flatnonzero((settled >= 0) & ~is_region[settled]) if size else settled
    while open_rows.size:  # ends: each source began earlier than the mark that refers to it
        settled[open_rows] = source[settled[open_rows]]
        open_rows = open_rows[settled[open_rows] >= 0]
        open_rows = open_rows[~is_region[settled[open_rows]]]
    region = np.append(settled, -1)[nearest]
    parent = np.where(is_region, np.append(settled, -1)[up], -1)
    return region, parent


def _original(trace: Trace, tree: Forest, kind: Ints, part: Ints, inner: Ints) -> Ints:
    """For regions that repeat one: the latest earlier region of the same name in the forward pass; -1 for none."""
    code = vocabulary(trace).code[tree.row].astype(np.int64)
    first = np.flatnonzero((kind >= 0) & (part == FORWARD))
    if not first.size or not inner.size:
        return np.full(inner.size, -1)
    key = code * trace.events.height + tree.row  # rows are in the order of starts
    order = first[np.argsort(key[first], kind="stable")]
    at = np.searchsorted(key[order], key[inner], side="left") - 1
    matches = (at >= 0) & (code[order[np.maximum(at, 0)]] == code[inner])
    return np.where(matches, order[np.maximum(at, 0)], -1)
