"""The views of one fixed document, letter by letter.

`document.json` is a report of two ranks with some of everything. After a wanted change of a view, write its files anew
with `UPDATE_GOLDEN=1 python -m pytest tests/golden/report` and look at the difference.
"""

from __future__ import annotations

import io
import json
import os
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from traceloom.report import ReportOptions, build_runs
from traceloom.report.sections import load_extra_sections
from traceloom.report.views.markdown import render as markdown
from traceloom.report.views.terminal import render as terminal, show

HERE = Path(__file__).parent
SCHEMA = HERE.parents[2] / "docs" / "reference" / "report.schema.json"


@pytest.fixture(scope="module")
def document() -> dict[str, Any]:
    return json.loads((HERE / "document.json").read_text(encoding="utf-8"))


def _same(name: str, text: str) -> None:
    path = HERE / name
    if os.environ.get("UPDATE_GOLDEN"):
        path.write_text(text, encoding="utf-8")
    assert text == path.read_text(encoding="utf-8")


def test_the_document_is_valid(document: dict[str, Any]) -> None:
    schema = json.loads(SCHEMA.read_text(encoding="utf-8"))
    jsonschema.Draft202012Validator(schema).validate(document)


@pytest.mark.parametrize("width", [80, 120])
def test_the_terminal_report(document: dict[str, Any], width: int) -> None:
    lines = [line.plain for line in terminal(document, ReportOptions(full=True), width)]
    _same(f"terminal-{width}.txt", "\n".join(lines) + "\n")


def test_the_short_terminal_report(document: dict[str, Any]) -> None:
    _same(
        "terminal-short.txt",
        "\n".join(line.plain for line in terminal(document, ReportOptions(), 80)) + "\n",
    )


def test_the_terminal_report_without_unicode(document: dict[str, Any]) -> None:
    stream = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    show(document, ReportOptions(top=3, full=True), stream)
    stream.flush()
    _same("terminal-ascii.txt", stream.buffer.getvalue().decode("ascii"))  # type: ignore[attr-defined]


def test_the_markdown_report(document: dict[str, Any]) -> None:
    _same("report.md", markdown(document, ReportOptions()))


def test_the_summary_of_several_runs_has_the_same_keys_as_a_report(
    document: dict[str, Any],
) -> None:
    sections = {section.key for section in load_extra_sections()}
    assert set(build_runs([], "nothing", [])) == set(document) | sections | {"findings_ground"}
