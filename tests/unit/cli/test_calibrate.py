"""`traceloom calibrate`: what it prints and writes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from support.documents import check_document
from support.jobs import Recipe, training_job
from traceloom.cli import build_parser, main, outputs
from traceloom.report.documents.predictions import CalibrationDocument
from traceloom.workload.simulate.machine_file import read_machine


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("calibrate") / "run"
    return training_job(Recipe(ranks=2, steps=2, layers=3, delay_us={1: 500})).run().write(folder)


def test_the_machine_of_a_run_is_written_and_read_back(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert (
        main(
            [
                "calibrate",
                str(run),
                "-o",
                str(tmp_path / "machine.toml"),
                "-o",
                str(tmp_path / "fits.json"),
            ]
        )
        == 0
    )
    machine = read_machine(tmp_path / "machine.toml")
    document = json.loads((tmp_path / "fits.json").read_text())
    check_document(document, CalibrationDocument)
    assert document["format"] == "traceloom-calibration"
    assert (machine.ranks, machine.ranks_per_host, machine.device and machine.device.name) == (
        2,
        2,
        "H100 SXM",
    )
    assert [row.count for row in machine.transfers] == [
        row["count"] for row in document["transfers"]
    ]
    assert (
        sum(row.count for row in machine.transfers) == 2 * 3
    )  # an all-reduce of each layer in each step
    assert "machine.toml" in capsys.readouterr().out


def test_the_fits_are_printed(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["calibrate", str(run), "--ranks-per-host", "1"]) == 0
    text = capsys.readouterr().out
    assert "all_reduce" in text
    assert "2 in several" in text
    assert "Next: traceloom calibrate" in text
    assert main(["calibrate", str(run), "--json"]) == 0
    assert {row["span"] for row in json.loads(capsys.readouterr().out)["transfers"]} == {"inside"}


def test_a_run_that_tells_nothing_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    alone = training_job(Recipe(steps=1)).run().write(tmp_path / "alone")
    assert main(["calibrate", str(alone), "-o", str(tmp_path / "machine.toml")]) == 3
    assert "nothing-to-calibrate" in capsys.readouterr().err
    assert not (tmp_path / "machine.toml").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], "calibrate needs recorded runs, or --here"),
        (["run", "--ranks", "2"], "--ranks goes only with --here"),
        (["run", "--max-size", "1MiB"], "--max-size goes only with --here"),
        (["run", "--here"], "a recorded run does not go with --here"),
        (["--here", "--ranks-per-host", "2"], "--ranks-per-host does not go with --here"),
        (["--here", "--no-cache"], "--no-cache does not go with --here"),
    ],
)
def test_runs_and_this_machine_have_options_of_their_own(
    options: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["calibrate", *options]) == 2
    assert message in capsys.readouterr().err


def test_the_proposed_command_means_the_same() -> None:
    args = build_parser(["calibrate"]).parse_args(["calibrate", "--here", "--precision", "5%"])
    assert (
        outputs.format_repeat_command(args, "machine.toml")
        == "traceloom calibrate --here --precision 5% -o machine.toml"
    )
