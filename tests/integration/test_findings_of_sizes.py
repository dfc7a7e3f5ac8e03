"""Twelve faults of random sizes on devices of three vendors: what is found first, and what it is said to save."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

import traceloom
from support.planted_sizes import FAULTS, PEAK, VENDORS, Job, cases, clean, write
from traceloom.findings import RULES, Context, rank
from traceloom.trace.notice import Finding

ALLOWED = 0.10  # of what the fault costs
FOREIGN = ("CUDA_", "cuda", "nvidia", "NCCL_MAX_CTAS", "tensor core", "TF32", "cudnn")
ALLOWED_NAMES = "torch.cuda.graphs"  # PyTorch's own name on ROCm, too


def found_in(job: Job, folder: Path) -> tuple[Finding, ...]:
    session = traceloom.load(write(job, folder / "trace.json"), cache=False)
    return rank(Context.of(session, PEAK), RULES).time


@pytest.mark.sampled(12)
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
@pytest.mark.parametrize("vendor", VENDORS)
def test_a_fault_comes_first_with_what_it_costs(fault: object, vendor: str, tmp_path: Path) -> None:
    case = fault(random.Random(f"one {vendor}"), vendor)  # type: ignore[operator]
    first = found_in(case.faulty, tmp_path)[0]
    assert first.slug == case.slug
    assert first.saving_ns == pytest.approx(case.truth_ns(), rel=ALLOWED)
    if vendor != "nvidia":
        text = f"{first.title} {first.advice}".replace(ALLOWED_NAMES, "")
        assert not [word for word in FOREIGN if word in text]


@pytest.mark.thorough
def test_of_many_sizes_95_of_100_come_first_within_a_tenth(tmp_path: Path) -> None:
    right = []
    for case in cases(range(20)):
        time = found_in(case.faulty, tmp_path)
        right.append(
            bool(time)
            and time[0].slug == case.slug
            and time[0].saving_ns == pytest.approx(case.truth_ns(), rel=ALLOWED)
        )
    assert sum(right) >= 0.95 * len(right)


@pytest.mark.parametrize("job", list(clean(range(6))), ids=lambda job: job.vendor)
def test_a_job_without_a_fault_has_no_finding(job: Job, tmp_path: Path) -> None:
    assert found_in(job, tmp_path) == ()


@pytest.mark.thorough
def test_of_200_jobs_without_a_fault_none_has_a_finding(tmp_path: Path) -> None:
    assert not [job for job in clean(range(200)) if found_in(job, tmp_path)]
