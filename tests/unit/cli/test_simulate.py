"""`traceloom simulate`: its document, its tables, its words, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from support.jobs import ParallelRecipe, parallel_job
from support.reports import check_schema
from support.workload import collective, node, write_set
from traceloom.cli import main
from traceloom.errors import TraceloomError
from traceloom.report.simulation import (
    SIMULATION,
    build_simulation,
    describe_simulation,
    render_simulation,
)
from traceloom.testing import TraceBuilder
from traceloom.workload.simulate.machine import Dimension, Machine
from traceloom.workload.simulate.native import run

MACHINE = """\
format = "traceloom-machine"
version = 1
name = "two of two"
[[network]]
topology = "switch"
size = 2
bandwidth = 100.0
[[network]]
topology = "switch"
size = 2
bandwidth = 10.0
latency = 1000
[nic]
bandwidth = 10.0
"""
NETWORK = "topology: [ Ring ]\nnpus_count: [ 2 ]\nbandwidth: [ 50.0 ]\nlatency: [ 500.0 ]\n"
SYSTEM = {
    "scheduling-policy": "LIFO",
    "endpoint-delay": 10,
    "preferred-dataset-splits": 1,
    "local-mem-bw": 1600,
    "collective-optimization": "localBWAware",
    "active-chunks-per-dimension": 1,
    **{
        f"{kind}-implementation": ["ring"]
        for kind in ("all-reduce", "all-gather", "reduce-scatter", "all-to-all")
    },
}


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return (
        parallel_job(ParallelRecipe(data=2, tensor=2, steps=2))
        .run()
        .write(tmp_path_factory.mktemp("job") / "job")
    )


@pytest.fixture
def machine(tmp_path: Path) -> str:
    path = tmp_path / "machine.toml"
    path.write_text(MACHINE, encoding="utf-8")
    return str(path)


def document(capsys: pytest.CaptureFixture[str], *words: object) -> dict[str, Any]:
    assert main(["simulate", *map(str, words), "--json"]) == 0
    value: dict[str, Any] = json.loads(capsys.readouterr().out)
    check_schema(value, "simulation.schema.json")
    return value


def test_the_document_is_as_published(
    job: Path, machine: str, capsys: pytest.CaptureFixture[str]
) -> None:
    here = document(capsys, job)
    assert here["after_ns"] == here["before_ns"] == here["measured_ns"]
    assert "come back as" in here["identity"]
    assert here["trusted"]
    there = document(
        capsys,
        job,
        "--machine",
        machine,
        "--set",
        "network.1.bandwidth=1",
        "--set",
        "nic.bandwidth=1",
    )
    assert there["after_ns"] > there["before_ns"] == here["after_ns"]
    assert sum(row["after_ns"] for row in there["path"]) == there["after_ns"]
    assert {row["algorithm"] for row in there["collectives"]} == {"ring"}
    assert there["machine"] == "two of two with network.1.bandwidth=1, nic.bandwidth=1"
    step = document(capsys, job, "--step", "1", "--machine", "dgx-h100", "--host-factor", "1")
    assert (step["step"], step["machine"]) == (1, "DGX H100")
    assert step["after_ns"] < there["after_ns"]


def test_the_mode_of_the_peer(
    job: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    home = write_set(
        tmp_path / "set",
        *(
            [node(1, us=5, is_cpu_op=False), collective(2, size=1 << 20, deps=[1], is_cpu_op=False)]
            for _ in range(2)
        ),
    )
    (tmp_path / "network.yml").write_text(NETWORK, encoding="utf-8")
    (tmp_path / "system.json").write_text(json.dumps(SYSTEM), encoding="utf-8")
    files = ["--network", tmp_path / "network.yml", "--system", tmp_path / "system.json"]
    exact = document(capsys, home, "--mode", "astra-sim", *files)
    # simulation.md 3.2: 2 (N - 1) steps of a half at 2^30 B/s, 3 endpoint delays, one reduction
    step = int(500 + (1 << 19) / (50 * 2**30 / 1e9))
    assert [row["end_ns"] for row in exact["ranks"]] == [
        5_000 + 2 * step + 30 + 3 * int((1 << 19) / 1600)
    ] * 2
    assert main(["simulate", str(job), "--mode", "astra-sim", *map(str, files)]) == 3
    assert "hint: of a recorded run: traceloom link RUN" in capsys.readouterr().err
    native = document(capsys, home, *files)
    assert native["after_ns"] == pytest.approx(exact["after_ns"], rel=0.05)
    for wrong in (
        ["--mode", "astra-sim"],
        ["--mode", "astra-sim", *files, "--step", 1],
        [*files, "--collective", "all_reduce=x"],
        ["--congestion", "aware"],
        [*files, "--machine", "dgx-h100"],
        ["--system", "system.json"],
        [*files, "--set", "nic.bandwidth=1"],
    ):
        assert main(["simulate", str(home), *map(str, wrong)]) == 2
        assert "wrong-usage" in capsys.readouterr().err


def test_every_table_is_a_file(
    job: Path, machine: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tables = tmp_path / "tables"
    words = ["simulate", str(job), "--machine", machine]
    outputs = [
        tables,
        tmp_path / "nodes.parquet",
        tmp_path / "became-critical.csv",
        tmp_path / "out.json",
    ]
    assert main([*words, *(word for path in outputs for word in ("-o", str(path)))]) == 0
    assert "Wrote" in capsys.readouterr().out
    assert {path.stem for path in tables.iterdir()} == set(SIMULATION.tables)
    answer = run(job, machine)
    assert pl.read_parquet(tmp_path / "nodes.parquet").equals(answer.nodes)
    assert pl.read_csv(tables / "links.csv").equals(answer.links)
    assert pl.read_csv(tmp_path / "became-critical.csv").height == answer.became_critical.height
    check_schema(
        json.loads((tmp_path / "out.json").read_text(encoding="utf-8")), "simulation.schema.json"
    )
    assert main([*words, "-o", str(tmp_path / "kernels.csv")]) == 2
    assert "no-such-table" in capsys.readouterr().err
    assert main([*words, "-o", str(tables)]) == 3


@pytest.mark.sampled(1)
@pytest.mark.parametrize("width", [80, 140])
def test_the_words_fit(job: Path, machine: str, width: int) -> None:
    lines = [line.plain for line in render_simulation(build_simulation(run(job, machine)), width)]
    assert max(map(len, lines)) <= width
    text = "\n".join(lines)
    for words in (
        "come back as",
        "would take",
        "Critical path",
        "New on the critical path",
        "Busiest links",
    ):
        assert words in text
    assert "recorded machine" in "\n".join(
        line.plain for line in render_simulation(build_simulation(run(job)), 140)
    )


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    ("words", "code", "slug"),
    [
        (["--machine", "no-such"], 2, "no-such-machine"),
        (["--machine", "MACHINE", "--set", "network.0.bandwidth=0"], 2, "bad-override"),
        (["--machine", "MACHINE", "--set", "network.1.size=3"], 2, "machine-size"),
        (["--machine", "MACHINE", "--set", "network.0.bandwidth=1e-300"], 2, "times-too-long"),
        (["--machine", "MACHINE", "--set", "network.0.latency=1e30"], 2, "times-too-long"),
        (["--machine", "MACHINE", "--device", ""], 2, "no-such-device"),
        (["--device", "no such device"], 2, "no-such-device"),
        (["--groups", "groups.json"], 2, "wrong-usage"),
        (["--step", "99"], 2, "no-such-step"),
    ],
)
def test_what_is_refused(
    job: Path,
    machine: str,
    words: list[str],
    code: int,
    slug: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert (
        main(["simulate", str(job), *(machine if word == "MACHINE" else word for word in words)])
        == code
    )
    assert f"explain {slug}" in capsys.readouterr().err


def test_what_was_not_measured_is_not_said_to_be(job: Path, tmp_path: Path) -> None:
    two = Machine((Dimension("switch", 2, 50.0),), name="two")
    some = write_set(
        tmp_path / "some",
        *([node(1, us=5), collective(2, size=1 << 20, us=0, deps=[1])] for _ in range(2)),
    )
    none = write_set(tmp_path / "none", *([collective(1, size=1 << 20, us=0)] for _ in range(2)))
    assert describe_simulation(run(some)) == "The window takes 5.00 µs by its own durations."
    # two messages of half a MiB and their way to the switch
    assert describe_simulation(run(some, two)) == (
        "The window would take 26.0 µs on two; by its own durations it takes 5.00 µs (+419.4 %)."
    )
    assert (
        describe_simulation(run(none, two))
        == "The window would take 21.0 µs on two; by its own durations it takes 0 ns."
    )
    assert "Nobody measured communication alone" in run(job, only="communication").identity


def test_a_trace_without_gaps_was_measured(tmp_path: Path) -> None:
    made = TraceBuilder(rank=0)
    made.op("aten::add", 0, 10)
    made.write(tmp_path / "trace.json")
    assert run(tmp_path / "trace.json").measured_ns == 10_000


def test_names_of_dimensions_are_text(job: Path) -> None:
    machine = Machine(
        (Dimension("switch", 4, 50.0, name="{} <b>"), Dimension("switch", 1, 5.0, shared=True))
    )
    names = run(job, machine).links["name"].to_list()
    assert "rank 0 → {} <b> switch 0.0" in names
    cards = Machine(
        (Dimension("switch", 1, 50.0), Dimension("switch", 4, 5.0, name="wire", shared=True))
    )
    assert "rank 0 → wire switch 0.0" in run(job, cards).links["name"].to_list()


def test_a_deadlock_is_a_failed_check(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    home = write_set(
        tmp_path / "set",
        [collective(1, pg_name="1", name="first"), collective(2, pg_name="2", deps=[1])],
        [collective(1, pg_name="2", name="second"), collective(2, pg_name="1", deps=[1])],
        groups={"1": [0, 1], "2": [0, 1]},
    )
    assert main(["simulate", str(home)]) == 5
    said = capsys.readouterr().err
    assert "deadlock: rank" in said
    assert "`second`" in said
    assert "`first`" in said


def test_damaged_files_and_wrong_groups_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    home = write_set(tmp_path / "set", [collective(1)], [collective(1)])
    groups = tmp_path / "groups.json"
    groups.write_text('{"1": "all"}', encoding="utf-8")
    assert main(["simulate", str(home), "--groups", str(groups)]) == 3
    (home / "w.1.et").write_bytes((home / "w.1.et").read_bytes()[:9])
    with pytest.raises(TraceloomError) as error:
        run(home)
    assert error.value.exit_code in {3, 5}
    capsys.readouterr()


def test_sizes_that_nothing_can_carry_are_refused(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    home = write_set(tmp_path / "set", *([collective(1, size=(1 << 63) - 1)] for _ in range(2)))
    assert main(["simulate", str(home), "--machine", "dgx-h100"]) == 2
    said = capfd.readouterr().err
    assert said.startswith("traceloom: one all_reduce of ")
    assert "explain times-too-long" in said


def test_traces_and_files_of_a_workload_are_not_one_workload(
    job: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = write_set(tmp_path / "set", [node(1, us=5)])
    for words in ([job, files], [files, job]):
        assert main(["simulate", *map(str, words)]) == 2
        assert "a workload is one directory of .et files" in capsys.readouterr().err
