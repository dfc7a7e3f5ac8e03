"""What the first step of a run cost is in the default answer."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from traceloom.analyze import answer
from traceloom.testing.trace_builder import TraceBuilder
from traceloom.trace.session import Session
from traceloom.trace.trace import Trace

MS = 1_000_000


def trace(durations_ms: list[int], states: list[str], rank: int = 0) -> Trace:
    built = TraceBuilder(rank, 2)
    for number in range(3):
        built.step(number, 600 * number, 600).op("aten::mm", 600 * number, 500)
    made = built.build()
    table: dict[str, Any] = {"duration_ns": [took * MS for took in durations_ms], "state": states}
    return replace(made, meta=replace(made.meta, capture={"steps": table}))


def run(*first_ms: int, state: str = "early") -> Session:
    states = [state, *["recorded"] * 5, *["unrecorded"] * 10]
    return Session(
        tuple(trace([first, *[600] * 15], states, rank) for rank, first in enumerate(first_ms)),
        "made",
    )


def test_a_first_step_that_compiles_is_told() -> None:
    sentence = answer(run(20_000)).sentence
    assert (
        "The first step of the run, which is not among them, took 20.0 s, as long as 33 usual ones"
        in sentence
    )
    assert "66.9 %" in sentence.replace("\xa0", " ").replace("\u202f", " ")  # 19.4 of 29 s


def test_of_several_ranks_the_longest_counts() -> None:
    assert (
        "The first step of the run (rank 1), which is not among them, took 30.0 s"
        in answer(run(20_000, 30_000)).sentence
    )


@pytest.mark.parametrize(
    "session",
    [
        run(1_000),
        run(20_000, state="recorded"),
        Session((TraceBuilder().op("a", 0, 9).build(),), "made"),
    ],
)
def test_a_usual_or_a_recorded_first_step_is_not(session: Session) -> None:
    assert "first step" not in answer(session).sentence


@pytest.mark.parametrize(("ran_ms", "told"), [(120, True), (550, False), (None, False)])
def test_that_the_main_thread_waits_is_told_by_its_processor_time(
    ran_ms: int | None, told: bool
) -> None:
    session = run(600, 600)
    for number, one in enumerate(session.traces):
        assert one.meta.capture is not None
        # of one rank nobody knows it in the last case: nothing is said of all
        known = None if ran_ms is None and number else (ran_ms or 120) * MS
        one.meta.capture["steps"]["cpu_ns"] = [known] * 16
    sentence = answer(session).sentence.replace("\xa0", " ").replace("\u202f", " ")
    assert ("the main thread runs on a processor 20.0 % of the time" in sentence) is told
