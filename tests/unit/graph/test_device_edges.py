"""What GPU work waits for: launches, its stream, events of other streams, room on the device."""

from __future__ import annotations

import polars as pl
import pytest

from support.named_edges import edges, launched
from traceloom.graph.rank import link_rank
from traceloom.testing.trace_builder import TraceBuilder


@pytest.mark.parametrize(
    ("call", "driver"),
    [
        ("cudaLaunchKernel", False),
        ("cudaLaunchKernelExC", False),
        ("cudaLaunchCooperativeKernel", False),
        ("cuLaunchKernelEx", True),
        ("hipLaunchKernel", False),
        ("hipExtModuleLaunchKernel", False),
        ("urEnqueueKernelLaunch", False),
    ],
)
def test_every_launch_call_submits_its_work(call: str, driver: bool) -> None:
    built = (
        TraceBuilder()
        .launch(call, 0, 5, correlation=3, driver=driver)
        .kernel("k", 8, 5, correlation=3)
    )
    name = link_rank(built.build()).nodes["name"][1]
    assert edges(link_rank(built.build()), "launch") == [(name, "k", False, False, "correlated")]


def test_one_graph_launch_submits_all_kernels_of_its_graph_in_the_order_of_their_streams() -> None:
    built = TraceBuilder().launch("cudaGraphLaunch", 0, 20, correlation=5)
    for number in range(4):
        built.kernel(f"k{number}", 10 + 10 * number, 8, stream=7 + number % 2, correlation=5)
    graph = link_rank(built.build())
    assert [row[1] for row in edges(graph, "launch")] == ["k0", "k2", "k1", "k3"]
    assert {row[:2] for row in edges(graph, "stream")} == {("k0", "k2"), ("k1", "k3")}


def test_a_kernel_that_starts_before_its_launch_by_the_clock_keeps_its_launch() -> None:
    built = TraceBuilder().op("aten::mm", 0, 50)
    launched(built, "k", 10, 9, 5)
    graph = link_rank(built.build())
    assert edges(graph, "launch")[0][:2] == ("cudaLaunchKernel", "k")
    assert graph.edges.filter(pl.col("kind") == "launch")["delay_ns"].to_list() == [-1000]


def test_work_from_before_the_window_is_counted_and_ordered_by_its_stream_alone() -> None:
    built = (
        TraceBuilder()
        .kernel("old", 0, 10, correlation=900)
        .kernel("older", -20, 10, correlation=901)
    )
    launched(built, "new", 5, 20, 10)
    graph = link_rank(built.build())
    assert {row[:2] for row in edges(graph, "stream")} == {("older", "old"), ("old", "new")}
    rows = graph.coverage.filter(pl.col("subject") == "gpu-work").select("outcome", "count").rows()
    assert dict(rows) == {
        "attached by correlation": 1,
        "orphan: its launch lies before the window": 2,
    }


def test_work_without_a_number_is_not_said_to_lie_before_the_window() -> None:
    built = (
        TraceBuilder()
        .op("aten::mm", 0, 20)
        .launch("cudaLaunchKernel", 5, 4, correlation=50)
        .kernel("gemm", 30, 10)
    )
    rows = (
        link_rank(built.build())
        .coverage.filter(pl.col("subject") == "gpu-work")
        .select("outcome", "count")
        .rows()
    )
    assert rows == [("orphan: it has no correlation", 1)]


def test_where_no_calls_are_recorded_the_op_that_the_file_names_submitted_the_work() -> None:
    built = TraceBuilder(generation="2024").op("aten::mm", 0, 20, external_id=77)
    built.kernel("gemm", 30, 10, correlation=5, **{"External id": 77})
    graph = link_rank(built.build())
    assert edges(graph, "launch") == [("aten::mm", "gemm", False, False, "correlated")]
    rows = graph.coverage.filter(pl.col("subject") == "gpu-work").select("outcome", "count").rows()
    assert rows == [("attached to its op by External id", 1)]


def test_kernels_of_one_stream_that_overlap_wait_for_the_start_and_for_the_last_that_ended() -> (
    None
):
    built = TraceBuilder()
    for name, at, start, length in (("a", 0, 10, 10), ("b", 1, 25, 20), ("c", 2, 40, 20)):
        launched(built, name, at * 5, start, length)
    found = edges(link_rank(built.build()), "stream")
    assert ("a", "b", True, False, "measured") in found
    assert ("b", "c", False, False, "measured") in found


def test_a_recorded_wait_holds_the_next_work_of_its_stream() -> None:
    built = TraceBuilder(generation="2026")
    launched(built, "producer", 0, 10, 30, stream=7)
    built.launch("cudaEventRecord", 6, 1, correlation=70, flow=False)
    launched(built, "unrelated", 8, 41, 30, stream=7)
    built.launch("cudaStreamWaitEvent", 14, 1, correlation=80, flow=False)
    built.sync(
        "Stream Wait Event",
        14,
        1,
        stream=20,
        correlation=80,
        wait_on_stream=7,
        wait_on_cuda_event_record_corr_id=70,
    )
    launched(built, "consumer", 18, 45, 5, stream=20)
    assert edges(link_rank(built.build()), "wait") == [
        ("producer", "consumer", True, False, "measured")
    ]


def test_an_unrecorded_wait_is_inferred_from_what_ended_before_and_refuted_by_time() -> None:
    built = TraceBuilder()
    launched(built, "producer", 0, 10, 30, stream=7)
    launched(built, "too late", 6, 41, 100, stream=7)
    built.launch("cudaStreamWaitEvent", 14, 1, correlation=80, flow=False)
    launched(built, "consumer", 18, 41, 5, stream=20)
    assert edges(link_rank(built.build()), "wait") == [
        ("producer", "consumer", True, False, "inferred")
    ]


def test_ready_work_that_starts_when_a_long_kernel_leaves_waited_for_room() -> None:
    built = TraceBuilder()
    launched(built, "long", 0, 10, 5000, stream=7)
    launched(built, "ready", 20, 5005, 10, stream=20)
    assert edges(link_rank(built.build()), "occupancy") == [
        ("long", "ready", True, False, "inferred")
    ]


def test_work_that_waits_for_nothing_recorded_is_told() -> None:
    built = TraceBuilder()
    launched(built, "first", 0, 10, 10)
    launched(built, "second", 300, 900, 10)
    graph = link_rank(built.op("aten::rest", 910, 90).build())
    assert edges(graph, "occupancy") == []
    assert graph.coverage.filter(pl.col("outcome").str.contains("nothing recorded"))[
        "count"
    ].to_list() == [1]
    assert "unexplained-starts" in [notice.slug for notice in graph.notices]


def test_a_device_that_begins_late_was_behind_what_lies_before_the_window() -> None:
    built = TraceBuilder()
    launched(built, "first", 0, 900, 10)
    launched(built, "second", 10, 911, 10)
    graph = link_rank(built.op("aten::rest", 921, 79).build())
    assert edges(graph, "origin")[-1] == ("origin", "first", True, False, "assumed")
    assert "busy-before-window" in [notice.slug for notice in graph.notices]
    assert graph.coverage.filter(pl.col("outcome").str.contains("behind what"))[
        "time_ns"
    ].to_list() == [900_000]


def test_copies_and_fills_are_nodes_with_kind_and_bytes() -> None:
    built = (
        TraceBuilder()
        .launch("cudaMemcpyAsync", 0, 5, correlation=1)
        .launch("cudaMemsetAsync", 6, 5, correlation=2)
    )
    built.copy("Memcpy HtoD (Pinned -> Device)", 10, 5, bytes=4096, correlation=1).fill(
        20, 5, bytes=64, correlation=2
    )
    graph = link_rank(built.build())
    work = graph.nodes.filter(pl.col("kind").is_in(["copy", "fill"]))
    assert work.select("kind", "bytes").rows() == [("copy", 4096), ("fill", 64)]
    assert graph.transfers.select("kind", "source_memory", "target_memory").rows()[0] == (
        "HtoD",
        "pinned",
        "device",
    )


def test_commands_of_an_accelerator_are_work_and_those_that_wait_end_with_the_event() -> None:
    built = TraceBuilder().op("run", 0, 500)
    built.launch("enqueueCommand memcpyHtoDAsync", 10, 2, correlation=1)
    built.launch("enqueueCommand waitOnEvent", 20, 2, correlation=2)
    for name, start, length, stream, correlation in (
        ("event_record", 100, 5, 101, 1),
        ("event_wait", 40, 66, 102, 2),
    ):
        args = {"device": 0, "stream": stream, "correlation": correlation}
        built._add(
            "X", "mtia_ccp_events", name, start, length, 0, stream, args
        )  # the builder has no method for these
    graph = link_rank(built.build())
    assert edges(graph, "wait") == [("event_record", "event_wait", True, True, "inferred")]
    assert len(edges(graph, "launch")) == 2
    rows = (
        graph.coverage.filter(pl.col("subject") == "device-commands")
        .select("outcome", "count")
        .rows()
    )
    assert rows == [("attached by correlation", 2)]
