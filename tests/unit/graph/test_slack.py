"""Slack: how much later a thing could end without the end coming later."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import polars as pl
import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

from support.jobs import Recipe, training_job
from support.strategies import builders
from traceloom.errors import InvariantError
from traceloom.graph import Plan, calibrate
from traceloom.graph.critical_path import (
    compute_latest_times,
    compute_slack_ns,
    find_critical_path,
    walk_back,
)
from traceloom.graph.graph import Graph
from traceloom.graph.job import join_ranks
from traceloom.graph.rank import link_rank
from traceloom.testing import TraceBuilder

US = 1_000
unhurried = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])


def graph_of(*traces: TraceBuilder) -> Graph:
    return calibrate(join_ranks([link_rank(trace.build()) for trace in traces]))


def plain_latest(graph: Graph) -> list[int]:
    """Latest times by asking again and again, until nothing moves."""
    times = graph.point_times()
    source, target = graph.points()
    delay = (graph.edges["delay_ns"] + graph.edges["residual_ns"]).to_numpy()
    work = (graph.nodes["work_ns"] + graph.nodes["residual_ns"]).to_numpy()
    after: list[list[tuple[int, int]]] = [[] for _ in range(times.size)]
    for one, other, gap in zip(source.tolist(), target.tolist(), delay.tolist(), strict=True):
        after[one].append((other, gap))
    for node, length in enumerate(work.tolist()):
        after[2 * node].append((2 * node + 1, length))
    last = int(times.max())
    latest = [last] * times.size
    moved = True
    while moved:
        moved = False
        for point, targets in enumerate(after):
            found = min(
                [last if not targets else 2**62, *(latest[other] - gap for other, gap in targets)]
            )
            if found != latest[point]:
                latest[point], moved = found, True
    return latest


def test_work_beside_a_longer_one_has_the_difference_as_slack() -> None:
    builder = TraceBuilder().op("aten::mm", 0, 30)
    builder.launch("cudaLaunchKernel", 2, 3, correlation=1).launch(
        "cudaLaunchKernel", 10, 3, correlation=2
    )
    builder.kernel("long", 10, 80, correlation=1, stream=7).kernel(
        "short", 20, 20, correlation=2, stream=20
    )
    builder.launch("cudaDeviceSynchronize", 40, 60, correlation=3)
    graph = graph_of(builder)
    slack = dict(zip(graph.nodes["name"].to_list(), compute_slack_ns(graph).tolist(), strict=True))
    assert slack["long"] == 0
    assert (
        slack["short"] == 50 * US
    )  # it ended at 40, the longer one at 90; both are awaited by one call
    assert slack["cudaDeviceSynchronize"] == 0


def test_what_nothing_waits_for_may_come_as_late_as_the_end() -> None:
    builder = TraceBuilder().op("aten::mm", 0, 100).op("aten::add", 0, 30, thread=2)
    graph = graph_of(builder)
    slack = dict(zip(graph.nodes["name"].to_list(), compute_slack_ns(graph).tolist(), strict=True))
    assert slack["aten::mm"] == 0
    assert slack["aten::add"] == 70 * US
    later = dict(
        zip(graph.nodes["name"].to_list(), compute_slack_ns(graph, 120 * US).tolist(), strict=True)
    )
    assert later["aten::add"] == 90 * US
    assert later["aten::mm"] == 20 * US


def test_a_graph_without_nodes_has_no_slack() -> None:
    empty = graph_of(TraceBuilder())
    assert compute_slack_ns(Graph(empty.nodes[:0], empty.edges[:0])).size == 0


@unhurried
@given(builders())
def test_latest_times_are_those_of_a_plain_search(builder: TraceBuilder) -> None:
    graph = calibrate(link_rank(builder.build()))
    assert compute_latest_times(graph).tolist() == plain_latest(graph)


@pytest.mark.parametrize(
    "recipe",
    [
        Recipe(steps=2, layers=3),
        Recipe(steps=2, layers=2, item=True, side_stream=True, autograd=True, kernel_us=20),
        Recipe(steps=2, layers=3, ranks=3, sync="device", delay_us={1: 500}),
    ],
    ids=["plain", "threads and streams", "ranks"],
)
def test_slack_is_exactly_what_the_end_bears(recipe: Recipe) -> None:
    """A node may take longer by its slack, and everything that is not on the path may take less."""
    graph = graph_of(*training_job(recipe).run().traces(sync_records=True))
    plan, end = Plan(graph), int(graph.point_times().max())
    slack, work = compute_slack_ns(graph), graph.nodes["work_ns"].to_numpy()
    assert (slack >= 0).all()
    assert (slack[find_critical_path(graph).nodes] == 0).all()
    chosen = np.random.default_rng(5).choice(work.size, 60, replace=False)
    for node in chosen.tolist():
        longer, shorter = work.copy(), work.copy()
        longer[node] += slack[node]
        shorter[node] -= min(slack[node], work[node])
        assert plan.evaluate(longer).max() == end
        assert plan.evaluate(shorter).max() == end, "what has slack does not decide the end"
        longer[node] += 10**9
        assert plan.evaluate(longer).max() > end


@given(st.integers(0, 5))
@settings(deadline=None)
def test_a_trail_leads_from_cause_to_cause_until_it_shall_stop(seed: int) -> None:
    graph = graph_of(*training_job(Recipe(steps=2, layers=2, ranks=2, seed=seed)).run().traces())
    times = graph.point_times()
    last = int(times.argmax())
    points, bound = walk_back(graph, last)
    source, target = graph.points()
    assert points[0] == last
    for point, before, edge in zip(
        points.tolist(), points[1:].tolist(), bound.tolist(), strict=False
    ):
        assert before == (source[edge] if edge >= 0 else point - 1)
        assert edge < 0 or target[edge] == point
    assert bound[-1] == -2
    until = int(times[points[len(points) // 2]])
    shorter, _ = walk_back(graph, last, until=until)
    assert times[shorter[-1]] <= until < times[shorter[:-1]].min()


def test_a_walk_through_points_that_wait_for_each_other_ends_with_an_error() -> None:
    graph = graph_of(*training_job(Recipe(steps=1, layers=1)).run().traces())
    nodes = graph.nodes.with_columns(start_ns=0, duration_ns=0, work_ns=0, residual_ns=0)
    pair = graph.edges.head(2).with_columns(
        source=pl.Series([0, 1], dtype=pl.UInt32),
        target=pl.Series([1, 0], dtype=pl.UInt32),
        from_end=True,
        to_end=False,
        delay_ns=0,
        residual_ns=0,
    )
    circle = replace(graph, nodes=nodes, edges=pair.cast(graph.edges.schema))
    with pytest.raises(InvariantError, match="wait for each other"):
        walk_back(circle, 1)
