"""The mode `astra-sim` by the rules that docs/concepts/astra-sim.md states: closed forms of phases over dimensions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest

from support import astra_sim
from support.workload import collective, node, receive, send, write_set
from traceloom.errors import UsageError
from traceloom.workload.chakra.astra_sim import to_astra_sim
from traceloom.workload.chakra.convert import ConversionInput
from traceloom.workload.chakra.validate import validate
from traceloom.workload.simulate.astra_sim.run import simulate

GIB_PER_GB = (1 << 30) / 1e9  # bytes per ns of one GB/s
MEMORY = 1600.0
KINDS = ["all_reduce", "all_gather", "reduce_scatter", "all_to_all"]


def message(
    topology: str, ranks: int, distance: int, size: int, bandwidth: float, latency: float
) -> int:
    """Hops times the latency and the bytes over the bandwidth, in whole ns."""
    hops = {"Ring": min(distance, ranks - distance), "Switch": 2, "FullyConnected": 1}[topology]
    return int(hops * latency + size / (bandwidth * GIB_PER_GB))


def reduction(size: int) -> int:
    """A message is read twice and written once at the bandwidth of the memory."""
    return 3 * int(size / (MEMORY * 1e9) * 1e9)


def ring(kind: str, chunk: int, ranks: int, delay: int, each: Sequence[int]) -> int:
    """All steps of a ring; `each` is a message of a part and one of the whole chunk, and the reduction of a part."""
    part, whole, reduced = each
    steps = {
        "reduce_scatter": (ranks - 1) * (part + delay + reduced),
        "all_gather": (ranks - 1) * (whole + delay),
        "all_reduce": (ranks - 1) * (2 * part + 2 * delay + reduced),
        "all_to_all": ranks * (ranks - 1) // 2 * (part + delay),
    }
    return delay + steps[kind]


def end_of(home: Path, kind: str, network: object, system: object, ranks: int, size: int) -> int:
    read = astra_sim.one_collective(home, kind, ranks, size)
    answer = simulate(read, network, system)  # type: ignore[arg-type]
    ends = set(answer.ranks["end_ns"].to_list())
    assert len(ends) == 1
    return ends.pop()


@pytest.mark.sampled(5)
@pytest.mark.parametrize("delay", [1, 25])
@pytest.mark.parametrize("topology", ["Ring", "Switch", "FullyConnected"])
@pytest.mark.parametrize("ranks", [3, 8])
def test_rings_take_step_after_step(topology: str, ranks: int, delay: int, tmp_path: Path) -> None:
    size = ranks * 40_000 + 7  # what does not divide is lost
    network = astra_sim.network(topology, str(ranks), "30", "400")
    for kind in KINDS:
        part, whole = size // ranks, size
        each = [
            message(topology, ranks, 1, part, 30, 400),
            message(topology, ranks, 1, whole, 30, 400),
            reduction(part),
        ]
        took = end_of(
            tmp_path / kind, kind, network, astra_sim.system(endpoint_delay=delay), ranks, size
        )
        assert took == ring(kind, size, ranks, delay, each), kind


@pytest.mark.parametrize("topology", ["Ring", "Switch", "FullyConnected"])
@pytest.mark.parametrize("ranks", [4, 8, 16])
def test_all_messages_of_direct_are_under_way_at_once(
    topology: str, ranks: int, tmp_path: Path
) -> None:
    """Where nothing is reduced the last message to arrive decides: that of the farthest rank."""
    size = ranks * 10_000
    network = astra_sim.network(topology, str(ranks), "30", "400")
    system = astra_sim.system("direct", endpoint_delay=25)
    for kind, sent in (("all_gather", size), ("all_to_all", size // ranks)):
        farthest = max(
            message(topology, ranks, distance, sent, 30, 400) for distance in range(1, ranks)
        )
        assert end_of(tmp_path / kind, kind, network, system, ranks, size) == 25 + farthest + 25


@pytest.mark.parametrize("topology", ["Ring", "Switch"])
@pytest.mark.parametrize("ranks", [4, 16])
def test_halving_and_doubling_price_each_message_by_its_distance(
    topology: str, ranks: int, tmp_path: Path
) -> None:
    chunk = ranks * 6_400
    network = astra_sim.network(topology, str(ranks), "30", "400")
    system = astra_sim.system("halvingDoubling", endpoint_delay=25)
    steps = ranks.bit_length() - 1
    doubling = sum(
        message(topology, ranks, ranks >> (k + 1), chunk << k, 30, 400) + 25 for k in range(steps)
    )  # far away first, with one part
    assert end_of(tmp_path / "gather", "all_gather", network, system, ranks, chunk) == 25 + doubling
    halving = sum(
        message(topology, ranks, 1 << k, chunk >> (k + 1), 30, 400)
        + 25
        + (reduction(chunk >> (k + 2)) if k < steps - 1 else 0)  # at the price of the next one
        for k in range(steps)
    )
    assert (
        end_of(tmp_path / "scatter", "reduce_scatter", network, system, ranks, chunk)
        == 25 + halving
    )


@pytest.mark.parametrize("baseline", [False, True])
def test_dimensions_are_gone_through_one_after_the_other(baseline: bool, tmp_path: Path) -> None:
    """Inwards out the parts shrink, outwards in they grow; in full in each dimension where that is asked for."""
    sizes, rates, latencies = (4, 2), (100.0, 20.0), (300.0, 900.0)
    network = astra_sim.network("Ring,Switch", "4,2", "100,20", "300,900")
    more = {"optimization": "baseline"} if baseline else {}
    system = astra_sim.system("ring", 2, endpoint_delay=25, **more)
    chunk = 8 * 50_000

    def phase(kind: str, dimension: int, size: int) -> int:
        ranks = sizes[dimension]
        topology = ("Ring", "Switch")[dimension]
        priced = [
            message(topology, ranks, 1, b, rates[dimension], latencies[dimension])
            for b in (size // ranks, size)
        ]
        return ring(kind, size, ranks, 25, [*priced, reduction(size // ranks)])

    expected = {
        "reduce_scatter": phase("reduce_scatter", 0, chunk)
        + phase("reduce_scatter", 1, chunk // 4),
        "all_gather": phase("all_gather", 1, chunk) + phase("all_gather", 0, 2 * chunk),
        "all_to_all": phase("all_to_all", 0, chunk) + phase("all_to_all", 1, chunk),
        "all_reduce": phase("all_reduce", 0, chunk) + phase("all_reduce", 1, chunk)
        if baseline
        else phase("reduce_scatter", 0, chunk)
        + phase("all_reduce", 1, chunk // 4)
        + phase("all_gather", 0, chunk // 4),
    }
    for kind, took in expected.items():
        assert end_of(tmp_path / kind, kind, network, system, 8, chunk) == took, kind


def test_several_chunks_of_one_ring_follow_each_other(tmp_path: Path) -> None:
    """Each of three chunks is a ring of its own; the ones behind wait for the one before."""
    ranks, size = 4, 4 * 3 * 10_000
    network = astra_sim.network("Ring", "4", "30", "400")
    chunk = size // 3
    each = [message("Ring", 4, 1, chunk // 4, 30, 400), 0, reduction(chunk // 4)]
    once = ring("all_reduce", chunk, ranks, 25, each)
    system = astra_sim.system(splits=3, endpoint_delay=25, active_chunks=1)
    assert end_of(tmp_path / "three", "all_reduce", network, system, ranks, size) == 3 * once
    # One more where they do not add up: of what is left over as much as of the others.
    assert end_of(tmp_path / "four", "all_reduce", network, system, ranks, size + 1) == 4 * once


@pytest.mark.parametrize(("latency", "bandwidth"), [(0, 1), (700, 13), (12, 200)])
def test_a_chain_of_messages_goes_rank_by_rank(
    latency: int, bandwidth: int, tmp_path: Path
) -> None:
    sizes = [4_000, 999_999, 1, 123_456]
    between = [
        [
            receive(1, at - 1, comm_size=sizes[at - 1]),
            node(2, us=at, deps=[1], is_cpu_op=False),
            send(3, at + 1, deps=[2], comm_size=sizes[at]),
        ]
        for at in range(1, 4)
    ]
    ends = [send(1, 1, comm_size=sizes[0])], [receive(1, 3, comm_size=sizes[3])]
    read = astra_sim.workload(write_set(tmp_path / "set", ends[0], *between, ends[1]))
    network = astra_sim.network("Ring", "5", str(bandwidth), str(latency))
    answer = simulate(read, network, astra_sim.system())
    end, expected = 0, []
    for at in range(4):
        end += message("Ring", 5, 1, sizes[at], bandwidth, latency) + (1000 * at if at else 0)
        expected.append(end)
    assert answer.ranks["end_ns"].to_list() == [*expected, expected[-1]]
    assert answer.after_ns == expected[-1]


def test_a_broadcast_takes_what_was_recorded(tmp_path: Path) -> None:
    own = [
        [collective(1, "BROADCAST", 1 << 20, us=us), node(2, us=1, deps=[1], is_cpu_op=False)]
        for us in (7, 3)
    ]
    read = astra_sim.workload(write_set(tmp_path / "set", *own))
    answer = simulate(read, astra_sim.network("Switch", "2", "1", "500"), astra_sim.system())
    assert answer.ranks["end_ns"].to_list() == [8_000, 4_000]


@pytest.mark.parametrize(
    "implementation", ["ring", "direct", "direct2", "halvingDoubling", "doubleBinaryTree"]
)
def test_a_collective_of_one_rank_which_never_ends_is_refused(
    implementation: str, tmp_path: Path
) -> None:
    alone = [
        node(1, us=1, is_cpu_op=False),
        collective(2, size=4_000, deps=[1], is_cpu_op=False, pg_name="3"),
    ]
    read = astra_sim.workload(
        write_set(tmp_path / "set", alone, [node(1, us=1)], groups={"3": [0]})
    )
    network = astra_sim.network("Switch", "2", "50", "500")
    with pytest.raises(UsageError, match="one rank") as refused:
        simulate(read, network, astra_sim.system(implementation))
    assert refused.value.slug == "bad-collective"


def test_a_dimension_of_one_is_none() -> None:
    for sizes in ("1", "4,1"):
        with pytest.raises(UsageError, match="at least 2 NPUs") as refused:
            astra_sim.network("Ring,Ring", sizes, "50,50", "1,1")
        assert refused.value.slug == "bad-astra-sim-config"


@pytest.mark.parametrize("aware", [False, True])
@pytest.mark.parametrize(
    ("bandwidth", "latency", "delay", "us"),
    [
        ("1e-300", "1", 10, 1),
        ("1", "1e300", 10, 1),
        ("1", "1e18", 10, 1),
        ("1", "1", 10**18, 1),
        ("1", "1", 10, 10**15),
    ],
    ids=["no bandwidth", "latency without end", "long latency", "long delay", "long work"],
)
def test_what_takes_longer_than_anybody_can_wait_is_refused(
    bandwidth: str, latency: str, delay: int, us: int, aware: bool, tmp_path: Path
) -> None:
    own = [
        node(1, us=us, is_cpu_op=False),
        collective(2, size=4_000, deps=[1], is_cpu_op=False),
        collective(3, "ALL_TO_ALL", 4_000, deps=[2], is_cpu_op=False),
    ]
    read = astra_sim.workload(write_set(tmp_path / "set", own, own, own))
    for implementation in ("ring", "direct"):
        system = astra_sim.system(implementation, endpoint_delay=delay)
        with pytest.raises(UsageError, match="more than 100 days") as refused:
            simulate(
                read,
                astra_sim.network("Ring", "3", bandwidth, latency),
                system,
                congestion_aware=aware,
            )
        assert refused.value.slug == "times-too-long"


def test_a_simulation_stops_before_memory_runs_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("traceloom.system.process.get_free_memory", lambda: 1 << 20)
    read = astra_sim.one_collective(tmp_path / "set", "all_reduce", 4, 1 << 20)
    network = astra_sim.network("Ring", "4", "50", "500")
    with pytest.raises(UsageError) as refused:
        astra_sim.ends(astra_sim.node_mask(read), None, network, astra_sim.system(), aware=True)
    assert refused.value.slug == "no-memory-left"


@pytest.mark.parametrize("ranks", [6, 12, 20, 24])
@pytest.mark.parametrize("topology", ["Switch", "FullyConnected"])
def test_halving_and_doubling_gathers_where_pairs_of_ranks_are_left(
    tmp_path: Path, topology: str, ranks: int
) -> None:
    size, delay = 1 << 20, 10
    read = astra_sim.one_collective(tmp_path / "set", "all_gather", ranks, size)
    network = astra_sim.network(topology, str(ranks), "50", "500")
    system = astra_sim.system("halvingDoubling")
    steps = ranks.bit_length() - 1
    took = sum(message(topology, ranks, 1, size << k, 50.0, 500.0) for k in range(steps))
    ends = astra_sim.ends(astra_sim.node_mask(read), None, network, system, aware=False)
    assert ends == [took + (steps + 1) * delay] * ranks


@pytest.mark.parametrize(
    ("kind", "ranks"),
    [
        ("all_gather", 5),
        ("all_gather", 10),
        ("all_gather", 14),
        ("all_reduce", 6),
        ("reduce_scatter", 12),
        ("all_to_all", 4),
    ],
)
def test_halving_and_doubling_is_refused_where_it_never_ends(
    tmp_path: Path, kind: str, ranks: int
) -> None:
    read = astra_sim.one_collective(tmp_path / "set", kind, ranks, 1 << 20)
    network = astra_sim.network("Switch", str(ranks), "50", "500")
    system = replace(
        astra_sim.system("halvingDoubling"), implementations={kind: ("halvingDoubling",)}
    )
    with pytest.raises(UsageError) as refused:
        astra_sim.ends(astra_sim.node_mask(read), None, network, system, aware=False)
    assert refused.value.slug in {"bad-collective", "no-such-schedule"}


def test_an_end_on_a_message_after_work_of_the_cpu_is_marked(tmp_path: Path) -> None:
    network, system = astra_sim.network("Ring", "4", "50", "500"), astra_sim.system()
    one = [node(1, us=5, is_cpu_op=True), send(2, 1, deps=[1])]
    others = [[receive(1, 0)], [node(1)], [node(1)]]
    for more, marked in ((), True), ((node(3, deps=[2]),), False):
        home = write_set(tmp_path / str(marked), [*one, *more], *others)
        notices = simulate(astra_sim.workload(home), network, system).notices
        assert ("astra-sim-no-end" in {notice.slug for notice in notices}) is marked
        problems = validate(home, target="astra-sim").problems
        assert ("host-node-last" in {problem.rule for problem in problems}) is marked


@pytest.mark.sampled(10)
@pytest.mark.parametrize("seed", range(300))
def test_a_chain_of_work_and_rings_takes_the_sum_of_its_closed_forms(
    tmp_path: Path, seed: int
) -> None:
    """In the files as they are, in what a conversion makes of them, and on queued links that nobody shares."""
    chance = Random(seed)
    ranks, splits, delay = chance.randint(3, 8), chance.randint(1, 4), chance.choice([1, 10, 25])
    topology = chance.choice(["Ring", "FullyConnected", "Switch"])
    first, expected = chance.randint(0, 40), 0
    nodes = []
    for number in range(first + 1, first + chance.randint(2, 12)):
        deps = [number - 1] if nodes else []
        if chance.random() < 0.5:
            us = chance.choice([0, 1, 50])
            nodes.append(node(number, us=us, deps=deps, num_ops=chance.randint(1, 9)))
            expected += us * 1000 or 1
            continue
        kind, chunk = chance.choice(KINDS), ranks * chance.randint(1000, 90_000)
        each = [message(topology, ranks, 1, size, 30, 400) for size in (chunk // ranks, chunk)] + [
            reduction(chunk // ranks)
        ]
        nodes.append(collective(number, kind.upper(), splits * chunk, deps))
        expected += splits * ring(kind, chunk, ranks, delay, each)
    home = write_set(tmp_path / "set", *[nodes] * ranks)
    with ConversionInput(home) as source:
        to_astra_sim(source.graph()).write(tmp_path / "converted")
    network = astra_sim.network(topology, str(ranks), "30", "400")
    system = astra_sim.system(splits=splits, endpoint_delay=delay)
    for folder in (home, tmp_path / "converted"):
        for aware in {False, topology != "Switch"}:  # there each hop takes the whole message
            answer = simulate(astra_sim.workload(folder), network, system, congestion_aware=aware)
            assert set(answer.ranks["end_ns"]) == {expected}
