"""What communications take on machines, from files to answer: closed forms of every algorithm, and laws of units."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import polars as pl
import pytest

from support.workload import collective, node, receive, send, write_set
from traceloom.analyze.placed_calls import Peak
from traceloom.errors import UsageError
from traceloom.formats.chakra.et_pb2 import Node
from traceloom.workload.collective_algorithms import KINDS_BY_ALGORITHM
from traceloom.workload.simulate.machine import (
    AlgorithmRule,
    Dimension,
    Machine,
    MeasuredTransfer,
    Nic,
    SpeedFactor,
)
from traceloom.workload.simulate.native import run
from traceloom.workload.simulate.result import Simulation

RANKS = 8
SIZE = 1 << 23  # of a rank's buffer; of gathers one rank's part
RATE, LATENCY = 16.0, 700.0
CHUNK = 1 << 19  # bytes that chains and double trees hand on at once
Form = Callable[
    [float, float], float
]  # latency of a message, time of the whole buffer on a link -> ns

# On a network where each pair of ranks has a link of its own.
DIRECT_LINKS: dict[tuple[str, str], Form] = {
    ("ring", "all_reduce"): lambda a, t: 14 * (a + t / 8),
    ("ring", "reduce_scatter"): lambda a, t: 7 * (a + t / 8),
    ("ring", "all_gather"): lambda a, t: 7 * (a + t),
    ("ring", "all_to_all"): lambda a, t: 28 * (a + t / 8),
    ("ring", "broadcast"): lambda a, t: 7 * (a + t / 16) + 15 * t / 16,
    ("ring", "reduce"): lambda a, t: 7 * (a + t / 16) + 15 * t / 16,
    ("direct", "all_reduce"): lambda a, t: 2 * (a + t / 8),
    ("direct", "reduce_scatter"): lambda a, t: a + t / 8,
    ("direct", "all_gather"): lambda a, t: a + t,
    ("direct", "all_to_all"): lambda a, t: a + t / 8,
    ("direct", "broadcast"): lambda a, t: a + t,
    ("direct", "reduce"): lambda a, t: a + t,
    ("direct", "gather"): lambda a, t: a + t,
    ("halving-doubling", "all_reduce"): lambda a, t: 6 * a + 2 * t * 7 / 8,
    ("halving-doubling", "reduce_scatter"): lambda a, t: 3 * a + t * 7 / 8,
    ("halving-doubling", "all_gather"): lambda a, t: 3 * a + 7 * t,
    ("tree", "all_reduce"): lambda a, t: 6 * (a + t),
    ("tree", "broadcast"): lambda a, t: 3 * (a + t),
    ("tree", "reduce"): lambda a, t: 3 * (a + t),
}
# Where a rank has one port for all that it sends: the messages of a round leave it together.
ONE_PORT: dict[tuple[str, str], Form] = {
    **{
        key: form
        for key, form in DIRECT_LINKS.items()
        if key[0] in {"ring", "halving-doubling", "tree"}
    },
    ("direct", "all_reduce"): lambda a, t: 2 * (a + t * 7 / 8),
    ("direct", "reduce_scatter"): lambda a, t: a + t * 7 / 8,
    ("direct", "all_gather"): lambda a, t: a + 7 * t,
    ("direct", "all_to_all"): lambda a, t: a + t * 7 / 8,
    ("direct", "broadcast"): lambda a, t: a + 7 * t,
    ("direct", "reduce"): lambda a, t: a + 7 * t,
    ("direct", "gather"): lambda a, t: a + 7 * t,
}


def one_after_the_other(kinds: list[str], size: int = SIZE) -> list[Node]:
    """A rank's part of collectives, each of which waits for the one before."""
    return [
        collective(k + 1, kind.upper(), size, deps=[k] if k else []) for k, kind in enumerate(kinds)
    ]


def answered(home: Path, kinds: list[str], machine: Machine, size: int = SIZE) -> Simulation:
    return run(write_set(home, *[one_after_the_other(kinds, size)] * machine.ranks), machine)


def times(answer: Simulation) -> dict[str, int]:
    return dict(answer.collectives.select("kind", "transfer_ns").iter_rows())


def with_algorithm(machine: Machine, algorithm: str) -> Machine:
    rules = [AlgorithmRule(kind, algorithm) for kind in KINDS_BY_ALGORITHM[algorithm]]  # type: ignore[arg-type]
    return replace(machine, algorithms=tuple(rules))


def joined(
    topology: str, ranks: int = RANKS, rate: float = RATE, latency: float = LATENCY
) -> Machine:
    return Machine((Dimension(topology, ranks, rate, latency),))  # type: ignore[arg-type]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("algorithm", ["ring", "direct", "halving-doubling", "tree"])
@pytest.mark.parametrize(
    ("topology", "links", "forms"),
    [("fully-connected", 1, DIRECT_LINKS), ("switch", 2, ONE_PORT)],
    ids=["fully-connected", "switch"],
)
def test_every_algorithm_takes_its_closed_form(
    topology: str, links: int, forms: dict[tuple[str, str], Form], algorithm: str, tmp_path: Path
) -> None:
    kinds = [kind for kind in KINDS_BY_ALGORITHM[algorithm] if (algorithm, kind) in forms]
    answer = answered(tmp_path / "set", kinds, with_algorithm(joined(topology), algorithm))
    expected = {kind: forms[algorithm, kind](links * LATENCY, SIZE / RATE) for kind in kinds}
    assert times(answer) == pytest.approx(expected, abs=1)
    assert set(answer.collectives["algorithm"]) == {algorithm}
    assert answer.after_ns == pytest.approx(sum(expected.values()), abs=len(kinds))
    # What is on the bus of a rank, by the definition of its bandwidth.
    on_bus = {
        "all_reduce": 2 * SIZE * 7 / 8,
        "reduce_scatter": SIZE * 7 / 8,
        "all_to_all": SIZE * 7 / 8,
        "all_gather": 7 * SIZE,
        "gather": 7 * SIZE,
        "broadcast": SIZE,
        "reduce": SIZE,
    }
    for kind, took, bandwidth in answer.collectives.select(
        "kind", "transfer_ns", "bandwidth"
    ).iter_rows():
        assert bandwidth == pytest.approx(on_bus[kind] / took)


@pytest.mark.parametrize("memory", [3e12])
def test_reducing_moves_three_bytes_for_one(memory: float, tmp_path: Path) -> None:
    """Only what is summed up costs memory: half the steps of a ring, one message of a tree per level."""
    machine = replace(joined("fully-connected"), device=Peak("a device", {"bf16": 1e15}, memory))
    reduced = 3 * SIZE / memory * 1e9
    kinds = ["all_reduce", "reduce_scatter", "all_gather"]
    rings = times(answered(tmp_path / "ring", kinds, with_algorithm(machine, "ring")))
    free = times(
        answered(tmp_path / "free", kinds, with_algorithm(joined("fully-connected"), "ring"))
    )
    assert rings["all_reduce"] - free["all_reduce"] == pytest.approx(7 * reduced / 8, abs=2)
    assert rings["reduce_scatter"] - free["reduce_scatter"] == pytest.approx(7 * reduced / 8, abs=2)
    assert rings["all_gather"] == free["all_gather"]
    direct = times(answered(tmp_path / "direct", kinds, with_algorithm(machine, "direct")))
    assert direct["reduce_scatter"] == pytest.approx(
        LATENCY + SIZE / 8 / RATE + 7 * reduced / 8, abs=1
    )


@pytest.mark.parametrize(("ranks", "hosts"), [(8, 2), (12, 3)])
def test_two_levels_take_a_ring_on_each(ranks: int, hosts: int, tmp_path: Path) -> None:
    """Where no algorithm is named, groups with as many ranks in each of several hosts use rings on both levels."""
    local = ranks // hosts
    size = 96 << 16
    machine = Machine(
        (Dimension("ring", local, 100.0, 50.0), Dimension("ring", hosts, 10.0, 900.0))
    )
    kinds = ["all_reduce", "reduce_scatter", "all_gather"]
    answer = answered(tmp_path / "set", kinds, machine, size)
    assert set(answer.collectives["algorithm"]) == {"two-level"}
    inside = (local - 1) * (50.0 + size / local / 100.0)
    between = (hosts - 1) * (900.0 + size / local / hosts / 10.0)
    assert times(answer) == pytest.approx(
        {
            "all_reduce": 2 * inside + 2 * between,
            "reduce_scatter": inside + between,
            "all_gather": (hosts - 1) * (900.0 + size / 10.0)
            + (local - 1) * (50.0 + size * hosts / 100.0),
        },
        abs=2,
    )
    stated = answered(tmp_path / "stated", kinds, with_algorithm(machine, "ring"), size)
    assert set(stated.collectives["algorithm"]) == {"ring"}


def test_where_nothing_is_named_kinds_and_sizes_have_their_usual_algorithm(tmp_path: Path) -> None:
    """As docs/reference/machine.md says."""
    kinds = [
        "all_reduce",
        "all_gather",
        "reduce_scatter",
        "all_to_all",
        "broadcast",
        "reduce",
        "gather",
        "barrier",
    ]
    usual = {
        "all_to_all": "direct",
        "gather": "direct",
        "broadcast": "tree",
        "reduce": "tree",
        "barrier": "tree",
    }
    for size, of_all_reduce in ((1 << 15, "double-tree"), (1 << 16, "ring")):
        table = answered(tmp_path / str(size), kinds, joined("switch", 4), size).collectives
        expected = {kind: usual.get(kind, "ring") for kind in kinds} | {"all_reduce": of_all_reduce}
        assert dict(table.select("kind", "algorithm").iter_rows()) == expected
    uneven = Machine((Dimension("switch", 4, 10.0), Dimension("switch", 2, 10.0)))
    names = {"1": [0, 1, 2, 4]}
    ranks = [
        [collective(1, size=1 << 20, pg_name="1")] if rank in names["1"] else [node(1)]
        for rank in range(8)
    ]
    answer = run(write_set(tmp_path / "uneven", *ranks, groups=names), uneven)
    assert answer.collectives["algorithm"].to_list() == [
        "ring"
    ]  # three in one host, one in the other


@pytest.mark.sampled(2)
@pytest.mark.parametrize("algorithm", ["ring", "direct", "halving-doubling", "tree", "double-tree"])
def test_units_of_time_and_bytes_can_be_exchanged(algorithm: str, tmp_path: Path) -> None:
    """Three times the latency at a third of the bandwidth is three times as long; so is twice of bytes and rate alike."""
    kinds = [kind for kind in KINDS_BY_ALGORITHM[algorithm] if kind != "scatter"]
    base = times(answered(tmp_path / "base", kinds, with_algorithm(joined("switch"), algorithm)))
    slow = with_algorithm(joined("switch", rate=RATE / 3, latency=3 * LATENCY), algorithm)
    assert times(answered(tmp_path / "slow", kinds, slow)) == pytest.approx(
        {kind: 3 * took for kind, took in base.items()}, abs=3
    )
    # Chunks are of so many bytes each, whatever the bandwidth.
    in_chunks = {
        "double-tree": {"all_reduce", "broadcast", "reduce"},
        "ring": {"broadcast", "reduce"},
    }
    whole = [kind for kind in kinds if kind not in in_chunks.get(algorithm, ())]
    if whole:
        wide = with_algorithm(joined("switch", rate=2 * RATE), algorithm)
        twice = times(answered(tmp_path / "wide", whole, wide, 2 * SIZE))
        assert twice == pytest.approx({kind: base[kind] for kind in whole}, abs=1)


def test_chains_hand_on_half_a_mebibyte_and_no_more_than_64_parts(tmp_path: Path) -> None:
    machine = with_algorithm(joined("ring", 4, RATE, LATENCY), "ring")
    for size in (2 * CHUNK - 1, 5 * CHUNK, 640 * CHUNK):
        chunks = min(max(size // CHUNK, 1), 64)
        part = size / chunks / RATE
        took = times(answered(tmp_path / str(size), ["broadcast"], machine, size))["broadcast"]
        # The shorter way back to rank 3 does not count: the chain goes 0, 1, 2, 3.
        assert took == pytest.approx(3 * (LATENCY + part) + (chunks - 1) * part, abs=2)


def test_messages_take_their_links_and_share_them(tmp_path: Path) -> None:
    """Rank 0 sends at once to 1 and 2; to 3, over its own port alone, later."""
    ranks: list[list[Node]] = [
        [
            send(1, 1, us=1, comm_size=16_000),
            send(2, 2, us=1, comm_size=48_000, comm_tag=1, tid=7, is_cpu_op=True),
        ],
        [receive(1, 0, us=1, comm_size=16_000)],
        [receive(1, 0, us=1, comm_size=48_000, comm_tag=1)],
        [node(1, us=1)],
    ]
    ranks[0][0] = send(1, 1, us=1, comm_size=16_000, tid=5, is_cpu_op=True)
    answer = run(write_set(tmp_path / "set", *ranks), joined("switch", 4, 10.0, 0.0))
    # Half the port each until the first is over, 2 x 16,000 bytes later; then all of it.
    ends = dict(answer.collectives.select("bytes", "end_ns").iter_rows())
    assert ends == pytest.approx({16_000: 3_200, 48_000: 6_400}, abs=2)
    links = {
        (s, t): (b, busy)
        for s, t, b, busy in answer.links.select("source", "target", "bytes", "busy_ns").rows()
    }
    assert links["rank 0", "dimension 0 switch 0.0"] == (64_000, 6_400)
    assert links["dimension 0 switch 0.0", "rank 1"] == (16_000, 3_200)
    assert links["dimension 0 switch 0.0", "rank 2"] == (48_000, 6_400)


def test_links_carry_what_the_ring_sends_and_nothing_else(tmp_path: Path) -> None:
    answer = answered(
        tmp_path / "set", ["all_reduce", "all_gather"], with_algorithm(joined("ring"), "ring")
    )
    for source, target, size, busy, waited in answer.links.select(
        "source", "target", "bytes", "busy_ns", "waiting_ns"
    ).iter_rows():
        first, last = int(source.split()[-1]), int(target.split()[-1])
        forwards = (first + 1) % RANKS == last
        assert size == (14 * SIZE / 8 + 7 * SIZE if forwards else 0)
        # By classes of transfers, a link is busy from their meeting to their end.
        assert busy == (answer.after_ns if forwards else 0)
        assert waited == 0
    assert answer.links.height == 2 * RANKS


@pytest.mark.parametrize("algorithm", ["ring", "direct", "tree"])
def test_network_cards_hold_what_leaves_a_host(algorithm: str, tmp_path: Path) -> None:
    """Over links without end, a card is all that limits: each rank's bytes that leave its host, at its rate."""
    dimensions = (Dimension("switch", 4, 1e9, 0.0), Dimension("switch", 2, 1e9, 0.0))
    kinds = ["all_reduce", "broadcast"]
    machine = with_algorithm(Machine(dimensions, nic=Nic(RATE)), algorithm)
    answer = answered(tmp_path / "set", kinds, machine)
    took = times(answer)
    least = dict(answer.collectives.select("kind", "card_ns").iter_rows())
    assert all(took[kind] >= least[kind] for kind in kinds)
    whole = SIZE / RATE
    expected = {
        # Rank 3 sends its pieces on to rank 4, and 7 to 0: one card out and in.
        "ring": {"all_reduce": 14 * whole / 8, "broadcast": whole},
        # Four ranks of the other host, twice; the root sends to all four.
        "direct": {"all_reduce": 2 * 4 * whole / 8, "broadcast": 4 * whole},
        # Rank 4 sends up to rank 0, which sends down to it.
        "tree": {"all_reduce": 2 * whole, "broadcast": whole},
    }[algorithm]
    assert took == pytest.approx(expected, rel=1e-4)
    held = {"ring": 14 / 8, "direct": 1.0, "tree": 1.0}[algorithm]
    assert least["all_reduce"] == pytest.approx(held * whole, rel=1e-4)


@pytest.mark.parametrize("factor", [0.25, 0.5, 2.0])
def test_a_slow_rank_holds_the_links_to_it(factor: float, tmp_path: Path) -> None:
    """A link has the speed of the slower of its ends, so a faster rank helps nobody."""
    slow = replace(joined("ring"), slow=(SpeedFactor((3,), network=factor),))
    took = times(answered(tmp_path / "ring", ["all_gather"], with_algorithm(slow, "ring")))[
        "all_gather"
    ]
    part = SIZE / RATE
    on_link = [
        part / min(factor if 3 in {rank, (rank + 1) % RANKS} else 1.0, 1.0) for rank in range(RANKS)
    ]
    ready, free = [0.0] * RANKS, [0.0] * RANKS
    for _ in range(RANKS - 1):  # a rank hands on a part once it is there and its link is free
        free = [max(ready[rank], free[rank]) + on_link[rank] for rank in range(RANKS)]
        ready = [free[rank - 1] + LATENCY for rank in range(RANKS)]
    assert took == pytest.approx(max(ready), abs=1)
    full = with_algorithm(replace(joined("fully-connected"), slow=slow.slow), "direct")
    direct = times(answered(tmp_path / "direct", ["all_gather"], full))["all_gather"]
    assert direct == pytest.approx(LATENCY + part / min(factor, 1.0), abs=1)


@pytest.mark.parametrize("order", [(3, 1, 0, 2, 7, 6, 5, 4), (7, 0, 6, 1, 5, 2, 4, 3)])
def test_a_ring_follows_the_places_of_ranks(order: tuple[int, ...], tmp_path: Path) -> None:
    """Whatever the order of ranks, neighbours in the network are neighbours in the ring."""
    ordered = with_algorithm(replace(joined("ring"), order=order), "ring")
    kinds = ["all_reduce", "all_gather", "reduce_scatter"]
    answer = answered(tmp_path / "set", kinds, ordered)
    assert times(answer) == times(
        answered(tmp_path / "plain", kinds, with_algorithm(joined("ring"), "ring"))
    )
    used = answer.links.filter(pl.col("bytes") > 0).select("source", "target").rows()
    assert set(used) == {
        (f"rank {a}", f"rank {b}") for a, b in zip(order, (*order[1:], order[0]), strict=True)
    }


def test_measured_times_grow_by_steps_of_a_ring_and_bytes_on_the_bus(tmp_path: Path) -> None:
    """Eight ranks from a measurement of four: 7 steps for 3, and 7/8 of the bytes for 3/4; both are flagged."""
    measured = MeasuredTransfer("all_gather", "inside", 4, 1 << 10, 1 << 20, 3_000.0, 50.0)
    machine = replace(joined("switch"), transfers=(measured,))
    row = answered(tmp_path / "set", ["all_gather"], machine).collectives.row(0, named=True)
    assert row["transfer_ns"] == pytest.approx(3_000 * 7 / 3 + 8 * SIZE * 7 / 8 / 50.0, abs=1)
    assert row["algorithm"] is None
    assert row["flags"].split("; ") == [
        "size of the group not among those measured",
        "size not among those measured",
    ]
    other = answered(tmp_path / "other", ["reduce_scatter"], machine).collectives.row(0, named=True)
    assert other["flags"] == "kind not measured, by schedule"
    assert other["algorithm"] == "ring"
    between = replace(machine, transfers=(replace(measured, span="between"),))
    row = answered(tmp_path / "between", ["all_gather"], between).collectives.row(0, named=True)
    assert row["flags"] == "not measured inside or between hosts, by schedule"


def test_the_double_tree_is_between_its_bounds(tmp_path: Path) -> None:
    """Half the buffer goes up and down each tree: no rank sends less than half, and no way is longer than both heights."""
    sizes = [1 << 12, 1 << 22, 1 << 26]
    machine = with_algorithm(joined("fully-connected"), "double-tree")
    for size in sizes:
        took = times(answered(tmp_path / str(size), ["all_reduce"], machine, size))["all_reduce"]
        levels = 2 * math.ceil(math.log2(RANKS))
        chunks = min(max(size // CHUNK, 1), 64)
        part = size / 2 / chunks / RATE
        assert took >= levels * LATENCY + size / 2 / RATE
        assert took <= levels * (LATENCY + part) + (chunks - 1) * 2 * part + 2


def test_communication_without_bytes_takes_its_latencies_and_no_link(tmp_path: Path) -> None:
    machine = with_algorithm(joined("switch", 4), "ring")
    answer = answered(tmp_path / "set", ["all_reduce", "all_gather"], machine, 0)
    assert times(answer) == {"all_reduce": 6 * 2 * LATENCY, "all_gather": 3 * 2 * LATENCY}
    assert answer.links.is_empty()
    assert answer.load.is_empty()
    assert answer.after_ns == 9 * 2 * LATENCY


@pytest.mark.sampled(3)
@pytest.mark.parametrize("seed", range(8))
def test_whatever_files_ask_for_ends_in_an_answer_that_keeps_its_laws(
    seed: int, tmp_path: Path
) -> None:
    """Groups of any size, messages to oneself too, no bytes or far too many, on any network and algorithm."""
    chance = random.Random(seed)
    ranks = chance.choice([1, 2, 3, 4])
    groups = {
        "3": sorted(chance.sample(range(ranks), chance.randint(1, ranks))),
        "4": [chance.randrange(ranks)],
    }
    kinds = [
        "ALL_REDUCE",
        "ALL_GATHER",
        "REDUCE_SCATTER",
        "ALL_TO_ALL",
        "BROADCAST",
        "REDUCE",
        "GATHER",
        "BARRIER",
    ]
    calls = [
        (
            chance.choice(kinds),
            chance.choice([0, 1, 5, 1000, 1 << 24, 1 << 40]),
            chance.choice(["", "3", "4"]),
        )
        for _ in range(chance.randint(1, 4))
    ]
    files: list[list[Node]] = []
    for rank in range(ranks):
        own = [node(1, us=chance.choice([0, 1, 50]), is_cpu_op=chance.random() < 0.3)]
        for kind, size, group in calls:
            if not group or rank in groups[group]:
                named = {"pg_name": group} if group else {}
                own.append(
                    collective(
                        len(own) + 1, kind, size, deps=[len(own)], us=chance.choice([0, 3]), **named
                    )
                )
        files.append(own)
    source, target = chance.randrange(ranks), chance.randrange(ranks)
    files[source].append(send(900, target, comm_size=chance.choice([0, 8, 10**6])))
    files[target].append(receive(901, source, comm_size=8))
    algorithm = chance.choice([*KINDS_BY_ALGORITHM])
    topology = chance.choice(["ring", "switch", "fully-connected"])
    machine = joined(topology, ranks, chance.choice([1e-2, 10.0, 1e9]), chance.choice([0.0, 500.0]))
    machine = replace(
        with_algorithm(machine, algorithm), nic=chance.choice([None, Nic(3.0, "all")])
    )
    home = write_set(tmp_path / "set", *files, groups=groups)
    alone = run(home)
    alone.check()
    answer, slug = alone, None
    try:
        answer = run(home, machine)
    except UsageError as error:
        slug = error.slug
    assert slug in {None, "no-such-schedule", "times-too-long"}
    answer.check()
    assert answer.after_ns >= answer.collectives["transfer_ns"].max()  # type: ignore[operator]
    assert (answer.ranks["compute_ns"] >= alone.ranks["compute_ns"]).all()
    moved = answer.collectives.filter(pl.col("ranks") > 1, pl.col("bytes") > 0).height
    assert moved or answer.links["bytes"].sum() == 0
