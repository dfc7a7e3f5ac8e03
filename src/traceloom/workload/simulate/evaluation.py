"""Evaluation of a graph with the durations of a machine."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import polars as pl

from traceloom.changes.scenario import Scenario
from traceloom.changes.whatif import changed_graph
from traceloom.errors import CheckError, InvariantError
from traceloom.graph import Plan, graph as graph_schema
from traceloom.graph.calibrate import scale_overlap
from traceloom.graph.graph import Graph, get_column_array, unwrap_array
from traceloom.system import units
from traceloom.system.sanitize import sanitize
from traceloom.trace.array_types import Ints
from traceloom.workload.chakra.check_files import Arcs, find_cycles, sort_topologically
from traceloom.workload.simulate.contention import (
    SimulatedTimes,
    simulate_contention as with_contention,
)
from traceloom.workload.simulate.memory import require_memory
from traceloom.workload.simulate.transfers import LinkBundles, Operations, Transfers

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
        evaluated = with_contention(
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
