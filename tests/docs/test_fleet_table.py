"""What one may want to know of a fleet, as the documentation lists it: every page and command that it names is there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

pytest.importorskip("htpy", reason="the extra `fleet` is not installed")

from traceloom.cli import build_parser
from traceloom.fleet.portal.app import PAGES

PAGE = Path(__file__).resolve().parents[2] / "docs" / "concepts" / "fleet.md"


def test_every_page_and_command_of_the_table_is_there(capsys: pytest.CaptureFixture[str]) -> None:
    text = PAGE.read_text(encoding="utf-8").partition("## What one may want to know\n")[2]
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in text.splitlines()
        if line.startswith("| ")
    ]
    assert len(rows) > 25
    titles = {page.title for page in PAGES}
    for _, pages, how in rows[1:]:
        named = [name for name in re.sub(r"\*[^*]*\*", "", pages).split(", ") if name.strip(", ")]
        assert {name.strip(", ") for name in named} <= titles | {
            "CSV and JSON below each table",
            "its report",
        }, pages
        for command in re.findall(r"`traceloom ([^`]*)`", how):
            words = command.split()
            verb = words[:2] if words[0] == "fleet" else words[:1]
            with pytest.raises(SystemExit) as left:
                build_parser().parse_args([*verb, "--help"])
            assert left.value.code == 0, command
            shown = capsys.readouterr().out
            assert all(word in shown for word in words if word.startswith("--")), command
