"""Running a workload on ASTRA-sim's machine, with ASTRA-sim's own configuration."""

from collections.abc import Mapping, Sequence
from functools import cache, partial
from pathlib import Path

import numpy as np
import polars as pl

from traceloom.analyze.intervals import merge_intervals, merge_spans, subtract_spans
from traceloom.errors import InputError, UsageError, nearest
from traceloom.formats.chakra.et_pb2 import NodeType
from traceloom.formats.chakra.nodes import Workload
from traceloom.graph.graph import Graph
from traceloom.system import units
from traceloom.trace.frames import cast_to_schema
from traceloom.trace.notice import Notice
from traceloom.workload.chakra.check_files import HAS_OLD_GROUP
from traceloom.workload.simulate.astra_sim.collectives import AnalyticalNetwork, Dimensions
from traceloom.workload.simulate.astra_sim.config import (
    KINDS,
    AstraSimNetwork,
    AstraSimSystem,
    make_doubt,
)
from traceloom.workload.simulate.astra_sim.engine import (
    Algorithm,
    AstraEngine,
    RunningRank,
    check_begun,
    check_ended,
)
from traceloom.workload.simulate.astra_sim.nodes import (
    COMMUNICATION,
    CPU,
    GPU,
    NOTHING,
    RECEIVE,
    SEND,
    Compute,
    RankNodes,
    build_rank_nodes,
    read_algorithm,
)
from traceloom.workload.simulate.result import COLLECTIVES, LINKS, NODES, RANKS, Simulation

MAX_END_DEVIATION = 0.05  # max relative deviation of a rank's end from the measurement
_KIND_BY_SLOT = {CPU: "host", GPU: "kernel", COMMUNICATION: "communication", NOTHING: "receive"}


def simulate(
    workload: Workload,
    network: AstraSimNetwork,
    system: AstraSimSystem,
    *,
    congestion_aware: bool = False,
    algorithms: Mapping[str, str | Path] | None = None,
) -> Simulation:
    """Simulate a set of `.et` files exactly as ASTRA-sim does: every rank ends at the same
    nanosecond as there.

    Args:
        workload: The files, one per rank, and the groups.
        network: ASTRA-sim's network file.
        system: ASTRA-sim's system file.
        congestion_aware: Whether links are queues (its congestion-aware backend), or messages never
            contend.
        algorithms: Kind -> the prefix of the `.et` files that implement it, in addition to those of
            the system file.

    Raises:
        UsageError: slugs `ranks-differ`, `not-for-astra-sim`, `no-such-group`, `bad-collective`,
            `no-such-schedule`.
        InputError: slugs `not-for-astra-sim`, `bad-algorithm`.
        CheckError: `deadlock`: ranks wait for each other; ASTRA-sim ends silently in that case.
    """
    roofline = (system.peak_perf * 1e12, system.local_mem_bw * 1e9) if system.roofline else None
    compute = Compute(
        recorded=system.replay_only, roofline=None if system.replay_only else roofline
    )
    if congestion_aware and len(network.sizes) > 1:
        raise UsageError(
            "ASTRA-sim's congestion-aware back end knows machines of one dimension only",
            slug="not-for-astra-sim",
            hint="leave --congestion aware out, or use the native mode",
        )
    if congestion_aware and network.topologies[0] == "Ring" and network.sizes[0] == 2:
        raise UsageError(
            "ASTRA-sim's congestion-aware back end stops at a Ring of 2, whose ranks would have two links each way",
            slug="not-for-astra-sim",
            hint="make it a FullyConnected of 2",
        )
    for kind, implementations in system.implementations.items():
        if len(implementations) > len(network.sizes):
            raise InputError(
                f"{kind.replace('_', '-')}-implementation has {units.format_quantity(len(implementations), 'algorithm')}, the network "
                f"{units.format_quantity(len(network.sizes), 'dimension')}",
                slug="bad-astra-sim-config",
                where=system.source,
            )
    algorithm_prefixes = {kind: str(file) for kind, file in (algorithms or {}).items()}
    for kind in algorithm_prefixes:
        if kind not in KINDS.values():
            raise UsageError(
                f"`{kind}` is carried out by no algorithm",
                slug="bad-collective",
                hint=nearest(kind, KINDS.values()) + f"kinds are {', '.join(KINDS.values())}",
            )
    if system.splits == 1:
        algorithm_prefixes = {**system.custom, **algorithm_prefixes}
    engine = AstraEngine(
        _build_nodes_of_all_ranks(workload, network.ranks, compute),
        workload.groups.members,
        AnalyticalNetwork(network.topologies, network.sizes, network.bandwidths, network.latencies),
        Dimensions(
            network.sizes,
            dict(system.implementations),
            system.splits,
            system.optimization == "baseline",
            system.endpoint_delay,
        ),
        aware=congestion_aware,
        memory_rate=system.local_mem_bw * 1e9,
        width=system.active_chunks,
        algorithms={
            **{
                kind: _make_rejected_algorithm(kind, prefix, system.splits)
                for kind, prefix in system.custom.items()
            },
            **{
                kind: cache(partial(read_algorithm, prefix))
                for kind, prefix in algorithm_prefixes.items()
            },
        },
    )
    engine.run()
    check_ended(engine)
    check_begun(engine, system.endpoint_delay)
    return _assemble_simulation(
        workload, network, system, engine, congestion_aware=congestion_aware
    )


def _make_rejected_algorithm(kind: str, prefix: str, splits: int) -> Algorithm:
    def refuse(ranks: int) -> Sequence[RankNodes]:
        raise UsageError(
            f"ASTRA-sim never ends an {kind} among {ranks} ranks by the algorithm {prefix}: it waits for {splits} "
            "chunks, and has one",
            slug="bad-collective",
            hint="set preferred-dataset-splits to 1, or give the algorithm with --collective",
        )

    return refuse


def find_measured_end_times(graph: Graph) -> dict[int, int]:
    """Returns the end of each rank of a graph, in ns from the beginning of the job."""
    recorded_nodes = graph.nodes.filter(pl.col("lane").is_not_null()).with_columns(
        end=pl.col("start_ns") + pl.col("duration_ns")
    )
    rows = (
        recorded_nodes.group_by("rank")
        .agg(pl.col("end").max() - recorded_nodes["start_ns"].min())
        .drop_nulls("rank")
        .sort("rank")
    )
    return {int(rank): int(end) for rank, end in rows.rows()}


def simulate_with_recorded_transfers(workload: Workload) -> list[int]:
    """Returns the end of each rank on ASTRA-sim's machine, in ns, if every transfer takes its
    recorded duration.

    Differences from the recording are then due to the machine: its few resources per rank, and its
    order.

    Raises:
        UsageError, InputError, CheckError: As `simulate` raises.
    """
    return _run_plainly(workload, Compute(), recorded=True)


def simulate_on_plain_network(workload: Workload) -> list[int]:
    """Returns the end of each rank on a ring of 50 GB/s and 500 ns, in ns; computation that states
    no time takes that of 100 TFLOP/s and 1 TB/s.

    Raises:
        UsageError, InputError, CheckError: As `simulate` raises.
    """
    computes = workload.nodes.filter(pl.col("type") == NodeType.COMP_NODE)
    states_work = not computes.select("num_ops", "tensor_size").null_count().sum_horizontal()[0]
    roofline = (1e14, 1e12) if states_work and not computes["duration_us"].sum() else None
    return _run_plainly(workload, Compute(roofline=roofline), recorded=False)


def _run_plainly(workload: Workload, compute: Compute, *, recorded: bool) -> list[int]:
    count = len(workload.ranks)
    engine = AstraEngine(
        _build_nodes_of_all_ranks(workload, count, compute),
        workload.groups.members,
        AnalyticalNetwork(("Ring",), (count,), (50.0,), (500.0,)),
        Dimensions((count,), dict.fromkeys(KINDS.values(), ("ring",)), 1, False, 10),
        aware=False,
        memory_rate=1e12,
        recorded=recorded,
    )
    engine.run()
    check_ended(engine)
    return [rank.last_ns or 0 for rank in engine.ranks]


def _build_nodes_of_all_ranks(
    workload: Workload, rank_count: int, compute: Compute
) -> list[RankNodes]:
    """Returns the nodes of all ranks, from 0."""
    recorded_ranks = sorted(rank for rank in workload.ranks if rank is not None)
    if recorded_ranks != list(range(rank_count)) or len(workload.ranks) != rank_count:
        present = ", ".join(map(str, recorded_ranks[:8])) + (
            ", ..." if len(recorded_ranks) > 8 else ""
        )
        raise UsageError(
            f"the network has {units.format_quantity(rank_count, 'rank')}, the workload {len(workload.ranks)}: {present or 'none'}",
            slug="ranks-differ",
            where=workload.place.name,
            hint="the product of npus_count must be the number of files, PREFIX.0.et to PREFIX.N-1.et",
        )
    table_by_rank = dict(zip(workload.ranks, workload.tables, strict=True))
    ranks = []
    for rank in range(rank_count):
        table = table_by_rank[rank]
        error_notice = next(
            (notice for notice in table.notices if notice.severity == "error"), None
        )
        if error_notice or not len(table):
            raise InputError(
                error_notice.message
                if error_notice
                else "the file has no nodes, at which ASTRA-sim stops",
                slug="not-for-astra-sim",
                where=table.path,
            )
        nodes = build_rank_nodes(rank, table, compute)
        for node, message in nodes.messages.items():
            if message.peer >= rank_count:
                raise InputError(
                    f"{nodes.label(node)} is a message with rank {message.peer}, but there are {rank_count} ranks",
                    slug="not-for-astra-sim",
                    where=table.path,
                )
        ranks.append(nodes)
    return ranks


def _assemble_simulation(
    workload: Workload,
    network: AstraSimNetwork,
    system: AstraSimSystem,
    engine: AstraEngine,
    *,
    congestion_aware: bool,
) -> Simulation:
    backend = "congestion-aware" if congestion_aware else "congestion-unaware"
    shape = " x ".join(f"{t} {n}" for t, n in zip(network.topologies, network.sizes, strict=True))
    end = max(rank.last_ns or 0 for rank in engine.ranks)
    notice = Notice(
        "astra-sim-machine",
        "info",
        "one CPU operation, one GPU operation and one communication of a rank at a time; a link's GB/s are 2^30 B/s"
        + (
            ""
            if congestion_aware
            else "; messages do not slow each other down, not even those of one rank"
        ),
    )
    return Simulation(
        mode="astra-sim",
        name=workload.place.name,
        machine=f"{shape}, ASTRA-sim {backend}",
        step=None,
        measured_ns=None,
        identity_ns=None,
        identity_error=None,
        before_ns=None,
        after_ns=end,
        ranks=pl.DataFrame([_build_rank_row(rank) for rank in engine.ranks]).pipe(
            _fill_and_cast_columns, RANKS
        ),
        nodes=_build_node_table(engine.ranks),
        collectives=pl.DataFrame(
            [
                {
                    "instance": number,
                    "kind": collective.kind,
                    "group": collective.name or None,
                    "ranks": len(collective.group),
                    "bytes": collective.size,
                    "start_ns": min(collective.begin_ns),
                    "end_ns": max(collective.end_ns),
                    "transfer_ns": max(collective.end_ns) - max(collective.begin_ns),
                    "waiting_ns": max(collective.begin_ns) - min(collective.begin_ns),
                }
                for number, collective in enumerate(engine.meetings.values())
            ],
            infer_schema_length=None,
        ).pipe(_fill_and_cast_columns, COLLECTIVES),
        links=_build_link_table(engine, network),
        notices=(notice, *system.notices, *_list_doubts(engine), *_list_old_groups(workload)),
    )


def _list_old_groups(workload: Workload) -> list[Notice]:
    count = workload.nodes.filter(HAS_OLD_GROUP).height
    message = f"{units.format_quantity(count, 'node')} with comm_group instead of pg_name: of all ranks to ASTRA-sim"
    return [Notice("astra-sim-old-group", "warning", message, count)] if count else []


def _list_doubts(engine: AstraEngine) -> list[Notice]:
    """Returns a notice for the first rank whose statistics ASTRA-sim cannot finish."""
    for rank in engine.ranks:
        nodes = rank.nodes
        last = np.flatnonzero(np.frombuffer(rank.end_ns, np.int64) == (rank.last_ns or 0)).tolist()
        messages = [node for node in last if nodes.action[node] in {SEND, RECEIVE}]
        if messages and CPU in nodes.slot:
            reason = (
                f"rank {nodes.rank} has work of the CPU and ends with {nodes.label(messages[0])}, a message, at which "
                "its statistics stop"
            )
            return [make_doubt(reason, nodes.table.path)]
    return []


def _build_rank_row(rank: RunningRank) -> dict[str, int]:
    start_ns, end = (np.frombuffer(times, np.int64) for times in (rank.begin_ns, rank.end_ns))
    slot = np.asarray(rank.nodes.slot)

    compute, communication, host = (
        merge_intervals(start_ns[mask], end[mask])
        for mask in (slot == GPU, slot >= COMMUNICATION, slot == CPU)
    )
    exposed = subtract_spans(communication, compute)
    exposed_host = subtract_spans(host, merge_spans(compute, communication))
    end_ns = rank.last_ns or 0
    return {
        "rank": rank.nodes.rank,
        "end_ns": end_ns,
        "compute_ns": compute.total,
        "communication_ns": communication.total,
        "exposed_communication_ns": exposed.total,
        "memory_ns": 0,
        "host_ns": exposed_host.total,
        "other_ns": end_ns - compute.total - exposed.total - exposed_host.total,
    }


def _build_node_table(ranks: list[RunningRank]) -> pl.DataFrame:
    """Returns `Simulation.nodes`; `node` is its id in its rank's file."""
    names = [
        rank.nodes.table.nodes.select(node=pl.col("id"), name="name")[rank.nodes.row]
        for rank in ranks
    ]
    start_bytes, end = (
        b"".join(times)
        for times in zip(*((rank.begin_ns, rank.end_ns) for rank in ranks), strict=True)
    )
    slots = pl.Series([slot for rank in ranks for slot in rank.nodes.slot], dtype=pl.Int64)
    return (
        pl.concat(names)
        .with_columns(
            pl.col("node").cast(pl.Int64),
            rank=np.repeat([rank.nodes.rank for rank in ranks], list(map(len, names))),
            kind=slots.replace_strict(_KIND_BY_SLOT, return_dtype=pl.String),
            start_ns=np.frombuffer(start_bytes, np.int64),
            end_ns=np.frombuffer(end, np.int64),
        )
        .pipe(_fill_and_cast_columns, NODES)
    )


def _build_link_table(engine: AstraEngine, network: AstraSimNetwork) -> pl.DataFrame:
    """Returns `Simulation.links`, if links are queues."""
    usage = engine.links.usage if engine.links else {}
    switch_name = {network.sizes[0]: "switch"} if network.topologies[0] == "Switch" else {}
    rows = [
        {
            "link": number,
            "name": f"{switch_name.get(a, f'rank {a}')} to {switch_name.get(b, f'rank {b}')}",
            "source": switch_name.get(a, f"rank {a}"),
            "target": switch_name.get(b, f"rank {b}"),
            "bytes": values[0],
            "busy_ns": values[1],
            "waiting_ns": values[2],
        }
        for number, ((a, b), values) in enumerate(sorted(usage.items()))
    ]
    return pl.DataFrame(rows).pipe(_fill_and_cast_columns, LINKS)


def _fill_and_cast_columns(frame: pl.DataFrame, schema: pl.Schema) -> pl.DataFrame:
    """Casts to the schema; columns that this mode lacks are null."""
    null_columns = [
        pl.lit(None, kind).alias(name) for name, kind in schema.items() if name not in frame.columns
    ]
    return (
        frame.with_columns(null_columns).pipe(cast_to_schema, schema)
        if frame.width
        else schema.to_frame()
    )
