"""Calibration of a graph: the delay of each class of edges, the own work of waiting nodes, and the
residuals.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import polars as pl
from msgspec import Struct, structs
from numpy.typing import NDArray

from traceloom.graph import graph as graph_schema
from traceloom.graph.graph import (
    Graph,
    LastGraphCache,
    get_column_array,
    get_edge_points,
    get_point_times,
)
from traceloom.trace.array_types import Bools, Ints
from traceloom.trace.arrays import gather_rows

RUNNING_PLACE = "while running"  # place of these edges in `delays`
_OVERLAP_QUANTILE = 0.1  # of a name's fractions: a launch that came late only makes them larger
_MAX_DELAY_NS = 2**60  # a delay beyond this means that the edge does not hold
_overlap_cache: LastGraphCache[Ints] = LastGraphCache()


def find_overlapping_edges(graph: Graph) -> Ints:
    """Returns the rows of the edges from the start of a work to the start of the next one on its
    stream.
    """
    cached = _overlap_cache.of(graph)
    if cached is not None:
        return cached
    kind = graph.edges["kind"].to_physical().to_numpy() == graph_schema.EDGE_KINDS.index("stream")
    started = ~graph.edges["from_end"].to_numpy() & ~graph.edges["to_end"].to_numpy()
    return _overlap_cache.put(graph, np.flatnonzero(kind & started))


def estimate_overlap_ns(graph: Graph) -> Ints:
    """Returns after how much of the source's work the target usually starts, for each edge of
    `find_overlapping_edges`; ns, never negative.

    The next work can begin once the kernel before it reaches a certain point of its program, which
    is the same fraction of all kernels of one name. Late launches make it look later, so a low
    quantile of the measured fractions is used.
    """
    rows = find_overlapping_edges(graph)
    if not rows.size:
        return rows
    source, target = graph.edges["source"].to_numpy()[rows], graph.edges["target"].to_numpy()[rows]
    start = graph.nodes["start_ns"].to_numpy()
    duration = graph.nodes["duration_ns"].to_numpy()[source]
    part = np.clip(start[target] - start[source], 0, None) / np.maximum(duration, 1)
    name = graph.nodes["name"].gather(source).rank("dense").to_numpy().astype(np.int64)
    order = np.lexsort((part, name))
    opens = np.flatnonzero(np.append(True, np.diff(name[order]) != 0))
    size = np.diff(np.append(opens, rows.size))
    low = part[order][opens + ((size - 1) * _OVERLAP_QUANTILE).astype(np.int64)]
    typical = np.empty(rows.size)
    typical[order] = np.repeat(low, size)
    parts: Ints = np.rint(typical * duration).astype(np.int64)
    return parts


def scale_overlap(graph: Graph, work: Ints, delay: Ints) -> Ints:
    """Returns the delays for other works: the delay of an overlapping edge stays the same fraction
    of its source's work.

    Args:
        graph: The graph.
        work: Work of each node, residual included; (N,) or (S, N).
        delay: Delay of each edge, residual included; (E,) or (S, E).

    Returns:
        The same array where no delay changes, else a new one, with scenarios where an argument has
        them.
    """
    rows = find_overlapping_edges(graph)
    if not rows.size:
        return delay
    source = graph.edges["source"].to_numpy()[rows]
    measured = (
        graph.nodes["work_ns"].gather(source) + graph.nodes["residual_ns"].gather(source)
    ).to_numpy()
    # Work that is not a node's own, such as one rank's part of a communication, has no fraction.
    changed = (np.atleast_2d(work)[:, source] != measured).any(axis=0) & (measured > 0)
    if not changed.any():
        return delay
    rows, source, measured = rows[changed], source[changed], measured[changed]
    shape = np.broadcast_shapes((*work.shape[:-1], 1), (*delay.shape[:-1], 1))[:-1]
    scaled = np.broadcast_to(delay, (*shape, delay.shape[-1])).copy()
    current = scaled[..., rows]
    is_delay = np.abs(current) < _MAX_DELAY_NS
    parts = np.where(is_delay, current, 0) * (work[..., source] / measured)
    scaled[..., rows] = np.where(is_delay, np.rint(parts).astype(np.int64), current)
    return scaled


# Kinds whose edges take time of their own; all others only order. The comment of each says which
# ends `place` names.
_FROM_CALL_KINDS = ("launch",)  # call > kind of work
_TO_CALL_KINDS = ("synchronize", "queue")  # kind of work > call
_NODE_TO_NODE_KINDS = ("stream", "wait", "occupancy", "cross-thread")  # kind > kind
TIMED_KINDS = (*_FROM_CALL_KINDS, *_TO_CALL_KINDS, *_NODE_TO_NODE_KINDS)
ANY_PLACE = ""  # place of the row for all classes of a kind
# Place of edges out of a meeting, which take as long as this communication took
TRANSFER_PLACE = "transfer"
# Where no edge of a kind shows how long it takes, in ns: medians of public traces of H100, A100 and
# V100.
_DEFAULT_DELAYS_NS = {"launch": 6_500, "synchronize": 5_000, "stream": 1_000, "wait": 1_500}
_START_SUFFIX = " start"  # of a source whose start counts


class EdgeClasses(Struct, frozen=True):
    """The class of each edge.

    Attributes:
        of: Number of each edge's class; -1 where the edge only orders, or has a time of its own.
        table: `kind` and `place` of each class.
        transfer: Edges from a rendezvous to the end of a part.
        given: Edges whose time is given from outside: from the origin, into an assumed arrival, and
            where it is a guess which thread woke another.
        running: Rows of the edges to work that starts while the work before it on its stream runs,
            after a fraction of that work.
    """

    of: NDArray[np.int32]
    table: pl.DataFrame
    transfer: Bools
    given: Bools
    running: Ints


_classes_cache: LastGraphCache[EdgeClasses] = LastGraphCache()


def share_classes(graph: Graph, edge_classes: EdgeClasses) -> None:
    """Remembers these classes for a graph that differs from theirs only in its times."""
    _classes_cache.put(graph, edge_classes)


def classify_edges(graph: Graph) -> EdgeClasses:
    """Sorts the edges of a graph into classes.

    A class is the kind of edge and its place: for launches the call and the kind of work, for calls
    that wait the kind of work and the call, else the kinds of both nodes.
    """
    cached = _classes_cache.of(graph)
    if cached is not None:
        return cached
    nodes, edges = graph.nodes, graph.edges
    source, target, kind = (
        get_column_array(graph, edges[column]) for column in ("source", "target", "kind")
    )
    node_kind = get_column_array(graph, nodes["kind"])
    from_kind, to_kind = node_kind[source], node_kind[target]
    transfer = (from_kind == graph_schema.NODE_KINDS.index(graph_schema.RENDEZVOUS)) & edges[
        "to_end"
    ].to_numpy()
    external = (to_kind == graph_schema.NODE_KINDS.index(graph_schema.ARRIVAL)) | np.isin(
        kind, _get_kind_codes(("origin",))
    )
    guessed = get_column_array(graph, edges["evidence"]) == graph_schema.EVIDENCE.index("assumed")
    external |= guessed & (kind == graph_schema.EDGE_KINDS.index("cross-thread"))
    has_class = np.isin(kind, _get_kind_codes(TIMED_KINDS)) & ~transfer & ~external
    # The order of the ends of works that overlap takes no time.
    has_class &= ~(edges["to_end"].to_numpy() & (kind == graph_schema.EDGE_KINDS.index("stream")))
    meanwhile = find_overlapping_edges(graph)
    has_class[meanwhile] = False
    rows = np.flatnonzero(has_class)
    kind, source, target = kind[rows], source[rows], target[rows]
    first, last = (
        np.isin(kind, _get_kind_codes(_FROM_CALL_KINDS)),
        np.isin(kind, _get_kind_codes(_TO_CALL_KINDS)),
    )
    names, name_of = np.unique(np.where(first, source, target)[first | last], return_inverse=True)
    calls = nodes["name"][names]
    code = calls.rank("dense").to_numpy() if calls.len() else np.zeros(0, dtype=np.int64)
    name = np.zeros(rows.size, dtype=np.int64, like=kind)
    name[first | last] = code[name_of]
    overlapping = ~edges["from_end"].to_numpy()[rows] & ~first & ~last
    kinds = len(graph_schema.NODE_KINDS)
    kind_pair = np.where(first, 0, from_kind[rows]) * kinds + np.where(last, 0, to_kind[rows])
    key = ((kind.astype(np.int64) * kinds * kinds + kind_pair) * 2 + overlapping) * (
        calls.len() + 1
    ) + name
    _, example, number = np.unique(key, return_index=True, return_inverse=True)
    class_of_edge = np.full(edges.height, -1, dtype=np.int32, like=kind)
    class_of_edge[rows] = number
    # The kind and place of each class, taken from one of its edges.
    examples = edges[rows[example]]
    end_names = []
    for end, call_kinds in (("source", _FROM_CALL_KINDS), ("target", _TO_CALL_KINDS)):
        at_end = nodes.select("name", "kind")[examples[end]].with_columns(
            pl.col("kind").cast(pl.String)
        )
        from_call = examples["kind"].cast(pl.String).is_in(call_kinds)
        end_names.append(
            pl.select(pl.when(from_call).then(at_end["name"]).otherwise(at_end["kind"])).to_series()
        )
    starts = ~examples["from_end"] & ~examples["kind"].cast(pl.String).is_in(
        (*_FROM_CALL_KINDS, *_TO_CALL_KINDS)
    )
    between = pl.when(starts).then(pl.lit(f"{_START_SUFFIX} > ")).otherwise(pl.lit(" > "))
    class_name = pl.concat_str(
        end_names[0].alias("source"), between, end_names[1].alias("target")
    ).alias("place")
    return EdgeClasses(
        class_of_edge, pl.select(examples["kind"], class_name), transfer, external, meanwhile
    )


def _get_kind_codes(kinds: tuple[str, ...]) -> list[int]:
    return [
        graph_schema.EDGE_KINDS.index(kind) for kind in kinds if kind in graph_schema.EDGE_KINDS
    ]


def get_default_delays_ns(table: pl.DataFrame) -> Ints:
    """Returns the default delay of each class on any machine; 0 where there is none.

    Shape (classes,).
    """
    kind = table["kind"].cast(pl.String)
    typical: Ints = kind.replace_strict(
        list(_DEFAULT_DELAYS_NS),
        list(_DEFAULT_DELAYS_NS.values()),
        default=0,
        return_dtype=pl.Int64,
    ).to_numpy()
    starts: Bools = table["place"].str.contains(f"{_START_SUFFIX} > ", literal=True).to_numpy()
    return np.where(starts, 0, typical)


def class_delays(graph: Graph) -> Ints:
    """Returns the calibrated delay of the class of each edge, without anything that only this edge
    showed.

    For edges with a time of their own (transfers, times given from outside) see
    `compute_own_times`. Shape (edges,), ns; 0 for edges that only order, and for classes that are
    not in the graph's `delays`.
    """
    edge_classes = classify_edges(graph)
    table = edge_classes.table.join(
        graph.delays, on=["kind", "place"], how="left", maintain_order="left"
    )
    kind_delays = graph.delays.filter(pl.col("place") == ANY_PLACE).select(
        "kind", pl.col("median_ns").alias("of_kind")
    )
    table = table.join(kind_delays, on="kind", how="left", maintain_order="left")
    median = table.select(pl.coalesce("median_ns", "of_kind").fill_null(0)).to_series().to_numpy()
    return expand_class_delays(edge_classes, median, compute_own_times(graph, edge_classes))


def expand_class_delays(edge_classes: EdgeClasses, median: Ints, own_times: Ints) -> Ints:
    """Returns the constant of each edge from that of its class; `own_times` where it has no
    class.
    """
    constant: Ints = np.where(
        edge_classes.of >= 0, gather_rows(np.append(median, 0), edge_classes.of), own_times
    )
    return constant


def compute_own_times(graph: Graph, edge_classes: EdgeClasses) -> Ints:
    """Returns the measured times of edges that stand for work of their own; 0 for all others. Shape
    (edges,), ns.

    A transfer takes the median over the parts of its communication: it is work of that
    communication, as the duration of a kernel is work of that kernel. Times given from outside
    (when a lane that nothing else explains begins, how long unrecorded peers kept this rank
    waiting) stay as measured. Work that starts while the one before it runs does so after a
    fraction of that, see `estimate_overlap_ns`.
    """
    own_times = np.zeros(edge_classes.of.size, dtype=np.int64, like=edge_classes.of)
    own_times[edge_classes.running] = estimate_overlap_ns(graph)
    external, transfers = np.flatnonzero(edge_classes.given), np.flatnonzero(edge_classes.transfer)
    if not external.size and not transfers.size:
        return own_times
    source, target = get_edge_points(graph)
    times = get_point_times(graph)
    own_times[external] = times[target[external]] - times[source[external]]
    meeting = source[transfers]
    slack = times[target[transfers]] - times[meeting]
    order = np.lexsort((slack, meeting))
    opens = (
        np.flatnonzero(np.append(True, np.diff(meeting[order]) != 0))
        if transfers.size
        else transfers
    )
    size = np.diff(np.append(opens, transfers.size))
    middle = slack[order][opens + (size - 1) // 2] if transfers.size else slack
    own_times[transfers[order]] = np.repeat(middle, size)
    return own_times


# Which edge was the last depends on the delays, which depend on which edge was the last
_MAX_ROUNDS = 4
_CALL_KINDS = (graph_schema.BLOCK, graph_schema.LAUNCH)
_MIN_TIME = np.iinfo(np.int64).min // 2


class _MeasuredEdges(Struct, frozen=True):
    """A graph's edges by their target points, with measured times.

    Attributes:
        source: Time of each edge's source point.
        target: Time of each edge's target point.
        point: Target point of each edge.
        order: Edges by target point; None where they are already in that order.
        first: First edge of each held point.
        held: Points that at least one edge holds back.
        start: Start of each node.
        duration: Duration of each node.
        waits: Nodes whose ends are held back.
    """

    source: Ints
    target: Ints
    point: Ints
    order: Ints | None
    first: Ints
    held: Ints
    start: Ints
    duration: Ints
    waits: Bools

    def of_points(self, points: Bools) -> tuple[_MeasuredEdges, Ints]:
        """Returns the edges into some of the points alone, and their rows."""
        rows = np.flatnonzero(points[self.point])
        order, first, has_edge = _sort_by_point(self.point[rows])
        selected = structs.replace(
            self,
            source=self.source[rows],
            target=self.target[rows],
            point=self.point[rows],
            order=order,
            first=first,
            held=has_edge,
        )
        return selected, rows

    def latest(self, values: Ints) -> Ints:
        """Returns the highest value over the edges into each point; a very low one where there are
        none.

        Shape (points,).
        """
        highest = np.full(2 * self.start.size, _MIN_TIME, dtype=np.int64, like=self.source)
        if self.point.size:
            highest[self.held] = np.maximum.reduceat(self.ordered(values), self.first)
        return highest

    def winners(self, values: Ints) -> Ints:
        """Returns for each held point the edge with the highest value; of equal ones the first in
        the order of edges.
        """
        return self.first_equal(values, self.latest(values)[self.point])

    def first_equal(self, values: Ints, highest: Ints) -> Ints:
        """Returns for each held point its first edge whose value equals `highest`, which has a
        value per edge.
        """
        winning = np.flatnonzero(self.ordered(values == highest))
        winning = winning if self.order is None else self.order[winning]
        points = self.point[winning]
        first = (
            np.flatnonzero(np.append(True, points[1:] != points[:-1])) if winning.size else winning
        )
        return winning[first]

    def ordered(self, values: NDArray[Any]) -> NDArray[Any]:
        return values if self.order is None else values[self.order]

    def others(self, values: Ints) -> Ints:
        """Returns for each edge the highest value over the other edges into its point; a very low
        one where there are none.
        """
        highest = self.latest(values)[self.point]
        winners = self.first_equal(values, highest)
        remaining = values.copy()
        remaining[winners] = _MIN_TIME
        highest[winners] = self.latest(remaining)[self.point[winners]]
        return highest


def calibrate(graph: Graph) -> Graph:
    """Fills in delays, the own work of waiting nodes, and residuals.

    The delay of a class is the median over those of its edges that held something back: whose
    source came after everything else that the point waited for, including the delays of that. The
    delay of an edge is at most its observed slack. A node whose end waits for something costs as
    much as calls of its name that had nothing to wait for. The remainder is the residual of the
    edge that was satisfied last, or of the node where its own work ended last.

    Args:
        graph: A linked graph; results of an earlier calibration are replaced.

    Returns:
        The graph with `work_ns`, `residual_ns`, `delay_ns` and `delays` filled in.
        `Plan(graph).evaluate()` gives its measured times to the nanosecond.
    """
    source, target = get_edge_points(graph)
    times = get_point_times(graph)
    order, first, has_edge = _sort_by_point(target)
    waits = np.zeros(graph.nodes.height, dtype=np.bool_, like=target)
    waits[target[target % 2 == 1] // 2] = True
    start, duration = times[0::2], times[1::2] - times[0::2]
    measured = _MeasuredEdges(
        times[source], times[target], target, order, first, has_edge, start, duration, waits
    )
    edge_classes = classify_edges(graph)
    own_times = compute_own_times(graph, edge_classes)
    cost = _compute_call_costs(graph, measured)
    median, count = _compute_class_medians(graph, measured, edge_classes, own_times, cost)
    constant = expand_class_delays(edge_classes, median, own_times)
    slack = measured.target - measured.source
    blocked = measured.latest(measured.source + constant)[1::2] > measured.start + cost
    work = np.where(measured.waits & blocked, cost, measured.duration)
    delay = np.minimum(constant, slack)
    # The remainder goes to the last satisfied edge into each point, or to the node whose work ends
    # last.
    arrival = measured.source + delay
    edge_residual = np.zeros(delay.size, dtype=np.int64, like=delay)
    node_residual = np.zeros(work.size, dtype=np.int64, like=work)
    own_end = start + work
    node_last = own_end >= measured.latest(arrival)[1::2]
    node_residual[node_last] = (start + duration - own_end)[node_last]
    winning = measured.winners(arrival)
    point = target[winning]
    winning = winning[(point % 2 == 0) | ~node_last[point // 2]]
    edge_residual[winning] = measured.target[winning] - arrival[winning]
    nodes = graph.nodes.with_columns(
        pl.Series("work_ns", work), pl.Series("residual_ns", node_residual)
    )
    edges = graph.edges.with_columns(
        pl.Series("delay_ns", delay), pl.Series("residual_ns", edge_residual)
    )
    # The `delays` frame: a row for each class, one for each kind as a whole, and one for transfers
    table = edge_classes.table.with_columns(
        pl.Series("count", count), pl.Series("median_ns", median)
    )
    transfers = own_times[edge_classes.transfer]
    extra_rows = []
    if transfers.size:
        extra_rows.append(("rendezvous", TRANSFER_PLACE, transfers.size, int(np.median(transfers))))
    if edge_classes.running.size:
        extra_rows.append(
            (
                "stream",
                RUNNING_PLACE,
                edge_classes.running.size,
                int(np.median(own_times[edge_classes.running])),
            )
        )
    for (kind,), rows in table.filter(pl.col("count") > 0).group_by("kind", maintain_order=True):
        # The median of the kind is that of its most frequent class: classes differ more than edges
        # of one class.
        most_common = rows.sort("count", descending=True, maintain_order=True).row(0, named=True)
        extra_rows.append(
            (str(kind), ANY_PLACE, int(rows["count"].sum()), most_common["median_ns"])
        )
    schema = graph_schema.GRAPH_SCHEMAS["delays"]
    kind_delays = pl.DataFrame(extra_rows, schema=schema, orient="row")
    calibrated = replace(
        graph,
        nodes=nodes,
        edges=edges,
        delays=pl.concat([table.cast(schema), kind_delays]).sort(
            "kind", "place", maintain_order=True
        ),
    )
    share_classes(calibrated, edge_classes)
    return calibrated


def _sort_by_point(point: Ints) -> tuple[Ints | None, Ints, Ints]:
    """Returns the order of edges by target point (None where they are already in it), the first
    edge of each held point, and these points.
    """
    order = None if (point[1:] >= point[:-1]).all() else np.argsort(point, kind="stable")
    ordered = point if order is None else point[order]
    first = (
        np.flatnonzero(np.append(True, ordered[1:] != ordered[:-1])) if ordered.size else ordered
    )
    return order, first, ordered[first]


def _compute_call_costs(graph: Graph, measured: _MeasuredEdges) -> Ints:
    """Returns what each waiting node takes when it has nothing to wait for; shape (nodes,), ns, at
    most its duration.

    This is the median over calls of its name that waited for nothing, or for work that was done
    when they began; where there are none, over all launches that did not wait, or for
    synchronisations over those of any name, if that is less. Communication and waiting for other
    threads cost nothing themselves.
    """
    kind = get_column_array(graph, graph.nodes["kind"])
    on_device = np.isin(
        kind,
        [
            graph_schema.NODE_KINDS.index(name)
            for name in (graph_schema.KERNEL, graph_schema.COPY, graph_schema.FILL)
        ],
    )
    # Nothing shows how much of a kernel that ends after the one before it was spent waiting for
    # that.
    cost = np.where(on_device, measured.duration, 0)
    call = np.isin(kind, [graph_schema.NODE_KINDS.index(name) for name in _CALL_KINDS])
    waiting_calls = np.flatnonzero(call & measured.waits)
    if not waiting_calls.size:
        return cost
    free = call & (measured.latest(measured.source)[1::2] <= measured.start)
    code = graph.nodes["name"][np.flatnonzero(call)].rank("dense").to_numpy().astype(np.int64)
    name_codes = np.full(kind.size, -1, dtype=np.int64, like=kind)
    name_codes[call] = code
    median, count = compute_medians(name_codes[free], measured.duration[free], int(code.max()) + 1)
    launches, blocks = (
        free & (kind == graph_schema.NODE_KINDS.index(name)) for name in reversed(_CALL_KINDS)
    )
    typical = int(np.median(measured.duration[launches])) if launches.any() else 0
    briefest = int(np.median(measured.duration[blocks])) if blocks.any() else typical
    of_kind = np.where(
        kind == graph_schema.NODE_KINDS.index(graph_schema.BLOCK), min(typical, briefest), typical
    )
    name = name_codes[waiting_calls]
    cost[waiting_calls] = np.minimum(
        np.where(count[name] > 0, median[name], of_kind[waiting_calls]),
        measured.duration[waiting_calls],
    )
    return cost


def _compute_class_medians(
    graph: Graph, measured: _MeasuredEdges, edge_classes: EdgeClasses, own_times: Ints, cost: Ints
) -> tuple[Ints, Ints]:
    """Returns the median delay of each class, and the number of edges it rests on; for classes
    without any, the median of their kind.

    Where no edge of the file shows it (a stream on which work never queued does not show the time
    between two works), a default is used; a class without samples of its own takes no more than the
    least slack of its edges.

    Launches count only where their stream had done something before: the first work of a stream may
    wait for what was submitted before the window.
    """
    slack = measured.target - measured.source
    size = edge_classes.table.height
    kind_codes = edge_classes.table["kind"].to_physical().to_numpy().astype(np.int64)
    has_class = edge_classes.of >= 0
    min_slack = np.full(size, np.iinfo(np.int64).max)
    np.minimum.at(min_slack, edge_classes.of[has_class], slack[has_class])
    kind = get_column_array(graph, graph.edges["kind"])
    # Points behind other work of their stream
    follows = np.zeros(2 * measured.start.size, dtype=np.bool_, like=kind)
    follows[measured.point[kind == graph_schema.EDGE_KINDS.index("stream")]] = True
    usable = has_class & (
        (kind != graph_schema.EDGE_KINDS.index("launch")) | follows[measured.point]
    )
    own_end = np.full(2 * measured.start.size, _MIN_TIME, dtype=np.int64, like=measured.start)
    own_end[1::2] = measured.start + cost
    # Most edges only order; what they hold back matters where an edge of a class leads to the same
    # point.
    relevant = np.zeros(own_end.size, dtype=np.bool_, like=own_end)
    relevant[measured.point[usable]] = True
    measured, rows = measured.of_points(relevant)
    edge_classes = structs.replace(edge_classes, of=edge_classes.of[rows])
    own_times, usable, slack = own_times[rows], usable[rows], slack[rows]
    median = np.zeros(size, dtype=np.int64)
    count, several = median, np.zeros(len(graph_schema.EDGE_KINDS), dtype=np.int64)
    for _ in range(_MAX_ROUNDS):
        arrival = measured.source + expand_class_delays(edge_classes, median, own_times)
        # The source came after everything else with its delay: an edge that is last only because of
        # its own class's delay would confirm that delay.
        binding = usable & (
            measured.source >= np.maximum(measured.others(arrival), own_end[measured.point])
        )
        before = median
        median, count = compute_medians(edge_classes.of[binding], slack[binding], size)
        kinds, several = compute_medians(
            kind_codes[edge_classes.of[binding]], slack[binding], len(graph_schema.EDGE_KINDS)
        )
        median = np.where(count > 0, median, kinds[kind_codes])
        if (median == before).all():
            break
    # A default does not decide what held something back.
    guess = np.where(several[kind_codes] > 0, median, get_default_delays_ns(edge_classes.table))
    return np.where(count > 0, median, np.minimum(guess, min_slack)), count


def compute_medians(
    class_codes: NDArray[np.signedinteger[Any]], values: Ints, classes: int
) -> tuple[Ints, Ints]:
    """Returns the lower median of the values of each class, and their count; 0 for a class without
    values.

    Args:
        class_codes: Class of each value, 0 <= class < `classes`; shape (values,).
        values: Integers; shape (values,).
        classes: Number of classes.

    Returns:
        Medians and counts; shape (classes,).
    """
    order = np.lexsort((values, class_codes))
    count = np.bincount(class_codes, minlength=classes)
    first = np.cumsum(count) - count
    median = np.zeros(classes, dtype=np.int64)
    nonempty = count > 0
    median[nonempty] = values[order[(first + (count - 1) // 2)[nonempty]]]
    return median, count.astype(np.int64)
