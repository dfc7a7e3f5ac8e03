"""Linking traces that are loaded already: the whole run, and one step of it."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path

import numpy as np
import polars as pl
import pytest

import traceloom
from support.jobs import ParallelRecipe, Recipe, parallel_job, training_job
from traceloom.errors import InputError, UsageError
from traceloom.graph import law, link
from traceloom.graph.linking import link_session
from traceloom.testing import TraceBuilder
from traceloom.trace.session import Session
from traceloom.trace.trace import Trace

US = 1_000


def session(*traces: Trace) -> Session:
    return Session(tuple(traces), "made")


def two_steps() -> TraceBuilder:
    """Step 1 of [0, 100), step 2 of [100, 200) us; a kernel of each runs late into what follows."""
    builder = TraceBuilder().step(1, 0, 100).step(2, 100, 100).annotation("train", 0, 200, thread=2)
    for first, correlation in ((10, 1), (110, 3)):
        builder.op("aten::mm", first, 40)
        builder.launch("cudaLaunchKernel", first + 5, 5, correlation=correlation)
        builder.launch("cudaLaunchKernel", first + 20, 5, correlation=correlation + 1)
        builder.kernel("short", first + 12, 20, correlation=correlation)
        builder.kernel("long", first + 40, 80, correlation=correlation + 1)
    return builder


def names(graph: traceloom.Graph, kind: str) -> list[str]:
    return graph.nodes.filter(pl.col("kind") == kind).sort("start_ns")["name"].to_list()


def test_a_loaded_session_gives_the_graph_that_its_files_give(tmp_path: Path) -> None:
    run = training_job(Recipe(steps=2, layers=2, ranks=2)).run()
    for number, trace in enumerate(run.traces()):
        trace.write(tmp_path / f"rank{number}.json")
    loaded = link_session(traceloom.load(tmp_path))
    read = link(tmp_path, cache=False).graph
    assert loaded.nodes.equals(read.nodes)
    assert loaded.edges.equals(read.edges)
    assert loaded.delays.equals(read.delays)


def test_a_step_holds_its_host_work_what_that_launched_and_what_still_ran() -> None:
    trace = two_steps().build()
    graph = link_session(session(trace), step=2)
    graph.check()
    # The long kernel of step 1 still runs in step 2: it is there, with its launch; what ended before is not needed.
    assert names(graph, "kernel") == ["short", "long", "short", "long"]
    first = link_session(session(trace), step=1)
    assert names(first, "kernel") == ["short", "long"]
    ends = first.nodes.filter(pl.col("kind") == "kernel").select(
        pl.col("start_ns") + pl.col("duration_ns")
    )
    assert ends.to_series().max() == 130 * US
    host = first.nodes.filter(pl.col("kind").is_in(["host", "launch", "think"]))
    assert (host["start_ns"] + host["duration_ns"]).max() == 100 * US, (
        "the host's time ends with the step"
    )


def test_nodes_of_a_step_name_the_rows_of_the_whole_trace() -> None:
    trace = two_steps().build()
    nodes = link_session(session(trace), step=2).nodes.filter(pl.col("event").is_not_null())
    assert nodes["name"].to_list() == trace.events["name"].gather(nodes["event"]).to_list()
    with_op = nodes.filter(pl.col("op").is_not_null())
    assert with_op.height
    assert set(trace.events["name"].gather(with_op["op"])) == {"aten::mm"}


def test_a_step_of_a_job_comes_back_exactly_and_its_ranks_still_meet() -> None:
    run = training_job(Recipe(steps=3, layers=2, ranks=3, sync="stream")).run()
    traces = [builder.build() for builder in run.traces(sync_records=True)]
    step = int(traces[0].steps["step"][1])
    graph = link_session(session(*traces), step=step)
    told = law(graph)
    assert told.exact_error_ns == 0
    assert abs(told.honest_error) < 0.02
    met = graph.communication.drop_nulls("instance")
    assert met.height
    assert met.join(graph.nodes.select("node", "rank"), on="node").group_by("instance").n_unique()[
        "rank"
    ].min() == len(traces)
    assert graph.nodes.height < link_session(session(*traces)).nodes.height


def test_stages_that_go_on_for_a_moment_bring_no_step_of_theirs_into_the_graph_of_the_next() -> (
    None
):
    # a message of the step before is still under way when the last stage begins the step: its launch is a step ago
    piped = ParallelRecipe(
        pipeline=4, steps=3, layers=2, kernel_us=100, microbatches=4, schedule="gpipe"
    )
    graph = link_session(
        session(*(builder.build() for builder in parallel_job(piped).run().traces())), step=1
    )
    earlier = graph.nodes.filter(pl.col("step") < 1)
    assert earlier.height <= 8
    assert not earlier.filter(pl.col("kind").cast(pl.String) == "launch").height
    assert law(graph).holds


def test_graphs_are_remembered_as_long_as_their_traces_live() -> None:
    one = session(two_steps().build())
    graph = link_session(one, step=1)
    assert link_session(Session(one.traces, "the same traces"), step=1) is graph
    assert link_session(one, step=2) is not graph
    assert link_session(session(two_steps().build()), step=1) is not graph
    gone = weakref.ref(graph)
    del graph, one
    link_session(session(two_steps().build()))
    gc.collect()
    assert gone() is None


def test_ranks_without_the_step_are_left_out_and_said() -> None:
    other = TraceBuilder(rank=1).step(1, 0, 50).op("aten::mm", 5, 10).build()
    graph = link_session(session(two_steps().build(), other), step=2)
    assert graph.ranks["rank"].to_list() == [0]
    assert [notice.slug for notice in graph.notices if notice.slug == "step-missing"] == [
        "step-missing"
    ]


def test_a_step_that_is_not_there_is_refused() -> None:
    with pytest.raises(UsageError, match="no step 7; the traces have 1 to 2") as caught:
        link_session(session(two_steps().build()), step=7)
    assert caught.value.slug == "no-such-step"
    with pytest.raises(UsageError, match="no steps"):
        link_session(session(TraceBuilder().op("aten::mm", 0, 5).build()), step=1)


@pytest.mark.parametrize(("rank", "slug"), [(3, "several-windows"), (None, "unknown-ranks")])
def test_two_traces_of_one_rank_are_refused(rank: int | None, slug: str) -> None:
    pair = [TraceBuilder(rank=rank).op("aten::mm", 0, 5).build() for _ in range(2)]
    with pytest.raises(InputError) as caught:
        link_session(session(*pair))
    assert caught.value.slug == slug


@pytest.mark.data
def test_steps_of_a_public_trace_come_back_exactly(shared_data: Path) -> None:
    loaded = traceloom.load(shared_data / "kineto" / "v100_ns_resolution.json.gz")
    whole = link_session(loaded)
    for step in loaded.traces[0].steps["step"].to_list():
        graph = link_session(loaded, step=step)
        graph.check()
        told = law(graph)
        assert told.exact_error_ns == 0
        assert abs(told.honest_error) < 0.02
        mine = np.unique(
            graph.nodes.filter(pl.col("step") == step)["event"].drop_nulls().to_numpy()
        )
        theirs = np.unique(
            whole.nodes.filter(pl.col("step") == step)["event"].drop_nulls().to_numpy()
        )
        assert np.array_equal(mine, theirs), "a step loses nothing of what it did or launched"
