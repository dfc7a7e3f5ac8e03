"""The links of a machine and the ways of messages, against graphs searched here."""

from __future__ import annotations

from collections import deque

import numpy as np
import polars as pl
import pytest

from traceloom.workload.simulate.machine import Dimension, Machine, Nic, SpeedFactor, Wire
from traceloom.workload.simulate.machine_file import read_machine
from traceloom.workload.simulate.network import MachineNetwork

TREE = (Wire(0, 4), Wire(1, 4), Wire(4, 5, 5.0, 50.0), Wire(2, 5), Wire(3, 5), Wire(0, 1, 1.0))
FABRICS = [
    Dimension("ring", 2, 10.0, 100.0),
    Dimension("ring", 7, 10.0, 100.0),
    Dimension("torus", 30, 10.0, 100.0, shape=(5, 3, 2)),
    Dimension("mesh", 24, 10.0, 100.0, shape=(4, 3, 2)),
    Dimension("fully-connected", 5, 10.0, 100.0),
    Dimension("switch", 5, 10.0, 100.0),
    Dimension("fat-tree", 7, 10.0, 100.0, radix=3, oversubscription=2.0),
    Dimension("links", 4, 10.0, 100.0, links=TREE),
]


def way(network: MachineNetwork, source: int, target: int) -> list[str]:
    """The nodes that a message passes."""
    table = {
        row[0]: row[1:] for row in network.links.select("link", "source", "target").iter_rows()
    }
    routes = network.routes(np.array([source]), np.array([target]))
    assert routes.counts.tolist() == [routes.links.size]
    ends = [table[link] for link in routes.links.tolist()]
    return [ends[0][0], *(end for _, end in ends)] if ends else []


@pytest.mark.parametrize(
    "dimension", FABRICS, ids=lambda dimension: f"{dimension.topology}-{dimension.size}"
)
def test_every_message_takes_as_few_links_as_there_are(dimension: Dimension) -> None:
    network = MachineNetwork(Machine((dimension,)))
    beside: dict[str, list[str]] = {}
    for source, target in network.links.select("source", "target").iter_rows():
        beside.setdefault(source, []).append(target)
    members = np.arange(dimension.size)
    source, target = (ends.ravel() for ends in np.meshgrid(members, members, indexing="ij"))
    routes = network.routes(source, target)
    names = {
        row[0]: row[1:] for row in network.links.select("link", "source", "target").iter_rows()
    }
    ways = np.split(routes.links, np.cumsum(routes.counts)[:-1])
    for first, last, links in zip(source.tolist(), target.tolist(), ways, strict=True):
        distance = {f"rank {first}": 0}
        queue = deque(distance)
        while queue:
            node = queue.popleft()
            for other in beside[node]:
                if other not in distance:
                    distance[other] = distance[node] + 1
                    queue.append(other)
        position = f"rank {first}"
        for link in links.tolist():  # each link begins where the one before ends
            assert names[link][0] == position
            position = names[link][1]
        assert position == f"rank {last}"
        assert len(links) == distance[position]


def test_ties_and_the_order_of_axes_are_settled() -> None:
    ring = MachineNetwork(Machine((Dimension("ring", 4, 1.0),)))
    assert way(ring, 3, 1) == ["rank 3", "rank 0", "rank 1"]
    torus = MachineNetwork(Machine((Dimension("torus", 12, 1.0, shape=(4, 3)),)))
    assert way(torus, 1, 10) == ["rank 1", "rank 2", "rank 10"]
    assert way(torus, 0, 11) == ["rank 0", "rank 3", "rank 11"]
    square = (Wire(0, 1), Wire(1, 3), Wire(0, 2), Wire(2, 3))
    assert (
        way(MachineNetwork(Machine((Dimension("links", 4, 1.0, links=square[::-1]),))), 0, 3)[1]
        == "rank 1"
    )


def test_a_fat_tree_has_as_much_above_a_leaf_as_it_says() -> None:
    links = MachineNetwork(Machine((FABRICS[6],))).links
    trunks = links.filter(
        ~links["source"].str.contains("rank") & ~links["target"].str.contains("rank")
    )
    assert trunks["bandwidth"].to_list() == [15.0] * 6
    assert links.height == 14 + 6


def test_a_list_of_links_has_values_of_its_own() -> None:
    links = MachineNetwork(Machine((FABRICS[7],))).links
    assert links.height == 2 * len(TREE)
    assert links["bandwidth"].to_list()[4:6] == [5.0, 5.0]
    assert links["latency"].to_list()[2:6] == [100.0, 100.0, 50.0, 50.0]
    assert links["bandwidth"].to_list()[-1] == 1.0


def test_a_message_crosses_the_innermost_dimension_first() -> None:
    machine = Machine(
        (
            Dimension("switch", 4, 400.0, 1.0, name="a"),
            Dimension("switch", 2, 50.0, 10.0, name="b"),
        ),
        nic=Nic(25.0),
    )
    network = MachineNetwork(machine)
    passed = way(network, 0, 6)
    assert [node for node in passed if "card" not in node and node != "rank 0"] == [
        "a switch 0.0",
        "rank 2",
        "b switch 2.0",
        "rank 6",
        "rank 6",
    ]
    assert "network card of rank 0" in passed
    last = network.routes(np.array([0]), np.array([6])).links[-1]
    assert (
        network.links.row(by_predicate=pl.col("link") == last)[1]
        == "network card of rank 6 → rank 6"
    )
    assert way(network, 5, 6) == ["rank 5", "a switch 1.0", "rank 6"]
    assert way(network, 3, 3) == []
    everything = MachineNetwork(Machine(machine.dimensions, nic=Nic(25.0, "all")))
    assert way(everything, 5, 6)[1] == "network card of rank 5"


def test_a_host_with_one_card_shares_it() -> None:
    network = MachineNetwork(read_machine("ethernet-100g", ["network.ethernet.size=2"]))
    first = network.routes(np.array([0, 1]), np.array([8, 9]))
    assert first.links[:2].tolist() == first.links[2:].tolist()
    assert way(network, 0, 8) == ["ranks 0 to 7", "ethernet switch 0.0", "ranks 8 to 15"]


def test_slow_ranks_slow_their_own_links() -> None:
    machine = Machine(
        (Dimension("ring", 3, 10.0),), nic=Nic(20.0), slow=(SpeedFactor((1,), network=0.5),)
    )
    links = MachineNetwork(machine).links
    slow = links.filter(
        links["source"].str.ends_with("rank 1") | links["target"].str.ends_with("rank 1")
    )
    assert sorted(slow["bandwidth"].to_list()) == [5.0, 5.0, 5.0, 5.0, 10.0, 10.0]
    assert set(links.join(slow, on="link", how="anti")["bandwidth"]) == {10.0, 20.0}


def test_the_order_of_ranks_moves_them() -> None:
    machine = Machine((Dimension("ring", 4, 1.0),), order=(2, 0, 3, 1))
    assert way(MachineNetwork(machine), 2, 3) == ["rank 2", "rank 0", "rank 3"]
    shared = Machine(
        (Dimension("switch", 2, 1.0), Dimension("switch", 2, 1.0, shared=True)), order=(0, 3, 1, 2)
    )
    assert way(MachineNetwork(shared), 0, 1) == [
        "ranks 0 to 3",
        "dimension 1 switch 0.0",
        "ranks 1 to 2",
    ]


def test_a_thousand_ranks_need_little_memory() -> None:
    network = MachineNetwork(read_machine("dgx-h100").for_ranks(1024))
    ranks = np.arange(1024)
    routes = network.routes(ranks, (ranks + 9) % 1024)
    assert routes.counts.max() == 6
    assert network.bandwidth.size == 2 * 1024 * 3
