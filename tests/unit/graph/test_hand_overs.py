"""Threads that were idle wait for who wakes them: what is saved before that, is saved."""

from __future__ import annotations

from pathlib import Path

import pytest

import traceloom
from support.jobs import Change
from support.jobs.hosted import LOADING, HostedRecipe, hosted_job
from traceloom.changes.changes import parse
from traceloom.changes.whatif import whatif
from traceloom.findings import findings
from traceloom.graph.linking import link_session
from traceloom.testing.trace_builder import TraceBuilder
from traceloom.trace.session import Session

MS = 1_000_000


@pytest.mark.sampled(2)
@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("wake_ms", [0.025, 3.0])
def test_waiting_for_the_loader_saves_what_it_takes_however_late_threads_wake(
    tmp_path: Path, sharded: bool, wake_ms: float
) -> None:
    recipe = HostedRecipe(sharded=sharded, loader_ns=30 * MS, wake_ns=round(wake_ms * MS))
    job = hosted_job(recipe)
    run = job.run()
    truth = run.window_ns - job.run(Change(without=frozenset({LOADING}))).window_ns
    session = traceloom.load(run.write(tmp_path / "run"))
    answer = whatif(link_session(session), [parse("loading remove")])
    assert answer.saved_ns == pytest.approx(truth, rel=0.02)
    assert not answer.lower_bound
    first = findings(session).time[0]
    assert first.slug == "data-starved"
    assert first.saving_ns == pytest.approx(truth / recipe.steps, rel=0.1)
    assert not first.lower_bound


def test_what_waits_for_nobody_knows_what_is_a_lower_bound() -> None:
    built = (
        TraceBuilder()
        .annotation("enumerate(DataLoader)#_Iter.__next__", 0, 30_000)
        .op("aten::mm", 30_000, 20_000)
    )
    # a thread that goes on while the loader is awaited, when nothing has ended anywhere since it had nothing to do
    built.op("elsewhere", 0, 1_000, thread=2).op("elsewhere", 10_000, 35_000, thread=2)
    session = Session((built.build(),), "made")
    answer = whatif(link_session(session), [parse("loading remove")])
    assert answer.lower_bound
    first = next(finding for finding in findings(session).time if finding.slug == "data-starved")
    assert first.lower_bound
