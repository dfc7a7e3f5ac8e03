"""Findings of real training runs on the CPU with a planted fault; how large it is, is known, how long a step takes, not."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest

import traceloom
from traceloom.findings import Ranked, findings

pytestmark = pytest.mark.torch

JOB = str(Path(__file__).parents[3] / "benchmarks" / "findings_job.py")
MS = 1_000_000


def found(recorder: Any, command: list[str], *options: str) -> Ranked:
    run = recorder.record(command, "--quiet", *options)
    assert run.code == 0, run.err
    return findings(traceloom.load(run.directory))


# What is planted into each step, ns: time that the host spends on it for certain, be the machine busy or not.
@pytest.mark.parametrize(
    ("fault", "slug", "planted"),
    [("sleep", "host-pause", 10 * MS), ("loader", "data-starved", 64 * 150_000), ("recomputation", "recomputation", 0)],
)
def test_a_fault_of_a_run_without_a_gpu_is_found_first(recorder: Any, fault: str, slug: str, planted: int) -> None:
    ranked = found(recorder, [sys.executable, JOB, fault])
    first = ranked.time[0]
    assert first.slug == slug, [(finding.slug, finding.saving_ns) for finding in ranked.time]
    assert first.saving_ns > 0.6 * planted
    assert sum(finding.saving_fraction or 0 for finding in ranked.time) <= 1


def test_a_rank_that_sleeps_makes_the_others_wait(recorder: Any) -> None:
    if (os.cpu_count() or 1) < 2:
        pytest.skip("two ranks on one processor make each other wait")
    for _ in range(
        2
    ):  # two ranks and what else runs here share the processors: once, others may take longer than the sleep
        ranked = found(recorder, [*recorder.torchrun(JOB), "straggler"], "--force")
        first = ranked.time[0]
        # the sleep itself, or the rank that it makes late: either is the fault
        if first.slug in ("straggler", "host-pause"):
            break
    assert first.slug in ("straggler", "host-pause"), [(finding.slug, finding.title) for finding in ranked.time]
    assert first.slug == "host-pause" or first.title.startswith("rank 1 ")
    assert first.saving_ns > 0.5 * 40 * MS


def test_reading_values_costs_nothing_without_a_device(recorder: Any) -> None:
    ranked = found(recorder, [sys.executable, JOB, "item"])
    assert not [finding for finding in ranked.time if finding.slug.startswith("blocking")]
    assert "blocking-item" in {abstention.slug for abstention in ranked.abstentions}
