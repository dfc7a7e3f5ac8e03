"""Random machines against plain loops: their text, their places and hosts, their sizes, and what was measured of them."""

from __future__ import annotations

import math
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from traceloom.errors import UsageError
from traceloom.workload.simulate.machine import (
    AlgorithmRule,
    Dimension,
    Machine,
    MeasuredTransfer,
    Nic,
    SpeedFactor,
    Wire,
)
from traceloom.workload.simulate.machine_file import apply_overrides, machine_text, read_machine
from traceloom.workload.simulate.network import MachineNetwork

KINDS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast")


def dimension(chance: random.Random, *, inner: bool) -> Dimension:
    topology = chance.choice(
        ["ring", "fully-connected", "switch", "torus", "mesh", "fat-tree", "links"]
    )
    size = chance.choice([1, 2, 3, 4, 6])
    about: dict[str, Any] = {
        "latency": chance.choice([0.0, 700.0, 1e-7]),
        "shared": not inner and chance.random() < 0.3,
    }
    if topology in {"torus", "mesh"}:
        about["shape"] = chance.choice([(size,), (1, size), (size, 1)])
    elif topology == "fat-tree":
        about |= {"radix": chance.randint(1, 3), "oversubscription": chance.choice([1.0, 2.5])}
    elif topology == "links":
        size = max(size, 2)
        about["links"] = tuple(
            Wire(member, member + 1, chance.choice([None, 5.0]), chance.choice([None, 3.0]))
            for member in range(size - 1)
        )
    return Dimension(
        topology, size, chance.choice([10.0, 1e22, 0.3]), name=chance.choice(["", 'a "b"']), **about
    )  # type: ignore[arg-type]


def machine(seed: int) -> Machine:
    chance = random.Random(seed)
    dimensions = tuple(dimension(chance, inner=at == 0) for at in range(chance.randint(1, 3)))
    ranks = math.prod(part.size for part in dimensions)
    order = list(range(ranks))
    chance.shuffle(order)
    spans = [
        MeasuredTransfer(
            kind,
            span,
            group,
            start,
            start + 99,
            chance.choice([0.0, 12.5]),
            chance.choice([None, 200.0]),
        )  # type: ignore[arg-type]
        for kind in chance.sample(KINDS, 2)
        for span in ("inside", "between")
        for group in chance.sample([1, 2, 4, 16], 2)
        for start in (0, 1000)
        if chance.random() < 0.7
    ]
    return Machine(
        dimensions,
        name=chance.choice(["", "é\n"]),
        nic=chance.choice([None, Nic(25.0), Nic(25.0, "all")]),
        order=tuple(order) if chance.random() < 0.5 else (),
        per_host=chance.choice(
            [None, *[size for size in range(1, ranks + 1) if ranks % size == 0]]
        ),
        algorithms=tuple(
            AlgorithmRule("all_reduce", "ring", below) for below in chance.sample([10, 500], 1)
        ),
        slow=tuple(
            SpeedFactor((chance.randrange(ranks),), chance.choice([0.5, 1.0]), 0.25)
            for _ in range(2)
        ),
        transfers=tuple(spans),
        price_per_hour=chance.choice([None, 0.0, 2.5]),
    )


@pytest.mark.parametrize("seed", range(60))
def test_what_is_written_is_the_same_machine(seed: int, tmp_path: Path) -> None:
    written = machine(seed)
    path = tmp_path / "machine.toml"
    path.write_text(machine_text(written), encoding="utf-8")
    result = read_machine(path)
    assert result.ranks == written.ranks
    first, second = MachineNetwork(written), MachineNetwork(result)
    assert first.links.equals(second.links)
    assert np.array_equal(first.bandwidth, second.bandwidth)
    assert np.array_equal(first.latency, second.latency)
    assert machine_text(result) == machine_text(written)
    for name in (
        "name",
        "nic",
        "order",
        "per_host",
        "algorithms",
        "slow",
        "transfers",
        "price_per_hour",
    ):
        assert getattr(result, name) == getattr(written, name)
    assert apply_overrides(written, ["price_per_hour=7"]).price_per_hour == 7
    assert apply_overrides(written, ["price_per_hour=7"]).dimensions == written.dimensions


@pytest.mark.parametrize("seed", range(60))
def test_places_hosts_and_speeds_are_those_of_the_order(seed: int) -> None:
    of = machine(seed)
    place = {rank: at for at, rank in enumerate(of.order or range(of.ranks))}
    assert of.places.tolist() == [place[rank] for rank in range(of.ranks)]
    size = of.per_host or (of.dimensions[0].size if len(of.dimensions) > 1 else of.ranks)
    chance = random.Random(seed)
    for _ in range(20):
        members = chance.sample(range(of.ranks), chance.randint(1, of.ranks))
        hosts = {place[rank] // size for rank in members}
        assert of.span(members) == ("inside" if len(hosts) == 1 else "between")
    for rank in range(of.ranks):
        factors = [factor for factor in of.slow if rank in factor.ranks]
        assert of.device_speeds()[rank] == math.prod(factor.device for factor in factors)
        assert of.network_speeds()[rank] == math.prod(factor.network for factor in factors)


@pytest.mark.parametrize("seed", range(60))
def test_of_what_was_measured_the_nearest_group_and_size_of_the_span_answers(seed: int) -> None:
    of = machine(seed)
    chance = random.Random(seed)
    on_bus = {"all_reduce": lambda n: 2 * (n - 1) / n, "broadcast": lambda n: 1.0}
    for _ in range(30):
        kind, span = chance.choice(KINDS), chance.choice(["inside", "between"])
        ranks, size = (
            chance.choice([2, 3, 4, 8, 64]),
            chance.choice([0, 50, 99, 400, 700, 1050, 10**6]),
        )
        answer = of.transfer_of(kind, span, ranks, size)  # type: ignore[arg-type]
        alike = [entry for entry in of.transfers if entry.collective == kind]
        there = [entry for entry in alike if entry.span == span]
        if not there:
            assert answer == (None, ("span",) if alike else ("kind",) if of.transfers else ())
            continue
        # sizes of groups by their ratio: of two that are as near, the smaller
        group = min(
            {entry.ranks for entry in there},
            key=lambda count: (max(count / ranks, ranks / count), count),
        )
        best = min(
            (entry for entry in there if entry.ranks == group),
            key=lambda entry: (
                0
                if entry.from_bytes <= size <= entry.to_bytes
                else min(abs(size - entry.from_bytes), abs(size - entry.to_bytes))
            ),
        )
        steps = (ranks - 1) / (group - 1) if group > 1 else 1.0
        factor = on_bus.get(kind, lambda n: (n - 1) / n)(ranks)
        expected = best.alpha_ns * steps + (
            0.0 if best.bandwidth is None else size * factor / best.bandwidth
        )
        assert answer.time_ns == pytest.approx(expected)
        is_outside = not best.from_bytes <= size <= best.to_bytes
        assert answer.flags == ("group",) * (group != ranks) + ("size",) * is_outside


@pytest.mark.parametrize("seed", range(60))
def test_a_machine_of_another_size_has_that_size_or_says_why_not(seed: int) -> None:
    of = machine(seed)
    sizes = [part.size for part in of.dimensions]
    for ranks in range(1, 2 * of.ranks + 3):
        slug, other = None, of
        try:
            other = of.for_ranks(ranks)
        except UsageError as error:
            slug = error.slug
        assert slug in {None, "machine-size", "bad-machine"}
        if slug:
            assert ranks != of.ranks
            continue
        assert other.ranks == ranks
        changes = [at for at, part in enumerate(other.dimensions) if part.size != sizes[at]]
        # a part of one host, or other numbers of the outermost alone
        assert changes in ([], [len(sizes) - 1]) or ranks < of.ranks
        assert all(
            new.topology == old.topology
            for new, old in zip(other.dimensions, of.dimensions, strict=True)
        )


def test_a_link_may_have_a_latency_of_its_own_and_the_bandwidth_of_all(tmp_path: Path) -> None:
    wires = (Wire(0, 1, None, 5.0), Wire(1, 2, 7.0))
    path = tmp_path / "machine.toml"
    path.write_text(
        machine_text(Machine((Dimension("links", 3, 40.0, 1.0, links=wires),))), encoding="utf-8"
    )
    network = MachineNetwork(read_machine(path))
    assert sorted(set(zip(network.bandwidth.tolist(), network.latency.tolist(), strict=True))) == [
        (7.0, 1.0),
        (40.0, 5.0),
    ]
