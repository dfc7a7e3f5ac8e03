"""`traceloom record` of commands that cannot be recorded, and values of `traceloom replay` that mean nothing."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest

from traceloom.cli import main, record, replay


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("words", "code", "slug"),
    [
        ([], 2, "no-command"),
        (["--"], 2, "no-command"),
        (["--steps", "5..3", "--", "true"], 2, "bad-steps"),
        (["--steps", "0", "--", "true"], 2, "bad-steps"),
        (["--steps", "x", "--", "true"], 2, "bad-steps"),
        (["--duration", "0", "--", "true"], 2, "bad-time"),
        (["--steps", "3", "--after", "1", "--", "true"], 2, "bad-time"),
        (["-o", "run", "--", "no-such-program-anywhere"], 2, "command-not-found"),
        (["-o", "run", "--", "./not-executable"], 2, "command-not-found"),
        (["-o", "text/run", "--", "true"], 3, "not-writable"),
        (["-o", "full", "--", "true"], 3, "capture-exists"),
    ],
    ids=lambda part: " ".join(part) if isinstance(part, list) else None,
)
def test_what_cannot_be_recorded_is_refused_before_anything_runs(
    words: list[str], code: int, slug: str, here: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (here / "text").write_text("a file")
    (here / "not-executable").write_text("text")
    (here / "full").mkdir()
    (here / "full" / "capture.json").write_text("{}")
    before = {path: path.read_text() for path in here.rglob("*") if path.is_file()}
    assert main(["record", *words]) == code
    printed = capfd.readouterr()
    assert printed.out == ""
    assert f"traceloom explain {slug}" in printed.err
    assert {path: path.read_text() for path in here.rglob("*") if path.is_file()} == before


def test_the_exit_code_of_a_command_is_its_own_and_its_words_pass(
    here: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    program = "import sys; print('out', sys.argv[1:]); print('err', file=sys.stderr); sys.exit(7)"
    words = ["--steps", "3", "--", "-o", "x"]
    assert (
        main(["record", "-o", "run", "--quiet", "--", sys.executable, "-c", program, *words]) == 7
    )
    printed = capfd.readouterr()
    assert printed.out == f"out {words}\n", (
        "what looks like options behind the command is the command's"
    )
    assert "err\n" in printed.err


@pytest.mark.parametrize("status", [0, 7])
def test_a_command_of_which_nothing_is_recorded_keeps_its_exit_code_unless_told_otherwise(
    status: int, here: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    command = ["-o", "run", "--", sys.executable, "-c", f"import sys; sys.exit({status})"]
    assert main(["record", *command]) == status
    assert "[no-torch]" in capfd.readouterr().err
    assert main(["record", "--fail-without-capture", *command]) == 5
    assert "[no-torch]" in capfd.readouterr().err
    assert list(here.iterdir()) == []


@pytest.mark.parametrize(
    "words",
    [["--no-shapes"], ["--no-graph-step"], ["--max-memory", "much"], ["--max-memory", "-1"]],
)
def test_options_that_there_are_not_are_refused(
    words: list[str], capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(["record", *words, "--", sys.executable, "-c", "print('ran')"]) == 2
    assert capfd.readouterr().out == ""


@pytest.mark.parametrize(
    ("command", "name"),
    [
        (["python", "train.py", "--out", "x.py"], "traceloom-train-"),
        (["torchrun", "-n", "2", "/a/my model.py"], "traceloom-my-model-"),
        (["/usr/bin/prog"], "traceloom-prog-"),
        (["…"], "traceloom-"),
        (["../../x/y;rm.py"], "traceloom-y-rm-"),
        (["a" * 300], f"traceloom-{'a' * 60}-"),
    ],
)
def test_a_capture_is_called_after_its_script_and_no_two_alike(
    command: list[str], name: str, here: Path
) -> None:
    first = record.choose_output_name(command)
    assert first.startswith(name)
    assert Path(first).name == first, "it stays in this directory"
    (here / first).mkdir()
    second = record.choose_output_name(command)
    assert second != first
    assert not Path(second).exists()


@pytest.mark.parametrize(
    ("kind", "text", "value"),
    [
        (replay.parse_factor, "2", Fraction(2)),
        (replay.parse_factor, "x2", Fraction(2)),
        (replay.parse_factor, "1/2", Fraction(1, 2)),
        (replay.parse_factor, "0.25", Fraction(1, 4)),
        (replay.validate_scale, "192=2", "192=2"),
        (replay.validate_scale, "7=1/3", "7=1/3"),
        (replay.validate_repeat, "blocks.3=8", "blocks.3=8"),
        (replay.validate_repeat, "a=b=2", "a=b=2"),
    ],
)
def test_sizes_of_a_replay_mean_a_value(kind: Callable[[str], Any], text: str, value: Any) -> None:
    assert kind(text) == value


@pytest.mark.parametrize(
    ("kind", "texts"),
    [
        (replay.parse_factor, ["", "0", "-1", "x", "1/0", "nan", "inf", "2x", "1e30"]),
        (
            replay.validate_scale,
            ["", "192", "=2", "0=2", "192=0", "a=2", "192=", "1.5=2", "192=2=3"],
        ),
        (replay.validate_repeat, ["", "8", "blocks=0", "blocks=x", "blocks=", "=8", "blocks=1.5"]),
    ],
    ids=["factor", "scale", "repeat"],
)
def test_sizes_that_mean_nothing_are_refused(kind: Callable[[str], Any], texts: list[str]) -> None:
    for text in texts:
        with pytest.raises(argparse.ArgumentTypeError) as caught:
            kind(text)
        assert str(caught.value).startswith("`"), text
