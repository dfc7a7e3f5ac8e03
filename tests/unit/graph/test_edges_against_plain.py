"""Edges of random traces against plain loops over their events: streams, launches, synchronisations, segments."""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import numpy as np
import polars as pl
import pytest

from traceloom.graph.device_work import WorkTimeline, collect_device_work
from traceloom.graph.edges import Edges, select_acyclic_edges
from traceloom.graph.graph import EDGE_KINDS, Graph, is_acyclic
from traceloom.graph.host_tree import build_host_tree
from traceloom.graph.rank import link_rank
from traceloom.testing import TraceBuilder

US = 1_000
SEEDS = range(12)


class Work:
    """One random kernel with its launch; times in us."""

    def __init__(self, number: int, draw: random.Random, *, overlap: bool) -> None:
        self.name = f"k{number}"
        self.call = 10 * number
        self.call_us = draw.choice([3, 4, 60])
        self.stream = draw.choice([7, 7, 20, 24])
        self.start = self.call + draw.randint(1, 300 if overlap else 40)
        self.length = draw.randint(1, 60)

    @property
    def end(self) -> int:
        return self.start + self.length


def random_work(seed: int, *, overlap: bool) -> tuple[TraceBuilder, list[Work]]:
    """Kernels of random streams; where they may not overlap, each starts after the one before on its stream."""
    draw = random.Random(seed)
    built, works = TraceBuilder(), []
    free: dict[int, int] = {}
    for number in range(25):
        work = Work(number, draw, overlap=overlap)
        if not overlap:
            work.start = max(work.start, free.get(work.stream, 0) + draw.randint(0, 3))
        free[work.stream] = work.end
        built.launch("cudaLaunchKernel", work.call, min(work.call_us, 9), correlation=number + 1)
        built.kernel(work.name, work.start, work.length, stream=work.stream, correlation=number + 1)
        works.append(work)
    return built, works


def named(graph: Graph, kind: str) -> set[tuple[str, str, bool, bool, str]]:
    graph.check()
    name = graph.nodes["name"]
    return {
        (name[row["source"]], name[row["target"]], row["from_end"], row["to_end"], row["evidence"])
        for row in graph.edges.filter(pl.col("kind") == kind).to_dicts()
    }


@pytest.mark.sampled(9)
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("seed", SEEDS)
def test_the_work_of_a_stream_waits_for_what_came_before_it_as_a_plain_loop_says(
    seed: int, overlap: bool
) -> None:
    built, works = random_work(seed, overlap=overlap)
    expected = set()
    for stream in {work.stream for work in works}:
        queue = sorted(
            (work for work in works if work.stream == stream), key=lambda one: (one.start, one.call)
        )
        for place, work in enumerate(queue[1:], 1):
            before = queue[place - 1]
            longest = max(queue[:place], key=lambda one: (one.end, queue.index(one)))
            expected.add((before.name, work.name, before.end <= work.start, False, "measured"))
            if longest.end <= work.start:
                expected.add((longest.name, work.name, True, False, "measured"))
            if work.start < before.end <= work.end:
                expected.add((before.name, work.name, True, True, "inferred"))
    assert named(link_rank(built.build()), "stream") == expected


@pytest.mark.parametrize("call_us", [4, 49, 50, 200])
@pytest.mark.parametrize("after_us", [-20, -10, 5])
def test_work_is_held_by_the_beginning_of_its_call_but_by_the_end_of_a_long_one_it_follows(
    call_us: int, after_us: int
) -> None:
    built = TraceBuilder().launch("cudaLaunchKernel", 0, call_us, correlation=1)
    built.kernel("k", max(call_us + after_us, 1), 10, correlation=1)
    from_end = call_us >= 50 and after_us >= -10
    assert named(link_rank(built.build()), "launch") == {
        ("cudaLaunchKernel", "k", from_end, False, "correlated")
    }


@pytest.mark.parametrize("seed", SEEDS)
def test_a_device_is_awaited_for_the_last_work_of_each_stream_that_nobody_has_awaited_yet(
    seed: int,
) -> None:
    draw = random.Random(100 + seed)
    built, now, number = TraceBuilder(), 0, 0
    launched: list[tuple[str, int, int]] = []  # name, stream, end
    awaited: set[str] = set()
    free: dict[int, int] = {}
    expected = set()
    for turn in range(6):
        for _ in range(draw.randint(0, 4)):
            number += 1
            stream = draw.choice([7, 20])
            start = max(now + 8, free.get(stream, 0) + 1)
            length = draw.randint(5, 80)
            free[stream] = start + length
            built.launch("cudaLaunchKernel", now, 4, correlation=number)
            built.kernel(f"k{number}", start, length, stream=stream, correlation=number)
            launched.append((f"k{number}", stream, start + length))
            now += 6
        call = f"call {turn}"
        until = max([now + 3, *(end + 2 for _, _, end in launched)])
        built.op(call, now, until - now + 2)
        built.launch("cudaDeviceSynchronize", now + 1, until - now, correlation=900 + turn)
        for stream in {stream for _, stream, _ in launched}:
            name = max((one for one in launched if one[1] == stream), key=lambda one: one[2])[0]
            if name not in awaited:
                expected.add((name, "cudaDeviceSynchronize", True, True, "inferred", until + now))
                awaited.add(name)
        now = until + 10
    graph = link_rank(built.build())
    found = named(graph, "synchronize")
    assert {row[:5] for row in found} == {row[:5] for row in expected}
    # each is of the call that came first after it
    edges = graph.edges.filter(pl.col("kind") == "synchronize")
    calls = graph.nodes.filter(pl.col("kind") == "block").sort("start_ns")
    for row in edges.to_dicts():
        work = graph.nodes.row(row["source"], named=True)
        behind = calls.filter(
            pl.col("start_ns") + pl.col("duration_ns") >= work["start_ns"] + work["duration_ns"]
        )
        assert behind["node"][0] == row["target"]


def spans(draw: random.Random, low: int, high: int, depth: int) -> Iterator[tuple[int, int]]:
    """Random spans that nest, with room between them."""
    at = low
    while at + 8 < high:
        start = draw.randint(at, high - 8)
        end = draw.randint(start + 4, high)
        yield start, end
        if depth:
            yield from spans(draw, start + 1, end - 1, depth - 1)
        at = end + 1


@pytest.mark.parametrize("seed", SEEDS)
def test_a_thread_is_cut_where_the_innermost_event_changes(seed: int) -> None:
    draw = random.Random(seed)
    built, rows = (
        TraceBuilder(),
        sorted(spans(draw, 0, 200, 3), key=lambda span: (span[0], -span[1])),
    )
    innermost: dict[int, str] = {}
    for number, (start, end) in enumerate(rows):
        built.op(f"op{number}", start, end - start)
        innermost |= dict.fromkeys(range(start, end), f"op{number}")
    pieces: list[tuple[str, int, int]] = []
    for at in range(rows[0][0], max(end for _, end in rows)):
        name = innermost.get(at, "think")
        # an event that begins cuts, too, where the one before it has the same name: none does here
        if pieces and pieces[-1][0] == name and pieces[-1][2] == at:
            pieces[-1] = (name, pieces[-1][1], at + 1)
        else:
            pieces.append((name, at, at + 1))
    graph = link_rank(built.build())
    nodes = graph.nodes.filter(pl.col("kind") != "origin").sort("node")
    found = [
        (name, start // US, (start + length) // US)
        for name, start, length in nodes.select("name", "start_ns", "duration_ns").iter_rows()
    ]
    shift = rows[0][0]
    assert found == [(name, low - shift, high - shift) for name, low, high in pieces]
    kinds = dict(nodes.select("name", "kind").iter_rows())
    assert {kind for name, kind in kinds.items() if name != "think"} == {"host"}
    # one after the other; `call` where one of two neighbours lies in the other, else `thread`
    enclosed = {
        (f"op{one}", f"op{other}")
        for one, (low, high) in enumerate(rows)
        for other, (start, end) in enumerate(rows)
        if low <= start and end <= high and one != other
    }
    order = {kind: named(graph, kind) for kind in ("call", "thread")}
    for before, after in pairwise(pieces):
        pair = (before[0], after[0])
        kind = "call" if pair in enclosed or pair[::-1] in enclosed else "thread"
        assert (*pair, True, False, "measured") in order[kind]


# -- which edges fit ------------------------------------------------------------------------------------------------


def random_edges(seed: int, *, contradicting: bool) -> tuple[np.ndarray[Any, Any], ...]:
    """Random points and edges; firm ones lead forward in time, others also back where they may contradict."""
    draw = np.random.default_rng(seed)
    count = int(draw.integers(3, 12))
    start = np.sort(draw.integers(0, 60, count))
    times = np.empty(2 * count, dtype=np.int64)
    times[0::2], times[1::2] = start, start + draw.integers(0, 20, count)
    pairs = draw.integers(0, 2 * count, (3 * count, 2))
    pairs = pairs[pairs[:, 0] // 2 != pairs[:, 1] // 2]
    forward = times[pairs[:, 0]] < times[pairs[:, 1]]
    if not contradicting:
        pairs, forward = pairs[forward], forward[forward]
    firm = forward & (draw.random(len(pairs)) < 0.5)
    return pairs[:, 0], pairs[:, 1], firm, times


@pytest.mark.parametrize("seed", range(30))
def test_edges_that_agree_with_time_all_fit(seed: int) -> None:
    source, target, firm, times = random_edges(seed, contradicting=False)
    assert select_acyclic_edges(source, target, firm, times).all()


@pytest.mark.parametrize("seed", range(30))
def test_of_edges_that_contradict_each_other_all_firm_ones_fit_and_none_closes_a_circle(
    seed: int,
) -> None:
    source, target, firm, times = random_edges(seed, contradicting=True)
    kept = select_acyclic_edges(source, target, firm, times)
    assert kept[firm].all()
    assert is_acyclic(times.size // 2, source[kept], target[kept])
    # what goes on in time is refused only where something that goes back has moved its source
    early = times[target] <= times[source]
    if not (kept & early & ~firm).any():
        forward = ~early
        assert kept[forward].all()


def test_each_way_of_adding_an_edge_comes_back_as_it_was_given() -> None:
    draw = random.Random(3)
    times = np.arange(0, 40, 2, dtype=np.int64)  # ten nodes one after the other, without rest
    expected = set()
    edges = Edges()
    for _ in range(60):
        kind, evidence = (
            draw.choice(EDGE_KINDS),
            draw.choice(["measured", "correlated", "inferred", "assumed"]),
        )
        source, target = sorted(draw.sample(range(10), 2))
        from_end, to_end = draw.random() < 0.5, draw.random() < 0.5
        if any(key[:5] == (source, target, from_end, to_end, kind) for key in expected):
            continue
        edges.add(
            kind, evidence, np.array([source]), np.array([target]), from_end=from_end, to_end=to_end
        )
        expected.add((source, target, from_end, to_end, kind, evidence))
    frame, refused = edges.frame(times)
    found = {
        (row["source"], row["target"], row["from_end"], row["to_end"], row["kind"], row["evidence"])
        for row in frame.to_dicts()
        if not (row["kind"] == "origin" and row["evidence"] == "assumed" and row["source"] == 0)
    }
    assert found == {
        row for row in expected if not (row[4] == "origin" and row[5] == "assumed" and row[0] == 0)
    }
    assert refused.height == 0
    held = set(frame.filter(~pl.col("to_end"))["target"])
    assert held == set(range(1, 10)), "whatever nothing holds is held by the origin"


# -- questions by time ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", SEEDS)
def test_questions_by_time_are_answered_as_by_looking_at_every_work(seed: int) -> None:
    built, _ = random_work(seed, overlap=True)
    trace = built.build()
    tree = build_host_tree(trace)
    work = collect_device_work(trace, tree)
    times = WorkTimeline(work, tree)
    draw = np.random.default_rng(seed)
    first = int(work.start.min())
    at = draw.integers(first - 500 * US, first + 700 * US, 60)
    at[::3] = draw.choice(
        np.concatenate([work.start, work.end, work.asked]), at[::3].size
    )  # and the very moments
    lane = draw.choice(np.append(times.lanes, 99), at.size)
    thread = draw.choice(np.append(np.unique(tree.lane), 77), at.size)

    def last_ending(chosen: Any) -> int:
        of = np.flatnonzero(chosen)
        return int(work.end[of].max()) if of.size else -1

    for number in range(at.size):
        own, moment = work.lane == lane[number], at[number]
        only = np.array([lane[number]]), np.array([moment])
        for answer, chosen in (
            (times.launched_before(*only)[0], own & (work.asked < moment)),
            (times.ended_by(*only)[0], own & (work.end <= moment)),
        ):
            assert (work.end[answer] if answer >= 0 else -1) == last_ending(chosen)
        later = np.flatnonzero(own & (work.asked >= moment))
        answer = times.launches_on_after(*only)[0]
        assert (work.asked[answer] if answer >= 0 else None) == (
            work.asked[later].min() if later.size else None
        )
        of_thread = (work.call >= 0) & (tree.lane[np.maximum(work.call, 0)] == thread[number])
        before = np.flatnonzero(of_thread & (work.asked < moment))
        only = np.array([thread[number]]), np.array([moment])
        answer = times.thread_launched_before(*only)[0]
        assert (work.asked[answer] if answer >= 0 else None) == (
            work.asked[before].max() if before.size else None
        )
    together = times.launched_before(lane, at)
    assert together.tolist() == [
        int(times.launched_before(np.array([one]), np.array([moment]))[0])
        for one, moment in zip(lane, at, strict=True)
    ]


# -- forward and backward -----------------------------------------------------------------------------------------------

ENGINE = "autograd::engine::evaluate_function: MmBackward0"


def passes(
    *forward: tuple[str, float, int, int], backward: tuple[int, int] = (5, 1)
) -> set[tuple[str, str, str]]:
    """Ops as (name, start, sequence, thread), then one of the backward pass: its number and its forward's thread."""
    built = TraceBuilder()
    for name, start, sequence, thread in forward:
        built.op(name, start, 40, sequence=sequence, thread=thread)
    number, thread = backward
    built.op(ENGINE, 1000, 50, sequence=number, forward_thread=thread, thread=9)
    return {(row[0], row[1], row[4]) for row in named(link_rank(built.build()), "forward-backward")}


def test_a_backward_op_is_of_the_forward_op_of_its_number() -> None:
    assert passes(("aten::mm", 0, 5, 1)) == {("aten::mm", ENGINE, "correlated")}
    # the threads have numbers of their own in a backward op: where there is one, it is meant
    assert passes(("aten::mm", 0, 5, 2)) == {("aten::mm", ENGINE, "correlated")}


def test_where_two_threads_go_forward_nobody_knows_whose_number_it_is() -> None:
    assert passes(("here", 0, 5, 1), ("there", 10, 5, 2)) == set()
    assert passes(("here", 0, 5, 1), ("there", 10, 6, 2)) == set()


def test_a_backward_op_without_a_forward_one_stands_alone() -> None:
    assert passes(("aten::mm", 0, 6, 1)) == set()
    assert passes() == set()


def test_of_several_forward_ops_of_one_number_the_last_to_begin_made_the_node() -> None:
    assert passes(("first", 0, 5, 1), ("second", 100, 5, 1)) == {("second", ENGINE, "correlated")}


def test_a_forward_op_that_comes_after_its_backward_by_the_clock_is_not_joined() -> None:
    assert passes(("aten::mm", 2000, 5, 1)) == set()


# -- what a stream waits for --------------------------------------------------------------------------------------------


def two_streams(
    *, record: bool = True, wait: bool = True, known: bool = True, ends: float = 100
) -> set[tuple[str, ...]]:
    """`first` on stream 7; an event of it; stream 20 waits for that, then runs `second` from 120 us on."""
    built = TraceBuilder().launch("cudaLaunchKernel", 0, 4, correlation=1)
    built.kernel("first", 8, ends - 8, stream=7, correlation=1)
    if record:
        built.launch("cudaEventRecord", 5, 2, correlation=2)
    if wait:
        built.launch("cudaStreamWaitEvent", 10, 2, correlation=3)
        if known:
            of = {"wait_on_stream": 7, "wait_on_cuda_event_record_corr_id": 2}
            built.sync("Stream Wait Event", 11, 0, stream=20, correlation=3, **of)
    built.launch("cudaLaunchKernel", 20, 4, correlation=4)
    built.kernel("second", 120, 50, stream=20, correlation=4)
    return {(row[0], row[1], row[4]) for row in named(link_rank(built.build()), "wait")}


def test_a_stream_waits_for_the_event_that_its_record_names() -> None:
    assert two_streams() == {("first", "second", "measured")}


def test_without_a_record_of_the_device_the_calls_tell() -> None:
    assert two_streams(known=False) == {("first", "second", "inferred")}


def test_streams_that_were_asked_to_wait_for_nothing_do_not() -> None:
    assert two_streams(wait=False) == set()


@pytest.mark.parametrize(("ends", "waits"), [(119, True), (122, True), (123, False), (400, False)])
@pytest.mark.parametrize("known", [True, False])
def test_what_ends_after_the_work_that_waits_was_not_awaited(
    ends: float, waits: bool, known: bool
) -> None:
    assert bool(two_streams(known=known, ends=ends)) == waits


def test_work_that_was_launched_after_the_event_is_not_what_the_event_says() -> None:
    built = TraceBuilder().launch("cudaEventRecord", 0, 2, correlation=2)
    built.launch("cudaLaunchKernel", 5, 4, correlation=1).kernel(
        "first", 12, 50, stream=7, correlation=1
    )
    built.launch("cudaStreamWaitEvent", 10, 2, correlation=3)
    of = {"wait_on_stream": 7, "wait_on_cuda_event_record_corr_id": 2}
    built.sync("Stream Wait Event", 11, 0, stream=20, correlation=3, **of)
    built.launch("cudaLaunchKernel", 20, 4, correlation=4).kernel(
        "second", 120, 50, stream=20, correlation=4
    )
    assert named(link_rank(built.build()), "wait") == set()


# -- blocking copies ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "kind", "returns", "blocks"),
    [
        ("cudaMemcpyAsync", "DtoH (Device -> Pageable)", 112, True),
        ("cudaMemcpyAsync", "DtoH (Device -> Pinned)", 112, False),
        (
            "cudaMemcpyAsync",
            "HtoD (Pageable -> Device)",
            112,
            True,
        ),  # it returned when the copy was done
        (
            "cudaMemcpyAsync",
            "HtoD (Pageable -> Device)",
            60,
            False,
        ),  # it was staged, and returned before
        ("cudaMemcpyAsync", "HtoD (Pinned -> Device)", 112, False),
        (
            "cudaMemcpyAsync",
            "HtoD (Pageable -> Device)",
            250,
            False,
        ),  # long after: it waited for something else
        ("cudaMemcpy", "HtoD (Pinned -> Device)", 112, True),
        ("cudaMemcpy", "DtoD (Device -> Device)", 112, True),
        ("hipMemcpyWithStream", "DtoH (Device -> Pinned)", 112, True),
    ],
)
def test_which_copies_hold_their_calls(call: str, kind: str, returns: float, blocks: bool) -> None:
    built = TraceBuilder().launch(call, 0, returns, correlation=1)
    built.copy(f"Memcpy {kind}", 10, 100, bytes=4096, correlation=1)
    graph = link_rank(built.build())
    held = {row[:4] for row in named(graph, "synchronize")}
    copy = graph.nodes.filter(pl.col("kind") == "copy")["name"][0]
    name = graph.nodes.filter(pl.col("lane") == 0)["name"][0]
    assert held == ({(copy, name, True, True)} if blocks else set())
    assert (graph.nodes.filter(pl.col("name") == name)["kind"][0] == "block") == blocks
