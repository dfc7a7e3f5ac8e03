"""Calibrate a graph: how long each kind of edge takes, what waiting calls cost themselves, and what is left over."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import polars as pl
from msgspec import Struct, structs
from numpy.typing import NDArray

from traceloom.array_types import Bools, Ints
from traceloom.model import graph_schema as gs
from traceloom.model.graph import Graph
from traceloom.model.graph_arrays import array, point_times, points
from traceloom.retime.classes import ANY, TRANSFER, Classes, classes, own_times, same_classes, spread, usual_ns
from traceloom.retime.running import RUNNING

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
    same_classes(calibrated, edge_classes)
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
    guess = np.where(several[of_kind] > 0, median, usual_ns(edge_classes.table))
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
