"""Whatever job is made: its graph keeps its laws and gives back its run."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import polars as pl
from hypothesis import given, strategies as st

from support.job_strategies import training_recipes
from support.jobs import Job, Recipe, training_job
from traceloom.graph import Plan, calibrate
from traceloom.graph.job import join_ranks
from traceloom.graph.rank import link_rank


def order_holds(job: Job) -> None:
    """Nothing overlaps on a stream, and no work begins before its launch."""
    spans = job.run().spans
    launched = {
        (s.rank, s.correlation): s.start
        for s in spans
        if s.thread is not None and s.correlation is not None
    }
    streams: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for span in spans:
        assert span.end >= span.start
        if span.stream is not None:
            assert span.start >= launched[span.rank, span.correlation]
            streams.setdefault((span.rank, span.stream), []).append((span.start, span.end))
    for work in streams.values():
        work.sort()
        assert all(after[0] >= before[1] for before, after in pairwise(work))


@given(recipe=training_recipes(), sync_records=st.booleans())
def test_any_made_job_links_into_a_graph_that_gives_it_back(
    recipe: Recipe, sync_records: bool
) -> None:
    job = training_job(recipe)
    order_holds(job)
    run = job.run()
    traces = [builder.build() for builder in run.traces(sync_records=sync_records)]
    for trace in traces:
        trace.check()
    graph = calibrate(join_ranks([link_rank(trace) for trace in traces]))
    graph.check()
    assert np.array_equal(Plan(graph).evaluate(), graph.point_times())
    if recipe.ranks < 3:  # one clock: nothing is fitted, so that even the window is the true one
        assert graph.end_ns == run.window_ns
    coverage = graph.coverage.filter(pl.col("subject") == "gpu-work")
    attached = coverage.filter(pl.col("outcome") == "attached by correlation")["count"].sum()
    assert attached == coverage["count"].sum() == sum(span.stream is not None for span in run.spans)
    if recipe.ranks > 1:
        joined = graph.communication.filter(pl.col("instance").is_not_null())
        assert joined.height == graph.communication.height
