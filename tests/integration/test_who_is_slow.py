"""One analysis decides which rank is slow: the section and the finding name the same one, for the same reason."""

from __future__ import annotations

import pytest

from support.jobs.at_random import Late, with_a_late_rank
from traceloom.analyze import across_ranks
from traceloom.analyze.across.lateness import CAUSE_WORDS
from traceloom.findings import findings
from traceloom.model import Session
from traceloom.report import ReportOptions, build


def check(late: Late) -> bool:
    """Compare the three; whether there is a finding."""
    session = Session(tuple(made.build() for made in late.job.run().traces()), "made")
    slowest = across_ranks(session).slowest
    assert slowest is not None
    assert slowest.rank == late.rank
    assert (slowest.cause == "compute") == any(label.startswith("slow rank") for label in late.change.without)

    section = build(session, ReportOptions(only=("across_ranks",)))["across_ranks"]
    assert f"goes back to rank {late.rank}, mostly because of: {CAUSE_WORDS[slowest.cause]}." in section["sentence"]

    titles = [finding.title for finding in findings(session).time if finding.slug == "straggler"]
    expected = f"rank {late.rank} makes the others wait: {CAUSE_WORDS[slowest.cause]}"
    assert all(title.startswith(expected) for title in titles), titles
    return bool(titles)


@pytest.mark.parametrize(
    ("count", "seed"), [(2, 2), *(pytest.param(10, seed, marks=pytest.mark.thorough) for seed in (7, 9))]
)
def test_section_finding_and_truth_name_the_same_rank_and_reason(count: int, seed: int) -> None:
    told = [check(late) for late in with_a_late_rank(count, seed, steps=3)]
    assert any(told), "one of them is worth a finding"
