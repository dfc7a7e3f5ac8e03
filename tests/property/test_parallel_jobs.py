"""Whatever parallel job is declared: its schedule runs, its traces show its truth, its graph gives it back."""

from __future__ import annotations

from typing import Any

import numpy as np
import polars as pl
from hypothesis import given, settings

from support.job_strategies import parallel_recipes
from support.jobs import (
    ParallelRecipe,
    Run,
    parallel_job,
)
from traceloom.graph import Plan, calibrate, law
from traceloom.graph.job import join_ranks
from traceloom.graph.rank import link_rank


def parts_are_true(run: Run, rank: int, trace: Any) -> None:
    true = run.truth.collectives.filter(rank=rank).sort("correlation")
    kernels = trace.events.filter(category="kernel").select(
        "event", "correlation", "start_ns", "duration_ns"
    )
    shown = trace.collectives.join(kernels, on="event").sort("correlation")
    assert shown["correlation"].to_list() == true["correlation"].to_list()
    assert shown["group"].to_list() == true["group"].to_list()
    assert shown["in_bytes"].to_list() == true["in_bytes"].to_list()
    assert shown["out_bytes"].to_list() == true["out_bytes"].to_list()
    assert shown["start_ns"].to_list() == [run.shown_ns(rank, at) for at in true["arrival_ns"]]
    ends = (shown["start_ns"] + shown["duration_ns"]).to_list()
    assert ends == [run.shown_ns(rank, at) for at in true["end_ns"]]


@settings(deadline=None)
@given(recipe=parallel_recipes())
def test_traces_of_any_schedule_show_its_truth(recipe: ParallelRecipe) -> None:
    run = parallel_job(recipe).run()
    truth = run.truth
    for rank, builder in enumerate(run.traces()):
        trace = builder.build()
        trace.check()
        assert trace.gpu_work().height == sum(
            s.rank == rank and s.stream is not None for s in run.spans
        )
        parts_are_true(run, rank, trace)
        steps = truth.steps.filter(rank=rank).sort("step")
        assert trace.steps["start_ns"].to_list() == [
            run.shown_ns(rank, at) for at in steps["start_ns"]
        ]
        assert trace.steps["end_ns"].to_list() == [run.shown_ns(rank, at) for at in steps["end_ns"]]
    waits = truth.collectives
    assert (waits["wait_ns"] >= 0).all()
    assert (waits["wait_ns"] + waits["transfer_ns"] == waits["end_ns"] - waits["arrival_ns"]).all()


# Kernels that overlap on one stream are left out: what lets the second go is in no trace.
@settings(deadline=None)
@given(recipe=parallel_recipes(programmatic=False, clocks={}))
def test_the_graph_of_any_schedule_gives_it_back(recipe: ParallelRecipe) -> None:
    run = parallel_job(recipe).run()
    graph = calibrate(join_ranks([link_rank(builder.build()) for builder in run.traces()]))
    graph.check()
    assert np.array_equal(Plan(graph).evaluate(), graph.point_times())
    assert abs(graph.end_ns - run.window_ns) <= 20  # clocks are fitted, to a few ns
    assert graph.communication.filter(pl.col("instance").is_null()).height == 0
    assert (
        graph.communication["instance"].n_unique() == run.truth.collectives["instance"].n_unique()
    )
    kept = law(graph)
    assert kept.exact_error_ns == 0
    # A faulty job's delays are no usual ones.
    assert kept.holds or recipe.faults, kept.sentence
