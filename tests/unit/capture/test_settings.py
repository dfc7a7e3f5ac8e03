"""The options of a recording."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from traceloom.capture.settings import Settings, check_times, parse_settings, parse_steps
from traceloom.cli import main
from traceloom.cli.record import add_options, choose_output_name, run
from traceloom.errors import InputError, OutputError, UsageError


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (None, (None, None)),
        ("20..25", (20, 5)),
        (" 0 .. 1 ", (0, 1)),
        ("7", (3, 7)),
        (2, (3, 2)),
        (range(4, 6), (4, 2)),
    ],
)
def test_a_choice_of_steps_is_read(given: object, expected: object) -> None:
    assert parse_steps(given) == expected


@pytest.mark.parametrize(
    "given", ["", "a..b", "5..5", "6..5", "1..2..3", "-1", 0, range(0, 9, 2), "9" * 30]
)
def test_a_choice_of_steps_that_cannot_be_is_refused(given: object) -> None:
    with pytest.raises(UsageError) as caught:
        parse_steps(given)
    assert caught.value.slug == "bad-steps"


@pytest.mark.parametrize(
    "given",
    [
        (-1, None, None),
        (None, 0, None),
        (None, float("nan"), None),
        (1, None, "3"),
        (None, float("inf"), None),
    ],
)
def test_a_time_that_cannot_be_is_refused(given: tuple[float, float, str]) -> None:
    with pytest.raises(UsageError) as caught:
        check_times(*given)
    assert caught.value.slug == "bad-time"


def test_settings_survive_the_environment_variable() -> None:
    settings = Settings("/a b/ü", first_step=2, step_count=3, stacks=True)
    assert parse_settings(settings.to_json()) == settings


@pytest.mark.parametrize("text", ['{"version":2,"directory":"run"}', '{"directory":"run"}'])
def test_settings_of_another_version_are_refused(text: str) -> None:
    with pytest.raises(InputError) as refused:
        parse_settings(text)
    assert refused.value.slug == "other-version"


def test_the_default_directory_is_named_after_the_script() -> None:
    assert choose_output_name(["torchrun", "-n", "2", "a/b/train gpt.py", "--x"]).startswith(
        "traceloom-train-gpt-2"
    )
    assert choose_output_name(["/bin/serve", "--port", "1"]).startswith("traceloom-serve-2")


def parse(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser("traceloom")
    add_options(parser)
    return parser.parse_args(words)


def test_the_command_keeps_its_own_options_and_must_be_there() -> None:
    assert parse("-o", "x", "--", "python", "t.py", "--steps", "3", "--", "-q").command[-5:] == [
        "t.py",
        "--steps",
        "3",
        "--",
        "-q",
    ]
    assert parse("python", "t.py", "-q").quiet is False
    with pytest.raises(UsageError) as caught:
        run(parse("-q", "--"))
    assert caught.value.slug == "no-command"


def test_the_help_has_an_example_and_fits_the_screen(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["record", "--help"]) == 0
    shown = capsys.readouterr().out
    assert "traceloom record --" in shown
    assert len(shown.splitlines()) <= 45


def test_a_directory_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OutputError) as caught:
        run(parse("-o", str(tmp_path / "file" / "run"), "--", "python", "-c", "1"))
    assert caught.value.slug == "not-writable"
