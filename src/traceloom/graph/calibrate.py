"""Delays of edge classes; work that starts while the one before runs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import polars as pl
from msgspec import Struct, structs
from numpy.typing import NDArray

from traceloom.graph import graph as gs
from traceloom.graph.graph import Graph, OfLast, array, point_times, points
from traceloom.trace.array_types import Bools, Ints
from traceloom.trace.arrays import gather_rows

RUNNING = "while running"  # place of these edges in `delays`
_EARLY = 0.1  # of a name's fractions: a launch that came late only makes them larger
_NO_TIME = 2**60  # a delay beyond this says that the edge does not hold
_overlap_cache: OfLast[Ints] = OfLast()


def overlapping_edges(graph: Graph) -> Ints:
    """Rows of the edges from the start of a work to the start of the next one on its stream."""
    remembered = _overlap_cache.of(graph)
    if remembered is not None:
        return remembered
    kind = graph.edges["kind"].to_physical().to_numpy() == gs.EDGE_KINDS.index("stream")
    started = ~graph.edges["from_end"].to_numpy() & ~graph.edges["to_end"].to_numpy()
    return _overlap_cache.put(graph, np.flatnonzero(kind & started))


def usual_overlap_ns(graph: Graph) -> Ints:
    """After how much of the source's work the target usually starts, for each edge of `running`; ns, never negative.

    What lets the next work begin is a place in the program of the kernel before: the same part of all kernels of one
    name. Late launches make it look later, so a low one of the measured parts is taken.
    """
    at = overlapping_edges(graph)
    if not at.size:
        return at
    source, target = graph.edges["source"].to_numpy()[at], graph.edges["target"].to_numpy()[at]
    start = graph.nodes["start_ns"].to_numpy()
    duration = graph.nodes["duration_ns"].to_numpy()[source]
    part = np.clip(start[target] - start[source], 0, None) / np.maximum(duration, 1)
    name = graph.nodes["name"].gather(source).rank("dense").to_numpy().astype(np.int64)
    order = np.lexsort((part, name))
    opens = np.flatnonzero(np.append(True, np.diff(name[order]) != 0))
    size = np.diff(np.append(opens, at.size))
    low = part[order][opens + ((size - 1) * _EARLY).astype(np.int64)]
    usual = np.empty(at.size)
    usual[order] = np.repeat(low, size)
    parts: Ints = np.rint(usual * duration).astype(np.int64)
    return parts


def scale_overlap(graph: Graph, work: Ints, delay: Ints) -> Ints:
    """Delays with other works: those of `running` are the part of the source's work that they were.

    Args:
        graph: The graph.
        work: Work of each node, residual included; (N,) or (S, N).
        delay: Delay of each edge, residual included; (E,) or (S, E).

    Returns:
        The same array where no delay changes, else a new one, with scenarios where an argument has them.
    """
    at = overlapping_edges(graph)
    if not at.size:
        return delay
    source = graph.edges["source"].to_numpy()[at]
    measured = (graph.nodes["work_ns"].gather(source) + graph.nodes["residual_ns"].gather(source)).to_numpy()
    # What is no work of its own, as one rank's part of a communication, has no parts.
    changed = (np.atleast_2d(work)[:, source] != measured).any(axis=0) & (measured > 0)
    if not changed.any():
        return delay
    at, source, measured = at[changed], source[changed], measured[changed]
    shape = np.broadcast_shapes((*work.shape[:-1], 1), (*delay.shape[:-1], 1))[:-1]
    scaled = np.broadcast_to(delay, (*shape, delay.shape[-1])).copy()
    held = scaled[..., at]
    is_delay = np.abs(held) < _NO_TIME
    parts = np.where(is_delay, held, 0) * (work[..., source] / measured)
    scaled[..., at] = np.where(is_delay, np.rint(parts).astype(np.int64), held)
    return scaled


# Kinds whose edges take time of their own; all others only order. `place` of each: which ends are named, and how.
_CALL_FIRST = ("launch",)  # call > kind of work
_CALL_LAST = ("synchronize", "queue")  # kind of work > call
_KINDS = ("stream", "wait", "occupancy", "cross-thread")  # kind > kind
TIMED = (*_CALL_FIRST, *_CALL_LAST, *_KINDS)
ANY = ""  # place of the row that stands for all of a kind
TRANSFER = "transfer"  # place of what leads out of a meeting: takes what this one communication took
# Where no edge of a kind shows how long it takes, in ns: medians of public traces of H100, A100 and V100.
_USUAL = {"launch": 6_500, "synchronize": 5_000, "stream": 1_000, "wait": 1_500}
_START = " start"  # of a source whose start is what counts


class Classes(Struct, frozen=True):
    """Which edge is of which class.

    Attributes:
        of: Number of each edge's class; -1 where the edge only orders, or its time is its own.
        table: `kind` and `place` of each class.
        transfer: Edges from a rendezvous to the end of a part.
        given: Edges whose time is given from outside: from the origin, into an assumed arrival, and where it is a guess
            who woke a thread.
        running: Rows of the edges to work that starts while the one before on its stream runs: a part of that work.
    """

    of: NDArray[np.int32]
    table: pl.DataFrame
    transfer: Bools
    given: Bools
    running: Ints


_KNOWN: OfLast[Classes] = OfLast()


def share_classes(graph: Graph, edge_classes: Classes) -> None:
    """Remember these classes for a graph that differs from theirs only in its times."""
    _KNOWN.put(graph, edge_classes)


def classes(graph: Graph) -> Classes:
    """Sort the edges of a graph into classes.

    A class is the kind of edge and its place: for launches the call and the kind of work, for what a call waits for
    the kind of work and the call, else the kinds of both nodes.
    """
    remembered = _KNOWN.of(graph)
    if remembered is not None:
        return remembered
    nodes, edges = graph.nodes, graph.edges
    source, target, kind = (array(graph, edges[column]) for column in ("source", "target", "kind"))
    node_kind = array(graph, nodes["kind"])
    from_kind, to_kind = node_kind[source], node_kind[target]
    transfer = (from_kind == gs.NODE_KINDS.index(gs.RENDEZVOUS)) & edges["to_end"].to_numpy()
    external = (to_kind == gs.NODE_KINDS.index(gs.ARRIVAL)) | np.isin(kind, _codes(("origin",)))
    guessed = array(graph, edges["evidence"]) == gs.EVIDENCE.index("assumed")
    external |= guessed & (kind == gs.EDGE_KINDS.index("cross-thread"))
    timed = np.isin(kind, _codes(TIMED)) & ~transfer & ~external
    # What orders the ends of works that overlap takes no time.
    timed &= ~(edges["to_end"].to_numpy() & (kind == gs.EDGE_KINDS.index("stream")))
    meanwhile = overlapping_edges(graph)
    timed[meanwhile] = False
    at = np.flatnonzero(timed)
    kind, source, target = kind[at], source[at], target[at]
    first, last = np.isin(kind, _codes(_CALL_FIRST)), np.isin(kind, _codes(_CALL_LAST))
    called = np.where(first, source, target)[first | last]
    names, name_of = np.unique(called, return_inverse=True)
    calls = nodes["name"][names]
    code = calls.rank("dense").to_numpy() if calls.len() else np.zeros(0, dtype=np.int64)
    name = np.zeros(at.size, dtype=np.int64, like=kind)
    name[first | last] = code[name_of]
    overlapping = ~edges["from_end"].to_numpy()[at] & ~first & ~last
    kinds = len(gs.NODE_KINDS)
    ends = np.where(first, 0, from_kind[at]) * kinds + np.where(last, 0, to_kind[at])
    key = ((kind.astype(np.int64) * kinds * kinds + ends) * 2 + overlapping) * (calls.len() + 1) + name
    _, example, number = np.unique(key, return_index=True, return_inverse=True)
    of = np.full(edges.height, -1, dtype=np.int32, like=kind)
    of[at] = number
    # The kind and place of each class, as one of its edges tells.
    examples = edges[at[example]]
    end_names = []
    for end, by_name in (("source", _CALL_FIRST), ("target", _CALL_LAST)):
        at_end = nodes.select("name", "kind")[examples[end]].with_columns(pl.col("kind").cast(pl.String))
        named = examples["kind"].cast(pl.String).is_in(by_name)
        end_names.append(pl.select(pl.when(named).then(at_end["name"]).otherwise(at_end["kind"])).to_series())
    starts = ~examples["from_end"] & ~examples["kind"].cast(pl.String).is_in((*_CALL_FIRST, *_CALL_LAST))
    between = pl.when(starts).then(pl.lit(f"{_START} > ")).otherwise(pl.lit(" > "))
    class_name = pl.concat_str(end_names[0].alias("source"), between, end_names[1].alias("target")).alias("place")
    return Classes(of, pl.select(examples["kind"], class_name), transfer, external, meanwhile)


def _codes(kinds: tuple[str, ...]) -> list[int]:
    return [gs.EDGE_KINDS.index(kind) for kind in kinds if kind in gs.EDGE_KINDS]


def default_delay_ns(table: pl.DataFrame) -> Ints:
    """What edges of each class usually take on any machine; 0 where nothing is usual. Shape (classes,)."""
    kind = table["kind"].cast(pl.String)
    usual: Ints = kind.replace_strict(list(_USUAL), list(_USUAL.values()), default=0, return_dtype=pl.Int64).to_numpy()
    starts: Bools = table["place"].str.contains(f"{_START} > ", literal=True).to_numpy()
    return np.where(starts, 0, usual)


def class_delays(graph: Graph) -> Ints:
    """The delay of each edge by calibration alone: its class's, nothing that only this edge showed.

    Of edges with a time of their own (transfers, times given from outside) see `own_times`. Shape (edges,), ns; 0 for
    edges that only order, and for classes that the graph's `delays` do not know.
    """
    edge_classes = classes(graph)
    table = edge_classes.table.join(graph.delays, on=["kind", "place"], how="left", maintain_order="left")
    of_kinds = graph.delays.filter(pl.col("place") == ANY).select("kind", pl.col("median_ns").alias("of_kind"))
    table = table.join(of_kinds, on="kind", how="left", maintain_order="left")
    median = table.select(pl.coalesce("median_ns", "of_kind").fill_null(0)).to_series().to_numpy()
    return spread(edge_classes, median, own_times(graph, edge_classes))


def spread(edge_classes: Classes, median: Ints, own: Ints) -> Ints:
    """The constant of each edge from that of its class; `own` where it has no class."""
    constant: Ints = np.where(edge_classes.of >= 0, gather_rows(np.append(median, 0), edge_classes.of), own)
    return constant


def own_times(graph: Graph, edge_classes: Classes) -> Ints:
    """Times of edges that stand for work of their own, as measured; 0 for all others. Shape (edges,), ns.

    A transfer takes the median over the parts of its communication: it is work of that communication, as the duration
    of a kernel is work of that kernel. What is given from outside (when a lane that nothing else explains begins, how
    long peers that were not recorded kept us waiting) stays as it was. Work that starts while the one before runs does
    so after a part of that, see `usual_parts`.
    """
    own = np.zeros(edge_classes.of.size, dtype=np.int64, like=edge_classes.of)
    own[edge_classes.running] = usual_overlap_ns(graph)
    external, at = np.flatnonzero(edge_classes.given), np.flatnonzero(edge_classes.transfer)
    if not external.size and not at.size:
        return own
    source, target = points(graph)
    times = point_times(graph)
    own[external] = times[target[external]] - times[source[external]]
    meeting = source[at]
    slack = times[target[at]] - times[meeting]
    order = np.lexsort((slack, meeting))
    opens = np.flatnonzero(np.append(True, np.diff(meeting[order]) != 0)) if at.size else at
    size = np.diff(np.append(opens, at.size))
    middle = slack[order][opens + (size - 1) // 2] if at.size else slack
    own[at[order]] = np.repeat(middle, size)
    return own


_ROUNDS = 4  # which edge was the last depends on the delays, which depend on which edge was the last
_CALLS = (gs.BLOCK, gs.LAUNCH)
_EARLIEST = np.iinfo(np.int64).min // 2


class _Measured(Struct, frozen=True):
    """A graph's edges by the point they hold back, with measured times.

    Attributes:
        source: Time of each edge's source point.
        target: Time of each edge's target point.
        point: Target point of each edge.
        order: Edges by target point; None where they stand in that order.
        first: First of them for each point that is held back.
        held: These points.
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

    def of_points(self, points: Bools) -> tuple[_Measured, Ints]:
        """The same with the edges into some of the points alone, and which edges these are."""
        at = np.flatnonzero(points[self.point])
        order, first, held = _by_point(self.point[at])
        selected = structs.replace(
            self, source=self.source[at], target=self.target[at], point=self.point[at],
            order=order, first=first, held=held,
        )  # fmt: skip
        return selected, at

    def latest(self, values: Ints) -> Ints:
        """The highest value over the edges into each point; a very low one where there are none. Shape (points,)."""
        highest = np.full(2 * self.start.size, _EARLIEST, dtype=np.int64, like=self.source)
        if self.point.size:
            highest[self.held] = np.maximum.reduceat(self.ordered(values), self.first)
        return highest

    def winners(self, values: Ints) -> Ints:
        """For each held point the edge with the highest value; of equals the first in the order of edges."""
        return self.first_equal(values, self.latest(values)[self.point])

    def first_equal(self, values: Ints, highest: Ints) -> Ints:
        """For each held point its first edge whose value is the highest, which is given by edge."""
        winning = np.flatnonzero(self.ordered(values == highest))
        winning = winning if self.order is None else self.order[winning]
        points = self.point[winning]
        first = np.flatnonzero(np.append(True, points[1:] != points[:-1])) if winning.size else winning
        return winning[first]

    def ordered(self, values: NDArray[Any]) -> NDArray[Any]:
        return values if self.order is None else values[self.order]

    def others(self, values: Ints) -> Ints:
        """For each edge the highest value over the other edges into its point; a very low one where there are none."""
        highest = self.latest(values)[self.point]
        winners = self.first_equal(values, highest)
        rest = values.copy()
        rest[winners] = _EARLIEST
        highest[winners] = self.latest(rest)[self.point[winners]]
        return highest


def calibrate(graph: Graph) -> Graph:
    """Fill in delays, the own work of waiting nodes, and residuals.

    The delay of a class of edges is the median over those of its edges that held something back: whose source came
    after all else that the point waited for, with the delays of that. Of an edge it is at most its observed slack. A
    node whose end waits for something costs as much as calls of its name cost that had nothing to wait for. What is
    left over is the residual of the edge that was satisfied last, or of the node where that is its own work.

    Args:
        graph: A linked graph; what an earlier calibration found is replaced.

    Returns:
        The graph with `work_ns`, `residual_ns`, `delay_ns` and `delays` filled in. `Plan(graph).evaluate()` gives its
        measured times to the nanosecond.
    """
    source, target = points(graph)
    times = point_times(graph)
    order, first, held = _by_point(target)
    waits = np.zeros(graph.nodes.height, dtype=np.bool_, like=target)
    waits[target[target % 2 == 1] // 2] = True
    start, duration = times[0::2], times[1::2] - times[0::2]
    measured = _Measured(times[source], times[target], target, order, first, held, start, duration, waits)
    edge_classes = classes(graph)
    own = own_times(graph, edge_classes)
    cost = _own_cost(graph, measured)
    median, count = _class_medians(graph, measured, edge_classes, own, cost)
    constant = spread(edge_classes, median, own)
    slack = measured.target - measured.source
    blocked = measured.latest(measured.source + constant)[1::2] > measured.start + cost
    work = np.where(measured.waits & blocked, cost, measured.duration)
    delay = np.minimum(constant, slack)
    # What is left over is on the last satisfied edge into each point, or on the node whose work ends last.
    arrival = measured.source + delay
    edge_residual = np.zeros(delay.size, dtype=np.int64, like=delay)
    node_residual = np.zeros(work.size, dtype=np.int64, like=work)
    own_end = start + work
    node_last = own_end >= measured.latest(arrival)[1::2]
    node_residual[node_last] = (start + duration - own_end)[node_last]
    chosen = measured.winners(arrival)
    point = target[chosen]
    chosen = chosen[(point % 2 == 0) | ~node_last[point // 2]]
    edge_residual[chosen] = measured.target[chosen] - arrival[chosen]
    nodes = graph.nodes.with_columns(pl.Series("work_ns", work), pl.Series("residual_ns", node_residual))
    edges = graph.edges.with_columns(pl.Series("delay_ns", delay), pl.Series("residual_ns", edge_residual))
    # The `delays` frame: a row for each class, one for each kind as a whole, and one for transfers
    table = edge_classes.table.with_columns(pl.Series("count", count), pl.Series("median_ns", median))
    transfers = own[edge_classes.transfer]
    more = []
    if transfers.size:
        more.append(("rendezvous", TRANSFER, transfers.size, int(np.median(transfers))))
    if edge_classes.running.size:
        more.append(("stream", RUNNING, edge_classes.running.size, int(np.median(own[edge_classes.running]))))
    for (kind,), rows in table.filter(pl.col("count") > 0).group_by("kind", maintain_order=True):
        # The median of the kind is that of its most frequent class: classes differ more than edges of one class.
        most = rows.sort("count", descending=True, maintain_order=True).row(0, named=True)
        more.append((str(kind), ANY, int(rows["count"].sum()), most["median_ns"]))
    schema = gs.GRAPH_SCHEMAS["delays"]
    of_kinds = pl.DataFrame(more, schema=schema, orient="row")
    calibrated = replace(
        graph,
        nodes=nodes,
        edges=edges,
        delays=pl.concat([table.cast(schema), of_kinds]).sort("kind", "place", maintain_order=True),
    )
    share_classes(calibrated, edge_classes)
    return calibrated


def _by_point(point: Ints) -> tuple[Ints | None, Ints, Ints]:
    """Edges by target point: their order (None where they stand in it), the first of each point, and these points."""
    order = None if (point[1:] >= point[:-1]).all() else np.argsort(point, kind="stable")
    ordered = point if order is None else point[order]
    first = np.flatnonzero(np.append(True, ordered[1:] != ordered[:-1])) if ordered.size else ordered
    return order, first, ordered[first]


def _own_cost(graph: Graph, measured: _Measured) -> Ints:
    """What each waiting node takes when it has nothing to wait for: shape (nodes,), ns, at most its duration.

    The median over calls of its name that waited for nothing, or for what was done when they began; where there are
    none, over all launches that did not wait. Communication and waiting for other threads cost nothing themselves.
    """
    kind = array(graph, graph.nodes["kind"])
    alone = np.isin(kind, [gs.NODE_KINDS.index(name) for name in (gs.KERNEL, gs.COPY, gs.FILL)])
    # How much of a kernel that ends after the one before it was waiting for that, nobody says.
    cost = np.where(alone, measured.duration, 0)
    call = np.isin(kind, [gs.NODE_KINDS.index(name) for name in _CALLS])
    at = np.flatnonzero(call & measured.waits)
    if not at.size:
        return cost
    free = call & (measured.latest(measured.source)[1::2] <= measured.start)
    code = graph.nodes["name"][np.flatnonzero(call)].rank("dense").to_numpy().astype(np.int64)
    of = np.full(kind.size, -1, dtype=np.int64, like=kind)
    of[call] = code
    median, count = medians(of[free], measured.duration[free], int(code.max()) + 1)
    launches = free & (kind == gs.NODE_KINDS.index(gs.LAUNCH))
    usual = int(np.median(measured.duration[launches])) if launches.any() else 0
    cost[at] = np.minimum(np.where(count > 0, median, usual)[of[at]], measured.duration[at])
    return cost


def _class_medians(
    graph: Graph, measured: _Measured, edge_classes: Classes, own: Ints, cost: Ints
) -> tuple[Ints, Ints]:
    """The median delay of each class, and over how many edges; of classes without any, that of their kind.

    Where no edge of the file tells (a stream that never had work queued does not show the time between two works), a
    usual figure is taken; without samples of its own a class takes no more than the least slack of its edges.

    Launches count only where their stream had done something before: the first work of a stream may wait for what was
    submitted before the window.
    """
    slack = measured.target - measured.source
    size = edge_classes.table.height
    of_kind = edge_classes.table["kind"].to_physical().to_numpy().astype(np.int64)
    has_class = edge_classes.of >= 0
    least = np.full(size, np.iinfo(np.int64).max)
    np.minimum.at(least, edge_classes.of[has_class], slack[has_class])
    kind = array(graph, graph.edges["kind"])
    follows = np.zeros(2 * measured.start.size, dtype=np.bool_, like=kind)  # points behind other work of their stream
    follows[measured.point[kind == gs.EDGE_KINDS.index("stream")]] = True
    usable = has_class & ((kind != gs.EDGE_KINDS.index("launch")) | follows[measured.point])
    own_end = np.full(2 * measured.start.size, _EARLIEST, dtype=np.int64, like=measured.start)
    own_end[1::2] = measured.start + cost
    # Most edges only order; what they hold back is looked at where an edge of a class leads to it, too.
    relevant = np.zeros(own_end.size, dtype=np.bool_, like=own_end)
    relevant[measured.point[usable]] = True
    measured, at = measured.of_points(relevant)
    edge_classes = structs.replace(edge_classes, of=edge_classes.of[at])
    own, usable, slack = own[at], usable[at], slack[at]
    median = np.zeros(size, dtype=np.int64)
    count, several = median, np.zeros(len(gs.EDGE_KINDS), dtype=np.int64)
    for _ in range(_ROUNDS):
        arrival = measured.source + spread(edge_classes, median, own)
        # The source came after all else with its delay: an edge that is last only by its own class's delay would
        # confirm that.
        held = usable & (measured.source >= np.maximum(measured.others(arrival), own_end[measured.point]))
        before = median
        median, count = medians(edge_classes.of[held], slack[held], size)
        kinds, several = medians(of_kind[edge_classes.of[held]], slack[held], len(gs.EDGE_KINDS))
        median = np.where(count > 0, median, kinds[of_kind])
        if (median == before).all():
            break
    # A guess does not decide about what held something back.
    guess = np.where(several[of_kind] > 0, median, default_delay_ns(edge_classes.table))
    return np.where(count > 0, median, np.minimum(guess, least)), count


def medians(of: NDArray[np.signedinteger[Any]], values: Ints, classes: int) -> tuple[Ints, Ints]:
    """The lower median of the values of each class, and how many there are; 0 for a class without values.

    Args:
        of: Class of each value, 0 <= class < `classes`; shape (values,).
        values: Anything; shape (values,).
        classes: Number of classes.

    Returns:
        Medians and counts; shape (classes,).
    """
    order = np.lexsort((values, of))
    count = np.bincount(of, minlength=classes)
    first = np.cumsum(count) - count
    median = np.zeros(classes, dtype=np.int64)
    nonempty = count > 0
    median[nonempty] = values[order[(first + (count - 1) // 2)[nonempty]]]
    return median, count.astype(np.int64)
