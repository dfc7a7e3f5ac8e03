"""The page of a job of many ranks in a real browser."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import traceloom
from support.jobs import LateHost, ParallelRecipe, SlowRank, parallel_job
from traceloom.report import run
from traceloom.report.views.page import render_report_page

pytestmark = pytest.mark.browser


@pytest.fixture(scope="module")
def page_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("job")
    recipe = ParallelRecipe(
        data=3,
        tensor=2,
        pipeline=2,
        microbatches=2,
        layers=1,
        steps=3,
        stacks=True,
        faults=(SlowRank(7, 1.6), LateHost(3, 9000, steps=(1,))),
    )
    session = traceloom.load(parallel_job(recipe).run().write(folder / "job"), cache=False)
    path = folder / "page.html"
    path.write_text(render_report_page(run.build(session), session), encoding="utf-8")
    return path


@pytest.fixture
def page(open_uri: Callable[..., Any], page_file: Path) -> Any:
    return open_uri(f"{page_file.as_uri()}#timeline", viewport={"width": 1440, "height": 1000})


def timeline(page: Any, expression: str) -> Any:
    return page.evaluate(
        f"(() => {{ const t = document.getElementById('timeline-view').timeline; return {expression}; }})()"
    )


@pytest.mark.thorough
def test_the_timeline_holds_few_ranks_and_one_step(page: Any) -> None:
    ranks = timeline(page, "t.events.ranks.map((rank) => rank.rank)")
    assert 7 in ranks
    assert 2 <= len(ranks) <= 4
    assert all(
        count == 1 for count in timeline(page, "t.events.ranks.map((rank) => rank.steps.length)")
    )
    assert timeline(page, "t.events.count") > 300


def test_it_says_what_is_shown_and_the_command_for_the_rest(page: Any) -> None:
    said = page.locator("#timeline > p.quiet").first.inner_text()
    assert "Of 12 ranks" in said
    assert "rank 7" in said
    command = page.locator("#timeline > p.quiet code").first.inner_text()
    assert command.startswith("traceloom report ")
    assert " --rank " in command
    assert " --steps " in command


def test_all_ranks_stand_in_the_table_of_ranks(page: Any) -> None:
    page.locator("nav").get_by_role("link", name="Overview").click()
    text = page.locator("#breakdown-section").inner_text()
    assert all(f"rank {rank}" in text.lower() or f"\n{rank}\t" in text for rank in range(12))


def test_only_ranks_that_are_shown_can_be_chosen(page: Any) -> None:
    options = page.locator("#rank option").all_inner_texts()
    ranks = timeline(page, "t.events.ranks.map((rank) => rank.rank)")
    assert options == [f"rank {rank}" for rank in ranks]
    page.select_option("#rank", "1")
    assert page.locator("#steps-1").is_visible()


def test_the_step_of_the_table_is_found_in_the_timeline(page: Any) -> None:
    ways = page.locator("#steps-0 tbody tr").get_by_role("button", name="Show it in the timeline")
    assert ways.count() >= 1
    ways.first.click()
    page.wait_for_timeout(50)
    start, end = timeline(page, "t.events.ranks[0].steps[0].slice(2)")
    low, high = timeline(page, "[t.view.from, t.view.to]")
    assert low <= start < end <= high or ways.count() > 1
