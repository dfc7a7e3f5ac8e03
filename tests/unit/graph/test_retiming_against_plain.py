"""Re-timing, calibration, the law, paths and slack of random jobs, against plain loops over their points."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import numpy as np
import polars as pl
import pytest

from support.plain_graph import STEADY_NS, PlainScenario, RandomJob, longest
from traceloom.changes.changes import parse
from traceloom.changes.whatif import scenario_of
from traceloom.graph import ABSENT, Plan, calibrate, class_delays, graph as graph_schema, law
from traceloom.graph.critical_path import (
    compute_latest_times,
    compute_slack_ns,
    find_binding_edges,
    find_critical_path,
    list_largest_residuals,
    summarize_path,
)
from traceloom.graph.graph import Graph

SEEDS = range(15)


@cache
def job(seed: int) -> tuple[Graph, Plan]:
    graph = calibrate(RandomJob(seed).graph())
    return graph, Plan(graph)


@cache
def steady(seed: int) -> tuple[RandomJob, Graph, Plan]:
    """A job whose edges of one kind all take the same."""
    made = RandomJob(seed, steady=True)
    graph = calibrate(made.graph())
    return made, graph, Plan(graph)


def evaluated(graph: Graph, works: list[int], delays: list[int]) -> list[int]:
    """The times of all points by plain loops; an edge with the delay `ABSENT` is none."""
    plain = PlainScenario(graph)
    plain.work, plain.delay = works, [None if delay == ABSENT else delay for delay in delays]
    return plain.times()


# -- evaluation ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scenarios", [1, 2, 7, 8, 9, 17])
def test_scenarios_are_evaluated_as_if_each_were_alone(scenarios: int) -> None:
    for seed in SEEDS[::4]:
        graph, plan = job(seed)
        draw = np.random.default_rng(seed)
        works = draw.integers(0, 90, (scenarios, graph.nodes.height))
        delays = draw.integers(-20, 60, (scenarios, graph.edges.height))
        delays[draw.random(delays.shape) < 0.1] = ABSENT
        times = plan.evaluate(works, delays, residuals=False)
        assert times.shape == (scenarios, 2 * graph.nodes.height)
        for row in range(scenarios):
            assert times[row].tolist() == evaluated(
                graph, works[row].tolist(), delays[row].tolist()
            )


def test_what_one_scenario_shares_with_the_others_may_be_given_once() -> None:
    graph, plan = job(1)
    draw = np.random.default_rng(1)
    works, delay = (
        draw.integers(0, 90, (3, graph.nodes.height)),
        draw.integers(0, 30, graph.edges.height),
    )
    together = plan.evaluate(works, delay, residuals=False)
    assert (together == plan.evaluate(works, np.stack([delay] * 3), residuals=False)).all()
    alone = plan.evaluate(works[1], np.stack([delay] * 2), residuals=False)
    assert (alone == together[1]).all()
    assert alone.shape[0] == 2


def test_residuals_are_added_to_what_is_given() -> None:
    for seed in SEEDS:
        graph, plan = job(seed)
        works, delays = graph.nodes["work_ns"].to_numpy(), graph.edges["delay_ns"].to_numpy()
        node, edge = graph.nodes["residual_ns"].to_numpy(), graph.edges["residual_ns"].to_numpy()
        given = plan.evaluate(works, delays)
        assert given.tolist() == plan.evaluate().tolist() == graph.point_times().tolist()
        assert (
            given.tolist() == plan.evaluate(works + node, delays + edge, residuals=False).tolist()
        )
        bare = evaluated(graph, works.tolist(), delays.tolist())
        assert plan.evaluate(works, delays, residuals=False).tolist() == bare
        honest = evaluated(graph, works.tolist(), class_delays(graph).tolist())
        assert plan.evaluate(residuals=False).tolist() == honest
        assert plan.constants.tolist() == class_delays(graph).tolist()


def test_all_edges_gone_leaves_every_node_where_it_was() -> None:
    for seed in SEEDS:
        graph, plan = job(seed)
        times = plan.evaluate(delay_ns=np.full(graph.edges.height, ABSENT), residuals=False)
        works = graph.nodes["work_ns"].to_numpy()
        assert (times[0::2] == graph.nodes["start_ns"].to_numpy()).all()
        assert (times[1::2] == times[0::2] + works).all()


def grid(lanes: int, length: int, seed: int) -> Graph:
    """Lanes of nodes one behind the other, with as many links between lanes: more pieces than one slice holds."""
    draw = np.random.default_rng(seed)
    count = lanes * length
    number = np.arange(count)
    chained = number[number % length > 0]
    across = np.sort(draw.integers(0, count, (3 * lanes, 2)), axis=1)
    across = across[across[:, 0] // length != across[:, 1] // length]
    # a link goes from an earlier column to a later one, so that nothing waits for itself
    column = across % length
    across = across[column[:, 0] < column[:, 1]]
    source, target = np.append(chained - 1, across[:, 0]), np.append(chained, across[:, 1])
    to_end = np.append(np.zeros(chained.size, dtype=bool), draw.random(len(across)) < 0.5)
    zero = pl.lit(0, pl.Int64)
    nodes = pl.DataFrame(
        {
            "node": number,
            "kind": ["host"] * count,
            "lane": number // length,
            "start_ns": number % length * 50,
            "duration_ns": draw.integers(0, 50, count),
        }
    ).with_columns(work_ns="duration_ns", residual_ns=zero)
    edges = pl.DataFrame({"source": source, "target": target, "to_end": to_end}).with_columns(
        kind=pl.lit("thread"),
        evidence=pl.lit("inferred"),
        from_end=pl.lit(value=True),
        delay_ns=pl.Series(draw.integers(-30, 30, source.size)),
        residual_ns=zero,
    )
    frames = []
    for name, frame in (("nodes", nodes), ("edges", edges)):
        schema = graph_schema.GRAPH_SCHEMAS[name]
        missing = [pl.lit(None).alias(column) for column in schema if column not in frame.columns]
        frames.append(frame.with_columns(missing).select(schema.names()).cast(dict(schema)))
    return Graph(frames[0], frames[1])


@pytest.mark.parametrize(("lanes", "length"), [(1, 400), (300, 4), (700, 2), (30, 30)])
def test_many_lanes_are_evaluated_as_few_are(lanes: int, length: int) -> None:
    graph = grid(lanes, length, lanes)
    plan = Plan(graph)
    works, delays = graph.nodes["work_ns"].to_list(), graph.edges["delay_ns"].to_list()
    expected = evaluated(graph, works, delays)
    given = graph.nodes["work_ns"].to_numpy(), graph.edges["delay_ns"].to_numpy()
    assert plan.evaluate(*given).tolist() == expected
    assert plan.evaluate(np.stack([given[0]] * 3), given[1])[2].tolist() == expected, (
        "several at once"
    )


# -- calibration --------------------------------------------------------------------------------------------------


def test_where_edges_of_a_kind_all_take_the_same_calibration_finds_that() -> None:
    seen: dict[str, int] = {}
    for seed in range(25):
        _, graph, _ = steady(seed)
        for kind, place, count, median in graph.delays.iter_rows():
            if count and place and kind in STEADY_NS:
                assert median == STEADY_NS[kind], (seed, place)
                seen[kind] = seen.get(kind, 0) + count
    assert set(seen) == set(STEADY_NS)


def test_a_job_without_chance_needs_no_residual_on_its_path_and_comes_back_without_any() -> None:
    for seed in range(25):
        _, graph, plan = steady(seed)
        kept = law(graph, plan)
        assert (kept.exact_error_ns, kept.honest_error_ns, kept.residual_ns) == (0, 0, 0)
        assert kept.holds


@pytest.mark.parametrize(
    ("text", "factors"),
    [
        ("gpu * 2", {"kernel": 2.0, "copy": 2.0}),
        ("gpu * 0.5", {"kernel": 0.5, "copy": 0.5}),
        ("ops * 2", {"host": 2.0}),
        ("ops * 0.5", {"host": 0.5}),
        ("think * 3", {"think": 3.0}),
    ],
)
def test_the_answer_is_what_the_job_takes_when_it_runs_with_the_change(
    text: str, factors: dict[str, float]
) -> None:
    compared = 0
    for seed in range(60):
        made, graph, plan = steady(seed)
        # what a kind of edge takes that never decided anything shows only in the changed job
        if (
            graph.delays.filter(pl.col("count") == 0).height
            or not parse(text).selection.nodes(graph).any()
        ):
            continue
        answer = int(np.ptp(scenario_of(graph, [parse(text)]).times(plan)))
        times = made.times(factors)
        # nor is the cost of a call known of which every one waited
        assert answer == pytest.approx(max(times) - min(times), abs=2)
        compared += 1
    assert compared > 5


def test_no_point_has_two_residuals_and_each_is_on_what_came_last() -> None:
    for seed in SEEDS:
        graph, _ = job(seed)
        times = graph.point_times().tolist()
        source, target = (points.tolist() for points in graph.points())
        reached: dict[
            int, list[tuple[int, int]]
        ] = {}  # when each cause would have let the point be, its residual
        for at, residual in enumerate(graph.edges["residual_ns"].to_list()):
            delay = graph.edges["delay_ns"][at]
            assert delay <= times[target[at]] - times[source[at]], "no more than was observed"
            reached.setdefault(target[at], []).append((times[source[at]] + delay, residual))
        for node, (work, residual) in enumerate(
            graph.nodes.select("work_ns", "residual_ns").iter_rows()
        ):
            reached.setdefault(2 * node + 1, []).append((times[2 * node] + work, residual))
        for point, causes in reached.items():
            bear = [(arrival, residual) for arrival, residual in causes if residual]
            last = max(arrival for arrival, _ in causes)
            assert len(bear) <= 1
            assert sum(residual for _, residual in causes) == times[point] - last
            assert all(arrival == last for arrival, _ in bear)


def test_calibration_asks_nothing_of_the_unit_of_time_where_no_usual_figure_is_needed() -> None:
    compared = 0
    for seed in range(60):
        _, graph, _ = steady(seed)
        if graph.delays.filter(pl.col("count") == 0).height:
            continue
        longer = calibrate(
            replace(
                graph,
                nodes=graph.nodes.with_columns(pl.col("start_ns", "duration_ns") * 1000),
                edges=graph.edges.with_columns(pl.col("delay_ns") * 1000),
            )
        )
        # of an even number of launches the usual one lies between two: half a nanosecond is lost in the smaller unit
        assert longer.nodes["work_ns"].to_list() == pytest.approx(
            [1000 * ns for ns in graph.nodes["work_ns"]], abs=500
        )
        assert longer.delays["count"].to_list() == graph.delays["count"].to_list()
        compared += 1
    assert compared > 3


def test_ranks_alike_calibrate_as_one() -> None:
    """Two jobs side by side that know nothing of each other have the delays of one of them."""
    graph, _ = job(4)
    height, lanes = graph.nodes.height, graph.lanes.height
    both = replace(
        graph,
        nodes=pl.concat(
            [
                graph.nodes,
                graph.nodes.with_columns(
                    pl.col("node") + height, pl.col("lane") + lanes, pl.col("rank") + 5
                ),
            ]
        ),
        edges=pl.concat(
            [graph.edges, graph.edges.with_columns(pl.col("source", "target") + height)]
        ),
        lanes=pl.concat([graph.lanes, graph.lanes.with_columns(pl.col("lane") + lanes)]),
        communication=graph.communication.clear(),
    )
    twice = calibrate(both)
    assert twice.delays["median_ns"].to_list() == graph.delays["median_ns"].to_list()
    assert twice.delays["count"].to_list() == [2 * count for count in graph.delays["count"]]
    assert twice.nodes["work_ns"].to_list() == 2 * graph.nodes["work_ns"].to_list()
    assert twice.edges["residual_ns"].to_list() == 2 * graph.edges["residual_ns"].to_list()


# -- the law ------------------------------------------------------------------------------------------------------


def walked(graph: Graph, times: list[int]) -> tuple[list[int], list[int], int]:
    """Edges and nodes of the path from the last point back over what each waited for, and the point it begins with."""
    work = (graph.nodes["work_ns"] + graph.nodes["residual_ns"]).to_list()
    delay = (graph.edges["delay_ns"] + graph.edges["residual_ns"]).to_list()
    into: dict[int, list[tuple[int, int]]] = {}
    for edge, (source, target) in enumerate(
        zip(*(points.tolist() for points in graph.points()), strict=True)
    ):
        into.setdefault(target, []).append((source, edge))
    edges: list[int] = []
    nodes: list[int] = []
    at = max(point for point, time in enumerate(times) if time == max(times))
    while True:
        own = times[at - 1] + work[at // 2] if at % 2 else None
        if own == times[at]:  # its own work explains the end as well as anything that it waited for
            nodes.append(at // 2)
            at -= 1
            continue
        causes = [
            (edge, source)
            for source, edge in into.get(at, [])
            if times[source] + delay[edge] == times[at]
        ]
        if not causes:
            return edges, nodes, at
        edge, at = max(causes)
        edges.append(edge)


@pytest.mark.parametrize("text", ["", "gpu * 0.3", "host * 2", "network * 4"])
def test_the_critical_path_is_that_of_a_plain_walk(text: str) -> None:
    from traceloom.changes.whatif import changed_graph

    for seed in SEEDS:
        graph, plan = job(seed)
        if text:
            if not parse(text).selection.nodes(graph).any():
                continue
            scenario = scenario_of(graph, [parse(text)])
            graph = changed_graph(graph, scenario, scenario.times(plan))
        times = graph.point_times().tolist()
        path = find_critical_path(graph)
        edges, nodes, first = walked(graph, times)
        assert path.edges.tolist() == edges
        assert path.nodes.tolist() == nodes
        assert (path.first, times[path.last]) == (first, max(times))
        consists = summarize_path(graph, path)
        assert consists["time_ns"].sum() == max(times) - min(times)
        assert consists["time_ns"].to_list() == sorted(consists["time_ns"].to_list(), reverse=True)


def test_every_figure_of_the_law_is_that_of_a_plain_evaluation() -> None:
    for seed in SEEDS:
        graph, plan = job(seed)
        kept = law(graph, plan)
        measured = graph.point_times().tolist()
        honest = evaluated(graph, graph.nodes["work_ns"].to_list(), class_delays(graph).tolist())
        window = max(measured) - min(measured)
        assert (kept.window_ns, kept.exact_error_ns) == (window, 0)
        assert kept.honest_error_ns == max(honest) - max(measured)
        assert kept.honest_error == pytest.approx(kept.honest_error_ns / window)
        off = sorted(abs(one - other) for one, other in zip(honest, measured, strict=True))
        at, part = divmod(0.95 * (len(off) - 1), 1)
        assert kept.point_error_ns == int(
            off[int(at)] + part * (off[min(int(at) + 1, len(off) - 1)] - off[int(at)])
        )
        assert kept.points_hold == (kept.point_error <= 0.05)
        assert kept.holds == (abs(kept.honest_error) <= 0.02)
        edges, nodes, _ = walked(graph, measured)
        on_edges = sum(graph.edges["residual_ns"][edge] for edge in edges)
        assert kept.residual_ns == on_edges + sum(
            graph.nodes["residual_ns"][node] for node in nodes
        )
        assumed = [edge for edge in edges if graph.edges["evidence"][edge] == "assumed"]
        assert kept.assumed_ns == sum(graph.edges["delay_ns"][edge] for edge in assumed)
        for row in kept.ranks.iter_rows(named=True):
            of = [node for node, rank in enumerate(graph.nodes["rank"]) if rank == row["rank"]]
            end = max(measured[2 * node + 1] for node in of)
            assert row["window_ns"] == end - min(measured[2 * node] for node in of)
            assert row["honest_error_ns"] == max(honest[2 * node + 1] for node in of) - end
            assert row["exact_error_ns"] == 0


def test_the_largest_unexplained_delays_are_the_largest_residuals_of_the_path() -> None:
    shown = 0
    for seed in range(30):
        graph, _ = job(seed)
        path = find_critical_path(graph)
        rows = list_largest_residuals(graph, path, 3)
        residuals = [graph.edges["residual_ns"][edge] for edge in path.edges.tolist()]
        residuals += [graph.nodes["residual_ns"][node] for node in path.nodes.tolist()]
        assert (
            rows["time_ns"].to_list()
            == sorted((time for time in residuals if time), reverse=True)[:3]
        )
        for row in rows.iter_rows(named=True):
            assert row["name"] == graph.nodes["name"][row["node"]]
            assert row["start_ns"] == graph.nodes["start_ns"][row["node"]]
        shown += rows.height
    assert shown > 5


def test_what_bound_a_point_is_an_edge_that_reaches_it_or_its_own_work_or_nothing() -> None:
    for seed in SEEDS:
        graph, _ = job(seed)
        times = graph.point_times()
        delay = (graph.edges["delay_ns"] + graph.edges["residual_ns"]).to_numpy()
        work = (graph.nodes["work_ns"] + graph.nodes["residual_ns"]).to_numpy()
        source, target = graph.points()
        for point, edge in enumerate(find_binding_edges(graph).tolist()):
            if edge >= 0:
                assert target[edge] == point
                assert times[source[edge]] + delay[edge] == times[point]
            elif edge == -1:
                assert point % 2 == 1
                assert times[point - 1] + work[point // 2] == times[point]
            else:
                assert point not in target


# -- slack --------------------------------------------------------------------------------------------------------


def test_every_node_bears_its_slack_and_not_one_nanosecond_more() -> None:
    for seed in SEEDS[::3]:
        graph, _ = job(seed)
        plain = PlainScenario(graph)
        links = [
            (2 * edge["source"] + edge["from_end"], 2 * edge["target"] + edge["to_end"], delay or 0)
            for edge, delay in zip(plain.edges, plain.delay, strict=True)
        ]
        starts = [row["start_ns"] for row in plain.nodes]
        end = max(longest(starts, plain.work, links))
        for node, slack in enumerate(compute_slack_ns(graph).tolist()):
            # as its end may come later: what its end waits for besides its work is held up as long
            room = graph.nodes["duration_ns"][node] - plain.work[node] + slack
            for longer, later in ((room, 0), (room + 1, 1)):
                works = [
                    work + longer if at == node else work for at, work in enumerate(plain.work)
                ]
                assert max(longest(starts, works, links)) == end + later, (seed, node)


@pytest.mark.parametrize("later", [0, 40, 1000])
def test_latest_times_leave_room_for_every_edge_and_every_work(later: int) -> None:
    for seed in SEEDS:
        graph, _ = job(seed)
        times = graph.point_times()
        end = int(times.max()) + later
        latest = compute_latest_times(graph, end)
        source, target = graph.points()
        delay = (graph.edges["delay_ns"] + graph.edges["residual_ns"]).to_numpy()
        work = (graph.nodes["work_ns"] + graph.nodes["residual_ns"]).to_numpy()
        assert (latest >= times).all()
        assert (latest <= end).all()
        assert (latest[source] + delay <= latest[target]).all()
        assert (latest[0::2] + work <= latest[1::2]).all()
        held = (
            latest[2 * find_critical_path(graph).nodes + 1]
            - times[2 * find_critical_path(graph).nodes + 1]
        )
        assert (held == later).all(), (
            "the path may come later by as much as the end, and by no more"
        )
