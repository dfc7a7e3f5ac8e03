"""The steps of a replay simulated on a machine: what is left out of them, what the answer says, and when it has none."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import polars as pl
import pytest

from support.plans import PlanBuilder, groups, ran, small_plan, timed_plan
from support.reports import check_schema
from traceloom.cli import main
from traceloom.report import replay
from traceloom.report.replay import render_terminal
from traceloom.testing import TraceBuilder
from traceloom.workload.replay.comparison import (
    RANKS,
    SimulatedSteps,
    compare_replay,
    simulate_steps,
)
from traceloom.workload.replay.plan import PLAN_SCHEMAS, ReplayPlan

MS = 1_000_000
OPS_US = 1000 + 300  # what the ops of a step take, on which the replay has to spend its time, too


def recorded(path: Path, world_size: int = 1) -> Path:
    """Three steps: an op, Python, an annotation, and an op below the autograd engine; Python takes ever longer."""
    trace = TraceBuilder(device_name=None, world_size=world_size)
    start = 0.0
    for step in range(3):
        python = 500 + 100 * step
        trace.mark(step, start)
        trace.op("aten::linear", start + 1, 1000).op("aten::addmm", start + 100, 800)
        at = start + 1001 + python
        trace.annotation("loading", at, 200)
        trace.op("autograd::engine::evaluate_function: MmBackward0", at + 200, 400)
        trace.op("MmBackward0", at + 220, 350).op("aten::mm", at + 240, 300)
        start = at + 600
    trace.mark(3, start)
    return trace.write(path)


def planned(steps: tuple[int, ...] = (0, 1, 2)) -> ReplayPlan:
    build = PlanBuilder()
    for name in ("aten::linear", "aten::mm"):
        build.add(name, [], [], action="run")
    rows = [{"rank": 0, "step": step, "duration_ns": 1, "cpu_ns": None} for step in steps]
    times = pl.DataFrame(rows, schema=PLAN_SCHEMAS["steps"])
    return ReplayPlan(
        {0: replace(build.build(), steps=times)}, groups(1), source="made by hand", torch=None
    )


def test_at_the_recorded_pace_steps_take_what_they_took(tmp_path: Path) -> None:
    answer = simulate_steps(
        [recorded(tmp_path / "rank0.json")], planned(), "dgx-h100", with_gaps=True, cache=False
    )
    assert answer.ranks.rows() == [(0, 3, (1001 + 600 + 600) * 1000)], "the step in the middle"


def test_at_the_pace_fast_ops_alone_take_time(tmp_path: Path) -> None:
    answer = simulate_steps(
        [recorded(tmp_path / "rank0.json")], planned(), "dgx-h100", with_gaps=False, cache=False
    )
    assert answer.ranks.rows() == [(0, 3, OPS_US * 1000)]


def test_why_there_is_no_simulation_is_said(tmp_path: Path) -> None:
    trace, saved = recorded(tmp_path / "rank0.json"), tmp_path / "small.plan"
    small_plan().save(saved)
    without_steps = simulate_steps([trace], planned(steps=()), "dgx-h100", with_gaps=False)
    assert without_steps.absent == "no timed step was recorded, or a part of one is replayed"
    of_plan = simulate_steps([saved], planned(), "dgx-h100", with_gaps=False)
    assert of_plan.absent == "a plan or a graph does not hold the traces of the steps; name the run"
    for answer in (without_steps, of_plan):
        assert answer.ranks.height == 0
        assert replay.build(compare_replay(timed_plan(), ran(), answer))["simulated"] == []
        (said, *_) = replay.describe_limits(compare_replay(timed_plan(), ran(), answer))
        assert said == f"It was not simulated on {answer.machine}: {answer.absent}."


def test_ranks_that_are_not_replayed_are_named(tmp_path: Path) -> None:
    second = (
        TraceBuilder(rank=1, world_size=2, device_name=None)
        .mark(0, 0)
        .op("aten::mm", 0, 10)
        .mark(1, 10)
    )
    files = [recorded(tmp_path / "rank0.json", 2), second.write(tmp_path / "rank1.json")]
    answer = simulate_steps(files, planned(), "dgx-h100", with_gaps=False, cache=False)
    assert answer.absent == "not all ranks are replayed, as rank 1"


def test_the_answer_says_how_far_simulation_and_replay_are_apart(tmp_path: Path) -> None:
    simulated = SimulatedSteps(
        "here", pl.DataFrame([(0, 3, 12_100_000)], schema=RANKS, orient="row")
    )
    comparison = compare_replay(timed_plan(), ran(), simulated)
    (row,) = comparison.simulated.to_dicts()
    assert row["replayed_ns"] == 11 * MS
    assert row["difference"] == pytest.approx(0.1)
    document = replay.build(comparison)
    check_schema(document, "replay.schema.json")
    assert (document["machine"], document["not_simulated"]) == ("here", None)
    words = "Simulated on here, the same ops without the host's gaps take 12.1 ms (+10.0 % against the replay)."
    assert document["sentence"].replace("\N{NARROW NO-BREAK SPACE}", " ").endswith(words)
    assert "Beside its simulation" in replay.render(document, comparison)
    assert any("Beside its simulation" in line.plain for line in render_terminal(document, 100))
    at_recorded = replace(comparison, pace="recorded")
    assert "the same ops with the host's gaps" in replay.describe_replay(at_recorded)


def test_sizes_that_were_not_recorded_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    saved = tmp_path / "small.plan"
    small_plan().save(saved)
    assert main(["replay", str(saved), "--machine", "dgx-h100", "--batch", "2"]) == 2
    assert "--machine simulates what was recorded" in capsys.readouterr().err
