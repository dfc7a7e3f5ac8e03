"""Workloads that others wrote: what ASTRA-sim says of them, or the README of `failing`."""

from __future__ import annotations

import csv
import json
import tarfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from support import astra_sim
from support.public_traces import DATA
from support.workload import collective, node, write_set
from traceloom.cli import main
from traceloom.errors import CheckError
from traceloom.formats.chakra.et_pb2 import Node
from traceloom.formats.chakra.files import EtReader
from traceloom.workload.simulate import native
from traceloom.workload.simulate.astra_sim.run import simulate

GIVEN = DATA / "failing" / "workloads"

pytestmark = [
    pytest.mark.data,
    pytest.mark.skipif(not GIVEN.is_dir(), reason="the given workloads are not on this machine"),
]


def nodes(folder: Path) -> list[Node]:
    """The nodes of all ranks of a folder."""
    out = []
    for path in sorted(folder.glob("*.et")):
        with EtReader(path) as reader:
            out += list(reader)
    return out


def attribute(node: Node, name: str) -> int | None:
    """A whole number that a node states."""
    for one in node.attr:
        if one.name == name:
            return int(getattr(one, str(one.WhichOneof("value"))))
    return None


def recorded_workloads(home: Path) -> Iterator[tuple[dict[str, str], Path]]:
    """The rows of ASTRA-sim's own times, and the folder of their files."""
    with tarfile.open(DATA / "golden" / "workloads.tar.gz") as archive:
        archive.extractall(home, filter="data")
    with (DATA / "golden" / "workload_cycles.tsv").open(newline="") as file:
        for row in csv.DictReader(file, delimiter="\t"):
            yield row, home / row["workload"]


def test_a_conversion_keeps_the_time_of_every_rank(tmp_path: Path) -> None:
    different, read = [], {}
    for row, folder in recorded_workloads(tmp_path / "files"):
        target = tmp_path / "written" / folder.name
        if folder not in read:
            assert (
                main(["convert", str(folder), str(target), "--target", "astra-sim", "--json"]) == 0
            )
            read[folder] = astra_sim.workload(target)
        network = astra_sim.network(
            row["topology"], row["npus"], row["bandwidth_GBps"], row["latency_ns"]
        )
        system = astra_sim.system(
            row["implementation"], len(network.sizes), splits=int(row["splits"])
        )
        ends = astra_sim.ends(
            astra_sim.node_mask(read[folder]),
            read[folder].groups.members,
            network,
            system,
            aware=row["backend"] == "aware",
        )
        if ends != [int(cycles) for cycles in row["cycles_by_rank"].split(",")]:
            different.append((row, ends))
    assert different == []
    assert len(read) == 14


def test_the_order_of_ids_is_that_of_nodes_that_may_run_at_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, target = GIVEN / "order_of_ids", tmp_path / "written"
    assert main(["convert", str(source), str(target), "--target", "astra-sim", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["notices"] == []
    assert [node.id for node in nodes(target)] == [node.id for node in nodes(source)]
    network = astra_sim.network("Ring", "2", "50", "500")
    for folder in (source, target):
        ranks = astra_sim.node_mask(astra_sim.workload(folder))
        ends = astra_sim.ends(ranks, None, network, astra_sim.system(), aware=False)
        assert max(end or 0 for end in ends) == 5_020_031


@pytest.mark.parametrize("through_a_graph", [False, True])
@pytest.mark.parametrize("options", [[], ["--target", "astra-sim"]])
def test_computation_that_is_stated_as_operations_and_bytes_survives(
    tmp_path: Path, options: list[str], through_a_graph: bool
) -> None:
    source, target = GIVEN / "roofline_comp", tmp_path / "written"
    if through_a_graph:
        assert main(["convert", str(source), str(tmp_path / "job.graph"), "-q"]) == 0
        source = tmp_path / "job.graph"
    assert main(["convert", str(source), str(target), "-q", *options]) == 0
    computes = [node for node in nodes(target) if node.name == "gemm"]
    assert [(attribute(node, "num_ops"), attribute(node, "tensor_size")) for node in computes] == [
        (1_000_000_000, 1_000_000)
    ] * 2


@pytest.mark.parametrize("name", ["simulate_circle", "simulate_no_circle"])
def test_ids_against_dependencies_do_not_matter_to_the_native_engine(name: str) -> None:
    assert native.run(GIVEN / name).after_ns == 20_000


def simulated(name: str, capsys: pytest.CaptureFixture[str]) -> tuple[list[int], set[str], str]:
    """The ends, the slugs of notices, and what is said on stderr of a given setting."""
    folder = GIVEN / "astra_sim" / name
    backend = (folder / "NOTE").read_text(encoding="utf-8").split()[1]
    options = ["--network", str(folder / "network.yml"), "--system", str(folder / "system.json")]
    options += ["--congestion", backend, "--mode", "astra-sim", "--json", "-q"]
    main(["simulate", str(folder), *options])
    out, err = capsys.readouterr()
    document = json.loads(out or '{"ranks": [], "notices": []}')
    ends = [rank["end_ns"] for rank in document["ranks"]]
    return ends, {notice["slug"] for notice in document["notices"]}, err


@pytest.mark.parametrize(
    "name", [path.name for path in sorted((GIVEN / "astra_sim").glob("*")) if path.is_dir()]
)
def test_a_setting_has_the_end_that_astra_sim_gives_or_none(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    ends, slugs, said = simulated(name, capsys)
    lines = (GIVEN / "astra_sim" / name / "expected.tsv").read_text("utf-8").splitlines()[1:]
    if lines[0].startswith("#"):
        assert "astra-sim-no-end" in slugs if ends else "ASTRA-sim" in said
        assert "defect" not in said
    else:
        assert ends == [int(line.split("\t")[1]) for line in lines]
        assert "astra-sim-no-end" not in slugs


@pytest.mark.parametrize(
    ("name", "rule"),
    [("asym_default", "collective-number"), ("astra_sim/d_group_of_one", "group-of-one")],
)
def test_what_hangs_in_astra_sim_is_not_valid(
    name: str, rule: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["validate", str(GIVEN / name), "--target", "astra-sim", "--json"]) == 5
    problems = json.loads(capsys.readouterr().out)["problems"]
    assert {problem["rule"] for problem in problems if problem["severity"] == "error"} == {rule}
    assert main(["validate", str(GIVEN / name)]) == 0


def test_a_conversion_names_the_group_of_all_ranks_where_it_would_hang(tmp_path: Path) -> None:
    target = tmp_path / "written"
    assert (
        main(["convert", str(GIVEN / "asym_default"), str(target), "--target", "astra-sim", "-q"])
        == 0
    )
    assert main(["validate", str(target), "--target", "astra-sim", "-q"]) == 0


@pytest.mark.parametrize("verb", ["validate", "simulate", "convert"])
def test_files_of_the_first_schema_are_refused_by_its_name(
    verb: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = [str(tmp_path / "written")] if verb == "convert" else []
    assert main([verb, str(GIVEN / "chakra_0.0.1"), *target]) == 3
    assert "schema 0.0.1" in capsys.readouterr().err


def test_an_old_group_is_used_or_said(tmp_path: Path) -> None:
    home = write_set(
        tmp_path / "set",
        *[[collective(1, comm_group=("int32_val", 3))]] * 2,
        [node(1)],
        groups={"3": [0, 1]},
    )
    network, system = astra_sim.network("Ring", "3", "50", "500"), astra_sim.system()
    assert native.run(home).collectives["ranks"].to_list() == [2]
    with pytest.raises(CheckError):  # of all ranks, and rank 2 does not come
        simulate(astra_sim.workload(home), network, system)
    assert main(["convert", str(home), str(tmp_path / "new"), "--target", "astra-sim", "-q"]) == 0
    answer = simulate(astra_sim.workload(tmp_path / "new"), network, system)
    assert answer.collectives["ranks"].to_list() == [2]
