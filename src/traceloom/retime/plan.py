"""Evaluate a graph: when everything happens, given how long things take."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from traceloom.errors import UsageError
from traceloom.model.graph import Graph
from traceloom.retime.classes import class_delays
from traceloom.retime.layout import Layout, Terms, layout

Ints = NDArray[np.int64]

_NEVER = np.iinfo(np.int64).min
ABSENT = -(2**61)  # as delay of an edge: it holds nothing back
_LIMIT = 2**53  # ns; 256 pieces of a slice this far apart are within int64


class Plan:
    """A graph made ready for many passes.

    The time of a point is the latest of what it waits for: `time(source) + delay` over its edges and, for the end of a
    node, `time(start) + work`. What waits for nothing keeps its measured time. All times are integers.

    Args:
        graph: Any graph without a circle, calibrated or not.

    Raises:
        InvariantError: `broken-cycle`: nodes wait for each other.
    """

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self._layout: Layout = layout(graph)
        self._roots = self._root_times()
        self._constants: Ints | None = None

    @property
    def constants(self) -> Ints:
        """The delay that each edge's class has by calibration, whatever the edge itself showed; shape (edges,), ns."""
        if self._constants is None:
            self._constants = class_delays(self.graph)
        return self._constants

    def evaluate(
        self, work_ns: ArrayLike | None = None, delay_ns: ArrayLike | None = None, *, residuals: bool = True
    ) -> Ints:
        """New times of all points.

        Shapes: N nodes, E edges, S scenarios.

        Args:
            work_ns: Work of each node, (N,) or (S, N); as in the graph where not given.
            delay_ns: Delay of each edge without its residual, (E,) or (S, E); `ABSENT` for an edge that shall not hold.
                Where not given: with residuals those of the graph, without residuals the constants of the classes.
            residuals: Whether what no known cause explains takes as long as it took. With residuals the times of a
                calibrated graph are the measured ones to the nanosecond.

        Returns:
            Times in ns, int64, of points 2i (start of node i) and 2i + 1 (its end): (2N,), or (S, 2N) where one of
            the arguments has scenarios.

        Raises:
            UsageError: `wrong-shape`: an argument fits neither the nodes nor the edges.
        """
        nodes, edges = self.graph.nodes, self.graph.edges
        work = nodes["work_ns"].to_numpy() if work_ns is None else _whole(work_ns, nodes.height, "work_ns")
        if delay_ns is not None:
            delay = _whole(delay_ns, edges.height, "delay_ns")
        else:
            delay = edges["delay_ns"].to_numpy() if residuals else self.constants
        if residuals:
            work = work + nodes["residual_ns"].to_numpy()
            delay = delay + edges["residual_ns"].to_numpy()
        if work.ndim == delay.ndim == 1:
            return self._pass(work, delay)
        scenarios = max(part.shape[0] for part in (work, delay) if part.ndim == 2)
        work, delay = (np.broadcast_to(part, (scenarios, part.shape[-1])) for part in (work, delay))
        times = np.empty((scenarios, 2 * nodes.height), dtype=np.int64)
        for row in range(scenarios):
            times[row] = self._pass(work[row], delay[row])
        return times

    def _root_times(self) -> Ints:
        plan = self._layout
        times = np.zeros(plan.chain.edge.size, dtype=np.int64)
        times[plan.start] = self.graph.nodes["start_ns"].to_numpy()
        return times[plan.roots]

    def _pass(self, work: Ints, delay: Ints) -> Ints:
        plan = self._layout
        work, delay = np.append(work, 0), np.append(delay, 0)
        absent = delay < ABSENT // 2
        if absent.any():
            delay[absent] = 0
            delay[absent] = -self._bound(work, delay) - 1
        along, across = _weights(plan.chain, work, delay), _weights(plan.link, work, delay)
        # Along a piece: time = highest of (what holds a place back - sum of links so far) + sum of links so far. The
        # pieces of a slice are gone through as one, each lifted so far that none reaches into the next.
        lift = 2 * self._bound(work, delay) + 1
        if lift > _LIMIT:
            raise UsageError("these times add up to more than 100 days", slug="times-too-long")
        sums = np.cumsum(along)
        sums -= plan.piece * lift
        level = np.full(sums.size, _NEVER, dtype=np.int64)
        level[plan.roots] = self._roots - sums[plan.roots]
        times = np.empty(sums.size, dtype=np.int64)
        sums_held, offset, held, source = sums[plan.held], plan.offset, plan.held, plan.source
        for part in plan.slices:
            low, high = part.low, part.high
            if part.last > part.first:
                arrived = times[source[part.first : part.last]]
                arrived += across[part.first : part.last]
                latest = np.maximum.reduceat(arrived, offset[part.held : part.held_last] - part.first)
                latest -= sums_held[part.held : part.held_last]
                level[held[part.held : part.held_last]] = latest
            reached = level[low:high]
            np.maximum.accumulate(reached, out=reached)
            np.add(reached, sums[low:high], out=times[low:high])
        if absent.any():
            np.maximum(times, self._roots.min(), out=times)
        return self._points(times, work)

    def _points(self, times: Ints, work: Ints) -> Ints:
        plan = self._layout
        points = np.empty(2 * plan.nodes, dtype=np.int64)
        points[0::2] = times[plan.start]
        points[1::2] = times[plan.end] + work[:-1] * plan.derived
        return points

    def _bound(self, work: Ints, delay: Ints) -> int:
        """No two times, and no sums along pieces, are further apart than this."""
        far = int(np.abs(work).sum()) + int(np.abs(delay).sum())
        return far + int(np.ptp(self._roots)) if self._roots.size else far


def _weights(terms: Terms, work: Ints, delay: Ints) -> Ints:
    weights: Ints = delay[terms.edge]
    weights += work[terms.node]
    return weights


def _whole(values: ArrayLike, count: int, name: str) -> NDArray[Any]:
    array = np.asarray(values)
    if array.ndim not in {1, 2} or array.shape[-1] != count:
        raise UsageError(
            f"`{name}` has shape {array.shape}, expected ({count},) or (scenarios, {count})", slug="wrong-shape"
        )
    # Rounded, not cut off: a half of 3 ns is 2 ns as often as 1 ns.
    return array if array.dtype == np.int64 else np.rint(array).astype(np.int64)
