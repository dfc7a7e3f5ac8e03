"""Calls and threads that wait: synchronisations, blocking copies, full queues, work handed to other threads."""

from __future__ import annotations

from dataclasses import replace

import polars as pl
import pytest

from support.named_edges import edges, launched
from traceloom.analyze import launches
from traceloom.graph.graph import Graph
from traceloom.graph.rank import link_rank
from traceloom.testing.trace_builder import TraceBuilder


def blocks(graph: Graph) -> list[str]:
    return graph.nodes.filter(pl.col("kind") == "block")["name"].to_list()


@pytest.mark.parametrize(
    "call", ["cudaDeviceSynchronize", "hipDeviceSynchronize", "cuCtxSynchronize"]
)
def test_a_device_is_awaited_on_all_its_streams(call: str) -> None:
    built = TraceBuilder()
    launched(built, "a", 0, 10, 100, stream=7)
    launched(built, "b", 5, 10, 200, stream=20)
    graph = link_rank(built.launch(call, 12, 205, correlation=99, flow=False).build())
    waits = edges(graph, "synchronize")
    name = blocks(graph)[0]
    assert waits == [("a", name, True, True, "inferred"), ("b", name, True, True, "inferred")]


def test_a_second_synchronisation_waits_for_nothing_that_the_first_has_seen() -> None:
    built = TraceBuilder()
    launched(built, "a", 0, 10, 100)
    for number, at in enumerate((12, 200)):
        built.launch(
            "cudaDeviceSynchronize",
            at,
            105 if number == 0 else 3,
            correlation=90 + number,
            flow=False,
        )
    graph = link_rank(built.build())
    assert len(edges(graph, "synchronize")) == 1


def test_a_stream_is_told_by_the_work_that_ends_when_the_call_returns() -> None:
    built = TraceBuilder()
    launched(built, "other stream", 0, 10, 300, stream=20)
    launched(built, "own stream", 6, 12, 20, stream=7)
    built.launch("cudaStreamSynchronize", 12, 303, correlation=99, flow=False)
    assert edges(link_rank(built.build()), "synchronize") == [
        ("other stream", "cudaStreamSynchronize", True, True, "inferred")
    ]


def test_a_stream_whose_work_goes_on_after_the_return_was_not_awaited() -> None:
    built = TraceBuilder()
    launched(built, "goes on", 0, 10, 3000, stream=7)
    built.launch("cudaStreamSynchronize", 12, 3, correlation=99, flow=False)
    assert edges(link_rank(built.build()), "synchronize") == []


def test_records_of_the_device_say_which_event_was_awaited() -> None:
    built = TraceBuilder(generation="2026")
    launched(built, "before the record", 0, 10, 50)
    built.launch("cudaEventRecord", 6, 1, correlation=70, flow=False)
    launched(built, "after the record", 8, 61, 10)
    built.launch("cudaEventSynchronize", 14, 51, correlation=80, flow=False)
    built.sync(
        "Event Sync",
        14,
        51,
        stream=-1,
        correlation=80,
        wait_on_stream=7,
        wait_on_cuda_event_record_corr_id=70,
    )
    assert edges(link_rank(built.build()), "synchronize") == [
        ("before the record", "cudaEventSynchronize", True, True, "measured")
    ]


def test_a_pageable_copy_to_the_host_blocks_and_a_pinned_one_does_not() -> None:
    built = TraceBuilder()
    for number, memory in enumerate(("Pageable", "Pinned")):
        at = 1000 * number
        built.launch(
            "cudaMemcpyAsync", at, 120 if memory == "Pageable" else 5, correlation=number + 1
        )
        name = f"Memcpy DtoH (Device -> {memory})"
        built.copy(name, at + 10, 100, bytes=64, correlation=number + 1)
    graph = link_rank(built.build())
    assert [row[0] for row in edges(graph, "synchronize")] == ["Memcpy DtoH (Device -> Pageable)"]
    assert len(blocks(graph)) == 1


def test_a_call_that_returns_before_what_it_awaited_by_the_clock_keeps_its_edge() -> None:
    built = TraceBuilder()
    launched(built, "a", 0, 10, 100)
    graph = link_rank(
        built.launch("hipDeviceSynchronize", 12, 90, correlation=99, flow=False).build()
    )
    assert len(edges(graph, "synchronize")) == 1
    assert graph.edges.filter(pl.col("kind") == "synchronize")["delay_ns"].to_list() == [-8000]


def test_allocations_cost_what_they_cost() -> None:
    built = TraceBuilder()
    launched(built, "a", 0, 10, 100)
    graph = link_rank(built.launch("cudaFree", 12, 99, correlation=99, flow=False).build())
    assert edges(graph, "synchronize") == []
    assert blocks(graph) == []


def test_launches_that_find_the_queue_full_wait_for_the_work_that_makes_room() -> None:
    built, room = TraceBuilder(), 1000
    for number in range(room + 40):
        held = number >= room
        at = 5 * number if not held else 5 * room + 100 * (number - room)
        built.launch("cudaLaunchKernel", at, 99 if held else 4, correlation=number + 1)
        built.kernel(f"k{number}", 4998 + 100 * number, 100, correlation=number + 1)
    graph = link_rank(built.build())
    graph.check()
    queue = graph.edges.filter(pl.col("kind") == "queue")
    first = queue.sort("target").to_dicts()[0]
    assert graph.nodes["name"][first["source"]] == "k0"
    assert (queue["from_end"] & queue["to_end"]).all()
    assert graph.coverage.filter(pl.col("outcome") == "held up by a full queue")["count"][0] >= 40


def backward(*, inside: bool, thread: int = 1) -> TraceBuilder:
    """The main thread starts the backward pass on another thread and waits for it."""
    built = TraceBuilder().annotation("## start ##", 0, 5, thread=thread)
    if inside:
        built.annotation("## backward ##", 6, 2000, thread=thread)
    built.op("aten::ones_like", 10, 20, thread=thread).op("aten::next", 2100, 50, thread=thread)
    for number in range(10):
        name = "autograd::engine::evaluate_function: MmBackward0"
        built.op(name, 200 + 150 * number, 140, thread=2)
    return built


@pytest.mark.parametrize("inside", [True, False])
def test_the_main_thread_waits_for_the_backward_pass_inside_self_time_too(inside: bool) -> None:
    graph = link_rank(backward(inside=inside).build())
    graph.check()
    wait = graph.nodes.filter(pl.col("kind") == "wait").to_dicts()
    assert [(row["start_ns"] // 1000, row["duration_ns"] // 1000) for row in wait] == [(200, 1490)]
    into = graph.edges.filter(
        (pl.col("kind") == "cross-thread") & (pl.col("target") == wait[0]["node"])
    ).to_dicts()
    assert len(into) == 1
    assert into[0]["from_end"]
    assert into[0]["to_end"]
    assert graph.nodes["start_ns"][into[0]["source"]] == 1550 * 1000
    out = graph.edges.filter((pl.col("kind") == "cross-thread") & ~pl.col("to_end")).to_dicts()
    assert graph.nodes["start_ns"][out[0]["target"]] == 200 * 1000
    assert graph.nodes["lane"][out[0]["source"]] == wait[0]["lane"]


@pytest.mark.parametrize("first_does", ["nothing", "one annotation"])
def test_a_program_that_trains_in_another_thread_waits_there(first_does: str) -> None:
    built = backward(inside=True, thread=9)
    if first_does == "one annotation":
        built.annotation("serve forever", 0, 3000)
    graph = link_rank(built.build())
    graph.check()
    wait = graph.nodes.filter(pl.col("kind") == "wait").to_dicts()
    assert [(row["start_ns"] // 1000, row["duration_ns"] // 1000) for row in wait] == [(200, 1490)]
    assert graph.lanes["thread"].gather([row["lane"] for row in wait]).to_list() == ["9"]


@pytest.mark.parametrize(("ends", "waits"), [(1995, 1), (1300, 0)])
def test_a_thread_of_the_backward_pass_waits_in_self_time_for_communication(
    ends: int, waits: int
) -> None:
    built = TraceBuilder().op("aten::mm", 0, 90)
    built.op("autograd::engine::evaluate_function: RingBackward", 100, 1900, thread=2)
    built.op("c10d::allreduce_", 110, 50, thread=2)
    built.annotation("gloo:all_reduce", 165, ends - 165, thread=5)
    graph = link_rank(built.build())
    graph.check()
    lane = graph.lanes.filter(pl.col("thread") == "2")["lane"][0]
    found = graph.nodes.filter(pl.col("kind") == "wait", pl.col("lane") == lane)
    assert found.height == waits
    if waits:
        assert (found["start_ns"][0] // 1000, found["duration_ns"][0] // 1000) == (
            160,
            1835,
        )  # since it asked for it
        into = graph.edges.filter(pl.col("target") == found["node"][0], pl.col("to_end"))
        assert graph.nodes["name"].gather(into["source"]).to_list() == ["gloo:all_reduce"]


def test_a_worker_that_was_idle_is_woken_by_what_ended_last() -> None:
    built = TraceBuilder().op("aten::a", 0, 100).op("aten::b", 1000, 100)
    built.op("work", 130, 20, thread=2).op("work", 1110, 20, thread=2)
    graph = link_rank(built.build())
    graph.check()
    waits = graph.nodes.filter(pl.col("kind") == "wait").to_dicts()
    assert [(row["start_ns"] // 1000, row["duration_ns"] // 1000) for row in waits] == [(150, 960)]
    found = edges(graph, "cross-thread")
    assert ("aten::a", "work", True, False, "inferred") in found
    assert ("aten::b", "wait", True, True, "inferred") in found


def test_threads_that_work_side_by_side_do_not_wait_for_each_other() -> None:
    built = TraceBuilder()
    for number in range(20):
        built.op("mine", 100 * number, 90).op("theirs", 100 * number + 35, 90, thread=2)
    graph = link_rank(built.build())
    graph.check()
    assert graph.nodes.filter(pl.col("kind") == "wait").height == 0


def test_forward_and_backward_are_joined_by_number_or_arrow() -> None:
    built = TraceBuilder().op("aten::mm", 0, 50, sequence=5)
    built.op(
        "autograd::engine::evaluate_function: MmBackward0",
        100,
        50,
        sequence=5,
        forward_thread=1,
        thread=2,
    )
    built.op("MmBackward0", 110, 30, sequence=5, forward_thread=1, thread=2)
    found = edges(link_rank(built.build()), "forward-backward")
    assert found == [
        ("aten::mm", "autograd::engine::evaluate_function: MmBackward0", True, False, "correlated")
    ]
    arrow = edges(
        link_rank(built.forward_backward(1, 0, 110, backward_thread=2).build()), "forward-backward"
    )
    assert arrow == [("aten::mm", "MmBackward0", True, False, "measured")]


def test_the_main_thread_waits_for_gloo_which_ends_its_own_event_later() -> None:
    built = TraceBuilder().op("c10d::allreduce_", 0, 100).op("aten::next", 5000, 100)
    built.annotation("gloo:all_reduce", 90, 5200, thread=5)
    graph = link_rank(built.build())
    graph.check()
    wait = graph.nodes.filter(pl.col("kind") == "wait").to_dicts()
    assert [(row["start_ns"] // 1000, row["duration_ns"] // 1000) for row in wait] == [(100, 4900)]
    into = graph.edges.filter(pl.col("target") == wait[0]["node"], pl.col("to_end")).to_dicts()
    assert [graph.nodes["name"][edge["source"]] for edge in into] == ["gloo:all_reduce"]
    assert into[0]["delay_ns"] == -290_000


@pytest.mark.parametrize(("name", "waits"), [("dispatch", True), ("aten::nonzero", False)])
def test_self_time_after_a_launch_that_ends_with_its_work_looked_at_memory(
    name: str, waits: bool
) -> None:
    built = TraceBuilder().op(name, 0, 5000).op("after", 5000, 10)
    launched(built, "notify_dispatch", 10, 20, 5010)
    graph = link_rank(built.build())
    found = [("notify_dispatch", name, True, True, "inferred")] if waits else []
    assert edges(graph, "synchronize") == found
    assert blocks(graph) == ([name] if waits else [])


def test_self_time_that_ends_at_another_time_is_work() -> None:
    built = TraceBuilder().op("dispatch", 0, 5000)
    launched(built, "notify_dispatch", 10, 20, 4000)
    assert edges(link_rank(built.build()), "synchronize") == []


@pytest.mark.parametrize(
    "call",
    [
        "cudaStreamSynchronize",
        "hipStreamSynchronize",
        "cuStreamSynchronize",
        "urQueueFinish",
        "synchronizeStream",
    ],
)
def test_streams_of_every_vendor_are_awaited(call: str) -> None:
    built = TraceBuilder()
    launched(built, "a", 0, 10, 100)
    graph = link_rank(built.launch(call, 12, 105, correlation=99, flow=False).build())
    assert len(edges(graph, "synchronize")) == 1
    assert len(blocks(graph)) == 1


@pytest.mark.parametrize(
    "call", ["cudaEventSynchronize", "hipEventSynchronize", "urEventWait", "zeEventHostSynchronize"]
)
def test_events_of_every_vendor_are_awaited(call: str) -> None:
    built = TraceBuilder()
    launched(built, "a", 0, 10, 100)
    graph = link_rank(built.launch(call, 12, 105, correlation=99, flow=False).build())
    assert len(edges(graph, "synchronize")) == 1


def test_a_barrier_put_on_a_stream_is_no_waiting_host() -> None:
    built = TraceBuilder()
    launched(built, "a", 0, 10, 100)
    graph = link_rank(
        built.launch("urEnqueueEventsWait", 12, 105, correlation=99, flow=False).build()
    )
    assert edges(graph, "synchronize") == []


def idle_worker(*, main: str) -> TraceBuilder:
    """A worker that is idle for 40 ms, while the main thread does something else than operators, or nothing at all."""
    built = TraceBuilder().op("work", 0, 500, thread=2).op("work", 40_500, 500, thread=2)
    built.op("aten::mm", 1000, 100)
    return built.op("aten::mm", 60_000, 100) if main == "goes on" else built


def test_an_idle_thread_waits_however_long_for_the_one_that_was_at_it() -> None:
    graph = link_rank(idle_worker(main="goes on").build())
    graph.check()
    wait = graph.nodes.filter(pl.col("kind") == "wait").to_dicts()
    assert [(row["start_ns"] // 1000, row["duration_ns"] // 1000) for row in wait] == [
        (500, 40_000)
    ]
    into = graph.edges.filter(pl.col("target") == wait[0]["node"], pl.col("to_end")).to_dicts()
    assert [(edge["kind"], edge["evidence"], edge["delay_ns"]) for edge in into] == [
        ("cross-thread", "assumed", 0)
    ]
    giver = graph.nodes.row(
        into[0]["source"], named=True
    )  # the main thread until then, outside of its operators
    assert (giver["kind"], giver["start_ns"] // 1000, giver["duration_ns"] // 1000) == (
        "think",
        1100,
        39_400,
    )


def test_what_ended_before_an_idle_time_began_woke_nobody() -> None:
    built = (
        TraceBuilder()
        .op("aten::mm", 0, 100)
        .op("work", 50, 500, thread=2)
        .op("work", 40_500, 500, thread=2)
    )
    graph = link_rank(built.build())
    graph.check()
    wait = graph.nodes.filter(pl.col("kind") == "wait").to_dicts()
    assert [(row["start_ns"] // 1000, row["duration_ns"] // 1000) for row in wait] == [
        (550, 39_950)
    ]
    into = graph.edges.filter(pl.col("target") == wait[0]["node"], pl.col("to_end")).to_dicts()
    assert [(edge["kind"], edge["source"], edge["evidence"]) for edge in into] == [
        ("origin", 0, "assumed")
    ]


def test_a_thread_that_ran_all_the_time_was_not_idle() -> None:
    built = idle_worker(main="is silent")
    trace = built.build()
    times = [trace.start_ns + time for time in (400_000, 600_000, 40_400_000, 41_000_000)]

    def kinds(ran: list[int]) -> list[str]:
        samples = {"thread": [2] * 4, "time_ns": times, "cpu_ns": ran}
        sampled = replace(
            trace, meta=replace(trace.meta, clock="unix", capture={"thread_cpu": samples})
        )
        return link_rank(sampled).nodes["kind"].cast(pl.String).to_list()

    assert "wait" not in kinds([0, 200_000, 39_900_000, 40_400_000])
    assert "wait" in kinds([0, 100_000, 150_000, 650_000])


@pytest.mark.parametrize("others", [(), ("aten::mm",)], ids=["alone", "after another name"])
def test_launches_of_their_usual_length_found_no_queue_full(others: tuple[str, ...]) -> None:
    """However full the queue is: what is usual does not depend on which names the process has seen before."""
    built = TraceBuilder()
    for name in others:
        built.op(name, 0, 2)
    for number in range(
        1100
    ):  # each takes 10 us, and work of the stream ends in each of the last ones
        built.launch("cudaLaunchKernel", 5 + 12 * number, 10, correlation=number + 1)
        built.kernel("k", 12 * (950 + number), 12, correlation=number + 1)
    trace = built.build()
    graph = link_rank(trace)
    assert graph.edges.filter(pl.col("kind") == "queue").height == 0
    assert graph.coverage.filter(pl.col("outcome") == "held up by a full queue").height == 0
    assert launches(trace).queues["held_count"].to_list() == [0]
    assert launches(trace).queues["max_launches"][0] >= 900
