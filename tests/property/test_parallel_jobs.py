"""Whatever parallel job is declared: its schedule runs, its traces show its truth, its graph gives it back."""

from __future__ import annotations

from typing import Any

import numpy as np
import polars as pl
from hypothesis import given, settings
from hypothesis import strategies as st

from traceloom.link.job import join
from traceloom.link.rank import link_rank
from traceloom.retime import Plan, calibrate, law
from traceloom.testing.jobs import (
    Fault,
    LateHost,
    ParallelRecipe,
    Run,
    SlowLink,
    SlowRank,
    StragglingStep,
    TokenImbalance,
    parallel_job,
)


@st.composite
def faults(draw: st.DrawFn, ranks: int, steps: int) -> tuple[Fault, ...]:
    rank, step = draw(st.integers(0, ranks - 1)), draw(st.integers(0, steps - 1))
    return tuple(
        draw(
            st.lists(
                st.sampled_from(
                    [
                        SlowRank(rank, 1.5),
                        LateHost(rank, 3000, steps=(step,)),
                        StragglingStep(step, 2.0),
                        SlowLink(3.0),
                        TokenImbalance((2, 1)),
                    ]
                ),
                max_size=2,
                unique=True,
            )
        )
    )


@st.composite
def recipes(draw: st.DrawFn, /, **fixed: Any) -> ParallelRecipe:
    data, tensor, pipeline = draw(st.sampled_from([(1, 2, 1), (2, 1, 1), (2, 2, 1), (1, 1, 3), (2, 1, 2), (1, 2, 2)]))
    steps = draw(st.integers(1, 3))
    return ParallelRecipe(
        data=data,
        tensor=tensor,
        pipeline=pipeline,
        expert=draw(st.sampled_from([1, data])),
        steps=steps,
        layers=draw(st.integers(1, 2)),
        microbatches=draw(st.integers(1, 4)),
        schedule=draw(st.sampled_from(["1f1b", "gpipe"])),
        sharded=draw(st.booleans()),
        kernel_us=draw(st.sampled_from([10, 60])),
        item=draw(st.booleans()),
        autograd=draw(st.booleans()),
        graphs=draw(st.booleans()),
        stacks=draw(st.booleans()),
        ranks_per_host=2,
        faults=draw(faults(data * tensor * pipeline, steps)),
        seed=draw(st.integers(0, 100)),
        **{
            "programmatic": draw(st.booleans()),
            "clocks": {1: (draw(st.integers(-(10**6), 10**6)), 0.0)},
            **fixed,
        },
    )


def parts_are_true(run: Run, rank: int, trace: Any) -> None:
    true = run.truth.collectives.filter(rank=rank).sort("correlation")
    kernels = trace.events.filter(category="kernel").select("event", "correlation", "start_ns", "duration_ns")
    shown = trace.collectives.join(kernels, on="event").sort("correlation")
    assert shown["correlation"].to_list() == true["correlation"].to_list()
    assert shown["group"].to_list() == true["group"].to_list()
    assert shown["in_bytes"].to_list() == true["in_bytes"].to_list()
    assert shown["out_bytes"].to_list() == true["out_bytes"].to_list()
    assert shown["start_ns"].to_list() == [run.shown_ns(rank, at) for at in true["arrival_ns"]]
    ends = (shown["start_ns"] + shown["duration_ns"]).to_list()
    assert ends == [run.shown_ns(rank, at) for at in true["end_ns"]]


@settings(max_examples=20, deadline=None)
@given(recipe=recipes())
def test_traces_of_any_schedule_show_its_truth(recipe: ParallelRecipe) -> None:
    run = parallel_job(recipe).run()
    truth = run.truth
    for rank, builder in enumerate(run.traces()):
        trace = builder.build()
        trace.check()
        assert trace.gpu_work().height == sum(s.rank == rank and s.stream is not None for s in run.spans)
        parts_are_true(run, rank, trace)
        steps = truth.steps.filter(rank=rank).sort("step")
        assert trace.steps["start_ns"].to_list() == [run.shown_ns(rank, at) for at in steps["start_ns"]]
        assert trace.steps["end_ns"].to_list() == [run.shown_ns(rank, at) for at in steps["end_ns"]]
    waits = truth.collectives
    assert (waits["wait_ns"] >= 0).all()
    assert (waits["wait_ns"] + waits["transfer_ns"] == waits["end_ns"] - waits["arrival_ns"]).all()


# Kernels that overlap on one stream are left out: what lets the second go is in no trace.
@settings(max_examples=12, deadline=None)
@given(recipe=recipes(programmatic=False, clocks={}))
def test_the_graph_of_any_schedule_gives_it_back(recipe: ParallelRecipe) -> None:
    run = parallel_job(recipe).run()
    graph = calibrate(join([link_rank(builder.build()) for builder in run.traces()]))
    graph.check()
    assert np.array_equal(Plan(graph).evaluate(), graph.point_times())
    assert abs(graph.end_ns - run.window_ns) <= 10  # clocks are fitted, to a few ns
    assert graph.communication.filter(pl.col("instance").is_null()).height == 0
    assert graph.communication["instance"].n_unique() == run.truth.collectives["instance"].n_unique()
    kept = law(graph)
    assert kept.exact_error_ns == 0
    # A faulty job's delays are no usual ones.
    assert kept.holds or recipe.faults, kept.sentence
