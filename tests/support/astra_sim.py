"""ASTRA-sim's configurations and workloads, in a line each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from traceloom.formats.chakra.nodes import Workload, find_file_sets, read_workload
from traceloom.workload.chakra.generate import (
    CollectiveOptions,
    Generated,
    RankProgram,
    generate_collectives,
    write_generated,
)
from traceloom.workload.simulate.astra_sim.collectives import AnalyticalNetwork, Dimensions
from traceloom.workload.simulate.astra_sim.config import AstraSimNetwork, AstraSimSystem
from traceloom.workload.simulate.astra_sim.engine import Algorithm, AstraEngine
from traceloom.workload.simulate.astra_sim.nodes import Compute, RankNodes, build_rank_nodes


def network(topology: str, npus: str, bandwidth: str, latency: str) -> AstraSimNetwork:
    """A network; values of several dimensions have commas between them."""
    return AstraSimNetwork(
        tuple(topology.split(",")),
        tuple(map(int, npus.split(","))),
        tuple(map(float, bandwidth.split(","))),
        tuple(map(float, latency.split(","))),
    )


def system(implementation: str = "ring", dimensions: int = 1, **more: Any) -> AstraSimSystem:
    """A system in which what an implementation cannot do is done as ASTRA-sim's examples do it."""
    others = "direct" if implementation == "doubleBinaryTree" else implementation
    names = {
        "all_reduce": implementation,
        "all_gather": others,
        "reduce_scatter": others,
        "all_to_all": "ring" if implementation == "ring" else "direct",
    }
    values = {"splits": 1, "local_mem_bw": 1600.0, "optimization": "localBWAware", **more}
    return AstraSimSystem({kind: (name,) * dimensions for kind, name in names.items()}, **values)


def workload(directory: Path) -> Workload:
    """A directory of `.et` files."""
    (place,) = find_file_sets([directory])
    return read_workload(place)


def one_collective(directory: Path, kind: str, ranks: int, size: int) -> Workload:
    """A collective and nothing else."""
    write_generated(
        generate_collectives(CollectiveOptions(kind, ranks=ranks, size=size)), directory
    )
    return workload(directory)


def two_collectives(directory: Path, kind: str, ranks: int, size: int) -> Workload:
    """A collective, and the same again once it is over."""
    programs = [RankProgram(rank) for rank in range(ranks)]
    for program in programs:
        program.collective(kind.upper(), size, [program.collective(kind.upper(), size)])
    write_generated(Generated("collective", {}, programs), directory)
    return workload(directory)


def node_mask(read: Workload) -> list[RankNodes]:
    """The nodes of all ranks."""
    by_rank = dict(zip(read.ranks, read.tables, strict=True))
    return [build_rank_nodes(rank, by_rank[rank], Compute()) for rank in range(len(read.ranks))]


def ends(
    ranks: Sequence[RankNodes],
    groups: Mapping[str, tuple[int, ...]] | None,
    fabric: AstraSimNetwork,
    config: AstraSimSystem,
    *,
    aware: bool,
    whole: bool = True,
    algorithms: Mapping[str, Algorithm] | None = None,
) -> list[int | None]:
    """When each rank ends."""
    engine = AstraEngine(
        ranks,
        dict(groups or {}),
        AnalyticalNetwork(fabric.topologies, fabric.sizes, fabric.bandwidths, fabric.latencies),
        Dimensions(
            fabric.sizes,
            dict(config.implementations),
            config.splits,
            config.optimization == "baseline",
            config.endpoint_delay,
        ),
        aware=aware,
        memory_rate=config.local_mem_bw * 1e9,
        width=config.active_chunks,
        algorithms=algorithms,
        whole=whole,
    )
    engine.run()
    return [rank.last_ns for rank in engine.ranks]
