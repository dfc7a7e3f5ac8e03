"""Sweeps: what is understood, what the answers say together, and what is asked at each point."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import polars as pl
import pytest
from hypothesis import given, strategies as st

import traceloom
from support.jobs import ParallelRecipe, parallel_job
from traceloom.cli import main
from traceloom.errors import UsageError
from traceloom.workload.chakra.generate import (
    TransformerOptions,
    estimate_memory,
    generate_transformer,
    write_generated,
)
from traceloom.workload.simulate.native import run
from traceloom.workload.simulate.scale import scale
from traceloom.workload.simulate.sweep import (
    SweepAxis,
    SweepQuestion,
    SweepTable,
    evaluate_points,
    list_points,
    parse_axis,
)

MACHINE = """
format = "traceloom-machine"
version = 1
name = "alike"
price_per_hour = 2.0
[[network]]
name = "wires"
topology = "fully-connected"
size = 4
bandwidth = 100.0
latency = 1000
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sweep")
    parallel_job(ParallelRecipe(data=2, tensor=2, steps=3, layers=1)).run().write(folder / "run")
    (folder / "machine.toml").write_text(MACHINE)
    write_generated(generate_transformer(TransformerOptions(layers=4, hidden=256)), folder / "plan")
    return folder


# -- what is written ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("a.b=50,100,200", (50, 100, 200)),
        ("ranks=8..64*2", (8, 16, 32, 64)),
        ("ranks=8..60*2", (8, 16, 32)),
        ("layers=4..9", (4, 5, 6, 7, 8, 9)),
        ("layers=4..12+4,32", (4, 8, 12, 32)),
        ("nic.bandwidth=0.5..2+0.5", (0.5, 1.0, 1.5, 2.0)),
        ("schedule=1f1b,gpipe", ("1f1b", "gpipe")),
        ("ranks=8,8..16*2", (8, 16)),
    ],
)
def test_values_are_lists_and_ranges(text: str, values: tuple[float | str, ...]) -> None:
    assert parse_axis(text) == SweepAxis(text.partition("=")[0], values)


def test_dashes_of_options_are_understood() -> None:
    assert parse_axis("tensor-parallel=1").key == "tensor_parallel"


@pytest.mark.parametrize(
    "text",
    [
        "ranks",
        "=3",
        "ranks=",
        "ranks=8..",
        "ranks=8,,9",
        "ranks=9..8",
        "ranks=1..8*1",
        "ranks=1..8+0",
        "ranks=0..8*2",
        "ranks=a..b",
        "ranks=1..nan",
    ],
)
def test_what_is_no_sweep_is_refused(text: str) -> None:
    with pytest.raises(UsageError) as refused:
        parse_axis(text)
    assert refused.value.slug == "bad-sweep"


def test_ten_million_points_are_refused_at_once() -> None:
    with pytest.raises(UsageError) as refused:
        parse_axis("ranks=1..10000000")
    assert refused.value.slug == "sweep-too-large"
    assert "10,000,000" in str(refused.value)
    with pytest.raises(UsageError) as refused:
        list_points([parse_axis(f"{name}=1..100") for name in ("a", "b", "c")])
    assert refused.value.slug == "sweep-too-large"
    assert "1,000,000 points" in refused.value.message


def test_points_are_all_combinations() -> None:
    axes = [parse_axis("a=1,2"), parse_axis("b=x,y")]
    assert [tuple(point.values()) for point in list_points(axes)] == [
        (1, "x"),
        (1, "y"),
        (2, "x"),
        (2, "y"),
    ]
    with pytest.raises(UsageError):
        list_points([parse_axis("a=1"), parse_axis("a=2")])


# -- what the answers say together --------------------------------------------------------------------------------


@given(
    st.lists(
        st.tuples(st.integers(1, 5), st.integers(1, 5), st.integers(1, 5)), min_size=1, max_size=12
    )
)
def test_the_pareto_front_is_what_nobody_beats(rows: list[tuple[int, int, int]]) -> None:
    axes = [SweepAxis("x", tuple(range(len(rows))))]
    table = SweepTable.of(
        axes,
        [{"x": x, "time_ns": t, "ranks": r, "cost": float(c)} for x, (t, r, c) in enumerate(rows)],
    )
    beaten = [
        any(all(b <= a for a, b in zip(row, other, strict=True)) and other != row for other in rows)
        for row in rows
    ]
    assert table.points["pareto"].to_list() == [not each for each in beaten]


def test_twice_the_ranks_for_twice_the_samples_in_the_same_time_is_as_good() -> None:
    rows = [{"ranks": n, "time_ns": 100, "samples": float(n), "cost": float(n)} for n in (1, 2)]
    assert SweepTable.of([SweepAxis("ranks", (1, 2))], rows).points["pareto"].to_list() == [
        True,
        True,
    ]
    slower = [rows[0], {**rows[1], "time_ns": 201, "cost": 2.01}]
    assert SweepTable.of([SweepAxis("ranks", (1, 2))], slower).points["pareto"].to_list() == [
        True,
        False,
    ]


def test_sensitivity_is_the_exponent() -> None:
    rows = [
        {"a": a, "b": b, "time_ns": round(1e9 * a**-0.5 * b), "reason": None}
        for a in (1, 2, 8)
        for b in (1, 3)
    ]
    rows.append({"a": 16, "b": 1, "time_ns": None, "reason": "it does not divide"})
    table = SweepTable.of([SweepAxis("a", (1, 2, 8, 16)), SweepAxis("b", (1, 3))], rows)
    found = {row["parameter"]: row for row in table.sensitivities.to_dicts()}
    assert found["a"]["median"] == pytest.approx(-0.5, abs=1e-6)
    assert found["b"]["median"] == pytest.approx(1, abs=1e-6)
    assert (found["a"]["pairs"], found["b"]["pairs"]) == (4, 3)
    assert not table.points["pareto"][-1]


# -- what is asked ------------------------------------------------------------------------------------------------


def test_points_are_what_single_questions_answer(folder: Path) -> None:
    question = SweepQuestion(
        (str(folder / "run"),), machine=str(folder / "machine.toml"), cache=False
    )
    points: dict[int, dict[str, int | float | str]] = {
        0: {"network.0.bandwidth": 50},
        1: {"network.0.bandwidth": 200},
    }
    answers = dict(evaluate_points(question, points, processes=1))
    for number, point in points.items():
        bandwidth = point["network.0.bandwidth"]
        alone = run(
            folder / "run",
            folder / "machine.toml",
            overrides=[f"network.0.bandwidth={bandwidth}"],
            cache=False,
        )
        assert answers[number]["time_ns"] == alone.after_ns
        assert answers[number]["cost"] == pytest.approx(2.0 * 4 * alone.after_ns / 3.6e12)


def test_more_ranks_are_drawn(folder: Path) -> None:
    question = SweepQuestion((str(folder / "run"),), draws=20, cache=False)
    row = dict(evaluate_points(question, {0: {"ranks": 16}}, processes=1))[0]
    session = traceloom.load(folder / "run", cache=False)
    roles = {
        str(number): role
        for number, role in enumerate(["world", "tensor", "tensor", "data", "data"])
    }
    alone = scale(traceloom.graph.link_session(session), ranks=16, roles=roles, draws=20)
    assert (row["time_ns"], row["p10_ns"], row["p90_ns"]) == (
        alone.after_ns,
        alone.p10_ns,
        alone.p90_ns,
    )
    assert row["samples"] == 4


def test_a_plan_keeps_its_ranks_and_its_batch(folder: Path) -> None:
    machine = str(folder / "machine.toml")
    question = SweepQuestion(
        (str(folder / "plan"),), machine=machine, ranks=8, memory_limit=30_000_000
    )
    axes = [
        parse_axis("tensor_parallel=1,2,3"),
        parse_axis("pipeline_parallel=1,4"),
        parse_axis("global_batch=16"),
    ]
    points = dict(enumerate(list_points(axes)))
    answers = dict(evaluate_points(question, points, processes=1))
    reasons = {tuple(points[number].values())[:2]: row["reason"] for number, row in answers.items()}
    # 4 layers of 12 x 256^2 weights, 16 bytes each, and of 17 x 1024 x 256 x 2 bytes of one micro-batch on its way
    assert reasons[1, 1] == "a rank would need 86.0 MB of memory, and has 30.0 MB"
    assert "multiple of the 3" in str(reasons[3, 1])
    assert reasons[2, 4] is None
    done = next(
        row for number, row in answers.items() if tuple(points[number].values())[:2] == (2, 4)
    )
    assert (done["ranks"], done["samples"]) == (8, 16)
    # one layer on two ranks, 4 micro-batches on their way
    assert done["memory_bytes"] == 12 * 256**2 // 2 * 16 + 4 * 17 * 1024 * 256 * 2 // 2


def test_memory_grows_with_what_is_on_its_way() -> None:
    few, many = (
        estimate_memory(TransformerOptions(schedule=schedule, micro_batches=8, pipeline_parallel=2))
        for schedule in ("1f1b", "gpipe")
    )
    layer = 17 * 1024 * 1024 * 2 // 2
    assert many - few == (8 - 2) * 2 * layer


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["run", "--sweep", "rank=1,2"], "did you mean `ranks`"),
        (["run", "--sweep", "network.0.bandwidth=1"], "--machine"),
        (["plan", "--sweep", "layers=4"], "no network"),
        (["run", "--machine", "machine.toml", "--sweep", "network.7.bandwidth=1,2"], "no point"),
        (["run", "--sweep", "ranks=1..10000000"], "100,000"),
    ],
)
def test_what_cannot_be_swept_is_said_in_a_sentence(
    folder: Path,
    words: list[str],
    says: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(folder)
    assert main(["simulate", *words, "--quiet"]) == 2
    assert says in capsys.readouterr().err


# -- stopping and going on ----------------------------------------------------------------------------------------


def test_tables_are_written_and_what_was_kept_is_not_asked_again(
    folder: Path, tmp_path: Path
) -> None:
    words = [
        "simulate",
        str(folder / "run"),
        "--sweep",
        "host_factor=1,2,4",
        "--quiet",
        "--no-cache",
    ]
    words += ["--machine", str(folder / "machine.toml")]
    table, kept = tmp_path / "sweep.csv", tmp_path / "sweep.csv.points"
    assert main([*words, "-o", str(table), "-o", str(tmp_path / "sweep.json")]) == 0
    assert not kept.exists()
    rows = pl.read_csv(table)
    assert rows["host_factor"].to_list() == [1, 2, 4]
    assert rows["time_ns"].is_sorted()
    document = json.loads((tmp_path / "sweep.json").read_text())
    assert (document["format"], len(document["points"])) == ("traceloom-sweep", 3)
    # a file of such a name that is none of ours
    kept.write_text("mine\n")
    assert main([*words, "-o", str(table), "--force"]) == 3
    assert kept.read_text() == "mine\n"


@pytest.mark.thorough
def test_a_sweep_that_is_stopped_goes_on_with_the_same_command(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(
        tmp_path
    )  # where the answers are kept, too: a directory that changes meanwhile
    table, kept = tmp_path / "sweep.csv", tmp_path / "sweep.csv.points"
    words = [
        "simulate",
        str(folder / "run"),
        "--sweep",
        "ranks=4..240+4",
        "-o",
        "sweep.csv",
        "--quiet",
    ]
    env = os.environ | {"PYTHONPATH": str(Path(traceloom.__file__).parents[1])}
    process = subprocess.Popen([sys.executable, "-m", "traceloom", *words], env=env)
    while not (kept.exists() and kept.read_text().count("\n") > 3):
        assert process.poll() is None
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    assert process.wait(30) == 130
    assert not table.exists()
    lines = kept.read_text().splitlines()
    # what is kept is believed: an answer that no evaluation gives
    point, row = json.loads(lines[1])
    lines[1] = json.dumps([point, {**row, "time_ns": 7}])
    kept.write_text("\n".join(lines) + '\n[{"ranks":')
    assert main(words) == 0
    rows = pl.read_csv(table)
    assert rows.height == 60
    assert rows.filter(ranks=point["ranks"])["time_ns"].to_list() == [7]
    assert (rows["time_ns"] > 0).all()
    assert not kept.exists()
