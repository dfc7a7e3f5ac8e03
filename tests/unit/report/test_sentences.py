"""The sentences of the sections, on a job of eight ranks that differ, against sums made from its traces."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

import polars as pl
import pytest

from support.jobs import Recipe, training_job
from traceloom.model import Session, units
from traceloom.report import ReportOptions, build
from traceloom.report.sections import every
from traceloom.testing.builder import TraceBuilder

RANKS = 8


def traces() -> Iterator[TraceBuilder]:
    """Each rank reads values in three steps; on rank 0 the synchronisation takes longest, on all others the value."""
    for rank in range(RANKS):
        made, at, number = TraceBuilder(rank=rank, world_size=RANKS), 0, 0
        for step in range(3):
            made.mark(step, at)
            for place, name, call, took in (
                (100, "aten::item", "cudaMemcpyAsync", 100 if rank == 0 else 900 + rank),
                (1500, "aten::sync", "cudaDeviceSynchronize", 400 if rank == 0 else 50),
            ):
                number += 1
                made.op(name, at + place, took + 20).launch(call, at + place + 5, took, correlation=number)
                if call == "cudaMemcpyAsync":
                    made.copy("Memcpy DtoH (Device -> Pageable)", at + place + took - 10, 5, bytes=4 * (rank + 1),
                              correlation=number)  # fmt: skip
            number += 1
            made.launch("cudaLaunchKernel", at + 2100, 5, correlation=number)
            made.kernel("gemm", at + 2120 + 3 * rank, 100 + rank, correlation=number)
            at += 3000
        yield made.mark(3, at)


@cache
def sentences() -> dict[str, str]:
    session = Session(tuple(made.build() for made in traces()), "eight ranks")
    report = build(session, ReportOptions())
    said = {section.key: section.summary(report[section.key]) for section in every() if report.get(section.key)}
    return {key: text for key, text in said.items() if text}


def test_the_place_where_all_ranks_wait_longest_is_told_with_its_share_of_all_waiting() -> None:
    item = 3 * (100 + sum(900 + rank for rank in range(1, RANKS))) * 1000
    sync = 3 * (400 + 50 * (RANKS - 1)) * 1000
    said = sentences()["blocking_calls"]
    assert said.startswith(f"{units.duration(item + sync)} of host time in calls that wait; ")
    assert f"{units.share(item, item + sync)} of it for" in said
    assert "aten::item" in said


def test_copies_of_all_ranks_are_added_up() -> None:
    size = 3 * 4 * sum(range(1, RANKS + 1))
    assert sentences()["copies"].startswith(f"{units.size(size)} in 24 copies took {units.duration(24 * 5000)}")


@pytest.mark.parametrize("key", ["per_step", "launches"])
def test_what_is_of_one_rank_says_of_which(key: str) -> None:
    assert f"of rank {RANKS - 1}" in sentences()[key]


def test_the_largest_kernel_of_a_step_is_that_of_the_rank_that_is_named() -> None:
    assert f"gemm of rank 7: {units.duration(107_000)} per step" in sentences()["per_step"]


def test_the_longest_gap_is_that_of_all_ranks() -> None:
    gaps: list[int] = []
    for made in traces():
        work = made.build().gpu_work().sort("start_ns").with_columns(end=pl.col("start_ns") + pl.col("duration_ns"))
        gaps += (work["start_ns"] - work["end"].shift(1)).drop_nulls().to_list()
    assert sentences()["idle_gaps"].startswith(f"the longest gap is {units.duration(max(gaps))}")


def test_waiting_is_that_of_all_ranks() -> None:
    run = training_job(Recipe(steps=2, layers=2, ranks=RANKS, delay_us={5: 2000}, seed=3)).run()
    session = Session(tuple(made.build() for made in run.traces()), "eight ranks that meet")
    sentence = build(session, ReportOptions(only=("across_ranks",)))["across_ranks"]["sentence"]
    truth = run.truth.collectives
    wait, transfer = int(truth["wait_ns"].sum()), int(truth["transfer_ns"].sum())
    assert sentence.startswith(
        f"{units.share(wait, wait + transfer)} of {units.duration(wait + transfer)} in joined collectives"
    )
    assert "goes back to rank 5" in sentence


def test_flops_are_those_of_a_step_of_a_rank() -> None:
    traces, flops = [], []
    for rank in range(RANKS):
        made, size = TraceBuilder(rank=rank, world_size=RANKS), 64 * (rank + 1)
        for step in range(2):
            made.mark(step, 1000 * step)
            at = 1000 * step + 100
            made.op("aten::mm", at, 50, **{"Input Dims": [[size, 128], [128, 32]], "Input type": ["float", "float"]})
            made.launch("cudaLaunchKernel", at + 10, 5, correlation=step + 1)
            made.kernel("gemm", at + 30, 100, correlation=step + 1)
        flops.append(2 * size * 128 * 32)
        traces.append(made.mark(2, 2000).build())
    report = build(Session(tuple(traces), "eight ranks that multiply"), ReportOptions(only=("roofline",)))
    section = next(section for section in every() if section.key == "roofline")
    said = section.summary(report["roofline"])
    assert said is not None
    assert said.startswith(f"{units.flops(sum(flops) / RANKS)} per step of a rank")


def test_steps_of_a_server_are_counted_over_all_ranks() -> None:
    traces = []
    for rank in range(RANKS):
        made = TraceBuilder(rank=rank, world_size=RANKS)
        for number in range(3):
            at = 1000 * number
            made.annotation("execute_context_0(0)_generation_4(4)", at, 200)
            made.op("aten::mm", at + 10, 50).launch("cudaLaunchKernel", at + 20, 5, correlation=number + 1)
            made.kernel("gemm", at + 50, 100 + 10 * rank, correlation=number + 1)
        traces.append(made.build())
    report = build(Session(tuple(traces), "eight ranks that serve"), ReportOptions(only=("inference",)))
    section = next(section for section in every() if section.key == "inference")
    said = section.summary(report["inference"])
    mean = sum(100 + 10 * rank for rank in range(RANKS)) * 1000 // RANKS
    assert said is not None
    assert said.startswith(
        f"{3 * RANKS} decode steps of {RANKS} ranks of {units.duration(mean)} (at most 1.00 ms between tokens) on the GPU"
    )


def test_kinds_are_shares_of_the_work_of_all_ranks() -> None:
    work = 3 * sum(100 + rank for rank in range(RANKS))
    assert f"gemm {units.share(work, work + 24 * 5)}" in sentences()["kinds"]
