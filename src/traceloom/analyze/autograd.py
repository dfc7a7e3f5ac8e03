"""Which forward op a backward op belongs to: autograd's sequence numbers."""

from __future__ import annotations

from dataclasses import dataclass

import polars as pl

from traceloom.analyze.ancestry import forest
from traceloom.analyze.remembered import per_trace
from traceloom.array_types import Ints
from traceloom.model import Trace
from traceloom.model import category as cat

_ENOUGH = 0.5  # of a forward thread's sequence numbers that a lane must hold to be taken for it


@dataclass(frozen=True, slots=True)
class Backward:
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
    tree = forest(trace)
    columns = trace.events.lazy().select("process", "sequence", "forward_thread", "category", "lane")
    ops = (
        columns.with_columns(pl.Series("position", tree.position))
        .filter((pl.col("sequence") >= 0) & (pl.col("category") == cat.OP) & (pl.col("position") >= 0))
        .drop("category")
        .collect()
    )
    forward = ops.filter(pl.col("forward_thread").fill_null(0) == 0)
    backward = ops.filter(pl.col("forward_thread") > 0)
    if not forward.height or not backward.height:
        return None
    # The lane of each (process, forward_thread): columns process, forward_thread, lane
    keys = ["process", "forward_thread"]
    # each arrow joins a forward op (its lane) to a backward op (its forward thread)
    events = trace.events[["event", "process", "lane", "forward_thread"]]
    arrows = (
        trace.flows.filter(pl.col("kind") == "forward-backward")
        .select("source", "target")
        .drop_nulls()
        .join(events.select(source="event", lane="lane"), on="source")
        .join(events.select("process", "forward_thread", target="event"), on="target")
        .filter(pl.col("forward_thread") > 0)
    )
    counted = arrows.group_by(*keys, "lane").agg(pl.len().alias("n")).sort("n", "lane", descending=[True, False])
    by_flow = counted.unique(keys, keep="first", maintain_order=True).select(*keys, "lane")
    rest = backward.join(by_flow, on=keys, how="anti")
    if not rest.height:
        threads = by_flow
    else:
        lanes = forward[["process", "lane", "sequence"]].unique()
        numbers = rest.select(*keys, "sequence").unique()
        totals = numbers.group_by(keys).agg(pl.len().alias("wanted"))
        held = (
            numbers.join(lanes, on=["process", "sequence"], how="inner")
            .group_by(*keys, "lane")
            .agg(pl.len().alias("n"))
        )
        matches = (
            held.filter(pl.col("n") == pl.col("n").max().over(keys))
            .join(totals, on=keys)
            .filter(pl.col("n") >= _ENOUGH * pl.col("wanted"), pl.len().over(keys) == 1)
        )
        threads = pl.concat([by_flow, matches.select(*keys, "lane")])
    if not threads.height:
        return None
    makers = forward.group_by("process", "lane", "sequence").agg(pl.col("position").max().alias("forward"))
    joined = (
        backward.drop("lane")
        .join(threads, on=["process", "forward_thread"], how="inner")
        .join(makers, on=["process", "lane", "sequence"], how="inner")
        .sort("position")
    )
    earlier = tree.row[joined["forward"].to_numpy()] < tree.row[joined["position"].to_numpy()]
    joined = joined.filter(pl.Series(earlier))
    return Backward(joined["position"].to_numpy(), joined["forward"].to_numpy()) if joined.height else None
