"""What rules stand on: which steps are looked at, how long they take, and what is exposed, against plain counting."""

from __future__ import annotations

import random
from dataclasses import replace
from functools import cache

import numpy as np
import polars as pl
import pytest

from support.by_hand import BUSY, GEMM, HandStep
from support.jobs import Recipe, training_job
from traceloom.changes.changes import parse
from traceloom.changes.scenario import Scenario
from traceloom.findings import Context
from traceloom.graph import Plan, graph as graph_schema
from traceloom.testing import TraceBuilder
from traceloom.trace.batch import concatenate_by_trace
from traceloom.trace.session import Session

US = 1_000


def run(
    *lengths_us: float, gap_us: float = 0, behind_us: float = 0, device: bool = True
) -> Session:
    """Steps of one operator and one kernel each; the device ends so long after the host does."""
    made, at = TraceBuilder(), 0.0
    for number, length in enumerate(lengths_us):
        made.step(number, at, length).op("aten::mm", at + 1, length - 10)
        if device:
            made.launch("cudaLaunchKernel", at + length - 8, 4, correlation=number + 1)
            made.kernel(
                "gemm",
                at + length - 1 + behind_us,
                1 if not behind_us else length / 2,
                correlation=number + 1,
            )
        at += length + gap_us
    return Session((made.build(),), "steps")


@cache
def ten() -> Session:
    return run(*[100.0] * 10)


@pytest.mark.parametrize("step", range(10))
@pytest.mark.parametrize("most", [1, 2, 3, 5, 6, 20])
def test_steps_around_one_follow_each_other_and_hold_it_in_the_middle(step: int, most: int) -> None:
    around = Context(ten(), (step,)).around(most)
    assert around == tuple(range(around[0], around[-1] + 1))
    assert step in around
    assert len(around) == min(most, 10)
    before, after = step - around[0], around[-1] - step
    if around[0] > 0 and around[-1] < 9:  # nothing at the ends of the run forbids the middle
        assert abs(before - after) <= 1


def test_there_is_nothing_around_a_window_without_steps() -> None:
    assert Context(ten(), None).around(5) == ()


@pytest.mark.parametrize(
    ("lengths", "usual"),
    [
        ((100,), 0),
        ((100, 300, 200), 2),
        ((300, 100, 200, 210, 190), 2),
        ((500, 100, 100, 100), None),
    ],
)
def test_the_usual_step_is_of_median_length(lengths: tuple[float, ...], usual: int | None) -> None:
    context = Context.of(run(*lengths))
    assert context.steps is not None
    assert lengths[context.steps[0]] == sorted(lengths)[(len(lengths) - 1) // 2]
    if usual is not None:
        assert context.step == usual


def test_without_steps_the_whole_window_is_looked_at() -> None:
    session = Session((HandStep(10).op("aten::mm", 0, 50).build(),), "one")
    none = Session((TraceBuilder().op("aten::mm", 5, 50).build(),), "none")
    assert Context.of(session).where == "the step"
    context = Context.of(none)
    assert (context.steps, context.step, context.where, context.step_count) == (
        None,
        None,
        "the window",
        1,
    )
    assert context.whole_ns == context.step_ns == 50 * US


@pytest.mark.parametrize("lengths", [(100, 100, 100), (100, 300, 50, 220), (70,)])
def test_steps_one_after_the_other_add_up_to_the_time_from_the_first_to_the_last(
    lengths: tuple[float, ...],
) -> None:
    context = Context(run(*lengths), tuple(range(len(lengths))))
    times = context.graph.point_times()
    taken = context.compute_step_lengths(times)
    assert (taken >= 0).all()
    device = context.select_kinds(graph_schema.KERNEL)
    first = 0 if len(lengths) > 1 else int(times.min())
    last = int(times[1::2][device].max()) if len(lengths) > 1 else int(times.max())
    assert taken.sum() == last - first
    assert not context.apart


def test_steps_that_stand_apart_are_counted_each_on_its_own() -> None:
    """Requests of a server: what lies between them is nobody's."""
    lengths = (100.0, 200.0, 100.0)

    def served(gap_us: float) -> Context:
        (trace,) = run(*lengths, gap_us=gap_us).traces
        ends = trace.steps["start_ns"] + pl.Series([int(length * US) for length in lengths])
        return Context(
            Session((replace(trace, steps=trace.steps.with_columns(end_ns=ends)),), "served"),
            (0, 1, 2),
        )

    context = served(500)
    assert context.apart
    taken = context.compute_step_lengths(context.graph.point_times())
    assert taken.tolist() == [int(length * US) for length in lengths]
    assert context.whole_ns == int(sum(lengths) * US)
    assert not served(19).apart, "38 us of 400 are no tenth"
    assert served(21).apart


def test_a_step_lasts_until_its_work_on_the_device_is_done_and_begins_when_the_last_ones_is() -> (
    None
):
    session = run(100, 100, 100, 100, behind_us=60)
    context = Context(session, (2,))
    # its kernel of 50 us ends at 2 * 100 + 99 + 60 + 50; that of the step before it 100 us earlier
    assert context.step_ns == 100 * US
    assert context.whole_ns > context.step_ns, (
        "the graph spans what was left to do of the step before"
    )


def test_a_run_without_a_device_is_as_long_as_its_host() -> None:
    context = Context(run(100, 150, 100, device=False), (0, 1, 2))
    assert not context.has_gpu_work
    # the last operators end 10 us before their steps do, and the step's own time follows
    assert context.compute_step_lengths(context.graph.point_times()).tolist() == [
        100 * US,
        150 * US,
        100 * US,
    ]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("seed", range(8))
def test_exposed_time_is_that_in_which_no_other_kernel_runs(seed: int) -> None:
    draw = random.Random(seed)
    step = HandStep(1_000)
    free = dict.fromkeys((7, 20, 24), 20)
    painted: dict[str, set[int]] = {BUSY: set(), GEMM: set(), "copy": set()}
    for number in range(14):
        stream = draw.choice(list(free))
        start = free[stream] + draw.randint(1, 40)
        length = draw.randint(1, 60)
        free[stream] = start + length
        if stream == 20:
            kind = "copy"
            step.copied("HtoD (Pinned -> Device)", 5 * number, start, length, size=4096)
        else:
            kind = draw.choice([BUSY, GEMM])
            step.launched(kind, 5 * number, start, length, stream=stream)
        painted[kind] |= set(range(start, start + length))
    context = Context.of(Session((step.build(),), "drawn"))
    name = context.graph.nodes["name"]
    for kind in (BUSY, GEMM):
        other = GEMM if kind == BUSY else BUSY
        assert (
            context.compute_exposed_ns((name == kind).to_numpy())
            == len(painted[kind] - painted[other]) * US
        )
    copies = context.select_kinds(graph_schema.COPY)
    assert (
        context.compute_exposed_ns(copies)
        == len(painted["copy"] - painted[BUSY] - painted[GEMM]) * US
    )
    assert context.compute_exposed_ns(copies | (name == BUSY).to_numpy()) == (
        len((painted["copy"] | painted[BUSY]) - painted[GEMM]) * US
    )
    assert context.compute_exposed_ns(np.zeros(name.len(), dtype=np.bool_)) == 0


@pytest.mark.parametrize(
    "text",
    ["kernels * 0.5", "host remove", "idle remove", "gpu graph", "kernels fuse", "syncs remove"],
)
def test_a_change_of_some_steps_leaves_all_others_as_they_were(text: str) -> None:
    made, at, number = TraceBuilder(), 0.0, 0
    for step in range(5):
        made.step(step, at, 100)
        for _ in range(4):
            number += 1
            made.op("aten::mm", at + 1, 18).launch(
                "cudaLaunchKernel", at + 3, 4, correlation=number
            )
            made.kernel("gemm", at + 60, 15, correlation=number)
            at += 20
        # what is awaited at the end of a step is on a stream of its own
        made.launch("cudaLaunchKernel", at, 2, correlation=500 + step)
        made.kernel("norm", at + 5, 8, stream=20, correlation=500 + step)
        made.launch("cudaStreamSynchronize", at + 3, 12, correlation=900 + step)
        at += 20
    session = Session((made.build(),), "steps")
    context = Context(session, (2, 3))
    base = Scenario.of(context.graph)
    changed = context.changed(base, [parse(text)])
    elsewhere = context.elsewhere
    assert elsewhere is not None
    assert elsewhere.any()
    assert (changed.work_ns[elsewhere] == base.work_ns[elsewhere]).all()
    target = context.graph.edges["target"].to_numpy()
    assert (changed.delay_ns[elsewhere[target]] == base.delay_ns[elsewhere[target]]).all()
    assert (changed.work_ns != base.work_ns).any() or (changed.delay_ns != base.delay_ns).any()
    after = changed.times(Plan(context.graph))
    assert (after <= context.graph.point_times()).all()


def test_evidence_is_the_longest_first_at_its_own_time() -> None:
    step = HandStep(100).launched("a", 0, 10, 30).launched("b", 5, 41, 50).launched("c", 10, 92, 5)
    context = Context.of(Session((step.build(),), "three"))
    kernels = context.select_kinds(graph_schema.KERNEL)
    events = context.traces[0].events
    shown = context.evidence(kernels, max_count=2)
    assert [(one.what, one.duration_ns) for one in shown] == [("b", 50 * US), ("a", 30 * US)]
    for one in shown:
        row = events.filter(events["name"] == one.what).row(0, named=True)
        assert (one.start_ns, one.lane, one.rank) == (row["start_ns"], row["lane"], 0)


@pytest.mark.parametrize("seed", range(3))
def test_events_and_threads_of_ranks_are_told_apart_though_their_numbers_are_the_same(
    seed: int,
) -> None:
    draw = random.Random(seed)
    job = training_job(Recipe(steps=2, layers=2, ranks=3, seed=seed)).run()
    context = Context.of(Session(tuple(builder.build() for builder in job.traces()), "job"))
    rows = {
        (trace, draw.randrange(context.traces[trace].events.height))
        for _ in range(300)
        for trace in (0, 2)
    }
    frames = [
        pl.DataFrame(
            {"event": sorted(event for place, event in rows if place == trace)},
            schema={"event": pl.UInt32},
        )
        for trace in range(3)
    ]
    chosen = context.select_nodes_of_stacked_events(concatenate_by_trace(frames))
    nodes = context.graph.nodes
    places = {trace.rank: place for place, trace in enumerate(context.traces)}
    expected = [
        (places[rank], event) in rows for rank, event in nodes.select("rank", "event").iter_rows()
    ]
    assert any(expected)
    assert chosen.tolist() == expected
    # the host time of events stands on their own lanes of their own traces, at their own times
    stretches = context.stretches(chosen)
    assert set(stretches["rank"]) == {0, 2}
    for rank, lane, start, end in stretches.iter_rows():
        events = context.traces[places[rank]].events[frames[places[rank]]["event"]]
        assert events.filter(
            pl.col("lane") == lane, pl.col("start_ns") <= start, pl.col("nested_end_ns") >= end
        ).height
