"""What recording cost the work that a change takes away, counted event by event; and sessions asked at once."""

from __future__ import annotations

from dataclasses import replace
from statistics import median

import pytest

import traceloom
from support.by_hand import BUSY, GEMM, HandStep
from support.plain_graph import HOST, PlainScenario, RandomJob
from traceloom.changes.bounds import unrecorded_saving_ns
from traceloom.changes.changes import parse
from traceloom.changes.whatif import scenario_of, whatif, whatif_many
from traceloom.errors import UsageError
from traceloom.graph import calibrate, link_session
from traceloom.graph.graph import Graph
from traceloom.graph.rank import link_rank
from traceloom.testing import TraceBuilder
from traceloom.trace.session import Session

JOBS = [calibrate(RandomJob(seed).graph()) for seed in range(8)]


def plainly(graph: Graph, texts: tuple[str, ...], saved: int, whole: int, ratio: float) -> int:
    """The saving when nobody records, as docs/concepts/what-if.md says: by the share of host events that go."""
    nodes = PlainScenario(graph).nodes
    recorded = {
        rank: [row["node"] for row in nodes if row["rank"] == rank and row["kind"] in HOST]
        for rank in {row["rank"] for row in nodes}
    }
    left = {node: 1.0 for of_rank in recorded.values() for node in of_rank}
    cost, by_recording = 0.0, 1 - 1 / ratio
    for change in map(parse, texts):
        chosen = {
            node for node, meant in enumerate(change.selection.nodes(graph).tolist()) if meant
        }
        if change.action in {"graph", "idle"}:
            cost = saved * by_recording
        elif change.action in {"scale", "remove", "workers"}:
            factor = change.factor if change.action == "scale" else 0.0
            for node in chosen & set(left):
                left[node] *= factor
        elif change.action == "delay":
            others = [
                len(some)
                for rank, some in recorded.items()
                if rank not in change.selection.ranks and some
            ]
            for rank in change.selection.ranks:
                for node in recorded.get(rank, ()):
                    left[node] *= min(median(others) / len(recorded[rank]), 1.0)
    gone = [
        whole * by_recording * sum(1 - left[node] for node in some) / max(len(some), 1)
        for some in recorded.values()
    ]
    cost = max(cost, *gone) if saved >= 0 else min(cost, *gone)
    bound = 2 / 3 * saved
    return saved - round(min(max(cost, min(bound, 0)), max(bound, 0)))


@pytest.mark.parametrize(
    "texts",
    [
        ("host * 0.7",),
        ("ops remove",),
        ("launches * 0.1",),
        ("gpu * 0.5",),
        ("idle remove",),
        ("gpu graph",),
        ("think * 0.2", "ops * 0.5"),
        ("syncs remove",),
        ("host * 1.5",),
        ("rank 0 delay remove",),
        ("loading workers 2",),
        ("rank 0 ops remove", "gpu * 0.3"),
        ("network * 3", "host * 0.9"),
    ],
)
@pytest.mark.parametrize("ratio", [1.01, 1.25, 3.0])
def test_a_saving_loses_what_recording_cost_the_events_that_go(
    texts: tuple[str, ...], ratio: float
) -> None:
    compared = 0
    for graph in JOBS:
        changes = [parse(text) for text in texts]
        if not all(change.selection.nodes(graph).any() for change in changes):
            continue
        if "delay" in texts[0] and graph.nodes["rank"].n_unique() == 1:
            continue
        for saved in (0, 37, 500, -80):
            found = unrecorded_saving_ns(graph, changes, saved, total_ns=700, ratio=ratio)
            assert found == plainly(graph, texts, saved, 700, ratio)
            assert min(saved, saved / 3) - 1 <= found <= max(saved, saved / 3) + 1, (
                "between a third and all of it"
            )
        compared += 1
    assert compared > 1


@pytest.mark.parametrize("ratio", [None, 1.0, 0.8])
def test_what_nobody_measured_or_cost_nothing_takes_nothing_away(ratio: float | None) -> None:
    for graph in JOBS[:3]:
        assert (
            unrecorded_saving_ns(graph, [parse("host remove")], 99, total_ns=500, ratio=ratio) == 99
        )


def session(ratio: float | None = None) -> Session:
    step = HandStep(60).op("aten::mm", 0, 20).launched(GEMM, 5, 12, 500).op("aten::add", 30, 20)
    trace = step.launched(BUSY, 35, 513, 300).build()
    if ratio is not None:
        trace = replace(trace, meta=replace(trace.meta, capture={"overhead": {"ratio": ratio}}))
    return Session((trace,), "by hand")


def test_a_session_and_words_are_enough_to_ask() -> None:
    asked = traceloom.whatif(session(), "kernels ~ gemm * 0.5")
    graph = link_session(session())
    expected = whatif(graph, [parse("kernels ~ gemm * 0.5")])
    assert asked.saved_ns == expected.saved_ns == 250_000
    assert asked.times.tolist() == expected.times.tolist()
    assert asked.host_ratio is None
    both = traceloom.whatif(session(), ["kernels ~ gemm * 0.5", "kernels ~ elementwise remove"])
    assert both.changes == ("kernels ~ gemm * 0.5", "kernels ~ elementwise remove")
    assert both.saved_ns == 550_000
    nothing = traceloom.whatif(session(), [])
    assert (nothing.saved_ns, nothing.changes) == (0, ())


def test_a_session_knows_what_recording_it_cost() -> None:
    asked = traceloom.whatif(session(1.25), "kernels ~ gemm * 0.5")
    assert (asked.host_ratio, asked.rescaled_saved_ns) == (1.25, 250_000)
    other = traceloom.whatif(session(1.25), "kernels ~ gemm * 0.5", host_ratio=2.0)
    assert other.host_ratio == 2.0, "what is said in the call comes first"


def test_words_that_mean_nothing_are_refused() -> None:
    with pytest.raises(UsageError) as refused:
        traceloom.whatif(session(), "kernels faster")
    assert refused.value.slug == "bad-change"


def test_work_that_precedes_its_launch_by_its_clock_does_not_make_the_run_begin_earlier() -> None:
    built = TraceBuilder().op("aten::mm", 0, 60).launch("cudaLaunchKernel", 50, 4, correlation=1)
    built.kernel("k", 31, 20, correlation=1)  # 19 us before it was launched
    built.kernel("old", 400, 100, stream=20)  # of before the window: it begins when it began
    graph = calibrate(link_rank(built.build()))
    answer = whatif(graph, "ops ~ mm remove")
    assert answer.times.min() < 0
    assert (answer.before_ns, answer.after_ns, answer.saved_ns) == (500_000, 500_000, 0)
    assert answer.path["after_ns"].sum() == 500_000
    assert answer.ranks["saved_ns"].to_list() == [0]
    assert whatif_many(graph, [scenario_of(graph, [parse("ops ~ mm remove")])]).tolist() == [
        500_000
    ]
