"""Findings of made jobs with one fault each, against the same job simulated again without it."""

from __future__ import annotations

import itertools
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import polars as pl
import pytest

import traceloom
from support.jobs import Change, LateHost, ParallelRecipe, SlowRank, parallel_job
from support.jobs.planted import Planted, clean_jobs, several_ranks, single_rank
from traceloom.changes import changes
from traceloom.changes.changes import NodeSelection, parse
from traceloom.changes.whatif import whatif
from traceloom.findings import Context, Ranked, findings
from traceloom.graph import calibrate
from traceloom.graph.job import join_ranks
from traceloom.graph.rank import link_rank
from traceloom.trace.session import Session

ALLOWED = 0.10  # of what the fault costs
UNREAL = 0.02  # of a step: what a finding of a clean job may not exceed
FAULTS = (
    "slow loader",
    "sleep",
    "Python in the loop",
    "collection",
    "synchronisation",
    "item",
    "pageable copy",
    "value at the end of a step",
    "Python beside a thread that waits",
    "launches",
    "recomputation",
    "recomputation by a busy host",
    "slow rank",
    "late host",
    "late loader",
    "slow link",
    "slow link of one group",
    "synchronisation per pass",
    "unequal tokens",
    "large shard",
    "exposed collectives",
    "bubbles",
    "bubbles of GPipe",
)
CLEAN = (
    "one process",
    "several streams",
    "a loader in time",
    "data parallel",
    "ranks that never meet",
    "a copy of a hundredth",
    "two ranks",
)


@cache
def cases() -> dict[str, Planted]:
    return {planted.fault: planted for planted in itertools.chain(single_rank(), several_ranks())}


def test_every_planted_fault_and_clean_job_is_tried() -> None:
    assert set(cases()) == set(FAULTS)
    assert set(clean_jobs()) == set(CLEAN)


def loaded(planted: Planted, folder: Path) -> Session:
    return traceloom.load(planted.run.write(folder / "run"))


def sums_hold(found: Ranked, whole_ns: int) -> None:
    savings = [finding.saving_ns or 0 for finding in found.time]
    assert savings == sorted(savings, reverse=True)
    assert min(savings, default=0) >= 0
    assert sum(savings) <= whole_ns


# Others of their kind are tried each time.
SELDOM = (
    "Python in the loop",
    "recomputation by a busy host",
    "slow link of one group",
    "bubbles of GPipe",
    "sleep",
    "collection",
    "pageable copy",
    "late loader",
    "unequal tokens",
    "synchronisation per pass",
)


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    "fault",
    [
        pytest.param(fault, marks=pytest.mark.thorough) if fault in SELDOM else fault
        for fault in FAULTS
    ],
)
def test_a_planted_fault_is_found_first_with_what_leaving_it_out_saves(
    fault: str, tmp_path: Path
) -> None:
    planted = cases()[fault]
    session = loaded(planted, tmp_path)
    found = findings(session)
    sums_hold(found, Context.of(session).whole_ns)
    first = found.time[0]
    assert first.slug == planted.slug, [finding.title for finding in found.time]
    assert first.saving_ns == pytest.approx(planted.cost_per_step_ns, rel=ALLOWED)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("fault", ["late host", "slow rank"])
def test_a_rank_that_comes_late_once_does_not_compute_for_longer(
    fault: str, tmp_path: Path
) -> None:
    first = findings(loaded(cases()[fault], tmp_path)).time[0]
    assert first.slug == "straggler"
    assert ("it computed longer" in first.title) == (fault == "slow rank"), first.title


def test_a_pause_is_named_by_the_thread_that_makes_it(tmp_path: Path) -> None:
    first = findings(loaded(cases()["Python beside a thread that waits"], tmp_path)).time[0]
    assert "write_metrics" in first.title
    assert "threading.py" not in f"{first.title} {first.evidence}"


@pytest.mark.parametrize(
    ("stages", "microbatches", "kernel_us"),
    [
        (2, 2, 100),
        *(pytest.param(*some, marks=pytest.mark.thorough) for some in ((4, 8, 50), (2, 4, 60))),
    ],
)
def test_bubbles_save_what_four_microbatches_per_stage_do(
    stages: int, microbatches: int, kernel_us: float, tmp_path: Path
) -> None:
    recipe = ParallelRecipe(
        pipeline=stages, steps=3, layers=2, kernel_us=kernel_us, microbatches=microbatches
    )
    smaller = replace(
        recipe, microbatches=4 * stages, kernel_us=kernel_us * microbatches / (4 * stages)
    )
    run = parallel_job(recipe).run()
    truth = (run.window_ns - parallel_job(smaller).run().window_ns) / 3
    found = findings(traceloom.load(run.write(tmp_path / "run"))).time
    (bubbles,) = [finding for finding in found if finding.slug == "pipeline-bubbles"]
    # what a stage waits for messages is told from few of them: off by up to a sixth of a small saving
    assert bubbles.saving_ns == pytest.approx(truth, abs=0.02 * run.window_ns / 3)
    assert f"{4 * stages} microbatches" in bubbles.advice


def test_enough_microbatches_are_not_told_to_be_more(tmp_path: Path) -> None:
    recipe = ParallelRecipe(pipeline=2, steps=3, layers=1, kernel_us=60, microbatches=8)
    found = findings(traceloom.load(parallel_job(recipe).run().write(tmp_path / "run"))).time
    (bubbles,) = [finding for finding in found if finding.slug == "pipeline-bubbles"]
    assert "two chunks per stage" in bubbles.advice
    assert 0 < (bubbles.saving_fraction or 0) < 0.1


def test_a_link_as_fast_as_it_should_be_saves_what_the_job_without_its_fault_does() -> None:
    planted = cases()["slow link"]
    graph = calibrate(join_ranks([link_rank(builder.build()) for builder in planted.run.traces()]))
    neighbours = (
        pl.col("ranks").list.max() - pl.col("ranks").list.min() == 1
    )  # the groups of the slow link
    mask = np.zeros(graph.nodes.height, dtype=np.bool_)
    mask[graph.communication.filter(neighbours)["node"].to_numpy()] = True
    fixed = changes.Change("network", NodeSelection("the slow link", mask, "collectives"), 4.0)
    assert whatif(graph, [fixed]).after_ns == pytest.approx(planted.clean_run.window_ns, rel=0.001)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", CLEAN)
def test_a_clean_job_has_nothing_to_fix(name: str, tmp_path: Path) -> None:
    session = traceloom.load(clean_jobs()[name].run().write(tmp_path / "run"))
    found = findings(session)
    sums_hold(found, Context.of(session).whole_ns)
    large = [
        (finding.slug, finding.saving_fraction)
        for finding in found.time
        if finding.saving_fraction > UNREAL
    ]
    assert not large


@pytest.mark.parametrize(
    ("fault", "text"),
    [
        (SlowRank(2, 1.5), "rank 2 delay remove"),
        (LateHost(1, 3000, by="data"), "rank 1 loading remove"),
        (LateHost(1, 3000, by="python"), "rank 1 delay remove"),
    ],
)
def test_the_fix_of_a_rank_does_what_the_job_without_its_fault_does(
    fault: SlowRank | LateHost, text: str
) -> None:
    job = parallel_job(
        ParallelRecipe(data=3, steps=3, layers=2, kernel_us=60, spread=0.02, faults=(fault,))
    )
    graph = calibrate(join_ranks([link_rank(builder.build()) for builder in job.run().traces()]))
    without = job.run(Change(without=frozenset({fault.label}))).window_ns
    assert whatif(graph, [parse(text)]).after_ns == pytest.approx(without, rel=0.02)


@pytest.mark.parametrize(
    ("fault", "text"),
    [
        ("slow loader", "loading remove"),
        ("synchronisation", "syncs ~ cudaDeviceSynchronize remove"),
        ("item", "syncs remove"),
        ("pageable copy", "copies async"),
    ],
)
def test_the_fix_of_a_step_does_what_the_job_without_its_fault_does(fault: str, text: str) -> None:
    planted = cases()[fault]
    graph = calibrate(join_ranks([link_rank(builder.build()) for builder in planted.run.traces()]))
    assert whatif(graph, [parse(text)]).after_ns == pytest.approx(
        planted.clean_run.window_ns, rel=0.02
    )
