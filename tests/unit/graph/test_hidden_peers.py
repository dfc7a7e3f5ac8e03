"""One rank of several was recorded: which part of its communication is waiting for the others."""

from __future__ import annotations

import numpy as np
import polars as pl
import pytest

from support.jobs import Change, Recipe, Run, training_job
from traceloom.changes.changes import parse
from traceloom.changes.whatif import scenario_of
from traceloom.graph import Plan, calibrate
from traceloom.graph.graph import Graph
from traceloom.graph.job import join_ranks
from traceloom.graph.rank import link_rank


def alone(run: Run, rank: int) -> Graph:
    return calibrate(join_ranks([link_rank(run.trace(rank).build())]))


def window(run: Run, rank: int) -> int:
    spans = run.of_rank(rank)
    return max(span.end for span in spans) - min(span.start for span in spans)


def late(**more: object) -> Recipe:
    """Rank 0 comes late to the first collective of each step, which no other one is as large as."""
    return Recipe(
        steps=4,
        layers=3,
        ranks=3,
        delay_us={0: 2500},
        sync="device",
        transfer_us=200,
        seed=4,
        **more,
    )  # type: ignore[arg-type]


@pytest.mark.parametrize("sharded", [False, True])
def test_a_faster_network_does_not_shorten_the_wait_for_a_rank_that_always_comes_late(
    *, sharded: bool
) -> None:
    job = training_job(late(sharded=sharded))
    run = job.run()
    graph = alone(run, 1)
    told = int(np.ptp(scenario_of(graph, [parse("network * 2")]).times(Plan(graph))))
    assert told == pytest.approx(window(job.run(Change(collectives=0.5)), 1), rel=0.03)


def test_waits_are_those_of_the_simulation() -> None:
    run = training_job(late()).run()
    graph = alone(run, 1)
    arrivals = graph.edges.join(
        graph.nodes.filter(kind="arrival").select(target="node", at="start_ns"), on="target"
    ).join(graph.nodes.select(source="node", start="start_ns"), on="source")
    waits = int((arrivals["at"] - arrivals["start"]).sum())
    truth = run.truth.collectives.filter(rank=1)
    assert waits == pytest.approx(int(truth["wait_ns"].sum()), rel=0.1)


def test_where_nobody_is_late_jitter_of_transfers_is_no_waiting() -> None:
    recipe = Recipe(steps=4, layers=4, ranks=2, transfer_us=300, spread=0.1, seed=7)
    run = training_job(recipe).run()
    graph = alone(run, 1)
    arrivals = graph.nodes.filter(kind="arrival").height
    truth = run.truth.collectives.filter(rank=1)
    assert arrivals == truth.height
    edges = graph.edges.join(
        graph.nodes.filter(kind="arrival").select(target="node", at="start_ns"), on="target"
    )
    waits = edges.join(graph.nodes.select(source="node", start="start_ns"), on="source").select(
        (pl.col("at") - pl.col("start")).sum()
    )
    transfers = int(truth["transfer_ns"].sum())
    assert int(waits.item()) - int(truth["wait_ns"].sum()) < 0.05 * transfers
