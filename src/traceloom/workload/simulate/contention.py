"""Evaluation of a graph with contention: of transfers for links, and of work for lanes that run one
node at a time.

A point is settled once all its dependencies are. Only contention must be processed in order of
time: the starts of transfers and of work on such lanes wait in a heap; everything else follows from
them at once. At equal times, ends of transfers come first, then starts in the order of
communications and nodes, so the result does not depend on any other order.
"""

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from traceloom.errors import InvariantError
from traceloom.graph import ABSENT
from traceloom.graph.graph import Graph, get_edge_points, unwrap_array
from traceloom.trace.array_types import Floats, Ints
from traceloom.workload.simulate.transfers import FULL, LinkBundles, Operations, compute_fair_speeds

_ROUNDING_TOLERANCE_NS = 1e-6  # ns
_NOT_REACHED = int(np.iinfo(np.int64).min)


@dataclass(eq=False, slots=True)
class SimulatedTimes:
    """The evaluated times of a graph.

    Attributes:
        times: Of points 2i (start of node i) and 2i + 1 (its end), ns.
        waiting_ns: Extra time of transfers due to full links, by bundle.
        contended: Whether anything had to wait for a link or a lane.
        turns: Nodes of the lanes that run one node at a time, in the order in which they began.
    """

    times: Ints
    waiting_ns: Floats
    contended: bool = False
    turns: Sequence[int] = ()


class _ActiveTransfers:
    """The running transfers and their speeds.

    Args:
        bundles: The links.
        link_class: Class of each communication.
    """

    def __init__(self, bundles: LinkBundles, link_class: list[int]) -> None:
        self.contended = False
        self.waiting: Floats = np.zeros(bundles.count)
        self._bundles = bundles
        self._link_class = link_class
        self._now = 0  # time up to which progress is accounted for
        # Per running transfer: time left at full speed, end, speed, and the bundle that limits it.
        self._remaining_ns: dict[int, float] = {}
        self._end: dict[int, int] = {}
        self._speed: dict[int, float] = {}
        self._bottleneck: dict[int, int] = {}
        self._demand: Floats = np.zeros(bundles.count)  # total demand on each bundle
        self._end_heap: list[tuple[int, int]] = []  # a heap of their ends, including outdated ones
        self._slowed_count = 0  # number of transfers slowed by contention

    def begin(self, operation: int, start_ns: int, uncontended_ns: int) -> None:
        """Starts a transfer that takes `uncontended_ns` alone."""
        self.advance(start_ns)
        # By the rank's clock it may have started slightly earlier.
        self._remaining_ns[operation] = float(uncontended_ns - (self._now - start_ns))
        self.schedule_end(operation, start_ns + uncontended_ns)
        self._speed[operation] = 1.0
        bundle, share = self._bundles.of(self._link_class[operation])
        self._demand[bundle] += share
        if self._slowed_count or (self._demand[bundle] > FULL).any():
            self.share()

    def get_next_end(self) -> tuple[int, int] | None:
        """Returns the earliest end and its transfer; None if none is running."""
        while self._end_heap and self._end.get(self._end_heap[0][1]) != self._end_heap[0][0]:
            heapq.heappop(self._end_heap)  # outdated end
        return self._end_heap[0] if self._end_heap else None

    def finish(self, operation: int) -> int:
        end = self._end.pop(operation)
        self.advance(end)
        self._slowed_count -= self._speed.pop(operation) < 1
        del self._remaining_ns[operation]
        self._bottleneck.pop(operation, None)
        bundle, share = self._bundles.of(self._link_class[operation])
        self._demand[bundle] = np.maximum(self._demand[bundle] - share, 0.0)
        if self._slowed_count:
            self.share()
        return end

    def schedule_end(self, operation: int, end: int) -> None:
        self._end[operation] = end
        heapq.heappush(self._end_heap, (end, operation))

    def advance(self, time_ns: int) -> None:
        elapsed_ns = time_ns - self._now
        if elapsed_ns <= 0:
            return
        for operation, speed in self._speed.items():
            self._remaining_ns[operation] -= elapsed_ns * speed
            if speed < 1:
                self.waiting[self._bottleneck[operation]] += elapsed_ns * (1 - speed)
        self._now = time_ns

    def share(self) -> None:
        """Recomputes speeds, and the ends of transfers whose speed changes."""
        running = np.array(sorted(self._speed), dtype=np.int64)
        row, bundle, requested = self._bundles.uses(
            np.array([self._link_class[operation] for operation in running.tolist()])
        )
        used_bundles, column = np.unique(bundle, return_inverse=True)
        share = np.zeros((running.size, used_bundles.size))
        share[row, column] = requested
        speeds, bottlenecks = compute_fair_speeds(share)
        self._slowed_count = int((speeds < 1).sum())
        for operation, speed, bottleneck in zip(
            running.tolist(), speeds.tolist(), bottlenecks.tolist(), strict=True
        ):
            if speed != self._speed[operation]:
                self.contended = True
                self._speed[operation] = speed
                remaining_ns = max(self._remaining_ns[operation], 0.0)
                self.schedule_end(
                    operation, self._now + math.ceil(remaining_ns / speed - _ROUNDING_TOLERANCE_NS)
                )
            self._bottleneck[operation] = int(used_bundles[bottleneck])


def simulate_contention(  # noqa: PLR0917  (one loop: a call per point would take three times as long)
    graph: Graph,
    node_work_ns: Ints,
    edge_delay_ns: Ints,
    operations: Operations,
    transfer_ns: Ints,
    link_class: Ints,
    bundles: LinkBundles,
    node_lane: Ints,
) -> SimulatedTimes:
    """Returns the times of all points.

    Args:
        graph: The graph; M communications, N nodes.
        node_work_ns: Work of each node, residual included; shape (N,), ns.
        edge_delay_ns: Delay of each edge, residual included; shape (edges,), ns.
        operations: The communications.
        transfer_ns: Duration of each alone, shape (M,).
        link_class: Class of each in the bundles; -1 if it needs no link; shape (M,).
        bundles: The links.
        node_lane: Lane of each node on a lane that runs one node at a time, else -1; shape (N,).

    Raises:
        InvariantError: `broken-cycle`: nodes wait for each other.
    """
    node_count, operation_count = graph.nodes.height, len(operations)
    source, target = (unwrap_array(end_points) for end_points in get_edge_points(graph))
    is_kept = unwrap_array(edge_delay_ns) >= ABSENT // 2
    is_kept[operations.edge] = False
    # Two more points for each communication: start and end of its transfer.
    begin_points, end_points = (
        2 * node_count + np.arange(operation_count),
        2 * node_count + operation_count + np.arange(operation_count),
    )
    meeting_points = 2 * operations.table["meeting"].to_numpy().astype(np.int64)
    zeros = np.zeros(operation_count, dtype=np.int64)
    edge_sources = np.concatenate(
        [source[is_kept], meeting_points, end_points[operations.operation_of_edge]]
    )
    edge_targets = np.concatenate([target[is_kept], begin_points, target[operations.edge]])
    # Without a link, each part of a communication may take a different time.
    uncontended_ns = np.where(link_class >= 0, transfer_ns, 0)
    edge_delays = np.concatenate(
        [
            unwrap_array(edge_delay_ns)[is_kept],
            zeros,
            unwrap_array(edge_delay_ns)[operations.edge]
            - uncontended_ns[operations.operation_of_edge],
        ]
    )
    point_count = 2 * node_count + 2 * operation_count
    in_degrees = np.bincount(edge_targets, minlength=point_count)
    in_degrees[1 : 2 * node_count : 2] += 1
    in_degrees[end_points] = 1
    order = np.argsort(edge_sources, kind="stable")
    successors, successor_delays = edge_targets[order].tolist(), edge_delays[order].tolist()
    successor_offsets: list[int] = np.searchsorted(
        edge_sources[order], np.arange(point_count + 1)
    ).tolist()
    roots = np.flatnonzero(in_degrees[: 2 * node_count] == 0)
    initial_times = np.full(point_count, _NOT_REACHED, dtype=np.int64)
    initial_times[roots] = unwrap_array(graph.nodes["start_ns"].to_numpy())[roots // 2]
    time: list[int] = initial_times.tolist()
    pending: list[int] = in_degrees.tolist()
    node_works: list[int] = unwrap_array(node_work_ns).tolist()
    node_lanes: list[int] = node_lane.tolist()
    uncontended: list[int] = uncontended_ns.tolist()
    lane_free_at: dict[int, int] = {}
    link_classes: list[int] = link_class.tolist()
    active_transfers = _ActiveTransfers(bundles, link_classes)
    heap: list[tuple[int, int]] = []
    ready: list[int] = []
    turns: list[int] = []
    contended = False
    first_begin_point, first_end_point = 2 * node_count, 2 * node_count + operation_count

    def settle(point: int) -> None:
        if point >= first_begin_point:
            heapq.heappush(heap, (time[point], point - first_begin_point))
        elif node_lanes[point >> 1] >= 0 and not point & 1:
            heapq.heappush(heap, (time[point], operation_count + (point >> 1)))
        else:
            ready.append(point)

    done_count = 0
    for point in roots[::-1].tolist():
        settle(point)
    while True:
        while ready:
            point = ready.pop()
            done_count += 1
            time_at = time[point]
            if point < first_begin_point and not point & 1:
                successor = point + 1
                candidate = time_at + node_works[point >> 1]
                if candidate > time[successor]:  # noqa: PLR1730  (max() takes three times as long)
                    time[successor] = candidate
                remaining = pending[successor] - 1
                pending[successor] = remaining
                if not remaining:
                    ready.append(successor)
            for edge in range(successor_offsets[point], successor_offsets[point + 1]):
                successor = successors[edge]
                candidate = time_at + successor_delays[edge]
                if candidate > time[successor]:  # noqa: PLR1730  (max() takes three times as long)
                    time[successor] = candidate
                remaining = pending[successor] - 1
                pending[successor] = remaining
                if not remaining:
                    settle(successor)
        end = active_transfers.get_next_end()
        if end is not None and (not heap or end[0] <= heap[0][0]):
            operation = end[1]
            time[first_end_point + operation] = active_transfers.finish(operation)
            ready.append(first_end_point + operation)
        elif heap:
            time_at, entry = heapq.heappop(heap)
            if entry >= operation_count:
                node = entry - operation_count
                start = max(time_at, lane_free_at.get(node_lanes[node], time_at))
                contended |= start > time_at
                lane_free_at[node_lanes[node]] = start + node_works[node]
                time[2 * node] = start
                turns.append(node)
                ready.append(2 * node)
            elif link_classes[entry] < 0:
                time[first_end_point + entry] = time_at
                ready.append(first_end_point + entry)
            else:
                active_transfers.begin(entry, time_at, uncontended[entry])
        else:
            break
    if done_count < 2 * node_count + operation_count:
        raise InvariantError("nodes wait for each other", slug="broken-cycle")
    times = np.array(time[: 2 * node_count], dtype=np.int64)
    contended |= active_transfers.contended
    return SimulatedTimes(times, active_transfers.waiting, contended, turns)
