"""Edges of stream order: each work waits for what its stream did before."""

from __future__ import annotations

from itertools import pairwise

import numpy as np

from traceloom.link.device_work import DeviceWork
from traceloom.link.edges import Edges, Ints


def stream_edges(edges: Edges, work: DeviceWork, work_node: Ints) -> int:
    """Order the work of each stream.

    A work starts after the end of the one before it. Where works of one stream overlap, it starts after the start of
    the one it overlaps, and after the end of the last one that had ended; and where it ended after that one, that is
    an order, too: what a programmatic launch lets begin early waits for the end of the work before.

    Returns:
        How many pairs of neighbours overlap.
    """
    size = work.row.size
    before = np.arange(-1, size - 1)
    longest = _longest_before(work)
    follows = before >= 0
    follows[follows] = work.lane[before[follows]] == work.lane[follows]
    rows = np.flatnonzero(follows)
    previous, reaching = before[rows], longest[rows]
    ended = work.end[reaching] <= work.start[rows]  # of one that has not, its neighbours' starts tell
    pairs = np.concatenate([previous, reaching[ended]])
    target = np.concatenate([rows, rows[ended]])
    done = work.end[pairs] <= work.start[target]
    edges.add("stream", "measured", work_node[pairs], work_node[target], from_end=done, to_end=False, firm=True)
    overlaps = work.end[previous] > work.start[rows]
    later = np.flatnonzero(overlaps & (work.end[previous] <= work.end[rows]))
    edges.add(
        "stream", "inferred", work_node[previous[later]], work_node[rows[later]], from_end=True, to_end=True, firm=True
    )
    return int(overlaps.sum())


def _longest_before(work: DeviceWork) -> Ints:
    """For each work the one before it on its stream that ends last; -1 for the first."""
    longest = np.full(work.row.size, -1, dtype=np.int64)
    _, bounds = work.lanes()
    for low, high in pairwise(bounds.tolist()):
        reach = np.maximum.accumulate(work.end[low:high])
        sets = work.end[low:high] >= reach
        holder = np.maximum.accumulate(np.where(sets, np.arange(low, high), -1))
        longest[low + 1 : high] = holder[:-1]
    return longest
