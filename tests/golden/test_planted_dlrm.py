"""Delays planted into the recording of a real job of eight ranks."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import polars as pl
import pytest

import traceloom
from support.planting import LateOp, SlowKernel, plant
from support.public_traces import DATA

MULTIRANK = DATA / "multirank"
FILES = {rank: MULTIRANK / f"dlrm_rank{rank}.kineto.json.gz" for rank in range(8)}
pytestmark = pytest.mark.skipif(
    not MULTIRANK.is_dir(), reason="the shared trace files are not here"
)


def test_without_faults_the_copies_are_the_recording(tmp_path: Path) -> None:
    copies = plant(FILES, [], tmp_path)
    for rank, path in FILES.items():
        assert json.loads(gzip.decompress(copies.paths[rank].read_bytes())) == json.loads(
            gzip.decompress(path.read_bytes())
        )
    parts = copies.collectives.group_by("collective", maintain_order=True).agg(
        pl.col("last_rank").first(), pl.col("wait_ns").max()
    )
    # facts of the recording, counted from its files
    assert parts["last_rank"].to_list() == [7, 7, 7, 7, 7, 5, 5, 4]
    assert parts["wait_ns"].to_list() == [
        x * 1000 for x in (7624, 1101, 168, 125, 223, 534, 584, 885)
    ]
    assert copies.collectives["wait_ns"].sum() == 46_843_000


def test_the_last_rank_later_makes_all_later(tmp_path: Path) -> None:
    copies = plant(FILES, [LateOp(7, 3_000_000, "## forward ##")], tmp_path)
    first = copies.collectives.filter(collective=0).sort("rank")
    assert first["last_rank"][0] == 7
    waits = [2135, 7624, 508, 6122, 4872, 4669, 505, 0]
    assert first["wait_ns"].to_list()[:7] == pytest.approx(
        [(x + 3000) * 1000 for x in waits[:7]], abs=2000
    )
    assert all(grown == pytest.approx(3_000_000, rel=0.01) for grown in copies.grown_ns.values())


def test_a_rank_that_waits_anyway_may_be_late(tmp_path: Path) -> None:
    copies = plant(FILES, [LateOp(1, 3_000_000, "## forward ##")], tmp_path)
    first = copies.collectives.filter(collective=0).sort("rank")
    assert first["last_rank"][0] == 7
    assert first["wait_ns"][1] == pytest.approx(7_624_000 - 3_000_000, abs=20_000)


def test_slow_kernels_make_their_rank_the_last(tmp_path: Path) -> None:
    copies = plant(FILES, [SlowKernel(4, 30.0, "gemm")], tmp_path)
    last = copies.collectives.unique("collective", maintain_order=True)["last_rank"].to_list()
    assert last.count(4) >= 4
    session = traceloom.load(*copies.paths.values(), cache=False)
    session.check()
    kernels = session.traces[4].events.filter(
        pl.col("name").str.contains("gemm"), category="kernel"
    )
    before = (
        traceloom.load(FILES[4], cache=False)
        .traces[0]
        .events.filter(pl.col("name").str.contains("gemm"), category="kernel")
    )
    assert kernels["duration_ns"].sum() == 30 * before["duration_ns"].sum()
