"""Answers of ASTRA-sim (518bd51) to small workloads in odd configurations, and where it ends without one."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from support import astra_sim
from support.workload import collective, node, receive, send, write_set
from traceloom.errors import CheckError, InputError, TraceloomError, UsageError
from traceloom.formats.chakra.et_pb2 import Node
from traceloom.formats.chakra.nodes import Workload
from traceloom.workload.simulate.astra_sim.config import AstraSimSystem, read_system
from traceloom.workload.simulate.astra_sim.run import simulate

KINDS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")


@dataclass(frozen=True)
class Case:
    """Ranks that come `LATE_US` to one collective after the other, and when ASTRA-sim says that each rank ends."""

    name: str
    network: tuple[str, str, str, str]  # topology, ranks, bandwidth, latency
    implementation: str  # of every kind, one per dimension
    collectives: tuple[tuple[str, int], ...]
    ends_ns: tuple[int, ...]
    aware: bool = False
    system: dict[str, Any] = field(default_factory=dict)
    group: dict[str, list[int]] = field(default_factory=dict)
    along: list[bool] | None = None


LATE_US = (3, 0, 40, 7, 1, 22, 9, 2)
RING6, RING8 = (("Ring", ranks, "20", "300") for ranks in ("6", "8"))
SWITCH4 = ("Switch", "4", "50", "500")
TWO = ("Ring,Switch", "4,2", "50,7.25", "500,20")
CASES = [
    Case(
        "two messages under way, all_reduce",
        RING6,
        "direct2",
        (("all_reduce", 60_000),),
        (43859, 43707, 44007, 44614, 44324, 44139),
    ),
    Case(
        "two messages under way, reduce_scatter",
        RING6,
        "direct2",
        (("reduce_scatter", 60_000),),
        (41689, 41399, 40634, 41082, 41382, 41989),
    ),
    Case(
        "one message under way, contended",
        RING6,
        "direct1",
        (("all_reduce", 60_001), ("all_to_all", 5)),
        (58333, 58033, 57733, 58033, 58333, 58633),
        True,
    ),
    Case(
        "a window in a group",
        RING8,
        "direct2",
        (("all_reduce", 60_000),),
        (27566, 26422, 40000, 27866, 1000, 27622, 9000, 2000),
        group={"1": [5, 1, 3, 0]},
    ),
    Case(
        "a window wider than the group",
        RING6,
        "direct9",
        (("all_gather", 600),),
        (40647, 40347, 40020, 40347, 40647, 40947),
        system={"active_chunks": 2},
    ),
    Case(
        "sizes that halving rounds",
        SWITCH4,
        "halvingDoubling",
        (("all_reduce", 64),),
        (55200, 54200, 56200, 55200),
        system={"splits": 3},
    ),
    Case(
        "a group of all ranks, in another order",
        SWITCH4,
        "direct",
        (("all_reduce", 4096),),
        (42212, 42174, 42212, 42212),
        True,
        group={"1": [3, 0, 2, 1]},
    ),
    Case(
        "one ring over two dimensions",
        TWO,
        "oneRing,ring",
        (("all_reduce", 9999),),
        (47724, 44063, 44586, 45109, 45632, 46155, 46678, 47201),
    ),
    Case(
        "the second dimension takes all ranks",
        TWO,
        "ring,oneDirect",
        (("reduce_scatter", 9999),),
        (42428, 41923, 42428, 42928, 42428, 42003, 42428, 42928),
    ),
    Case(
        "fewer algorithms than dimensions",
        TWO,
        "direct",
        (("all_gather", 777),),
        (43081, 42581, 42081, 42581, 24581, 24081, 24581, 25081),
        system={"splits": 2},
    ),
    Case(
        "trees in dimensions",
        TWO,
        "doubleBinaryTree,doubleBinaryTree",
        (("all_reduce", 99_999),),
        (86120, 89870, 88740, 89870, 75613, 79363, 78233, 79363),
        system={"splits": 3},
    ),
    Case(
        "trees, each dimension in full",
        TWO,
        "doubleBinaryTree,ring",
        (("all_reduce", 99_999), ("all_gather", 10)),
        (82168, 83688, 83178, 83688, 82208, 83728, 83218, 83728),
        system={"splits": 2, "optimization": "baseline"},
    ),
    Case(
        "one of two dimensions",
        TWO,
        "ring,direct",
        (("all_reduce", 9999),),
        (4541, 22859, 41541, 8541, 3859, 23541, 40859, 7859),
        along=[False, True],
    ),
    Case(
        "what comes back while the first half is reduced",
        ("FullyConnected", "4", "33.3", "0"),
        "direct",
        (("all_reduce", 6_000_000),),
        (348905, 315905, 348905, 348905),
        system={"local_mem_bw": 20.0, "endpoint_delay": 1},
    ),
    Case(
        "the same on queues",
        ("FullyConnected", "5", "33.3", "0"),
        "direct",
        (("all_reduce", 6_000_000),),
        (270346, 270346, 270346, 270346, 270346),
        True,
        system={"local_mem_bw": 20.0, "endpoint_delay": 1, "splits": 2},
    ),
    Case("of no bytes", SWITCH4, "ring", (("reduce_scatter", 0),), (42040, 43040, 40040, 41040)),
]


def ranks_of(case: Case) -> list[list[Node]]:
    members = {rank: name for name, ranks in case.group.items() for rank in ranks}
    more: dict[str, Any] = {} if case.along is None else {"involved_dim": case.along}
    count = 1
    for size in case.network[1].split(","):
        count *= int(size)
    ranks = []
    for rank in range(count):
        own = [node(1, us=LATE_US[rank], is_cpu_op=False)]
        for number, (kind, size) in enumerate(case.collectives, 2):
            if case.group and rank not in members:
                continue
            group = {"pg_name": members[rank]} if case.group else {}
            own.append(
                collective(
                    number, kind.upper(), size, [number - 1], is_cpu_op=False, **group, **more
                )
            )
        ranks.append(own)
    return ranks


def system_of(case: Case) -> AstraSimSystem:
    names = dict.fromkeys(KINDS, tuple(case.implementation.split(",")))
    values = {"splits": 1, "local_mem_bw": 101.0, "optimization": "localBWAware", **case.system}
    return AstraSimSystem(names, **values)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_every_rank_ends_when_astra_sim_says(tmp_path: Path, case: Case) -> None:
    read = astra_sim.workload(write_set(tmp_path / "set", *ranks_of(case), groups=case.group))
    answer = simulate(
        read, astra_sim.network(*case.network), system_of(case), congestion_aware=case.aware
    )
    assert tuple(answer.ranks["end_ns"]) == case.ends_ns


def test_chunks_are_counted_over_all_collectives_of_a_rank(tmp_path: Path) -> None:
    """ASTRA-sim ends here with code 0 and unreleased nodes."""
    in_group = collective(1, "ALL_GATHER", is_cpu_op=False, pg_name="1")
    all_ranks = collective(2, "ALL_REDUCE", deps=[1], is_cpu_op=False)
    ranks = [[in_group, all_ranks], [in_group, all_ranks], [node(1, is_cpu_op=False), all_ranks]]
    own = [collective(2, "ALL_REDUCE", deps=[1], is_cpu_op=False, pg_name="2")]
    groups = {"1": [0, 1], "2": [0, 1, 2]}
    read = astra_sim.workload(write_set(tmp_path / "one", *ranks, groups=groups))
    network = astra_sim.network("Ring", "3", "50", "500")
    with pytest.raises(
        CheckError, match="comes after 1 chunks of collectives, in rank 2 after 0, and"
    ) as e:
        simulate(read, network, astra_sim.system())
    assert e.value.slug == "deadlock"
    grouped = [[ranks[0][0], *own], [ranks[1][0], *own], [ranks[2][0], *own]]
    read = astra_sim.workload(write_set(tmp_path / "two", *grouped, groups=groups))
    assert simulate(read, network, astra_sim.system()).ranks["end_ns"].to_list() == [
        3074,
        2613,
        2613,
    ]


def test_where_astra_sim_stops(tmp_path: Path) -> None:
    def stops(
        message: str, *ranks: list[Node], network: tuple[str, str, str, str] = RING6, **more: Any
    ) -> None:
        read: Workload = astra_sim.workload(
            write_set(tmp_path / str(len(list(tmp_path.iterdir()))), *ranks)
        )
        aware = more.pop("aware", False)
        algorithms = more.pop("implementations", None)
        system = astra_sim.system(**more)
        if algorithms:
            system = AstraSimSystem(dict.fromkeys(KINDS, algorithms), splits=1, local_mem_bw=101.0)
        with pytest.raises(TraceloomError, match=message):
            simulate(read, astra_sim.network(*network), system, congestion_aware=aware)

    two = ("FullyConnected", "2", "50", "0")
    idle = [node(1, is_cpu_op=False)]
    meets = [collective(1, is_cpu_op=False)]
    stops("at the very beginning", meets, meets, network=two, endpoint_delay=0)
    stops("at the very beginning", [send(1, 1)], idle, network=two)
    stops(
        "at the very beginning",
        [send(1, 1)],
        idle,
        network=("FullyConnected", "2", "50", "9"),
        aware=True,
    )
    stops("stops at a Ring of 2", idle, idle, network=("Ring", "2", "50", "500"), aware=True)
    stops(
        "has 2 algorithms, the network 1 dimension",
        meets,
        meets,
        network=two,
        implementations=("ring", "ring"),
    )
    stops("a doubleBinaryTree of 6 ranks", *[meets] * 6, implementations=("doubleBinaryTree",))
    stops("never begins with direct0", *[meets] * 6, implementations=("direct0",))
    tiny = [collective(1, size=1, is_cpu_op=False)]
    stops(
        "messages of no bytes", *[tiny] * 4, network=SWITCH4, implementations=("halvingDoubling",)
    )
    nowhere = [collective(1, is_cpu_op=False, involved_dim=[False, False])]
    stops("along none of its dimensions", nowhere, nowhere, network=two)
    stops("no `local-mem-bw`", meets, meets, network=two, local_mem_bw=0.0)
    stops("is metadata", [node(1, "METADATA_NODE")], idle, network=two)
    stops("is a message of rank 1", [send(1, 1, comm_src=1)], idle, network=two)
    stops("is a message with rank 5, but there are 2", [send(1, 5)], idle, network=two)
    stops("has no num_ops", [node(1, is_cpu_op=False)], idle, network=two, roofline=True)
    first = [node(1, "INVALID_NODE", is_cpu_op=False), node(2, deps=[1], is_cpu_op=False)]
    stops(
        "is never begun: it is ready when the last other node has ended", first, idle, network=two
    )
    stops(
        "waits for 3 chunks, and has one",
        meets,
        meets,
        network=two,
        splits=3,
        custom={"all_reduce": "x"},
    )


def test_replay_goes_before_the_roofline(tmp_path: Path) -> None:
    own = [
        node(1, us=3, is_cpu_op=False, num_ops=10**9, tensor_size=0),
        node(2, us=4, deps=[1], is_cpu_op=False),
    ]
    read = astra_sim.workload(write_set(tmp_path / "set", own, [node(1)]))
    system = astra_sim.system(roofline=True, replay_only=True, peak_perf=900.0)
    assert simulate(read, astra_sim.network("Ring", "2", "50", "500"), system).ranks[
        "end_ns"
    ].to_list() == [7000, 1000]


def test_algorithms_of_single_nodes_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "system.json"
    path.write_text(
        '{"preferred-dataset-splits": 1, "per-node-custom-implementation": "nodes.yml"}',
        encoding="utf-8",
    )
    with pytest.raises(InputError, match="algorithms of single nodes are not simulated"):
        read_system(path)


def test_an_algorithm_in_a_group_whose_ranks_are_in_another_order(tmp_path: Path) -> None:
    """Rank 0 is position 0, as the lower one, and position 1 is rank 0, as listed."""
    write_set(tmp_path / "algorithm", [send(1, 1)], [receive(1, 0)])
    meets = [collective(1, is_cpu_op=False, pg_name="1")]
    read = astra_sim.workload(
        write_set(tmp_path / "set", meets, meets, [node(1)], groups={"1": [1, 0]})
    )
    network = astra_sim.network("Ring", "3", "50", "500")
    with pytest.raises(UsageError, match="rank 0 would send itself a message"):
        simulate(
            read,
            network,
            astra_sim.system(),
            algorithms={"all_reduce": tmp_path / "algorithm" / "w"},
        )


def test_sizes_that_come_to_the_same_chunks_are_one_collective(tmp_path: Path) -> None:
    """3 and 4 bytes among 4 ranks are 4."""
    ranks = [[collective(1, size=3 + rank % 2, is_cpu_op=False)] for rank in range(4)]
    read = astra_sim.workload(write_set(tmp_path / "set", *ranks))
    network = astra_sim.network("Ring", "4", "50", "500")
    assert simulate(read, network, astra_sim.system()).ranks["end_ns"].to_list() == [3070] * 4
