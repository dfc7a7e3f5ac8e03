"""Evaluate a graph in which things contend: transfers for links, and work for lanes that do one thing at a time.

A point is settled once all that it waits for is. Only what contends must be looked at in the order of time: the starts
of transfers and of work on such lanes wait in a heap, everything else follows from them at once. Of equal times the
ends of transfers come first, then starts in the order of communications and nodes: nothing depends on any other order.
"""

from __future__ import annotations

import heapq
import math
from dataclasses import dataclass

import numpy as np

from traceloom.errors import InvariantError
from traceloom.graph import ABSENT
from traceloom.graph.graph import Graph, plain, points
from traceloom.trace.array_types import Floats, Ints
from traceloom.workload.simulate.transfers import FULL, LinkBundles, Operations, fair_speeds

_ROUNDING = 1e-6  # ns
_NEVER = int(np.iinfo(np.int64).min)


@dataclass(eq=False, slots=True)
class Evaluated:
    """When everything happens.

    Attributes:
        times: Of points 2i (start of node i) and 2i + 1 (its end), ns.
        waiting_ns: How much longer transfers took because a bundle of links was full, by bundle.
        contended: Whether anything had to wait for a link or a lane.
    """

    times: Ints
    waiting_ns: Floats
    contended: bool = False


class _Sharing:
    """The transfers that are under way, and how fast they are.

    Args:
        bundles: The links.
        of_class: Class of each communication.
    """

    def __init__(self, bundles: LinkBundles, of_class: list[int]) -> None:
        self.contended = False
        self.waiting: Floats = np.zeros(bundles.count)
        self._bundles = bundles
        self._of_class = of_class
        self._now = 0  # until when the running ones are accounted for
        # Of each running one: time left at full speed, end, speed, and the bundle that holds it back.
        self._left: dict[int, float] = {}
        self._end: dict[int, int] = {}
        self._speed: dict[int, float] = {}
        self._held_by: dict[int, int] = {}
        self._used: Floats = np.zeros(bundles.count)  # what they ask of each bundle
        self._ends: list[tuple[int, int]] = []  # a heap of their ends, and of ends that they had before
        self._slow = 0  # how many are slower than alone

    def begin(self, operation: int, at: int, alone: int) -> None:
        """A transfer starts that takes so long alone."""
        self.advance(at)
        # By its clock it may have begun a moment ago.
        self._left[operation] = float(alone - (self._now - at))
        self.ends_at(operation, at + alone)
        self._speed[operation] = 1.0
        bundle, share = self._bundles.of(self._of_class[operation])
        self._used[bundle] += share
        if self._slow or (self._used[bundle] > FULL).any():
            self.share()

    def next_end(self) -> tuple[int, int] | None:
        """The first end of all, and whose it is; None where nothing is under way."""
        while self._ends and self._end.get(self._ends[0][1]) != self._ends[0][0]:
            heapq.heappop(self._ends)  # it has come to another end since
        return self._ends[0] if self._ends else None

    def finish(self, operation: int) -> int:
        """A transfer ends; returns when."""
        end = self._end.pop(operation)
        self.advance(end)
        self._slow -= self._speed.pop(operation) < 1
        del self._left[operation]
        self._held_by.pop(operation, None)
        bundle, share = self._bundles.of(self._of_class[operation])
        self._used[bundle] = np.maximum(self._used[bundle] - share, 0.0)
        if self._slow:
            self.share()
        return end

    def ends_at(self, operation: int, end: int) -> None:
        self._end[operation] = end
        heapq.heappush(self._ends, (end, operation))

    def advance(self, until: int) -> None:
        passed = until - self._now
        if passed <= 0:
            return
        for operation, speed in self._speed.items():
            self._left[operation] -= passed * speed
            if speed < 1:
                self.waiting[self._held_by[operation]] += passed * (1 - speed)
        self._now = until

    def share(self) -> None:
        """New speeds, and with them new ends, for those whose speed changes."""
        running = np.array(sorted(self._speed), dtype=np.int64)
        row, bundle, asked = self._bundles.uses(np.array([self._of_class[operation] for operation in running.tolist()]))
        used, column = np.unique(bundle, return_inverse=True)
        share = np.zeros((running.size, used.size))
        share[row, column] = asked
        speeds, held_by = fair_speeds(share)
        self._slow = int((speeds < 1).sum())
        for operation, speed, link in zip(running.tolist(), speeds.tolist(), held_by.tolist(), strict=True):
            if speed != self._speed[operation]:
                self.contended = True
                self._speed[operation] = speed
                left = max(self._left[operation], 0.0)
                self.ends_at(operation, self._now + math.ceil(left / speed - _ROUNDING))
            self._held_by[operation] = int(used[link])


def evaluate(  # noqa: PLR0917  (one loop: a call per point would take three times as long)
    graph: Graph,
    work: Ints,
    delay: Ints,
    of: Operations,
    time_ns: Ints,
    of_class: Ints,
    bundles: LinkBundles,
    lane: Ints,
) -> Evaluated:
    """When everything happens.

    Args:
        graph: The graph; M communications, N nodes.
        work: Of each node, residual included; shape (N,), ns.
        delay: Of each edge, residual included; shape (edges,), ns.
        of: The communications.
        time_ns: How long each takes alone, shape (M,).
        of_class: Class of each in the bundles; -1 where it needs no link; shape (M,).
        bundles: The links.
        lane: Lane of each node that does one thing at a time; -1 for none; shape (N,).

    Raises:
        InvariantError: `broken-cycle`: nodes wait for each other.
    """
    nodes, count = graph.nodes.height, len(of)
    source, target = (plain(ends) for ends in points(graph))
    kept = plain(delay) >= ABSENT // 2
    kept[of.edge] = False
    # Two more points for each communication: where its transfer starts, and where it ends.
    begins, ends = 2 * nodes + np.arange(count), 2 * nodes + count + np.arange(count)
    meeting = 2 * of.table["meeting"].to_numpy().astype(np.int64)
    none = np.zeros(count, dtype=np.int64)
    froms = np.concatenate([source[kept], meeting, ends[of.of_edge]])
    tos = np.concatenate([target[kept], begins, target[of.edge]])
    # What needs no link may take another time for each of its parts.
    shared = np.where(of_class >= 0, time_ns, 0)
    gains = np.concatenate([plain(delay)[kept], none, plain(delay)[of.edge] - shared[of.of_edge]])
    total = 2 * nodes + 2 * count
    waits_of = np.bincount(tos, minlength=total)
    waits_of[1 : 2 * nodes : 2] += 1
    waits_of[ends] = 1
    order = np.argsort(froms, kind="stable")
    follower, gain = tos[order].tolist(), gains[order].tolist()
    first: list[int] = np.searchsorted(froms[order], np.arange(total + 1)).tolist()
    roots = np.flatnonzero(waits_of[: 2 * nodes] == 0)
    when = np.full(total, _NEVER, dtype=np.int64)
    when[roots] = plain(graph.nodes["start_ns"].to_numpy())[roots // 2]
    time: list[int] = when.tolist()
    waits: list[int] = waits_of.tolist()
    works: list[int] = plain(work).tolist()
    lanes: list[int] = lane.tolist()
    alone: list[int] = shared.tolist()
    free_at: dict[int, int] = {}
    classes: list[int] = of_class.tolist()
    sharing = _Sharing(bundles, classes)
    heap: list[tuple[int, int]] = []
    ready: list[int] = []
    contended = False
    limit, last = 2 * nodes, 2 * nodes + count

    def settle(point: int) -> None:
        if point >= limit:
            heapq.heappush(heap, (time[point], point - limit))
        elif lanes[point >> 1] >= 0 and not point & 1:
            heapq.heappush(heap, (time[point], count + (point >> 1)))
        else:
            ready.append(point)

    done = 0
    for point in roots[::-1].tolist():
        settle(point)
    while True:
        while ready:
            point = ready.pop()
            done += 1
            at = time[point]
            if point < limit and not point & 1:
                following = point + 1
                candidate = at + works[point >> 1]
                if candidate > time[following]:  # noqa: PLR1730  (max() takes three times as long)
                    time[following] = candidate
                left = waits[following] - 1
                waits[following] = left
                if not left:
                    ready.append(following)
            for link in range(first[point], first[point + 1]):
                following = follower[link]
                candidate = at + gain[link]
                if candidate > time[following]:  # noqa: PLR1730  (max() takes three times as long)
                    time[following] = candidate
                left = waits[following] - 1
                waits[following] = left
                if not left:
                    settle(following)
        end = sharing.next_end()
        if end is not None and (not heap or end[0] <= heap[0][0]):
            operation = end[1]
            time[last + operation] = sharing.finish(operation)
            ready.append(last + operation)
        elif heap:
            at, number = heapq.heappop(heap)
            if number >= count:
                node = number - count
                start = max(at, free_at.get(lanes[node], at))
                contended |= start > at
                free_at[lanes[node]] = start + works[node]
                time[2 * node] = start
                ready.append(2 * node)
            elif classes[number] < 0:
                time[last + number] = at
                ready.append(last + number)
            else:
                sharing.begin(number, at, alone[number])
        else:
            break
    if done < 2 * nodes + count:
        raise InvariantError("nodes wait for each other", slug="broken-cycle")
    times = np.array(time[: 2 * nodes], dtype=np.int64)
    return Evaluated(times, sharing.waiting, contended or sharing.contended)
