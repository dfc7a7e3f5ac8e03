"""Where an edge begins to be believed: with its partner, without it, and where several could be meant."""

from __future__ import annotations

import polars as pl
import pytest

from traceloom.graph.graph import Graph
from traceloom.graph.rank import link_rank
from traceloom.testing import TraceBuilder

Row = tuple[str, str, bool, bool, str]


def edges(built: TraceBuilder, kind: str) -> set[Row]:
    graph = link_rank(built.build())
    graph.check()
    name = graph.nodes["name"]
    return {
        (name[row["source"]], name[row["target"]], row["from_end"], row["to_end"], row["evidence"])
        for row in graph.edges.filter(pl.col("kind") == kind).to_dicts()
    }


def counted(graph: Graph, subject: str) -> dict[str, int]:
    return dict(
        graph.coverage.filter(pl.col("subject") == subject).select("outcome", "count").iter_rows()
    )


# -- a full device ----------------------------------------------------------------------------------------------------


def crowded(
    *, starts: float, long_ends: float = 1000, device: int = 0, copy: bool = False
) -> TraceBuilder:
    """A long kernel on stream 7, and one on stream 20 that was launched at 20 us and starts at `starts`."""
    built = TraceBuilder(devices=2).launch("cudaLaunchKernel", 0, 4, correlation=1)
    built.kernel("long", 8, long_ends - 8, stream=7, correlation=1)
    built.launch("cudaLaunchKernel", 20, 4, correlation=2)
    if copy:
        built.copy("Memcpy DtoD (Device -> Device)", starts, 50, bytes=64, stream=20, correlation=2)
    else:
        built.kernel("waiting", starts, 50, stream=20, correlation=2, device=device)
    return built.op("aten::mm", 30, 2000)


@pytest.mark.parametrize(
    ("starts", "held"),
    [
        (1000, True),
        (1009, True),
        (1012, False),  # soon after room was made
        (981, True),
        (979, True),
        (969, False),  # its last blocks leave room: 20 us, or three hundredths of it
        (400, False),  # right beside it: there was room
    ],
)
def test_work_that_starts_when_long_work_of_another_stream_leaves_had_no_room(
    starts: float, held: bool
) -> None:
    found = edges(crowded(starts=starts), "occupancy")
    assert found == ({("long", "waiting", True, False, "inferred")} if held else set())


def test_another_device_and_another_engine_make_no_room() -> None:
    assert edges(crowded(starts=1000, device=1), "occupancy") == set()
    assert edges(crowded(starts=1000, copy=True), "occupancy") == set()


def test_work_that_was_not_ready_for_long_waited_for_no_room() -> None:
    # ready at 20 us, started 99 us later: no tenth of a millisecond
    assert edges(crowded(starts=119, long_ends=118), "occupancy") == set()
    assert edges(crowded(starts=121, long_ends=120), "occupancy") == {
        ("long", "waiting", True, False, "inferred")
    }


def test_of_two_that_leave_the_nearest_is_meant() -> None:
    built = crowded(starts=1000)
    built.launch("cudaLaunchKernel", 30, 4, correlation=3).kernel(
        "nearer", 40, 958, stream=24, correlation=3
    )
    assert {row[0] for row in edges(built, "occupancy") if row[1] == "waiting"} == {"long"}
    built = crowded(starts=1003)
    built.launch("cudaLaunchKernel", 30, 4, correlation=3).kernel(
        "nearer", 40, 963, stream=24, correlation=3
    )
    assert {row[0] for row in edges(built, "occupancy") if row[1] == "waiting"} == {"nearer"}


# -- events and streams that are awaited --------------------------------------------------------------------------------


def synchronised(
    call: str, *, returns: float, record_at: float | None = 5.5, ends: float = 100
) -> set[Row]:
    """Two streams with work until `ends` and until 300 us; a call that returns at some time."""
    built = TraceBuilder().launch("cudaLaunchKernel", 0, 4, correlation=1)
    built.kernel("short", 8, ends - 8, stream=7, correlation=1)
    if record_at is not None:
        built.launch("cudaEventRecord", record_at, 1, correlation=2)
    built.launch("cudaLaunchKernel", 10, 4, correlation=3).kernel(
        "long", 18, 282, stream=20, correlation=3
    )
    built.launch(call, 20, returns - 20, correlation=4)
    return edges(built.op("aten::mm", returns + 1, 500), "synchronize")


@pytest.mark.parametrize("call", ["cudaStreamSynchronize", "cudaEventSynchronize"])
@pytest.mark.parametrize(("returns", "awaits"), [(105, "short"), (310, "long")])
def test_what_ends_when_a_call_returns_is_what_it_awaited(
    call: str, returns: float, awaits: str
) -> None:
    assert synchronised(call, returns=returns) == {(awaits, call, True, True, "inferred")}


def test_a_call_that_returned_at_once_is_of_what_its_thread_did_last() -> None:
    # the event stands behind `short`, which was done: the call waited for nothing that went on
    assert synchronised("cudaEventSynchronize", returns=24, ends=15) == {
        ("short", "cudaEventSynchronize", True, True, "inferred")
    }
    # the stream of the last launch goes on for long after the return: that was not awaited
    assert synchronised("cudaStreamSynchronize", returns=24, ends=15) == set()


def test_a_call_that_returned_when_nothing_ended_is_counted_where_it_was_long() -> None:
    for returns, unknown in ((200, 1), (35, 0)):
        built = (
            TraceBuilder()
            .launch("cudaLaunchKernel", 0, 4, correlation=1)
            .kernel("k", 8, 900, correlation=1)
        )
        built.launch("cudaStreamSynchronize", 20, returns - 20, correlation=4).op(
            "aten::mm", returns + 1, 1000
        )
        graph = link_rank(built.build())
        assert edges(built, "synchronize") == set()
        assert (
            counted(graph, "synchronisations").get("long, and not known what was awaited", 0)
            == unknown
        )


@pytest.mark.parametrize(("early", "held"), [(19, True), (21, False)])
def test_a_call_may_return_a_little_before_what_it_awaits_is_done_by_its_clock(
    early: float, held: bool
) -> None:
    built = (
        TraceBuilder()
        .launch("cudaLaunchKernel", 0, 4, correlation=1)
        .kernel("k", 8, 492, correlation=1)
    )
    built.launch("cudaDeviceSynchronize", 20, 480 - early, correlation=2).op("aten::mm", 600, 10)
    assert bool(edges(built, "synchronize")) == held


# -- threads that hand over -----------------------------------------------------------------------------------------------


def handed(*, idle: float = 500, ended: float = 10, thread: int = 2) -> tuple[set[Row], Graph]:
    """Another thread works, is idle, and works again `ended` us after the main one has ended an operator."""
    built = TraceBuilder().op("main", 0, 100 + idle).op("early", 0, 100, thread=thread)
    built.op("late", 100 + idle + ended, 50, thread=thread).op(
        "main again", 100 + idle + ended + 5, 200
    )
    graph = link_rank(built.build())
    return {row for row in edges(built, "cross-thread") if row[1] != "main again"}, graph


@pytest.mark.parametrize(("idle", "waits"), [(101, True), (89, False)])
def test_a_thread_that_was_idle_for_long_waited_for_what_ended_last(
    idle: float, waits: bool
) -> None:
    found, graph = handed(idle=idle, ended=2)
    wait = graph.nodes.filter(pl.col("kind") == "wait")
    assert wait.height == waits
    assert found == ({("main", "wait", True, True, "inferred")} if waits else set())


@pytest.mark.parametrize(("ended", "evidence"), [(900, "inferred"), (1_100, "assumed")])
def test_what_ended_long_ago_is_a_guess(ended: float, evidence: str) -> None:
    found, _ = handed(ended=ended)
    assert {row[4] for row in found} == {evidence}


def test_a_thread_that_nobody_could_have_woken_waits_for_the_unknown() -> None:
    built = TraceBuilder().op("main", 0, 5000)
    built.op("early", 100, 100, thread=2).op("late", 1000, 100, thread=2)
    graph = link_rank(built.build())
    assert edges(built, "cross-thread") == set()
    waits = graph.nodes.filter(pl.col("kind") == "wait")
    assert waits["duration_ns"].to_list() == [800_000]
    held = graph.edges.filter(pl.col("target") == waits["node"][0], pl.col("to_end"))
    assert held.select("kind", "evidence").rows() == [("origin", "assumed")]


# -- spinning on memory ---------------------------------------------------------------------------------------------------


def spinning(*, length: float, after: float, plain: bool = False) -> set[Row]:
    """A region that launches a kernel, then does nothing named for so long, and ends so long after the kernel."""
    built = TraceBuilder()
    name = "aten::dispatch" if plain else "deep_ep::dispatch"
    built.op(name, 0, 10 + length).launch("cudaLaunchKernel", 2, 4, correlation=1)
    built.kernel("ep", 9, length + 1 - after, correlation=1)
    return edges(built.op("next", 20 + length, 50), "synchronize")


@pytest.mark.parametrize(
    ("length", "after", "waits"),
    [
        (400, 5, True),
        (400, 19, True),
        (400, 21, False),  # a twentieth of 400 us
        (400, -19, True),
        (400, -25, False),
        (190, 2, False),  # too short to be told
        (3_000, 19, True),
        (3_000, 25, False),
        (3_000, -99, True),
        (3_000, -110, False),
    ],
)
def test_self_time_after_a_launch_that_ends_about_with_its_work_awaited_it(
    length: float, after: float, waits: bool
) -> None:
    assert spinning(length=length, after=after) == (
        {("ep", "deep_ep::dispatch", True, True, "inferred")} if waits else set()
    )
    assert spinning(length=length, after=after, plain=True) == set(), (
        "operators of the framework do their own work"
    )
