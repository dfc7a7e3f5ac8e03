"""Other scales, against jobs of that scale that a simulation of its own ran."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import numpy as np
import polars as pl
import pytest

from support.jobs import ParallelRecipe, parallel_job
from support.scaled import JOBS_OF_64, compared, scaled_recipe, shown, true_step_ns
from traceloom.errors import UsageError
from traceloom.formats import load
from traceloom.graph import graph as graph_schema, link_session
from traceloom.workload.simulate.scale import RecordedJob, find_step_ends, scale
from traceloom.workload.simulate.scale_draws import can_end_a_step
from traceloom.workload.simulate.scale_replicas import RankNumbering

# -- who is who ---------------------------------------------------------------------------------------------------


def test_ranks_are_digits_of_places_and_copies() -> None:
    axis = RankNumbering(stride=2, copies=4, world=16)  # tensor 2, data 4, pipeline 2
    assert axis.positions == 4
    assert [(axis.position(rank), axis.copy(rank)) for rank in (0, 1, 2, 7, 8, 13)] == [
        (0, 0),
        (1, 0),
        (0, 1),
        (1, 3),
        (2, 0),
        (3, 2),
    ]
    assert all(axis.rank(axis.position(rank), axis.copy(rank)) == rank for rank in range(16))


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("options", "ranks", "asked", "slug"),
    [
        ({"data": 2, "tensor": 2}, range(4), {"ranks": 7}, "cannot-scale"),
        ({"data": 2, "tensor": 2}, range(4), {"data_parallel": 0}, "cannot-scale"),
        ({"data": 2, "tensor": 2}, range(4), {"ranks": 2**40}, "cannot-scale"),
        ({"data": 2, "tensor": 2}, range(4), {}, "cannot-scale"),
        ({"data": 4, "expert": 2}, range(4), {"ranks": 5}, "cannot-scale"),
        ({"tensor": 2}, range(2), {"ranks": 4}, "no-data-parallel"),
        ({"data": 2, "pipeline": 2}, range(2), {"ranks": 8}, "unrecorded-role"),
    ],
)
def test_what_cannot_be_scaled_is_refused(
    options: dict[str, int], ranks: Iterable[int], asked: dict[str, int], slug: str
) -> None:
    job = shown(tuple(ranks), scaled_recipe(steps=1, layers=1, **options))
    with pytest.raises(UsageError) as refused:
        scale(job.graph, roles=job.roles, **asked)
    assert refused.value.slug == slug


def test_without_roles_groups_must_agree() -> None:
    several = shown((0, 1, 2, 3), scaled_recipe(steps=1, layers=1, data=2, tensor=2))
    with pytest.raises(UsageError) as refused:
        scale(several.graph, ranks=8)
    assert refused.value.slug == "unknown-roles"
    alone = shown((0, 1), scaled_recipe(steps=2, layers=1, data=2))
    assert scale(alone.graph, ranks=8).data_parallel_before == 2


# -- equal ranks --------------------------------------------------------------------------------------------------

COPIED = {
    "data": ((0, 1, 2, 3), {"data": 4}, 8),
    "data x tensor x pipeline, some of it": (
        (0, 1, 2, 8),
        {"data": 4, "tensor": 2, "pipeline": 2, "microbatches": 2},
        24,
    ),
    "experts": ((0, 1, 2, 3), {"data": 4, "expert": 2}, 12),
    "shards": ((0, 1, 2), {"data": 3, "sharded": True}, 6),
    "works that overlap": ((0, 1), {"data": 2, "programmatic": True}, 8),
}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", COPIED)
def test_one_copy_without_variation_answers_as_all_of_them(name: str) -> None:
    ranks, options, count = COPIED[name]
    job = shown(ranks, scaled_recipe(steps=3, layers=1, **options))
    recorded = RecordedJob(job.graph, job.roles, varied=False)
    answer = recorded.at(ranks=count)
    whole = recorded.graph_at(ranks=count)  # another engine: the pass over a graph of all ranks
    whole.check()
    assert whole.nodes["rank"].drop_nulls().n_unique() == count
    assert answer.after_ns == pytest.approx(
        np.median(np.diff(find_step_ends(whole))), abs=200
    )  # rounding, node by node
    assert answer.p10_ns <= answer.after_ns <= answer.p90_ns
    assert answer.draws == 1


def test_all_ranks_of_a_scaled_graph_meet_in_groups_of_their_size() -> None:
    job = shown(
        (0, 1, 2, 8), scaled_recipe(steps=3, layers=1, data=4, tensor=2, pipeline=2, microbatches=2)
    )
    graph = RecordedJob(job.graph, job.roles).graph_at(ranks=24)
    parts = graph.communication.join(
        graph.nodes.select("node", "rank", node_kind="kind"), on="node"
    )
    met = parts.group_by("instance").agg(pl.len(), pl.col("rank").sort(), pl.col("kind").first())
    assert set(met.filter(pl.col("len") == 6)["rank"].to_list()[0]) <= set(range(24))
    sizes = {tuple(ranks) for ranks in met["rank"].to_list()}
    assert {size for size in sizes if len(size) == 6} == {
        tuple(range(first, first + 12, 2)) for first in (0, 1, 12, 13)
    }  # data parallel groups grow
    assert {size for size in sizes if size[1] - size[0] == 1 and len(size) == 2} == {
        (rank, rank + 1) for rank in range(0, 24, 2)
    }  # tensor parallel groups are there once per copy
    messages = parts.filter(pl.col("node_kind").is_in([graph_schema.SEND, graph_schema.RECEIVE]))
    assert ((messages["peer"] - messages["rank"]).abs() == 12).all()


def test_a_whole_gathered_buffer_stays_and_its_parts_shrink() -> None:
    job = shown((0, 1, 2), scaled_recipe(steps=3, layers=1, data=3, sharded=True))
    table = scale(job.graph, ranks=12, roles=job.roles, draws=2).collectives
    gather = table.row(by_predicate=pl.col("kind") == "all_gather", named=True)
    assert gather["in_bytes_after"] == gather["in_bytes_before"] // 4
    scatter = table.row(by_predicate=pl.col("kind") == "reduce_scatter", named=True)
    assert scatter["in_bytes_after"] == scatter["in_bytes_before"]
    for row in (gather, scatter):
        assert (row["ranks_before"], row["ranks_after"]) == (3, 12)
        grown = (11 / 12) / (2 / 3)
        assert row["transfer_after_ns"] / row["transfer_before_ns"] == pytest.approx(
            grown, rel=1e-3
        )


# -- the truth ----------------------------------------------------------------------------------------------------


def test_eight_of_64_ranks_tell_the_step_of_all() -> None:
    job = shown(tuple(range(8)), scaled_recipe(data=64))
    answer = scale(job.graph, ranks=64, roles=job.roles)
    true = true_step_ns(job.run)
    assert answer.after_ns == pytest.approx(true, rel=0.03)
    assert answer.p10_ns <= true <= answer.p90_ns
    # what nobody saw is waited for: equal ranks would be quicker by more than the answer is off
    assert answer.equal_ns < true - 2 * abs(answer.after_ns - true)


def test_the_same_seed_gives_the_same_answer() -> None:
    job = shown((0, 1, 2, 3), scaled_recipe(data=4, steps=3, layers=1))
    first, again, other = (
        scale(job.graph, ranks=32, roles=job.roles, draws=20, seed=seed) for seed in (3, 3, 4)
    )
    assert first.to_dict() == again.to_dict()
    assert first.after_ns != other.after_ns


def test_more_ranks_wait_longer_for_the_slowest() -> None:
    job = shown((0, 1, 2, 3), scaled_recipe(data=4, steps=3, layers=1, spread=0.15))
    sizes = [scale(job.graph, ranks=count, roles=job.roles, draws=40) for count in (4, 16, 256)]
    # transfers aside, which grow by their bytes on the bus
    waits = [answer.after_ns - answer.equal_ns for answer in sizes]
    assert waits[0] < waits[1] < waits[2]
    assert {notice.slug for notice in sizes[-1].notices} == {"scale-no-network"}
    assert not sizes[0].notices


@pytest.mark.thorough
@pytest.mark.parametrize("name", JOBS_OF_64)
def test_the_interval_holds_the_truth_in_16_of_20_seeds(name: str) -> None:
    rows = [compared(name, seed) for seed in range(20)]
    assert abs(np.median([row.error for row in rows])) <= 0.03
    assert sum(row.held for row in rows) >= 16


def test_a_step_without_a_device_ends_with_work_and_not_with_a_thread_that_waits(
    tmp_path: Path,
) -> None:
    """Threads of a communication library wait far into the next step; the last step would be next to nothing."""
    graph = link_session(
        load(parallel_job(ParallelRecipe(data=2, steps=2, seed=1)).run().write(tmp_path / "job"))
    )
    device = (
        graph.lanes["kind"].cast(pl.String).gather(graph.nodes["lane"].fill_null(0)) == "device"
    )
    assert (can_end_a_step(graph) <= (device & graph.nodes["lane"].is_not_null()).to_numpy()).all()
    assert can_end_a_step(graph).any()
    hosts = replace(
        graph, lanes=graph.lanes.with_columns(kind=pl.lit("host").cast(graph.lanes["kind"].dtype))
    )
    idle = graph.nodes["kind"].cast(pl.String).is_in(["think", "wait"]).to_numpy()
    chosen = can_end_a_step(hosts)
    assert idle.any()
    assert not chosen[idle].any()
    assert chosen[~idle & graph.nodes["lane"].is_not_null().to_numpy()].all()
