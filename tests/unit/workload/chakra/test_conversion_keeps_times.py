"""Random workloads of another writer, with branches, hosts, groups and messages: a conversion to ASTRA-sim changes no end."""

from __future__ import annotations

from pathlib import Path
from random import Random

import pytest

from support import astra_sim
from support.workload import collective, node, receive, send, write_set
from traceloom.formats.chakra.et_pb2 import Node
from traceloom.workload.chakra.astra_sim import to_astra_sim
from traceloom.workload.chakra.convert import ConversionInput


def rank_nodes(
    chance: Random, rank: int, plan: list[tuple[str, tuple[int, ...], int]]
) -> list[Node]:
    """Work and the rank's part in the plan, under ids in no order, in the file in no order."""
    ids = chance.sample(range(1, 400), 60)
    made: list[Node] = []
    seen: list[int] = []
    for group, members, number in [*plan, ("", (), 0)]:
        for _ in range(chance.randint(1, 4)):
            deps = chance.sample(seen, min(len(seen), chance.randint(0, 2)))
            on_host = chance.random() < 0.2
            made.append(
                node(ids[-1], us=chance.choice([0, 1, 5, 30]), deps=deps, is_cpu_op=on_host)
            )
            seen.append(ids.pop())
        if rank not in members:
            continue
        deps = chance.sample(seen, min(len(seen), chance.randint(0, 2)))
        if group == "message":
            make, peer = (send, members[1]) if rank == members[0] else (receive, members[0])
            made.append(make(ids[-1], peer, deps, comm_tag=number, us=0))
        else:
            kind = ("ALL_REDUCE", "ALL_GATHER", "REDUCE_SCATTER", "BROADCAST")[number % 4]
            more = {"pg_name": group} if group != "0" or chance.random() < 0.5 else {}
            us = 7 if kind == "BROADCAST" else 0
            made.append(collective(ids[-1], kind, 61_440, deps, us=us, **more))
        seen.append(ids.pop())
    chance.shuffle(made)
    return made


def ends(folder: Path, ranks: int) -> list[int | None]:
    read = astra_sim.workload(folder)
    network = astra_sim.network("Ring", str(ranks), "50", "500")
    nodes, groups = astra_sim.node_mask(read), read.groups.members
    return astra_sim.ends(nodes, groups, network, astra_sim.system(), aware=False)


@pytest.mark.sampled(12)
@pytest.mark.parametrize("seed", range(300))
def test_no_rank_ends_at_another_time(tmp_path: Path, seed: int) -> None:
    chance = Random(seed)
    ranks = chance.randint(2, 5)
    groups = {str(k): chance.sample(range(ranks), chance.randint(2, ranks)) for k in (1, 2)}
    plan: list[tuple[str, tuple[int, ...], int]] = []
    for number in range(chance.randint(1, 6)):
        if chance.random() < 0.3:
            plan.append(("message", tuple(chance.sample(range(ranks), 2)), number))
            continue
        group = chance.choice(["0", *groups])
        members = groups.get(group, range(ranks))
        plan.append((group, tuple(members), chance.randint(0, 3)))
    files = [rank_nodes(chance, rank, plan) for rank in range(ranks)]
    home = write_set(tmp_path / "set", *files, groups=groups)
    before = ends(home, ranks)
    with ConversionInput(home) as source:
        to_astra_sim(source.graph()).write(tmp_path / "converted")
    if None not in before:  # else the ranks wait for each other, which a conversion may repair
        assert ends(tmp_path / "converted", ranks) == before
