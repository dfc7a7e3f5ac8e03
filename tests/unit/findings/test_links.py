"""Slow links: told by other groups of the run, or by what the link is made for; silent where neither is known."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

import traceloom
from support.jobs import ParallelRecipe, SlowLink, parallel_job
from traceloom.findings import Context, Ranked, findings
from traceloom.trace.notice import Finding

RECIPE = ParallelRecipe(data=2, tensor=2, steps=3, layers=2, kernel_us=100)


def ranked(recipe: ParallelRecipe, folder: Path) -> tuple[Ranked, Context]:
    session = traceloom.load(parallel_job(recipe).run().write(folder / "run"))
    return findings(session), Context.of(session)


def of_link(found: Ranked) -> list[Finding]:
    return [one for one in found.time if one.slug == "slow-link"]


@pytest.mark.thorough
def test_one_slow_group_is_measured_against_the_other(tmp_path: Path) -> None:
    found, _ = ranked(replace(RECIPE, faults=(SlowLink(3.0, "tensor", (2, 3)),)), tmp_path)
    (one,) = of_link(found)
    assert "between ranks 2, 3 takes" in one.title
    assert "in the other groups of this run" in one.title
    assert one is found.time[0]


def test_without_a_group_to_compare_with_the_link_itself_is_the_measure(tmp_path: Path) -> None:
    found, _ = ranked(replace(RECIPE, faults=(SlowLink(6.0, "tensor"),)), tmp_path)
    (one,) = of_link(found)
    assert "ranks 0, 1; 2, 3 takes" in one.title
    assert "over NVLink 4 (450 GB/s)" in one.title
    exposed = [other for other in found.time if other.slug == "exposed-communication"]
    # hiding communication saves what a link as fast as it should be would leave of it, not what the slow one takes
    assert all((other.alone_ns or 0) < 0.5 * (one.saving_ns or 0) for other in exposed)


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    "recipe",
    [
        RECIPE,
        replace(
            RECIPE, faults=(SlowLink(2.0, "tensor"),)
        ),  # less than three times may be other traffic
        replace(
            RECIPE, faults=(SlowLink(6.0, "tensor"),), ranks_per_host=1
        ),  # nobody knows the network
        replace(
            RECIPE, faults=(SlowLink(6.0, "tensor"),), tokens=256
        ),  # small: what it takes to begin decides
    ],
    ids=["healthy", "a little slow", "between hosts", "small messages"],
)
def test_nothing_is_said_where_no_measure_is_known_or_all_is_well(
    recipe: ParallelRecipe, tmp_path: Path
) -> None:
    found, _ = ranked(recipe, tmp_path)
    assert of_link(found) == []


@pytest.mark.thorough
def test_a_slow_group_between_hosts_is_still_seen_by_its_peers(tmp_path: Path) -> None:
    slow = replace(RECIPE, faults=(SlowLink(6.0, "tensor", (0, 1)),), ranks_per_host=1)
    (one,) = of_link(ranked(slow, tmp_path)[0])
    assert "ranks 0, 1 takes" in one.title


@pytest.mark.thorough
@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("schedule", "item"),
    [
        ("1f1b", True),
        ("gpipe", False),
        pytest.param("gpipe", True, marks=pytest.mark.thorough),
        pytest.param("1f1b", False, marks=pytest.mark.thorough),
    ],
)
def test_stages_that_are_in_a_step_at_different_times_do_not_straggle(
    schedule: str, item: bool, tmp_path: Path
) -> None:
    piped = ParallelRecipe(
        pipeline=4, steps=3, layers=2, kernel_us=100, microbatches=4, schedule=schedule, item=item
    )
    found, context = ranked(piped, tmp_path)
    assert found.time[0].slug == "pipeline-bubbles"
    assert "straggler" not in {one.slug for one in found.time}
    # the step is as long as it takes until the next one, however far apart the stages are
    assert context.step_ns == pytest.approx(parallel_job(piped).run().window_ns / 3, rel=0.02)
    assert found.time[0].saving_fraction == pytest.approx(0.3, abs=0.03)
