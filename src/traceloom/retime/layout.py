"""What one pass over a graph needs, laid out once: chains of neighbours, cut where something from outside waits."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from traceloom.model.graph import Graph
from traceloom.model.points import cycle, layers

Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]

_PIECES = 256  # pieces of chains in one slice at most; see `Slice`


@dataclass(frozen=True, slots=True)
class Terms:
    """What links ask for, as indices: a link's weight is the delay of an edge plus the work of a node.

    Attributes:
        edge: Edge of each link; the number of edges where the link has none.
        node: Node of each link; the number of nodes where the link has none.
    """

    edge: Ints
    node: Ints

    def at(self, index: Ints) -> Terms:
        """The terms of some links."""
        return Terms(self.edge[index], self.node[index])


@dataclass(frozen=True, slots=True)
class Slice:
    """Places that are evaluated together: pieces of chains, which wait for earlier slices only.

    Attributes:
        low: First place.
        high: Place after the last.
        first: First link from outside.
        last: Link after the last.
        held: First of the places that links from outside hold back, as position in `Layout.held`.
        held_last: Position after the last of them.
    """

    low: int
    high: int
    first: int
    last: int
    held: int
    held_last: int


@dataclass(frozen=True, slots=True)
class Layout:
    """The places of a graph (starts of nodes, and ends that wait for something) in the order of evaluation.

    An end that waits for nothing but its node's work is no place: it follows from the start.

    Attributes:
        nodes: Number of nodes.
        start: Place of each node's start.
        end: Place of each node's end; that of its start where the end is no place.
        derived: Whether the end is no place.
        chain: Terms of the link from the place before, per place; none where a piece begins.
        piece: Number of each place's piece within its slice.
        source: Place of each link from outside.
        link: Terms of these links.
        held: Places that links from outside hold back, ascending.
        offset: First link of each such place.
        roots: Places that nothing holds back.
        slices: In the order of evaluation.
    """

    nodes: int
    start: Ints
    end: Ints
    derived: Bools
    chain: Terms
    piece: Ints
    source: Ints
    link: Terms
    held: Ints
    offset: Ints
    roots: Ints
    slices: list[Slice]


def layout(graph: Graph) -> Layout:
    """Lay out a graph.

    Raises:
        InvariantError: `broken-cycle`: nodes wait for each other.
    """
    nodes, edges = graph.nodes.height, graph.edges.height
    source, target = graph.points()
    waits = np.zeros(nodes, dtype=np.bool_)
    waits[target[target % 2 == 1] // 2] = True
    start, end = _items(graph, waits)
    count = nodes + int(waits.sum())
    # Links: those of the edges, then from start to end of every node whose end is an item of its own.
    of, to = source // 2, target // 2
    from_end, to_end = source % 2 == 1, target % 2 == 1
    waiting = np.flatnonzero(waits)
    link_source = np.concatenate([np.where(from_end & waits[of], end[of], start[of]), start[waiting]])
    link_target = np.concatenate([np.where(to_end, end[to], start[to]), end[waiting]])
    terms = Terms(
        np.concatenate([np.arange(edges), np.full(waiting.size, edges)]),
        np.concatenate([np.where(from_end & ~waits[of], of, nodes), waiting]),
    )
    chain = np.full(count, -1, dtype=np.int64)
    neighbours = np.flatnonzero(link_target == link_source + 1)
    chain[link_target[neighbours]] = neighbours
    inner = chain[chain >= 0]
    crossing = np.delete(np.arange(link_source.size), inner)
    found = layers(chain >= 0, link_source[crossing], link_target[crossing])
    if found is None:
        raise cycle(nodes, source, target)
    layer: Ints = found.layer[found.run]
    order = np.argsort(layer, kind="stable")
    place = np.empty(count, dtype=np.int64)
    place[order] = np.arange(count)
    # A chain that goes on in a later layer is cut there: its link becomes one from outside.
    inner = np.flatnonzero(chain >= 0)  # items now
    cut = inner[layer[inner] != layer[inner - 1]]
    outside = np.concatenate([crossing, chain[cut]])
    chain[cut] = -1
    outside = outside[np.argsort(place[link_target[outside]], kind="stable")]
    held, offset = np.unique(place[link_target[outside]], return_index=True)
    chain = chain[order]
    begins = chain < 0
    piece, slices = _slices(layer[order], begins, held, offset, outside.size)
    rooted = begins.copy()
    rooted[held] = False
    none = np.append(terms.edge, edges), np.append(terms.node, nodes)
    return Layout(
        nodes=nodes,
        start=place[start],
        end=place[end],
        derived=~waits,
        chain=Terms(none[0][chain], none[1][chain]),
        piece=piece,
        source=place[link_source[outside]],
        link=terms.at(outside),
        held=held,
        offset=offset,
        roots=np.flatnonzero(rooted),
        slices=slices,
    )


def _items(graph: Graph, waits: Bools) -> tuple[Ints, Ints]:
    """Number of each start, and of each end that waits (else of its start): by lane, then in the order of time."""
    lane = graph.nodes["lane"].cast(int).fill_null(-1).to_numpy()
    start = graph.nodes["start_ns"].to_numpy()
    step = np.diff(lane)
    if (step < 0).any() or ((step == 0) & (np.diff(start) < 0)).any():
        order = np.lexsort((start, lane))
    else:
        order = np.arange(lane.size)
    items = np.empty(lane.size, dtype=np.int64)
    items[order] = np.cumsum(1 + waits[order]) - 1 - waits[order]
    return items, items + waits


def _slices(layer: Ints, begins: Bools, held: Ints, offset: Ints, links: int) -> tuple[Ints, list[Slice]]:
    """Cut the places into slices of one layer and few pieces; and the number of each place's piece in its slice."""
    if not layer.size:
        return layer, []
    opens = np.append(True, layer[1:] != layer[:-1])
    number = np.cumsum(begins) - 1
    piece = number - np.maximum.accumulate(np.where(opens, number, 0))
    opens |= begins & (piece % _PIECES == 0)
    low = np.flatnonzero(opens)
    bounds = np.append(low, layer.size)
    at = np.searchsorted(held, bounds)
    link = np.append(offset, links)[at]
    rows = zip(
        bounds[:-1].tolist(), bounds[1:].tolist(), link[:-1].tolist(), link[1:].tolist(), at[:-1].tolist(),
        at[1:].tolist(), strict=True,
    )  # fmt: skip
    return piece % _PIECES, [Slice(*row) for row in rows]
