"""What calibration finds in graphs made by hand, what re-timing then answers, and what the law says of it."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import polars as pl
import pytest

from traceloom.errors import UsageError
from traceloom.graph import ABSENT, Plan, calibrate, class_delays, graph as graph_schema, law
from traceloom.graph.critical_path import find_critical_path
from traceloom.graph.graph import Graph
from traceloom.graph.rank import link_rank
from traceloom.testing import TraceBuilder


class Made:
    """Nodes and edges row by row; times in ns."""

    def __init__(self) -> None:
        self.nodes: list[dict[str, Any]] = []
        self.edges: list[dict[str, Any]] = []

    def node(
        self, kind: str, name: str, lane: int | None, start: int, end: int, rank: int = 0
    ) -> int:
        times = {
            "start_ns": start,
            "duration_ns": end - start,
            "work_ns": end - start,
            "residual_ns": 0,
        }
        row = {"node": len(self.nodes), "kind": kind, "name": name, "rank": rank, "lane": lane}
        self.nodes.append(row | times)
        return len(self.nodes) - 1

    def edge(
        self,
        kind: str,
        source: int,
        target: int,
        *,
        from_end: bool = True,
        to_end: bool = False,
        how: str = "measured",
    ) -> int:
        ends = {"from_end": from_end, "to_end": to_end, "delay_ns": 0, "residual_ns": 0}
        self.edges.append(
            {"source": source, "target": target, "kind": kind, "evidence": how} | ends
        )
        return len(self.edges) - 1

    def thread(self, *nodes: int) -> None:
        for before, after in pairwise(nodes):
            self.edge("thread", before, after)

    def graph(self) -> Graph:
        lanes = max((row["lane"] or 0 for row in self.nodes), default=0) + 1
        frames = {
            "nodes": self.nodes,
            "edges": self.edges,
            "lanes": [{"lane": lane} for lane in range(lanes)],
        }
        return Graph(
            **{
                name: pl.DataFrame(rows, schema=graph_schema.GRAPH_SCHEMAS[name])
                for name, rows in frames.items()
            }
        )


def _window(graph: Graph, **change: Any) -> int:
    return int(Plan(graph).evaluate(**change).max())


def _delay(graph: Graph, kind: str, place: str) -> int:
    row = graph.delays.filter((pl.col("kind") == kind) & (pl.col("place") == place))
    return int(row["median_ns"][0])


def launches(lags: list[int], *, busy: int = 0) -> Made:
    """Kernels of 20 ns launched every 100 ns onto an idle stream; `busy`: as many more launched at once at the end."""
    made = Made()
    calls, works = [], []
    for number, lag in enumerate(lags):
        start = 100 * number
        calls.append(made.node("launch", "cudaLaunchKernel", 0, start, start + 100))
        works.append(made.node("kernel", "k", 1, start + lag, start + lag + 20))
    for _ in range(busy):
        start, begin = 100 * len(calls), made.nodes[works[-1]]["start_ns"] + 4000
        calls.append(made.node("launch", "cudaLaunchKernel", 0, start, start + 100))
        works.append(made.node("kernel", "k", 1, begin, begin + 3997))
    for call, work in zip(calls, works, strict=True):
        made.edge("launch", call, work, from_end=False)
    made.thread(*calls)
    for before, after in pairwise(works):
        made.edge("stream", before, after)
    return made


def test_a_launch_takes_the_median_of_those_that_found_the_stream_idle() -> None:
    graph = calibrate(launches([60, 7, 9, 8, 30]).graph())
    # The first work of a stream may wait for what was submitted before the window: 60 is left out.
    assert _delay(graph, "launch", "cudaLaunchKernel > kernel") == 8
    delays = graph.edges.filter(pl.col("kind") == "launch")
    assert delays["delay_ns"].to_list() == [8, 7, 8, 8, 8], "no more than was observed"
    assert delays["residual_ns"].to_list() == [52, 0, 1, 0, 22]
    assert (class_delays(graph)[: len(delays)] == 8).all()


def test_a_backlog_says_nothing_of_launches() -> None:
    graph = calibrate(launches([7, 7, 7], busy=6).graph())
    assert _delay(graph, "launch", "cudaLaunchKernel > kernel") == 7
    stream = graph.delays.filter(pl.col("kind") == "stream", pl.col("place") == "kernel > kernel")
    assert stream.select("count", "median_ns").row(0) == (5, 3)


def test_what_no_edge_shows_is_a_usual_figure_at_most_the_least_slack() -> None:
    graph = calibrate(launches([7, 7, 7]).graph())  # no kernel ever waited for the one before it
    rows = graph.delays.filter(pl.col("kind") == "stream").rows()
    assert rows == [("stream", "kernel > kernel", 0, 80)]
    far = Made()
    calls = [
        far.node("launch", "cudaLaunchKernel", 0, start, start + 9_000) for start in (0, 9_000)
    ]
    works = [far.node("kernel", "k", 1, start, start + 10) for start in (7_000, 16_000)]
    for call, work in zip(calls, works, strict=True):
        far.edge("launch", call, work, from_end=False)
    far.edge("stream", *works)
    far.thread(*calls)
    assert _delay(calibrate(far.graph()), "stream", "kernel > kernel") == 1_000


def waiting(returns: int, *, cost: int = 12) -> Graph:
    """A kernel that a synchronisation awaits, which returns so long after its end; and one that finds it done."""
    made = Made()
    launch = made.node("launch", "cudaLaunchKernel", 0, 0, 10)
    kernel = made.node("kernel", "k", 1, 8, 1008)
    sync = made.node("block", "cudaStreamSynchronize", 0, 10, 1008 + returns)
    again = made.node("block", "cudaStreamSynchronize", 0, 1008 + returns, 1008 + returns + cost)
    after = made.node("host", "aten::add", 0, 1008 + returns + cost, 2000)
    made.edge("launch", launch, kernel, from_end=False)
    made.edge("synchronize", kernel, sync, to_end=True)
    made.thread(launch, sync, again, after)
    return calibrate(made.graph())


@pytest.mark.parametrize("returns", [5, 0, -4])
def test_a_wait_ends_with_what_it_awaits(returns: int) -> None:
    graph = waiting(returns)
    assert graph.nodes["work_ns"].to_list() == [10, 1000, 12, 12, graph.nodes["duration_ns"][4]]
    assert _delay(graph, "synchronize", "kernel > cudaStreamSynchronize") == returns
    work = graph.nodes["work_ns"].to_numpy().copy()
    work[1] = 400
    assert _window(graph, work_ns=work) == _window(graph) - 600
    work[1] = 1  # now its own cost is what a wait takes
    assert _window(graph, work_ns=work) == _window(graph) - (1008 + returns - 22)


def test_a_wait_that_is_taken_away_costs_nothing_but_its_call() -> None:
    graph = waiting(5)
    delay = graph.edges["delay_ns"].to_numpy().copy()
    delay[(graph.edges["kind"] == "synchronize").to_numpy()] = ABSENT
    assert _window(graph, delay_ns=delay) == 2000 - (1013 - 22)


def test_a_call_without_any_free_call_of_its_name_costs_what_launches_cost() -> None:
    made = Made()
    launch = made.node("launch", "cudaLaunchKernel", 0, 0, 10)
    kernel = made.node("kernel", "k", 1, 8, 1008)
    sync = made.node("block", "cudaDeviceSynchronize", 0, 10, 1012)
    made.edge("launch", launch, kernel, from_end=False)
    made.edge("synchronize", kernel, sync, to_end=True)
    made.thread(launch, sync)
    assert calibrate(made.graph()).nodes["work_ns"].to_list() == [10, 1000, 10]


def test_communication_takes_its_own_transfer_and_the_late_rank_is_the_cause() -> None:
    made = Made()
    origins = [made.node("origin", "", None, 0, 0, rank) for rank in (0, 1)]
    hosts = [made.node("host", "op", 2 * rank, 0, (100, 700)[rank], rank) for rank in (0, 1)]
    parts = [
        made.node("collective", "nccl", 2 * rank + 1, (110, 710)[rank], (960, 964)[rank], rank)
        for rank in (0, 1)
    ]
    meeting = made.node("rendezvous", "all_reduce", None, 710, 710, 0)
    for rank in (0, 1):
        made.edge("origin", origins[rank], hosts[rank], how="assumed")
        made.edge("launch", hosts[rank], parts[rank])
        made.edge("rendezvous", parts[rank], meeting, from_end=False)
        made.edge("rendezvous", meeting, parts[rank], to_end=True)
    graph = calibrate(made.graph())
    out = graph.edges.filter(pl.col("to_end"))
    assert out["delay_ns"].to_list() == [250, 250]
    assert out["residual_ns"].to_list() == [0, 4]
    assert graph.nodes["work_ns"].to_list()[4:6] == [0, 0]
    work = graph.nodes["work_ns"].to_numpy().copy()
    work[hosts[0]] = 50  # the early rank gains nothing
    assert _window(graph, work_ns=work) == 964
    work[hosts[1]] = 100
    assert _window(graph, work_ns=work) == 964 - 600
    delay = graph.edges["delay_ns"].to_numpy() // np.where(graph.edges["to_end"].to_numpy(), 2, 1)
    assert _window(graph, delay_ns=delay) == 964 - 125


def test_the_critical_path_adds_up_and_names_what_nothing_explains() -> None:
    graph = calibrate(launches([7, 7, 7, 60]).graph())
    found = law(graph)
    assert found.exact_error_ns == 0
    # 300 ns of launches, then 7 of a usual launch, 53 unexplained, 20 of the kernel; the last call ends later.
    assert found.window_ns == 400
    assert found.path["time_ns"].sum() == 400
    made = launches([7, 7, 7, 260])
    found = law(calibrate(made.graph()))
    assert found.unexplained.to_dicts() == [
        {"time_ns": 253, "kind": "launch", "node": 7, "name": "k", "rank": 0, "start_ns": 560}
    ]
    assert found.residual_ns == 253
    assert found.honest_error_ns == 400 - 580
    assert not found.holds
    assert "253 ns before `k` (launch)" in found.sentence
    assert found.ranks["honest_error_ns"].to_list() == [-180]


def test_what_is_only_assumed_is_told_apart() -> None:
    made = Made()
    origin = made.node("origin", "", None, 0, 0)
    late = made.node("kernel", "k", 0, 900, 1000)
    made.edge("origin", origin, late, how="assumed")
    found = law(calibrate(made.graph()))
    assert (found.residual_ns, found.assumed_ns, found.honest_error_ns) == (0, 900, 0)
    assert "90.0 % of it are waits for what was not recorded" in found.sentence


def test_the_path_goes_back_over_what_held_each_point() -> None:
    graph = waiting(5)
    path = find_critical_path(graph)
    assert graph.nodes["name"][path.nodes.tolist()].to_list() == [
        "aten::add",
        "cudaStreamSynchronize",
        "k",
    ]
    assert graph.edges["kind"][path.edges.tolist()].to_list() == [
        "thread",
        "thread",
        "synchronize",
        "launch",
    ]


def test_a_linked_trace_answers_for_a_faster_device() -> None:
    builder = TraceBuilder()
    at = 0.0
    for number in range(
        1, 21
    ):  # kernels of 100 us launched every 10 us: the device is the bottleneck
        builder.launch("cudaLaunchKernel", at, 6, correlation=number)
        builder.kernel("gemm", 7 + 101.0 * (number - 1), 100, correlation=number)
        at += 10
    builder.launch("cudaDeviceSynchronize", at, 7 + 101 * 20 - at + 4, correlation=99)
    graph = calibrate(link_rank(builder.build()))
    work = graph.nodes["work_ns"].to_numpy().copy()
    work[(graph.nodes["kind"] == "kernel").to_numpy()] //= 2
    assert _window(graph) == 2_031_000
    assert _window(graph, work_ns=work) == 2_031_000 - 20 * 50_000


@pytest.mark.parametrize("shape", [(3,), (2, 3), (1, 1, 2)])
def test_works_that_do_not_fit_are_refused(shape: tuple[int, ...]) -> None:
    graph = launches([7]).graph()
    for argument in ("work_ns", "delay_ns"):
        with pytest.raises(UsageError) as refused:
            Plan(graph).evaluate(**{argument: np.zeros(shape)})
        assert refused.value.slug == "wrong-shape"


def test_works_with_fractions_are_rounded() -> None:
    graph = launches([7]).graph()
    assert Plan(graph).evaluate([100.0, 20.6])[3] - Plan(graph).evaluate()[3] == 1


@pytest.mark.parametrize("longest", [2**53, 2**60, 2**62, 2**63 - 1])
def test_times_beyond_all_reason_are_refused_also_where_they_wrap_around(longest: int) -> None:
    graph = launches([7]).graph()
    delays = np.full(graph.edges.height, longest)
    for arguments in ({"work_ns": np.array([longest, longest])}, {"delay_ns": delays}):
        with pytest.raises(UsageError) as refused:
            Plan(graph).evaluate(**arguments)
        assert refused.value.slug == "times-too-long"


def test_a_graph_of_nothing_keeps_the_law() -> None:
    found = law(calibrate(Made().graph()))
    assert (found.window_ns, found.exact_error_ns, found.honest_error_ns, found.path.height) == (
        0,
        0,
        0,
        0,
    )
