"""Which forward op a backward op belongs to: autograd's sequence numbers."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import polars as pl

from traceloom.analyze.ancestry import Forest
from traceloom.analyze.attribution import launched_work
from traceloom.analyze.intervals import Ints
from traceloom.model import Trace
from traceloom.model import category as cat


@dataclass(frozen=True, slots=True)
class Backward:
    """Backward ops whose forward op is known; arrays of shape (joined backward ops,).

    Attributes:
        backward: Position (in the forest) of the outermost op of each backward node.
        forward: Position of the forward op that made the node.
        host_ns: Duration of the backward op.
        device_ns: Summed duration of the GPU work launched in it.
    """

    backward: Ints
    forward: Ints
    host_ns: Ints
    device_ns: Ints


def backward_of(trace: Trace, tree: Forest) -> Backward | None:
    """Join backward ops to forward ops by (process, sequence number); None where the recording does not tell.

    A sequence number is unique only within the thread that ran the forward pass, and the file numbers those threads in
    a way of its own (`Fwd thread id`). The join is exact where each process has one forward thread; otherwise nothing
    is joined. Several ops can carry one number, since it is read when an op begins: the one that began last made the
    node.
    """
    columns = trace.events.select("process", "sequence", "forward_thread", "category", "lane")
    known = columns.with_columns(pl.Series("position", tree.position)).filter(
        (pl.col("sequence") >= 0) & (pl.col("category") == cat.OP) & (pl.col("position") >= 0)
    )
    forward = known.filter(pl.col("forward_thread").fill_null(0) == 0)
    backward = known.filter(pl.col("forward_thread") > 0)
    threads = pl.concat(
        [
            forward.group_by("process").agg(pl.col("lane").n_unique().alias("threads")),
            backward.group_by("process").agg(pl.col("forward_thread").n_unique().alias("threads")),
        ]
    )
    if not forward.height or not backward.height or (threads["threads"] > 1).any():
        return None
    is_backward = np.zeros(tree.row.size, dtype=np.bool_, like=tree.row)
    is_backward[backward["position"].to_numpy()] = True
    top = tree.topmost(is_backward)
    made = forward.group_by("process", "sequence").agg(pl.col("position").max().alias("forward"))
    joined = backward.filter(pl.Series(top[backward["position"].to_numpy()])).join(
        made, on=["process", "sequence"], how="inner"
    )
    position = joined["position"].to_numpy()
    direct, _, _ = launched_work(trace).by_owner(np.arange(tree.row.size, like=tree.row))
    device = tree.subtree_sums(direct)
    return Backward(position, joined["forward"].to_numpy(), tree.span_ns()[position], device[position])
