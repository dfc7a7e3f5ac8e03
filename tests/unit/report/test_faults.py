"""A section that fails takes nothing else with it."""

from __future__ import annotations

from copy import copy
from typing import Any

import pytest

from traceloom.errors import InvariantError
from traceloom.report import ReportOptions, build, findings, run as module
from traceloom.report.sections import load_section, select_sections
from traceloom.report.views.terminal import render
from traceloom.testing import TraceBuilder
from traceloom.trace.session import Session


def made() -> Session:
    return Session((TraceBuilder(rank=0).step(0, 0, 100).op("aten::mm", 0, 50).build(),), "made")


def fails(error: Exception) -> Any:
    def fail(*_: object) -> None:
        raise error

    return fail


@pytest.mark.sampled(2)
@pytest.mark.parametrize("at", ["measure", "build"])
@pytest.mark.parametrize(
    "error",
    [ZeroDivisionError("of nothing"), InvariantError("they do not add up", slug="invariant")],
)
def test_a_section_that_fails_is_null_with_its_error(
    monkeypatch: pytest.MonkeyPatch, at: str, error: Exception
) -> None:
    session = made()
    whole = build(session)
    broken = copy(load_section("threads"))
    monkeypatch.setattr(broken, at, fails(error))
    monkeypatch.setattr(
        module, "load_section", lambda key: broken if key == "threads" else load_section(key)
    )
    monkeypatch.setattr(
        module,
        "select_sections",
        lambda only: tuple(module.load_section(one.key) for one in select_sections(only)),
    )
    document = build(session)
    assert document["threads"] is None
    [reason] = [entry["reason"] for entry in document["absent"] if entry["path"] == "threads"]
    assert reason.startswith(f"could not be worked out: {type(error).__name__}")
    [notice] = [notice for notice in document["notices"] if notice["slug"] == "section-failed"]
    assert "threads could not be worked out" in notice["message"]
    assert {key for key in whole if whole[key] != document[key]} == {"threads", "absent", "notices"}
    shown = "\n".join(line.plain for line in render(document, ReportOptions(full=True), 80))
    assert "section-failed" in shown
    with pytest.raises(type(error)):
        build(session, ReportOptions(only=("threads",)))


def test_findings_that_fail_leave_the_report(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(findings, "build_findings", fails(IndexError("none left")))
    document = build(made())
    assert (document["findings"], document["findings_ground"]) == ([], None)
    assert "section-failed" in {notice["slug"] for notice in document["notices"]}
    with pytest.raises(IndexError):
        build(made(), ReportOptions(only=("findings",)))
