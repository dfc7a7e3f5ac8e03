"""Edges from the calls that submit GPU work to that work."""

from __future__ import annotations

import numpy as np

from traceloom.link.device_work import DeviceWork
from traceloom.link.edges import Edges, Ints


def launch_edges(edges: Edges, work: DeviceWork, first_node: Ints, work_node: Ints) -> None:
    """From the start of each launch to the start of each work that it submitted.

    The work can begin before the call returns, so the call's start is what holds it back. One graph launch submits all
    the kernels of its graph.

    Args:
        edges: Where to add.
        work: The GPU work.
        first_node: Node of the first segment of each host event.
        work_node: Node of each work.
    """
    known = work.call >= 0
    evidence = np.where(work.correlated[known], "correlated", "measured")
    edges.add(
        "launch", evidence, first_node[work.call[known]], work_node[known], from_end=False, to_end=False, firm=True
    )
