"""Machines: what is read, refused, changed by --set, and written."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import fields
from pathlib import Path
from typing import get_args

import numpy as np
import pytest
from hypothesis import given, strategies as st

from traceloom.analyze.placed_calls import Peak
from traceloom.errors import InputError, UsageError
from traceloom.workload.simulate.machine import (
    AlgorithmRule,
    Dimension,
    Machine,
    MeasuredTransfer,
    Nic,
    SpeedFactor,
    Topology,
    Wire,
)
from traceloom.workload.simulate.machine_file import (
    apply_overrides,
    build_machine,
    machine_text,
    presets,
    read_machine,
)
from traceloom.workload.simulate.network import MachineNetwork

PATHS = [
    "network.0.size",
    "network.0.shape",
    "network.1",
    "network",
    "nic.of.x",
    "ranks.order",
    "algorithm.0.use",
    "device.peaks",
    "device.peaks.bf16",
    "slow",
    "transfer.0",
    "name",
    "name.a",
    "..",
    "network..size",
    "network.-1.size",
]
KEYS = [
    "network",
    "nic",
    "ranks",
    "algorithm",
    "device",
    "slow",
    "transfer",
    "name",
    "version",
    "size",
    "topology",
    "bandwidth",
    "links",
    "shape",
    "order",
    "per_host",
    "peaks",
    "collective",
    "use",
    "radix",
    "latency",
    "shared",
]
RING = '[[network]]\ntopology = "ring"\nsize = 8\nbandwidth = 50\n'
MEASURED = '[[transfer]]\ncollective = "all_reduce"\nspan = "inside"\nranks = 8\nalpha_ns = 10\nbandwidth = 200\n'
EVERYTHING = Machine(
    name='two "hosts" \\ é\x7f\n',
    source="a page",
    price_per_hour=3.5,
    dimensions=(
        Dimension("torus", 8, 450.0, 700.0, name="inner", shape=(4, 2)),
        Dimension("fat-tree", 4, 50.0, 2000.0, radix=2, oversubscription=2.0),
        Dimension("links", 2, 10.0, links=(Wire(0, 2), Wire(2, 1, 5.0, 1e-7)), shared=True),
    ),
    nic=Nic(1e22, "all"),
    order=tuple(reversed(range(64))),
    per_host=32,
    algorithms=(
        AlgorithmRule("all_reduce", "double-tree", 65536),
        AlgorithmRule("broadcast", "ring"),
    ),
    device=Peak("mine", {"bf16": 1e15}, None),
    slow=(SpeedFactor((3, 4), 0.8, 0.5), SpeedFactor((4,), 0.5)),
    transfers=(
        MeasuredTransfer("all_gather", "between", 16, 1, 1 << 40, 12000.5, 210.0, -0.03, 0.05, 120),
    ),
)


def test_the_text_of_a_machine_is_that_machine(tmp_path: Path) -> None:
    for machine in (EVERYTHING, *(read_machine(name) for name in presets())):
        path = tmp_path / "machine.toml"
        path.write_text(machine_text(machine), encoding="utf-8")
        assert read_machine(path) == machine


def test_one_rank_alone_needs_no_network(tmp_path: Path) -> None:
    path = tmp_path / "machine.toml"
    path.write_text('[device]\nname = "H100 SXM"', encoding="utf-8")
    machine = read_machine(path)
    assert machine.ranks == 1
    network = MachineNetwork(machine)
    assert (
        network.links.height,
        network.routes(np.zeros(1, np.int64), np.zeros(1, np.int64)).links.size,
    ) == (0, 0)
    with pytest.raises(UsageError, match="no network"):
        machine.for_ranks(2)


@pytest.mark.parametrize(
    ("text", "message", "where"),
    [
        ("x", "the machine is no TOML", ""),
        ("", "a machine needs at least one `[[network]]`", ""),
        (
            '[device]\nname = "H100 SXM"\n[nic]\nbandwidth = 1',
            "a machine needs at least one `[[network]]`",
            "",
        ),
        ("network = []", "a machine needs at least one `[[network]]`", ""),
        ("network = [1]", "expected a table, got 1", "network[0]"),
        ('format = "other"\n' + RING, "expected one of traceloom-machine, got 'other'", "format"),
        (RING + "bandwith = 3", "`bandwith` is no key of `network[0]`", ""),
        (RING.replace("ring", "rung"), "got 'rung'", "network[0].topology"),
        (RING.replace("50", "0"), "expected a number > 0.0, got 0", "network[0].bandwidth"),
        (RING.replace("50", "-1"), "expected a number > 0.0, got -1", "network[0].bandwidth"),
        (RING.replace("50", "inf"), "bandwidth and latency are finite", "network[0]"),
        (RING.replace("50", '"50"'), "expected a number, got '50'", "network[0].bandwidth"),
        (RING.replace("8", "0"), "expected a whole number >= 1, got 0", "network[0].size"),
        (RING.replace("8", "9" * 12), "has 999,999,999,999 ranks, more than", ""),
        (
            RING.replace("8", "40000").replace("ring", "fully-connected"),
            "more than 33,554,432 links",
            "",
        ),
        (RING + "shape = [8]", "`shape` belongs to torus and mesh", "network[0]"),
        (RING.replace("ring", "mesh"), "the topology mesh needs `shape`", "network[0]"),
        (
            RING.replace("ring", "torus") + "shape = [4, 3]",
            "the shape 4 x 3 has 12 members, the size is 8",
            "network[0]",
        ),
        (RING + "oversubscription = 2", "`oversubscription` belongs to a fat-tree", "network[0]"),
        (
            RING.replace("ring", "links") + "links = [[0, 1]]",
            "no links lead from member 0 to member 2",
            "network[0]",
        ),
        (RING.replace("ring", "links") + "links = [[1, 1]]", "joins 1 with itself", "network[0]"),
        (RING.replace("ring", "links") + "links = [[0, 1], [1, 0]]", "stands twice", "network[0]"),
        (RING + "shared = true", "the innermost dimension cannot be `shared`", ""),
        (
            RING + "[ranks]\norder = [0, 1, 2, 3, 4, 5, 6, 6]",
            "the order of the ranks has not each of 0 to 7 once",
            "",
        ),
        (RING + "[ranks]\nper_host = 3", "8 ranks are no number of hosts of 3", ""),
        (RING + "[[slow]]\nranks = [8]", "`slow` names rank 8, the machine has ranks 0 to 7", ""),
        (
            RING + '[[algorithm]]\ncollective = "gather"\nuse = "ring"',
            "there is no ring algorithm for gather",
            "algorithm[0]",
        ),
        (RING + '[device]\nname = "H1000"', "no peaks for a device called 'H1000'", "device"),
        (RING + "[device]\npeaks = { bf17 = 1.0 }", "`bf17` is none of", "device"),
        (
            RING + 2 * (MEASURED + "from_bytes = 1\nto_bytes = 9\n"),
            "two transfers of all_reduce inside 8 ranks overlap at 1 bytes",
            "",
        ),
        (
            RING + MEASURED + "from_bytes = 9\nto_bytes = 1",
            "`from_bytes` 9 is above `to_bytes` 1",
            "transfer[0]",
        ),
    ],
)
def test_a_machine_that_cannot_be_is_refused_with_the_place(
    text: str, message: str, where: str, tmp_path: Path
) -> None:
    path = tmp_path / "machine.toml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(InputError) as refused:
        read_machine(path)
    assert refused.value.slug == "bad-machine"
    assert message in refused.value.message
    assert refused.value.where == (f"{path}, {where}" if where else str(path))


def test_another_version_and_a_missing_file_say_so(tmp_path: Path) -> None:
    path = tmp_path / "machine.toml"
    path.write_text("version = 2\nnew = 1\n" + RING, encoding="utf-8")
    with pytest.raises(InputError, match="version 2") as refused:
        read_machine(path)
    assert refused.value.slug == "other-version"
    with pytest.raises(InputError) as refused:
        read_machine(tmp_path / "other.toml")
    assert refused.value.slug == "unreadable"
    with pytest.raises(UsageError, match="did you mean `dgx-h100`") as wrong:
        read_machine("dgx-h10")
    assert wrong.value.slug == "no-such-machine"


def test_set_replaces_one_value() -> None:
    overrides = [
        "network.0.bandwidth=100",
        "network.infiniband.size = 4",
        "nic.bandwidth=25",
        "ranks.per_host=16",
    ]
    machine = read_machine("dgx-h100", overrides)
    assert machine.dimensions[0].bandwidth == 100.0
    assert machine.dimensions[1].size == 4
    assert machine.nic == Nic(25.0)
    assert machine.ranks == 32
    assert machine.ranks_per_host == 16
    assert machine.dimensions[0].latency == read_machine("dgx-h100").dimensions[0].latency
    assert apply_overrides(EVERYTHING, []) == EVERYTHING
    assert apply_overrides(EVERYTHING, ["device.name=H100 SXM"]).device == Peak(
        "H100 SXM", {"bf16": 1e15}, None
    )


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("network.2.size=8", "`network` has no `2`"),
        ("network.0.bandwith=8", "did you mean `bandwidth`"),
        ("netwerk.0.size=8", "did you mean `network`"),
        ("network.0=8", "names no key"),
        ("nic", "expected PATH=VALUE, got `nic`"),
        ("=3", "expected PATH=VALUE, got `=3`"),
        ("network.0.size=many", "expected a whole number, got 'many'"),
        ("network.0.bandwidth=0", "expected a number > 0.0, got 0"),
        ("network.0.topology=swich", "did you mean `switch`"),
        ("slow.0.ranks=[0]", "it has 0 entries"),
        ("nic.bandwidth.of.all=1", "names no key"),
        ("network.0.shape.0.a=1", "expected a list, got"),
    ],
)
def test_a_wrong_set_is_a_wrong_call(override: str, message: str) -> None:
    with pytest.raises(UsageError) as refused:
        read_machine("dgx-h100", [override])
    assert refused.value.slug == "bad-override"
    assert message in str(refused.value)


def test_a_preset_grows_by_hosts_and_shrinks_to_a_part_of_one() -> None:
    preset = read_machine("dgx-h100")
    assert [dimension.size for dimension in preset.for_ranks(64).dimensions] == [8, 8]
    assert [dimension.size for dimension in preset.for_ranks(4).dimensions] == [4, 1]
    assert preset.for_ranks(8) is preset
    for ranks, machine in ((12, preset), (128, EVERYTHING)):
        with pytest.raises(UsageError) as refused:
            machine.for_ranks(ranks)
        assert refused.value.slug == "machine-size"
    with pytest.raises(UsageError, match=r"the machine has 8 ranks \(8 x 1\), the workload has 7"):
        preset.check(7)


def test_the_reference_names_every_key_and_every_preset() -> None:
    page = (Path(__file__).parents[4] / "docs" / "reference" / "machine.md").read_text(
        encoding="utf-8"
    )
    kinds = (Dimension, Nic, AlgorithmRule, SpeedFactor, MeasuredTransfer)
    keys = {field.name for kind in kinds for field in fields(kind)}
    assert [
        key for key in sorted({*keys, *get_args(Topology), *presets()}) if f"`{key}`" not in page
    ] == []


def test_places_spans_and_speeds() -> None:
    assert EVERYTHING.places.tolist() == list(reversed(range(64)))
    assert EVERYTHING.span([63, 32]) == "inside"
    assert EVERYTHING.span([32, 31]) == "between"
    assert read_machine("dgx-h100").for_ranks(16).span([7, 8]) == "between"
    assert EVERYTHING.device_speeds()[2:5].tolist() == [1.0, 0.8, 0.4]
    assert EVERYTHING.network_speeds()[2:5].tolist() == [1.0, 0.5, 0.5]


def test_the_first_algorithm_that_matches_counts() -> None:
    assert EVERYTHING.algorithm("all_reduce", 65535, 6) == "double-tree"
    assert EVERYTHING.algorithm("all_reduce", 65536, 6) == "ring"
    assert EVERYTHING.algorithm("broadcast", 1, 6) == "ring"
    assert EVERYTHING.algorithm("all_to_all", 1, 6) == "direct"
    halving = Machine(
        EVERYTHING.dimensions, algorithms=(AlgorithmRule("all_reduce", "halving-doubling"),)
    )
    assert halving.algorithm("all_reduce", 1, 8) == "halving-doubling"
    with pytest.raises(UsageError, match="needs a power of two"):
        halving.algorithm("all_reduce", 1, 6)


def test_the_nearest_measured_size_answers() -> None:
    small, large = (
        MeasuredTransfer("all_reduce", "inside", 8, low, high, 0.0, 1.0)
        for low, high in ((10, 99), (1000, 9999))
    )
    machine = Machine((Dimension("switch", 8, 1.0),), transfers=(large, small))
    members = list(range(8))
    assert machine.transfer("all_reduce", members, 1) is small
    assert machine.transfer("all_reduce", members, 300) is small
    assert machine.transfer("all_reduce", members, 900) is large
    assert machine.transfer("all_reduce", members, 1 << 40) is large
    assert machine.transfer("all_reduce", members[:4], 300) is None
    assert machine.transfer("all_gather", members, 300) is None


VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=8)
    | st.sampled_from(["ring", "switch"]),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from(KEYS), inner, max_size=4)
    ),
    max_leaves=6,
)


@given(
    st.dictionaries(st.sampled_from(KEYS), VALUES, max_size=4),
    st.sampled_from(["", *PATHS]),
    VALUES,
)
def test_whatever_stands_in_it_ends_in_a_machine_or_in_a_sentence(
    document: dict[str, object], path: str, value: object
) -> None:
    base = {"network": [{"topology": "switch", "size": 4, "bandwidth": 1.0}]}
    with suppress(InputError):
        build_machine({**base, **document}, "made")
    with suppress(UsageError):
        apply_overrides(read_machine("dgx-h100"), [f"{path}={value!r}".replace("'", '"')])
