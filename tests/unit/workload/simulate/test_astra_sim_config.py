"""ASTRA-sim's network YAML and system JSON."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from traceloom.errors import InputError
from traceloom.workload.simulate.astra_sim.config import build_machine, read_network, read_system

NETWORK = """
topology: [ Ring, Switch ]
npus_count: [ 4, 2 ]  # two dimensions
bandwidth: [ 50.0, 25 ]
latency: [ 500, 936.25 ]
"""
SYSTEM = {
    "scheduling-policy": "LIFO",
    "endpoint-delay": 10,
    "active-chunks-per-dimension": 2,
    "preferred-dataset-splits": 4,
    "all-reduce-implementation": ["ring", "halvingDoubling"],
    "all-gather-implementation": ["oneDirect8"],
    "all-to-all-implementation-custom": ["schedules/a2a"],
    "collective-optimization": "localBWAware",
    "local-mem-bw": 1600,
    "boost-mode": 0,
    "roofline-enabled": 1,
    "peak-perf": 900,
}


def network_file(folder: Path, text: str) -> Path:
    path = folder / "network.yml"
    path.write_text(text, encoding="utf-8")
    return path


def system_file(folder: Path, changes: dict[str, object]) -> Path:
    path = folder / "system.json"
    values = {key: value for key, value in {**SYSTEM, **changes}.items() if value is not None}
    path.write_text(json.dumps(values), encoding="utf-8")
    return path


def test_both_files_are_read(tmp_path: Path) -> None:
    network = read_network(network_file(tmp_path, NETWORK))
    assert network.topologies == ("Ring", "Switch")
    assert network.sizes == (4, 2)
    assert network.bandwidths == (50.0, 25.0)
    assert network.latencies == (500.0, 936.25)
    assert network.ranks == 8
    system = read_system(system_file(tmp_path, {}))
    assert system.implementations == {
        "all_reduce": ("ring", "halvingDoubling"),
        "all_gather": ("oneDirect8",),
    }
    assert system.custom == {"all_to_all": "schedules/a2a"}
    assert (system.splits, system.active_chunks, system.endpoint_delay) == (4, 2, 10)
    assert (system.local_mem_bw, system.peak_perf, system.roofline, system.replay_only) == (
        1600,
        900,
        True,
        False,
    )
    assert (system.optimization, system.scheduling) == ("localBWAware", "LIFO")
    assert system.notices == ()


def test_their_machine_has_their_bandwidth_in_powers_of_two(tmp_path: Path) -> None:
    system = read_system(system_file(tmp_path, {}))
    machine = build_machine(read_network(network_file(tmp_path, NETWORK)), system)
    assert [(part.topology, part.size) for part in machine.dimensions] == [
        ("ring", 4),
        ("switch", 2),
    ]
    assert machine.dimensions[0].bandwidth == pytest.approx(53.6870912)
    assert machine.dimensions[1].latency == 936.25
    assert machine.algorithm("all_reduce", 1, 8) == "ring"
    assert machine.algorithm("all_gather", 1, 8) == "direct"
    assert machine.device is not None
    assert machine.device.memory == 1.6e12


def test_keys_without_effect_are_named(tmp_path: Path) -> None:
    changes = {
        "boost-mode": 1,
        "intra-dimension-scheduling": "SCF",
        "new": 1,
        "G": 0.1,
        "o": 0,
        "trace-enabled": 1,
    }
    notices = read_system(system_file(tmp_path, changes)).notices
    assert [(notice.slug, notice.count) for notice in notices] == [
        ("astra-sim-key-ignored", 3),
        ("astra-sim-bus-ignored", 1),
    ]
    assert "`boost-mode`, `intra-dimension-scheduling`, `new`" in notices[0].message
    assert "`G` without effect" in notices[1].message


@pytest.mark.parametrize(
    ("old", "new", "message", "where"),
    [
        (NETWORK, "a: [", "the network is no YAML", ""),
        (NETWORK, "&a [*a, *a]", "expected a network with topology", ""),
        ("bandwidth:", "bandwith:", "`bandwith` is no key of a network", ""),
        ("latency: [ 500, 936.25 ]", "", "there is no key `latency`", ""),
        ("[ 4, 2 ]", "8", "expected `npus_count` to be a list", ""),
        ("[ 4, 2 ]", "[ 8 ]", "`npus_count` has 1 values for 2 dimensions", ""),
        ("Switch", "Swich", "`Swich` is no topology", ", topology[1]"),
        ("Switch", "[ Ring ]", "`['Ring']` is no topology", ", topology[1]"),
        ("[ 4, 2 ]", "[ 4, 1 ]", "expected a whole number of at least 2, got 1", ", npus_count[1]"),
        (
            "[ 4, 2 ]",
            "[ 4, 2.5 ]",
            "expected a whole number of at least 2, got 2.5",
            ", npus_count[1]",
        ),
        ("50.0", "0", "expected a number above 0, got 0", ", bandwidth[0]"),
        ("50.0", ".nan", "expected a number above 0, got nan", ", bandwidth[0]"),
        ("500", "-1", "expected a number of at least 0, got -1", ", latency[0]"),
        ("500", "!!python/object/apply:os.system [ls]", "the network is no YAML", ""),
    ],
)
def test_a_wrong_network_is_refused(
    old: str, new: str, message: str, where: str, tmp_path: Path
) -> None:
    path = network_file(tmp_path, NETWORK.replace(old, new))
    with pytest.raises(InputError) as refused:
        read_network(path)
    assert refused.value.slug == "bad-astra-sim-config"
    assert message in refused.value.message
    assert refused.value.where == f"{path}{where}"


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("preferred-dataset-splits", 0, "expected a whole number of at least 1, got 0"),
        ("preferred-dataset-splits", None, "there is no key `preferred-dataset-splits`"),
        ("active-chunks-per-dimension", "1", "expected a whole number of at least 1, got '1'"),
        ("local-mem-bw", -1, "expected a number of at least 0 (GB/s), got -1"),
        ("roofline-enabled", 2, "expected 0 or 1, got 2"),
        ("scheduling-policy", "SCF", "expected LIFO, FIFO or EXPLICIT, got 'SCF'"),
        (
            "all-reduce-implementation",
            "ring",
            "expected a list with one algorithm per dimension, got 'ring'",
        ),
        ("all-reduce-implementation", ["rings"], "'rings' is no algorithm of ASTRA-sim"),
        ("all-reduce-implementation-custom", 3, "expected the prefix of `.et` files, got 3"),
    ],
)
def test_a_wrong_system_is_refused(key: str, value: object, message: str, tmp_path: Path) -> None:
    path = system_file(tmp_path, {key: value})
    with pytest.raises(InputError) as refused:
        read_system(path)
    assert refused.value.slug == "bad-astra-sim-config"
    assert message in refused.value.message


def test_a_system_that_is_no_json_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "system.json"
    for text, message in (
        ("{", "the system is no JSON"),
        ("[1]", "expected a JSON object, got [1]"),
    ):
        path.write_text(text, encoding="utf-8")
        with pytest.raises(InputError, match=message.replace("[", r"\[")):
            read_system(path)
    with pytest.raises(InputError) as refused:
        read_system(tmp_path / "none.json")
    assert refused.value.slug == "unreadable"
