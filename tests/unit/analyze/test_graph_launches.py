"""Graph launches: replays laid node upon node, with and without the recorder's ids; times in µs."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

import traceloom
from support.odd_traces import Row, covered, gpu_rows_of, rows_of
from traceloom.analyze import graph_launches
from traceloom.testing import TraceBuilder
from traceloom.trace.trace import Trace

NODES = [("embed", 10), ("gemm", 50), ("norm", 20), ("gemm", 30)]


def replayed(
    times: list[list[tuple[str, float]]], *, ids: int | None = None, call: str = "cudaGraphLaunch"
) -> TraceBuilder:
    """One launch per list of (name, duration); nodes follow each other after 1 µs."""
    builder = TraceBuilder()
    for number, nodes in enumerate(times):
        now = 1000.0 * number
        builder.launch(call, now, 5, correlation=number + 1)
        now += 10
        for place, (name, duration) in enumerate(nodes):
            told = {"graph id": ids, "graph node id": 100 + place} if ids is not None else {}
            builder.kernel(name, now, duration, correlation=number + 1, **told)
            now += duration + 1
    return builder


def loaded(builder: TraceBuilder, folder: Path) -> Trace:
    return traceloom.load(str(builder.write(folder / "graphs.json"))).traces[0]


def test_replays_are_laid_node_upon_node() -> None:
    other = [("embed", 12), ("gemm", 52), ("norm", 20), ("gemm", 36)]
    found = graph_launches(replayed([NODES, other]).build())
    assert found.graphs.select(
        "replay_count", "node_count", "evidence", "span_min_ns", "span_max_ns"
    ).rows() == [(2, 4, "inferred", 113_000, 123_000)]
    assert found.nodes.select(
        "node", "name", "replay_count", "mean_ns", "min_ns", "max_ns", "total_ns"
    ).rows() == [
        (0, "embed", 2, 11_000, 10_000, 12_000, 22_000),
        (1, "gemm", 2, 51_000, 50_000, 52_000, 102_000),
        (2, "norm", 2, 20_000, 20_000, 20_000, 40_000),
        (3, "gemm", 2, 33_000, 30_000, 36_000, 66_000),
    ]
    assert found.nodes["gap_mean_ns"].to_list() == [0, 1_000, 1_000, 1_000]
    assert (
        found.nodes["total_ns"].sum()
        == found.graphs["total_ns"].sum()
        == found.replays["work_ns"].sum()
    )
    assert (found.replays["span_ns"] - found.replays["idle_ns"]).to_list() == found.replays[
        "work_ns"
    ].to_list()
    assert (found.work_count, found.fraction) == (8, 1.0)


def test_other_sequences_are_other_graphs_and_may_be_alike() -> None:
    layer = NODES * 5
    found = graph_launches(replayed([layer, NODES[:2], layer, layer[:-1]]).build())
    assert found.graphs.select("graph", "replay_count", "node_count", "like").rows() == [
        (0, 2, 20, None),
        (1, 1, 2, None),
        (2, 1, 19, 0),
    ]
    assert found.replays.select("graph", "replay").rows() == [(0, 0), (0, 1), (1, 0), (2, 0)]


def test_a_slow_replay_deviates_and_its_worst_node_is_named() -> None:
    slow = [("embed", 10), ("gemm", 50), ("norm", 70), ("gemm", 31)]
    found = graph_launches(replayed([NODES, NODES, slow, NODES, NODES]).build())
    assert found.graphs["deviating_count"].to_list() == [1]
    row = found.replays.filter(replay=2).to_dicts()[0]
    assert row["deviation"] == "1.45 times as long as the median"
    assert (row["worst_node"], row["worst_excess_ns"]) == (2, 50_000)
    assert found.replays.filter(replay=0)["worst_node"].to_list() == [None]


def test_the_recorders_ids_join_replays_whatever_is_missing(tmp_path: Path) -> None:
    builder = replayed([NODES, NODES, NODES[:3]], ids=7)
    found = graph_launches(loaded(builder, tmp_path))
    assert found.graphs.select(
        "graph_id", "evidence", "replay_count", "node_count", "deviating_count"
    ).rows() == [(7, "correlated", 3, 4, 1)]
    assert found.nodes.select("node_id", "replay_count").rows() == [
        (100, 3),
        (101, 3),
        (102, 3),
        (103, 2),
    ]
    assert found.replays["deviation"].to_list() == [None, None, "3 nodes instead of 4"]


def test_graphs_of_equal_names_are_told_apart_by_their_ids(tmp_path: Path) -> None:
    builder = replayed([NODES, NODES], ids=7)
    other = TraceBuilder()
    for number in range(2):
        other.launch("cudaGraphLaunch", 100 * number, 5, correlation=number + 1)
        other.kernel(
            "same",
            100 * number + 10,
            5,
            correlation=number + 1,
            **{"graph id": number + 1, "graph node id": 3},
        )
    assert graph_launches(loaded(builder, tmp_path)).graphs.height == 1
    assert graph_launches(loaded(other, tmp_path)).graphs["graph_id"].to_list() == [1, 2]


def test_without_the_file_the_sequence_tells() -> None:
    found = graph_launches(
        replayed([NODES, NODES], ids=7).build()
    )  # built in a folder that is gone
    assert found.graphs.select("graph_id", "evidence", "replay_count").rows() == [
        (None, "inferred", 2)
    ]


@pytest.mark.parametrize("call", ["hipGraphLaunch", "cuGraphLaunch", "cudaGraphLaunch"])
def test_graph_launches_of_every_vendor_are_known(call: str) -> None:
    assert graph_launches(replayed([NODES], call=call).build()).graphs["launch_name"].to_list() == [
        call
    ]


def test_launches_of_single_kernels_are_none() -> None:
    found = graph_launches(replayed([NODES[:1]], call="cudaLaunchKernel").build())
    assert (found.graphs.height, found.work_count, found.fraction) == (0, 0, 0.0)
    assert graph_launches(TraceBuilder().op("aten::mm", 0, 5).build()).fraction is None


# -- against looking at every replay ------------------------------------------------------------------------------


def replays_of(trace: Trace) -> dict[int, list[Row]]:
    """The work of each graph launch, by start."""
    events, groups = rows_of(trace), defaultdict(list)
    for row in gpu_rows_of(trace):
        if row["launch"] is not None and "GraphLaunch" in events[row["launch"]]["name"]:
            groups[row["launch"]].append(row)
    return {
        launch: sorted(rows, key=lambda row: row["start_ns"]) for launch, rows in groups.items()
    }


def test_every_replay_is_its_work_from_the_first_start_to_the_last_end(odd: Trace) -> None:
    found, events = graph_launches(odd), rows_of(odd)
    groups = replays_of(odd)
    assert sorted(found.replays["launch"]) == sorted(groups)
    for row in found.replays.to_dicts():
        work, call = groups[row["launch"]], events[row["launch"]]
        spans = [(r["start_ns"], r["end_ns"]) for r in work]
        low, high = min(s for s, _ in spans), max(e for _, e in spans)
        assert (row["start_ns"], row["span_ns"], row["node_count"]) == (low, high - low, len(work))
        assert (row["work_ns"], row["idle_ns"]) == (
            sum(r["ns"] for r in work),
            high - low - covered(spans),
        )
        returned = call["start_ns"] + max(call["duration_ns"], 0)
        assert (row["call_ns"], row["delay_ns"]) == (
            max(call["duration_ns"], 0),
            max(low - returned, 0),
        )
        assert row["step"] == call["step"]
    whole = sum(row["ns"] for row in gpu_rows_of(odd))
    in_graphs = sum(row["ns"] for work in groups.values() for row in work)
    assert found.work_count == sum(map(len, groups.values()))
    assert found.fraction == (pytest.approx(in_graphs / whole) if whole else None)


def test_graphs_are_their_replays_and_nodes_added_up(odd: Trace) -> None:
    found = graph_launches(odd)
    for row in found.graphs.to_dicts():
        own = found.replays.filter(graph=row["graph"])
        nodes = found.nodes.filter(graph=row["graph"])
        assert row["replay_count"] == own.height
        assert (row["span_min_ns"], row["span_max_ns"]) == (
            own["span_ns"].min(),
            own["span_ns"].max(),
        )
        assert row["span_median_ns"] == int(own["span_ns"].median())  # type: ignore[arg-type]
        assert row["total_ns"] == own["work_ns"].sum() == nodes["total_ns"].sum()
        assert row["deviating_count"] == own["deviation"].count()
        assert nodes["replay_count"].sum() == own["node_count"].sum()
        assert nodes["node"].to_list() == list(range(nodes.height))
        assert own["replay"].to_list() == list(range(own.height))
    groups = replays_of(odd)
    sequences = {
        launch: tuple(
            row["name"]
            for row in sorted(work, key=lambda r: (r["device"], r["stream"], r["start_ns"]))
        )
        for launch, work in groups.items()
    }
    of_launch = dict(found.replays.select("launch", "graph").rows())
    for launch, sequence in sequences.items():
        for other, again in sequences.items():
            assert (of_launch[launch] == of_launch[other]) == (sequence == again), (
                "graphs are told by their names"
            )


@pytest.mark.parametrize("slow", [0, 3, 9])
def test_the_replay_that_took_longer_is_the_one_that_deviates_with_its_worst_node(
    slow: int,
) -> None:
    times = [
        [(name, long * (3 if (number, name) == (slow, "norm") else 1)) for name, long in NODES]
        for number in range(10)
    ]
    found = graph_launches(replayed(times).build())
    deviating = found.replays.drop_nulls("deviation")
    assert deviating["replay"].to_list() == [slow]
    row = deviating.row(0, named=True)
    assert (row["worst_node"], row["worst_excess_ns"]) == (2, 40_000)
    assert row["deviation"].endswith("times as long as the median")
    assert found.graphs["deviating_count"].to_list() == [1]


@pytest.mark.parametrize("ids", [None, 7])
def test_a_replay_with_other_nodes_says_how_many(ids: int | None, tmp_path: Path) -> None:
    trace = loaded(replayed([NODES, NODES, NODES[:3], NODES], ids=ids), tmp_path)
    found = graph_launches(trace)
    if ids is None:  # nothing but the names tells the graph
        assert found.graphs["replay_count"].to_list() == [3, 1]
        return
    assert found.graphs.select("graph_id", "replay_count", "evidence").rows() == [
        (7, 4, "correlated")
    ]
    assert found.replays["deviation"].to_list() == [None, None, "3 nodes instead of 4", None]


@pytest.mark.parametrize("number", [2**62, 2**64, "9" * 22, -(2**70), 0, "x", [1]], ids=str)
def test_an_id_that_no_recorder_writes_tells_nothing_or_itself(number: Any, tmp_path: Path) -> None:
    made = TraceBuilder()
    for replay in range(2):
        made.launch("cudaGraphLaunch", 100 * replay, 5, correlation=replay + 1)
        for at, name in enumerate(("a", "b")):
            ids = {"graph id": number, "graph node id": number}
            made.kernel(name, 100 * replay + 10 + 10 * at, 5, correlation=replay + 1, **ids)
    graphs = graph_launches(loaded(made, tmp_path)).graphs
    assert graphs["replay_count"].to_list() == [2]
    assert graphs["graph_id"].to_list() == [number if number == 2**62 else None]
    assert graphs["evidence"].to_list() == ["correlated" if number == 2**62 else "inferred"]
