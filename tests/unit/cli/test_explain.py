"""`traceloom explain`: every name that the program shows can be looked up where the program is installed."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from traceloom.cli import explain, main
from traceloom.errors import DOCUMENTATION
from traceloom.findings import RULES
from traceloom.workload.chakra.validation_rules import RULES as VALIDATION_RULES

ROOT = Path(__file__).parents[3]
NAMES = [entry.slug for entry in explain.load_explanations()]


def test_findings_messages_and_rules_of_validation_are_all_there() -> None:
    assert {rule.slug for rule in RULES} <= set(NAMES)
    assert set(VALIDATION_RULES) <= set(NAMES)
    assert {"not-a-trace", "unknown-verb", "cut-gzip"} <= set(NAMES)


@pytest.mark.parametrize("name", ["data-starved", "no-traces", "dependency-cycle"])
def test_a_name_is_explained_with_its_address(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["explain", name]) == 0
    said = capsys.readouterr().out
    assert said.startswith(name)
    assert len(said.split()) > 20
    assert said.rstrip().endswith((f"/findings/{name}/", f"/#{name}"))
    assert main(["explain", name, "-q"]) == 0
    assert DOCUMENTATION not in capsys.readouterr().out.splitlines()[-1]


def test_a_name_of_a_finding_and_a_notice_gives_both(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "profiler-overhead"]) == 0
    assert re.findall(r"^profiler-overhead  (.*)", capsys.readouterr().out, re.MULTILINE) == [
        "finding",
        "message",
    ]


def test_a_family_of_names_is_explained_by_any_of_them(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "broken-nesting"]) == 0
    assert "law" in capsys.readouterr().out


def test_a_misspelt_name_gets_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "data-starvd"]) == 2
    assert "did you mean `data-starved`?" in capsys.readouterr().err


def test_without_a_name_all_are_listed_on_one_line_each(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["explain"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [
        name for name in NAMES if not any(line.startswith(f"  {name} ") for line in lines)
    ] == []
    assert max(map(len, lines)) <= 80


def test_addresses_lead_to_pages_of_the_documentation() -> None:
    for entry in explain.load_explanations():
        for address in (
            entry.url,
            *re.findall(rf"\(({re.escape(DOCUMENTATION)}[^)]*)\)", entry.text),
        ):
            page = urlsplit(address).path.strip("/")
            assert any(
                (ROOT / "docs" / name).is_file() for name in (f"{page}.md", f"{page}/index.md")
            ), address
        assert ".md)" not in entry.text


def test_the_texts_go_into_the_wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What pyproject.toml copies is all that is read."""
    included = re.findall(
        r'^"(docs/[^"]+)" = "traceloom/([^"]+)"$',
        (ROOT / "pyproject.toml").read_text(),
        re.MULTILINE,
    )
    assert included
    for source, target in included:
        place = tmp_path / "traceloom" / target
        place.parent.mkdir(parents=True, exist_ok=True)
        (shutil.copytree if (ROOT / source).is_dir() else shutil.copy)(ROOT / source, place)
    monkeypatch.setattr(explain, "__file__", str(tmp_path / "traceloom" / "cli" / "explain.py"))
    assert [entry.slug for entry in explain.load_explanations()] == NAMES
