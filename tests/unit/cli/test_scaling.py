"""`traceloom simulate --ranks`: what is printed, written and refused."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest

from support.documents import check_document
from support.jobs import ParallelRecipe, parallel_job
from traceloom.cli import main
from traceloom.report.documents.predictions import ScaledDocument

MACHINE = """
format = "traceloom-machine"
version = 1
name = "alike"
[[network]]
name = "wires"
topology = "fully-connected"
size = 4
bandwidth = 100.0
latency = 1000
[[algorithm]]
collective = "all_reduce"
use = "ring"
"""


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> str:
    run = parallel_job(ParallelRecipe(data=2, tensor=2, steps=3, layers=1)).run()
    return str(run.write(tmp_path_factory.mktemp("made") / "run"))


def test_a_job_of_more_ranks_is_answered_and_its_files_are_written(
    recorded: str, tmp_path: Path
) -> None:
    answer, files = tmp_path / "scaled.json", tmp_path / "workload"
    machine = tmp_path / "machine.toml"
    machine.write_text(MACHINE)
    words = [
        "simulate",
        recorded,
        "--ranks",
        "16",
        "--machine",
        str(machine),
        "--draws",
        "20",
        "--quiet",
        "--no-cache",
    ]
    assert main([*words, "-o", str(answer), "-o", f"{files}/"]) == 0
    document = json.loads(answer.read_text())
    check_document(document, ScaledDocument)
    assert (document["format"], document["ranks"], document["data_parallel"]) == (
        "traceloom-scaled",
        16,
        8,
    )
    assert document["p10_ns"] <= document["after_ns"] <= document["p90_ns"]
    gradients = max(document["collectives"], key=lambda row: row["in_bytes_after"])
    # a ring of 8: twice 7 messages of an eighth of the buffer, at 100 GB/s, and their latency
    ring = 14 * (1000 + gradients["in_bytes_after"] / 8 / 100)
    assert gradients["transfer_after_ns"] == pytest.approx(ring, rel=1e-3)
    assert len(list(files.glob("workload.*.et"))) == 16
    groups = json.loads((files / "comm_groups.json").read_text())
    assert [0, 2, 4, 6, 8, 10, 12, 14] in groups.values()
    assert [14, 15] in groups.values()


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--ranks", "5"], "multiple of 2"),
        (["--tensor-parallel", "4"], "every kernel of a layer"),
        (["--ranks", "8", "--role", "9"], "--role GROUP=data"),
        (["--ranks", "8", "--set", "network.0.bandwidth=3"], "--machine"),
    ],
)
def test_what_cannot_be_answered_is_said_in_a_sentence(
    recorded: str, words: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["simulate", recorded, *words, "--quiet"]) == 2
    assert says in capsys.readouterr().err


def test_what_was_not_measured_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = tmp_path / "made"
    assert main(["generate", "collective", "--ranks", "4", "-o", str(made), "--quiet"]) == 0
    assert main(["simulate", str(made), "--ranks", "8", "--quiet"]) == 2
    assert "only recorded runs can be scaled" in capsys.readouterr().err


def test_the_next_command_writes_the_files_of_the_same_question(
    recorded: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "machine.toml").write_text(MACHINE)
    words = [
        "simulate",
        recorded,
        "--machine",
        "machine.toml",
        "--data-parallel",
        "4",
        "--draws",
        "5",
    ]
    assert main(words) == 0
    (proposed,) = (
        line for line in capsys.readouterr().out.splitlines() if line.startswith("Next: ")
    )
    again = shlex.split(proposed)[2:]
    assert sorted(again) == sorted([*words, "-o", "workload/"])
    assert main(again) == 0
    assert len(list((tmp_path / "workload").glob("workload.*.et"))) == 8


def test_one_side_alone_has_no_other_scale(
    recorded: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["simulate", recorded, "--ranks", "8", "--only", "compute"]) == 2
    assert "--only is of the recorded size" in capsys.readouterr().err
