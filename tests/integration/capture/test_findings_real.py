"""Findings of real training runs on the CPU with a planted fault; how large it is, is known, how long a step takes, not."""

from __future__ import annotations

import os
import statistics
import sys
from pathlib import Path
from typing import Any

import pytest

import traceloom
from traceloom.findings import RULES, Context, Ranked, findings, rank
from traceloom.trace.notice import Finding

pytestmark = pytest.mark.torch

JOB = str(Path(__file__).parents[3] / "benchmarks" / "findings_job.py")
MS = 1_000_000


def found(recorder: Any, command: list[str], *options: str) -> Ranked:
    run = recorder.record(command, "--quiet", *options)
    assert run.code == 0, run.err
    return findings(traceloom.load(run.directory))


# What is planted into each step, ns: time that the host spends on it for certain, be the machine busy or not.
@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("fault", "slug", "planted"),
    [
        ("sleep", "host-pause", 10 * MS),
        ("loader", "data-starved", 64 * 150_000),
        pytest.param("recomputation", "recomputation", 0, marks=pytest.mark.thorough),
    ],
)
def test_a_fault_of_a_run_without_a_gpu_is_found_first(
    recorder: Any, fault: str, slug: str, planted: int
) -> None:
    for _ in range(
        2
    ):  # what else runs here may interrupt operators: once, they may look like the fault
        ranked = found(recorder, [sys.executable, JOB, fault], "--force")
        # That other programs took the processors away is said before any fault, and is true here.
        first = next(finding for finding in ranked.time if finding.slug != "overloaded-host")
        if first.slug == slug:
            break
    assert first.slug == slug, [(finding.slug, finding.saving_ns) for finding in ranked.time]
    assert first.saving_ns > 0.6 * planted
    assert sum(finding.saving_fraction or 0 for finding in ranked.time) <= 1


def truth_ns(run: Any) -> tuple[float, float]:
    """What the fault costs a step, and how long a step with it takes: by steps with and without it that take turns.

    The job's steps from 30 on have it at even numbers alone; only those are compared during which nobody recorded. Of
    several ranks the slowest counts.
    """
    medians = []
    for part in run.capture["ranks"]:
        told = list(
            enumerate(zip(part["steps"]["duration_ns"], part["steps"]["state"], strict=True))
        )[30:]
        times = [
            [took for number, (took, state) in told if state == "unrecorded" and number % 2 == odd]
            for odd in (0, 1)
        ]
        medians.append([statistics.median(some) for some in times])
    faulty, clean = (max(some) for some in zip(*medians, strict=True))
    return faulty - clean, faulty


def without_recording(run: Any) -> Ranked:
    """Findings of the recorded steps; what recording costs is told by steps with the fault alone."""
    context = Context.of(traceloom.load(run.directory))
    ratios = []
    for part in run.capture["ranks"]:
        steps = part["steps"]
        told = list(enumerate(zip(steps["cpu_ns"], steps["state"], strict=True)))
        recorded = [ran for _, (ran, state) in told if state == "recorded"]
        plain = [
            ran
            for number, (ran, state) in told
            if state == "unrecorded" and number >= 30 and number % 2 == 0
        ]
        ratios.append(statistics.median(recorded) / statistics.median(plain))
    context.__dict__["host_ratio"] = max(ratios)
    return rank(context, RULES)


def judged(
    recorder: Any, command: list[str], slugs: tuple[str, ...]
) -> tuple[Finding | None, bool, str]:
    """The first finding of a run, whether it is the fault and saves what steps without the fault do, and all of it."""
    run = recorder.record(command, "--quiet", "--force")
    assert run.code == 0, run.err
    truth, step = truth_ns(run)
    ranked = without_recording(run)
    told = [finding for finding in ranked.time if finding.slug != "overloaded-host"]
    first = told[0] if told else None
    said = f"{truth / 1e6:.2f} of {step / 1e6:.2f} ms; {[(one.slug, one.saving_ns, one.title) for one in ranked.time]}"
    if first is None or first.slug not in slugs or truth <= 0:
        return first, False, said
    # other programs share the processors: a third of the truth, or the spread of the steps themselves
    low, high = (first.saving_low_ns or 0) * 0.67, (first.saving_high_ns or 0) * 1.5
    return first, abs((first.saving_ns or 0) - truth) <= truth / 3 or low <= truth <= high, said


@pytest.mark.thorough  # figures of a few steps, which a busy machine disturbs
@pytest.mark.parametrize(("fault", "slug"), [("copies", "host-copies"), ("tiny", "tiny-operators")])
def test_a_fault_saves_what_steps_without_it_do(recorder: Any, fault: str, slug: str) -> None:
    for _ in range(2):
        _, fits, said = judged(recorder, [sys.executable, JOB, fault], (slug,))
        if fits:
            break
    assert fits, said


@pytest.mark.thorough
@pytest.mark.parametrize(
    "fault", ["straggler", pytest.param("straggler-fsdp", marks=pytest.mark.thorough)]
)
def test_a_rank_that_sleeps_makes_the_others_wait(recorder: Any, fault: str) -> None:
    if (os.cpu_count() or 1) < 2:
        pytest.skip("two ranks on one processor make each other wait")
    for _ in range(
        2
    ):  # two ranks and what else runs here share the processors: once, others may take longer
        first, fits, said = judged(
            recorder, [*recorder.torchrun(JOB), fault], ("straggler", "host-pause")
        )
        if fits and first is not None and "rank 1 " in first.title:
            break
    assert fits, said
    assert first is not None
    assert "rank 1 " in first.title, said


@pytest.mark.thorough
def test_reading_values_costs_nothing_without_a_device(recorder: Any) -> None:
    ranked = found(recorder, [sys.executable, JOB, "item"])
    assert not [finding for finding in ranked.time if finding.slug.startswith("blocking")]
    assert "blocking-item" in {abstention.slug for abstention in ranked.abstentions}
