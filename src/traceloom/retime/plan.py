"""New times of all points of a graph from works and delays, fast enough to be asked hundreds of times.

Points (start and end of every node) form chains: a host thread from segment to segment, a stream from kernel to kernel.
Along a chain a time is the one before plus a weight; only at *entries* (points that wait for another chain too) a
maximum is taken. With S the running sum of weights along the chains and y = time - S, a chain is

    y(entry) = max(y(entry before), max over other sources (y + S of source + delay) - S(entry))

which is a running maximum. Entries get a level, higher than those of the chains they wait for, so that all entries of
one level are found in a few array operations. Nothing is assumed about measured times or the order of rows.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from traceloom.errors import InvariantError
from traceloom.model.graph import Graph

Ints = NDArray[np.int64]
Flags = NDArray[np.bool_]

# Edges along which a lane goes on; others cross lanes.
_ALONG = ("call", "thread", "stream")
# Below this many entries per level a plain loop is faster than array operations on each.
_FEW_PER_LEVEL = 12


class Plan:
    """The structure of a graph, prepared once.

    Args:
        graph: Its edges decide; times and delays may be replaced in every evaluation.

    Attributes:
        levels: Number of levels: how often a path changes from chain to chain at most.
        entries: Number of points at which a maximum is taken.

    Raises:
        InvariantError: `broken-cycle`: points wait for each other.
    """

    def __init__(self, graph: Graph) -> None:
        nodes = graph.nodes.height
        self._work = graph.nodes["work_ns"].to_numpy()
        self._node_residual = graph.nodes["residual_ns"].to_numpy()
        self._delay = graph.edges["delay_ns"].to_numpy()
        self._edge_residual = graph.edges["residual_ns"].to_numpy()
        self._as_lists: tuple[list[int], list[int], list[int]] | None = None
        measured = graph.point_times()
        source, target = graph.points()
        primary = _primary(graph, source, target)
        before, edge_of = _before(nodes, source, target, primary)
        self._lay_chains(before, edge_of)
        crossing = np.flatnonzero(~primary)
        self._find_entries(target[crossing], before)
        level = self._levels(source[crossing], target[crossing])
        self._arrange(source[crossing], target[crossing], crossing, level, measured)

    def evaluate(self, work_ns: Ints | None = None, delay_ns: Ints | None = None, *, residuals: bool = True) -> Ints:
        """Times of all points, 2 per node (see `Graph.points`).

        Args:
            work_ns: Work of every node, or S rows of it; the graph's where None.
            delay_ns: Delay of every edge, or S rows of it; the graph's where None.
            residuals: Add the residuals of nodes and edges.

        Returns:
            int64, shape (2 x nodes), or (S, 2 x nodes) where rows were given.
        """
        rows = max(np.ndim(work_ns) if work_ns is not None else 1, np.ndim(delay_ns) if delay_ns is not None else 1)
        if rows == 1:
            return self._once(work_ns, delay_ns, residuals=residuals)
        works = np.atleast_2d(self._work if work_ns is None else work_ns)
        delays = np.atleast_2d(self._delay if delay_ns is None else delay_ns)
        count = max(len(works), len(delays))
        return np.stack(
            [self._once(works[i % len(works)], delays[i % len(delays)], residuals=residuals) for i in range(count)]
        )

    def _once(self, work_ns: Ints | None, delay_ns: Ints | None, *, residuals: bool) -> Ints:
        work = self._work if work_ns is None else work_ns
        delay = self._delay if delay_ns is None else delay_ns
        if residuals:
            work, delay = work + self._node_residual, delay + self._edge_residual
        sums = self._running_sums(work, delay)
        y = np.empty(self.entries, dtype=np.int64)
        y[: self._fixed_count] = self._fixed_times - sums[self._entry_at[: self._fixed_count]]
        ahead = sums[self._from_at] + delay[self._crossing] - sums[self._entry_at][self._to_entry]
        if self.entries > _FEW_PER_LEVEL * self.levels:
            self._by_level(y, ahead)
        else:
            self._one_by_one(y, ahead)
        times = np.empty(len(self._sequence), dtype=np.int64)
        times[self._sequence] = y[self._entry_of] + sums
        return times

    def _running_sums(self, work: Ints, delay: Ints) -> Ints:
        """Sum of weights up to each place of the sequence; it goes on over the heads of chains, whose weight is 0."""
        weight = np.zeros(len(self._sequence), dtype=np.int64)
        weight[self._end_at] = work[self._end_node]
        weight[self._along_at] = delay[self._along_edge]
        return np.cumsum(weight)

    def _by_level(self, y: Ints, ahead: Ints) -> None:
        for first, last, low, high, runs in self._slices:
            reached = np.maximum.reduceat(
                y[self._from_entry[low:high]] + ahead[low:high], self._first_of[first:last] - low
            )
            before = self._entry_before[first:last][runs]
            known = before >= 0
            at = runs[known]
            reached[at] = np.maximum(reached[at], y[before[known]])
            if len(runs) < last - first:
                reached = _running_maximum(reached, runs)
            y[first:last] = reached

    def _one_by_one(self, y: Ints, ahead: Ints) -> None:
        values: list[int] = y.tolist()
        gained: list[int] = ahead.tolist()
        sources, starts, befores = self._lists()
        for entry in range(self._fixed_count, self.entries):
            begin = starts[entry]
            best = values[sources[begin]] + gained[begin]
            for at in range(begin + 1, starts[entry + 1]):
                found = values[sources[at]] + gained[at]
                best = max(best, found)
            before = befores[entry]
            values[entry] = max(best, values[before]) if before >= 0 else best
        y[:] = values

    def _lists(self) -> tuple[list[int], list[int], list[int]]:
        if self._as_lists is None:
            starts = np.append(self._first_of, len(self._from_entry))
            self._as_lists = (self._from_entry.tolist(), starts.tolist(), self._entry_before.tolist())
        return self._as_lists

    def _lay_chains(self, before: Ints, edge_of: Ints) -> None:
        """Put the points of each chain behind each other."""
        head, rank = _chains(before)
        sequence = np.lexsort((rank, head))
        self._sequence = sequence
        place = np.empty(len(sequence), dtype=np.int64)
        place[sequence] = np.arange(len(sequence))
        self._place = place
        follows = before[sequence] >= 0
        is_end = (sequence & 1).astype(np.bool_)
        self._end_at = np.flatnonzero(is_end)
        self._end_node = sequence[self._end_at] >> 1
        self._along_at = np.flatnonzero(follows & ~is_end)
        self._along_edge = edge_of[sequence[self._along_at]]

    def _find_entries(self, target: Ints, before: Ints) -> None:
        """Number the entries in the order of the sequence."""
        is_entry = before[self._sequence] < 0
        self._is_head = is_entry.copy()
        is_entry[self._place[target]] = True
        self._number = np.cumsum(is_entry) - 1  # of the entry at or before each place of the sequence
        self._places_of_entries = np.flatnonzero(is_entry)
        self.entries = len(self._places_of_entries)

    def _levels(self, source: Ints, target: Ints) -> Ints:
        """The level of each entry (numbered by sequence): more than those of the chains that it waits for."""
        count = self.entries
        head = self._is_head[self._places_of_entries]
        from_entry, to_entry = self._number[self._place[source]], self._number[self._place[target]]
        order = np.argsort(from_entry, kind="stable")
        waiting_for: list[int] = np.bincount(to_entry, minlength=count).tolist()
        next_of = to_entry[order].tolist()
        first = np.concatenate([[0], np.cumsum(np.bincount(from_entry, minlength=count))]).tolist()
        is_head: list[bool] = [*head.tolist(), True]
        for entry in range(count):
            waiting_for[entry] += not is_head[entry]
        ready = [entry for entry in range(count) if not waiting_for[entry]]
        level = [0] * count
        done = 0
        while ready:
            entry = ready.pop()
            done += 1
            mine = level[entry]
            if not is_head[entry + 1]:
                level[entry + 1] = max(level[entry + 1], mine)
                waiting_for[entry + 1] -= 1
                if not waiting_for[entry + 1]:
                    ready.append(entry + 1)
            for other in next_of[first[entry] : first[entry + 1]]:
                if level[other] <= mine:
                    level[other] = mine + 1
                waiting_for[other] -= 1
                if not waiting_for[other]:
                    ready.append(other)
        if done < count:
            stuck = int(self._sequence[self._places_of_entries[next(e for e in range(count) if waiting_for[e])]])
            raise InvariantError(
                f"{count - done} points wait for each other, one of them is of node {stuck // 2}",
                slug="broken-cycle",
                hint="this is a defect of Traceloom, please report it",
            )
        return np.array(level, dtype=np.int64)

    def _arrange(self, source: Ints, target: Ints, crossing: Ints, level: Ints, measured: Ints) -> None:
        """Number entries anew by level, so that each level is one slice of entries and one of crossing edges."""
        by_level = np.argsort(level, kind="stable")
        renamed = np.empty(self.entries, dtype=np.int64)
        renamed[by_level] = np.arange(self.entries)
        self._entry_at = self._places_of_entries[by_level]
        self._entry_of = renamed[self._number]
        to_entry = renamed[self._number[self._place[target]]]
        order = np.argsort(to_entry, kind="stable")
        self._crossing = crossing[order]
        self._to_entry = to_entry[order]
        self._from_at = self._place[source[order]]
        self._from_entry = self._entry_of[self._from_at]
        self._first_of = np.searchsorted(self._to_entry, np.arange(self.entries))
        self._fixed_count = int((level == 0).sum())
        self._fixed_times = measured[self._sequence[self._entry_at[: self._fixed_count]]]
        head = self._is_head[self._places_of_entries][by_level]
        self._entry_before = np.where(head, -1, renamed[np.maximum(by_level - 1, 0)])
        self.levels = int(level.max(initial=0)) + 1
        self._slices = list(self._level_slices(level[by_level]))

    def _level_slices(self, level: Ints) -> Any:
        edges = np.append(self._first_of, len(self._to_entry))
        bounds = np.searchsorted(level, np.arange(1, self.levels + 1))
        for first, last in zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True):
            # A run are entries of one chain, one behind the other: all but its first follow the entry numbered before.
            follows = self._entry_before[first:last] == np.arange(first - 1, last - 1)
            follows[0] = False
            yield first, last, int(edges[first]), int(edges[last]), np.flatnonzero(~follows)


def _primary(graph: Graph, source: Ints, target: Ints) -> Flags:
    """Which edges continue a chain: at most one into each start, at most one out of each end."""
    along = graph.edges["kind"].is_in(list(_ALONG)).to_numpy() & ((source & 1) == 1) & ((target & 1) == 0)
    found = np.flatnonzero(along)
    for points in (target, source):
        _, first = np.unique(points[found], return_index=True)
        found = found[np.sort(first)]
    primary = np.zeros(len(source), dtype=np.bool_)
    primary[found] = True
    return primary


def _before(nodes: int, source: Ints, target: Ints, primary: Flags) -> tuple[Ints, Ints]:
    """The point before each point on its chain (-1: none), and for starts the edge that leads there."""
    before = np.full(2 * nodes, -1, dtype=np.int64)
    edge_of = np.full(2 * nodes, -1, dtype=np.int64)
    before[1::2] = np.arange(nodes) * 2
    chosen = np.flatnonzero(primary)
    before[target[chosen]] = source[chosen]
    edge_of[target[chosen]] = chosen
    return before, edge_of


def _chains(before: Ints) -> tuple[Ints, Ints]:
    """Head of each point's chain and its distance from there, by pointer jumping."""
    everyone = np.arange(len(before))
    ancestor = np.where(before < 0, everyone, before)
    rank = (before >= 0).astype(np.int64)
    for _ in range(len(before).bit_length() + 1):
        further = ancestor[ancestor]
        if np.array_equal(further, ancestor):
            return ancestor, rank
        rank += rank[ancestor]
        ancestor = further
    raise InvariantError(
        "a lane goes round in a circle",
        slug="broken-cycle",
        hint="this is a defect of Traceloom, please report it",
    )


def _running_maximum(values: Ints, runs: Ints) -> Ints:
    """Running maximum that begins anew at each of `runs` (places in `values`, the first is 0)."""
    low = int(values.min())
    room = int(values.max()) - low + 1
    if room * len(runs) >= 2**62:
        pieces = np.split(values, runs[1:])
        return np.concatenate([np.maximum.accumulate(piece) for piece in pieces])
    number = np.zeros(len(values), dtype=np.int64)
    number[runs[1:]] = 1
    lift = np.cumsum(number) * room
    lifted: Ints = np.maximum.accumulate(values - low + lift)
    return lifted - lift + low
