"""Evaluates a prepared workload, with or without contention for links.

node at a time.

A point is settled once all its dependencies are. Only contention must be processed in order of
time: the starts of transfers and of work on such lanes wait in a heap; everything else follows from
them at once. At equal times, ends of transfers come first, then starts in the order of
communications and nodes, so the result does not depend on any other order.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import polars as pl

from traceloom.changes.scenario import Scenario
from traceloom.changes.whatif import changed_graph
from traceloom.errors import CheckError, InvariantError
from traceloom.graph import ABSENT, Plan, graph as graph_schema
from traceloom.graph.calibrate import scale_overlap
from traceloom.graph.graph import Graph, get_column_array, get_edge_points, unwrap_array
from traceloom.system import units
from traceloom.system.process import require_memory
from traceloom.system.sanitize import sanitize
from traceloom.trace.array_types import Floats, Ints
from traceloom.workload.chakra.check_files import Arcs, find_cycles, sort_topologically
from traceloom.workload.simulate.transfers import (
    FULL,
    LinkBundles,
    Operations,
    Transfers,
    compute_fair_speeds,
)

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


_MAX_CYCLE_SHOWN = 8
_BYTES_PER_ITEM = 400  # of memory that a simulation takes for a node or an edge
_ZERO_LENGTH_KINDS = (graph_schema.RENDEZVOUS, graph_schema.ARRIVAL)


def make_deadlock_error(graph: Graph) -> CheckError:
    """Returns the error for a graph whose nodes wait for each other."""
    nodes = graph.nodes.height
    source, target = graph.points()
    start_points = 2 * np.arange(nodes, dtype=np.int64)
    arcs = Arcs(np.concatenate([source, start_points]), np.concatenate([target, start_points + 1]))
    rings = find_cycles(arcs, sort_topologically(2 * nodes, arcs, np.arange(2 * nodes)).stuck)
    ring = min(rings, key=len) if rings else []
    labels = []
    table = graph.nodes.select("kind", "rank", "name")
    for point in ring:
        kind, rank, name = table.row(point // 2)
        if kind not in _ZERO_LENGTH_KINDS:
            labels.append((rank, f"`{sanitize(name)}`"))
    steps = [step for k, step in enumerate(labels) if step != labels[k - 1] or len(labels) == 1]
    clauses = [
        f"rank {rank}: {name} waits for {awaited}" + (f" of rank {other}" if other != rank else "")
        for (rank, name), (other, awaited) in zip(steps, [*steps[1:], *steps[:1]], strict=True)
    ]
    suffix = (
        f"; and {len(clauses) - _MAX_CYCLE_SHOWN} more" if len(clauses) > _MAX_CYCLE_SHOWN else ""
    )
    return CheckError(
        f"deadlock: {'; '.join(clauses[:_MAX_CYCLE_SHOWN])}{suffix}",
        slug="deadlock",
        where=graph.name,
        hint="order the communications of all ranks alike",
    )


def check_memory(graph: Graph, copies: int = 1) -> None:
    """Checks that a graph can be simulated with the memory that is free.

    Args:
        graph: The graph.
        copies: How many of it are simulated together.

    Raises:
        UsageError: slug `no-memory-left`.
    """
    nodes, edges = copies * graph.nodes.height, copies * graph.edges.height
    require_memory(
        _BYTES_PER_ITEM * (nodes + edges),
        f"{units.format_quantity(nodes, 'node')} and {units.format_quantity(edges, 'dependency')} need",
        "simulate one step (--step) or fewer ranks, or free memory",
    )


_SERIAL = (graph_schema.KERNEL, graph_schema.COPY, graph_schema.FILL)


def build_plan(graph: Graph) -> Plan:
    """Returns the evaluation plan of the graph.

    Raises:
        CheckError: slug `deadlock`: nodes wait for each other.
        UsageError: slug `no-memory-left`: as `check_memory` raises.
    """
    check_memory(graph)
    try:
        return Plan(graph)
    except InvariantError as error:
        raise make_deadlock_error(graph) from error


@dataclass(frozen=True, eq=False)
class Evaluation:
    """The evaluated run of a workload.

    Attributes:
        graph: As if it had been measured so.
        evaluated: The times.
        transfers: The transfers on the network; None on the recorded machine.
        bundles: Its links.
    """

    graph: Graph
    evaluated: SimulatedTimes
    transfers: Transfers | None = None
    bundles: LinkBundles | None = None


def evaluate_on_network(
    graph: Graph,
    operations: Operations,
    transfers: Transfers | None = None,
    *,
    plan: Plan | None = None,
    serial: bool = False,
) -> Evaluation:
    """Evaluates a graph on a network.

    Args:
        graph: The graph.
        operations: Its communications.
        transfers: Their durations; None for those in the graph.
        plan: The plan of the graph.
        serial: Whether the lanes of the device run one node at a time, in an order that is not in
            the graph.
    """
    plan = plan or build_plan(graph)
    scenario = Scenario.of(graph)
    time_ns = latency_ns = np.zeros(len(operations), dtype=np.int64)
    class_by_operation = np.full(len(operations), -1, dtype=np.int64)
    bundles = LinkBundles.none()
    if transfers is not None:
        scenario = scenario.copy()
        time_ns, bundles = transfers.time_ns, transfers.bundles()
        latency_ns = np.minimum(transfers.latency_ns, time_ns)
        class_by_operation = np.where(transfers.replaced, transfers.class_of_operation, -1)
        parts, edges = (
            transfers.replaced[operations.operation_of_part],
            transfers.replaced[operations.operation_of_edge],
        )
        # Parts that wait for the meeting take the transfer after it; a root that does not wait is
        # busy as long.
        scenario.work_ns[operations.part[parts]] = time_ns[operations.operation_of_part[parts]]
        scenario.delay_ns[operations.edge[edges]] = time_ns[operations.operation_of_edge[edges]]
        waiting = get_column_array(graph, graph.edges["target"])[operations.edge[edges]]
        scenario.work_ns[waiting] = 0
    lanes = np.full(graph.nodes.height, -1, dtype=np.int64)  # of nodes that run one at a time
    if serial:
        device = graph.nodes["kind"].cast(pl.String).is_in(_SERIAL).to_numpy()
        lanes[device] = graph.nodes["lane"].cast(pl.Int64).fill_null(-1).to_numpy()[device]
    times = scenario.times(plan)
    evaluated = SimulatedTimes(times, np.zeros(bundles.count))
    meeting_times = times[2 * operations.table["meeting"].to_numpy().astype(np.int64)]
    if bundles.exceeds_bandwidth(
        class_by_operation, meeting_times, meeting_times + time_ns - latency_ns
    ) or _has_overlaps(lanes, times):
        evaluated = simulate_contention(
            graph,
            unwrap_array(scenario.work_ns),
            unwrap_array(scale_overlap(graph, scenario.work_ns, scenario.delay_ns)),
            operations,
            time_ns - latency_ns,
            class_by_operation,
            bundles,
            lanes,
        )
        scenario = scenario.copy()
        shared = np.flatnonzero(class_by_operation[operations.operation_of_edge] >= 0)
        transfer_ends = evaluated.times[
            2
            * get_column_array(graph, graph.edges["target"])[operations.edge[shared]].astype(
                np.int64
            )
            + 1
        ]
        meeting_times = evaluated.times[2 * operations.table["meeting"].to_numpy().astype(np.int64)]
        scenario.delay_ns[operations.edge[shared]] = (
            transfer_ends - meeting_times[operations.operation_of_edge[shared]]
        )
    after = changed_graph(graph, scenario, evaluated.times)
    if evaluated.contended:
        after = replace(
            after, edges=pl.concat([after.edges, _build_turn_edges(lanes, evaluated.turns)])
        )
    return Evaluation(after, evaluated, transfers, bundles)


def _build_turn_edges(lanes: Ints, turns: Sequence[int]) -> pl.DataFrame:
    """Returns edges from each node of a lane to the next one, in the order in which they ran."""
    node_rows = np.array(turns, dtype=np.int64)
    node_rows = node_rows[np.argsort(lanes[node_rows], kind="stable")]
    next_one = lanes[node_rows[1:]] == lanes[node_rows[:-1]]
    return pl.DataFrame(
        {"source": node_rows[:-1][next_one], "target": node_rows[1:][next_one]}
    ).select(
        pl.col("source", "target").cast(graph_schema.Node),
        kind=pl.lit("simulation", dtype=graph_schema.EdgeKind),
        evidence=pl.lit("assumed", dtype=graph_schema.Evidence),
        from_end=pl.lit(value=True),
        to_end=pl.lit(value=False),
        delay_ns=pl.lit(0, pl.Int64),
        residual_ns=pl.lit(0, pl.Int64),
    )


def _has_overlaps(lanes: Ints, times: Ints) -> bool:
    """Returns whether a lane that should run one node at a time has overlapping nodes."""
    node_rows = np.flatnonzero(lanes >= 0)
    start, end, lane = times[2 * node_rows], times[2 * node_rows + 1], lanes[node_rows]
    order = np.lexsort((end, start, lane))
    start, end, lane = start[order], end[order], lane[order]
    return bool(((lane[1:] == lane[:-1]) & (start[1:] < end[:-1])).any())
