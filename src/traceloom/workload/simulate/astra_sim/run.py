"""A workload on ASTRA-sim's machine, with ASTRA-sim's own configuration."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache, partial
from pathlib import Path

import numpy as np
import polars as pl

from traceloom.analyze.intervals import difference, merge, union
from traceloom.errors import InputError, UsageError, nearest
from traceloom.formats.chakra.nodes import Workload
from traceloom.graph.graph import Graph
from traceloom.system import units
from traceloom.trace.frames import cast_to_schema
from traceloom.trace.notice import Notice
from traceloom.workload.simulate.astra_sim.collectives import AnalyticalNetwork, Dimensions
from traceloom.workload.simulate.astra_sim.config import KINDS, AstraSimNetwork, AstraSimSystem
from traceloom.workload.simulate.astra_sim.engine import Algorithm, AstraEngine, RunningRank, check_begun, check_ended
from traceloom.workload.simulate.astra_sim.nodes import (
    COMMUNICATION,
    CPU,
    GPU,
    NOTHING,
    Compute,
    RankNodes,
    rank_nodes,
    read_algorithm,
)
from traceloom.workload.simulate.result import COLLECTIVES, LINKS, NODES, RANKS, Simulation

FAR = 0.05  # of the measurement: how far a rank may end from it
_KIND = {CPU: "host", GPU: "kernel", COMMUNICATION: "communication", NOTHING: "receive"}


def simulate(
    workload: Workload,
    network: AstraSimNetwork,
    system: AstraSimSystem,
    *,
    aware: bool = False,
    algorithms: Mapping[str, str | Path] | None = None,
) -> Simulation:
    """Simulate a set of `.et` files as ASTRA-sim does: every rank ends at the same nanosecond.

    Args:
        workload: The files, one per rank, and the groups.
        network: Its network file.
        system: Its system file.
        aware: Whether links are queues (its congestion-aware back end), or no message meets another one.
        algorithms: Kind -> the prefix of the `.et` files that carry it out, besides those of the system file.

    Raises:
        UsageError: slugs `ranks-differ`, `not-for-astra-sim`, `no-such-group`, `bad-collective`, `no-such-schedule`.
        InputError: slugs `not-for-astra-sim`, `bad-algorithm`.
        CheckError: `deadlock`: ranks wait for each other; ASTRA-sim ends without a word there.
    """
    roofline = (system.peak_perf * 1e12, system.local_mem_bw * 1e9) if system.roofline else None
    compute = Compute(recorded=system.replay_only, roofline=None if system.replay_only else roofline)
    if aware and len(network.sizes) > 1:
        raise UsageError(
            "ASTRA-sim's congestion-aware back end knows machines of one dimension only",
            slug="not-for-astra-sim",
            hint="leave --congestion aware out, or use the native mode",
        )
    if aware and network.topologies[0] == "Ring" and network.sizes[0] == 2:
        raise UsageError(
            "ASTRA-sim's congestion-aware back end stops at a Ring of 2, whose ranks would have two links each way",
            slug="not-for-astra-sim",
            hint="make it a FullyConnected of 2",
        )
    for kind, names in system.implementations.items():
        if len(names) > len(network.sizes):
            raise InputError(
                f"{kind.replace('_', '-')}-implementation has {units.count_of(len(names), 'algorithm')}, the network "
                f"{units.count_of(len(network.sizes), 'dimension')}",
                slug="bad-astra-sim-config",
                where=system.source,
            )
    files = {kind: str(file) for kind, file in (algorithms or {}).items()}
    for kind in files:
        if kind not in KINDS.values():
            raise UsageError(
                f"`{kind}` is carried out by no algorithm",
                slug="bad-collective",
                hint=nearest(kind, KINDS.values()) + f"kinds are {', '.join(KINDS.values())}",
            )
    if system.splits == 1:
        files = {**system.custom, **files}
    engine = AstraEngine(
        _ranks(workload, network.ranks, compute),
        workload.groups.members,
        AnalyticalNetwork(network.topologies, network.sizes, network.bandwidths, network.latencies),
        Dimensions(
            network.sizes,
            dict(system.implementations),
            system.splits,
            system.optimization == "baseline",
            system.endpoint_delay,
        ),
        aware=aware,
        memory_rate=system.local_mem_bw * 1e9,
        width=system.active_chunks,
        algorithms={
            **{kind: _never_ended(kind, prefix, system.splits) for kind, prefix in system.custom.items()},
            **{kind: cache(partial(read_algorithm, prefix)) for kind, prefix in files.items()},
        },
    )
    engine.run()
    check_ended(engine)
    check_begun(engine, system.endpoint_delay)
    return _answer(workload, network, system, engine, aware=aware)


def _never_ended(kind: str, prefix: str, splits: int) -> Algorithm:
    def refuse(ranks: int) -> Sequence[RankNodes]:
        raise UsageError(
            f"ASTRA-sim never ends an {kind} among {ranks} ranks by the algorithm {prefix}: it waits for {splits} "
            "chunks, and has one",
            slug="bad-collective",
            hint="set preferred-dataset-splits to 1, or give the algorithm with --collective",
        )

    return refuse


def measured_ends(graph: Graph) -> dict[int, int]:
    """When each rank of a graph ended, in ns from the beginning of the job."""
    own = graph.nodes.filter(pl.col("lane").is_not_null()).with_columns(end=pl.col("start_ns") + pl.col("duration_ns"))
    begin = own["start_ns"].min()
    rows = own.group_by("rank").agg(pl.col("end").max() - begin).drop_nulls("rank").sort("rank")
    return {int(rank): int(end) for rank, end in rows.rows()}


def recorded_ends(workload: Workload) -> list[int]:
    """When each rank ends on ASTRA-sim's machine if every transfer takes as long as its node says, in ns.

    What differs from the recording is then due to the machine: its few resources per rank, its order.

    Raises:
        UsageError, InputError, CheckError: As of `simulate`.
    """
    count = len(workload.ranks)
    no_network = AnalyticalNetwork(("FullyConnected",), (count,), (1.0,), (0.0,))
    engine = AstraEngine(
        _ranks(workload, count, Compute()),
        workload.groups.members,
        no_network,
        Dimensions((count,), {}, 1, baseline=False, delay_ns=0),
        aware=False,
        memory_rate=1.0,
        recorded=True,
    )
    engine.run()
    check_ended(engine)
    return [rank.last_ns or 0 for rank in engine.ranks]


def _ranks(workload: Workload, count: int, compute: Compute) -> list[RankNodes]:
    """The nodes of all ranks, from 0."""
    numbers = sorted(rank for rank in workload.ranks if rank is not None)
    if numbers != list(range(count)) or len(workload.ranks) != count:
        present = ", ".join(map(str, numbers[:8])) + (", ..." if len(numbers) > 8 else "")
        raise UsageError(
            f"the network has {units.count_of(count, 'rank')}, the workload {len(workload.ranks)}: {present or 'none'}",
            slug="ranks-differ",
            where=workload.place.name,
            hint="the product of npus_count must be the number of files, PREFIX.0.et to PREFIX.N-1.et",
        )
    by_rank = dict(zip(workload.ranks, workload.tables, strict=True))
    ranks = []
    for rank in range(count):
        table = by_rank[rank]
        damage = next((notice for notice in table.notices if notice.severity == "error"), None)
        if damage or not len(table):
            raise InputError(
                damage.message if damage else "the file has no nodes, at which ASTRA-sim stops",
                slug="not-for-astra-sim",
                where=table.path,
            )
        nodes = rank_nodes(rank, table, compute)
        for node, message in nodes.messages.items():
            if message.peer >= count:
                raise InputError(
                    f"{nodes.label(node)} is a message with rank {message.peer}, but there are {count} ranks",
                    slug="not-for-astra-sim",
                    where=table.path,
                )
        ranks.append(nodes)
    return ranks


def _answer(
    workload: Workload, network: AstraSimNetwork, system: AstraSimSystem, engine: AstraEngine, *, aware: bool
) -> Simulation:
    kind = "congestion-aware" if aware else "congestion-unaware"
    shape = " x ".join(f"{t} {n}" for t, n in zip(network.topologies, network.sizes, strict=True))
    end = max(rank.last_ns or 0 for rank in engine.ranks)
    notice = Notice(
        "astra-sim-machine",
        "info",
        "one CPU operation, one GPU operation and one communication of a rank at a time; a link's GB/s are 2^30 B/s"
        + ("" if aware else "; messages do not slow each other down, not even those of one rank"),
    )
    return Simulation(
        mode="astra-sim",
        name=workload.place.name,
        machine=f"{shape}, ASTRA-sim {kind}",
        step=None,
        measured_ns=None,
        identity_ns=None,
        identity_error=None,
        before_ns=None,
        after_ns=end,
        ranks=pl.DataFrame([_account(rank) for rank in engine.ranks]).pipe(_declared, RANKS),
        nodes=_nodes(engine.ranks),
        collectives=pl.DataFrame(
            [
                {
                    "instance": number,
                    "kind": meeting.kind,
                    "group": meeting.name or None,
                    "ranks": len(meeting.group),
                    "bytes": meeting.size,
                    "start_ns": min(meeting.begin_ns),
                    "end_ns": max(meeting.end_ns),
                    "transfer_ns": max(meeting.end_ns) - max(meeting.begin_ns),
                    "waiting_ns": max(meeting.begin_ns) - min(meeting.begin_ns),
                }
                for number, meeting in enumerate(engine.meetings.values())
            ],
            infer_schema_length=None,
        ).pipe(_declared, COLLECTIVES),
        links=_links(engine, network),
        notices=(notice, *system.notices),
    )


def _account(rank: RunningRank) -> dict[str, int]:
    """One row of `Simulation.ranks`."""
    begin, end = (np.frombuffer(times, np.int64) for times in (rank.begin_ns, rank.end_ns))
    slot = np.asarray(rank.nodes.slot)

    compute, communication, host = (
        union(begin[chosen], end[chosen]) for chosen in (slot == GPU, slot >= COMMUNICATION, slot == CPU)
    )
    exposed = difference(communication, compute)
    alone = difference(host, merge(compute, communication))
    last = rank.last_ns or 0
    return {
        "rank": rank.nodes.rank,
        "end_ns": last,
        "compute_ns": compute.total,
        "communication_ns": communication.total,
        "exposed_communication_ns": exposed.total,
        "memory_ns": 0,
        "host_ns": alone.total,
        "other_ns": last - compute.total - exposed.total - alone.total,
    }


def _nodes(ranks: list[RunningRank]) -> pl.DataFrame:
    """`Simulation.nodes`: the node is its id in its rank's file."""
    names = [rank.nodes.table.nodes.select(node=pl.col("id"), name="name")[rank.nodes.row] for rank in ranks]
    begin, end = (b"".join(times) for times in zip(*((rank.begin_ns, rank.end_ns) for rank in ranks), strict=True))
    slots = pl.Series([slot for rank in ranks for slot in rank.nodes.slot], dtype=pl.Int64)
    return (
        pl.concat(names)
        .with_columns(
            pl.col("node").cast(pl.Int64),
            rank=np.repeat([rank.nodes.rank for rank in ranks], list(map(len, names))),
            kind=slots.replace_strict(_KIND, return_dtype=pl.String),
            start_ns=np.frombuffer(begin, np.int64),
            end_ns=np.frombuffer(end, np.int64),
        )
        .pipe(_declared, NODES)
    )


def _links(engine: AstraEngine, network: AstraSimNetwork) -> pl.DataFrame:
    """`Simulation.links`, of links that are queues."""
    usage = engine.links.usage if engine.links else {}
    switch = network.sizes[0]
    name = {switch: "switch"} if network.topologies[0] == "Switch" else {}
    rows = [
        {
            "link": number,
            "name": f"{name.get(a, f'rank {a}')} to {name.get(b, f'rank {b}')}",
            "source": name.get(a, f"rank {a}"),
            "target": name.get(b, f"rank {b}"),
            "bytes": values[0],
            "busy_ns": values[1],
            "waiting_ns": values[2],
        }
        for number, ((a, b), values) in enumerate(sorted(usage.items()))
    ]
    return pl.DataFrame(rows).pipe(_declared, LINKS)


def _declared(frame: pl.DataFrame, columns: pl.Schema) -> pl.DataFrame:
    """As declared; what this mode does not know is null."""
    absent = [pl.lit(None, kind).alias(name) for name, kind in columns.items() if name not in frame.columns]
    return frame.with_columns(absent).pipe(cast_to_schema, columns) if frame.width else columns.to_frame()
