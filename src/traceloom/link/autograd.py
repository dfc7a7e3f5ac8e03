"""Edges from forward ops to their backward ops."""

from __future__ import annotations

import numpy as np
import polars as pl
from numpy.typing import NDArray

from traceloom.link.edges import Edges
from traceloom.link.host_tree import HostTree
from traceloom.link.segments import Segments
from traceloom.model import Trace
from traceloom.model import category as cat
from traceloom.model.arrays import nearest

Ints = NDArray[np.int64]


def forward_backward_edges(edges: Edges, trace: Trace, tree: HostTree, host: Segments, segment_node: Ints) -> None:
    """From the end of each forward op to the start of its backward op.

    Arrows of the file come first. Else ops are joined by sequence number, which counts within one forward thread:
    only where a process has one such thread is it known which is meant.
    """
    arrows = trace.flows.filter(pl.col("kind") == "forward-backward").drop_nulls(["source", "target"])
    source, target = (tree.position[arrows[name].to_numpy()] for name in ("source", "target"))
    has_both = (source >= 0) & (target >= 0)
    source, target = source[has_both], target[has_both]
    by_number = _numbers(trace, tree)
    # an arrow may end at an op inside the one that stands for the node
    arrows_before = np.concatenate([[0], np.cumsum(np.bincount(target, minlength=tree.row.size))])
    drawn = arrows_before[tree.stop[by_number[1]]] > arrows_before[by_number[1]]
    evidence = np.repeat(["measured", "correlated"], [target.size, int((~drawn).sum())])
    source = np.concatenate([source, by_number[0][~drawn]])
    target = np.concatenate([target, by_number[1][~drawn]])
    possible = tree.end[source] <= tree.start[target]
    source, target = source[possible], target[possible]
    edges.add(
        "forward-backward", evidence[possible], segment_node[host.last[source]], segment_node[host.first[target]],
        from_end=True, to_end=False,
    )  # fmt: skip


def _numbers(trace: Trace, tree: HostTree) -> tuple[Ints, Ints]:
    """Positions of forward and backward op that share a process and a sequence number.

    Several ops can have one number, since it is read when an op begins: of forward ops the last to begin made the
    node, of backward ops the outermost stands for it.
    """
    nothing = np.zeros(0, dtype=np.int64)
    columns = trace.events.select("process", "sequence", "forward_thread", "category", "lane")
    numbered = columns.with_columns(pl.Series("position", tree.position)).filter(
        (pl.col("sequence") >= 0) & (pl.col("category") == cat.OP) & (pl.col("position") >= 0)
    )
    forward = numbered.filter(pl.col("forward_thread").fill_null(0) == 0)
    backward = numbered.filter(pl.col("forward_thread") > 0)
    if not forward.height or not backward.height:
        return nothing, nothing
    threads = pl.concat(
        [
            forward.group_by("process").agg(pl.col("lane").n_unique().alias("threads")),
            backward.group_by("process").agg(pl.col("forward_thread").n_unique().alias("threads")),
        ]
    )
    if (threads["threads"] > 1).any():
        return nothing, nothing
    is_backward = np.zeros(tree.row.size, dtype=np.bool_)
    is_backward[backward["position"].to_numpy()] = True
    outermost = nearest(tree.parent, is_backward) < 0
    made = forward.group_by("process", "sequence").agg(pl.col("position").max().alias("forward"))
    joined = (
        backward.filter(pl.Series(outermost[backward["position"].to_numpy()], dtype=pl.Boolean))
        .join(made, on=["process", "sequence"], how="inner")
        .sort("position")
    )
    return joined["forward"].to_numpy(), joined["position"].to_numpy()
