"""The manners of the command line: exit codes, one sentence per error, nothing loaded that is not needed."""

from __future__ import annotations

import argparse
import gc
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from traceloom import __version__, cli
from traceloom.cli import VERBS, main
from traceloom.errors import DOCUMENTATION, CheckError, InputError, TraceloomError


def _verb_that(does: object) -> SimpleNamespace:
    """A verb `report` that does what the test wants."""

    def add_options(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("rest", nargs="*")

    def run(args: argparse.Namespace) -> int:
        if isinstance(does, BaseException):
            raise does
        return int(does)

    return SimpleNamespace(DESCRIPTION="", EXAMPLES="", add_options=add_options, run=run)


@pytest.mark.parametrize("arguments", [[], ["--help"], ["-h"], ["help"]])
def test_the_overview_fits_one_screen_and_has_every_verb(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) <= 40
    assert max(map(len, lines)) <= 80
    for verb, summary in VERBS.items():
        assert any(line.split()[:1] == [verb] and summary in line for line in lines)


def test_the_version_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"traceloom {__version__}\n"


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_explains_itself_with_examples(
    verb: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([verb, "--help"]) == 0
    said = capsys.readouterr().out
    assert f"usage: traceloom {verb}" in said
    assert said.count(f"  traceloom {verb} ") >= 2


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_can_be_quiet(verb: str) -> None:
    options = {
        option
        for action in cli.list_actions(cli.build_parser([verb]))
        for option in action.option_strings
    }
    assert {"-q", "--quiet"} <= options


@pytest.mark.parametrize(
    ("arguments", "said", "slug"),
    [
        (["reprot"], "traceloom: `reprot` is not a verb of traceloom", "unknown-verb"),
        (["report"], "traceloom: the following arguments are required: INPUT", "wrong-usage"),
        (
            ["report", "x", "--frobnicate"],
            "traceloom: unrecognized arguments: --frobnicate",
            "wrong-usage",
        ),
        (
            ["report", "x", "--top", "0"],
            "traceloom: argument --top: `0` is not a whole number above 0",
            "wrong-usage",
        ),
        (
            ["report", "x", "--steps", "5..5"],
            "traceloom: argument --steps: `5..5` has no steps",
            "wrong-usage",
        ),
        (
            ["report", "x", "--rank", "a"],
            "traceloom: argument --rank: `a` is not a rank, as 3 or 0,3",
            "wrong-usage",
        ),
        (
            ["report", "x", "-o", "y.xlsx"],
            "traceloom: `y.xlsx` does not tell which format to write",
            "unknown-format",
        ),
        (
            ["report", "x", "-o", "a.md", "-o", "./a.md"],
            "traceloom: one file is named twice by -o",
            "wrong-usage",
        ),
    ],
)
def test_wrong_usage_is_one_sentence_with_a_remedy_and_exits_with_2(
    arguments: list[str], said: str, slug: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    first, hint, see = capsys.readouterr().err.splitlines()
    assert first == said
    assert hint.startswith("hint: ")
    assert see == f"see traceloom explain {slug}, or {DOCUMENTATION}/reference/messages/#{slug}"


@pytest.mark.parametrize(
    ("outcome", "code"),
    [
        (0, 0),
        (InputError("`x` is not a trace", slug="not-a-trace"), 3),
        (CheckError("it got slower", slug="slower"), 5),
        (ZeroDivisionError("oops"), 1),
        (KeyboardInterrupt(), 130),
    ],
)
def test_the_exit_code_tells_whose_fault_it_is(
    outcome: object, code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cli, "import_verb", lambda name: _verb_that(outcome))
    assert main(["report", "x"]) == code
    assert "Traceback" not in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [["--debug", "report"], ["report", "--debug"]])
def test_a_traceback_is_shown_only_with_debug(
    arguments: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cli, "import_verb", lambda name: _verb_that(ZeroDivisionError("oops")))
    assert main(arguments) == 1
    said = capsys.readouterr().err
    assert "Traceback" in said
    assert "ZeroDivisionError: oops" in said


def test_debug_behind_two_dashes_belongs_to_the_recorded_program(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cli, "import_verb", lambda name: _verb_that(ZeroDivisionError("oops")))
    assert main(["report", "--", "--debug"]) == 1
    assert "Traceback" not in capsys.readouterr().err


def test_control_characters_in_an_error_cannot_steer_the_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    error = TraceloomError("bad \x1b[31m\nname", slug="not-a-trace", where="\x07.json")
    monkeypatch.setattr(cli, "import_verb", lambda name: _verb_that(error))
    main(["report", "x"])
    assert capsys.readouterr().err.splitlines()[0] == r"traceloom: bad \x1b[31m\x0aname (\x07.json)"


@pytest.mark.parametrize(
    "arguments", [["--help"], ["--version"], ["record", "--help"], ["report", "--help"]]
)
def test_explaining_loads_neither_polars_nor_rich_nor_torch(arguments: list[str]) -> None:
    code = f"import sys; from traceloom.cli import main; main({arguments!r}); print('loaded:', *sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = set(done.stdout.rpartition("loaded:")[2].split())
    assert not {"polars", "numpy", "rich", "torch"} & loaded


@pytest.mark.sampled(1)
@pytest.mark.parametrize("form", ["--json", "--top 20"])
def test_a_reader_who_stops_reading_is_no_error(shared_data: Path, form: str) -> None:
    trace = shared_data / "critical_path" / "event_sync.json.gz"
    command = (
        f"{sys.executable} -m traceloom report {trace} --no-cache --quiet {form}; echo code $? >&2"
    )
    done = subprocess.run(
        ["bash", "-c", f"({command}) | exec true"], capture_output=True, text=True, check=False
    )
    assert done.stderr == "code 141\n"


@pytest.mark.parametrize(
    ("arguments", "code"), [(["--version"], 0), (["nonsense"], 2), (["report", "no-such-file"], 3)]
)
def test_the_process_ends_with_the_exit_code_and_has_said_all(
    arguments: list[str], code: int
) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "traceloom", *arguments], capture_output=True, text=True, check=False
    )
    assert done.returncode == code
    assert (done.stdout if code == 0 else done.stderr).endswith("\n")


def test_a_name_that_the_output_cannot_spell_is_spelled_in_escapes(tmp_path: Path) -> None:
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "traceloom",
            "generate",
            "collective",
            "-o",
            str(tmp_path / "größe"),
        ],
        env={**os.environ, "PYTHONIOENCODING": "ascii"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "gr\\xf6\\xdfe" in done.stdout


@pytest.mark.parametrize(
    "arguments",
    [
        ["generate", "pipeline", "-o", "there", "--ranks", "x"],
        ["generate", "transformer", "-o", "there", "--tflops", "x"],
        ["report", "trace.json", "--top", "x"],
        ["show", "a.et", "--node", "x"],
    ],
)
def test_a_number_that_is_none_is_named_without_words_of_the_program(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    said = capsys.readouterr().err
    assert "`x` is " in said
    assert "invalid _" not in said


def test_only_the_process_of_the_command_tunes_the_garbage_collector(
    capsys: pytest.CaptureFixture[str],
) -> None:
    before = gc.get_threshold(), gc.get_freeze_count()
    main(["--version"])
    assert (gc.get_threshold(), gc.get_freeze_count()) == before


def test_the_process_ends_with_all_that_was_printed_and_what_libraries_have_to_do_at_the_end() -> (
    None
):
    code = "import atexit, sys; from traceloom.__main__ import console; atexit.register(print, 'the end'); "
    for argument, printed, exit_code in (
        ("--version", f"traceloom {__version__}\n", 0),
        ("nonsense", "", 2),
    ):
        command = [
            sys.executable,
            "-c",
            f"{code} sys.argv = ['traceloom', '{argument}']; console(); print('not here')",
        ]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert (done.returncode, done.stdout) == (exit_code, f"{printed}the end\n")


def test_only_the_users_program_may_start_threads_for_linear_algebra(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("OPENBLAS_NUM_THREADS", "")  # what is set here is undone after the test
    monkeypatch.delenv("OPENBLAS_NUM_THREADS")
    main(["record", "--help"])
    assert "OPENBLAS_NUM_THREADS" not in os.environ
    main(["link", "--help"])
    assert os.environ["OPENBLAS_NUM_THREADS"] == "1"


def test_the_script_and_the_module_are_one_and_the_same() -> None:
    from traceloom.__main__ import console

    project = Path(__file__).parents[3] / "pyproject.toml"
    assert f'traceloom = "{console.__module__}:{console.__name__}"' in project.read_text()
