"""The timeline before and after a change: what is drawn of it, and how it is packed."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest

from support.jobs import (
    LateHost,
    ParallelRecipe,
    Recipe,
    StragglingStep,
    parallel_job,
    training_job,
)
from support.workload import node, write_set
from traceloom.changes.changes import parse
from traceloom.changes.whatif import WhatIf, scenario_of, whatif
from traceloom.cli import main
from traceloom.graph import calibrate
from traceloom.graph.critical_path import find_critical_path
from traceloom.graph.graph import Graph
from traceloom.graph.job import join_ranks
from traceloom.graph.law import law
from traceloom.graph.rank import link_rank
from traceloom.report import before_after, simulation, whatif as report, whatif as report_whatif
from traceloom.report.before_after import merge_nodes
from traceloom.testing import TraceBuilder
from traceloom.workload.simulate.native import run

Unpack = Callable[[str], tuple[dict[str, Any], dict[str, Any]]]
HOSTILE = "</script><script>alert(1)</script>\x1b[31m"


@cache
def graph_of(name: str) -> Graph:
    job = {
        "one": lambda: training_job(Recipe(steps=2, layers=3, item=True)),
        "late": lambda: parallel_job(
            ParallelRecipe(data=8, steps=2, layers=2, faults=(LateHost(5, 2000, by="python"),))
        ),
        "in turn": lambda: parallel_job(
            ParallelRecipe(
                data=8,
                steps=7,
                layers=2,
                faults=tuple(StragglingStep(k, 4.0, rank=k) for k in range(7)),
            )
        ),
    }[name]()
    return calibrate(join_ranks([link_rank(builder.build()) for builder in job.run().traces()]))


def drawn(
    graph: Graph, *texts: str, limit: int = 10_000
) -> tuple[before_after.BeforeAfterTimeline, WhatIf]:
    changes = [parse(text) for text in texts]
    found = whatif(graph, changes)
    view = before_after.build(graph, scenario_of(graph, changes), found, limit=limit)
    assert view is not None
    return view, found


def of_lane(header: dict[str, Any], events: dict[str, Any], name: str) -> list[dict[str, Any]]:
    first = 0
    for lane in header["lanes"]:
        if lane["name"] == name:
            return [
                {key: events[key][k] for key in events} for k in range(first, first + lane["count"])
            ]
        first += lane["count"]
    raise AssertionError(name)


def test_every_lane_stands_there_twice_with_its_times_before_and_after(unpacked: Unpack) -> None:
    graph = graph_of("one")
    view, found = drawn(graph, "kernels * 0.5")
    header, events = unpacked(view.payload)
    names = [lane["name"] for lane in header["lanes"]]
    assert names[0::2] == [name.replace(", after", ", before") for name in names[1::2]]
    stream = graph.lanes.filter(kind="device").row(0, named=True)
    nodes = graph.nodes.filter(
        (graph.nodes["lane"] == stream["lane"]) & (graph.nodes["duration_ns"] > 0)
    )
    first = int(graph.point_times().min())
    for side, times in (("before", graph.point_times()), ("after", found.times)):
        shown = of_lane(header, events, f"{stream['name']}, {side}")
        rows = nodes["node"].to_numpy()
        order = np.argsort(times[2 * rows], kind="stable")
        starts, ends = times[2 * rows][order] - first, times[2 * rows + 1][order] - first
        assert [one["start"] for one in shown] == starts.tolist()
        assert [one["duration"] for one in shown] == (ends - starts).tolist()
    assert header["span_ns"] == found.before_ns


def test_what_the_changes_are_about_is_marked_and_the_rest_only_moves(unpacked: Unpack) -> None:
    graph = graph_of("one")
    view, _ = drawn(graph, "kernels * 0.5")
    header, events = unpacked(view.payload)
    categories = [header["categories"][header["labels"][label][1]] for label in events["label"]]
    assert {
        category for category, mark in zip(categories, events["changed"], strict=True) if mark
    } == {"kernel"}
    of_kernels = [
        (events["duration"][k], events["duration"][twin])
        for k, twin in enumerate(events["twin"])
        if events["changed"][k] and k < twin
    ]
    assert of_kernels
    assert all(after == pytest.approx(before / 2, abs=1) for before, after in of_kernels)


def test_the_same_piece_on_the_other_side_points_back(unpacked: Unpack) -> None:
    view, _ = drawn(graph_of("one"), "launches remove")
    header, events = unpacked(view.payload)
    twins = events["twin"]
    assert all(twins[other] == k for k, other in enumerate(twins) if other is not None)
    gone = [k for k, other in enumerate(twins) if other is None]
    categories = {header["categories"][header["labels"][events["label"][k]][1]] for k in gone}
    assert categories <= {"runtime", "driver"}
    assert gone


def test_the_ranks_that_matter_are_drawn_and_the_choice_is_said(unpacked: Unpack) -> None:
    view, found = drawn(graph_of("late"), "rank 5 delay remove")
    header, _ = unpacked(view.payload)
    ranks = [rank["rank"] for rank in header["ranks"]]
    assert 5 in ranks
    assert len(ranks) <= 6 < found.ranks.height
    assert "Of 8 ranks these are drawn" in view.description
    assert all(f"rank {rank} (" in view.description for rank in ranks)
    for word in ("the slowest", "gains most", "the median one", "decides"):
        assert word in view.description
    gains = found.ranks.sort("saved_ns")["saved_ns"][-1]
    most = next(
        rank["rank"] for rank in header["ranks"] if "gains most" in rank["description"].lower()
    )
    assert found.ranks.filter(rank=most)["saved_ns"].item() == gains


def test_both_critical_paths_lie_on_the_lanes_of_their_side(unpacked: Unpack) -> None:
    view, found = drawn(graph_of("late"), "rank 5 delay remove")
    header, _ = unpacked(view.payload)
    sides = [lane["side"] for lane in header["lanes"]]
    path = header["path"]
    for side, stretches, whole in (
        ("before", path["stretches"], found.before_ns),
        ("after", path["after"], found.after_ns),
    ):
        assert stretches
        assert {sides[lane] for lane, *_ in stretches} == {side}
        assert all(0 <= start < end <= whole for _, start, end, *_ in stretches)
        assert stretches == sorted(stretches, key=lambda one: one[1])


@pytest.mark.thorough
def test_the_line_of_a_path_is_parted_where_it_goes_over_ranks_that_are_not_drawn(
    unpacked: Unpack,
) -> None:
    graph = graph_of("in turn")
    view, _ = drawn(graph, "kernels * 0.9")
    header, _ = unpacked(view.payload)
    ranks = {rank["rank"] for rank in header["ranks"]}
    spent = (
        graph.nodes[find_critical_path(graph).nodes].group_by("rank").agg(pl.col("work_ns").sum())
    )
    assert spent.filter(~pl.col("rank").is_in(list(ranks)), pl.col("work_ns") > 1_000_000).height
    parted = [one for one in header["path"]["stretches"] if len(one) > 3]
    assert 1 <= len(parted) <= 8
    assert not [
        one
        for one in unpacked(drawn(graph_of("one"), "kernels * 0.9")[0].payload)[0]["path"][
            "stretches"
        ]
        if len(one) > 3
    ]


@pytest.mark.parametrize("limit", [1_000, 4_000])
def test_pieces_are_few_whatever_the_trace_and_hold_every_node(limit: int) -> None:
    random = np.random.default_rng(7)
    count = 50_000
    lane = random.integers(0, 3, count)
    long = random.integers(1, 200, count)
    start = np.empty((2, count), dtype=np.int64)
    for one in range(3):
        here = lane == one
        start[0, here] = np.cumsum(np.append(0, long[here] + 5))[:-1]
    start[1] = start[0] // 2
    kept = np.where(random.random(count) < 0.1, 0, long // 2)
    end = start + np.stack([long, kept])
    found = merge_nodes(lane, start, end, limit)
    assert found.lane.size <= limit
    assert int(found.count.sum()) == count
    assert sorted(found.order.tolist()) == list(range(count))
    for side in (0, 1):
        assert found.end[side].max() == end[side][end[side] > start[side]].max()
        for one in range(3):
            here = (found.lane == one) & (found.end[side] > found.start[side])
            # neighbours do not overlap, so that each lane stays one row
            assert (found.start[side][here][1:] >= found.end[side][here][:-1]).all()


def test_pieces_are_few_even_where_after_is_in_no_order() -> None:
    random = np.random.default_rng(3)
    start = np.stack([np.arange(30_000) * 10, random.permutation(30_000) * 10])
    found = merge_nodes(np.zeros(30_000, dtype=np.int64), start, start + 8, 500)
    assert found.lane.size <= 501
    assert int(found.count.sum()) == 30_000


def test_few_nodes_are_pieces_of_their_own_and_no_node_is_no_piece() -> None:
    start = np.array([[0, 10, 20], [0, 5, 10]])
    found = merge_nodes(np.array([0, 0, 1]), start, start + np.array([[5], [2]]), 10)
    assert (found.grain_ns, found.count.tolist()) == (0, [1, 1, 1])
    assert (
        merge_nodes(
            np.zeros(0, dtype=np.int64), np.zeros((2, 0), int), np.zeros((2, 0), int), 10
        ).lane.size
        == 0
    )


def test_what_is_drawn_together_says_so(unpacked: Unpack) -> None:
    view, _ = drawn(graph_of("late"), "host * 0.5", limit=300)
    header, events = unpacked(view.payload)
    assert view.shown <= 300
    assert "drawn together" in view.description
    assert "drawn together" not in drawn(graph_of("late"), "host * 0.5")[0].description
    several = [header["facts"][fact - 1] for fact in events["fact"] if fact]
    assert several
    assert all(
        text.startswith("stands for\x1f") and not text.startswith("stands for\x1f1 ")
        for text in several
    )


def large(count: int) -> Graph:
    """Many short ops with a kernel each, of times by chance, every one with a long hostile name of its own."""
    made = TraceBuilder()
    chance = np.random.default_rng(11)
    word = [
        bytes(letters).decode() for letters in chance.integers(97, 123, (64, 150), dtype=np.uint8)
    ]
    now = device = 0.0
    for k, (host, work) in enumerate(np.round(chance.uniform(3, 20, (count // 3, 2)), 3).tolist()):
        made.op(f"{HOSTILE}{k}{word[k % 64]}", now, host)
        made.launch("cudaLaunchKernel", now + 1, 1.5, correlation=k + 1)
        device = round(max(device, now + 3), 3)
        made.kernel(f"kernel<{k}, {HOSTILE}>{word[k * 7 % 64]}", device, work, correlation=k + 1)
        now, device = round(now + host + 0.5, 3), round(device + work + 0.7, 3)
    return calibrate(join_ranks([link_rank(made.build())]))


@pytest.mark.thorough
def test_the_page_stays_small_and_its_names_are_text(unpacked: Unpack) -> None:
    graph = large(60_000)
    changes = [parse("kernels * 0.5")]
    found = whatif(graph, changes)
    view = before_after.build(graph, scenario_of(graph, changes), found)
    page = report_whatif.render_before_after_page(
        report.build(HOSTILE, None, changes, found, law(graph)), view
    )
    assert graph.nodes.height > 60_000
    assert len(page.encode()) < 1_000_000
    assert "<script>alert" not in page
    assert "\x1b" not in page
    assert view is not None
    header, _ = unpacked(view.payload)
    assert sum(len(name) for name, _ in header["labels"]) < 250_000
    assert not any("\x1b" in name for name, _ in header["labels"])


def test_a_graph_with_nothing_on_its_lanes_has_a_page_without_a_timeline(tmp_path: Path) -> None:
    document = {
        "name": "made",
        "sentence": "Nothing.",
        "before_ns": 0,
        "after_ns": 0,
        "saved_ns": 0,
        "rescaled_saved_ns": 0,
        "changes": [],
        "ranks": [],
        "path": [],
        "trusted": True,
        "upper_bound": False,
        "law": {"sentence": "It holds.", "honest_error": 0.0},
        "traceloom": "0.0.0",
    }
    page = report_whatif.render_before_after_page(document, None)
    assert "nothing takes any time" in page
    assert 'id="timeline-view"' not in page


def test_the_command_writes_the_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = training_job(Recipe(steps=2, layers=2)).run().write(tmp_path / "run")
    out = tmp_path / "x.html"
    assert main(["whatif", str(run), "--set", "gpu * 0.5", "-o", str(out)]) == 0
    assert f"Wrote {out}" in capsys.readouterr().out
    assert "timeline-view" in out.read_text(encoding="utf-8")
    assert (
        main(["whatif", str(run), "--set", "gpu * 0.5", "-o", str(tmp_path / "a.perfetto.json.gz")])
        == 0
    )
    assert json.loads(gzip.decompress((tmp_path / "a.perfetto.json.gz").read_bytes()))[
        "traceEvents"
    ]


def test_work_of_files_without_categories_has_the_colour_of_its_kind(
    unpacked: Unpack, tmp_path: Path
) -> None:
    nodes = [
        node(1, us=5, is_cpu_op=False, name="layer"),
        node(2, us=5, is_cpu_op=True, name="call", deps=[1]),
    ]
    view = simulation.build_timeline(run(write_set(tmp_path / "set", nodes)))
    assert view is not None
    header, _ = unpacked(view.payload)
    assert {name: header["categories"][code] for name, code in header["labels"]} == {
        "layer": "kernel",
        "call": "op",
    }
