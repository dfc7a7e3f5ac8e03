"""Savings and their shares without what recording cost: the saving and the step that it is a share of are one kind."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import traceloom
from support.by_hand import GEMM, HandStep
from traceloom.changes.changes import parse
from traceloom.findings import Context, findings, rank
from traceloom.findings.rule import Candidate, FindingRule, Message
from traceloom.report.document import ReportOptions, UnknownValues
from traceloom.report.findings import build_findings
from traceloom.trace.session import Session

TINY, BIG = 400, 20  # operators of a step


def session_of(step: HandStep, **overhead: Any) -> Session:
    trace = step.build()
    meta = replace(trace.meta, capture={"overhead": overhead})
    return Session((replace(trace, meta=meta),), "by hand")


def rule(text: str) -> FindingRule:
    def look(_: Context) -> Iterator[Message]:
        yield Candidate(text, (parse(text),), 0.5, "do it")

    return FindingRule("planted", "planted", look)


@pytest.mark.parametrize("cost_us", [0.5, 1.0, 1.9])
def test_a_loop_saves_the_share_that_it_takes_where_nobody_records(cost_us: float) -> None:
    true_us = TINY * 1.0 + BIG * 100.0
    recorded_us = true_us + (TINY + BIG) * cost_us
    step, at = HandStep(recorded_us), 0.0
    for _ in range(TINY):
        step.op("aten::item", at, 1 + cost_us)
        at += 1 + cost_us
    for _ in range(BIG):
        step.op("aten::mm", at, 100 + cost_us)
        at += 100 + cost_us
    session = session_of(step, ratio=recorded_us / true_us)
    (found,) = rank(Context.of(session), [rule("ops ~ item remove")], steps=1).time
    assert found.saving_ns == pytest.approx(TINY * 1_000, rel=0.02)
    assert found.saving_fraction == pytest.approx(TINY / true_us, rel=0.02)
    absent = UnknownValues(session.epoch_ns)
    _, ground = build_findings(session, ReportOptions(), absent)
    assert ground is not None
    assert ground["whole_ns"] == pytest.approx(true_us * 1_000, rel=0.02)
    assert "as recorded" in ground["basis"]


def test_a_step_of_the_device_is_as_long_without_recording() -> None:
    step = HandStep(210)
    for number in range(10):
        step.op("aten::mm", 10 + 20 * number, 18)
        step.launched(GEMM, 15 + 20 * number, 30 + 97 * number, 97)
    session = session_of(
        step,
        ratio=2.0,
        ratio_of="cpu",
        recorded_median_ns=1_000_000,
        recorded_cpu_median_ns=200_000,
    )
    assert session.recording_overhead_ratio == pytest.approx(1_000 / (1_000 - 100))
    context = Context.of(session)
    assert context.unrecorded_step_ns == pytest.approx(context.step_ns, rel=0.03)
    (found,) = rank(context, [rule("kernels * 0.5")], steps=1).time
    assert found.saving_fraction == pytest.approx(0.485, rel=0.05)


@pytest.mark.thorough
def test_items_that_are_read_in_a_loop_save_about_what_leaving_them_out_does(
    tmp_path: Path, shared_data: Path
) -> None:
    script = str(shared_data / "failing" / "scripts" / "items.py")
    spent = []
    clock = (
        "import sys, time; source = open(sys.argv[1]).read(); marks = []\n"
        "source = source.replace('    x =', '    marks.append(time.process_time()); x =')\n"
        "exec(compile(source, sys.argv[1], 'exec'))\n"
        "steps = sorted(b - a for a, b in zip(marks[9:], marks[10:])); print(steps[len(steps) // 2])"
    )
    for more in ((), ("--fix",)):
        command = [sys.executable, "-W", "ignore", "-c", clock, script, *more]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True)
        spent.append(float(done.stdout.split()[-1]))
    truth = 1 - spent[1] / spent[0]
    run = tmp_path / "run"
    command = [sys.executable, "-m", "traceloom", "record", "-o", str(run), "--"]
    subprocess.run(
        [*command, sys.executable, script],
        capture_output=True,
        timeout=300,
        check=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    found = findings(traceloom.load(run)).time
    if any(one.slug == "overloaded-host" for one in found):
        pytest.skip("other programs had the processors")
    told = next(one.saving_fraction for one in found if one.slug == "tiny-operators")
    assert told == pytest.approx(truth, abs=0.25), json.dumps([one.to_dict() for one in found])
