"""Random jobs, against their own simulation: what changes save, and what a late rank costs when the job runs on."""

from __future__ import annotations

from itertools import islice
from pathlib import Path

import numpy as np
import polars as pl
import pytest

import traceloom
from support.jobs import Job, Recipe, training_job
from support.jobs.at_random import (
    Changed,
    awaited_by_autograd,
    step_ends,
    to_change,
    with_a_late_rank,
)
from support.jobs.planted import at_each_step, reads, that_never_meet
from traceloom.changes.changes import parse
from traceloom.changes.whatif import scenario_of
from traceloom.findings import Context, findings
from traceloom.graph import Plan, calibrate
from traceloom.graph.graph import Graph
from traceloom.graph.job import join_ranks
from traceloom.graph.rank import link_rank

COUNTS = 0.02  # of the step: smaller savings are not judged
LATE = 12


def linked(job: Job) -> Graph:
    return calibrate(join_ranks([link_rank(builder.build()) for builder in job.run().traces()]))


def off(changed: Changed) -> tuple[list[float], list[float]]:
    """Errors of new times, and of savings that count."""
    graph, whole = linked(changed.job), changed.job.run().window_ns
    plan = Plan(graph)
    times, savings = [], []
    for text, change in changed.changes:
        truth = changed.job.run(change).window_ns
        after = int(np.ptp(scenario_of(graph, [parse(text)]).times(plan)))
        times.append(abs(after / truth - 1))
        if abs(whole - truth) >= COUNTS * whole:
            savings.append(abs((truth - after) / (whole - truth)))
    return times, savings


def test_changes_of_random_jobs_come_to_what_the_simulation_says() -> None:
    both = [off(changed) for changed in to_change(8, seed=5)]
    times, savings = (np.array([error for job in both for error in job[side]]) for side in (0, 1))
    assert times.size > 25
    assert savings.size > 20
    assert np.percentile(times, 95) <= 0.01
    assert np.percentile(savings, 95) <= 0.10


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    "number", [pytest.param(n, marks=pytest.mark.thorough) if n % 4 else n for n in range(LATE)]
)
def test_a_late_rank_is_told_by_what_it_costs_each_step(number: int, tmp_path: Path) -> None:
    late = next(islice(with_a_late_rank(LATE, seed=5), number, None))
    session = traceloom.load(late.job.run().write(tmp_path / "run"))
    told = [
        finding
        for finding in findings(session).time
        if finding.slug in ("straggler", "host-pause", "data-starved")
    ]
    step = Context.of(session).step_ns
    if late.cost_ns < COUNTS * step:  # the others run ahead meanwhile: it holds nobody up
        told = [finding for finding in told if "summed over" not in finding.title]  # what all do
        assert not told or (told[0].saving_ns or 0) < 2 * COUNTS * step
        return
    assert told[0].saving_ns == pytest.approx(late.cost_ns, rel=0.10, abs=0.01 * step)


def test_nobody_makes_others_wait_that_it_never_meets(tmp_path: Path) -> None:
    run = that_never_meet(Recipe(steps=4, kernel_us=40), 4).run()
    ranked = findings(traceloom.load(run.write(tmp_path / "run")))
    alone = {"straggler", "compute-imbalance", "shard-imbalance"}
    assert not alone & {finding.slug for finding in ranked.time}
    reason = "the ranks share no communication, so none waits for another"
    assert {
        abstention.slug for abstention in ranked.abstentions if abstention.reason == reason
    } == alone


def test_reading_a_value_at_the_end_of_a_step_costs_what_the_next_one_could_have_begun_earlier(
    tmp_path: Path,
) -> None:
    clean = training_job(Recipe(steps=7, layers=4, kernel_us=40, op_us=8, think_us=300))
    job, fixed = (
        at_each_step(clean, lambda _step, blocking=blocking: reads(blocking=blocking), last=True)
        for blocking in (True, False)
    )
    ends, better = step_ends(job.run()), step_ends(fixed.run())
    truth = ((ends[-1] - ends[0]) - (better[-1] - better[0])) / 6
    session = traceloom.load(job.run().write(tmp_path / "run"))
    first = findings(session).time[0]
    assert first.slug == "blocking-item"
    assert first.saving_ns == pytest.approx(truth, rel=0.10)
    assert truth > 0.1 * Context.of(session).step_ns
    alone = findings(traceloom.load(training_job(Recipe(steps=1)).run().write(tmp_path / "one")))
    assert "one step was evaluated" in alone.limit


def test_work_that_autograd_launches_waits_for_what_the_main_thread_told_its_stream_to_wait_for() -> (
    None
):
    job = awaited_by_autograd(
        training_job(Recipe(steps=2, autograd=True, ranks=2, kernel_us=5, op_us=100))
    )
    graph = linked(job)
    nodes, edges = graph.nodes, graph.edges
    calls = graph.communication.filter(pl.col("group") == "loss")["node"]
    waits = edges.filter(pl.col("kind") == "wait", pl.col("source").is_in(calls.implode()))
    assert waits.height == calls.len() == 4
    launches = edges.filter(
        pl.col("kind") == "launch", pl.col("target").is_in(waits["target"].implode())
    )
    backward = nodes.filter(pl.col("name").str.starts_with("autograd::engine"))["lane"].unique()
    assert nodes["lane"].gather(launches["source"]).is_in(backward.implode()).all()
