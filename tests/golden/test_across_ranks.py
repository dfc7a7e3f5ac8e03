"""Ranks against each other on the public traces: the golden facts of the DLRM set, and sums on every file."""

from __future__ import annotations

import gzip
import json
from functools import lru_cache

import numpy as np
import polars as pl
import pytest

from support.public_traces import DATA
from traceloom import analyze
from traceloom.analyze.across_ranks import AcrossRanks
from traceloom.formats import load

pytestmark = [
    pytest.mark.data,
    pytest.mark.skipif(
        not DATA.is_dir(), reason="the public traces (../shared/data) are not on this machine"
    ),
]
ALL = (
    sorted(str(p.relative_to(DATA)) for p in DATA.glob("[kdm]*/*.json.gz")) if DATA.is_dir() else []
)
ALL = [path for path in ALL if ".host." not in path]


@lru_cache(maxsize=1)
def dlrm() -> AcrossRanks:
    return analyze.across_ranks(
        load(*(DATA / "multirank" / f"dlrm_rank{rank}.kineto.json.gz" for rank in range(8)))
    )


def test_last_arrivals_and_skews_of_dlrm() -> None:
    found = dlrm().collectives
    assert found["last_rank"].to_list() == [7, 7, 7, 7, 7, 5, 5, 4]
    assert found["first_rank"].to_list() == [1, 4, 0, 3, 1, 1, 3, 0]
    assert (found["start_skew_ns"] // 1000).to_list() == [7624, 1101, 168, 125, 223, 534, 584, 885]
    assert (found["end_skew_ns"] // 1000).to_list() == [2, 2, 1, 2, 5, 3, 5, 7]
    assert found["recorded"].to_list() == [8] * 8
    assert found["whole"].null_count() == 8, "the files do not say how large the group is"


def test_waiting_dominates_dlrm() -> None:
    found = dlrm()
    assert found.collective_ns == 48_542_000
    assert found.wait_ns == 46_843_000
    assert round(100 * found.wait_ns / found.collective_ns, 1) == 96.5
    first = found.parts.filter(pl.col("instance") == found.collectives["instance"][0]).sort("rank")
    assert (first["wait_ns"] // 1000).to_list() == [2135, 7624, 508, 6122, 4872, 4669, 505, 0]
    low_high = [(9, 11), (6, 8), (7, 8), (6, 8), (82, 87), (8, 11), (18, 23), (62, 69)]
    spans = found.parts.group_by("instance", maintain_order=True).agg(
        (pl.col("transfer_ns").min() // 1000).alias("low"),
        (pl.col("transfer_ns").max() // 1000).alias("high"),
    )
    assert spans.select("low", "high").rows() == low_high


def test_dlrm_waits_go_back_to_rank_7_whose_step_began_later() -> None:
    found = dlrm()
    top = found.ranks.sort("root_ns", descending=True).row(0, named=True)
    assert (top["rank"], top["last_count"]) == (7, 5)
    assert found.ranks.sort("wait_ns")["rank"][0] == 7, "the rank that waits least is the suspect"
    first = found.collectives.row(0, named=True)
    assert first["cause"] == "began_later"
    # by hand: when rank 7's step began, less the mean of the middle half (5 of 7) of the others by arrival
    began, came = zip(*(_by_hand(rank) for rank in range(8)), strict=True)
    middle = sorted(range(7), key=lambda rank: came[rank])[1:6]
    assert first["cause_ns"] == pytest.approx(
        1000 * (began[7] - sum(began[rank] for rank in middle) / 5), abs=1000
    )
    assert first["late_ns"] == pytest.approx(
        1000 * (came[7] - sum(came[rank] for rank in middle) / 5), abs=1000
    )


def _by_hand(rank: int) -> tuple[int, int]:
    """Start of the step and of the first NCCL kernel, µs."""
    with gzip.open(
        DATA / "multirank" / f"dlrm_rank{rank}.kineto.json.gz", "rt", encoding="utf-8"
    ) as file:
        events = json.load(file)["traceEvents"]
    step = next(e["ts"] for e in events if str(e.get("name")).startswith("ProfilerStep"))
    return step, min(e["ts"] for e in events if e.get("cat") == "kernel" and "nccl" in e["name"])


def test_clocks_of_one_host_are_left_alone_and_the_residual_is_told() -> None:
    clocks = dlrm().clocks
    assert clocks["offset_ns"].to_list() == [0] * 8
    assert max(clocks["residual_ns"].drop_nulls()) <= 7_000


def test_links_add_up_to_the_lateness_and_parts_to_durations() -> None:
    found = dlrm()
    sums = found.chains.group_by("chain", "link").agg(pl.col("ns").sum(), pl.col("late_ns").first())
    assert sums.filter(pl.col("ns") != pl.col("late_ns")).height == 0
    whole = found.collectives
    assert (
        whole.filter(pl.col("explained_ns") + pl.col("unexplained_ns") != pl.col("late_ns")).height
        == 0
    )
    parts = found.parts
    assert (
        parts.filter(pl.col("wait_ns") + pl.col("transfer_ns") != pl.col("duration_ns")).height == 0
    )
    assert (
        parts.filter(
            pl.col("launch_skew_ns") + pl.col("arrival_wait_ns") != pl.col("wait_ns")
        ).height
        == 0
    )
    assert found.ranks["blame_ns"].sum() == found.ranks["wait_ns"].sum() == found.wait_ns
    assert found.heat["root_ns"].sum() == found.wait_ns


def test_embedding_tables_of_dlrm_are_uneven_and_compute_is_not() -> None:
    rows = {row["measure"]: row for row in dlrm().balance.measures.to_dicts()}
    assert rows["compute_ns"]["max_over_mean"] < 1.1
    assert rows["embedding_ns"]["max_rank"] == 3
    assert rows["embedding_ns"]["max_over_mean"] > 1.4
    assert rows["exchanged_bytes"]["max_over_mean"] == 1
    assert "tokens" not in rows, "no shapes of aten::embedding there"


def test_two_ranks_of_128_are_said_to_be_a_part_and_not_guessed_together() -> None:
    found = analyze.across_ranks(
        load(*(DATA / "multirank" / f"sampled_rank{rank}_of_128.json.gz" for rank in (0, 1)))
    )
    slugs = {notice.slug for notice in found.notices}
    assert slugs == {"collectives-mismatch", "ranks-missing"}
    assert found.collectives.height == 0
    assert found.unmatched["count"].sum() == 20


@pytest.mark.sampled(3)
@pytest.mark.parametrize("path", ALL)
def test_the_account_of_every_trace_adds_up_at_every_moment(path: str) -> None:
    part = analyze.summarize_rank(load(DATA / path).traces[0])
    book = part.ledger
    assert (book.sums.sum(axis=1) == book.time_ns - book.time_ns[0]).all()
    assert (np.diff(book.sums, axis=0) >= 0).all()
    alone = analyze.across_ranks([part])
    assert alone.collectives.height == 0
    assert alone.slow.steps.height == part.steps.filter("complete").height
