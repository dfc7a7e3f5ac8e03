"""ASTRA-sim's own answers: every rank of every row, to the nanosecond, as a whole and message by message."""

from __future__ import annotations

import csv
import tarfile
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from support import astra_sim
from support.public_traces import DATA
from traceloom.workload.simulate.astra_sim.nodes import RankNodes

NETWORK, WORKLOADS = (
    DATA / "golden" / name for name in ("network_cycles.tsv", "workload_cycles.tsv")
)

pytestmark = [
    pytest.mark.data,
    pytest.mark.skipif(
        not WORKLOADS.is_file(), reason="the golden rows (../shared/data) are not on this machine"
    ),
]
message_by_message = pytest.mark.parametrize("whole", [True, False], ids=["whole", "by message"])


@cache
def rows(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file, delimiter="\t"))


@pytest.fixture(scope="module")
def collectives(tmp_path_factory: pytest.TempPathFactory) -> Any:
    @cache
    def made(kind: str, ranks: int, size: int) -> list[RankNodes]:
        home = tmp_path_factory.mktemp("collective") / "set"
        return astra_sim.node_mask(astra_sim.one_collective(home, kind, ranks, size))

    return made


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Any:
    home = tmp_path_factory.mktemp("workloads")
    with tarfile.open(DATA / "golden" / "workloads.tar.gz") as archive:
        for member in archive.getmembers():
            if member.isfile():
                target = home / member.name
                target.parent.mkdir(exist_ok=True)
                content = archive.extractfile(member)
                assert content is not None
                target.write_bytes(content.read())

    @cache
    def read(name: str) -> tuple[list[RankNodes], Any]:
        workload = astra_sim.workload(home / name)
        return astra_sim.node_mask(workload), workload.groups.members

    return read


def machine(row: dict[str, str]) -> tuple[Any, Any]:
    network = astra_sim.network(
        row["topology"], row["npus"], row["bandwidth_GBps"], row["latency_ns"]
    )
    return network, astra_sim.system(
        row["implementation"], len(network.sizes), splits=int(row["splits"])
    )


@pytest.mark.sampled(2)
@message_by_message
@pytest.mark.parametrize("backend", ["unaware", "aware"])
def test_every_collective(collectives: Any, backend: str, whole: bool) -> None:
    different = []
    chosen = [row for row in rows(NETWORK) if row["backend"] == backend]
    assert len(chosen) > 200
    for row in chosen:
        network, system = machine(row)
        ranks = collectives(row["collective"], network.ranks, int(row["bytes"]))
        ends = astra_sim.ends(ranks, None, network, system, aware=backend == "aware", whole=whole)
        # Of some trees the file holds what rank 0 took, else what the last rank did.
        trees = (
            {ends[0]}
            if row["implementation"] == "doubleBinaryTree" and row["collective"] == "all_reduce"
            else set()
        )
        if int(row["cycles"]) not in {max(ends), *trees}:
            different.append((row, ends))
    assert different == []


@pytest.mark.sampled(2)
@message_by_message
@pytest.mark.parametrize("backend", ["unaware", "aware"])
def test_every_rank_of_every_workload(recorded: Any, backend: str, whole: bool) -> None:
    different = []
    chosen = [row for row in rows(WORKLOADS) if row["backend"] == backend]
    assert len(chosen) > 40
    for row in chosen:
        network, system = machine(row)
        ranks, groups = recorded(row["workload"])
        ends = astra_sim.ends(ranks, groups, network, system, aware=backend == "aware", whole=whole)
        if ends != [int(cycles) for cycles in row["cycles_by_rank"].split(",")]:
            different.append((row, ends))
    assert different == []


def test_the_files_have_all_their_rows() -> None:
    assert len(rows(NETWORK)) == 454
    assert len(rows(WORKLOADS)) == 118


def test_the_algorithm_of_a_set_of_files(tmp_path: Path) -> None:
    """The public example of ASTRA-sim: a ring of 8 ranks and 1 MiB, with reductions of 7 us."""
    from traceloom.workload.simulate.astra_sim.run import simulate

    network = astra_sim.network("Ring", "8", "50", "500")
    read = astra_sim.one_collective(tmp_path / "set", "all_reduce", 8, 1 << 20)
    prefix = DATA / "chakra" / "custom_ring_8npus"
    answer = simulate(read, network, astra_sim.system(splits=4), algorithms={"all_reduce": prefix})
    assert answer.ranks["end_ns"].to_list() == [90_174] * 8


def test_the_validated_example_with_two_chunks_under_way(tmp_path: Path) -> None:
    """`HGX-H100-validated` of ASTRA-sim's examples."""
    network = astra_sim.network("Switch", "8", "400", "936.25")
    read = astra_sim.one_collective(tmp_path / "set", "all_reduce", 8, 1 << 20)
    system = astra_sim.system(splits=4, active_chunks=2, local_mem_bw=3350.0)
    assert set(astra_sim.ends(astra_sim.node_mask(read), None, network, system, aware=True)) == {
        57_426
    }


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("gpu_only", "most"), [(False, 0.003), (True, 0.019)])
def test_a_converted_job_ends_when_it_was_measured_to_end(
    tmp_path: Path, gpu_only: bool, most: float
) -> None:
    """DLRM, 8 ranks: within what the real simulator gives with recorded transfers."""
    from traceloom.formats import load
    from traceloom.graph import link_session
    from traceloom.workload.chakra.astra_sim import to_astra_sim
    from traceloom.workload.simulate.astra_sim.run import (
        find_measured_end_times,
        simulate_with_recorded_transfers,
    )

    graph = link_session(
        load(*(DATA / "multirank" / f"dlrm_rank{rank}.kineto.json.gz" for rank in range(8)))
    )
    to_astra_sim(graph, gpu_only=gpu_only).write(tmp_path / "set")
    ends = simulate_with_recorded_transfers(astra_sim.workload(tmp_path / "set"))
    measured = find_measured_end_times(graph)
    assert list(measured) == list(range(8))
    for rank, end in enumerate(ends):
        assert end == pytest.approx(measured[rank], rel=most)
