"""Ranking: greedy, disjoint, never more than the whole."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

import numpy as np
import pytest

from support.jobs import Recipe, training_job
from traceloom.changes.changes import Change, NodeSelection, parse
from traceloom.changes.whatif import whatif
from traceloom.findings import RULES, Context, rank
from traceloom.findings.ranking import (
    HIGH_SHARE,
    MEDIUM_SHARE,
    MIN_SAVING_SHARE,
    compute_usual_saving,
)
from traceloom.findings.rule import Candidate, FindingRule, MemoryCandidate, Message, Remark
from traceloom.graph import graph as graph_schema
from traceloom.trace.notice import Abstention
from traceloom.trace.session import Session

RECIPES = {
    "host": Recipe(kernel_us=6, op_us=14),
    "device": Recipe(kernel_us=80),
    "copies": Recipe(kernel_us=30, pageable_input=True, item=True),
    "ranks": Recipe(ranks=3, kernel_us=40, delay_us={2: 1500.0}, item=True),
}


@cache
def context(name: str) -> Context:
    traces = tuple(builder.build() for builder in training_job(RECIPES[name]).run().traces())
    return Context.of(Session(traces, "made"))


def rule(slug: str, *said: Message) -> FindingRule:
    def look(_: Context) -> Iterator[Message]:
        yield from said

    return FindingRule(slug, slug, look)


def candidate(text: str, **more: object) -> Candidate:
    return Candidate(text, (parse(text),), 0.5, "do it", **more)  # type: ignore[arg-type]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", RECIPES)
def test_savings_of_all_rules_are_disjoint_and_add_up_to_less_than_the_step(name: str) -> None:
    found = rank(context(name), RULES).time
    assert sum(one.saving_ns or 0 for one in found) <= context(name).whole_ns
    assert sum(one.saving_fraction or 0 for one in found) <= 1
    savings = [one.saving_ns for one in found]
    assert savings == sorted(savings, reverse=True)
    assert all(
        one.saving_ns == 0 or (one.saving_fraction or 0) >= MIN_SAVING_SHARE for one in found
    )


def test_the_second_of_two_equal_fixes_saves_nothing_more() -> None:
    twice = [rule("first", candidate("kernels * 0.5")), rule("second", candidate("kernels * 0.5"))]
    both = rank(context("device"), twice).time
    alone = rank(context("device"), twice[:1]).time
    assert both[0].slug == "first"
    assert both[0].saving_ns == alone[0].saving_ns == both[0].alone_ns
    # halving twice is a quarter: what is left of the second is at most half of the first
    assert sum(one.saving_ns or 0 for one in both[1:]) <= (both[0].saving_ns or 0) * 0.55


def test_the_largest_comes_first_and_the_rest_is_evaluated_on_top_of_it() -> None:
    here = context("device")
    found = rank(
        here, [rule("small", candidate("kernels * 0.8")), rule("large", candidate("gpu * 0.3"))]
    ).time
    assert found[0].slug == "large"
    together = whatif(here.graph, [parse("gpu * 0.3"), parse("kernels * 0.8")])
    assert sum(one.saving_ns or 0 for one in found) == pytest.approx(
        together.saved_ns * here.step_ns / here.whole_ns, rel=0.01
    )


def test_what_saves_next_to_nothing_is_dropped() -> None:
    assert rank(context("device"), [rule("tiny", candidate("kernels * 0.999"))]).time == ()


def test_a_bound_holds() -> None:
    here = context("device")
    bound = round(0.02 * here.step_ns)
    (found,) = rank(
        here, [rule("bounded", candidate("kernels * 0.1", at_most_ns=bound))], steps=1
    ).time
    assert found.saving_fraction == pytest.approx(0.02, rel=1e-3)


def test_the_bound_of_the_step_that_the_title_is_about_holds_for_what_several_steps_save() -> None:
    here = context("device")
    bound = round(0.02 * here.step_ns)

    def look(asked: Context) -> Iterator[Message]:
        yield candidate("kernels * 0.1", at_most_ns=bound if asked.step_count == 1 else None)

    (finding,) = rank(here, [FindingRule("bounded", "bounded", look)]).time
    assert finding.step_count > 1
    assert finding.saving_ns == finding.alone_ns == bound
    assert finding.saving_high_ns is not None
    assert finding.saving_high_ns > bound  # in other steps it was more


@pytest.mark.parametrize(
    ("fraction", "severity"),
    [
        (HIGH_SHARE + 0.001, "high"),
        (MEDIUM_SHARE + 0.001, "medium"),
        (MIN_SAVING_SHARE + 0.001, "low"),
    ],
)
def test_severity_is_what_it_saves(fraction: float, severity: str) -> None:
    here = context("device")
    some = candidate("kernels * 0.1", at_most_ns=round(fraction * here.whole_ns))
    (found,) = rank(here, [rule("some", some)], steps=1).time
    assert found.severity == severity


def test_savings_of_the_host_are_divided_by_what_recording_cost() -> None:
    here = context("host")
    plain = rank(here, [rule("host", candidate("host * 0.5"))]).time[0]
    slowed = Context(here.session, here.steps)
    slowed.__dict__["host_ratio"] = 1.25
    scaled = rank(slowed, [rule("host", candidate("host * 0.5"))]).time[0]
    assert scaled.saving_ns == pytest.approx((plain.saving_ns or 0) / 1.25, rel=5e-3)
    of_device = rank(slowed, [rule("gpu", candidate("gpu * 0.2"))]).time
    assert [one.saving_ns for one in of_device] == [
        one.saving_ns for one in rank(here, [rule("gpu", candidate("gpu * 0.2"))]).time
    ]


@pytest.mark.parametrize(
    "text", ["host * 0.5", "ops * 0.6", "launches remove", "gpu * 0.2", "idle remove"]
)
def test_a_finding_and_a_what_if_tell_the_same_without_recording(text: str) -> None:
    here = context("host")
    assert here.step_ns == here.whole_ns
    slowed = Context(here.session, here.steps)
    slowed.__dict__["host_ratio"] = 1.25
    asked = whatif(here.graph, [parse(text)], host_ratio=1.25)
    told = rank(slowed, [rule("some", candidate(text))], steps=1).time
    assert [one.saving_ns for one in told] == (
        [asked.rescaled_saved_ns] if asked.rescaled_saved_ns else []
    )


def test_memory_remarks_and_abstentions_have_places_of_their_own() -> None:
    said = (
        MemoryCandidate("some", 10, None, False, 0.5, "free it"),
        MemoryCandidate("full", None, "the run ends", True, 0.5, "free it"),
        Abstention("mixed", "nothing is known"),
        Remark("only to be known", 0.9, "nothing"),
    )
    found = rank(context("device"), [rule("mixed", *said)])
    assert [one.title for one in found.memory] == ["full", "some"]
    assert [one.severity for one in found.memory] == ["high", "low"]
    assert [(one.saving_ns, one.severity) for one in found.time] == [(0, "low")]
    assert found.abstentions == (Abstention("mixed", "nothing is known"),)


def test_a_choice_of_nothing_changes_nothing_that_follows() -> None:
    here = context("device")
    some = NodeSelection("one kernel", np.arange(here.graph.nodes.height) == 5)
    found = rank(
        here, [rule("one", Candidate("one", (Change("scale", some, 1.0),), 0.5, "no"))], steps=1
    )
    assert found.time == ()


def test_evidence_is_never_of_another_trace_that_claims_the_same_rank() -> None:
    built = [builder.build() for builder in training_job(RECIPES["ranks"]).run().traces()]
    twice = Session((*built, built[1]), "made")
    found = Context.of(twice)
    assert found.find_trace(built[1].rank) is None
    assert found.find_trace(built[2].rank) is built[2]
    kernels = found.evidence(
        found.select_kinds(graph_schema.KERNEL), max_count=found.graph.nodes.height
    )
    assert {(one.rank, one.lane is None) for one in kernels} == {(0, False), (1, True), (2, False)}
    assert rank(found, RULES).time  # and no rule trips over it


@pytest.mark.parametrize(
    ("saved", "usual"),
    [
        ([5, 5, 5, 5, 90], 5),
        ([0, 0, 120, 320, 0], 30),  # bursts: the largest does not count
        ([0, 0, 0, 500, 0], 0),  # one step alone may be chance
        ([7], 7),
        ([0], 0),
        ([-3, 0, 0, 0, 9], 0),
    ],
)
def test_what_few_steps_gain_counts_where_most_gain_nothing(saved: list[int], usual: int) -> None:
    assert compute_usual_saving(np.array(saved, dtype=np.int64)) == usual
