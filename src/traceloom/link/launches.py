"""Edges from the calls that submit GPU work to that work."""

from __future__ import annotations

import numpy as np

from traceloom.link.device_work import DeviceWork
from traceloom.link.edges import Bools, Edges, Ints
from traceloom.link.host_tree import HostTree
from traceloom.link.segments import Segments

_LONG_NS = 50_000  # a call this long did more than submit: it loaded code, or waited for room in the queue
_BEFORE_NS = 10_000  # its work can start this long before it returns


def launch_edges(  # noqa: PLR0917  (both ends of the edges)
    edges: Edges, tree: HostTree, work: DeviceWork, awaited: Bools, host: Segments, segment_node: Ints, work_node: Ints
) -> None:
    """From each launch to the start of each work that it submitted.

    The work can begin before the call returns, so the call's start is what holds it back; but not where a call was
    long and its work began when it returned. One graph launch submits all the kernels of its graph. Where calls are not
    recorded, the op that the file names stands for them.

    Args:
        edges: Where to add.
        tree: Host events.
        work: The GPU work.
        awaited: Host events that wait for GPU work; their own starts before they end.
        host: Segments of the host events.
        segment_node: Node of each segment.
        work_node: Node of each work.
    """
    has_call = work.call >= 0
    call = work.call[has_call]
    submits_last = (
        (tree.span()[call] >= _LONG_NS) & (work.start[has_call] >= tree.end[call] - _BEFORE_NS) & ~awaited[call]
    )
    evidence = np.where(work.correlated[has_call], "correlated", "measured")
    edges.add(
        "launch",
        evidence,
        segment_node[np.where(submits_last, host.last[call], host.first[call])],
        work_node[has_call],
        from_end=submits_last,
        to_end=False,
        firm=True,
    )
    named = work.op >= 0
    edges.add(
        "launch",
        "correlated",
        segment_node[host.first[work.op[named]]],
        work_node[named],
        from_end=False,
        to_end=False,
        firm=True,
    )
