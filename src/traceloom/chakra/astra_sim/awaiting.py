"""What a unit waits for when some units are left out: of every lane, the last kept unit that must have ended.

A lane is a queue: who waits for its k-th unit waits for all before it. So the units that must have ended before a point
are one position per lane, and a point with one predecessor shares what that one knows.
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
_Known = dict[int, int]  # lane -> last unit of it that must have ended
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
    """The dependencies between the kept units, through those that are left out.

    Args:
        units: All units.
        kept: Which of them become nodes.
    """
    count = units.frame.height
    lane = units.frame["lane"].fill_null(2**31).cast(int).to_numpy()
    same = np.flatnonzero(lane[1:] == lane[:-1])
    source = np.concatenate([units.source * 2 + units.from_end, same * 2 + 1])
    target = np.concatenate([units.target * 2 + units.to_end, same * 2 + 2])
    queue = np.concatenate([np.zeros(len(units.source), np.bool_), np.ones(len(same), np.bool_)])
    source, target, queue = _forward(count, source, target, queue)
    order = topological(count, source, target)
    found = _walk(order, source, target, lane.tolist(), kept.tolist())
    pairs_target = np.repeat(np.arange(count), [len(known) for known in found])
    pairs_source = np.fromiter((unit for known in found for unit in known.values()), np.int64, len(pairs_target))
    overlap = units.frame["end_ns"].to_numpy()[pairs_source] > units.frame["start_ns"].to_numpy()[pairs_target]
    queued = overlap & (lane[pairs_source] == lane[pairs_target])
    return Awaited(pairs_target, pairs_source, queued, order[order % 2 == 0] // 2)


def _forward(count: int, source: Ints, target: Ints, queue: Flags) -> tuple[Ints, Ints, Flags]:
    """The edges; where the queue of a lane would close a circle, the queue gives way."""
    try:
        topological(count, source, target)
    except InvariantError:
        return source[~queue], target[~queue], queue[~queue]
    return source, target, queue


def _walk(order: Ints, source: Ints, target: Ints, lane: list[int], kept: list[bool]) -> list[_Known]:
    """For every unit: of each lane, the last kept unit that must have ended before it starts."""
    by_target = np.argsort(target, kind="stable")
    before = source[by_target].tolist()
    first = np.searchsorted(target[by_target], np.arange(2 * len(lane) + 1)).tolist()
    known: list[_Known] = [_NOTHING] * (2 * len(lane))
    for point in order.tolist():
        unit = point >> 1
        found = known[point - 1] if point & 1 else _NOTHING
        if point & 1 and kept[unit]:
            found = {lane[unit]: unit}
        for other in before[first[point] : first[point + 1]]:
            found = _latest(found, known[other])
        known[point] = found
    return [known[2 * unit] if kept[unit] else _NOTHING for unit in range(len(lane))]


def _latest(one: _Known, other: _Known) -> _Known:
    """Of each lane the later unit; one of the two itself where it says it all."""
    if not other or one is other:
        return one
    if not one:
        return other
    both = one
    for lane, unit in other.items():
        if both.get(lane, -1) < unit:
            if both is one:
                both = dict(one)
            both[lane] = unit
    return both
