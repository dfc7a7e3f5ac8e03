"""Laws of comparing ranks: sums, order of the inputs, clocks, names of ranks; steps and load against plain counting."""

from __future__ import annotations

import random
from collections import defaultdict
from dataclasses import replace
from functools import cache
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
    SlowRank,
    StragglingStep,
    parallel_job,
    training_job,
)
from support.odd_traces import gpu_rows_of, odd_trace
from traceloom import analyze
from traceloom.analyze.across_ranks import AcrossRanks, compute_step_limit
from traceloom.analyze.rank_summary import TIME_CLASSES, RankSummary, compute_step_breakdown
from traceloom.testing import TraceBuilder
from traceloom.trace.trace import Trace

ARGS = TraceBuilder.collective_args
RECIPES = {
    "mesh": ParallelRecipe(
        data=2, tensor=2, steps=2, layers=1, autograd=True, faults=(SlowRank(1, 2.0),), seed=3
    ),
    "pipelines": ParallelRecipe(
        data=2, pipeline=2, microbatches=3, steps=2, layers=1, faults=(LateHost(2, 2000),)
    ),
    "slow step": ParallelRecipe(
        data=2, steps=6, layers=1, faults=(StragglingStep(2, 3.0),), seed=6
    ),
}


@cache
def run_of(job: str) -> Run:
    return parallel_job(RECIPES[job]).run()


@cache
def traces_of(job: str) -> tuple[Trace, ...]:
    return tuple(builder.build() for builder in run_of(job).traces())


@cache
def parts_of(job: str) -> tuple[RankSummary, ...]:
    return tuple(analyze.summarize_rank(trace) for trace in traces_of(job))


@pytest.fixture(scope="module", params=["mesh", "pipelines"])
def job(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def found(job: str) -> AcrossRanks:
    return analyze.across_ranks(parts_of(job))


# -- sums ---------------------------------------------------------------------------------------------------------


@pytest.mark.sampled(1)
def test_parts_of_a_collective_add_up(found: AcrossRanks) -> None:
    parts, many = found.parts, found.collectives
    assert (parts["wait_ns"] + parts["transfer_ns"]).to_list() == parts["duration_ns"].to_list()
    split = parts.drop_nulls("launch_skew_ns")
    assert (split["launch_skew_ns"] + split["arrival_wait_ns"]).to_list() == split[
        "wait_ns"
    ].to_list()
    assert (parts.select("wait_ns", "transfer_ns", "late_ns").to_numpy() >= 0).all()
    sums = (
        parts.group_by("instance")
        .agg(pl.col("wait_ns").sum(), pl.len(), pl.col("last").sum())
        .sort("instance")
    )
    rows = many.sort("instance")
    assert sums["wait_ns"].to_list() == rows["wait_ns"].to_list()
    assert sums["len"].to_list() == rows["recorded"].to_list()
    assert set(sums["last"]) == {1}


def test_lateness_is_explained_or_said_to_be_unexplained(found: AcrossRanks) -> None:
    rows = found.collectives
    assert (rows["explained_ns"] + rows["unexplained_ns"]).to_list() == rows["late_ns"].to_list()
    assert (rows["schedule_ns"] <= rows["wait_ns"]).all()
    links = found.chains.group_by("chain", "link", "instance").agg(
        pl.col("ns").sum(), pl.col("late_ns").first()
    )
    assert links["ns"].to_list() == links["late_ns"].to_list()
    assert found.chains.filter(link=0).select((pl.col("chain") == pl.col("instance")).all()).item()


def test_every_account_of_who_waited_for_whom_has_the_same_sum(found: AcrossRanks) -> None:
    whole = found.wait_ns
    schedule = int(found.collectives["schedule_ns"].sum())
    assert whole > 0
    for frame in (found.ranks, found.hosts, found.heat):
        assert frame["wait_ns"].sum() == frame["blame_ns"].sum() == whole
        assert frame["root_ns"].sum() == whole - schedule
    assert found.reasons["waited_ns"].sum() == whole
    assert found.ranks["last_count"].sum() == found.collectives.height
    assert found.ranks["collective_count"].sum() == found.parts.height
    assert found.collective_ns == found.parts["duration_ns"].sum()


def test_the_last_to_come_is_the_one_with_the_latest_start(found: AcrossRanks) -> None:
    meetings = found.collectives.filter(pl.col("kind") == "all_reduce").select(
        "instance", "last_rank", "first_rank"
    )
    assert meetings.height
    by_instance = {key[0]: part for key, part in found.parts.group_by("instance")}
    for instance, last, first in meetings.rows():
        rows = by_instance[instance].sort("start_ns")
        assert rows["start_ns"][-1] == rows.filter(rank=last)["start_ns"][0]
        assert rows["start_ns"][0] == rows.filter(rank=first)["start_ns"][0]
        met = rows["start_ns"].max()
        wanted = [
            min(met - start, length)
            for start, length in rows.select("start_ns", "duration_ns").rows()
        ]
        assert rows["wait_ns"].to_list() == wanted


def test_waits_are_those_of_the_simulation(job: str, found: AcrossRanks) -> None:
    truth = run_of(job).truth.collectives
    assert found.parts.height == truth.height
    assert found.wait_ns == pytest.approx(int(truth["wait_ns"].sum()), abs=2 * found.parts.height)


# -- what must not matter -----------------------------------------------------------------------------------------


def test_the_order_of_the_inputs_is_none(job: str, found: AcrossRanks) -> None:
    shuffled = list(parts_of(job))
    random.Random(1).shuffle(shuffled)
    other = analyze.across_ranks(shuffled)
    columns = [
        "kind",
        "group",
        "sequence",
        "start_ns",
        "wait_ns",
        "last_rank",
        "cause",
        "root_rank",
        "root_cause",
    ]
    for frame in ("collectives", "ranks", "reasons", "heat"):
        one, again = getattr(found, frame), getattr(other, frame)
        kept = columns if frame == "collectives" else one.columns
        assert (
            one.select(kept)
            .sort(kept, nulls_last=True)
            .equals(again.select(kept).sort(kept, nulls_last=True))
        )
    assert (
        found.pipeline.stages.sort("rank")
        .drop("pipeline")
        .equals(other.pipeline.stages.sort("rank").drop("pipeline"))
    )


def test_what_one_comparison_remembers_does_not_reach_another() -> None:
    one, other = analyze.across_ranks(parts_of("mesh")), analyze.across_ranks(parts_of("pipelines"))
    assert analyze.across_ranks(parts_of("mesh")).wait_ns == one.wait_ns
    assert analyze.across_ranks(parts_of("mesh")[:2]).parts["rank"].n_unique() == 2
    short = analyze.across_ranks(parts_of("mesh"), chain_count=1)
    assert short.chains["chain"].n_unique() == 1
    assert other.wait_ns != one.wait_ns


@pytest.mark.sampled(1)
@pytest.mark.parametrize("offset_ns", [-3_000_000_000, 12_345, 10**15])
def test_a_clock_that_is_off_is_found_and_changes_no_wait(offset_ns: int) -> None:
    recipe = Recipe(steps=3, layers=3, ranks=2, delay_us={1: 900}, seed=2)
    plain = analyze.across_ranks(
        [analyze.summarize_rank(builder.build()) for builder in training_job(recipe).run().traces()]
    )
    apart = replace(recipe, clocks={0: Clock("h0"), 1: Clock("h1", offset_ns)})
    moved = analyze.across_ranks(
        [analyze.summarize_rank(builder.build()) for builder in training_job(apart).run().traces()]
    )
    offsets = dict(moved.clocks.select("host", "offset_ns").rows())
    assert offsets["h0"] - offsets["h1"] == pytest.approx(offset_ns, abs=20_000)
    assert moved.wait_ns == pytest.approx(plain.wait_ns, rel=0.05)
    assert moved.ranks["last_count"].to_list() == plain.ranks["last_count"].to_list()


# -- the account of a rank ----------------------------------------------------------------------------------------


def test_the_account_of_a_rank_is_all_of_its_time(job: str) -> None:
    for trace, part in zip(traces_of(job), parts_of(job), strict=True):
        book = part.ledger
        assert (np.diff(book.time_ns) > 0).all()
        assert (book.time_ns[0], book.time_ns[-1]) == (trace.start_ns, trace.end_ns)
        assert (book.sums.sum(axis=1) == book.time_ns - book.time_ns[0]).all()
        assert (np.diff(book.sums, axis=0) >= 0).all()
        steps = compute_step_breakdown(part).group_by("step").agg(pl.col("ns").sum()).sort("step")
        lengths = trace.steps.select("step", ns=pl.col("end_ns") - pl.col("start_ns")).filter(
            pl.col("ns") > 0
        )
        assert steps.rows() == lengths.sort("step").rows()
        compute = TIME_CLASSES.index("compute")
        names = [
            row
            for row in gpu_rows_of(trace)
            if row["category"] == "kernel" and "nccl" not in row["name"].lower()
        ]
        assert book.sums[-1, compute] <= sum(row["ns"] for row in names)


@pytest.mark.parametrize("seed", range(8))
def test_the_account_of_an_odd_rank_is_all_of_its_time_too(seed: int) -> None:
    trace = odd_trace(seed)
    book = analyze.summarize_rank(trace).ledger
    assert (book.sums.sum(axis=1) == book.time_ns - book.time_ns[0]).all()
    assert (np.diff(book.sums, axis=0) >= 0).all()
    assert (book.device is None) == (not trace.gpu_work().height)


# -- slow steps ---------------------------------------------------------------------------------------------------


def test_slow_steps_are_those_beyond_what_is_usual() -> None:
    parts = parts_of("slow step")
    slow = analyze.slow_steps(parts)
    lengths: dict[int, list[tuple[int, int]]] = defaultdict(list)
    for part in parts:
        for step, low, high in (
            part.steps.filter("complete").select("step", "start_ns", "end_ns").rows()
        ):
            lengths[step].append((high - low, part.rank or 0))
    whole = {
        step: max(of, key=lambda pair: pair[0])
        for step, of in lengths.items()
        if len(of) == len(parts)
    }
    assert slow.steps.select("step", "duration_ns", "rank").rows() == [
        (s, *whole[s]) for s in sorted(whole)
    ]
    median, limit = compute_step_limit(np.array([length for length, _ in whole.values()]))
    assert limit is not None
    assert (
        slow.steps.filter("slow")["step"].to_list()
        == [s for s in sorted(whole) if whole[s][0] > limit]
        == [2]
    )
    assert slow.steps["over_ns"].to_list() == [whole[s][0] - (median or 0) for s in sorted(whole)]
    differences = slow.differences
    assert (differences["ns"] - differences["usual_ns"]).to_list() == differences[
        "more_ns"
    ].to_list()
    assert differences["more_ns"].is_sorted(descending=True)


@pytest.mark.parametrize("lengths", [[], [5], [5, 5], [5, 5, 5], [7] * 10, [0] * 5])
def test_steps_of_one_length_and_few_steps_are_never_slow(lengths: list[int]) -> None:
    builder, at = TraceBuilder(), 0
    for number, length in enumerate(lengths):
        builder.step(number, at, length).op("aten::mm", at, length)
        at += length
    found = analyze.slow_steps([analyze.summarize_rank(builder.build())])
    assert found.steps.filter("slow").height == found.differences.height == 0


@pytest.mark.parametrize(("long", "slow"), [(102, False), (103, True)])
def test_a_step_is_slow_from_two_per_cent_beyond_the_median_on(long: int, slow: bool) -> None:
    builder, at = TraceBuilder(), 0
    for number, length in enumerate([100, 100, 100, long, 100]):
        builder.step(number, at, length)
        at += length
    found = analyze.slow_steps([analyze.summarize_rank(builder.build())])
    assert found.steps["slow"].to_list() == [False, False, False, slow, False]


# -- load ---------------------------------------------------------------------------------------------------------


def loaded(
    rank: int, kernels_us: list[float], *, tokens: int = 0, sent: int = 0, memory: int = 0
) -> TraceBuilder:
    """One step per kernel; tokens looked up, bytes exchanged and memory in each."""
    builder = TraceBuilder(rank, 2, host=f"h{rank}")
    for step, long in enumerate(kernels_us):
        at = 1000.0 * step
        builder.step(step, at, 1000)
        if tokens:
            builder.op("aten::embedding", at + 1, 30, shapes=[[50_000, 16], [tokens, 2]])
            builder.op("aten::embedding", at + 40, 5, shapes=[[8, 16], [9, 9]])
        builder.launch("cudaLaunchKernel", at + 60, 2, correlation=10 * step + 1)
        builder.kernel("gemm", at + 70, long, correlation=10 * step + 1)
        if sent:
            builder.launch("cudaLaunchKernel", at + 64, 2, correlation=10 * step + 2)
            told = ARGS("all_to_all", "0", 2, sent // 4, "Float")
            builder.kernel(
                "ncclDevKernel_SendRecv", at + 600, 20, stream=20, correlation=10 * step + 2, **told
            )
        if memory:
            builder.allocation(
                at + 80, memory, address=step + 1, total_allocated=memory * (step + 1)
            )
    return builder


def balance(*builders: TraceBuilder) -> dict[str, dict[str, Any]]:
    parts = [analyze.summarize_rank(builder.build()) for builder in builders]
    return {row["measure"]: row for row in analyze.imbalance(parts).measures.to_dicts()}


def test_load_is_told_for_what_all_ranks_tell_and_its_figures_are_plain_means() -> None:
    one = loaded(0, [10, 30], tokens=100, sent=4000, memory=500)
    other = loaded(1, [10, 10], tokens=300, sent=12_000, memory=500)
    rows = balance(one, other)
    assert set(rows) == {"compute_ns", "tokens", "exchanged_bytes", "memory_bytes"}
    compute = rows["compute_ns"]
    assert (compute["mean"], compute["max"], compute["max_rank"]) == (15_000, 20_000, 0)
    assert (compute["min"], compute["min_rank"], compute["max_over_mean"]) == (
        10_000,
        1,
        pytest.approx(4 / 3),
    )
    assert (compute["worst_step"], compute["worst_rank"]) == (1, 0)
    assert compute["worst_max_over_mean"] == pytest.approx(30 / 20)
    assert (rows["tokens"]["mean"], rows["tokens"]["max"], rows["tokens"]["max_rank"]) == (
        400,
        600,
        1,
    )
    assert (rows["exchanged_bytes"]["max"], rows["exchanged_bytes"]["max_rank"]) == (12_000, 1)
    assert rows["memory_bytes"]["max_over_mean"] == 1


@pytest.mark.parametrize("builders", [[loaded(0, [10])], [TraceBuilder(0, 2), TraceBuilder(1, 2)]])
def test_one_rank_and_ranks_without_load_have_no_balance(builders: list[TraceBuilder]) -> None:
    assert balance(*builders) == {}


@pytest.mark.parametrize(
    "shapes", [[[]], [], [[5, 4]], [["x", 4], [2]], [[5, 4], []], [[5, -4], [2, 2]], [[5, 4], 7]]
)
def test_lookups_with_shapes_that_say_nothing_count_no_tokens(shapes: list[Any]) -> None:
    builder = TraceBuilder(0, 2).step(0, 0, 100).op("aten::embedding", 1, 30, shapes=shapes)
    part = analyze.summarize_rank(builder.build())
    assert part.load["tokens"].to_list() == [None]


def test_a_rank_that_exchanges_an_unknown_amount_has_none() -> None:
    builder = loaded(0, [10], sent=4000)
    builder.launch("cudaLaunchKernel", 75, 2, correlation=99)
    builder.kernel(
        "ncclDevKernel_SendRecv",
        700,
        5,
        stream=20,
        correlation=99,
        **{"Collective name": "all_to_allv"},
    )
    assert analyze.summarize_rank(builder.build()).load["exchanged_bytes"].to_list() == [None]


# -- pipelines ----------------------------------------------------------------------------------------------------


def test_windows_of_a_pipeline_are_computing_other_communication_and_bubbles() -> None:
    found = analyze.across_ranks(parts_of("pipelines")).pipeline
    steps = found.steps
    assert steps.height == 2 * 4
    bubble = steps["warm_up_ns"] + steps["steady_ns"] + steps["drain_ns"]
    assert bubble.to_list() == steps["bubble_ns"].to_list()
    assert (steps["compute_ns"] + steps["other_ns"] + steps["bubble_ns"]).to_list() == steps[
        "window_ns"
    ].to_list()
    assert (steps.select("warm_up_ns", "drain_ns", "in_pairs_ns").to_numpy() >= 0).all()
    assert (steps["in_pairs_ns"] <= steps["bubble_ns"]).all()
    for row in found.stages.to_dicts():
        own = steps.filter(rank=row["rank"])
        assert row["mean_bubble_ns"] == pytest.approx(own["bubble_ns"].mean(), abs=1)
        assert (row["min_bubble_ns"], row["max_bubble_ns"]) == (
            own["bubble_ns"].min(),
            own["bubble_ns"].max(),
        )
        assert row["bubble_fraction"] == pytest.approx(
            own["bubble_ns"].sum() / own["window_ns"].sum()
        )
    first = steps.filter(stage=0)
    assert (first["warm_up_ns"] == 0).all(), "the first stage computes first"


def test_ranks_that_only_exchange_with_each_other_in_a_circle_are_no_pipeline() -> None:
    def ring(rank: int) -> TraceBuilder:
        builder = (
            TraceBuilder(rank, 2)
            .launch("cudaLaunchKernel", 1, 1, correlation=1)
            .kernel("gemm", 10, 10, correlation=1)
        )
        for at, (kind, way) in enumerate((("recv", "Src Rank"), ("send", "Dst Rank"))):
            told = ARGS(kind, "0", 2, 8, "Float") | {way: 1 - rank}
            builder.launch("cudaLaunchKernel", 30 + at, 1, correlation=5 + at)
            builder.kernel(
                "ncclDevKernel_SendRecv", 40 + 10 * at, 5, stream=20, correlation=5 + at, **told
            )
        return builder

    found = analyze.across_ranks([analyze.summarize_rank(ring(rank).build()) for rank in (0, 1)])
    assert found.pipeline.stages.height == found.pipeline.steps.height == 0


def test_totals_below_nothing_in_a_damaged_file_are_no_load() -> None:
    traces = [
        TraceBuilder(rank, 2)
        .step(0, 0, 100)
        .op("aten::mm", 5, 20)
        .allocation(9, -8, address=1, total_allocated=total)
        for rank, total in enumerate((-8, -16))
    ]
    assert balance(*traces) == {}
