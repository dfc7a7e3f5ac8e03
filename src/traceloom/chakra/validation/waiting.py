"""Who waits for whom: dependencies as rows, an order that honours them, and the circles that leave none."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from traceloom.array_types import Bools, Ints
from traceloom.chakra.node_table import NodeTable


@dataclass(frozen=True, slots=True)
class Arcs:
    """Dependencies between nodes that exist: row `target` waits for row `source`."""

    source: Ints
    target: Ints

    def __add__(self, other: Arcs) -> Arcs:
        return Arcs(np.concatenate([self.source, other.source]), np.concatenate([self.target, other.target]))


@dataclass(frozen=True, slots=True)
class Resolved:
    """The dependencies of a file, looked up.

    Attributes:
        data: Data dependencies between different nodes of the file.
        control: Control dependencies between different nodes of the file.
        own: Rows of nodes whose data dependencies name themselves.
        own_control: Rows of nodes whose control dependencies do.
        dangling: (row, id) of data dependencies on ids that no node has.
        dangling_control: The same of control dependencies.
    """

    data: Arcs
    control: Arcs
    own: Ints
    own_control: Ints
    dangling: tuple[Ints, NDArray[np.uint64]]
    dangling_control: tuple[Ints, NDArray[np.uint64]]


def resolve(table: NodeTable) -> Resolved:
    """Look up the ids that the nodes of a file wait for; of nodes with equal ids the first one counts."""
    ids = table.nodes["id"].to_numpy()
    by_id = np.argsort(ids, kind="stable")
    arcs, own, dangling = [], [], []
    for dependencies in (table.data, table.control):
        row, awaited = dependencies.row, dependencies.id
        source = row
        lost = np.zeros(len(row), np.bool_)
        if len(row):
            source = by_id[np.minimum(np.searchsorted(ids, awaited, sorter=by_id), len(ids) - 1)].astype(np.int64)
            lost = ids[source] != awaited
        dangling.append((row[lost], awaited[lost]))
        source, row = source[~lost], row[~lost]
        same = source == row
        arcs.append(Arcs(source[~same], row[~same]))
        own.append(np.unique(row[same]))
    return Resolved(arcs[0], arcs[1], own[0], own[1], dangling[0], dangling[1])


@dataclass(frozen=True, slots=True)
class Settled:
    """An order in which every node comes after what it waits for.

    Attributes:
        order: Rows of all nodes that can start; among those that are ready at once, mostly by their keys.
        stuck: Whether each node never starts.
    """

    order: Ints
    stuck: Bools


def settle(count: int, arcs: Arcs, key: Ints, held: Ints | None = None) -> Settled:
    """Order `count` nodes by their dependencies.

    Args:
        count: Number of nodes.
        arcs: The dependencies.
        key: Where they already point from lower to higher keys, the keys are the order, at no cost.
        held: Rows that never start whatever happens, as they wait for what does not exist.
    """
    if (held is None or not len(held)) and (key[arcs.source] < key[arcs.target]).all():
        return Settled(np.argsort(key, kind="stable"), np.zeros(count, dtype=bool))
    by_source = np.argsort(arcs.source, kind="stable")
    follower = arcs.target[by_source].tolist()
    first: Any = np.concatenate([[0], np.cumsum(np.bincount(arcs.source, minlength=count))]).tolist()
    waits_of = np.bincount(arcs.target, minlength=count)
    if held is not None:
        waits_of[held] += 1
    waits: Any = waits_of.tolist()
    ready = [row for row in np.argsort(-key, kind="stable").tolist() if not waits[row]]
    order: list[int] = []
    while ready:
        row = ready.pop()
        order.append(row)
        for behind in follower[first[row] : first[row + 1]]:
            waits[behind] -= 1
            if not waits[behind]:
                ready.append(behind)
    return Settled(np.array(order, dtype=np.int64), np.array(waits, dtype=np.int64) > 0)


def circles(arcs: Arcs, stuck: Bools) -> list[list[int]]:
    """Circles among nodes that never start: in each, every row waits for the next one, and the last for the first.

    From every stuck node, one wait is followed until a row repeats: linear time, and one circle for every group of
    nodes that wait only for each other.
    """
    inside = stuck[arcs.source] & stuck[arcs.target]
    awaited = np.full(len(stuck), -1, dtype=np.int64)
    awaited[arcs.target[inside]] = arcs.source[inside]
    next_of = awaited.tolist()
    walk = np.zeros(len(stuck), dtype=np.int64).tolist()  # the walk on which a row was met first; 0 for none
    rings: list[list[int]] = []
    for number, begin in enumerate(np.flatnonzero(stuck).tolist(), start=1):
        row = begin
        while row >= 0 and not walk[row]:
            walk[row] = number
            row = next_of[row]
        if row >= 0 and walk[row] == number:
            circle = [row]
            while next_of[circle[-1]] != row:
                circle.append(next_of[circle[-1]])
            rings.append(circle)
    return rings
