"""`traceloom calibrate --here`: what it refuses before anything is measured."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from traceloom.cli import main
from traceloom.workload.replay import measure

pytest.importorskip("torch")


def refused(capsys: pytest.CaptureFixture[str], *options: str) -> tuple[int, str]:
    code = main(["calibrate", "--here", "--device", "cpu", *options])
    return code, capsys.readouterr().err


def test_what_cannot_be_measured_is_refused(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    code, said = refused(capsys, "--backend", "telepathy")
    assert (code, "no-backend" in said, "it has gloo" in said) == (3, True, True)
    code, said = refused(capsys, "--max-size", "1B")
    assert (code, "below 1,024 bytes" in said) == (2, True)
    code, said = refused(capsys, "--device", "abacus")
    assert (code, "no-device" in said, "cpu" in said) == (3, True, True)
    taken = tmp_path / "machine.toml"
    taken.touch()
    code, said = refused(capsys, "-o", str(taken))
    assert (code, "file-exists" in said) == (3, True)


def test_ranks_of_a_launcher_are_its_own(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in {
        "RANK": "3",
        "WORLD_SIZE": "8",
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": "1",
    }.items():
        monkeypatch.setenv(name, value)
    assert measure.launched() == (3, 8, 8)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert measure.launched() == (3, 8, 4)
    code, said = refused(capsys, "--ranks", "2")
    assert (code, "the launcher has started 8" in said) == (2, True)


def test_without_torch_there_is_nothing_to_measure_with(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(measure, "find_spec", lambda name: None if name == "torch" else find(name))
    code, said = refused(capsys)
    assert (code, "no-torch" in said) == (3, True)
