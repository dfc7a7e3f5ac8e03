"""Work that is taken out of the order of its stream: what came before it still holds back what came behind it."""

from __future__ import annotations

import pytest

from traceloom.changes.bounds import compute_busiest_lane_ns, max_saved_ns
from traceloom.changes.changes import parse
from traceloom.changes.scenario import Scenario
from traceloom.changes.whatif import changed_nodes, scenario_of, whatif
from traceloom.graph import calibrate
from traceloom.graph.graph import Graph
from traceloom.graph.job import join_ranks
from traceloom.graph.rank import link_rank
from traceloom.testing.trace_builder import TraceBuilder

US = 1_000
MAIN, SIDE = 7, 20


def linked(*work: tuple[str, int, int, int], optimizer_at: int | None = None) -> Graph:
    """Work as (name, start, microseconds, stream), launched in this order and long before it runs."""
    made = TraceBuilder()
    for number, (name, start, took, stream) in enumerate(work):
        if number == optimizer_at:
            made.annotation("Optimizer.step#SGD.step", 5 * number, 300)
        call = "cudaMemcpyAsync" if name.startswith("Memcpy") else "cudaLaunchKernel"
        made.launch(call, 5 * number + 1, 2, correlation=number + 1)
        if name.startswith("Memcpy"):
            made.copy(name, start, took, bytes=1024, stream=stream, correlation=number + 1)
        else:
            made.kernel(name, start, took, stream=stream, correlation=number + 1)
    return calibrate(join_ranks([link_rank(made.build())]))


def after_us(graph: Graph, text: str) -> float:
    result = whatif(graph, [parse(text)])
    assert result.path["after_ns"].sum() == result.after_ns
    return result.after_ns / US


COPY = "Memcpy DtoD (Device -> Device)"


def test_kernels_behind_a_copy_wait_for_those_before_it() -> None:
    graph = linked(("a", 1000, 100, MAIN), (COPY, 1100, 50, MAIN), ("b", 1150, 100, MAIN))
    assert after_us(graph, "copies overlap") == pytest.approx(1250 - 50 - 1, abs=1)


def test_a_chain_of_copies_stays_a_chain_and_lets_nothing_pass() -> None:
    graph = linked(
        ("a", 1000, 100, MAIN),
        *((COPY, 1100 + 50 * n, 50, MAIN) for n in range(4)),
        ("b", 1300, 30, MAIN),
    )
    result = whatif(graph, [parse("copies overlap")])
    assert result.after_ns / US == pytest.approx(
        1300 - 1, abs=1
    )  # four copies after the kernel, one after the other
    end = result.times[1::2][graph.nodes["name"].to_list().index("b")]
    assert end / US == pytest.approx(1130 - 1, abs=1)


def test_what_another_kernel_covers_already_is_not_saved_again() -> None:
    graph = linked(
        ("a", 1000, 100, MAIN),
        ("c", 1105, 40, SIDE),
        (COPY, 1100, 50, MAIN),
        ("b", 1150, 100, MAIN),
    )
    assert after_us(graph, "copies overlap") == pytest.approx(1250 - 10 - 1, abs=1)
    hidden = scenario_of(graph, [parse("copies overlap")])
    assert max_saved_ns(graph, hidden) == 10 * US
    assert compute_busiest_lane_ns(hidden) == 200 * US


def test_the_optimizer_waits_for_all_of_it() -> None:
    graph = linked(
        ("a", 1000, 100, MAIN),
        (COPY, 1100, 500, MAIN),
        ("b", 1600, 100, MAIN),
        ("sgd", 1700, 100, MAIN),
        optimizer_at=3,
    )
    result = whatif(graph, [parse("copies overlap")])
    start = dict(zip(graph.nodes["name"], result.times[0::2], strict=True))
    assert start["b"] / US == pytest.approx(1100, abs=1)
    assert start["sgd"] / US == pytest.approx(1600, abs=1)


def test_changes_stand_on_each_other() -> None:
    graph = linked(("a", 1000, 100, MAIN), (COPY, 1100, 50, MAIN), ("b", 1150, 100, MAIN))
    for texts in (["copies overlap", "kernels * 0.5"], ["kernels * 0.5", "copies overlap"]):
        result = whatif(graph, [parse(text) for text in texts])
        assert result.after_ns / US == pytest.approx(1250 - 50 - 100 - 1, abs=1)


def test_what_runs_beside_is_what_changed() -> None:
    graph = linked(("a", 1000, 100, MAIN), (COPY, 1100, 50, MAIN), ("b", 1150, 100, MAIN))
    changed = changed_nodes(graph, scenario_of(graph, [parse("copies overlap")]))
    assert graph.nodes["name"].filter(changed.tolist()).to_list() == [COPY]
    assert not Scenario.of(graph).beside.any()
