"""Savings over the steps of a window: the middle one counts, with the interval in which it lies."""

from __future__ import annotations

import pytest

from traceloom.findings import RULES, Context, findings, rank
from traceloom.findings.ranking import compute_median_floor, compute_median_interval
from traceloom.testing.trace_builder import TraceBuilder
from traceloom.trace.session import Session

MS = 1_000_000


def session(steps: list[tuple[int, int]]) -> Session:
    """Steps that sleep, then work: ms of each."""
    built, at = TraceBuilder(), 0
    for number, (sleeps, works) in enumerate(steps):
        built.mark(number, at)
        for part in range(10):
            built.op("aten::mm", at + 1000 * sleeps + 100 * works * part, 100 * works - 1)
        at += 1000 * (sleeps + works)
    return Session((built.mark(len(steps), at).build(),), "made")


def test_a_pause_of_most_steps_is_found_although_the_usual_step_has_none() -> None:
    made = session([(50, 10), (50, 11), (0, 62), (48, 15), (54, 10)])
    assert Context.of(made).step == 2
    assert not rank(Context.of(made), RULES, steps=1).time
    first = findings(made).time[0]
    assert first.slug == "host-pause"
    assert first.saving_ns == pytest.approx(50 * MS, rel=0.01)
    assert first.saving_low_ns == 0
    assert first.saving_high_ns == pytest.approx(54 * MS, rel=0.01)
    assert first.step_count == 5
    assert "outside of operators" in first.title


def test_a_pause_of_one_step_is_none_of_the_usual_ones() -> None:
    assert not findings(session([(0, 60), (0, 61), (62, 1), (0, 63), (0, 64)])).time


def test_one_step_alone_has_no_interval() -> None:
    first = findings(session([(50, 10)])).time[0]
    assert (first.saving_low_ns, first.saving_high_ns, first.step_count) == (None, None, 1)


def test_savings_of_several_fixes_are_together_no_more_than_the_usual_step() -> None:
    built, at = TraceBuilder(), 0
    for number, (sleeps, loads) in enumerate([(60, 0), (60, 0), (60, 40), (0, 60), (0, 60)]):
        built.mark(number, at).op("aten::mm", at, 1000)
        built.annotation("enumerate(DataLoader)#_Iter.__next__", at + 1000, 1000 * loads or 1)
        at += 1000 * (sleeps + loads + 1)
    ranked = findings(Session((built.mark(5, at).build(),), "made"))
    assert len(ranked.time) >= 2
    assert sum(one.saving_fraction or 0 for one in ranked.time) <= 1
    assert all(
        (one.saving_low_ns or 0) <= (one.saving_ns or 0) <= (one.saving_high_ns or 0)
        for one in ranked.time
        if one.saving_ns
    )


@pytest.mark.parametrize(("count", "omitted"), [(1, 0), (4, 0), (5, 0), (8, 1), (11, 2), (20, 5)])
def test_the_interval_holds_the_median_nine_times_of_ten(count: int, omitted: int) -> None:
    values = list(range(count))[::-1]
    assert compute_median_interval(values) == (omitted, count - 1 - omitted)
    assert compute_median_floor(values) == (count - 1) // 2
