"""The machinery of sections: declared once, drawn by every view."""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from traceloom import analyze
from traceloom.errors import UsageError
from traceloom.report import ReportOptions, build
from traceloom.report.sections import load_extra_sections, select_sections
from traceloom.report.views.markdown import render as markdown
from traceloom.report.views.page import render_report_page as page
from traceloom.report.views.terminal import render as terminal
from traceloom.testing import TraceBuilder
from traceloom.trace.columns import COLUMNS, find_column
from traceloom.trace.columns.declare import UNITS
from traceloom.trace.session import Session

ROOT = Path(__file__).resolve().parents[4]
EVIL = "</script><b>kernel\x1b[31m"


def _session() -> Session:
    """Three steps of 100 µs; the kernel takes 10, 20 and 30 µs, in the last step another runs once."""
    builder = TraceBuilder()
    for step in range(3):
        start = 100.0 * step
        builder.step(step, start, 100)
        builder.op("aten::mm", start + 5, 20)
        builder.launch("cudaLaunchKernel", start + 10, 5, correlation=step + 1)
        builder.kernel(EVIL, start + 20, 10.0 * (step + 1), correlation=step + 1)
    builder.launch("cudaLaunchKernel", 240, 5, correlation=9)
    builder.kernel("other", 260, 4, correlation=9)
    return Session((builder.build(),), "made")


def test_keys_are_unique_and_spelled_like_options() -> None:
    keys = [section.key for section in load_extra_sections()]
    assert len(set(keys)) == len(keys)
    assert all(key.replace("_", "").isalnum() and key == key.lower() for key in keys)


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(ROOT / "scripts")
    return importlib.import_module("report_schema")


def test_the_published_schemas_and_the_page_of_columns_are_up_to_date(script: ModuleType) -> None:
    for path, text in script.files().items():
        assert path.read_text(encoding="utf-8") == text, "run python scripts/report_schema.py"


@pytest.mark.parametrize("name", ["report.schema.json", "memory.schema.json"])
def test_every_property_of_the_published_schemas_is_described(
    script: ModuleType, name: str
) -> None:
    schema = json.loads((ROOT / "docs" / "reference" / name).read_text(encoding="utf-8"))
    short = [
        f"{path}.{key}"
        for path, properties in script.objects(schema)
        for key, shape in properties.items()
        if len(shape.get("description", "").split()) < 2
    ]
    assert short == []


def test_the_units_of_columns_are_those_of_their_values(script: ModuleType) -> None:
    schema = script.with_sections(
        json.loads((ROOT / "docs" / "reference" / "report.schema.json").read_text("utf-8"))
    )
    for path, properties in script.objects(schema):
        for key, shape in properties.items():
            types = shape.get("type")
            if script.is_value(shape) and types is not None and "array" not in types:
                numeric = find_column(key, path).unit not in ("text", "name")
                assert numeric == any(name in types for name in ("integer", "number")), (
                    f"{path}.{key}"
                )


def test_the_most_specific_declaration_of_a_column_counts() -> None:
    assert find_column("bytes", "copies.kinds").meaning == "bytes of those whose size is recorded"
    assert find_column("rank", "copies.kinds") == find_column("rank")
    assert all(
        declared.unit in UNITS and declared.title and declared.meaning
        for declared in COLUMNS.values()
    )
    with pytest.raises(KeyError, match="no column `nothing`"):
        find_column("nothing", "copies.kinds")


def test_every_section_is_described(check_words: Callable[[str], bool]) -> None:
    missing = [section.key for section in load_extra_sections() if not check_words(section.key)]
    assert missing == [], "describe them in docs/reference/report-json.md"


@pytest.fixture
def check_words() -> Callable[[str], bool]:
    text = (ROOT / "docs" / "reference" / "report-json.md").read_text(encoding="utf-8")
    return lambda key: f"`{key}`" in text


def test_only_leaves_the_others_out_and_says_so() -> None:
    document = build(_session(), ReportOptions(only=("core",)))
    assert all(document[section.key] is None for section in load_extra_sections())
    reasons = {entry["path"]: entry["reason"] for entry in document["absent"]}
    assert all(
        reasons[section.key] == "not asked for (--only)" for section in load_extra_sections()
    )
    assert document["kernels"]


def test_an_unknown_section_is_refused_with_the_known_ones() -> None:
    with pytest.raises(UsageError) as caught:
        select_sections(("kernelz",))
    assert caught.value.slug == "no-such-section"
    assert "per_step" in str(caught.value.hint)


def test_work_per_step_is_exact() -> None:
    found = analyze.work_per_step(_session().traces[0])
    rows = {row["name"]: row for row in found.kernels.to_dicts()}
    evil = rows[EVIL]
    assert (found.steps, evil["min_total_ns"], evil["max_total_ns"], evil["step_count"]) == (
        3,
        10_000,
        30_000,
        3,
    )
    assert evil["mean_total_ns"] * 3 == 60_000
    other = rows["other"]
    assert (other["min_total_ns"], other["max_total_ns"], other["step_count"]) == (0, 4_000, 1)
    assert other["mean_call_count"] == pytest.approx(1 / 3)
    assert found.operators.to_dicts()[0]["mean_self_ns"] == 20_000


@pytest.mark.parametrize("width", [60, 80, 140])
def test_a_section_in_full_fits_the_terminal(width: int) -> None:
    options = ReportOptions(only=("per_step",))
    lines = [line.plain for line in terminal(build(_session(), options), options, width)]
    assert all(len(line) <= width for line in lines)
    assert any("aten::mm" in line for line in lines)
    assert not any("\x1b" in line for line in lines)


def test_the_full_report_says_one_line_for_each_section() -> None:
    lines = [line.plain for line in terminal(build(_session()), ReportOptions(full=True), 80)]
    assert any(line.startswith(" per_step") for line in lines)
    assert "**Per step**" in markdown(build(_session()), ReportOptions())


def test_names_show_as_text_in_the_page() -> None:
    session = _session()
    document: dict[str, Any] = build(session)
    shown = page(document, session)
    section = shown[shown.index('id="per-step"') :]
    assert "&lt;/script&gt;&lt;b&gt;kernel" in section
    assert "</script><b>" not in shown
