"""Tables of critical paths are the path added up: by class, rank, lane and name; and what must not change a path."""

from __future__ import annotations

from collections import defaultdict
from functools import cache
from itertools import groupby

import polars as pl
import pytest

from support.jobs import Clock, ParallelRecipe, Recipe, SlowRank, parallel_job, training_job
from support.odd_traces import odd_trace
from traceloom.analyze import CriticalPath, critical_path
from traceloom.analyze.critical_path_pieces import CLASSES, find_median_step
from traceloom.errors import UsageError
from traceloom.graph import link_session
from traceloom.testing import TraceBuilder
from traceloom.trace.session import Session
from traceloom.trace.trace import Trace

RECIPES = {
    "host": Recipe(steps=3, layers=2, kernel_us=5, item=True),
    "device": Recipe(steps=3, layers=2, kernel_us=200, side_stream=True, sync="stream"),
    "loader": Recipe(steps=3, layers=2, loader_us=400, delay_us={0: 700}, autograd=True),
    "ranks": Recipe(steps=2, layers=2, ranks=3, sharded=True, delay_us={1: 500}),
}
NAMES = [*RECIPES, "mesh", "odd 0", "odd 3", "odd 5"]


@cache
def session(name: str) -> Session:
    if name.startswith("odd"):
        return Session((odd_trace(int(name[4:])),), name)
    if name == "mesh":
        run = parallel_job(
            ParallelRecipe(data=2, tensor=2, steps=2, layers=1, faults=(SlowRank(3, 2.0),))
        ).run()
    else:
        run = training_job(RECIPES[name]).run()
    return Session(tuple(builder.build() for builder in run.traces()), name)


@cache
def path_of(name: str) -> CriticalPath:
    return critical_path(session(name))


@pytest.fixture(params=NAMES)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.mark.sampled(4)
def test_the_pieces_tile_the_step_of_the_traces(name: str) -> None:
    found = path_of(name)
    found.check()
    spans = [
        trace.steps.filter(step=found.step).select("start_ns", "end_ns").row(0)
        for trace in session(name).traces
        if found.step is not None
    ]
    if spans and len(spans) == 1:
        assert (found.start_ns, found.window_ns) == (spans[0][0], spans[0][1] - spans[0][0])
    if found.step is None:
        (trace,) = session(name).traces
        assert found.window_ns <= trace.end_ns - trace.start_ns
    assert found.step == find_median_step(session(name).traces)


def test_classes_and_ranks_are_the_path_added_up(name: str) -> None:
    found = path_of(name)
    by_class: dict[str, list[int]] = defaultdict(list)
    by_rank: dict[tuple[int | None, str], int] = defaultdict(int)
    for row in found.path.to_dicts():
        by_class[row["class"]].append(row["duration_ns"])
        by_rank[row["rank"], row["class"]] += row["duration_ns"]
    assert found.classes["class"].to_list() == list(CLASSES)
    for row in found.classes.to_dicts():
        own = by_class[row["class"]]
        assert (row["duration_ns"], row["piece_count"]) == (sum(own), len(own))
        assert row["fraction"] == pytest.approx(sum(own) / found.window_ns)
    rows = {(row["rank"], row["class"]): row["duration_ns"] for row in found.ranks.to_dicts()}
    assert rows == by_rank
    wholes = [
        sum(ns for (rank, _), ns in rows.items() if rank == of)
        for of in dict.fromkeys(found.ranks["rank"])
    ]
    assert wholes == sorted(wholes, reverse=True)


def test_stretches_are_neighbouring_pieces_of_one_lane(name: str) -> None:
    found = path_of(name)
    runs = [
        list(rows)
        for lane, rows in groupby(
            enumerate(found.path.to_dicts()),
            key=lambda item: (item[1]["lane"], item[0] if item[1]["lane"] is None else -1),
        )
    ]
    assert found.stretches.height == len(runs)
    for row, run in zip(found.stretches.to_dicts(), runs, strict=True):
        pieces = [piece for _, piece in run]
        assert (row["start_ns"], row["duration_ns"]) == (
            pieces[0]["start_ns"],
            sum(p["duration_ns"] for p in pieces),
        )
        assert row["piece_count"] == len(pieces)
        classes: dict[str, int] = defaultdict(int)
        for piece in pieces:
            classes[piece["class"]] += piece["duration_ns"]
        assert row["class_ns"] == max(classes.values()) == classes[row["class"]]
        events = [piece["event"] for piece in pieces if piece["event"] is not None]
        assert (row["first_event"], row["last_event"]) == (
            (events[0], events[-1]) if events else (None, None)
        )


def test_what_lies_on_the_path_has_no_slack_and_names_hold_its_time(name: str) -> None:
    found = path_of(name)
    own = found.path.filter(
        ~pl.col("along_edge") | (pl.col("class") == "communication"), pl.col("class") != "residual"
    )
    assert found.names["path_ns"].sum() <= found.window_ns
    on_path = own.filter(pl.col("kind").is_in(["kernel", "copy", "fill"]), ~pl.col("along_edge"))
    slack = dict(found.node_slack.select("node", "slack_ns").rows())
    for node in on_path["node"].unique().drop_nulls():
        assert slack[node] == 0, "its work is on the path"
    assert (found.names["path_fraction"] * found.window_ns).to_list() == pytest.approx(
        found.names["path_ns"].to_list()
    )
    assert (
        found.names.filter(pl.col("near_count") > 0)["least_slack_ns"] <= found.near_slack_ns
    ).all()
    assert found.names["path_ns"].is_sorted(descending=True)
    assert found.near_slack_ns == found.window_ns // 100


def test_every_step_has_a_path_of_its_own_length() -> None:
    (trace,) = session("device").traces
    for step, low, high in trace.steps.select("step", "start_ns", "end_ns").rows():
        found = critical_path(trace, step)
        found.check()
        assert (found.step, found.start_ns, found.window_ns) == (step, low, high - low)


@pytest.mark.parametrize("step", [-1, 99])
def test_a_step_that_is_not_there_is_refused(step: int) -> None:
    with pytest.raises(UsageError) as error:
        critical_path(session("device"), step)
    assert error.value.slug == "no-such-step"


def test_ranks_in_another_order_have_the_same_path() -> None:
    traces = session("ranks").traces
    one, other = path_of("ranks"), critical_path(Session(traces[::-1], "reversed"))
    assert other.window_ns == one.window_ns
    assert one.classes.equals(other.classes)
    assert one.ranks.sort("rank", "class").equals(other.ranks.sort("rank", "class"))


def test_the_time_of_day_and_the_clock_of_a_host_change_no_path() -> None:
    recipe = Recipe(steps=2, layers=2, ranks=2, delay_us={1: 400})
    plain = training_job(recipe).run()
    apart = training_job(
        Recipe(steps=2, layers=2, ranks=2, delay_us={1: 400}, clocks={1: Clock("h1", 10**9)})
    ).run()
    one, other = (
        critical_path(Session(tuple(b.build() for b in run.traces()), "made"))
        for run in (plain, apart)
    )
    assert other.window_ns == pytest.approx(one.window_ns, rel=0.01)
    late = [
        found.ranks.filter(rank=1)["duration_ns"].sum() / found.window_ns for found in (one, other)
    ]
    assert late[0] == pytest.approx(late[1], abs=0.02)


def shifted(delay_us: float) -> Trace:
    builder = TraceBuilder()
    for step in range(2):
        at = delay_us + 200 * step
        builder.step(step, at, 200).op("aten::mm", at + 5, 20).launch(
            "cudaLaunchKernel", at + 10, 5, correlation=step
        )
        builder.kernel("gemm", at + 20, 150, correlation=step)
        builder.launch("cudaDeviceSynchronize", at + 30, 145, correlation=90 + step)
    return builder.build()


def test_a_trace_that_began_later_has_the_same_path_later() -> None:
    one, other = critical_path(shifted(0)), critical_path(shifted(5_000_000))
    assert other.start_ns - one.start_ns == 5_000_000_000
    assert one.path.drop("start_ns").equals(other.path.drop("start_ns"))
    assert one.sentence == other.sentence


def test_the_sentence_names_the_class_with_the_most_time_first() -> None:
    for name in ("device", "host", "loader"):
        found = path_of(name)
        largest = found.classes.sort("duration_ns", descending=True)["class"][0]
        words = {"data": "waiting for data", "host": "the host"}
        said = found.sentence.split(": ", 1)[1]
        assert said.startswith(words.get(largest, largest)), (name, largest, said)


@pytest.mark.parametrize("ranks", [[0, None], [None, 0, 1], [1, None], [0, None, 2]])
def test_a_trace_that_does_not_say_its_rank_is_a_rank_of_its_own(ranks: list[int | None]) -> None:
    traces = []
    for place, rank in enumerate(ranks):
        builder = TraceBuilder(rank, 3).step(0, 0, 100).op("aten::mm", 5, 20 + 10 * place)
        builder.launch("cudaLaunchKernel", 8, 2, correlation=1).kernel(
            "gemm", 20, 40, correlation=1
        )
        traces.append(builder.build())
    for step in (0, None):
        found = critical_path(Session(tuple(traces), "made"), step)
        found.check()
        assert found.window_ns == 100_000
        assert found.node_slack["rank"].n_unique() == len(ranks)


@pytest.mark.parametrize("ranks", [2, 3, 4, 5])
def test_clocks_that_lie_decades_apart_are_aligned_by_what_the_ranks_share(ranks: int) -> None:
    """All but the last rank count from 0: its part of the collective is decades after theirs."""
    traces = []
    for rank in range(ranks):
        builder = TraceBuilder(
            rank, ranks, base_ns=1_700_000_000_000_000_000 if rank == ranks - 1 else 0
        )
        builder.op("aten::mm", 0, 20).launch("cudaLaunchKernel", 2, 2, correlation=1)
        traces.append(builder.kernel("ncclDevKernel_AllReduce_Sum", 10, 20, correlation=1).build())
    path = critical_path(Session(tuple(traces), "made"))
    path.check()
    assert path.window_ns == 30_000


@pytest.mark.parametrize("name", ["host", "device", "ranks", "mesh"])
def test_a_graph_alone_has_the_path_that_its_traces_have(name: str) -> None:
    one = path_of(name)
    other = critical_path(link_session(session(name), step=one.step), one.step)
    other.check()
    assert other.step == one.step
    assert other.window_ns == pytest.approx(one.window_ns, rel=0.02), (
        "a step is what the nodes of its thread cover"
    )
    largest = [
        found.classes.sort("duration_ns", descending=True)["class"][0] for found in (one, other)
    ]
    assert largest[0].replace("data", "host") == largest[1], (
        "waits for data are known by their names in the traces"
    )


def test_the_usual_step_of_a_graph_is_one_that_most_ranks_have() -> None:
    graph = link_session(session("device"))
    steps = session("device").traces[0].steps
    assert critical_path(graph).step in steps["step"].to_list()
