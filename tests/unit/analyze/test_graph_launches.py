"""Graph launches: replays laid node upon node, with and without the recorder's ids; times in µs."""

from __future__ import annotations

from pathlib import Path

import pytest

import traceloom
from traceloom.analyze import graph_launches
from traceloom.model import Trace
from traceloom.testing import TraceBuilder

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
    assert found.graphs.select("replay_count", "node_count", "evidence", "span_min_ns", "span_max_ns").rows() == [
        (2, 4, "inferred", 113_000, 123_000)
    ]
    assert found.nodes.select("node", "name", "replay_count", "mean_ns", "min_ns", "max_ns", "total_ns").rows() == [
        (0, "embed", 2, 11_000, 10_000, 12_000, 22_000),
        (1, "gemm", 2, 51_000, 50_000, 52_000, 102_000),
        (2, "norm", 2, 20_000, 20_000, 20_000, 40_000),
        (3, "gemm", 2, 33_000, 30_000, 36_000, 66_000),
    ]
    assert found.nodes["gap_mean_ns"].to_list() == [0, 1_000, 1_000, 1_000]
    assert found.nodes["total_ns"].sum() == found.graphs["total_ns"].sum() == found.replays["work_ns"].sum()
    assert (found.replays["span_ns"] - found.replays["idle_ns"]).to_list() == found.replays["work_ns"].to_list()
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
    assert found.graphs.select("graph_id", "evidence", "replay_count", "node_count", "deviating_count").rows() == [
        (7, "correlated", 3, 4, 1)
    ]
    assert found.nodes.select("node_id", "replay_count").rows() == [(100, 3), (101, 3), (102, 3), (103, 2)]
    assert found.replays["deviation"].to_list() == [None, None, "3 nodes instead of 4"]


def test_graphs_of_equal_names_are_told_apart_by_their_ids(tmp_path: Path) -> None:
    builder = replayed([NODES, NODES], ids=7)
    other = TraceBuilder()
    for number in range(2):
        other.launch("cudaGraphLaunch", 100 * number, 5, correlation=number + 1)
        other.kernel(
            "same", 100 * number + 10, 5, correlation=number + 1, **{"graph id": number + 1, "graph node id": 3}
        )
    assert graph_launches(loaded(builder, tmp_path)).graphs.height == 1
    assert graph_launches(loaded(other, tmp_path)).graphs["graph_id"].to_list() == [1, 2]


def test_without_the_file_the_sequence_tells() -> None:
    found = graph_launches(replayed([NODES, NODES], ids=7).build())  # built in a folder that is gone
    assert found.graphs.select("graph_id", "evidence", "replay_count").rows() == [(None, "inferred", 2)]


@pytest.mark.parametrize("call", ["hipGraphLaunch", "cuGraphLaunch", "cudaGraphLaunch"])
def test_graph_launches_of_every_vendor_are_known(call: str) -> None:
    assert graph_launches(replayed([NODES], call=call).build()).graphs["launch_name"].to_list() == [call]


def test_launches_of_single_kernels_are_none() -> None:
    found = graph_launches(replayed([NODES[:1]], call="cudaLaunchKernel").build())
    assert (found.graphs.height, found.work_count, found.fraction) == (0, 0, 0.0)
    assert graph_launches(TraceBuilder().op("aten::mm", 0, 5).build()).fraction is None
