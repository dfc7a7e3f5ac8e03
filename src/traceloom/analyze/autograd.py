"""Backward op -> forward op; recomputation."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import polars as pl
from msgspec import Struct

from traceloom.analyze.ancestry import Forest, forest
from traceloom.analyze.names import vocabulary
from traceloom.trace import vocabulary as cat
from traceloom.trace.array_types import Bools, Ints
from traceloom.trace.arrays import column, gather_rows
from traceloom.trace.batch import TRACE, of_each, of_events, per_trace, stacked, unstacked
from traceloom.trace.trace import Trace

_ENOUGH = 0.5  # of a forward thread's sequence numbers that a lane must hold to be taken for it


class Backward(Struct, frozen=True):
    """Backward ops whose forward op is known; arrays of shape (joined backward ops,).

    Attributes:
        backward: Position (in the forest) of the backward op; where several of one node enclose each other, of each.
        forward: Position of the forward op that made the node.
    """

    backward: Ints
    forward: Ints


@per_trace
def backward_of(trace: Trace) -> Backward | None:
    """Join backward ops to forward ops by forward thread and sequence number; None where nothing can be joined.

    A sequence number is unique only within the thread that ran the forward pass, and the file numbers those threads in
    a way of its own (`Fwd thread id`). Which lane such a number means is known from the file's forward-backward
    arrows; where there are none, from the only lane of the process with forward ops; where there are several, from the
    one lane that holds (nearly) all of the thread's sequence numbers. Otherwise its ops are not joined. Several ops can
    carry one number, since it is read when an op begins: the one that began last made the node.
    """
    return _of_each(trace)


@of_each
def _of_each(traces: Sequence[Trace]) -> Iterable[Backward | None]:
    ops = stacked(map(_numbered, traces))
    thread = ops["forward_thread"].fill_null(0)
    forward, backward = ops.filter(thread == 0), ops.filter(thread > 0)
    if not forward.height or not backward.height:
        return [None for _ in traces]
    # The lane of each (trace, process, forward_thread)
    keys = [TRACE, "process", "forward_thread"]
    # each arrow joins a forward op (its lane) to a backward op (its forward thread)
    flows = stacked(trace.flows for trace in traces).filter(pl.col("kind") == "forward-backward")
    flows = flows.drop_nulls(["source", "target"])
    arrows = flows.select(
        TRACE,
        *(of_events(traces, flows, "target", name) for name in keys[1:]),
        of_events(traces, flows, "source", "lane"),
    )
    counted = (
        arrows.filter(pl.col("forward_thread") > 0)
        .group_by(*keys, "lane")
        .agg(pl.len().alias("n"))
        .sort(TRACE, "n", "lane", descending=[False, True, False])
    )
    by_flow = counted.unique(keys, keep="first", maintain_order=True)[[*keys, "lane"]]
    rest = backward.join(by_flow, on=keys, how="anti")
    if not rest.height:
        threads = by_flow
    else:
        lanes = forward[[TRACE, "process", "lane", "sequence"]].unique()
        numbers = rest[[*keys, "sequence"]].unique()
        totals = numbers.group_by(keys).agg(pl.len().alias("wanted"))
        held = (
            numbers.join(lanes, on=[TRACE, "process", "sequence"], how="inner")
            .group_by(*keys, "lane")
            .agg(pl.len().alias("n"))
        )
        matches = (
            held.filter(pl.col("n") == pl.col("n").max().over(keys))
            .join(totals, on=keys)
            .filter(pl.col("n") >= _ENOUGH * pl.col("wanted"), pl.len().over(keys) == 1)
        )
        threads = pl.concat([by_flow, matches[[*keys, "lane"]]])
    makers = forward.group_by(TRACE, "process", "lane", "sequence").agg(pl.col("position").max().alias("forward"))
    joined = (
        backward[[*keys, "sequence", "position"]]
        .join(threads, on=keys, how="inner")
        .join(makers, on=[TRACE, "process", "lane", "sequence"], how="inner")
        .sort(TRACE, "position")
    )
    return map(_earlier, traces, unstacked(joined, traces))


def _numbered(trace: Trace) -> pl.DataFrame:
    """The ops with a sequence number: process, sequence, forward_thread, lane, position (in the forest)."""
    tree = forest(trace)
    is_op = column(trace, "category")[tree.row] == cat.CATEGORIES.index(cat.OP)
    position = np.flatnonzero(is_op & (column(trace, "sequence", -1)[tree.row] >= 0))
    columns = trace.events[["process", "sequence", "forward_thread", "lane"]]
    return columns[tree.row[position]].hstack([pl.Series("position", position, dtype=pl.Int64)])


def _earlier(trace: Trace, joined: pl.DataFrame) -> Backward | None:
    """Those whose forward op began earlier; None for none."""
    row = forest(trace).row
    nodes, made_by = joined["position"].to_numpy(), joined["forward"].to_numpy()
    earlier = row[made_by] < row[nodes]
    return Backward(nodes[earlier], made_by[earlier]) if earlier.any() else None


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
    frame = gather_rows(words.matching(FRAME), code) & python
    node = gather_rows(words.matching(REENTRANT), code) & (category == cat.CATEGORIES.index(cat.OP))
    named = tree.topmost(frame | node)
    inferred = _inferred(trace, tree, gather_rows(words.matching(ENGINE), code))
    inferred &= tree.nearest_or_self(named) < 0
    evidence = "frames" if named.any() else "operators" if inferred.any() else "none"
    own = gather_rows(words.matching(MARK), code) & (category == cat.CATEGORIES.index(cat.ANNOTATION))
    own |= gather_rows(words.matching(OWN_FRAME), code) & python
    return Recompute(named | inferred, own, evidence)


def _inferred(trace: Trace, tree: Forest, engine: Bools) -> Bools:
    """Outermost ops that autograd recorded inside a backward node, and that no later backward belongs to."""
    events = trace.events
    of_autograd = gather_rows(events["sequence"].is_not_null().to_numpy(), tree.row)
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
