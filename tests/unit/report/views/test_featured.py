"""Which ranks and which step a page about many ranks shows."""

from __future__ import annotations

from typing import Any

import pytest

from support.jobs import ParallelRecipe, StragglingStep, parallel_job
from traceloom.report import run
from traceloom.report.document import ReportOptions
from traceloom.report.views.page import choose, render_report_page
from traceloom.trace.session import Session

CORE = ReportOptions(only=("core",))


def session_of(**more: Any) -> Session:
    run = parallel_job(ParallelRecipe(**{"layers": 1, "steps": 3, **more})).run()
    return Session(tuple(builder.build() for builder in run.traces()), "some job")


@pytest.fixture(scope="module")
def many() -> tuple[Session, dict[str, Any]]:
    session = session_of(data=10, faults=(StragglingStep(1, 2.5, rank=6),))
    return session, run.build(session, CORE)


def test_few_ranks_are_all_shown() -> None:
    session = session_of(data=8)
    assert choose(run.build(session, CORE), session) is None


@pytest.mark.thorough
def test_of_many_ranks_the_slowest_the_median_and_the_fastest_are_shown(
    many: tuple[Session, dict[str, Any]],
) -> None:
    session, made = many
    found = choose(made, session)
    assert found is not None
    assert found.step == 1
    assert found.unusual
    step = [rank["steps"][1]["devices"][0]["compute_ns"] for rank in made["ranks"]]
    assert found.positions[0] == 6 == step.index(max(step))
    assert step.index(min(step)) in found.positions
    assert len(found.positions) == 3
    assert found.roles[6] == "computes longest"


def test_the_rank_that_is_to_blame_comes_first(many: tuple[Session, dict[str, Any]]) -> None:
    session, made = many
    rows = [{"rank": 2, "root_ns": 5, "blame_ns": 7}, {"rank": 3, "root_ns": 9, "blame_ns": 0}]
    blamed = {**made, "across_ranks": {"ranks": rows}}
    found = choose(blamed, session)
    assert found is not None
    assert found.positions[0] == 3
    assert "wait for it most" in found.roles[3]
    assert 6 in found.positions


@pytest.mark.thorough
def test_a_usual_step_is_shown_where_none_is_unusual() -> None:
    session = session_of(data=9)
    made = run.build(session, CORE)
    found = choose(made, session)
    assert found is not None
    assert not found.unusual
    whole = {**made, "critical_path": {"step": 2, "stretches": []}}
    chosen = choose(whole, session)
    assert chosen is not None
    assert chosen.step == 2  # that of the critical path


def test_the_shown_session_is_cut_to_the_step(many: tuple[Session, dict[str, Any]]) -> None:
    session, made = many
    found = choose(made, session)
    assert found is not None
    shown = found.session(session)
    assert [trace.rank for trace in shown.traces] == [
        session.traces[k].rank for k in found.positions
    ]
    for trace in shown.traces:
        trace.check()
        assert trace.steps["step"].to_list() == [1]
    near = found.document(made)
    assert [rank["rank"] for rank in near["ranks"]] == [trace.rank for trace in shown.traces]


def test_the_page_of_many_ranks_says_the_command_for_another(
    many: tuple[Session, dict[str, Any]],
) -> None:
    session, made = many
    page = render_report_page(made, session)
    assert "Of 10 ranks the page shows these event by event: rank 6 (computes longest)" in page
    assert (
        "<code>traceloom report &#x27;some job&#x27; --rank 2 --steps 1 -o out.html</code>" in page
    )
    # the tables of all ranks stand, those of single ones only for the shown
    assert page.count('data-of-rank="0"') >= 1
    assert 'data-of-rank="3"' not in page


@pytest.mark.thorough
def test_twice_the_ranks_make_the_page_hardly_larger() -> None:
    def size(ranks: int) -> int:
        session = session_of(data=ranks, stacks=True)
        return len(render_report_page(run.build(session, CORE), session))

    with_nine, with_eighteen = size(9), size(18)
    assert with_eighteen < 1.15 * with_nine


def test_runs_and_hostile_documents_choose_nothing() -> None:
    assert choose({"ranks": []}, Session((), "nothing")) is None
