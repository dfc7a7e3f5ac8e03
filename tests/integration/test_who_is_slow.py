"""One analysis decides which rank is slow: section, finding and what-if name the same one, for the same reason."""

from __future__ import annotations

from typing import Any

import pytest

from support.jobs import Fault, LateHost, ParallelRecipe, ShardImbalance, SlowRank, parallel_job
from support.jobs.at_random import Late, with_a_late_rank
from traceloom.analyze import across_ranks
from traceloom.analyze.lateness import CAUSE_LABELS
from traceloom.changes.changes import parse
from traceloom.changes.whatif import whatif
from traceloom.findings import findings
from traceloom.graph import link_session
from traceloom.report import ReportOptions, build
from traceloom.trace.session import Session


def check(late: Late) -> bool:
    """Compare the three; whether there is a finding."""
    session = Session(tuple(made.build() for made in late.job.run().traces()), "made")
    slowest = across_ranks(session).slowest
    assert slowest is not None
    assert slowest.rank == late.rank
    assert (slowest.cause == "compute") == any(
        label.startswith("slow rank") for label in late.change.without
    )

    section = build(session, ReportOptions(only=("across_ranks",)))["across_ranks"]
    assert (
        f"goes back to rank {late.rank}, mostly because of: {CAUSE_LABELS[slowest.cause]}."
        in section["sentence"]
    )

    titles = [finding.title for finding in findings(session).time if finding.slug == "straggler"]
    expected = f"rank {late.rank} makes the others wait: {CAUSE_LABELS[slowest.cause]}"
    assert all(title.startswith(expected) for title in titles), titles
    return bool(titles)


@pytest.mark.parametrize(
    ("count", "seed"),
    [(2, 2), *(pytest.param(10, seed, marks=pytest.mark.thorough) for seed in (7, 9))],
)
def test_section_finding_and_truth_name_the_same_rank_and_reason(count: int, seed: int) -> None:
    told = [check(late) for late in with_a_late_rank(count, seed, steps=3)]
    assert any(told), "one of them is worth a finding"


RANK = 2
TENSOR_4: dict[str, Any] = {"data": 2, "tensor": 2}
TENSOR_8: dict[str, Any] = {"data": 4, "tensor": 2}
PIPELINE_8: dict[str, Any] = {"data": 4, "pipeline": 2}
FAULTS: dict[str, tuple[Fault, str, set[str]]] = {
    "late host": (LateHost(RANK, 1500, by="python"), "host_unobserved", {"straggler"}),
    "late loader": (
        LateHost(RANK, 1500, by="data"),
        "host_data_loading",
        {"data-starved", "straggler"},
    ),
    "slow kernels": (SlowRank(RANK, 1.4), "compute", {"straggler"}),
    "large shard": (ShardImbalance(RANK, 8.0), "compute", {"shard-imbalance", "compute-imbalance"}),
}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize(
    "layout",
    [
        TENSOR_4,
        pytest.param(TENSOR_8, marks=pytest.mark.thorough),
        pytest.param(PIPELINE_8, marks=pytest.mark.thorough),
    ],
    ids=["4 ranks", "8 ranks", "8 ranks in pipelines"],
)
def test_the_cause_is_followed_back_to_the_rank_that_has_it(
    layout: dict[str, Any], fault: str
) -> None:
    """Where ranks compute on beside a late collective, who was late there must not be said to compute longer later."""
    planted, cause, slugs = FAULTS[fault]
    run = parallel_job(ParallelRecipe(steps=3, layers=2, seed=3, faults=(planted,), **layout)).run()
    session = Session(tuple(made.build() for made in run.traces()), fault)
    slowest = across_ranks(session).slowest
    assert slowest is not None
    assert (slowest.rank, slowest.cause) == (RANK, cause)
    assert slowest.fraction > (0.8 if fault == "large shard" else 0.95)
    section = build(session, ReportOptions(only=("across_ranks",)))["across_ranks"]
    assert (
        f"goes back to rank {RANK}, mostly because of: {CAUSE_LABELS[cause]}."
        in section["sentence"]
    )

    finding = next(finding for finding in findings(session).time if finding.slug in slugs)
    if finding.slug == "data-starved":
        assert finding.evidence[0].rank == RANK
    else:
        assert finding.title.startswith(f"rank {RANK} ")
    assert finding.slug != "straggler" or CAUSE_LABELS[cause] in finding.title

    graph = link_session(session)
    saved = [
        whatif(graph, [parse(f"rank {rank} delay remove")]).saved_ns
        for rank in range(len(session.traces))
    ]
    assert max(range(len(saved)), key=lambda rank: saved[rank]) == RANK
