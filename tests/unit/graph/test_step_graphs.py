"""Graphs of single steps of odd traces: they hold what the step did, when it did it, under the names of the whole."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

import numpy as np
import polars as pl
import pytest

from support.odd_traces import Row, gpu_rows_of, odd_builder, odd_trace, rows_of
from traceloom.graph import Plan
from traceloom.graph.graph import Graph
from traceloom.graph.linking import link_session
from traceloom.trace.session import Session
from traceloom.trace.trace import Trace

SEEDS = (1, 2, 3, 5, 6)


@cache
def graph_of(seed: int, step: int) -> Graph:
    return link_session(Session((odd_trace(seed),), "run"), step=step)


def bounds(trace: Trace, step: int) -> tuple[int, int]:
    row = trace.steps.row(by_predicate=pl.col("step") == step, named=True)
    return row["start_ns"], row["end_ns"]


def launched_in(trace: Trace, low: int, high: int) -> list[Row]:
    """The GPU work of calls that begin in a stretch of time and are believed to have submitted it."""
    rows = rows_of(trace)
    return [
        row
        for row in gpu_rows_of(trace)
        if row["launch"] is not None and low <= rows[row["launch"]]["start_ns"] < high
    ]


def steps_of(seed: int) -> Iterator[tuple[int, Graph]]:
    """Each step of a trace with its graph."""
    for step in odd_trace(seed).steps["step"].to_list():
        yield step, graph_of(seed, step)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_step_holds_all_work_that_it_launched_with_its_times(seed: int) -> None:
    for step, graph in steps_of(seed):
        check_device(odd_trace(seed), graph, step)


def check_device(trace: Trace, graph: Graph, step: int) -> None:
    graph.check()
    low, high = bounds(trace, step)
    nodes = {
        row["event"]: row
        for row in graph.nodes.to_dicts()
        if row["lane"] is not None and graph.lanes["kind"][row["lane"]] == "device"
    }
    names = trace.events["name"]
    for row in launched_in(trace, low, high):
        node = nodes[row["event"]]
        assert node["name"] == row["name"]
        assert node["start_ns"] + graph.epoch_ns == row["start_ns"]
        assert node["duration_ns"] == row["ns"]
    for event, node in nodes.items():  # whatever else is in it, is what the whole trace has
        assert node["name"] == names[event]
        assert node["start_ns"] + graph.epoch_ns == trace.events["start_ns"][event]


@pytest.mark.parametrize("seed", SEEDS)
def test_host_nodes_are_events_of_the_step_or_of_what_leads_to_it(seed: int) -> None:
    for step, graph in steps_of(seed):
        check_host(odd_trace(seed), graph, step)


def check_host(trace: Trace, graph: Graph, step: int) -> None:
    _, high = bounds(trace, step)
    rows = rows_of(trace)
    host = graph.nodes.filter(
        pl.col("kind").is_in(["host", "launch", "block"]) & pl.col("event").is_not_null()
    )
    covered: dict[int, int] = {}
    for node in host.to_dicts():
        row = rows[node["event"]]
        begin, end = (
            node["start_ns"] + graph.epoch_ns,
            node["start_ns"] + node["duration_ns"] + graph.epoch_ns,
        )
        assert row["start_ns"] <= begin <= end <= min(row["end_ns"], high)
        assert node["name"] == row["name"]
        covered[node["event"]] = covered.get(node["event"], 0) + node["duration_ns"]
        if node["op"] is not None:
            assert rows[node["op"]]["category"] == "op"
    assert all(spent <= rows[event]["ns"] for event, spent in covered.items())


@pytest.mark.parametrize("seed", [1, 2, 5])
def test_all_steps_together_hold_what_each_of_them_holds(seed: int) -> None:
    trace = odd_trace(seed)
    numbers = trace.steps["step"].to_list()
    whole = link_session(Session((trace,), "run"), step=numbers[0], last=numbers[-1])
    whole.check()
    events = set(whole.nodes["event"].drop_nulls())
    for step in numbers:
        part = graph_of(seed, step)
        of_step = part.nodes.filter(pl.col("step") == step)["event"].drop_nulls()
        assert set(of_step) <= events


@pytest.mark.parametrize("seed", [1, 6])
def test_a_step_is_the_same_later_and_from_a_file_in_another_order(seed: int) -> None:
    step = odd_trace(seed).steps["step"][0]
    first = graph_of(seed, step)
    for changed in (odd_builder(seed, shift_us=6.0e9), odd_builder(seed).shuffled(seed)):
        other = link_session(Session((changed.build(),), "run"), step=step)
        assert other.nodes.equals(first.nodes)
        assert other.edges.equals(first.edges)


@pytest.mark.parametrize("seed", SEEDS)
def test_what_is_calibrated_gives_back_every_time_of_a_step(seed: int) -> None:
    for _, graph in steps_of(seed):
        times = Plan(graph).evaluate(work_ns=graph.nodes["work_ns"].to_numpy())
        assert np.array_equal(np.ravel(times), graph.point_times())
