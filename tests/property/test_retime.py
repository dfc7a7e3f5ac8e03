"""Re-timing agrees with a plain longest path, gives back what was measured, and moves what should move."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

from support.public_traces import DATA
from support.strategies import builders
from traceloom.errors import InvariantError
from traceloom.formats import load
from traceloom.graph import ABSENT, Plan, calibrate, class_delays, graph as graph_schema, law
from traceloom.graph.critical_path import (
    find_binding_edges,
    find_critical_path,
    summarize_path,
    walk_back,
)
from traceloom.graph.graph import Graph, sort_topologically
from traceloom.graph.job import join_ranks
from traceloom.graph.rank import link_rank

TRACES = sorted(
    path
    for folder in ("kineto", "critical_path", "diff", "multirank")
    for path in (DATA / folder).glob("*.json.gz")
    if ".host." not in path.name
)
DELAYS = st.integers(-50, 50)
unhurried = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])


@st.composite
def graphs(draw: Any, most: int = 10) -> Graph:
    """Random graphs without circles: edges go any way in time and in row numbers; nodes may have no length."""
    count = draw(st.integers(1, most))
    rows = [
        {
            "node": node,
            "kind": draw(st.sampled_from(graph_schema.NODE_KINDS)),
            "name": draw(st.sampled_from(["a", "b"])),
            "rank": 0,
            "lane": draw(st.none() | st.integers(0, 2)),
            "start_ns": draw(st.integers(0, 100)),
            "duration_ns": (duration := draw(st.integers(0, 30))),
            "work_ns": (work := draw(st.integers(0, duration))),
            "residual_ns": draw(st.integers(0, duration - work)),
        }
        for node in range(count)
    ]
    place = _places(draw(st.permutations(range(2 * count))))
    order = sorted(
        range(count), key=lambda node: (rows[node]["lane"] or -1, rows[node]["start_ns"], node)
    )
    pairs = [(2 * one + 1, 2 * other) for one, other in pairwise(order)]
    pairs = [pair for pair in pairs if draw(st.booleans())]
    pairs += draw(
        st.lists(
            st.tuples(st.integers(0, 2 * count - 1), st.integers(0, 2 * count - 1)),
            max_size=3 * most,
        )
    )
    edges = [
        {
            "source": low // 2,
            "target": high // 2,
            "kind": draw(st.sampled_from(graph_schema.EDGE_KINDS)),
            "evidence": "inferred",
            "from_end": low % 2 == 1,
            "to_end": high % 2 == 1,
            "delay_ns": draw(DELAYS),
            "residual_ns": draw(st.integers(0, 20)),
        }
        for low, high in (sorted(pair, key=lambda point: place[point]) for pair in pairs)
        if low // 2 != high // 2
    ]
    frames = {"nodes": rows, "edges": edges, "lanes": [{"lane": lane} for lane in range(3)]}
    return Graph(
        **{
            name: pl.DataFrame(rows, schema=graph_schema.GRAPH_SCHEMAS[name])
            for name, rows in frames.items()
        }
    )


def _places(order: list[int]) -> list[int]:
    """A place for each point, of a node's two points the start's first."""
    place = [0] * len(order)
    for at, point in enumerate(order):
        place[point] = at
    for start in range(0, len(order), 2):
        place[start], place[start + 1] = sorted(place[start : start + 2])
    return place


def naive(graph: Graph, work: Any, delay: Any) -> list[int]:
    """The longest path to every point, one point at a time."""
    starts = graph.nodes["start_ns"].to_list()
    into: list[list[tuple[int, int]]] = [[] for _ in range(2 * len(starts))]
    for source, target, weight in zip(
        *(points.tolist() for points in graph.points()), list(delay), strict=True
    ):
        if weight != ABSENT:
            into[target].append((source, int(weight)))
    times: dict[int, int] = {}

    def time(point: int) -> int:
        if point not in times:
            found = [time(source) + weight for source, weight in into[point]]
            if point % 2:
                found.append(time(point - 1) + int(work[point // 2]))
            times[point] = max(found) if found else starts[point // 2]
        return times[point]

    return [time(point) for point in range(2 * len(starts))]


def in_part(graph: Graph, work: Any, delay: Any) -> list[int]:
    """Delays where work of a stream that starts while other work runs does so after the same part of that."""
    whole, _ = _columns(graph)
    out = []
    for edge, value in zip(graph.edges.iter_rows(named=True), delay, strict=True):
        before, now = int(whole[edge["source"]]), int(work[edge["source"]])
        early = (
            edge["kind"] == "stream" and not edge["from_end"] and not edge["to_end"] and before > 0
        )
        out.append(round(value * (now / before)) if early and value != ABSENT else int(value))
    return out


def _columns(graph: Graph) -> tuple[Any, Any]:
    work = (graph.nodes["work_ns"] + graph.nodes["residual_ns"]).to_numpy()
    delay = (graph.edges["delay_ns"] + graph.edges["residual_ns"]).to_numpy()
    return work, delay


@unhurried
@given(graphs())
def test_a_pass_is_the_longest_path(graph: Graph) -> None:
    plan = Plan(graph)
    assert plan.evaluate().tolist() == naive(graph, *_columns(graph))
    bare = naive(graph, graph.nodes["work_ns"], graph.edges["delay_ns"])
    assert (
        plan.evaluate(delay_ns=graph.edges["delay_ns"].to_numpy(), residuals=False).tolist() == bare
    )


@unhurried
@given(graphs(most=40), st.data())
def test_scenarios_together_are_the_single_ones(graph: Graph, data: Any) -> None:
    scenarios = data.draw(st.integers(1, 11))
    random = np.random.default_rng(data.draw(st.integers(0, 99)))
    work = random.integers(0, 60, (scenarios, graph.nodes.height))
    delay = random.integers(-60, 60, (scenarios, graph.edges.height))
    plan = Plan(graph)
    together = plan.evaluate(work, delay, residuals=False)
    assert together.shape == (scenarios, 2 * graph.nodes.height)
    for row in range(scenarios):
        assert together[row].tolist() == naive(
            graph, work[row], in_part(graph, work[row], delay[row])
        )
    assert (plan.evaluate(work[0], delay, residuals=False)[0] == together[0]).all()


@unhurried
@given(graphs(), st.data())
def test_an_absent_edge_holds_nothing_back(graph: Graph, data: Any) -> None:
    if not graph.edges.height:
        return
    work, delay = _columns(graph)
    absent = data.draw(st.lists(st.integers(0, graph.edges.height - 1), min_size=1, unique=True))
    delay = delay.copy()
    delay[absent] = ABSENT
    kept = np.delete(np.arange(delay.size), absent)
    without = replace(graph, edges=graph.edges[kept])
    expected = naive(without, work, in_part(without, work, delay[kept]))
    assert Plan(graph).evaluate(work, delay, residuals=False).tolist() == expected
    assert (
        Plan(graph).evaluate(work, np.stack([delay, delay]), residuals=False)[1].tolist()
        == expected
    )


@unhurried
@given(graphs(), st.data())
def test_points_that_wait_for_each_other_are_refused(graph: Graph, data: Any) -> None:
    node = data.draw(st.integers(0, graph.nodes.height - 1))
    back = {
        "source": node,
        "target": node,
        "kind": "data",
        "evidence": "inferred",
        "from_end": True,
        "to_end": False,
    }
    circle = pl.DataFrame(
        [back | {"delay_ns": 0, "residual_ns": 0}], schema=graph_schema.GRAPH_SCHEMAS["edges"]
    )
    broken = replace(graph, edges=pl.concat([graph.edges, circle]))
    with pytest.raises(InvariantError) as refused:
        Plan(broken)
    assert refused.value.slug == "broken-cycle"
    with pytest.raises(InvariantError):
        sort_topologically(broken.nodes.height, *broken.points())


@unhurried
@given(graphs(most=30))
def test_the_order_of_points_puts_each_after_what_it_waits_for(graph: Graph) -> None:
    order = sort_topologically(graph.nodes.height, *graph.points())
    assert sorted(order.tolist()) == list(range(2 * graph.nodes.height))
    place = np.empty(order.size, dtype=np.int64)
    place[order] = np.arange(order.size)
    source, target = graph.points()
    assert (place[source] < place[target]).all()
    assert (place[0::2] < place[1::2]).all()


def _calibrated_well(graph: Graph) -> Graph:
    """Calibrate, and check what holds of every calibrated graph."""
    ready = calibrate(graph)
    ready.check()
    times = ready.point_times()
    assert (Plan(ready).evaluate() == times).all()
    source, target = ready.points()
    assert (ready.edges["delay_ns"].to_numpy() <= times[target] - times[source]).all()
    bears = ready.edges["residual_ns"].to_numpy() > 0
    ends = np.flatnonzero(ready.nodes["residual_ns"].to_numpy() > 0) * 2 + 1
    borne = np.concatenate([target[bears], ends])
    assert np.unique(borne).size == borne.size, "a point has two residuals"
    again = calibrate(ready)
    for name, frame in ready.frames().items():
        assert frame.equals(again.frames()[name]), name
    return ready


@unhurried
@given(graphs(most=20))
def test_a_calibrated_graph_gives_back_what_was_measured(graph: Graph) -> None:
    _calibrated_well(graph)


@unhurried
@given(builders(max_events=25))
def test_random_traces_come_back_to_the_nanosecond(builder: Any) -> None:
    _calibrated_well(link_rank(builder.build()))


@unhurried
@given(graphs(most=20), st.data())
def test_shortening_a_node_moves_its_successors_unless_something_else_binds(
    graph: Graph, data: Any
) -> None:
    ready = calibrate(graph)
    node = data.draw(st.integers(0, graph.nodes.height - 1))
    work, delay = _columns(ready)
    work = work.copy()
    cut = data.draw(st.integers(0, int(work[node])))
    work[node] -= cut
    before = ready.point_times()
    after = Plan(ready).evaluate(work, delay, residuals=False)
    assert (after <= before).all(), "something came later because a node got shorter"
    delay = np.array(in_part(ready, work, delay), dtype=np.int64)
    bound = find_binding_edges(ready, after, work_ns=work, delay_ns=delay)
    source, _ = ready.points()
    for point in np.flatnonzero(after == before).tolist():
        # Whatever did not move is held by something that is named and did not move either, or waits for nothing.
        if bound[point] >= 0:
            assert after[source[bound[point]]] + delay[bound[point]] == after[point]
            assert before[source[bound[point]]] == after[source[bound[point]]]
        elif bound[point] == -1:
            assert after[point - 1] + work[point // 2] == after[point]
            assert after[point - 1] == before[point - 1]
            assert point // 2 != node or cut == 0
        else:
            assert after[point] == ready.nodes["start_ns"][point // 2]


@pytest.mark.sampled(11)
@pytest.mark.data
@pytest.mark.skipif(not TRACES, reason="the public traces are not here")
@pytest.mark.parametrize("path", TRACES, ids=lambda path: path.name)
def test_every_public_trace_keeps_the_law(path: Path) -> None:
    ready = _calibrated_well(join_ranks([link_rank(load(path, cache=False).traces[0])]))
    found = law(ready)
    assert found.exact_error_ns == 0
    assert abs(found.honest_error) <= 0.02, found.sentence
    assert found.path["time_ns"].sum() == found.window_ns
    assert class_delays(ready).shape == (ready.edges.height,)


@given(graphs(), st.data())
@unhurried
def test_a_trail_goes_point_by_point_over_what_each_waited_for_last(
    graph: Graph, data: Any
) -> None:
    times, source = graph.point_times(), graph.points()[0]
    bound = find_binding_edges(graph)
    last = data.draw(st.integers(0, len(times) - 1))
    until = data.draw(st.none() | st.integers(0, 130))
    expected = [last]
    while bound[expected[-1]] != -2 and (until is None or times[expected[-1]] > until):
        at = expected[-1]
        expected.append(int(source[bound[at]]) if bound[at] >= 0 else at - 1)
    points, causes = walk_back(graph, last, until=until)
    assert points.tolist() == expected
    assert causes.tolist() == bound[expected].tolist()


@given(graphs())
@unhurried
def test_the_parts_of_a_path_are_its_times_by_kind(graph: Graph) -> None:
    path = find_critical_path(graph)
    found: dict[tuple[str, str], list[int]] = {}
    for frame, rows, columns in (
        (graph.nodes, path.nodes, {"work": "work_ns", "residual": "residual_ns"}),
        (graph.edges, path.edges, {"delay": "delay_ns", "residual": "residual_ns"}),
    ):
        for what, column in columns.items():
            for kind, time in frame.select("kind", column)[rows].rows():
                if time:
                    found.setdefault((what, kind), []).append(time)
    if before := int(graph.point_times()[path.first] - graph.point_times().min()):
        found["before", "origin"] = [before]
    told = {
        (what, kind): (count, time)
        for what, kind, count, time in summarize_path(graph, path).rows()
    }
    assert told == {key: (len(times), sum(times)) for key, times in found.items()}
