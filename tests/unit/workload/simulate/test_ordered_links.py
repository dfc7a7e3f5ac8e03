"""Congested links computed for all ranks at once against the same links message by message, and against
ASTRA-sim, on random workloads.

`tests/data/astra_sim_ends.tsv` has the ends of all ranks of each seed by ASTRA-sim 518bd51 itself (its congestion-aware
back end).
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from support import astra_sim
from support.workload import collective, node, receive, send, write_set
from traceloom.formats.chakra.et_pb2 import Node
from traceloom.workload.simulate.astra_sim.collectives import AnalyticalNetwork, Dimensions
from traceloom.workload.simulate.astra_sim.engine import AstraEngine


@dataclass
class Made:
    """The nodes of all ranks, each rank's in a chain."""

    ranks: list[list[Node]]
    groups: dict[str, list[int]] = field(default_factory=dict)

    def add(self, rank: int, make: Callable[[int, list[int]], Node]) -> None:
        number = len(self.ranks[rank]) + 1
        self.ranks[rank].append(make(number, [number - 1] if number > 1 else []))


def workload(chance: random.Random, count: int, algorithm: str) -> Made:
    """Computation of different lengths, and collectives of all, of groups, or messages between them."""
    sizes = [2, 4] if algorithm != "ring" else range(2, count)
    groups = {
        str(k): chance.sample(range(count), min(chance.choice(sizes), count)) for k in range(1, 4)
    }
    made = Made([[] for _ in range(count)], groups if algorithm != "doubleBinaryTree" else {})
    kinds = ["ALL_REDUCE"]
    kinds += ["ALL_GATHER", "REDUCE_SCATTER"] if algorithm != "doubleBinaryTree" else []
    of_all = chance.random() < 0.4 or not made.groups
    for step in range(chance.randint(3, 12)):
        for rank in range(count):
            us = chance.randint(1, 40)
            if not step or chance.random() < 0.4:
                made.add(rank, lambda number, deps, us=us: node(number, deps=deps, us=us))
        kind, size = chance.choice(kinds), chance.choice([65_536, 1 << 20, 300_001])
        if chance.random() < 0.2:
            source, target = chance.sample(range(count), 2)
            more = {"comm_size": size, "comm_tag": step}
            made.add(source, lambda n, deps, to=target, more=more: send(n, to, deps, **more))
            made.add(target, lambda n, deps, of=source, more=more: receive(n, of, deps, **more))
            continue
        group = "0" if of_all else chance.choice(list(made.groups))
        for rank in made.groups.get(group, range(count)):
            made.add(
                rank,
                lambda n, deps, kind=kind, size=size, group=group: collective(
                    n, kind, size, deps, pg_name=group
                ),
            )
    return made


ENDS = dict(
    line.split("\t")
    for line in (Path(__file__).parents[3] / "data" / "astra_sim_ends.tsv")
    .read_text(encoding="ascii")
    .splitlines()[1:]
)


@pytest.mark.sampled(40)
@pytest.mark.parametrize("seed", range(300))
def test_queued_links_give_the_times_of_astra_sim_in_both_ways(tmp_path: Path, seed: int) -> None:
    chance = random.Random(seed)
    algorithm = chance.choice(["ring", "ring", "halvingDoubling", "direct", "doubleBinaryTree"])
    count = chance.choice([4, 8]) if algorithm[:2] in {"ha", "do"} else chance.randint(3, 8)
    made = workload(chance, count, algorithm)
    read = astra_sim.workload(write_set(tmp_path / "set", *made.ranks, groups=made.groups))
    topology = chance.choice(["Switch", "Switch", "Ring", "FullyConnected"])
    system = astra_sim.system(algorithm, splits=chance.choice([1, 2, 4]))
    answers = []
    for whole in (True, False):
        engine = AstraEngine(
            astra_sim.node_mask(read),
            read.groups.members,
            AnalyticalNetwork((topology,), (count,), (50.0,), (500.0,)),
            Dimensions((count,), dict(system.implementations), system.splits, False, 10),
            aware=True,
            memory_rate=1.6e12,
            whole=whole,
        )
        engine.run()
        assert engine.links is not None
        answers.append(([rank.last_ns for rank in engine.ranks], dict(engine.links.usage)))
    assert None not in answers[0][0]
    assert answers[0] == answers[1]
    assert answers[0][0] == [int(end) for end in ENDS[str(seed)].split(",")]
