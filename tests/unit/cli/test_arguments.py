"""What arguments mean: every kind of value that an option takes, and what is said of a text that is none."""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, strategies as st

from support.fuzzing.trying import captured
from traceloom import cli
from traceloom.cli import VERBS, main, options

UNITS = {"": 1, "k": 10**3, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
TIMES = {"ns": 1, "us": 10**3, "µs": 10**3, "ms": 10**6, "s": 10**9}


@pytest.mark.parametrize(
    ("kind", "text", "value"),
    [
        (options.parse_ranks, "3", (3,)),
        (options.parse_ranks, "0,3, 12", (0, 3, 12)),
        (options.parse_whole_number, "0", 0),
        (options.parse_whole_number, "0012", 12),
        (options.parse_count, "1", 1),
        (options.parse_positive, "1e-3", 0.001),
        (options.parse_positive, "450", 450.0),
        (options.parse_steps, "20..25", (20, 24)),
        (options.parse_steps, "20..21", (20, 20)),
        (options.parse_steps, "7", (7, 7)),
        (options.parse_sections, "kernels", ("kernels",)),
        (options.parse_sections, "critical-path, per_step", ("critical_path", "per_step")),
        (options.parse_size, "64kB", 64_000),
        (options.parse_size, "1MiB", 1_048_576),
        (options.parse_size, "1.5 GiB", 1_610_612_736),
        (options.parse_size, "12", 12),
        (options.parse_size, "2TB", 2 * 10**12),
        (options.parse_instant, "12.5ms", "12500000"),
        (options.parse_instant, "3 s", "3000000000"),
        (options.parse_instant, "peak", "peak"),
        (options.parse_instant, "step 12", "step 12"),
        (options.parse_percentage, "5%", 0.05),
        (options.parse_percentage, " 0.5 % ", 0.005),
        (options.parse_percentage, "250", 2.5),
    ],
)
def test_a_text_means_a_value(kind: Callable[[str], Any], text: str, value: Any) -> None:
    assert kind(text) == pytest.approx(value) if isinstance(value, float) else kind(text) == value


@pytest.mark.parametrize(
    ("kind", "texts"),
    [
        (options.parse_ranks, ["", "a", "1,", ",1", "1-3", "1.5", "1;2"]),
        (options.parse_whole_number, ["", "-1", "+1", "1.0", "١", "1 ", "x"]),
        (options.parse_count, ["", "0", "-1", "1.5", "00", "many"]),
        (options.parse_positive, ["", "0", "-1", "nan", "inf", "-inf", "x"]),
        (options.parse_steps, ["", "5..5", "5..3", "..", "5..", "..5", "a..b", "1...3", "1-3"]),
        (options.parse_size, ["", "B", "1XB", "1 iB", "-1MB", "1,5MB", "MB", "1e3"]),
        (
            options.parse_instant,
            ["", "noon", "step", "step x", "step -1", "5", "5 min", "1e3ms", "-1ms", "peaks"],
        ),
        (options.parse_percentage, ["", "0%", "-5%", "10000%", "nan", "inf", "5%%", "x"]),
    ],
)
def test_a_text_that_means_nothing_is_named_in_a_sentence(
    kind: Callable[[str], Any], texts: list[str]
) -> None:
    for text in texts:
        with pytest.raises(argparse.ArgumentTypeError) as caught:
            kind(text)
        assert str(caught.value).startswith(f"`{text}` ")


@given(st.integers(0, 10**6), st.sampled_from(sorted(UNITS)), st.booleans())
def test_sizes_are_decimal_unless_they_say_binary(number: int, unit: str, binary: bool) -> None:
    if binary and unit:
        power = "kMGT".index(unit.replace("K", "k")) + 1
        assert options.parse_size(f"{number}{unit}iB") == number * 1024**power
    assert (
        options.parse_size(f"{number}{unit}B")
        == options.parse_size(f"{number} {unit}b")
        == number * UNITS[unit]
    )


@given(st.integers(0, 10**9), st.sampled_from(sorted(TIMES)))
def test_instants_are_whole_nanoseconds(number: int, unit: str) -> None:
    assert options.parse_instant(f"{number}{unit}") == str(number * TIMES[unit])
    assert options.parse_instant(f"{number}.25{unit}") == str(round((number + 0.25) * TIMES[unit]))


@given(st.integers(-50, 50), st.integers(1, 50))
def test_a_range_of_steps_has_as_many_as_lie_between_its_ends(first: int, count: int) -> None:
    low, high = options.parse_steps(f"{first}..{first + count}")
    assert (low, high - low + 1) == (first, count)


@given(st.floats(1e-6, 99.0))
def test_a_change_in_per_cent_is_a_fraction(fraction: float) -> None:
    assert math.isclose(options.parse_percentage(f"{100 * fraction!r} %"), fraction)


# -- every verb ---------------------------------------------------------------------------------------------------


def parsers(verb: str) -> dict[str, argparse.ArgumentParser]:
    """The words of a command -> its parser: of the verb, and of each action where it has some."""
    own = next(
        a for a in cli.build_parser([verb])._actions if isinstance(a, argparse._SubParsersAction)
    ).choices[verb]
    inner = next((a for a in own._actions if isinstance(a, argparse._SubParsersAction)), None)
    return {verb: own} | {
        f"{verb} {name}": parser for name, parser in (inner.choices.items() if inner else ())
    }


COMMANDS = [command for verb in VERBS for command in parsers(verb)]


def arguments(command: str) -> list[argparse.Action]:
    """Its own, not those of its actions."""
    own = parsers(command.partition(" ")[0])[command]
    return [action for action in own._actions if not isinstance(action, argparse._SubParsersAction)]


def help_of(command: str) -> str:
    with captured() as (out, _):
        assert main([*command.split(), "--help"]) == 0
    return out.getvalue().decode()


@pytest.mark.parametrize("command", COMMANDS)
def test_every_option_is_explained_in_words(command: str) -> None:
    shown = help_of(command)
    for action in arguments(command):
        if action.help == argparse.SUPPRESS:
            continue
        assert action.help, action.dest
        for option in action.option_strings:
            assert option in shown


@pytest.mark.parametrize("command", COMMANDS)
def test_help_fits_the_terminal_and_names_every_option_once(
    command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    shown = help_of(command)
    assert all(len(line) <= 110 for line in shown.splitlines())
    every = [option for action in arguments(command) for option in action.option_strings]
    assert len(set(every)) == len(every)
    assert all(re.fullmatch(r"-[a-zA-Z]|--[a-z]+(-[a-z]+)*", option) for option in every)


@pytest.mark.parametrize("verb", VERBS)
def test_examples_use_options_that_the_command_has(verb: str) -> None:
    own = parsers(verb)
    for parser in own.values():
        for line in (parser.epilog or "").splitlines():
            if not line.startswith(f"  traceloom {verb} "):
                continue
            command = re.split(r" {2,}|\| ", line.strip())[0].partition(" -- ")[0]
            words = command.split()
            called = " ".join(words[1:3]) if " ".join(words[1:3]) in own else verb
            has = {option for action in arguments(called) for option in action.option_strings}
            for option in re.findall(r"(?<= )--?[a-z][a-z-]*", command):
                assert option in has, line


def test_the_overview_of_the_agent_fits_a_screen_and_every_action_has_an_example(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert len(help_of("agent").splitlines()) <= 32
    for command, parser in parsers("agent").items():
        if command != "agent":
            assert f"traceloom {command}" in (parser.epilog or ""), command
            assert re.search(r"^  then: traceloom ", parser.epilog or "", re.MULTILINE), command


@pytest.mark.parametrize("verb", VERBS)
def test_an_option_that_is_unknown_is_refused_with_the_nearest_one(verb: str) -> None:
    known = [
        option
        for action in cli.list_actions(cli.build_parser([verb]))
        for option in action.option_strings
        if len(option) > 5
    ]
    if not known or verb == "record":  # what follows there belongs to the recorded program
        return
    positional = (
        ["save", "name", "run"]
        if verb == "baseline"
        else ["bash"]
        if verb == "completion"
        else ["a", "b"]
    )
    misspelt = (
        known[-1][:-2] + known[-1][-1] + known[-1][-2]
        if known[-1][-1] != known[-1][-2]
        else known[-1] + "s"
    )
    for unknown in (misspelt, "--frobnicate"):
        with captured() as (out, err):
            assert main([verb, *positional, unknown]) == 2
        assert out.getvalue() == b""
        said = err.getvalue().decode()
        assert said.startswith("traceloom: ")
        assert "Traceback" not in said


@pytest.mark.parametrize(
    "verb", [verb for verb in VERBS if verb not in ("explain", "record", "serve")]
)
def test_a_verb_without_its_arguments_says_which_it_needs(verb: str) -> None:
    with captured() as (out, err):
        code = main([verb])
    assert (code, out.getvalue()) == (2, b"")
    first, *_, last = err.getvalue().decode().splitlines()
    assert "required" in first or "needs" in first
    assert last.startswith("see traceloom explain wrong-usage")
