"""The sections about communication and about several ranks, on made jobs and on hostile names."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from support.jobs import ParallelRecipe, SlowRank, parallel_job
from support.reports import check_schema
from traceloom import analyze
from traceloom.analyze.matched_collectives import match_collectives
from traceloom.report import ReportOptions, build
from traceloom.report.figure import draw_heat_map, pick_block_character
from traceloom.report.sections import load_extra_sections
from traceloom.report.views.markdown import render as markdown
from traceloom.report.views.page import render_report_page as page
from traceloom.report.views.terminal import render as terminal
from traceloom.testing import TraceBuilder
from traceloom.trace.session import Session

KEYS = (
    "collectives",
    "groups",
    "rank_matrix",
    "across_ranks",
    "slow_steps",
    "imbalance",
    "pipeline",
)


@pytest.fixture(scope="module")
def job() -> Session:
    recipe = ParallelRecipe(
        data=2, tensor=2, pipeline=2, microbatches=2, steps=2, faults=(SlowRank(3, 1.5),)
    )
    return Session(
        tuple(builder.build() for builder in parallel_job(recipe).run().traces()), "made"
    )


def document(session: Session, **options: Any) -> dict[str, Any]:
    made = build(session, ReportOptions(only=KEYS, **options))
    check_schema(made)
    return made


def shown(made: dict[str, Any]) -> str:
    """The terminal's text, without line breaks inside sentences."""
    lines = terminal(made, ReportOptions(only=KEYS), 120)
    return " ".join(" ".join(line.plain for line in lines).split())


def test_every_view_names_the_culprit(job: Session) -> None:
    made = document(job)
    assert "goes back to rank 3" in made["across_ranks"]["sentence"]
    for text in (shown(made), markdown(made, ReportOptions(only=KEYS)), page(made, job)):
        assert "goes back to rank 3" in text
        assert "it computed longer" in text
    assert "Why ranks were late" in shown(made)
    assert "Why ranks were late" in page(made, job)


def test_sums_of_the_document_close(job: Session) -> None:
    made = document(job)
    across = made["across_ranks"]
    assert sum(row["wait_ns"] for row in across["ranks"]) == across["wait_ns"]
    assert sum(row["blame_ns"] for row in across["ranks"]) == across["wait_ns"]
    assert sum(row["waited_ns"] for row in across["reasons"]) == pytest.approx(
        across["wait_ns"], rel=0.01
    )
    summary = made["collectives"]["summary"]
    assert sum(row["count"] for row in summary) == made["collectives"]["call_count"]
    assert sum(row["total_ns"] for row in summary) == across["collective_ns"]
    for row in made["pipeline"]["steps"]:
        assert row["compute_ns"] + row["other_ns"] + row["bubble_ns"] == row["window_ns"]


def test_pictures_hold_a_cell_per_rank_and_step(job: Session) -> None:
    made = document(job)
    by_key = {section.key: section for section in load_extra_sections()}
    heat = by_key["across_ranks"].picture(made["across_ranks"])
    assert heat.count("<use") == 8 * 2
    assert "rank 3, step 1: others waited" in heat
    matrix = by_key["rank_matrix"].picture(made["rank_matrix"])
    assert matrix.count("<use") == len(made["rank_matrix"]["cells"]) == 8 * 3


def test_one_rank_says_why_there_is_nothing_to_compare(job: Session) -> None:
    made = document(job.of_rank(3))
    assert made["across_ranks"] is None
    assert made["imbalance"] is None
    reasons = {row["path"]: row["reason"] for row in made["absent"]}
    assert "only one rank" in reasons["across_ranks"]
    assert "collectives" in shown(made).lower()


def test_a_peak_of_the_users_stands_against_every_group(job: Session) -> None:
    rows = document(job, link_peak=25.0)["collectives"]["summary"]
    for row in rows:
        assert row["link"] == "given"
        assert row["link_fraction"] == pytest.approx(row["bus_byte_rate"] / 25e9)


def test_names_from_strangers_are_escaped() -> None:
    evil = "</script><b>\x1b[31m"
    traces = []
    for rank in range(2):
        args = TraceBuilder.collective_args("allreduce", evil, 2, 8, "Float") | {"Seq": 0}
        builder = TraceBuilder(rank, 2, host=evil + str(rank)).group(evil, [0, 1], description=evil)
        builder.kernel(f"nccl{evil}", 10 + 5 * rank, 50, stream=20, **args)
        traces.append(builder.build())
    session = Session(tuple(traces), "made")
    made = document(session)
    assert made["across_ranks"]["collective_count"] == 1
    assert evil not in page(made, session)
    assert "\x1b[31m" not in shown(made)


def test_a_run_without_communication_is_not_an_error() -> None:
    session = Session(
        (
            TraceBuilder(0, 2).op("aten::mm", 0, 5).build(),
            TraceBuilder(1, 2).op("aten::mm", 0, 9).build(),
        ),
        "made",
    )
    made = document(session)
    assert made["collectives"]["summary"] == []
    assert made["pipeline"] == {"stages": [], "steps": []}
    assert shown(made)


def test_calls_without_a_partner_are_shown_with_the_reason() -> None:
    traces = []
    for rank, kind in enumerate(("allreduce", "broadcast")):
        args = TraceBuilder.collective_args(kind, "0", 4, 8, "Float") | {"Seq": 0}
        traces.append(
            TraceBuilder(rank, 4).kernel("ncclDevKernel_X", 10, 50, stream=20, **args).build()
        )
    text = shown(document(Session(tuple(traces), "made")))
    assert "2 calls found no partner on another recorded rank" in text
    assert "collectives-mismatch" in text
    assert "ranks-missing" in text
    assert "2 of 4 ranks are recorded" in text


def test_blocks_and_maps_of_nothing() -> None:
    assert [pick_block_character(value, 100) for value in (0, 5, 25, 50, 75, 100)] == [
        "·",
        "·",
        "░",
        "▒",
        "▓",
        "█",
    ]
    assert pick_block_character(5, 0) == "·"
    assert draw_heat_map({}, [], [], {}, titles=("a", "b")) == ""
    assert draw_heat_map({(0, 0): 0.0}, [0], [0], {}, titles=("a", "b")) == ""
    assert "<title>&lt;b&gt;</title>" in draw_heat_map(
        {(0, 0): 1.0}, [0], [0], {(0, 0): "<b>"}, titles=("a", "b")
    )


def test_sections_compare_the_ranks_once(job: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    comparison = sys.modules[analyze.across_ranks.__module__]
    asked = []
    monkeypatch.setattr(comparison, "_last_comparison", None)
    monkeypatch.setattr(
        comparison, "match_collectives", lambda parts: asked.append(1) or match_collectives(parts)
    )
    document(job)
    assert len(asked) == 1
