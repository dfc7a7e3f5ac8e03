"""Communication that threads of the host do: the whole call is the communication, and who is late is found."""

from __future__ import annotations

from pathlib import Path

import polars as pl
import pytest

import traceloom
from support.jobs import Change
from support.jobs.hosted import LATE, HostedRecipe, hosted_job
from traceloom.findings import findings
from traceloom.graph.rank import link_rank
from traceloom.testing.trace_builder import TraceBuilder

MS = 1_000_000


def gathered() -> TraceBuilder:
    """A call of gloo that waits for its peers between its first small operators and the copy of the result."""
    built = TraceBuilder().op("c10d::_allgather_base_", 0, 50).op("aten::mm", 60_000, 500)
    built.annotation("gloo:all_gather", 100, 59_000, thread=5)
    return built.op("aten::empty", 103, 4, thread=5).op("aten::copy_", 59_000, 90, thread=5)


def test_the_whole_call_is_the_communication() -> None:
    graph = link_rank(gathered().build())
    graph.check()
    on_thread = graph.nodes.filter(
        pl.col("lane") == graph.lanes.filter(pl.col("thread") == "5")["lane"][0]
    )
    assert on_thread["kind"].to_list() == ["collective"]
    assert on_thread["duration_ns"].to_list() == [59_000_000]
    assert graph.communication["node"].to_list() == on_thread["node"].to_list()


def test_a_call_that_has_a_device_work_is_not_taken_as_a_whole() -> None:
    built = gathered().launch("cudaMemcpyAsync", 200, 5, correlation=3, thread=5)
    graph = link_rank(
        built.copy("Memcpy DtoH (Device -> Pinned)", 210, 50, bytes=64, correlation=3).build()
    )
    graph.check()
    assert "collective" not in graph.nodes["kind"].cast(pl.String).to_list()
    assert {"aten::empty", "cudaMemcpyAsync"} <= set(graph.nodes["name"].to_list())


@pytest.mark.sampled(1)
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("busy", [False, True])
def test_a_late_rank_is_the_first_finding_by_its_number(
    tmp_path: Path, ranks: int, sharded: bool, busy: bool
) -> None:
    late = ranks - 1
    job = hosted_job(
        HostedRecipe(ranks=ranks, sharded=sharded, busy=busy, late_rank=late, late_ns=50 * MS)
    )
    run = job.run()
    truth = (run.window_ns - job.run(Change(without=frozenset({LATE}))).window_ns) / 3
    first = findings(traceloom.load(run.write(tmp_path / "run"))).time[0]
    assert first.slug in ("straggler", "host-pause")
    assert f"rank {late} " in first.title
    assert first.saving_ns == pytest.approx(truth, rel=0.1)
    # in each step: threads that wait for the next one end no step
    assert first.saving_low_ns > 0.8 * truth
    assert first.saving_high_ns < 1.2 * truth


def test_each_of_several_waits_is_for_the_communication_that_ends_in_it() -> None:
    built = (
        TraceBuilder()
        .op("aten::mm", 0, 500)
        .op("aten::copy_", 40_000, 100)
        .op("aten::copy_", 50_000, 100)
    )
    for thread, ends in ((5, 39_990), (6, 49_990)):
        built.annotation("gloo:all_reduce", 400, ends - 400, thread=thread).op(
            "aten::empty", 403, 4, thread=thread
        )
    graph = link_rank(built.build())
    graph.check()
    main = graph.lanes.filter(pl.col("thread") == "1")["lane"][0]
    waits = graph.nodes.filter(pl.col("kind") == "wait", pl.col("lane") == main).sort("start_ns")
    assert (waits["start_ns"] + waits["duration_ns"]).to_list() == [39_990_000, 49_990_000]


@pytest.mark.parametrize("sharded", [False, True])
def test_ranks_that_are_in_time_make_nobody_wait(tmp_path: Path, sharded: bool) -> None:
    run = hosted_job(HostedRecipe(sharded=sharded)).run()
    ranked = findings(traceloom.load(run.write(tmp_path / "run")))
    assert all((finding.saving_fraction or 0) < 0.02 for finding in ranked.time), [
        f.title for f in ranked.time
    ]
