"""The critical path of a step: what it leads through, and that its pieces are the step."""

from __future__ import annotations

import polars as pl
import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

import traceloom
from support.jobs import Clock, Recipe, Run, training_job
from traceloom.analyze import critical_path
from traceloom.analyze.critical_path_pieces import PathPieces, split
from traceloom.errors import UsageError
from traceloom.graph import link_session
from traceloom.testing import TraceBuilder
from traceloom.trace.session import Session

US = 1_000


def waits_for_a_kernel() -> TraceBuilder:
    """One step of 100 us: the host launches a kernel of 60 us and waits for it; another one runs beside it."""
    builder = TraceBuilder().step(1, 0, 100).op("aten::mm", 5, 15).op("aten::add", 20, 10)
    builder.launch("cudaLaunchKernel", 8, 4, correlation=1).launch(
        "cudaLaunchKernel", 22, 4, correlation=2
    )
    builder.kernel("gemm", 14, 60, correlation=1, stream=7).kernel(
        "add", 30, 5, correlation=2, stream=20
    )
    builder.launch("cudaStreamSynchronize", 32, 46, correlation=3)
    return builder.sync("Stream Sync", 32, 46, stream=7, correlation=3)


def sums(path: traceloom.analyze.CriticalPath) -> dict[str, int]:
    return {kind: ns for kind, ns in path.classes.select("class", "duration_ns").rows() if ns}


def session(run: Run, **more: bool) -> Session:
    return Session(tuple(trace.build() for trace in run.traces(**more)), "made")


def test_the_path_goes_through_the_kernel_that_the_host_waits_for() -> None:
    found = critical_path(waits_for_a_kernel().build())
    found.check()
    assert found.step == 1
    assert found.window_ns == 100 * US
    # 5 us of the step before the op, 3 of the op before its launch; the launch reaches the device after 6 us, the
    # kernel takes 60, the call returns 4 us later, and the step goes on for 22.
    assert sums(found) == {
        "compute": 60 * US,
        "host": 30 * US,
        "launch": 6 * US,
        "synchronisation": 4 * US,
    }
    order = found.path.group_by("name", maintain_order=True).agg(pl.col("duration_ns").sum())
    assert order.rows() == [
        ("ProfilerStep#1", 27 * US),
        ("aten::mm", 3 * US),
        ("gemm", 66 * US),
        ("cudaStreamSynchronize", 4 * US),
    ]
    into = found.path.filter(pl.col("name") == "gemm")
    assert into.select("class", "edge", "along_edge", "evidence").rows() == [
        ("launch", "launch", True, "correlated"),
        ("compute", "launch", False, "correlated"),
    ]


def test_what_is_not_on_the_path_has_slack() -> None:
    found = critical_path(waits_for_a_kernel().build())
    named = {row["name"]: row for row in found.names.to_dicts()}
    assert named["gemm"]["path_ns"] == 60 * US
    assert named["gemm"]["least_slack_ns"] is None
    # The other kernel ended at 35 us; nothing waits for it, so it may end with the step.
    assert named["add"]["path_ns"] == 0
    assert named["add"]["least_slack_ns"] == 65 * US
    assert named["add"]["near_count"] == 0
    slack = found.node_slack
    assert slack["slack_ns"].min() == 0
    assert set(found.path["node"]) <= set(slack.filter(pl.col("slack_ns") == 0)["node"])


def test_work_nearly_as_long_as_the_path_is_nearly_critical() -> None:
    builder = TraceBuilder().op("aten::mm", 0, 40)
    builder.launch("cudaLaunchKernel", 5, 3, correlation=1).launch(
        "cudaLaunchKernel", 10, 3, correlation=2
    )
    builder.kernel("first", 15, 900, correlation=1, stream=7).kernel(
        "second", 25, 885, correlation=2, stream=20
    )
    builder.launch("cudaDeviceSynchronize", 45, 875, correlation=3)
    named = {row["name"]: row for row in critical_path(builder.build()).names.to_dicts()}
    assert named["first"]["path_ns"] == 900 * US
    assert (named["second"]["near_count"], named["second"]["near_ns"]) == (1, 885 * US)
    assert named["second"]["least_slack_ns"] == 5 * US


def test_the_usual_step_is_the_whole_one_of_median_length() -> None:
    builder = TraceBuilder()
    at = 0.0
    for number, length in ((4, 100), (5, 300), (6, 200), (7, 900)):
        builder.step(number, at, length).op("aten::mm", at + 10, length - 20)
        at += length
    trace = builder.build()
    assert trace.steps["complete"].all()
    assert critical_path(trace).step == 5  # of 200 and 300 us in the middle the longer one
    assert critical_path(trace, step=5).window_ns == 300 * US
    with pytest.raises(UsageError, match="no step 9"):
        critical_path(trace, step=9)


def test_gpu_work_of_the_step_before_is_on_the_path_as_far_as_it_runs_in_the_step() -> None:
    builder = TraceBuilder().step(1, 0, 100).step(2, 100, 100)
    builder.op("aten::mm", 10, 20).launch("cudaLaunchKernel", 15, 5, correlation=1).kernel(
        "long", 25, 135, correlation=1
    )
    builder.op("aten::mm", 110, 20).launch("cudaLaunchKernel", 115, 5, correlation=2)
    builder.kernel("next", 162, 33, correlation=2).launch(
        "cudaDeviceSynchronize", 150, 48, correlation=3
    )
    found = critical_path(builder.build(), step=2)
    found.check()
    assert sums(found)["compute"] == (60 + 33) * US  # of `long` what lies in the step
    assert found.path["start_ns"][0] == found.start_ns


def test_waits_for_data_are_told_apart_from_the_host() -> None:
    builder = (
        TraceBuilder()
        .step(1, 0, 100)
        .annotation("enumerate(DataLoader)#_MultiProcessingDataLoaderIter.__next__", 10, 40)
    )
    builder.op("aten::to", 20, 10).op("aten::mm", 60, 20)
    found = critical_path(builder.build())
    found.check()
    assert sums(found) == {"data": 40 * US, "host": 60 * US}


def test_waits_for_data_known_by_frames_are_cut_at_the_frame() -> None:
    builder = (
        TraceBuilder()
        .step(1, 0, 100)
        .python("torch/utils/data/dataloader.py(701): __next__", 30, 25)
    )
    found = critical_path(builder.op("aten::mm", 60, 20).build())
    found.check()
    assert sums(found) == {"data": 25 * US, "host": 75 * US}


def test_without_steps_the_path_is_that_of_the_whole_window() -> None:
    found = critical_path(TraceBuilder().op("aten::mm", 5, 40).op("aten::add", 50, 50).build())
    found.check()
    assert (found.step, found.window_ns) == (None, 95 * US)


def test_a_trace_without_events_has_no_path() -> None:
    with pytest.raises(UsageError) as caught:
        critical_path(TraceBuilder().build())
    assert caught.value.slug == "nothing-to-link"


def test_a_late_rank_is_on_the_path_and_the_others_have_slack() -> None:
    recipe = Recipe(steps=3, layers=3, ranks=3, sync="stream", spread=0, delay_us={1: 900})
    found = critical_path(session(training_job(recipe).run(), sync_records=True))
    found.check()
    of = (
        found.ranks.group_by("rank")
        .agg(pl.col("duration_ns").sum())
        .sort("duration_ns", descending=True)
    )
    assert of["rank"][0] == 1
    assert int(of["duration_ns"][0]) > 0.6 * found.window_ns
    assert sums(found)["data"] == pytest.approx(900 * US, rel=0.05), (
        "what it is late by is a wait for data"
    )
    assert set(found.path.filter(pl.col("class") == "data")["rank"]) == {1}
    slack = found.node_slack.join(
        found.path.select("node").unique().drop_nulls(), on="node", how="anti"
    )
    assert (
        slack.filter(pl.col("rank") != 1)["slack_ns"].median()
        > slack.filter(pl.col("rank") == 1)["slack_ns"].median()
    )


def test_a_graph_alone_gives_the_path_that_its_traces_give() -> None:
    whole = session(training_job(Recipe(steps=3, layers=2, sync="device")).run(), sync_records=True)
    graph = link_session(whole)
    step = int(whole.traces[0].steps["step"][1])
    of_graph, of_traces = critical_path(graph, step), critical_path(whole, step)
    of_graph.check()
    assert of_graph.window_ns == of_traces.window_ns
    assert of_graph.start_ns == of_traces.start_ns
    # The delays are calibrated on other parts of the run; what the path leads through is the same.
    one, other = (
        found.path["name"].unique(maintain_order=True).to_list() for found in (of_graph, of_traces)
    )
    assert one == other


def test_ranks_whose_clocks_differ_are_told_on_one_clock() -> None:
    clocks = {1: Clock("other", 5_000_000)}
    recipe = Recipe(steps=3, layers=3, ranks=2, sync="stream", clocks=clocks)
    apart = critical_path(session(training_job(recipe).run(), sync_records=True))
    apart.check()
    together = critical_path(
        session(
            training_job(Recipe(steps=3, layers=3, ranks=2, sync="stream")).run(), sync_records=True
        )
    )
    assert apart.step == together.step
    assert apart.window_ns == pytest.approx(together.window_ns, rel=0.02)


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    ranks=st.integers(1, 3),
    kernel_us=st.sampled_from([2, 20, 150]),
    item=st.booleans(),
    autograd=st.booleans(),
    side_stream=st.booleans(),
    pageable_input=st.booleans(),
    seed=st.integers(0, 1000),
    records=st.booleans(),
)
def test_the_pieces_are_the_step_whatever_the_job(records: bool, **recipe: int) -> None:
    job = session(training_job(Recipe(steps=3, layers=2, **recipe)).run(), sync_records=records)
    for step in job.traces[0].steps["step"].to_list():
        found = critical_path(job, step)
        found.check()
        low = min(int(t.steps.filter(pl.col("step") == step)["start_ns"][0]) for t in job.traces)
        high = max(int(t.steps.filter(pl.col("step") == step)["end_ns"][0]) for t in job.traces)
        assert (found.start_ns, found.window_ns) == (low, high - low)


def test_pieces_are_split_where_spans_begin_and_end() -> None:
    ends = pl.Series([10, 20, 30]).to_numpy()
    zero = ends * 0
    whole = PathPieces(ends - 10, ends, zero, zero, zero > 0, zero)
    at = pl.Series([True, False, True]).to_numpy()
    cut = split(
        whole, at, pl.Series([2, 8, 25]).to_numpy(), pl.Series([4, 15, 40]).to_numpy(), "host"
    )
    assert cut.start.tolist() == [0, 2, 4, 8, 10, 20, 25]
    assert cut.end.tolist() == [2, 4, 8, 10, 20, 25, 30]
    assert (cut.kind > 0).tolist() == [False, True, False, True, False, False, True]
