"""What one pass over a graph needs, laid out once: chains of neighbours, cut where something from outside waits."""

from __future__ import annotations

import numpy as np
from msgspec import Struct

from traceloom.array_types import Bools, Ints
from traceloom.model.graph import Graph
from traceloom.model.graph_arrays import array, plain, points
from traceloom.model.points import cycle, layers

_PIECES = 256  # pieces of chains in one slice at most: each is lifted above the last, and 64 bits must hold that
_FEW = 24  # with fewer links than this a slice takes longer in array operations than link by link


class Terms(Struct, frozen=True):
    """What links ask for, as indices: a link's weight is the delay of an edge plus the work of a node.

    Attributes:
        edge: Edge of each link; the number of edges where the link has none.
        node: Node of each link; the number of nodes where the link has none.
    """

    edge: Ints
    node: Ints

    def at(self, index: Ints) -> Terms:
        """The terms of some links."""
        return Terms(plain(self.edge[index]), plain(self.node[index]))


class LayerSlice(Struct, frozen=True):
    """Entries that are evaluated together: those of some pieces of chains, which wait for earlier slices only.

    Attributes:
        low: First entry.
        high: Entry after the last.
        first: First link from outside.
        last: Link after the last.
        source: Entry that each link comes from.
        offset: First link of each entry, counted from `first`.
        few: Whether the slice, or each of the slices that it stands for, has few links.
    """

    low: int
    high: int
    first: int
    last: int
    source: Ints
    offset: Ints
    few: bool


class PassLayout(Struct, frozen=True):
    """The places of a graph (starts of nodes, and ends that wait for something) in the order of evaluation.

    An end that waits for nothing but its node's work is no place: it follows from the start. An entry is a place that
    begins a chain, or waits for something outside it; all other places follow from the entry before them.

    Attributes:
        nodes: Number of nodes.
        start: Place of each node's start.
        end: Place of each node's end; that of its start where the end is no place.
        derived: Whether the end is no place.
        chain: Terms of the link from the place before, per place; none where a piece begins.
        entry: Place of each entry; first those that wait for nothing, then by slices.
        entry_of: The entry at or before each place.
        roots: How many entries wait for nothing.
        piece: Number of each entry's piece within its slice.
        begins: Whether a piece begins with the entry.
        source: Place of each link from outside, by the entry that it holds back.
        source_entry: The entry at or before it.
        target_entry: The entry that it holds back.
        link: Terms of these links.
        offset: First link of each entry, and the number of links.
        slices: In the order of evaluation.
        stretches: The same with neighbours that have few links joined, for going link by link.
    """

    nodes: int
    start: Ints
    end: Ints
    derived: Bools
    chain: Terms
    entry: Ints
    entry_of: Ints
    roots: int
    piece: Ints
    begins: Bools
    source: Ints
    source_entry: Ints
    target_entry: Ints
    link: Terms
    offset: Ints
    slices: list[LayerSlice]
    stretches: list[LayerSlice]


def layout(graph: Graph) -> PassLayout:
    """Lay out a graph.

    Raises:
        InvariantError: `broken-cycle`: nodes wait for each other.
    """
    nodes, edges = graph.nodes.height, graph.edges.height
    source, target = points(graph)
    waits = np.zeros(nodes, dtype=np.bool_, like=source)
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
        np.concatenate([np.arange(edges, like=source), np.full(waiting.size, edges, like=source)]),
        np.concatenate([np.where(from_end & ~waits[of], of, nodes), waiting]),
    )
    chain = np.full(count, -1, dtype=np.int64, like=source)
    neighbours = np.flatnonzero(link_target == link_source + 1)
    chain[link_target[neighbours]] = neighbours
    inner = chain[chain >= 0]
    crosses = np.ones(link_source.size, dtype=np.bool_, like=source)
    crosses[inner] = False
    crossing = np.flatnonzero(crosses)
    layering = layers(chain >= 0, link_source[crossing], link_target[crossing])
    if layering is None:
        raise cycle(nodes, source, target)
    layer: Ints = layering.layer[layering.run]
    order = np.argsort(layer, kind="stable")
    position = np.empty(count, dtype=np.int64, like=source)
    position[order] = np.arange(count, like=source)
    # A chain that goes on in a later layer is cut there: its link becomes one from outside.
    inner = np.flatnonzero(chain >= 0)  # items now
    cut = inner[layer[inner] != layer[inner - 1]]
    outside = np.concatenate([crossing, chain[cut]])
    chain[cut] = -1
    outside = outside[np.argsort(position[link_target[outside]], kind="stable")]
    chain = chain[order]
    is_entry = chain < 0
    is_entry[position[link_target[outside]]] = True
    entry, entry_of = np.flatnonzero(is_entry), np.cumsum(is_entry) - 1
    source_position = position[link_source[outside]]
    source_entry = plain(entry_of[source_position])
    target_entry = entry_of[position[link_target[outside]]]
    begins = chain[entry] < 0
    # What waits for nothing is all that layer 0 has of entries.
    roots = int((layer[order][entry] == 0).sum())
    offset = plain(np.searchsorted(target_entry, np.arange(entry.size + 1, like=source)))
    piece, slices = _slices(layer[order][entry], begins, roots, source_entry, offset)
    none = np.append(terms.edge, edges), np.append(terms.node, nodes)
    return PassLayout(
        nodes=nodes,
        start=plain(position[start]),
        end=plain(position[end]),
        derived=plain(~waits),
        chain=Terms(plain(none[0][chain]), plain(none[1][chain])),
        entry=plain(entry),
        entry_of=plain(entry_of),
        roots=roots,
        piece=plain(piece),
        begins=plain(begins),
        source=plain(source_position),
        source_entry=source_entry,
        target_entry=plain(target_entry),
        link=terms.at(outside),
        offset=offset,
        slices=slices,
        stretches=_stretches(slices),
    )


def _items(graph: Graph, waits: Bools) -> tuple[Ints, Ints]:
    """Number of each start, and of each end that waits (else of its start): by lane, then in the order of time."""
    lane = array(graph, graph.nodes["lane"].cast(int).fill_null(-1))
    start = array(graph, graph.nodes["start_ns"])
    step = np.diff(lane)
    if (step < 0).any() or ((step == 0) & (np.diff(start) < 0)).any():
        order = np.lexsort((start, lane))
    else:
        order = np.arange(lane.size, like=lane)
    items = np.empty(lane.size, dtype=np.int64, like=lane)
    items[order] = np.cumsum(1 + waits[order]) - 1 - waits[order]
    return items, items + waits


def _slices(layer: Ints, begins: Bools, roots: int, source: Ints, offset: Ints) -> tuple[Ints, list[LayerSlice]]:
    """Cut the entries into slices of one layer and few pieces; and the number of each entry's piece in its slice."""
    piece = np.zeros(layer.size, dtype=np.int64, like=layer)
    if roots == layer.size:
        return piece, []
    opens = np.append(True, layer[1:] != layer[:-1])
    number = np.cumsum(begins) - 1
    within = number - np.maximum.accumulate(np.where(opens, number, 0))
    opens |= begins & (within % _PIECES == 0)
    piece[roots:] = within[roots:] % _PIECES
    bounds = np.append(np.flatnonzero(opens[roots:]) + roots, layer.size)
    links = offset[bounds].tolist()
    places = bounds.tolist()
    return piece, [
        LayerSlice(low, high, first, last, source[first:last], offset[low:high] - first, last - first < _FEW)
        for low, high, first, last in zip(places[:-1], places[1:], links[:-1], links[1:], strict=True)
    ]


def _stretches(slices: list[LayerSlice]) -> list[LayerSlice]:
    """The slices with neighbours that have few links joined; only their bounds mean anything then."""
    joined: list[LayerSlice] = []
    for part in slices:
        if part.few and joined and joined[-1].few:
            before = joined[-1]
            joined[-1] = LayerSlice(
                before.low, part.high, before.first, part.last, before.source, before.offset, few=True
            )
        else:
            joined.append(part)
    return joined
