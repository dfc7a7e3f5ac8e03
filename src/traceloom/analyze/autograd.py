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
