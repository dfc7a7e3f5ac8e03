"""Findings in every view: first on a terminal of any width, text in the page whatever names say, stable in JSON."""

from __future__ import annotations

from copy import deepcopy
from functools import cache
from typing import Any

import pytest

from support.reports import check_schema
from traceloom.report.document import ReportOptions
from traceloom.report.run import build
from traceloom.report.views.markdown import render as markdown
from traceloom.report.views.page_head import Reasons, render_findings as page
from traceloom.report.views.terminal_findings import (
    render_brief_findings,
    render_findings as terminal,
)
from traceloom.testing import TraceBuilder
from traceloom.trace.session import Session

HOSTILE = "</script><img src=x onerror=alert(1)>\x1b[31m.py(1): sleep"


@cache
def document(only: str | None = None) -> dict[str, Any]:
    trace = TraceBuilder()
    for number in range(60):
        now = 10 + number * 30 + (4_000 if number > 30 else 0)
        trace.op("aten::add", now, 20).launch(
            "cudaLaunchKernel", now + 5, 4, correlation=number + 1
        )
        trace.kernel("elementwise_kernel<int>", now + 12, 4, correlation=number + 1)
    trace.python(HOSTILE, 935, 3_990).step(1, 5, 6_000)
    options = ReportOptions() if only is None else ReportOptions(only=(only,))
    return build(Session((trace.build(),), "made"), options)


def test_the_document_holds_them_as_the_schema_says() -> None:
    check_schema(document())
    slugs = [row["slug"] for row in document()["findings"]]
    assert slugs[0] == "host-pause"
    assert "onerror" in document()["findings"][0]["title"]
    of_time = [row for row in document()["findings"] if row["list"] == "time"]
    assert sum(row["saving_fraction"] for row in of_time) <= 1
    assert document()["findings_ground"]["law"]


@pytest.mark.parametrize("width", [60, 80, 120])
@pytest.mark.parametrize("full", [False, True])
def test_a_terminal_of_any_width_shows_them(width: int, full: bool) -> None:
    lines = [line.plain for line in terminal(document(), width, full=full)]
    assert max(map(len, lines)) <= width
    assert any("[host-pause]" in line for line in lines) or "[host-pause]" in " ".join(lines)
    assert not any("\x1b" in line for line in lines)
    assert ("traceloom explain host-pause" in " ".join(" ".join(lines).split())) == full


def test_names_in_the_page_are_text_and_evidence_leads_to_the_timeline() -> None:
    drawn = page(document(), Reasons(document()["absent"]))
    assert "<img" not in drawn
    assert "\x1b" not in drawn
    assert 'href="#timeline"' in drawn
    assert (
        drawn.count("http")
        == drawn.count('<a href="https://traceloom.readthedocs.io/findings/')
        > 0
    )
    first = document()["findings"][0]["evidence"][0]
    assert f'data-range="{first["start_ns"]}-{first["start_ns"] + first["duration_ns"]}"' in drawn


@pytest.mark.parametrize("width", [60, 120])
def test_other_fixes_for_the_same_time_stand_below_a_finding(width: int) -> None:
    made = deepcopy(document())
    others = ("blocking-sync", "blocking-item", "straggler", "exposed-communication")
    made["findings"][0]["alternatives"] = [
        {"slug": slug, "title": HOSTILE, "alone_ns": 5_000_000} for slug in others
    ]
    check_schema(made)
    for full in (False, True):
        lines = [line.plain for line in terminal(made, width, full=full)]
        assert max(map(len, lines)) <= width
        assert "blocking-item" in " ".join(lines)
        assert not any("\x1b" in line for line in lines)
    drawn = page(made, Reasons(made["absent"]))
    assert "for the same time" in drawn
    assert "<img" not in drawn
    assert "or, for the same time" in markdown(made, ReportOptions())


@pytest.mark.parametrize("width", [60, 80, 120, 200])
def test_frames_that_hold_the_host_stand_in_every_view(width: int) -> None:
    made = deepcopy(document())
    row = made["findings"][0] | {"title": "the host pauses", "alternatives": []}
    frame = {"time_ns": 531_700_000, "share": 0.864, "rank": None, "rank_count": 1}
    frame |= {
        "name": "resize",
        "file": "transformers/models/owlv2/image_processing_owlv2.py",
        "line": 301,
    }
    frame |= {"inside": "zoom_shift", "inside_ns": 528_700_000}
    hostile = frame | {"name": HOSTILE, "file": HOSTILE, "inside": HOSTILE, "time_ns": 1_000_000}
    row["frames"] = [frame, hostile]
    made["findings"] = [
        row,
        row | {"frames": [hostile]},
        row | {"title": f"it pauses at {frame['file']}(301): resize"},
    ]
    check_schema(made)
    for lines in (
        [line.plain for line in terminal(made, width, full=full)] for full in (False, True)
    ):
        assert max(map(len, lines)) <= width
        assert not any("\x1b" in line for line in lines)
        assert "zoom_shift" in " ".join(lines)
    short = [
        line.plain
        for line in render_brief_findings(made["findings"], made["findings_ground"], width)
    ]
    assert max(map(len, short)) <= width
    told = [line.strip() for line in short if "zoom_shift" in line]  # none where the title names it
    assert told == [
        {
            60: "529 ms in zoom_shift, from image_pr…",
            80: "529 ms in zoom_shift, from image_processing_owlv2.py:301",
            120: "532 ms in resize (transformers/models/owlv2/image_processing_owlv2.py:301), mostly zoom_shift",
            200: "532 ms in resize (transformers/models/owlv2/image_processing_owlv2.py:301), mostly zoom_shift",
        }[width]
    ]
    drawn = page(made, Reasons(made["absent"]))
    assert (
        "<code>transformers/models/owlv2/image_processing_owlv2.py:301</code>, mostly <code>zoom_shift"
        in drawn
    )
    assert "<img" not in drawn
    assert "\x1b" not in drawn
    assert "resize (transformers/models/owlv2/image" in markdown(made, ReportOptions()).replace(
        "\\_", "_"
    )


def test_how_to_record_frames_is_told_once_where_there_are_none() -> None:
    made = deepcopy(document())
    said = "Which code holds the host"
    assert said not in page(made, Reasons(made["absent"]))
    made["findings_ground"]["stacks"] = False
    assert page(made, Reasons(made["absent"])).count(said) == 1
    assert (
        sum(
            "--stacks" in line.plain
            for line in terminal(made, 120, full=True)
            if "holds the host" in line.plain
        )
        == 1
    )


def test_only_findings_are_asked_for_by_name_and_left_out_by_others() -> None:
    assert document("findings")["findings"] == document()["findings"]
    assert document("copies")["findings"] == []
    reasons = {row["path"]: row["reason"] for row in document("copies")["absent"]}
    assert "--only" in reasons["findings"]


@pytest.mark.parametrize("width", [60, 80, 120])
def test_a_finding_in_short_ends_with_the_name_of_its_rule(width: int) -> None:
    long = deepcopy(document())
    long["findings"][0]["title"] = "the host spends 4.00 ms outside of operators " * 8
    lines = [
        line.plain
        for line in render_brief_findings(long["findings"], long["findings_ground"], width)
    ]
    named = [number for number, line in enumerate(lines) if line.endswith("… [host-pause]")]
    first = next(number for number, line in enumerate(lines) if "%" in line)
    assert named == [first + 1]
    assert all(len(line) <= width for line in lines)
