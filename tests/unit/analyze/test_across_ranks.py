"""Ranks against each other: made jobs whose delays are planted, small traces by hand, what cannot be determined."""

from __future__ import annotations

from typing import Any

import numpy as np
import polars as pl
import pytest

from support.jobs import (
    Clock,
    LateHost,
    ParallelRecipe,
    Recipe,
    Run,
    ShardImbalance,
    SlowRank,
    StragglingStep,
    TokenImbalance,
    parallel_job,
    training_job,
)
from traceloom import analyze
from traceloom.analyze.across_ranks import AcrossRanks, compute_step_limit
from traceloom.testing import TraceBuilder
from traceloom.trace.session import Session

ARGS = TraceBuilder.collective_args


def compared(run: Run) -> AcrossRanks:
    return analyze.across_ranks(
        [analyze.summarize_rank(builder.build()) for builder in run.traces()]
    )


def made(recipe: ParallelRecipe) -> tuple[Run, AcrossRanks]:
    run = parallel_job(recipe).run()
    return run, compared(run)


@pytest.fixture(scope="module")
def slow() -> tuple[Run, AcrossRanks]:
    return made(SLOW)


SLOW = ParallelRecipe(
    data=2, tensor=2, pipeline=2, microbatches=2, steps=2, faults=(SlowRank(3, 1.5),)
)


# -- planted delays ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "clocks", [{}, {2: Clock("h1", 5_000_000, 2e-5), 3: Clock("h1", 5_000_000, 2e-5)}]
)
def test_a_late_data_loader_is_found_with_its_rank_and_size_whatever_the_clocks_say(
    clocks: dict[int, Clock],
) -> None:
    run = training_job(Recipe(steps=3, layers=4, ranks=4, delay_us={2: 3000}, clocks=clocks)).run()
    found = compared(run)
    planted = [span.end - span.start for span in run.spans if "DataLoader" in span.name]
    worst = found.collectives.sort("wait_ns", descending=True).row(0, named=True)
    assert (worst["step"], worst["last_rank"], worst["cause"]) == (0, 2, "host_data_loading")
    assert worst["cause_ns"] == pytest.approx(planted[0], rel=0.05)
    assert worst["late_ns"] == pytest.approx(planted[0], rel=0.05)
    assert found.reasons.row(0, named=True)["rank"] == 2
    assert found.ranks.sort("wait_ns")["rank"][0] == 2, "who waits least is the suspect"
    if clocks:
        (other,) = found.clocks.filter(pl.col("host") == "h1").to_dicts()
        assert other["offset_ns"] == pytest.approx(-5_000_000, abs=20_000)
        assert other["residual_ns"] < 2_000


@pytest.mark.thorough
def test_waits_of_a_parallel_job_are_those_of_its_simulation(slow: tuple[Run, AcrossRanks]) -> None:
    run, found = slow
    truth = run.truth.collectives
    assert found.parts.height == truth.height
    assert found.wait_ns == pytest.approx(int(truth["wait_ns"].sum()), abs=found.parts.height)
    theirs = truth.group_by("rank").agg(pl.col("wait_ns").sum()).sort("rank")["wait_ns"].to_list()
    assert found.ranks["wait_ns"].to_list() == pytest.approx(theirs, abs=200)
    arrived_last = truth.unique("instance").group_by(rank="last_rank").len().sort("rank")
    mine = found.ranks.filter(pl.col("last_count") > 0).select(
        pl.col("rank").cast(pl.Int64), "last_count"
    )
    assert mine.rows() == arrived_last.rows()


def test_a_slow_rank_is_blamed_for_the_waiting_that_it_causes_through_all_groups(
    slow: tuple[Run, AcrossRanks],
) -> None:
    """Its partner computes beside its all-reduce: it is late for the next one as well, and it is not to blame."""
    run, found = slow
    top = found.reasons.row(0, named=True)
    assert (top["rank"], top["cause"]) == (3, "compute")
    assert found.slowest is not None
    assert (found.slowest.rank, found.slowest.cause) == (3, "compute")
    blamed = found.collectives.filter(kind="all_reduce", root_rank=3, root_cause="compute")
    assert blamed.height == run.truth.why.height
    assert blamed["wait_ns"].sum() == pytest.approx(int(run.truth.why["saved_ns"].sum()), rel=0.1)
    detail = found.chains.filter((pl.col("cause") == "compute") & (pl.col("rank") == 3))["detail"][
        0
    ]
    assert "gemm" in detail


def test_a_collection_of_garbage_is_named_with_its_length() -> None:
    recipe = ParallelRecipe(
        data=2, tensor=2, steps=2, stacks=True, faults=(LateHost(2, 3000, by="gc"),)
    )
    _, found = made(recipe)
    top = found.reasons.row(0, named=True)
    assert (top["rank"], top["cause"]) == (2, "host_garbage_collection")
    link = found.chains.filter(pl.col("cause") == "host_garbage_collection").row(0, named=True)
    assert link["ns"] == pytest.approx(3_000_000, rel=0.05)
    assert "collect" in link["detail"]


def test_lateness_is_followed_through_an_earlier_collective_of_another_group() -> None:
    """Rank 1 is late in the pair (0, 1); so rank 0 is late in the pair (0, 2), for which it cannot help."""
    late = {0: 0.0, 1: 500.0, 2: 0.0}
    traces = []
    for rank, delay in late.items():
        builder = TraceBuilder(rank, 3, host="h")
        pair = ARGS("allreduce", "a", 2, 8, "Float") | {"Process Group Ranks": "[0, 1]"}
        other = ARGS("allreduce", "b", 2, 8, "Float") | {"Process Group Ranks": "[0, 2]"}
        builder.op("aten::zeros", 0, 1)
        number = 0

        def call(
            at: float, until: float, told: dict[str, Any], builder: TraceBuilder = builder
        ) -> None:
            nonlocal number
            number += 1
            builder.launch("cudaLaunchKernel", at - 3, 1, correlation=number)
            builder.kernel(
                "ncclDevKernel_AllReduce", at, until - at, stream=20, correlation=number, **told
            )

        if rank < 2:
            call(10, 20, pair | {"Seq": 1})
        if rank != 1:
            call(30, 40, other | {"Seq": 1})
        if delay:
            builder.kernel("slow_gemm", 30, delay, correlation=90)
            builder.launch("cudaLaunchKernel", 28, 1, correlation=90)
        if rank < 2:
            call(50 + delay, 560, pair | {"Seq": 2})
        if rank != 1:
            call(570 if rank == 0 else 60, 580, other | {"Seq": 2})
        traces.append(builder.build())
    found = analyze.across_ranks(Session(tuple(traces), "made"))
    rows = {(row["group"], row["sequence"]): row for row in found.collectives.to_dicts()}
    assert (rows["a", 2]["last_rank"], rows["a", 2]["cause"], rows["a", 2]["root_rank"]) == (
        1,
        "compute",
        1,
    )
    assert (rows["b", 2]["last_rank"], rows["b", 2]["cause"]) == (0, "communication")
    assert (rows["b", 2]["root_rank"], rows["b", 2]["root_cause"]) == (1, "compute")
    assert rows["b", 2]["root_instance"] == rows["a", 2]["instance"]
    chain = found.chains.filter(pl.col("chain") == rows["b", 2]["instance"])
    (link,) = chain.filter(pl.col("follows") == rows["a", 2]["instance"]).to_dicts()
    assert link["detail"] == "1 collective, waiting 500 µs; longest for rank 1"
    assert chain.filter((pl.col("link") == 1) & (pl.col("cause") == "compute"))["detail"][
        0
    ].startswith("slow_gemm")


# -- what cannot be determined, and corners ---------------------------------------------------------------------------


def _one(rank: int, kinds: list[str], world: int = 2, start: float = 0.0, **more: Any) -> Any:
    builder = TraceBuilder(rank, world, host="h")
    for place, kind in enumerate(kinds):
        args = ARGS(kind, "0", world, 100, "Float") | {"Seq": place} | more
        builder.launch("cudaLaunchKernel", start + 100 * place + 1, 2, correlation=place + 1)
        builder.kernel(
            "ncclDevKernel_X",
            start + 100 * place + 10,
            50 - start,
            stream=20,
            correlation=place + 1,
            **args,
        )
    return builder.build()


def test_calls_of_different_kinds_under_one_number_are_reported_and_not_joined() -> None:
    traces = _one(0, ["allreduce", "allreduce"]), _one(1, ["allreduce", "broadcast"])
    found = analyze.across_ranks(Session(traces, "made"))
    assert [notice.slug for notice in found.notices] == ["collectives-mismatch"]
    assert found.collectives["sequence"].to_list() == [0]
    assert found.unmatched["count"].sum() == 2


def test_missing_ranks_are_said() -> None:
    found = analyze.across_ranks(
        Session((_one(0, ["allreduce"], 4), _one(1, ["allreduce"], 4)), "made")
    )
    assert [notice.slug for notice in found.notices] == ["ranks-missing"]
    assert found.collectives.select("recorded", "group_size", "whole").rows() == [(2, 4, False)]


def test_wait_is_split_at_the_launch_of_the_last_one_and_unknown_without_it() -> None:
    early = _one(0, ["allreduce"])  # begins at 10, launched at 1
    late = _one(1, ["allreduce"], start=20)  # begins at 30, launched at 21
    found = analyze.across_ranks(Session((early, late), "made"))
    row = found.parts.filter(pl.col("rank") == 0).row(0, named=True)
    assert (row["wait_ns"], row["launch_skew_ns"], row["arrival_wait_ns"]) == (
        20_000,
        11_000,
        9_000,
    )
    assert row["wait_ns"] + row["transfer_ns"] == row["duration_ns"]
    orphan = TraceBuilder(1, 2, host="h").kernel(
        "ncclDevKernel_X", 30, 30, stream=20, **ARGS("allreduce", "0", 2, 100, "Float") | {"Seq": 0}
    )
    found = analyze.across_ranks(Session((early, orphan.build()), "made"))
    row = found.parts.filter(pl.col("rank") == 0).row(0, named=True)
    assert (row["wait_ns"], row["launch_skew_ns"], row["arrival_wait_ns"]) == (20_000, None, None)
    assert found.collectives["launch_skew_ns"].to_list() == [None]


def test_a_broadcast_waits_for_its_root_alone() -> None:
    root = _one(0, ["broadcast"], Root=0)
    found = analyze.across_ranks(Session((root, _one(1, ["broadcast"], start=20, Root=0)), "made"))
    assert found.wait_ns == 0
    assert found.collectives["last_rank"].to_list() == [0]


def test_one_rank_and_ranks_without_communication_give_empty_frames() -> None:
    plain = TraceBuilder(0, 2).op("aten::mm", 0, 5).build()
    for traces in ((plain,), (plain, TraceBuilder(1, 2).op("aten::mm", 3, 5).build())):
        found = analyze.across_ranks(Session(traces, "made"))
        assert (
            found.collectives.height,
            found.chains.height,
            found.heat.height,
            found.notices,
        ) == (0, 0, 0, ())
        assert found.ranks.height == len(traces)


def test_ranks_that_do_not_say_their_number_get_free_ones() -> None:
    one, other = (
        TraceBuilder(None, host="h").kernel("ncclDevKernel_X", 10, 20 + 5 * n) for n in range(2)
    )
    found = analyze.across_ranks(Session((one.build(), other.build()), "made"))
    assert found.ranks["rank"].to_list() == [0, 1]


# -- steps, load, pipelines -------------------------------------------------------------------------------------


def test_a_straggling_step_is_slow_and_compute_is_what_differs() -> None:
    _, found = made(ParallelRecipe(data=2, steps=6, faults=(StragglingStep(3, 2.0),)))
    assert found.slow.steps.filter("slow")["step"].to_list() == [3]
    assert found.slow.differences["class"][0] == "compute"
    sums = found.slow.differences["more_ns"].sum()
    assert sums == pytest.approx(found.slow.steps.filter("slow")["over_ns"][0], rel=0.1)


def test_what_is_usual_is_not_moved_by_the_slow_and_needs_four_steps() -> None:
    assert compute_step_limit(np.array([100, 100, 900])) == (100, None)
    assert compute_step_limit(np.array([100, 100, 100, 900])) == (100, 102)
    # deviations from 105: 15, 5, 5, 5, 5, 4895; their median is 5, so 105 + 3.5 x 1.4826 x 5 = 130.9
    assert compute_step_limit(np.array([90, 100, 110, 100, 110, 5000])) == (105, 130)
    assert compute_step_limit(np.array([], dtype=np.int64)) == (None, None)


def test_uneven_experts_and_tables_show_in_the_load() -> None:
    _, found = made(
        ParallelRecipe(data=4, expert=4, steps=2, faults=(TokenImbalance((1.9, 0.7, 0.7, 0.7)),))
    )
    rows = {row["measure"]: row for row in found.balance.measures.to_dicts()}
    assert (rows["exchanged_bytes"]["max_rank"], rows["compute_ns"]["max_rank"]) == (0, 0)
    assert rows["exchanged_bytes"]["max_over_mean"] > 1.3
    _, found = made(ParallelRecipe(data=4, steps=2, faults=(ShardImbalance(1, 6.0),)))
    rows = {row["measure"]: row for row in found.balance.measures.to_dicts()}
    assert rows["embedding_ns"]["max_rank"] == 1
    assert rows["embedding_ns"]["max_over_mean"] > 2
    assert rows["compute_ns"]["max_over_mean"] < 1.1


def test_stages_and_bubbles_are_those_of_the_schedule(slow: tuple[Run, AcrossRanks]) -> None:
    run, found = slow
    assert found.pipeline.stages.select("rank", "stage").sort("rank").rows() == [
        (rank, rank // 4) for rank in range(8)
    ]
    assert found.pipeline.stages["stage_count"].unique().to_list() == [2]
    steps = found.pipeline.steps
    whole = pl.col("compute_ns") + pl.col("other_ns") + pl.col("bubble_ns")
    assert steps.filter(whole != pl.col("window_ns")).height == 0
    # the truth counts only the time in receives; the first stage has no other bubble
    truth = run.truth.steps.select("step", "rank", "bubble_ns")
    mine = steps.select(pl.col("step", "rank").cast(pl.Int64), "in_pairs_ns").join(
        truth, on=["step", "rank"]
    )
    first = mine.filter(pl.col("rank") < 4)
    assert first["in_pairs_ns"].to_list() == pytest.approx(first["bubble_ns"].to_list(), rel=0.05)


def test_four_stages_stand_in_order() -> None:
    run = training_job(Recipe(steps=2, layers=3, ranks=4, pipeline=True)).run()
    stages = compared(run).pipeline.stages
    assert stages.select("rank", "stage").rows() == [(0, 0), (1, 1), (2, 2), (3, 3)]
    assert stages["bubble_fraction"].is_sorted(), "the last stage waits longest for its first input"
