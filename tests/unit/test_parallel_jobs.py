"""Parallel made jobs: their truth is what their schedule declares, and their traces show exactly that."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import polars as pl
import pytest

import traceloom
from support.jobs import (
    Change,
    ExtraSync,
    Fault,
    LateHost,
    Layout,
    ParallelRecipe,
    Run,
    ShardImbalance,
    SlowLink,
    SlowRank,
    StragglingStep,
    TokenImbalance,
    parallel_job,
)
from traceloom.trace.vocabulary import GPU_WORK

KINDS = {
    "allreduce": "all_reduce",
    "_allgather_base": "all_gather",
    "_reduce_scatter_base": "reduce_scatter",
    "all_to_allv": "all_to_all",
    "send": "send",
    "recv": "recv",
}

RECIPES = {
    "data x tensor x pipeline": ParallelRecipe(
        data=2, tensor=2, pipeline=2, microbatches=3, steps=2
    ),
    "all forward first": ParallelRecipe(
        pipeline=4, microbatches=4, schedule="gpipe", layers=1, steps=2
    ),
    "experts": ParallelRecipe(data=4, expert=2, steps=2, faults=(TokenImbalance((3, 1)),)),
    "sharded": ParallelRecipe(data=3, sharded=True, layers=3, steps=2),
    "graphs": ParallelRecipe(data=2, tensor=2, graphs=True, steps=2),
    "programmatic": ParallelRecipe(data=2, programmatic=True, steps=2),
    "clocks": ParallelRecipe(data=4, ranks_per_host=2, clocks={1: (-3_000_000, 2e-5)}),
    "stacks": ParallelRecipe(tensor=2, stacks=True, autograd=False, steps=2),
}


def made(name: str) -> Run:
    return parallel_job(RECIPES[name]).run()


# -- the layout ---------------------------------------------------------------------------------------------------


def test_ranks_have_their_places_tensor_fastest() -> None:
    layout = Layout(data=4, tensor=2, pipeline=2, expert=2)
    assert layout.world_size == 16
    assert layout.place(13) == (2, 1, 1)
    assert layout.members(13, "tensor") == (12, 13)
    assert layout.members(13, "data") == (9, 11, 13, 15)
    assert layout.members(13, "pipeline") == (5, 13)
    assert layout.members(13, "expert") == (13, 15)
    assert [group.role for group in layout.groups()] == [""] + ["tensor"] * 8 + ["data"] * 4 + [
        "pipeline"
    ] * 8 + ["expert"] * 8


@pytest.mark.parametrize("more", [{"data": 3, "expert": 2}, {"tensor": 0}, {"schedule": "zigzag"}])
def test_what_cannot_be_laid_out_is_refused(more: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"^expected "):
        parallel_job(ParallelRecipe(**more))


# -- what the traces show -----------------------------------------------------------------------------------------


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", RECIPES)
def test_traces_show_exactly_what_the_truth_says(name: str) -> None:
    run = made(name)
    truth = run.truth
    for rank, builder in enumerate(run.traces()):
        trace = builder.build()
        trace.check()
        assert not trace.notices
        shown_work_is_true(run, rank, trace)
        for row in truth.steps.filter(rank=rank).iter_rows(named=True):
            shown = trace.steps.row(by_predicate=pl.col("step") == row["step"], named=True)
            assert shown["start_ns"] == run.shown_ns(rank, row["start_ns"])
            assert shown["end_ns"] == run.shown_ns(rank, row["end_ns"])
            kernels = trace.events.filter(category="kernel", step=row["step"]).height
            assert kernels == row["kernel_count"]
        shown_collectives_are_true(run, rank, trace)
        mine = [group for group in run.job.groups if rank in group.ranks]
        assert trace.groups["group"].to_list() == [group.name for group in mine]
        assert trace.groups["ranks"].to_list() == [list(group.ranks) for group in mine]
        assert trace.groups["description"].to_list() == [group.description for group in mine]


def shown_work_is_true(run: Run, rank: int, trace: traceloom.Trace) -> None:
    spans = sorted(
        (run.shown_ns(rank, span.start), run.shown_ns(rank, span.end), span.stream)
        for span in run.spans
        if span.rank == rank and span.stream is not None
    )
    work = trace.events.filter(pl.col("category").is_in(GPU_WORK))
    shown = work.select(
        "start_ns", end_ns=pl.col("start_ns") + pl.col("duration_ns"), stream="stream"
    ).rows()
    assert spans == sorted(shown)
    assert work["launch"].null_count() == 0


def shown_collectives_are_true(run: Run, rank: int, trace: traceloom.Trace) -> None:
    true = run.truth.collectives.filter(rank=rank).sort("correlation")
    kernels = trace.events.filter(category="kernel").select(
        "event", "correlation", "start_ns", "duration_ns", "stream"
    )
    shown = trace.collectives.join(kernels, on="event").sort("correlation")
    assert shown["correlation"].to_list() == true["correlation"].to_list()
    assert shown["kind"].to_list() == [KINDS[kind] for kind in true["kind"]]
    for column in ("group", "stream", "in_bytes", "out_bytes"):
        assert shown[column].to_list() == true[column].to_list(), column
    together = pl.col("kind").is_in(["send", "recv"]).not_()
    assert (
        shown.filter(together)["sequence"].to_list() == true.filter(together)["sequence"].to_list()
    )
    assert shown["peer"].to_list() == true["peer"].to_list()
    assert shown["start_ns"].to_list() == [run.shown_ns(rank, at) for at in true["arrival_ns"]]
    ends = (shown["start_ns"] + shown["duration_ns"]).to_list()
    assert ends == [run.shown_ns(rank, at) for at in true["end_ns"]]
    # each is told by its op too
    ops = trace.events.filter(pl.col("name") == "record_param_comms")
    assert ops.height == true.height


def test_graphs_are_launched_once_and_replayed_with_the_same_ids(tmp_path: Path) -> None:
    run = made("graphs")
    spans = [span for span in run.spans if "graph id" in span.args]
    calls = [span for span in run.spans if span.name == "cudaGraphLaunch" and span.rank == 0]
    assert len(calls) == 2 * 2 * 2  # steps, layers, graphs of a layer
    ids = {(span.args["graph id"], span.args["graph node id"]) for span in spans if span.rank == 0}
    assert len(ids) * 2 == sum(span.rank == 0 for span in spans)  # two steps
    trace = run.trace(0).build()
    for call in calls:
        of_call = trace.events.filter(pl.col("correlation") == call.correlation)
        kernels = of_call.filter(category="kernel")
        assert kernels.height > 1
        assert kernels["launch"].n_unique() == 1
    text = run.trace(0).text()
    assert '"graph id": 1,' in text
    assert '"graph node id": 1000' in text


def test_programmatic_kernels_overlap_on_one_stream_and_plain_ones_do_not() -> None:
    def overlaps(run: Run) -> int:
        work = sorted((s.start, s.end) for s in run.spans if s.rank == 0 and s.stream == 7)
        return sum(after[0] < before[1] for before, after in pairwise(work))

    assert overlaps(made("programmatic")) >= 10
    assert overlaps(made("sharded")) == 0


def test_stacks_give_modules_and_frames() -> None:
    trace = made("stacks").trace(0).build()
    names = trace.events.filter(category="python")["name"]
    assert names.str.starts_with("nn.Module: TransformerLayer_").sum() == 4
    assert trace.python["module_id"].drop_nulls().len() == 4
    assert trace.python["python_parent"].null_count() < trace.python.height / 2


def test_a_written_capture_is_loaded_whole(tmp_path: Path) -> None:
    run = made("experts")
    session = traceloom.load(run.write(tmp_path / "capture", host=True), cache=False)
    assert session.ranks == (0, 1, 2, 3)
    assert session.capture is not None
    assert not session.all_notices()
    assert {trace.meta.host for trace in session.traces} == {"host0"}


def test_host_traces_have_the_ops_of_the_device_traces() -> None:
    run = made("data x tensor x pipeline")
    host, device = run.host_trace(3).build(), run.trace(3).build()
    named = device.events.filter(pl.col("category").is_in(["op", "annotation"]))
    known = set(zip(named["record_function_id"], named["name"], strict=True))
    ops = host.ops.filter(~host.roots())
    assert ops.height == named.height
    assert set(zip(ops["record_function_id"], ops["name"], strict=True)) == known
    one_step = run.host_trace(3, steps=(1,)).build().ops.height
    assert 0.3 < one_step / ops.height < 0.7


# -- the truth ----------------------------------------------------------------------------------------------------


def test_waiting_and_transfer_add_up_to_each_part() -> None:
    parts = made("data x tensor x pipeline").truth.collectives
    assert (parts["wait_ns"] + parts["transfer_ns"] == parts["end_ns"] - parts["arrival_ns"]).all()
    assert (parts["wait_ns"] >= 0).all()
    assert (parts["transfer_ns"] > 0).all()
    last = parts.filter(pl.col("rank") == pl.col("last_rank"))
    assert last.height == parts["instance"].n_unique()
    assert (last["wait_ns"] == 0).all()


def test_every_message_has_two_sides() -> None:
    sides = (
        made("data x tensor x pipeline")
        .truth.collectives.filter(role="pipeline")
        .group_by("instance")
        .agg("kind")
    )
    assert all(sorted(kinds) == ["recv", "send"] for kinds in sides["kind"])
    assert sides.height == 2 * 3 * 2 * 4  # steps, microbatches, directions, pipelines


def test_the_pipeline_stands_longer_where_there_are_fewer_microbatches() -> None:
    def bubble(microbatches: int) -> float:
        recipe = ParallelRecipe(pipeline=4, microbatches=microbatches, steps=2, layers=1)
        steps = parallel_job(recipe).run().truth.steps.filter(step=1)
        return float(sum(steps["bubble_ns"].to_list()) / sum(steps["length_ns"].to_list()))

    few, many = bubble(2), bubble(8)
    # of p stages and m microbatches, (p - 1) / (m + p - 1) of the time, and the messages
    assert 3 / 5 - 0.1 < few < 3 / 5 + 0.1
    assert 3 / 11 - 0.05 < many < 3 / 11 + 0.15


def test_one_forward_one_backward_keeps_fewer_microbatches_in_flight() -> None:
    def in_flight(schedule: str) -> int:
        recipe = ParallelRecipe(pipeline=2, microbatches=6, steps=1, layers=1, schedule=schedule)
        marks = sorted(
            (span.start, span.name.split(" ")[0])
            for span in parallel_job(recipe).run().spans
            if span.rank == 0 and " microbatch " in span.name
        )
        most = now = 0
        for _, name in marks:
            now += 1 if name == "forward" else -1
            most = max(most, now)
        return most

    assert (in_flight("gpipe"), in_flight("1f1b")) == (6, 2)


@pytest.mark.parametrize(
    ("fault", "more"),
    [
        (SlowRank(1, 2.0), {"tensor": 2}),
        (LateHost(1, 4000, steps=(1,), by="sleep"), {"data": 2}),
        (LateHost(0, 4000, by="gc", before="backward"), {"data": 2, "stacks": True}),
        (LateHost(1, 15000, before="optimizer"), {"data": 2, "sharded": True}),
        (StragglingStep(1, 3.0, rank=0), {"tensor": 2}),
        (TokenImbalance((5, 1)), {"data": 2, "expert": 2}),
        (ShardImbalance(1, 20.0), {"tensor": 2}),
        (SlowLink(8.0, role="tensor", ranks=(2, 3)), {"tensor": 2, "data": 2}),
    ],
    ids=lambda value: value.label if hasattr(value, "label") else "",
)
def test_a_fault_is_what_communications_wait_for(fault: Fault, more: dict[str, Any]) -> None:
    run = parallel_job(ParallelRecipe(steps=3, faults=(fault,), **more)).run()
    truth = run.truth
    label = fault.label
    assert truth.costs[label] > 0
    assert (
        truth.window_ns - truth.costs[label]
        == run.job.run(Change(without=frozenset({label}))).window_ns
    )
    assert label in set(truth.why["label"])
    blamed = truth.collectives.join(truth.why.filter(label=label), on="instance")
    longest = truth.collectives.filter(pl.col("wait_ns") == pl.col("wait_ns").max())["instance"][0]
    assert longest in set(blamed["instance"])


def test_a_late_host_makes_its_rank_the_last_in_that_step_alone() -> None:
    fault = LateHost(2, 6000, steps=(1,))
    truth = parallel_job(ParallelRecipe(data=4, steps=3, faults=(fault,))).run().truth
    waits = truth.collectives.group_by("step", "instance").agg(
        pl.col("wait_ns").sum(), pl.col("last_rank").first()
    )
    worst = waits.sort("wait_ns").tail(1).row(0, named=True)
    assert (worst["step"], worst["last_rank"]) == (1, 2)
    assert worst["wait_ns"] == pytest.approx(3 * 6_000_000, rel=0.05)
    assert truth.costs[fault.label] == pytest.approx(6_000_000, rel=0.05)


def test_tokens_go_where_they_are_declared_to_go() -> None:
    recipe = ParallelRecipe(
        data=4,
        expert=4,
        steps=1,
        layers=1,
        tokens=1000,
        hidden=64,
        heads=1,
        top_experts=1,
        faults=(TokenImbalance((5, 2, 2, 1)),),
    )
    parts = parallel_job(recipe).run().truth.collectives.filter(role="expert")
    dispatch = parts.filter(sequence=1).sort("rank")
    assert dispatch["in_bytes"].to_list() == [1000 * 64 * 2] * 4
    assert dispatch["out_bytes"].to_list() == [4 * share * 100 * 64 * 2 for share in (5, 2, 2, 1)]


def test_an_extra_synchronisation_is_there_and_can_be_left_out() -> None:
    run = parallel_job(
        ParallelRecipe(microbatches=3, kernel_us=8, op_us=10, steps=2, faults=(ExtraSync(),))
    ).run()
    waits = [
        span
        for span in run.spans
        if span.name == "cudaStreamSynchronize" and span.args.get("awaited") == 7
    ]
    assert len(waits) >= 2 * 6
    assert run.truth.costs["extra sync everywhere"] >= 0
