"""Carries the host trace of one step over to other steps of the same process, by the order of names on each thread."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from traceloom.link.matching import Matching
from traceloom.model import Trace
from traceloom.model.notice import Notice
from traceloom.read.graph_step import same_ops, timed_ops

_LEAST = 0.5  # of the ops of the timed steps; below, the graph step is no picture of them


def carry(timed: Trace, graph: Trace, matching: Matching) -> Matching:
    """Give every op of the timed steps the host op that the same op of the graph step has.

    Host ops and the graph step are joined by ids, the graph step and each timed step by the order of names.

    Args:
        timed: The trace of the timed window.
        graph: The trace of the graph step, of the same process.
        matching: The host trace joined to the graph step.

    Returns:
        The host trace joined to the timed steps; its outcomes are those of the graph step. Evidence is `inferred`.
    """
    same = same_ops(timed, graph, matching.host_op >= 0)
    host_op = np.where(same >= 0, matching.host_op[same], -1)
    matched, all_ops = int((host_op >= 0).sum()), int(timed_ops(timed).sum())
    carried = replace(
        matching,
        host_op=host_op,
        exact=False,
        carried=(matched, all_ops - matched),
        rank=timed.rank if timed.rank is not None else matching.rank,
    )
    if matched >= _LEAST * all_ops and matched:
        return carried
    text = (
        f"only {matched:,} of {all_ops:,} ops of the timed window are found in the graph step; the rest have no host op"
    )
    return carried.with_notices(Notice("unlike-graph-step", "warning", text, all_ops - matched, where=timed.meta.path))
