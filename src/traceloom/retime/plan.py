"""Evaluate a graph: when everything happens, given how long things take."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from traceloom.array_types import Ints
from traceloom.errors import UsageError
from traceloom.model.graph import Graph
from traceloom.model.graph_arrays import is_large, points, room
from traceloom.retime.classes import class_delays
from traceloom.retime.layout import LayerSlice, PassLayout, Terms, layout
from traceloom.retime.running import in_proportion

_NEVER = int(np.iinfo(np.int64).min)
ABSENT = -(2**61)  # as delay of an edge: it holds nothing back
_GONE = ABSENT // 2  # residuals have been added
_TOGETHER = 8  # scenarios that go through the slices together
_SMALL = 50_000  # where there are fewer nodes than this
_OFTEN = 200  # or than this in a slice
LONGEST_NS = 2**53  # ns; 256 pieces of a slice this far apart are within int64


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
        self._layout: PassLayout = layout(graph)
        self._large = is_large(graph)
        times = np.zeros(self._layout.entry_of.size, dtype=np.int64)
        times[self._layout.start] = graph.nodes["start_ns"].to_numpy()
        self._roots: Ints = times[self._layout.entry[: self._layout.roots]]
        self._constants: Ints | None = None

    @property
    def slices(self) -> int:
        """How many times a pass stops to see what other chains have come to."""
        return len(self._layout.slices)

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

        Where the next work of a stream starts while one still runs, that is after so much of its work, not after so
        much time: with other works the delays of these edges are other ones in proportion.

        Args:
            work_ns: Work of each node, (N,) or (S, N); as in the graph where not given.
            delay_ns: Delay of each edge without its residual, (E,) or (S, E); `ABSENT` for an edge that shall not hold,
                as if it were not in the graph. Where not given: with residuals the graph's delays, without residuals
                the constants of the edges' classes.
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
        alone = work.ndim == delay.ndim == 1
        work, delay = np.atleast_2d(work), np.atleast_2d(delay)
        if work_ns is not None:
            delay = in_proportion(self.graph, work, delay)
        times = self._times(work, delay)
        return times[0] if alone else times

    def _times(self, work: Ints, delay: Ints) -> Ints:
        """Times of all points, (S, 2N), with works and delays as they stand here, (S or 1, N) and (S or 1, E)."""
        nodes = self.graph.nodes
        scenarios = max(work.shape[0], delay.shape[0])
        times = room(scenarios, 2 * nodes.height, large=self._large)
        # Together they share what each slice costs; apart they stay within the caches.
        together = _TOGETHER if nodes.height < max(_SMALL, _OFTEN * self.slices) else 1
        for low in range(0, scenarios, together):
            rows = slice(low, low + together)
            work_rows, delay_rows = (part[rows] if part.shape[0] > 1 else part for part in (work, delay))
            self._pass(work_rows, delay_rows, times[rows])
        if not delay.size or delay.min() >= _GONE:
            return times
        _, target = points(self.graph)
        for row in range(scenarios):
            row_delay = delay[row % len(delay)]
            absent = row_delay < _GONE
            left = np.bincount(target[~absent], minlength=times.shape[1])
            # Where an absent edge was all that held a point, that waits for nothing now: it is evaluated anew.
            if (left[target[absent & (target % 2 == 0)]] == 0).any():
                kept = np.flatnonzero(~absent)
                rest = Plan(replace(self.graph, edges=self.graph.edges[kept]))
                times[row] = rest._times(work[row % len(work)][np.newaxis], row_delay[np.newaxis, kept])[0]
        return times

    def _pass(self, work: Ints, delay: Ints, points: Ints) -> None:
        """Fill in the times of all points; all arguments have a row per scenario, or one for all."""
        plan = self._layout
        work, delay = self._padded(work), self._padded(delay)
        absent = delay < _GONE
        delay[absent] = 0
        # No two times, and no sums along pieces, are further apart than this. As doubles these do not wrap around, and
        # are exact as far as they are not refused.
        far = sum(int(np.abs(part).sum(axis=1, dtype=np.float64).max()) for part in (work, delay))
        far += int(self._roots.max()) - int(self._roots.min()) if self._roots.size else 0
        never = -4 * far - 1  # never the last, as long as something else holds that point
        far -= never * int(absent.sum(axis=1).max())
        # Along a piece: time = highest of (what holds an entry back - sum of links so far) + sum of links so far. The
        # term in brackets is the level of an entry. All pieces of a slice are gone through as one, each lifted above
        # the one before.
        lift = 2 * far + 1
        if lift > LONGEST_NS:
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
        alone = len(level) == 1
        for part in plan.stretches if alone else plan.slices:
            if alone and part.few:
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
        return room(rows, columns, large=self._large)

    def _take(self, values: Ints, index: Ints) -> Ints:
        """Some columns of the values; shape (scenarios, columns)."""
        return values.take(index, axis=1, out=self._room(len(values), index.size), mode="clip")

    def _weights(self, terms: Terms, work: Ints, delay: Ints) -> Ints:
        of_edge, of_node = self._take(delay, terms.edge), self._take(work, terms.node)
        if len(of_edge) < len(of_node):
            of_edge, of_node = of_node, of_edge
        of_edge += of_node
        return of_edge

    def _padded(self, values: Ints) -> Ints:
        """With a last column of zeros, for links that have no such term."""
        padded = self._room(values.shape[0], values.shape[1] + 1)
        padded[:, :-1], padded[:, -1] = values, 0
        return padded

    def _link_by_link(self, part: LayerSlice, level: Ints, ahead: Ints) -> None:
        plan = self._layout
        reached, gained, source = level.data, ahead.data, plan.source_entry.data
        offset = plan.offset[part.low : part.high + 1].tolist()
        begins = plan.begins[part.low : part.high].tolist()
        at = offset[0]
        for entry, begin, last in zip(range(part.low, part.high), begins, offset[1:], strict=True):
            best = _NEVER if begin else reached[entry - 1]
            for link in range(at, last):
                candidate = reached[source[link]] + gained[link]
                if candidate > best:  # noqa: PLR1730  (max() takes three times as long)
                    best = candidate
            reached[entry] = best
            at = last


def _whole(values: ArrayLike, count: int, name: str) -> NDArray[Any]:
    array = np.asarray(values)
    if array.ndim not in {1, 2} or array.shape[-1] != count:
        raise UsageError(
            f"`{name}` has shape {array.shape}, expected ({count},) or (scenarios, {count})", slug="wrong-shape"
        )
    # Rounded, not cut off: a half of 3 ns is 2 ns as often as 1 ns.
    return array if array.dtype == np.int64 else np.rint(array).astype(np.int64)
