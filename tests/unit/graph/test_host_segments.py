"""Host threads as nodes: self time, gaps, calls, and nothing lost where events have no length."""

from __future__ import annotations

import polars as pl

from traceloom.graph.graph import Graph
from traceloom.graph.rank import link_rank
from traceloom.testing.trace_builder import TraceBuilder

US = 1_000


def chain(graph: Graph, lane: int = 0) -> list[tuple[str, str, int, int]]:
    """Kind, name, start and duration (us) of the nodes of a lane."""
    nodes = graph.nodes.filter(pl.col("lane") == lane)
    return [
        (r["kind"], r["name"], r["start_ns"] // US, r["duration_ns"] // US)
        for r in nodes.to_dicts()
    ]


def test_an_op_is_cut_into_its_self_time_before_between_and_after_its_children() -> None:
    graph = link_rank(
        TraceBuilder()
        .op("aten::linear", 0, 100)
        .op("aten::t", 10, 20)
        .op("aten::addmm", 50, 30)
        .build()
    )
    graph.check()
    assert chain(graph) == [
        ("host", "aten::linear", 0, 10),
        ("host", "aten::t", 10, 20),
        ("host", "aten::linear", 30, 20),
        ("host", "aten::addmm", 50, 30),
        ("host", "aten::linear", 80, 20),
    ]
    assert graph.edges.filter(pl.col("kind") == "call").height == 4


def test_a_gap_is_time_to_think_and_python_frames_are_no_nodes() -> None:
    built = (
        TraceBuilder()
        .python("train.py(3): step", 0, 100)
        .op("aten::a", 10, 10)
        .op("aten::b", 50, 10)
    )
    graph = link_rank(built.build())
    graph.check()
    assert chain(graph) == [
        ("host", "aten::a", 10, 10),
        ("think", "think", 20, 30),
        ("host", "aten::b", 50, 10),
    ]
    assert graph.edges.filter(pl.col("kind") == "thread").height == 2


def test_events_without_length_keep_their_place_and_their_launches() -> None:
    built = TraceBuilder().op("aten::mm", 10, 20)
    for number in (1, 2):
        built.launch("cudaLaunchKernel", 15, 0, correlation=number).kernel(
            "gemm", 40 + number, 1, correlation=number
        )
    graph = link_rank(built.build())
    graph.check()
    assert [row[0] for row in chain(graph)] == ["host", "launch", "launch", "host"]
    launched = graph.edges.filter(pl.col("kind") == "launch")
    assert launched["source"].n_unique() == launched["target"].n_unique() == 2


def test_a_driver_call_inside_a_runtime_call_belongs_to_it() -> None:
    built = (
        TraceBuilder()
        .launch("cudaLaunchKernel", 10, 10, correlation=1, flow=False)
        .launch("cuLaunchKernel", 12, 5, correlation=2, driver=True)
        .kernel("k", 30, 5, correlation=2)
    )
    graph = link_rank(built.build())
    graph.check()
    assert chain(graph) == [("launch", "cudaLaunchKernel", 0, 10)]
    assert graph.edges.filter(pl.col("kind") == "launch").height == 1
    assert graph.coverage.filter(pl.col("outcome") == "attached by correlation")[
        "count"
    ].to_list() == [1]


def test_a_thread_that_only_asks_whether_events_are_done_is_left_out_and_counted() -> None:
    built = TraceBuilder().op("aten::mm", 0, 1000)
    for time in (100, 400, 700):
        built.launch("cudaEventQuery", time, 2, correlation=time, thread=9, flow=False)
    graph = link_rank(built.build())
    graph.check()
    assert graph.lanes["thread"].to_list() == ["1"]
    row = graph.coverage.filter(pl.col("outcome").str.contains("only poll"))
    assert row["count"].to_list() == [3]
    assert row["time_ns"].to_list() == [6 * US]


def test_nodes_know_their_step_their_op_and_their_event() -> None:
    built = TraceBuilder().step(7, 0, 100).op("aten::mm", 10, 20)
    built.launch("cudaLaunchKernel", 12, 5, correlation=1).kernel("gemm", 30, 5, correlation=1)
    trace = built.build()
    graph = link_rank(trace)
    kernel = graph.nodes.filter(pl.col("kind") == "kernel").to_dicts()[0]
    assert kernel["step"] == 7
    assert trace.events["name"][kernel["op"]] == "aten::mm"
    assert trace.events["name"][kernel["event"]] == "gemm"
    assert kernel["correlation"] == 1


def test_an_empty_trace_makes_an_empty_graph() -> None:
    graph = link_rank(TraceBuilder().build())
    graph.check()
    assert graph.nodes["kind"].to_list() == ["origin"]
    assert graph.edges.height == 0
