"""Launches that found the queue of their stream full: they return when earlier work ends."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from traceloom.link.device_work import DeviceWork
from traceloom.link.edges import Edges
from traceloom.link.host_tree import HostTree

Ints = NDArray[np.int64]

_DEEP = 900  # launches that are pending when a queue is full (about 1,022 on CUDA)
_LONGER_NS = 8_000  # a launch that is longer than others of its name by this, and this many times, was held up
_TIMES = 2.5
_CERTAIN = 0.95  # of the launches into a deep queue must keep to what it is said to hold
_AT_ONCE_NS = 100_000  # it returns this soon after the work that made room
_CLOCK_NS = 2_000


def queue_edges(edges: Edges, tree: HostTree, work: DeviceWork, last_node: Ints, work_node: Ints) -> int:
    """From the end of the work that makes room to the end of the launch that needs it.

    How much a queue holds is taken from the launches that were held up. Where none was, it is not known, and there
    are no edges. Launches that found room wait for the work which, by that count, made it, as long as the launches
    keep to that count.

    Args:
        edges: Where to add.
        tree: Host events.
        work: GPU work.
        last_node: Node of the last segment of each host event.
        work_node: Node of each work.

    Returns:
        How many launches were held up.
    """
    # work whose call submitted nothing else: graph launches have a cost of their own
    alone = work.call >= 0
    alone[alone] = np.bincount(work.call[alone])[work.call[alone]] == 1
    held_up = 0
    _, bounds = work.lanes()
    for low, high in pairwise(bounds.tolist()):
        at = np.arange(low, high)
        at = at[np.argsort(work.asked[low:high], kind="stable")]  # in the order of launches
        ends = np.maximum.accumulate(np.sort(work.end[low:high]))
        by_end = at[np.argsort(work.end[at], kind="stable")]
        number = np.flatnonzero(alone[at])
        launch = work.call[at[number]]
        returned, span = tree.end[launch], tree.span()[launch]
        done = np.searchsorted(ends, returned + _CLOCK_NS, side="right")
        pending = number + 1 - done
        freed = np.where(done > 0, ends[np.maximum(done - 1, 0)], np.iinfo(np.int64).min)
        deep = pending >= _DEEP
        if not deep.any():
            continue
        usual = _usual_ns(tree, launch, launch if deep.all() else launch[~deep])
        held = deep & (span >= np.maximum(usual + _LONGER_NS, _TIMES * usual))
        held &= (returned - freed <= _AT_ONCE_NS) & (freed > tree.start[launch])
        if not held.any():
            continue
        held_up += int(held.sum())
        counts, often = np.unique(pending[held], return_counts=True)
        holds = int(counts[::-1][often[::-1].argmax()])
        keeps = (pending[deep] <= holds + 1).mean() >= _CERTAIN
        maker = np.where(held, done - 1, number - holds)
        valid = (maker >= 0) & (held | keeps)
        maker = np.where(valid, by_end[np.maximum(maker, 0)], 0)
        valid &= work.end[maker] <= returned + _CLOCK_NS
        edges.add("queue", "inferred", work_node[maker[valid]], last_node[launch[valid]], from_end=True, to_end=True)
    return held_up


def _usual_ns(tree: HostTree, launch: Ints, sample: Ints) -> Ints:
    """For each launch the median duration of the launches of its name in a sample; 0 for names without any."""
    codes = tree.word[np.concatenate([launch, sample])]
    spans = tree.span()[sample]
    sampled = codes[launch.size :]
    order = np.lexsort((spans, sampled))
    usual = np.zeros(int(codes.max(initial=0)) + 1, dtype=np.int64)
    bounds = np.flatnonzero(np.diff(sampled[order], prepend=0, append=0))
    for low, high in pairwise(bounds.tolist()):
        usual[sampled[order[low]]] = spans[order[(low + high) // 2]]
    per_launch: Ints = usual[codes[: launch.size]]
    return per_launch
