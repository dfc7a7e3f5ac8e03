"""What a unit waits for when some units are left out: of every chain, the last kept unit that must have ended.

Threads and streams are queues: who waits for the k-th unit waits for all before it. Elsewhere units that wait for each
other one after the other make chains, with the same property. So the units that must have ended before a point are one
per chain, and a point with one predecessor shares what that one knows.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from traceloom.chakra.astra_sim.units import Units
from traceloom.errors import InvariantError
from traceloom.model.points import topological

Ints = NDArray[np.int64]
Flags = NDArray[np.bool_]
_Known = dict[int, int]  # chain -> place in the order, of its last unit that must have ended
_NOTHING: _Known = {}


@dataclass(frozen=True, slots=True)
class Awaited:
    """Pairs of kept units: `target` (ascending) starts after the end of `source`; no pair twice.

    Attributes:
        target: Unit.
        source: Unit.
        queued: Whether nothing but the queue of its lane says so, where the measured work overlapped.
        order: All units in an order in which each comes after what it waits for.
    """

    target: Ints
    source: Ints
    queued: Flags
    order: Ints


def awaited(units: Units, kept: Flags) -> Awaited:
    """The dependencies between kept units, including those that pass through dropped units.

    Args:
        units: All units.
        kept: Which of them become nodes.
    """
    count = units.frame.height
    lane = units.frame["lane"].fill_null(-1).cast(int).to_numpy()
    same = np.flatnonzero((lane[1:] == lane[:-1]) & np.isin(lane[1:], units.queues))
    source = np.concatenate([units.source * 2 + units.from_end, same * 2 + 1])
    target = np.concatenate([units.target * 2 + units.to_end, same * 2 + 2])
    try:
        order = topological(count, source, target)
    except InvariantError:  # the queue of a lane would close a circle: the queues give way
        source, target = source[: len(units.source)], target[: len(units.source)]
        order = topological(count, source, target)
    position = np.empty(2 * count, np.int64)
    position[order] = np.arange(2 * count)
    position = position[0::2]  # of the starts: later in a chain is later in the order
    queue_of = np.where(np.isin(lane, units.queues), lane, -1)
    chain = _chains(order, source, target, kept, queue_of)
    latest = _walk(order, source, target, _Chained(chain, position.tolist(), kept.tolist()))
    unit_at = np.empty(2 * count, np.int64)
    unit_at[position] = np.arange(count)
    pairs_target = np.repeat(np.arange(count), [len(by_chain) for by_chain in latest])
    pairs_source = unit_at[
        np.fromiter((at for by_chain in latest for at in by_chain.values()), np.int64, len(pairs_target))
    ]
    overlap = units.frame["end_ns"].to_numpy()[pairs_source] > units.frame["start_ns"].to_numpy()[pairs_target]
    queued = overlap & (lane[pairs_source] == lane[pairs_target]) & np.isin(lane[pairs_target], units.queues)
    return Awaited(pairs_target, pairs_source, queued, order[order % 2 == 0] // 2)


@dataclass(frozen=True, slots=True)
class _Chained:
    """Of each unit: its chain, its place in the order, whether it is kept."""

    chain: list[int]
    place: list[int]
    kept: list[bool]


def _chains(order: Ints, source: Ints, target: Ints, kept: Flags, queue_of: Ints) -> list[int]:
    """A chain for every unit: its queue; elsewhere that of a unit that it directly waits for, if that is its end.

    Args:
        order: All points in topological order.
        source: Point that is waited for, per edge.
        target: Point that waits.
        kept: Which units are kept.
        queue_of: The lane of units on queues, -1 elsewhere.
    """
    direct = (source & 1).astype(bool) & ~(target & 1).astype(bool) & kept[source >> 1] & kept[target >> 1]
    direct &= (queue_of[source >> 1] < 0) & (queue_of[target >> 1] < 0)
    by_target = np.flatnonzero(direct)[np.argsort(target[direct], kind="stable")]
    before = (source[by_target] >> 1).tolist()
    first = np.searchsorted(target[by_target] >> 1, np.arange(len(kept) + 1)).tolist()
    own = np.arange(len(kept)) + queue_of.max(initial=-1) + 1
    chain: list[int] = np.where(queue_of >= 0, queue_of, own).tolist()
    goes_on = [False] * len(kept)
    for point in order[order % 2 == 0].tolist() if len(before) else []:
        unit = point >> 1
        for other in before[first[unit] : first[unit + 1]]:
            if not goes_on[other]:
                goes_on[other] = True
                chain[unit] = chain[other]
                break
    return chain


def _walk(order: Ints, source: Ints, target: Ints, units: _Chained) -> list[_Known]:
    """For every unit and each chain: the last kept unit that must have ended before the unit starts."""
    chain, position, kept = units.chain, units.place, units.kept
    by_target = np.argsort(target, kind="stable")
    before = source[by_target].tolist()
    first = np.searchsorted(target[by_target], np.arange(2 * len(kept) + 1)).tolist()
    latest: list[_Known] = [_NOTHING] * (2 * len(kept))
    for point in order.tolist():
        unit = point >> 1
        by_chain = latest[point - 1] if point & 1 else _NOTHING
        if point & 1 and kept[unit]:
            by_chain = {chain[unit]: position[unit]}
        for other in before[first[point] : first[point + 1]]:
            by_chain = _latest(by_chain, latest[other])
        latest[point] = by_chain
    return [latest[2 * unit] if kept[unit] else _NOTHING for unit in range(len(kept))]


def _latest(current: _Known, other: _Known) -> _Known:
    """For each chain, the later unit of the two; an input itself is returned where it already has them all."""
    if not other or current is other:
        return current
    if not current:
        return other
    both = current
    for chain, position in other.items():
        if both.get(chain, -1) < position:
            if both is current:
                both = dict(current)
            both[chain] = position
    return both
