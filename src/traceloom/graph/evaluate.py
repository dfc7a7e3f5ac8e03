"""Evaluation of a graph: its layout for fast passes, and new times of its points from works and
delays.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
from msgspec import Struct
from numpy.typing import ArrayLike, NDArray

from traceloom.errors import UsageError
from traceloom.graph.calibrate import class_delays, scale_overlap
from traceloom.graph.graph import (
    Graph,
    allocate_matrix,
    build_cycle_error,
    get_column_array,
    get_edge_points,
    is_large,
    sort_into_layers,
    unwrap_array,
)
from traceloom.trace.array_types import Bools, Ints

# Pieces of chains in one slice at most: each is lifted above the last, and 64 bits must hold that
_MAX_PIECES = 256
# With fewer links than this a slice takes longer in array operations than link by link
_MAX_SCALAR_LINKS = 24


class LinkTerms(Struct, frozen=True):
    """The weight of each link as indices: the delay of an edge plus the work of a node.

    Attributes:
        edge: Edge of each link; the number of edges where the link has none.
        node: Node of each link; the number of nodes where the link has none.
    """

    edge: Ints
    node: Ints

    def at(self, index: Ints) -> LinkTerms:
        return LinkTerms(unwrap_array(self.edge[index]), unwrap_array(self.node[index]))


class LayerSlice(Struct, frozen=True):
    """Entries that are evaluated together: those of some pieces of chains, which depend on earlier
    slices only.

    Attributes:
        low: First entry.
        high: Entry after the last.
        first: First link from outside.
        last: Link after the last.
        source: Entry that each link comes from.
        offset: First link of each entry, counted from `first`.
        few: Whether the slice, or each of the slices that it joins, has few links.
    """

    low: int
    high: int
    first: int
    last: int
    source: Ints
    offset: Ints
    few: bool


class PassLayout(Struct, frozen=True):
    """The places of a graph (starts of nodes, and ends that wait for something) in the order of
    evaluation.

    An end that waits for nothing but its node's work is not a place: it follows from the start. An
    entry is a place that begins a chain, or waits for something outside it; all other places follow
    from the entry before them.

    Attributes:
        nodes: Number of nodes.
        start: Place of each node's start.
        end: Place of each node's end; that of its start where the end is not a place.
        derived: Whether the end is not a place.
        chain: Terms of the link from the place before, per place; none where a piece begins.
        entry: Place of each entry; first those that wait for nothing, then by slices.
        entry_of: The entry at or before each place.
        roots: How many entries wait for nothing.
        piece: Number of each entry's piece within its slice.
        begins: Whether a piece begins with the entry.
        source: Place of each link from outside, by the entry that it holds back.
        source_entry: The entry at or before that place.
        target_entry: The entry that the link holds back.
        link: Terms of these links.
        offset: First link of each entry, and the number of links.
        slices: In the order of evaluation.
        stretches: The same with neighbours that have few links joined, for evaluation link by link.
    """

    nodes: int
    start: Ints
    end: Ints
    derived: Bools
    chain: LinkTerms
    entry: Ints
    entry_of: Ints
    roots: int
    piece: Ints
    begins: Bools
    source: Ints
    source_entry: Ints
    target_entry: Ints
    link: LinkTerms
    offset: Ints
    slices: list[LayerSlice]
    stretches: list[LayerSlice]


def build_pass_layout(graph: Graph) -> PassLayout:
    """Lays out a graph.

    Raises:
        InvariantError: `broken-cycle`: nodes wait for each other.
    """
    nodes, edges = graph.nodes.height, graph.edges.height
    source, target = get_edge_points(graph)
    waits = np.zeros(nodes, dtype=np.bool_, like=source)
    waits[target[target % 2 == 1] // 2] = True
    start, end = _assign_item_numbers(graph, waits)
    count = nodes + int(waits.sum())
    # Links: those of the edges, then from start to end of every node whose end is an item of its
    # own.
    from_node, to = source // 2, target // 2
    from_end, to_end = source % 2 == 1, target % 2 == 1
    waiting = np.flatnonzero(waits)
    link_source = np.concatenate(
        [np.where(from_end & waits[from_node], end[from_node], start[from_node]), start[waiting]]
    )
    link_target = np.concatenate([np.where(to_end, end[to], start[to]), end[waiting]])
    terms = LinkTerms(
        np.concatenate([np.arange(edges, like=source), np.full(waiting.size, edges, like=source)]),
        np.concatenate([np.where(from_end & ~waits[from_node], from_node, nodes), waiting]),
    )
    chain = np.full(count, -1, dtype=np.int64, like=source)
    neighbours = np.flatnonzero(link_target == link_source + 1)
    chain[link_target[neighbours]] = neighbours
    inner = chain[chain >= 0]
    crosses = np.ones(link_source.size, dtype=np.bool_, like=source)
    crosses[inner] = False
    crossing = np.flatnonzero(crosses)
    layering = sort_into_layers(chain >= 0, link_source[crossing], link_target[crossing])
    if layering is None:
        raise build_cycle_error(nodes, source, target)
    layer: Ints = layering.layer[layering.run]
    order = np.argsort(layer, kind="stable")
    position = np.empty(count, dtype=np.int64, like=source)
    position[order] = np.arange(count, like=source)
    # A chain that goes on in a later layer is cut there: its link becomes one from outside.
    inner = np.flatnonzero(chain >= 0)  # items now
    cut = inner[layer[inner] != layer[inner - 1]]
    outer_links = np.concatenate([crossing, chain[cut]])
    chain[cut] = -1
    outer_links = outer_links[np.argsort(position[link_target[outer_links]], kind="stable")]
    chain = chain[order]
    is_entry = chain < 0
    is_entry[position[link_target[outer_links]]] = True
    entry, entry_of = np.flatnonzero(is_entry), np.cumsum(is_entry) - 1
    source_position = position[link_source[outer_links]]
    source_entry = unwrap_array(entry_of[source_position])
    target_entry = entry_of[position[link_target[outer_links]]]
    starts_chain = chain[entry] < 0
    # Layer 0 holds exactly the entries that wait for nothing.
    roots = int((layer[order][entry] == 0).sum())
    offset = unwrap_array(np.searchsorted(target_entry, np.arange(entry.size + 1, like=source)))
    piece_number, slices = _cut_into_slices(
        layer[order][entry], starts_chain, roots, source_entry, offset
    )
    none = np.append(terms.edge, edges), np.append(terms.node, nodes)
    return PassLayout(
        nodes=nodes,
        start=unwrap_array(position[start]),
        end=unwrap_array(position[end]),
        derived=unwrap_array(~waits),
        chain=LinkTerms(unwrap_array(none[0][chain]), unwrap_array(none[1][chain])),
        entry=unwrap_array(entry),
        entry_of=unwrap_array(entry_of),
        roots=roots,
        piece=unwrap_array(piece_number),
        begins=unwrap_array(starts_chain),
        source=unwrap_array(source_position),
        source_entry=source_entry,
        target_entry=unwrap_array(target_entry),
        link=terms.at(outer_links),
        offset=offset,
        slices=slices,
        stretches=_merge_small_slices(slices),
    )


def _assign_item_numbers(graph: Graph, waits: Bools) -> tuple[Ints, Ints]:
    """Returns the number of each start, and of each end that waits (else that of its start): by
    lane, then by time.
    """
    lane = get_column_array(graph, graph.nodes["lane"].cast(int).fill_null(-1))
    start = get_column_array(graph, graph.nodes["start_ns"])
    step = np.diff(lane)
    if (step < 0).any() or ((step == 0) & (np.diff(start) < 0)).any():
        order = np.lexsort((start, lane))
    else:
        order = np.arange(lane.size, like=lane)
    items = np.empty(lane.size, dtype=np.int64, like=lane)
    items[order] = np.cumsum(1 + waits[order]) - 1 - waits[order]
    return items, items + waits


def _cut_into_slices(
    layer: Ints, starts_chain: Bools, roots: int, source: Ints, offset: Ints
) -> tuple[Ints, list[LayerSlice]]:
    """Cuts the entries into slices of one layer and few pieces; also returns the number of each
    entry's piece in its slice.
    """
    piece_number = np.zeros(layer.size, dtype=np.int64, like=layer)
    if roots == layer.size:
        return piece_number, []
    opens = np.append(True, layer[1:] != layer[:-1])
    number = np.cumsum(starts_chain) - 1
    within = number - np.maximum.accumulate(np.where(opens, number, 0))
    opens |= starts_chain & (within % _MAX_PIECES == 0)
    piece_number[roots:] = within[roots:] % _MAX_PIECES
    bounds = np.append(np.flatnonzero(opens[roots:]) + roots, layer.size)
    links = offset[bounds].tolist()
    offsets = bounds.tolist()
    return piece_number, [
        LayerSlice(
            low,
            high,
            first,
            last,
            source[first:last],
            offset[low:high] - first,
            last - first < _MAX_SCALAR_LINKS,
        )
        for low, high, first, last in zip(
            offsets[:-1], offsets[1:], links[:-1], links[1:], strict=True
        )
    ]


def _merge_small_slices(slices: list[LayerSlice]) -> list[LayerSlice]:
    """Joins neighbouring slices that have few links; of the result only the bounds have a
    meaning.
    """
    joined: list[LayerSlice] = []
    for part in slices:
        if part.few and joined and joined[-1].few:
            before = joined[-1]
            joined[-1] = LayerSlice(
                before.low,
                part.high,
                before.first,
                part.last,
                before.source,
                before.offset,
                few=True,
            )
        else:
            joined.append(part)
    return joined


_MIN_TIME = int(np.iinfo(np.int64).min)
ABSENT = -(2**61)  # as delay of an edge: it holds nothing back
_ABSENT_LIMIT = ABSENT // 2  # residuals have been added
_BATCH_SCENARIOS = 8  # scenarios that go through the slices together
_MAX_SMALL_NODES = 50_000  # where there are fewer nodes than this
_MAX_NODES_PER_SLICE = 200  # or than this in a slice
MAX_DURATION_NS = 2**53  # ns; 256 pieces of a slice this far apart are within int64


class Plan:
    """A graph prepared for many passes.

    The time of a point is the latest of what it waits for: `time(source) + delay` over its edges
    and, for the end of a node, `time(start) + work`. Points that wait for nothing keep their
    measured time. All times are integers.

    Args:
        graph: Any graph without a cycle, calibrated or not.

    Raises:
        InvariantError: `broken-cycle`: nodes wait for each other.
    """

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self._layout: PassLayout = build_pass_layout(graph)
        self._large = is_large(graph)
        times = np.zeros(self._layout.entry_of.size, dtype=np.int64)
        times[self._layout.start] = graph.nodes["start_ns"].to_numpy()
        self._roots: Ints = times[self._layout.entry[: self._layout.roots]]
        self._constants: Ints | None = None

    @property
    def slices(self) -> int:
        return len(self._layout.slices)

    @property
    def constants(self) -> Ints:
        """The calibrated delay of each edge's class, whatever the edge itself showed; shape
        (edges,), ns.
        """
        if self._constants is None:
            self._constants = class_delays(self.graph)
        return self._constants

    def evaluate(
        self,
        work_ns: ArrayLike | None = None,
        delay_ns: ArrayLike | None = None,
        *,
        residuals: bool = True,
    ) -> Ints:
        """Returns new times of all points.

        Shapes: N nodes, E edges, S scenarios.

        Where the next work of a stream starts while one still runs, it starts after a fraction of
        that work, not after a fixed time: with other works the delays of these edges change in
        proportion.

        Args:
            work_ns: Work of each node, (N,) or (S, N); as in the graph where not given.
            delay_ns: Delay of each edge without its residual, (E,) or (S, E); `ABSENT` for an edge
                to leave out. Where not given: with residuals the graph's delays, without residuals
                the constants of the edges' classes.
            residuals: Whether to add the residuals. With them the times of a calibrated graph are
                the measured ones to the nanosecond.

        Returns:
            Times in ns, int64, of points 2i (start of node i) and 2i + 1 (its end): (2N,), or (S,
            2N) where one of the arguments has scenarios.

        Raises:
            UsageError: `wrong-shape`: an argument fits neither the nodes nor the edges.
        """
        nodes, edges = self.graph.nodes, self.graph.edges
        work = (
            nodes["work_ns"].to_numpy()
            if work_ns is None
            else _convert_to_integers(work_ns, nodes.height, "work_ns")
        )
        if delay_ns is not None:
            delay = _convert_to_integers(delay_ns, edges.height, "delay_ns")
        else:
            delay = edges["delay_ns"].to_numpy() if residuals else self.constants
        if residuals:
            work = work + nodes["residual_ns"].to_numpy()
            delay = delay + edges["residual_ns"].to_numpy()
        is_single = work.ndim == delay.ndim == 1
        work, delay = np.atleast_2d(work), np.atleast_2d(delay)
        if work_ns is not None:
            delay = scale_overlap(self.graph, work, delay)
        times = self._times(work, delay)
        return times[0] if is_single else times

    def _times(self, work: Ints, delay: Ints) -> Ints:
        """Returns the times of all points, (S, 2N), for exactly these works and delays, (S or 1, N)
        and (S or 1, E).
        """
        nodes = self.graph.nodes
        scenarios = max(work.shape[0], delay.shape[0])
        times = allocate_matrix(scenarios, 2 * nodes.height, large=self._large)
        # Scenarios evaluated together share the fixed cost of each slice; separate ones stay within
        # the caches.
        batch_size = (
            _BATCH_SCENARIOS
            if nodes.height < max(_MAX_SMALL_NODES, _MAX_NODES_PER_SLICE * self.slices)
            else 1
        )
        for low in range(0, scenarios, batch_size):
            rows = slice(low, low + batch_size)
            work_rows, delay_rows = (
                part[rows] if part.shape[0] > 1 else part for part in (work, delay)
            )
            self._pass(work_rows, delay_rows, times[rows])
        if not delay.size or delay.min() >= _ABSENT_LIMIT:
            return times
        _, target = get_edge_points(self.graph)
        for row in range(scenarios):
            row_delay = delay[row % len(delay)]
            absent = row_delay < _ABSENT_LIMIT
            edge_count = np.bincount(target[~absent], minlength=times.shape[1])
            # Where an absent edge was all that held a point, that point now waits for nothing: the
            # graph is evaluated anew.
            if (edge_count[target[absent & (target % 2 == 0)]] == 0).any():
                present = np.flatnonzero(~absent)
                reduced = Plan(replace(self.graph, edges=self.graph.edges[present]))
                times[row] = reduced._times(
                    work[row % len(work)][np.newaxis], row_delay[np.newaxis, present]
                )[0]
        return times

    def _pass(self, work: Ints, delay: Ints, points: Ints) -> None:
        """Fills in the times of all points; all arguments have a row per scenario, or one for
        all.
        """
        plan = self._layout
        work, delay = self._padded(work), self._padded(delay)
        absent = delay < _ABSENT_LIMIT
        delay[absent] = 0
        # No two times, and no sums along pieces, are further apart than this. Computed as doubles,
        # which do not wrap around, and are exact within the accepted range.
        max_reach = sum(
            int(np.abs(part).sum(axis=1, dtype=np.float64).max()) for part in (work, delay)
        )
        max_reach += int(self._roots.max()) - int(self._roots.min()) if self._roots.size else 0
        never = -4 * max_reach - 1  # never the latest, as long as anything else holds that point
        max_reach -= never * int(absent.sum(axis=1).max())
        # Along a piece: time = max of (what holds an entry back - sum of links so far) + sum of
        # links so far. The term in brackets is the level of an entry. One running max covers all
        # pieces of a slice, each of which is lifted above the one before.
        lift = 2 * max_reach + 1
        if lift > MAX_DURATION_NS:
            raise UsageError("these times add up to more than 100 days", slug="times-too-long")
        delay[absent] = never
        sums = self._weights(plan.chain, work, delay)
        np.cumsum(sums, axis=1, out=sums)
        lifted = np.multiply(plan.piece, lift, out=self._room(1, plan.piece.size))
        before = self._take(sums, plan.entry)
        before -= lifted
        ahead = self._weights(plan.link, work, delay)
        ahead += self._take(sums, plan.source)
        ahead -= self._take(before, plan.target_entry)
        ahead -= self._take(lifted, plan.source_entry)
        level = self._room(points.shape[0], plan.entry.size)
        level[:, : plan.roots] = self._roots - before[:, : plan.roots]
        ahead = np.broadcast_to(ahead, (points.shape[0], ahead.shape[1]))
        is_single = len(level) == 1
        for part in plan.stretches if is_single else plan.slices:
            if is_single and part.few:
                self._link_by_link(part, level[0], ahead[0])
                continue
            arrived = level.take(part.source, axis=1)
            arrived += ahead[:, part.first : part.last]
            if part.high - part.low < part.last - part.first:
                arrived = np.maximum.reduceat(arrived, part.offset, axis=1)
            np.maximum.accumulate(arrived, axis=1, out=level[:, part.low : part.high])
        level -= lifted
        times = self._take(level, plan.entry_of)
        times += sums
        points[:, 0::2] = self._take(times, plan.start)
        points[:, 1::2] = self._take(times, plan.end)
        derived = self._room(*work[:, :-1].shape)
        points[:, 1::2] += np.multiply(work[:, :-1], plan.derived, out=derived)

    def _room(self, rows: int, columns: int) -> Ints:
        return allocate_matrix(rows, columns, large=self._large)

    def _take(self, values: Ints, index: Ints) -> Ints:
        """Returns some columns of the values; shape (scenarios, columns)."""
        return values.take(index, axis=1, out=self._room(len(values), index.size), mode="clip")

    def _weights(self, terms: LinkTerms, work: Ints, delay: Ints) -> Ints:
        edge_weights, node_weights = self._take(delay, terms.edge), self._take(work, terms.node)
        if len(edge_weights) < len(node_weights):
            edge_weights, node_weights = node_weights, edge_weights
        edge_weights += node_weights
        return edge_weights

    def _padded(self, values: Ints) -> Ints:
        """Appends a column of zeros, for links that have no such term."""
        padded = self._room(values.shape[0], values.shape[1] + 1)
        padded[:, :-1], padded[:, -1] = values, 0
        return padded

    def _link_by_link(self, part: LayerSlice, level: Ints, ahead: Ints) -> None:
        plan = self._layout
        reached, link_weight, source = level.data, ahead.data, plan.source_entry.data
        offset = plan.offset[part.low : part.high + 1].tolist()
        chain_starts = plan.begins[part.low : part.high].tolist()
        first = offset[0]
        for entry, starts_chain, last in zip(
            range(part.low, part.high), chain_starts, offset[1:], strict=True
        ):
            best = _MIN_TIME if starts_chain else reached[entry - 1]
            for link in range(first, last):
                candidate = reached[source[link]] + link_weight[link]
                if candidate > best:  # noqa: PLR1730  (max() takes three times as long)
                    best = candidate
            reached[entry] = best
            first = last


def _convert_to_integers(values: ArrayLike, count: int, name: str) -> NDArray[Any]:
    array = np.asarray(values)
    if array.ndim not in {1, 2} or array.shape[-1] != count:
        raise UsageError(
            f"`{name}` has shape {array.shape}, expected ({count},) or (scenarios, {count})",
            slug="wrong-shape",
        )
    # Rounded to even, not truncated: half of 3 ns becomes 2 ns as often as 1 ns.
    return array if array.dtype == np.int64 else np.rint(array).astype(np.int64)
