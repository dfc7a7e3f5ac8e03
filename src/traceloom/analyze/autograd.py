"""Which forward op a backward op belongs to: autograd's sequence numbers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import polars as pl
from msgspec import Struct

from traceloom.analyze.ancestry import forest
from traceloom.analyze.remembered import of_each, per_trace
from traceloom.analyze.stacked import TRACE, of_events, stacked, unstacked
from traceloom.array_types import Ints
from traceloom.model import Trace
from traceloom.model import category as cat
from traceloom.model.arrays import column

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
    ops = stacked(map(_numbered_ops, traces))
    of_backward = pl.col("forward_thread") > 0
    forward, backward = ops.filter(~of_backward), ops.filter(of_backward)
    if not backward.height:
        yield from [None] * len(traces)
        return
    # The lane of each (trace, process, forward_thread): columns trace, process, forward_thread, lane
    keys = [TRACE, "process", "forward_thread"]
    # each arrow joins a forward op (its lane) to a backward op (its forward thread)
    flows = stacked(trace.flows[["kind", "source", "target"]] for trace in traces)
    flows = flows.filter(pl.col("kind") == "forward-backward").drop_nulls(["source", "target"])
    ends = (("target", "process"), ("target", "forward_thread"), ("source", "lane"))
    arrows = flows[[TRACE]].hstack([of_events(traces, flows, end, name) for end, name in ends])
    counted = (
        arrows.filter(of_backward)
        .group_by(*keys, "lane")
        .agg(pl.len().alias("n"))
        .sort("n", "lane", descending=[True, False])
    )
    threads = counted.unique(keys, keep="first", maintain_order=True)[[*keys, "lane"]]
    rest = backward.join(threads, on=keys, how="anti")
    if rest.height:
        on = [TRACE, "process", "sequence"]
        numbers = rest[[*keys, "sequence"]].unique()
        totals = numbers.group_by(keys).agg(pl.len().alias("wanted"))
        held = numbers.join(forward[[*on, "lane"]].unique(), on=on).group_by(*keys, "lane").agg(pl.len().alias("n"))
        matches = (
            held.filter(pl.col("n") == pl.col("n").max().over(keys))
            .join(totals, on=keys)
            .filter(pl.col("n") >= _ENOUGH * pl.col("wanted"), pl.len().over(keys) == 1)
        )
        threads = pl.concat([threads, matches[[*keys, "lane"]]])
    makers = forward.group_by(TRACE, "process", "lane", "sequence").agg(pl.col("position").max().alias("forward"))
    joined = (
        backward.drop("lane")
        .join(threads, on=keys)
        .join(makers, on=[TRACE, "process", "lane", "sequence"])
        .sort(TRACE, "position")
    )
    for trace, pairs in zip(traces, unstacked(joined, traces), strict=True):
        row = forest(trace).row
        nodes, made_by = pairs["position"].to_numpy(), pairs["forward"].to_numpy()
        earlier = row[made_by] < row[nodes]
        yield Backward(nodes[earlier], made_by[earlier]) if earlier.any() else None


def _numbered_ops(trace: Trace) -> pl.DataFrame:
    """Ops with a sequence number: process, sequence, lane, forward_thread (0 for none), position (in the forest)."""
    tree = forest(trace)
    is_op = column(trace, "category")[tree.row] == cat.CATEGORIES.index(cat.OP)
    position = np.flatnonzero(is_op & (column(trace, "sequence", -1)[tree.row] >= 0))
    rows = tree.row[position]
    thread = pl.Series("forward_thread", column(trace, "forward_thread", 0)[rows])
    return trace.events[["process", "sequence", "lane"]][rows].hstack([thread, pl.Series("position", position)])
