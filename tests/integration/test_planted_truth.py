"""Made jobs whose answers are known: what re-timing their linked traces says of a change, the change does.

A simulation that knows nothing of graphs runs each job as it is, and again with a change. The traces of the first run
are written, read, linked, joined and calibrated; the graph is then asked what the same change would do.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache

import numpy as np
import polars as pl
import pytest

from support.jobs import (
    Change,
    Clock,
    Job,
    ParallelRecipe,
    Recipe,
    changed,
    parallel_job,
    training_job,
)
from support.jobs.training import DELAY, SYNC
from traceloom.graph import ABSENT, Plan, calibrate, law
from traceloom.graph.graph import Graph
from traceloom.graph.job import join_ranks
from traceloom.graph.rank import link_rank

ALLOWED = 0.02  # of the window
DEVICE = ("kernel", "copy", "fill")

HALF_KERNELS = Change(kernels=0.5)
SLOW_KERNELS = Change(kernels=2)
FAST_HOST = Change(host=0.7)
SLOW_HOST = Change(host=1.5)
FAST_NETWORK = Change(collectives=0.5)
NO_SYNC = Change(without=frozenset({SYNC}))
NO_DELAY = Change(without=frozenset({DELAY}))
ALONE = (HALF_KERNELS, SLOW_KERNELS, FAST_HOST, SLOW_HOST)

LATE = {2: 1500.0}
FAR = Clock("host1", 3_000_000)
DRIFTING = Clock("host1", -3_000_000, 2e-5)

RECIPES: dict[str, tuple[Recipe | ParallelRecipe, tuple[Change, ...]]] = {
    "launch-bound": (Recipe(kernel_us=6, op_us=14), ALONE),
    "GPU-bound": (Recipe(kernel_us=80), ALONE),
    "balanced": (Recipe(kernel_us=22), ALONE),
    "queue full": (Recipe(layers=160, kernel_us=20, op_us=3), ALONE),
    "device synchronised every step": (Recipe(kernel_us=30, sync="device"), (*ALONE, NO_SYNC)),
    "stream synchronised every step": (Recipe(kernel_us=30, sync="stream"), (*ALONE, NO_SYNC)),
    "event synchronised every step": (Recipe(kernel_us=30, sync="event"), (*ALONE, NO_SYNC)),
    "loss read every step": (Recipe(kernel_us=30, item=True), ALONE),
    "pageable copies": (Recipe(kernel_us=30, pageable_input=True), ALONE),
    "two streams": (Recipe(kernel_us=40, side_stream=True), ALONE),
    "two streams, launch-bound": (Recipe(kernel_us=8, op_us=14, side_stream=True), ALONE),
    "autograd thread": (Recipe(kernel_us=40, autograd=True, item=True), ALONE),
    "autograd thread, launch-bound": (
        Recipe(layers=16, kernel_us=6, op_us=20, autograd=True),
        ALONE,
    ),
    "loader thread": (
        Recipe(kernel_us=20, item=True, loader_us=4000),
        (HALF_KERNELS, FAST_HOST, SLOW_HOST),
    ),
    "4 ranks, one late": (
        Recipe(ranks=4, kernel_us=40, delay_us=LATE, item=True),
        (*ALONE, FAST_NETWORK, NO_DELAY),
    ),
    "4 ranks, launch-bound, one late": (
        Recipe(ranks=4, kernel_us=6, op_us=14, transfer_us=20, delay_us=LATE, sync="device"),
        (*ALONE, FAST_NETWORK, NO_DELAY, NO_SYNC),
    ),
    "4 ranks on 2 hosts": (
        Recipe(steps=6, ranks=4, kernel_us=40, delay_us=LATE, item=True, clocks={2: FAR, 3: FAR}),
        (*ALONE, FAST_NETWORK, NO_DELAY),
    ),
    "4 ranks, drifting clocks": (
        Recipe(
            steps=8,
            ranks=4,
            kernel_us=40,
            autograd=True,
            item=True,
            clocks={2: DRIFTING, 3: DRIFTING},
        ),
        (*ALONE, FAST_NETWORK),
    ),
    "sharded": (
        Recipe(ranks=3, kernel_us=50, transfer_us=60, sharded=True, item=True),
        (*ALONE, FAST_NETWORK),
    ),
    "pipeline": (
        Recipe(ranks=3, kernel_us=40, pipeline=True, autograd=True, item=True),
        (*ALONE, FAST_NETWORK),
    ),
}
PROGRAMMATIC = ParallelRecipe(programmatic=True)
RECIPES |= {
    "programmatic launches": (PROGRAMMATIC, ALONE),
    "programmatic launches, launch-bound": (replace(PROGRAMMATIC, kernel_us=4, op_us=14), ALONE),
    "programmatic launches, 2 x 2 ranks": (
        replace(PROGRAMMATIC, data=2, tensor=2),
        (*ALONE, FAST_NETWORK),
    ),
    "programmatic launches in pipelines": (
        replace(PROGRAMMATIC, pipeline=2, microbatches=4, spread=0.3),
        (*ALONE, FAST_NETWORK),
    ),
    "programmatic launches and graphs": (replace(PROGRAMMATIC, layers=4, graphs=True), ALONE),
}
CASES = [
    pytest.param(
        name, change, id=f"{name}-{number}", marks=pytest.mark.thorough if number % 2 else []
    )
    for name, (_, changes) in RECIPES.items()
    for number, change in enumerate(changes)
]


@dataclass(frozen=True)
class Asked:
    """A job, and the graph of its traces."""

    job: Job
    graph: Graph
    plan: Plan


@cache
def asked(name: str, *, sync_records: bool = False) -> Asked:
    recipe = RECIPES[name][0]
    job = parallel_job(recipe) if isinstance(recipe, ParallelRecipe) else training_job(recipe)
    traces = [builder.build() for builder in job.run().traces(sync_records=sync_records)]
    graph = calibrate(join_ranks([link_rank(trace) for trace in traces]))
    return Asked(job, graph, Plan(graph))


def error(
    name: str, change: Change, *, sync_records: bool = False, absent: tuple[str, ...] = ()
) -> float:
    """How far the graph's answer is from the truth, as a fraction of it; `absent`: kinds of edges that do not hold."""
    found = asked(name, sync_records=sync_records)
    times = found.plan.evaluate(*changed(found.graph, change, ABSENT, absent))
    return float(times.max() - times.min()) / found.job.run(change).window_ns - 1


@pytest.mark.sampled(5)
@pytest.mark.parametrize(("name", "change"), CASES)
def test_a_change_does_what_the_graph_says(name: str, change: Change) -> None:
    assert abs(error(name, change)) <= ALLOWED


@pytest.mark.parametrize(
    "name", ["event synchronised every step", "two streams", "4 ranks, one late"]
)
def test_records_of_what_was_awaited_lead_to_the_same_answers(name: str) -> None:
    measured = asked(name, sync_records=True).graph.edges.filter(pl.col("evidence") == "measured")
    assert set(measured["kind"].cast(pl.String)) & {"wait", "synchronize"}
    for change in RECIPES[name][1]:
        assert abs(error(name, change, sync_records=True)) <= ALLOWED


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", list(RECIPES))
def test_the_graph_gives_back_the_run_itself(name: str) -> None:
    found = asked(name)
    assert error(name, Change()) == pytest.approx(
        0, abs=1e-4
    )  # clocks are fitted, the rest is exact
    kept = law(found.graph)
    assert kept.exact_error_ns == 0
    assert kept.holds, kept.sentence


@pytest.mark.parametrize(
    ("name", "change", "kinds"),
    [
        ("loss read every step", HALF_KERNELS, ("synchronize",)),
        ("GPU-bound", SLOW_KERNELS, ("stream",)),
        ("loss read every step", SLOW_HOST, ("launch",)),
        ("two streams", SLOW_KERNELS, ("wait",)),
        ("autograd thread, launch-bound", SLOW_HOST, ("cross-thread",)),
        ("4 ranks, one late", SLOW_KERNELS, ("rendezvous",)),
    ],
)
def test_without_edges_of_its_kind_the_answer_is_wrong(
    name: str, change: Change, kinds: tuple[str, ...]
) -> None:
    assert abs(error(name, change, absent=kinds)) > ALLOWED


def test_launches_that_find_their_queue_full_wait_for_the_kernels_that_make_room() -> None:
    found = asked("queue full")
    queue = found.graph.edges.filter(pl.col("kind") == "queue")
    assert queue.height > 400
    late = [
        span
        for span in found.job.run().spans
        if span.name == "cudaLaunchKernel" and span.end - span.start > 12_000
    ]
    held = found.graph.nodes["correlation"].gather(queue["target"])
    assert {span.correlation for span in late} <= set(held)


def test_a_thread_that_ends_while_the_main_thread_thinks_is_not_what_that_waits_for() -> None:
    job = training_job(
        Recipe(
            layers=4,
            steps=4,
            kernel_us=25,
            op_us=20,
            sync="device",
            think_us=300,
            loader_us=500,
            spread=0.3,
            seed=115,
        )
    )
    graph = link_rank(job.run().traces()[0].build())
    main = graph.lanes.filter(pl.col("name") == "main thread")["lane"][0]
    waits = graph.nodes.filter((pl.col("kind") == "wait") & (pl.col("lane") == main))
    assert set(waits["name"]) == {"enumerate(DataLoader)#_MultiProcessingDataLoaderIter.__next__"}


@pytest.mark.parametrize("name", ["4 ranks on 2 hosts", "4 ranks, drifting clocks"])
def test_clocks_are_recovered_within_what_the_fit_says_remains(name: str) -> None:
    recipe = RECIPES[name][0]
    found = asked(name)
    nodes = found.graph.nodes.filter(
        pl.col("correlation").is_not_null(), pl.col("kind").is_in(DEVICE)
    )
    fitted = dict(zip(*found.graph.ranks.select("rank", "clock_residual_ns"), strict=True))
    true = {
        (span.rank, span.correlation): span.start
        for span in found.job.run().spans
        if span.stream is not None
    }
    for rank in recipe.clocks:
        mine = nodes.filter(pl.col("rank") == rank)
        apart = np.array(
            [
                start - true[rank, number]
                for number, start in zip(*mine["correlation", "start_ns"], strict=True)
            ]
        )
        zero = nodes.filter(pl.col("rank") == 0)
        origin = zero["start_ns"][0] - true[0, zero["correlation"][0]]
        assert np.abs(apart - origin).max() <= fitted[rank]
    assert min(fitted[rank] for rank in recipe.clocks) > 0
    assert max(fitted.values()) < 3_000  # ns


def test_a_host_whose_clock_agrees_is_left_alone() -> None:
    ranks = asked("4 ranks, one late").graph.ranks
    assert ranks["clock_offset_ns"].to_list() == [0, 0, 0, 0]
    assert ranks["clock_drift"].to_list() == [0, 0, 0, 0]
