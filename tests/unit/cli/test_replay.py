"""`traceloom replay`: what it prints and writes of a run, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from support.plans import small_plan
from support.reports import check_schema
from traceloom import load
from traceloom.cli import main
from traceloom.workload.replay.comparison import TABLES


@pytest.fixture
def plan(tmp_path: Path) -> str:
    path = tmp_path / "small.plan"
    small_plan().save(path)
    return str(path)


@pytest.mark.torch
def test_a_run_is_printed_and_written(
    plan: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("torch")
    names = ["page.html", "answer.json", "tables/", "replay.py"]
    targets = [
        word for name in names for word in ("-o", str(tmp_path / name) + "/" * name.endswith("/"))
    ]
    capture = tmp_path / "capture"
    assert (
        main(["replay", plan, "--iterations", "2", *targets, "-o", "-", "--record", str(capture)])
        == 0
    )
    printed = capsys.readouterr().out
    assert "A pass took" in printed
    assert "100 % of its ops ran" in printed
    document = json.loads((tmp_path / "answer.json").read_bytes())
    check_schema(document, "replay.schema.json")
    assert document["whole"][0]["pass_count"] == 2
    assert {path.stem for path in (tmp_path / "tables").iterdir()} == set(TABLES)
    assert "<h1>" in (tmp_path / "page.html").read_text(encoding="utf-8")
    assert "aten.mm.default" in (tmp_path / "replay.py").read_text(encoding="utf-8")
    (recorded,) = load(capture, cache=False).traces
    assert recorded.meta.capture is not None
    assert recorded.meta.capture["replay_of"] == "made by hand"
    names_recorded = set(recorded.events["name"])
    assert {"aten::mm", "aten::relu"} <= names_recorded
    assert main(["replay", plan, "--iterations", "2", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["format"] == "traceloom-replay"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--op", "aten::mm"], "cut ops out into a script"),
        (["--plan-only", "-o", "x.html"], "is about what ran"),
        (["--dry-run", "--record", "rec"], "--record is of what runs"),
        (["-o", "links.csv"], "has no table `links`"),
        (["-o", "x.txt"], "does not tell which format"),
    ],
)
def test_options_that_do_not_go_together_are_refused(
    arguments: list[str],
    words: str,
    plan: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["replay", plan, *arguments]) == 2
    assert words in capsys.readouterr().err


def test_scripts_need_no_run(plan: str, tmp_path: Path) -> None:
    script = tmp_path / "mm.py"
    assert (
        main(["replay", plan, "--op", "aten::mm", "--slowest", "1", "-o", str(script), "--quiet"])
        == 0
    )
    text = script.read_text(encoding="utf-8")
    assert text.count("def case_") == 1
    assert "aten.mm.default(t0, t1)" in text


def test_of_a_plan_ranks_alone_are_chosen(plan: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["replay", plan, "--plan-only", "--ranks", "0"]) == 0
    assert main(["replay", plan, "--plan-only", "--ranks", "3"]) == 2
    assert "the plan has no rank 3" in capsys.readouterr().err
    assert main(["replay", plan, "--plan-only", "--scope", "layer"]) == 2
    assert "a plan holds what was chosen" in capsys.readouterr().err
