"""Planted delays: copies say what a second run of the same job with that fault says."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from support.jobs import Change, Fault, LateHost, ParallelRecipe, Run, SlowRank, parallel_job
from support.planting import Copies, LateOp, Planted, SlowKernel, plant

LOADER = "enumerate(DataLoader)#_MultiProcessingDataLoaderIter.__next__"


def files(run: Run, folder: Path) -> dict[int, Path]:
    run.write(folder)
    return {rank.rank: folder / f"rank{rank.rank}.kineto.json.gz" for rank in run.ranks}


def document(path: Path) -> Any:
    return json.loads(gzip.decompress(path.read_bytes()))


def summed(frame: pl.DataFrame, key: str) -> pl.DataFrame:
    return (
        frame.group_by(key, maintain_order=True)
        .agg(pl.col("last_rank").first(), pl.col("wait_ns").sum())
        .sort(key)
    )


@pytest.mark.parametrize(
    ("fault", "planted", "more"),
    [
        (LateHost(2, 6000, steps=(1,), by="sleep"), LateOp(2, 6_000_000, LOADER, 1), {"data": 4}),
        (
            LateHost(1, 9000, steps=(0,), by="sleep", before="optimizer"),
            LateOp(1, 9_000_000, "Optimizer.step#AdamW.step"),
            {"data": 4},
        ),
        (SlowRank(2, 1.5), SlowKernel(2, 1.5), {"data": 3}),
        (SlowRank(0, 1.3), SlowKernel(0, 1.3), {"tensor": 2}),
    ],
)
def test_a_copy_shows_what_a_run_with_the_fault_shows(
    tmp_path: Path, fault: Fault, planted: Planted, more: dict[str, Any]
) -> None:
    job = parallel_job(ParallelRecipe(layers=3, steps=3, faults=(fault,), **more))
    faulty, plain = job.run(), job.run(Change(without=frozenset({fault.label})))
    copies = plant(files(plain, tmp_path / "plain"), [planted], tmp_path / "copies")
    true, shown = (
        summed(faulty.truth.collectives, "sequence"),
        summed(copies.collectives, "collective"),
    )
    assert shown["last_rank"].to_list() == true["last_rank"].to_list()
    assert shown["wait_ns"].sum() == pytest.approx(true["wait_ns"].sum(), rel=0.01)
    longest = int(true["wait_ns"].arg_max() or 0)
    assert shown["wait_ns"][longest] == pytest.approx(true["wait_ns"][longest], rel=0.02)
    grown = faulty.window_ns - plain.window_ns
    assert max(copies.grown_ns.values()) == pytest.approx(grown, rel=0.02)


def test_a_copy_shows_the_times_that_it_says(tmp_path: Path) -> None:
    run = parallel_job(ParallelRecipe(data=2, steps=2)).run()
    copies = plant(
        files(run, tmp_path / "plain"),
        [LateOp(1, 3_000_000, "aten::linear", 4)],
        tmp_path / "copies",
    )
    assert_shown(copies)


def assert_shown(copies: Copies) -> None:
    from traceloom.formats import read_kineto

    for rank, path in copies.paths.items():
        trace = read_kineto(path)
        trace.check()
        work = trace.events.filter(
            pl.col("name").str.to_lowercase().str.contains("nccl"), category="kernel"
        )
        mine = copies.collectives.filter(rank=rank).sort("start_ns")
        base = trace.meta.base_ns
        assert work["start_ns"].to_list() == [base + at for at in mine["start_ns"]]
        ends = (work["start_ns"] + work["duration_ns"]).to_list()
        assert ends == [base + at for at in mine["end_ns"]]
        order = trace.gpu_work().sort("stream", "start_ns")
        after = order.with_columns(
            end=(pl.col("start_ns") + pl.col("duration_ns")).shift(1).over("stream")
        )
        assert after.filter(pl.col("end") > pl.col("start_ns")).height == 0


def test_without_faults_the_copies_are_the_recording(tmp_path: Path) -> None:
    recording = files(
        parallel_job(ParallelRecipe(data=3, steps=2, programmatic=True)).run(), tmp_path / "plain"
    )
    copies = plant(recording, [], tmp_path / "copies")
    for rank, path in recording.items():
        assert document(copies.paths[rank]) == document(path)
    assert set(copies.grown_ns.values()) == {0}


def test_a_delay_that_others_wait_for_longer_is_swallowed(tmp_path: Path) -> None:
    late = LateHost(1, 8000, by="sleep")
    run = parallel_job(ParallelRecipe(data=2, steps=1, faults=(late,))).run()
    copies = plant(
        files(run, tmp_path / "plain"), [LateOp(0, 2_000_000, LOADER)], tmp_path / "copies"
    )
    first = copies.collectives.filter(collective=0).sort("rank")
    assert first["moved_ns"].to_list()[0] > 1_500_000  # rank 0 comes later, and still waits
    assert first["last_rank"][0] == 1
    assert copies.grown_ns[1] == 0


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (LateOp(0, 1000, "aten::nothing"), "is none"),
        (SlowKernel(0, 2.0, "nothing"), "has 0 kernels"),
        (LateOp(7, 1000, LOADER), "no trace of rank 7"),
    ],
)
def test_what_is_not_there_cannot_be_late(tmp_path: Path, fault: Planted, message: str) -> None:
    recording = files(parallel_job(ParallelRecipe(data=2, steps=1)).run(), tmp_path / "plain")
    with pytest.raises(ValueError, match=message):
        plant(recording, [fault], tmp_path / "copies")


def test_ranks_with_other_collectives_are_refused(tmp_path: Path) -> None:
    recording = files(parallel_job(ParallelRecipe(data=2, steps=1)).run(), tmp_path / "plain")
    other = files(parallel_job(ParallelRecipe(data=2, steps=3)).run(), tmp_path / "other")
    with pytest.raises(ValueError, match="different numbers of communication kernels"):
        plant({0: recording[0], 1: other[1]}, [], tmp_path / "copies")
