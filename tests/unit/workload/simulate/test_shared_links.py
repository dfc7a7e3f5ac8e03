"""Collectives that share links at the same time: shares between whole transfers against their messages one by one."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from support.flows import sent_one_by_one
from support.workload import collective, node, write_set
from traceloom.workload.collective_algorithms import build_schedule
from traceloom.workload.simulate.machine import AlgorithmRule, Dimension, Machine
from traceloom.workload.simulate.native import run
from traceloom.workload.simulate.network import MachineNetwork

MIB = 1 << 20
CASES = {
    "hosts with one card each": (
        (Dimension("switch", 4, 32.0, 500.0), Dimension("switch", 2, 12.5, 1350.0, shared=True)),
        [[0, 4], [1, 5], [2, 6], [3, 7]],
    ),
    "a ring that two groups use in turn": (
        (Dimension("ring", 8, 50.0, 500.0),),
        [[0, 2, 4, 6], [1, 3, 5, 7]],
    ),
    "a ring with a part that two groups use": (
        (Dimension("ring", 8, 50.0, 500.0),),
        [[0, 1, 2, 3, 4], [5, 6, 7]],
    ),
    "a fat tree with a narrow spine": (
        (Dimension("fat-tree", 8, 50.0, 500.0, radix=4, oversubscription=4.0),),
        [[0, 4], [1, 5], [2, 3, 6, 7]],
    ),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(
    ("size", "latest_us", "within"),
    [pytest.param(MIB, 20, 0.06, marks=pytest.mark.thorough), (16 * MIB, 300, 0.01)],
)
def test_transfers_that_share_links_end_as_their_messages_do(
    case: str, size: int, latest_us: int, within: float, tmp_path: Path
) -> None:
    dimensions, groups = CASES[case]
    machine = Machine(dimensions, algorithms=(AlgorithmRule("all_reduce", "ring"),))
    begin_us = np.random.default_rng(7).integers(1, latest_us, len(groups)).tolist()
    network = MachineNetwork(machine)
    parts = [
        (
            build_schedule("all_reduce", "ring", len(group), size),
            group,
            [1000.0 * begin] * len(group),
        )
        for group, begin in zip(groups, begin_us, strict=True)
    ]
    alone = [sent_one_by_one([part], network)[0].max() for part in parts]
    together = [ends.max() for ends in sent_one_by_one(parts, network)]
    assert max(
        with_others - ends for with_others, ends in zip(together, alone, strict=True)
    ) > 0.05 * max(alone)
    ranks = {
        rank: [node(1, us=begin), collective(2, size=size, deps=[1], pg_name=str(number + 1))]
        for number, (group, begin) in enumerate(zip(groups, begin_us, strict=True))
        for rank in group
    }
    names = {str(number + 1): group for number, group in enumerate(groups)}
    home = write_set(tmp_path / "set", *(ranks[rank] for rank in range(8)), groups=names)
    calls = run(home, machine).collectives
    ends = dict(zip(calls["group"].to_list(), calls["end_ns"].to_list(), strict=True))
    assert [ends[name] for name in names] == pytest.approx(together, rel=within)
