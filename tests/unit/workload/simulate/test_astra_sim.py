"""The mode `astra-sim`: ways to evaluate agree, small cases by hand, and sentences where ASTRA-sim says nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from support import astra_sim
from support.workload import collective, node, receive, send, write_set
from traceloom.errors import CheckError, InputError, UsageError
from traceloom.workload.simulate.astra_sim.run import simulate, simulate_with_recorded_transfers

RING = astra_sim.network("Ring", "2", "50", "500")
MIB = 1 << 20


def simulated(home: Path, *ranks: Any, groups: Any = None, **more: Any) -> Any:
    network = astra_sim.network("Ring", str(len(ranks)), "50", "500")
    read = astra_sim.workload(write_set(home / "set", *ranks, groups=groups))
    return simulate(read, network, astra_sim.system(splits=1), **more)


@pytest.mark.sampled(16)
@pytest.mark.parametrize("topology", ["Ring", "FullyConnected", "Switch"])
@pytest.mark.parametrize(
    "implementation", ["ring", "direct", "halvingDoubling", "doubleBinaryTree"]
)
@pytest.mark.parametrize("kind", ["all_reduce", "all_gather", "reduce_scatter", "all_to_all"])
def test_as_a_whole_and_message_by_message(
    tmp_path: Path, topology: str, implementation: str, kind: str
) -> None:
    """Ranks that come at different times, on both networks; two chunks; then a second collective."""
    late = np.random.default_rng(len(topology) + len(kind)).integers(0, 40, 8)
    ranks = [
        [
            node(1, us=int(late[rank]), is_cpu_op=False),
            collective(2, kind.upper(), 200_000, [1], is_cpu_op=False),
            node(3, us=int(late[-rank]), deps=[2], is_cpu_op=False),
            collective(4, kind.upper(), 50_000, [3], is_cpu_op=False),
        ]
        for rank in range(8)
    ]
    nodes = astra_sim.node_mask(astra_sim.workload(write_set(tmp_path / "set", *ranks)))
    network = astra_sim.network(topology, "8", "20", "300")
    system = astra_sim.system(implementation, splits=2)
    for aware in (False, True):
        whole, parts = (
            astra_sim.ends(nodes, None, network, system, aware=aware, whole=whole)
            for whole in (True, False)
        )
        assert whole == parts
        assert None not in whole


@pytest.mark.sampled(5)
@pytest.mark.parametrize("topology", ["Ring", "Switch", "FullyConnected"])
@pytest.mark.parametrize("kind", ["all_reduce", "all_gather", "all_to_all"])
@pytest.mark.parametrize("ranks", [5, 12])
@pytest.mark.parametrize("splits", [1, 3])
def test_one_rank_stands_for_all_where_all_begin_at_once(
    tmp_path: Path, topology: str, kind: str, ranks: int, splits: int
) -> None:
    """Then all send to rank 0 at once, which serves those first who ended first."""
    jobs = [
        [
            collective(1, kind.upper(), 120_000, is_cpu_op=False),
            collective(2, kind.upper(), 120_000, [1], is_cpu_op=False),
            *([send(3, 0, [2], comm_size=50_000)] if rank else []),
            *([receive(2 + k, k, [2], comm_size=50_000) for k in range(1, ranks) if not rank]),
        ]
        for rank in range(ranks)
    ]
    read = astra_sim.workload(write_set(tmp_path / "set", *jobs))
    network = astra_sim.network(topology, str(ranks), "30", "200")
    system = astra_sim.system("direct", splits=splits)
    whole, parts = (
        astra_sim.ends(astra_sim.node_mask(read), None, network, system, aware=True, whole=whole)
        for whole in (True, False)
    )
    assert whole == parts
    assert None not in whole


def test_a_message_takes_latency_and_bytes(tmp_path: Path) -> None:
    """1 MiB at 50 x 2^30 B/s and 500 ns: 20,031 ns; both ends are over then."""
    answer = simulated(tmp_path, [send(1, 1, comm_size=MIB)], [receive(1, 0, comm_size=MIB)])
    assert answer.ranks["end_ns"].to_list() == [20_031, 20_031]
    assert answer.after_ns == 20_031


def test_one_node_of_a_kind_at_a_time_in_the_order_of_ids(tmp_path: Path) -> None:
    """CPU and GPU nodes run side by side, two GPU nodes do not; the lower id goes first."""
    own = [
        node(5, us=7, is_cpu_op=False),
        node(3, us=2, is_cpu_op=False),
        node(4, us=20, is_cpu_op=True),
    ]
    answer = simulated(tmp_path, own, [node(1, us=0)])
    times = {
        row["node"]: (row["start_ns"], row["end_ns"])
        for row in answer.nodes.filter(rank=0).to_dicts()
    }
    assert times == {3: (0, 2000), 5: (2000, 9000), 4: (0, 20_000)}
    assert answer.ranks["end_ns"].to_list() == [20_000, 1]  # what takes no time takes 1 ns
    assert answer.ranks["compute_ns"].to_list() == [9000, 1]
    assert answer.ranks["host_ns"].to_list() == [11_000, 0]
    answer.check()


def test_links_count_what_they_carry(tmp_path: Path) -> None:
    """Two messages over one link of a ring of 3: the second one waits until the first has left the link."""
    size = 1_000_000
    read = astra_sim.workload(
        write_set(
            tmp_path / "set",
            [send(1, 1, comm_size=size)],
            [receive(1, 0, comm_size=size)],
            [send(1, 1, comm_size=size)],
        )
    )
    answer = simulate(
        read, astra_sim.network("Ring", "3", "1", "100"), astra_sim.system(), congestion_aware=True
    )
    links = answer.links.select("source", "target", "bytes")
    assert links.rows() == [("rank 0", "rank 1", size), ("rank 2", "rank 1", size)]
    occupied = int(size / (2**30 / 1e9))
    assert answer.links["busy_ns"].to_list() == [occupied, occupied]


def test_ranks_that_wait_for_each_other_are_named(tmp_path: Path) -> None:
    """ASTRA-sim ends here with code 0 and without a word."""
    first = [
        collective(1, "ALL_REDUCE", is_cpu_op=False),
        collective(2, "ALL_GATHER", deps=[1], is_cpu_op=False),
    ]
    second = [
        collective(1, "ALL_GATHER", is_cpu_op=False),
        collective(2, "ALL_REDUCE", deps=[1], is_cpu_op=False),
    ]
    with pytest.raises(
        CheckError,
        match=r"2 of 2 ranks wait for ever: rank 0: .* is all_reduce .*rank 1 does all_g",
    ) as e:
        simulated(tmp_path / "order", first, second)
    assert e.value.slug == "deadlock"
    late = [
        node(1, us=9, is_cpu_op=False),
        collective(2, deps=[1], is_cpu_op=False),
    ]  # as rank 0, after the other one
    with pytest.raises(
        CheckError,
        match="is all_reduce of 1,024 bytes, where rank 1 does all_reduce of 2,048 bytes",
    ):
        simulated(
            tmp_path / "size",
            [collective(1, is_cpu_op=False)],
            [collective(1, size=2048, is_cpu_op=False)],
            late,
        )
    with pytest.raises(
        CheckError, match="rank 0: node 1 `n1` waits for rank 1, which does not come to it"
    ):
        simulated(tmp_path / "absent", [collective(1, is_cpu_op=False)], [node(1)])
    with pytest.raises(
        CheckError,
        match=r"waits for 8 bytes with tag 0 from rank 1; rank 1: .* from rank 0; and so",
    ):
        simulated(
            tmp_path / "messages",
            [receive(1, 1), send(2, 1, [1])],
            [receive(1, 0), send(2, 0, [1])],
        )
    with pytest.raises(CheckError, match="waits in a circle with other nodes"):
        simulated(tmp_path / "circle", [node(1), node(2, deps=[3]), node(3, deps=[2])], [node(1)])


def test_what_astra_sim_stops_at_is_refused(tmp_path: Path) -> None:
    cases = {
        "is communication of the CPU": [collective(1, is_cpu_op=True)],
        "is of remote memory": [node(1, "MEM_LOAD_NODE")],
        "is a collective that ASTRA-sim does not do": [collective(1, "GATHER", is_cpu_op=False)],
        "waits for node 9, which is not there": [node(1, deps=[9])],
        "has an id that another node has": [node(1), node(1)],
        "has no nodes": [],
        "communicates no bytes": [collective(1, "ALL_GATHER", size=0, is_cpu_op=False)],
    }
    for number, (message, nodes) in enumerate(cases.items()):
        with pytest.raises(InputError, match=message) as error:
            simulated(tmp_path / str(number), nodes, [node(1)])
        assert error.value.slug == "not-for-astra-sim"
        assert error.value.where.endswith("w.0.et")
    with pytest.raises(UsageError, match="no group file says who is in group `7`"):
        simulated(tmp_path / "group", [collective(1, pg_name="7", is_cpu_op=False)], [node(1)])
    read = astra_sim.workload(write_set(tmp_path / "ranks", [node(1)], [node(1)]))
    with pytest.raises(UsageError, match="the network has 3 ranks, the workload 2"):
        simulate(read, astra_sim.network("Ring", "3", "50", "500"), astra_sim.system())
    with pytest.raises(UsageError, match="one dimension only"):
        simulate(
            read,
            astra_sim.network("Ring,Ring", "2,2", "50,50", "1,1"),
            astra_sim.system(),
            congestion_aware=True,
        )


def test_recorded_durations_and_the_roofline(tmp_path: Path) -> None:
    """2e12 operations at 900 TFLOPS: 2,222,222 ns; with replay-only a collective takes what was recorded."""
    nodes = [node(1, us=5, num_ops=2_000_000_000_000, tensor_size=1000, is_cpu_op=False)]
    read = astra_sim.workload(write_set(tmp_path / "roof", nodes, [node(1, is_cpu_op=True)]))
    system = astra_sim.system(roofline=True, peak_perf=900.0)
    assert simulate(read, RING, system).ranks["end_ns"].to_list() == [2_222_222, 1000]
    replayed = [[collective(1, us=us, is_cpu_op=False)] for us in (3, 4)]
    read = astra_sim.workload(write_set(tmp_path / "replay", *replayed))
    assert simulate(read, RING, astra_sim.system(replay_only=True)).ranks["end_ns"].to_list() == [
        3000,
        4000,
    ]


def test_an_algorithm_needs_its_files(tmp_path: Path) -> None:
    write_set(tmp_path / "algorithm", [send(1, 1)], [receive(1, 0)])
    prefix = next((tmp_path / "algorithm").glob("*.0.et")).name.removesuffix(".0.et")
    ranks = [[collective(1, is_cpu_op=False)]] * 2
    given = {"all_reduce": tmp_path / "algorithm" / prefix}
    answer = simulated(tmp_path, *ranks, algorithms=given)
    assert answer.ranks["end_ns"].to_list() == [500, 500]
    with pytest.raises(InputError, match="no file for position 2"):
        simulated(tmp_path / "three", *ranks, ranks[0], algorithms=given)
    with pytest.raises(UsageError, match="`allreduce` is carried out by no algorithm") as error:
        simulated(
            tmp_path / "kind", *ranks, algorithms={"allreduce": tmp_path / "algorithm" / prefix}
        )
    assert "all_reduce" in error.value.hint


def test_recorded_transfers_begin_when_the_last_rank_is_there(tmp_path: Path) -> None:
    """5 and 9 us of work, then a transfer of 4 us; a message of 7 us."""
    ranks = [
        [
            node(1, us=work, is_cpu_op=False),
            collective(2, us=4, deps=[1], is_cpu_op=False),
            message,
        ]
        for work, message in ((5, send(3, 1, [2], us=7)), (9, receive(3, 0, [2], us=7)))
    ]
    assert simulate_with_recorded_transfers(
        astra_sim.workload(write_set(tmp_path / "set", *ranks))
    ) == [20_000, 20_000]
