"""Which format a name means, what `-` means, and what a hint proposes."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from support.fuzzing.seeds import trace
from support.fuzzing.trying import captured
from traceloom.cli import VERBS, main
from traceloom.cli.outputs import detect_format
from traceloom.errors import UsageError
from traceloom.report.views.files import FORMATS

ENDINGS = {ending: form for form in FORMATS for ending in form.endings}


@pytest.mark.parametrize(
    "name", ["a.json", "A.JSON", "a.html", "a.htm", "a.md", "a.perfetto.json", "a.perfetto.json.gz"]
)
def test_the_longest_ending_tells_the_format(name: str) -> None:
    ending = max((ending for ending in ENDINGS if name.lower().endswith(ending)), key=len)
    assert detect_format(Path(name), ENDINGS) is ENDINGS[ending]


@pytest.mark.parametrize("name", ["a", "a.txt", "a.json.gz", "json", "a.xlsx"])
def test_other_endings_are_refused_with_those_there_are(name: str) -> None:
    with pytest.raises(UsageError) as caught:
        detect_format(Path(name), ENDINGS)
    assert ".perfetto.json.gz" in caught.value.hint


def test_a_directory_is_a_name_without_ending_or_with_a_slash_or_one_that_is_there(
    tmp_path: Path,
) -> None:
    (tmp_path / "there.et").mkdir()
    for name in ("out", "out.et/", str(tmp_path / "there.et")):
        assert detect_format(name, {".et": "file"}, directory="directory") == "directory"
    assert detect_format("out.et", {".et": "file"}, directory="directory") == "file"


def test_standard_output_has_the_answer_beside_files(tmp_path: Path) -> None:
    source = str(trace().write(tmp_path / "one.json"))
    options = ["--no-cache", "--quiet"]
    for verb in (["report", source], ["whatif", source, "--set", "kernels * 0.5"]):
        with captured() as (plain, _):
            assert main([*verb, *options]) == 0
        with captured() as (beside, _):
            assert main([*verb, *options, "-o", "-", "-o", str(tmp_path / f"{verb[0]}.md")]) == 0
        assert beside.getvalue() == plain.getvalue() != b""
        assert (tmp_path / f"{verb[0]}.md").exists()


@pytest.mark.parametrize(
    "arguments",
    [
        ["link", "one.json", "-o", "-"],
        ["generate", "pipeline", "-o", "-"],
        ["convert", "a.graph", "-"],
    ],
)
def test_graphs_and_directories_do_not_go_to_standard_output(
    arguments: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(arguments) == 2
    assert "`-` is standard output" in capsys.readouterr().err
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize("output", ["out", "out.json", "out.v2"])
@pytest.mark.parametrize(
    "verb", [["generate", "pipeline"], ["anonymize", "one.json", "--key", "new.key"]]
)
def test_a_place_that_is_taken_is_refused_before_any_work(
    verb: list[str],
    output: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    trace().write(tmp_path / "one.json")
    Path(output).mkdir()
    (Path(output) / "diary.txt").touch()
    for force, problem in (
        ([], "exists already"),
        (["--force"], "holds other things, as diary.txt"),
    ):
        assert main([*verb, "-o", output, *force]) == 3
        assert problem in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["one.json", output]


@pytest.mark.parametrize(
    ("arguments", "proposed"),
    [
        (["reprot"], "`report`"),
        (["report", "x", "--no-cahce"], "`--no-cache`"),
        (["diff", "x", "y", "--fail_if=1"], "`--fail-if`"),
        (["report", "{trace}", "--only", "roofilne"], "`roofline`"),
        (["generate", "collective", "--schedule", "x", "-o", "y"], ""),
        (["generate", "collective", "--algorithm", "rings", "-o", "y"], "`ring`"),
    ],
)
def test_the_nearest_name_is_proposed(
    arguments: list[str], proposed: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = str(trace().write(tmp_path / "one.json"))
    assert main([word.replace("{trace}", source) for word in arguments]) == 2
    hint = capsys.readouterr().err.splitlines()[1]
    assert hint.startswith(f"hint: did you mean {proposed}? " if proposed else "hint: ")
    assert ("did you mean" in hint) == bool(proposed)


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_knows_verbs_options_and_sections(
    shell: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["completion", shell]) == 0
    script = capsys.readouterr().out
    for word in (*VERBS, "fail-if", "critical_path"):
        assert word in script


def test_bash_takes_its_script(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", "bash"]) == 0
    script = capsys.readouterr().out
    asked = "\nCOMP_WORDS=(traceloom repo) COMP_CWORD=1; _shtab_traceloom; echo ${COMPREPLY[@]}"
    done = subprocess.run(
        ["bash"], input=script + asked, capture_output=True, text=True, check=False
    )
    assert done.stdout.split() == ["report"], done.stderr


@pytest.mark.parametrize("ending", ["html", "htm", "HTM", "json", "JSON"])
@pytest.mark.parametrize(
    "verb",
    [
        ["report"],
        ["memory"],
        ["diff", "there.json"],
        ["diff", "there.json", "--fail-if", "idle > 3%"],
        ["whatif", "--set", "kernels * 2"],
    ],
    ids=" ".join,
)
def test_pages_and_documents_of_all_verbs_have_the_same_endings(
    verb: list[str],
    ending: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main([verb[0], "missing.json", *verb[1:], "-o", f"answer.{ending}"]) == 3
    assert "missing.json" in capsys.readouterr().err, "the ending is known, the input is not there"
    assert not any(tmp_path.iterdir())
