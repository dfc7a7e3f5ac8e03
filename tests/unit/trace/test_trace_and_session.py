"""The laws of a trace are checked, and a session picks ranks."""

from __future__ import annotations

from dataclasses import replace

import polars as pl
import pytest

from traceloom.errors import InvariantError, UsageError
from traceloom.testing import TraceBuilder
from traceloom.trace.notice import Notice, sort_by_severity
from traceloom.trace.session import Session


def trace(rank: int | None = 0):
    made = TraceBuilder(rank=rank, world_size=4).op("aten::mm", 0, 10).op("aten::add", 2, 3)
    return (
        made.launch("cudaLaunchKernel", 6, 2, correlation=1)
        .kernel("gemm", 9, 5, correlation=1)
        .build()
    )


def test_a_good_trace_passes_its_check():
    trace().check()


@pytest.mark.parametrize(
    ("change", "law"),
    [
        (lambda e: e.with_columns(pl.col("event") + 1), "broken-ids"),
        (lambda e: e.with_columns(start_ns=-pl.col("start_ns")), "broken-order"),
        (
            lambda e: e.with_columns(
                nested_end_ns=pl.col("nested_end_ns") + 50_000 * pl.col("depth")
            ),
            "broken-nesting",
        ),
        (lambda e: e.with_columns(depth=pl.lit(0, pl.UInt16)), "broken-nesting"),
        (lambda e: e.with_columns(op=pl.col("launch")), "broken-references"),
        (lambda e: e.drop("step"), "broken-columns"),
    ],
)
def test_a_trace_that_breaks_a_law_is_told(change, law):
    whole = trace()
    with pytest.raises(InvariantError) as caught:
        replace(whole, events=change(whole.events)).check()
    assert caught.value.slug == law


def test_busy_times_that_do_not_add_up_are_told():
    whole = trace()
    wrong = whole.lanes.with_columns(pl.col("busy_ns") + 1)
    with pytest.raises(InvariantError) as caught:
        replace(whole, lanes=wrong).check()
    assert caught.value.slug == "broken-self-time"


def test_a_session_gives_some_of_its_ranks():
    session = Session((trace(0), trace(2), trace(2)), "run")
    assert session.of_rank(2).ranks == (2, 2)
    assert session.world_size == 4
    with pytest.raises(UsageError) as caught:
        session.of_ranks((0, 7))
    assert caught.value.slug == "no-such-rank"
    session.check()


def test_notices_are_told_with_their_rank_and_the_worst_first():
    notices = (
        Notice("a", "info", ""),
        Notice("b", "error", ""),
        Notice("c", "warning", "", 2),
        Notice("d", "warning", "", 9),
    )
    assert [notice.slug for notice in sort_by_severity(notices)] == ["b", "d", "c", "a"]
    session = Session((replace(trace(3), notices=notices[:1]),), "run", notices=notices[1:2])
    assert [(notice.slug, notice.rank) for notice in session.all_notices()] == [
        ("b", None),
        ("a", 3),
    ]


def test_starts_and_ends_of_a_trace():
    whole = trace()
    assert (whole.start_ns, whole.end_ns) == (0, 14_000)
    assert Session((whole,), "run").epoch_ns == 0
    empty = TraceBuilder().build()
    assert (empty.start_ns, empty.end_ns) == (0, 0)


def test_the_findings_of_a_session_are_a_frame() -> None:
    made = TraceBuilder()
    for step in range(5):
        made.step(step, step * 1000, 900).op(
            "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__", step * 1000, 700
        )
        made.op("aten::mm", step * 1000 + 700, 200)
    found = Session((made.build(),), "made").findings
    assert "data-starved" in found["slug"].to_list()
    assert found.filter(slug="data-starved")["saving_ns"][0] > 0
    assert Session((TraceBuilder().build(),), "empty").findings.is_empty()
