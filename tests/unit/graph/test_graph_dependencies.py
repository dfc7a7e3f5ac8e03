"""Dependencies between the nodes of a CUDA graph, as PyTorch 2.14 draws them between lanes."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random
from typing import Any

import polars as pl
import pytest

from traceloom.changes.whatif import whatif
from traceloom.graph.graph import Graph
from traceloom.graph.linking import link


def make_graph(seed: int) -> tuple[list[dict[str, Any]], set[tuple[str, str]]]:
    """Returns the events of one graph launch whose nodes run when what they depend on has ended, and
    the dependencies by name.
    """
    random = Random(seed)
    call = {"cat": "cuda_runtime", "pid": 9, "tid": 9, "ts": 100.0, "dur": 5.0}
    rows = [call | {"ph": "X", "name": "cudaGraphLaunch", "args": {"correlation": 7}}]
    rows.append(
        {"ph": "X", "cat": "cpu_op", "name": "aten::a", "pid": 9, "tid": 9, "ts": 1, "dur": 2}
    )
    nodes: list[tuple[str, int, float]] = []  # name, lane, end
    free: dict[int, float] = {}
    pairs = set()
    for number in range(12):
        lane = random.choice([7, 7, 13, 26674])
        stream = 7 if lane == 26674 else lane
        before = random.sample(nodes, min(len(nodes), random.choice([0, 1, 1, 2])))
        begun = max([110.0, free.get(stream, 0), *(end for *_, end in before)]) + random.choice(
            [0, 1]
        )
        end, name = begun + random.choice([1.5, 4.0, 9.25]), f"node{number}"
        kind, free[stream] = "kernel", end
        if number % 5 == 4:
            kind, name = "graph_host_node", f"HostNode: callback{number}"
        args = {
            "device": 0,
            "stream": lane,
            "correlation": 7,
            "graph id": 1,
            "graph node id": number,
        }
        place = {"pid": 0, "tid": lane}
        renamed = {"original_stream": 7} if lane == 26674 else {}
        time = {"ts": begun, "dur": end - begun}
        rows.append(place | time | {"ph": "X", "cat": kind, "name": name, "args": args | renamed})
        for source, source_lane, done in before:
            arrow = {"cat": "ac2g", "name": "ac2g", "id": 2**40 + len(pairs)}
            pairs.add((source, name))
            rows.append(arrow | {"ph": "s", "pid": 0, "tid": source_lane, "ts": done})
            rows.append(arrow | place | {"ph": "f", "bp": "e", "ts": begun})
        nodes.append((name, lane, end))
    return rows, pairs


def link_events(rows: list[dict[str, Any]], folder: Path) -> Graph:
    (folder / "trace.json").write_text(json.dumps({"schemaVersion": 1, "traceEvents": rows}))
    return link(folder / "trace.json").graph


@pytest.mark.sampled(6)
@pytest.mark.parametrize("seed", range(40))
def test_dependencies_are_measured_edges_whatever_lanes_are_called(
    seed: int, tmp_path: Path
) -> None:
    rows, pairs = make_graph(seed)
    graph = link_events(rows, tmp_path)
    name, streams = graph.nodes["name"], graph.lanes["stream"].drop_nulls()
    edges = graph.edges.filter(pl.col("kind") == "wait").select("source", "target", "evidence")
    assert {(name[a], name[b]) for a, b, _ in edges.rows()} == pairs
    assert set(edges["evidence"]) <= {"measured"}
    assert set(streams) <= {7, 13}  # a lane is the stream on which its work ran
    calls = graph.nodes.filter(pl.col("name").str.starts_with("HostNode: callback"))
    assert calls["kind"].to_list() == ["host", "host"]


def test_a_call_of_the_host_without_a_recorded_launch_does_not_hold_the_graph(
    tmp_path: Path,
) -> None:
    rows, _ = make_graph(1)
    lost = {"device": 0, "stream": 13, "correlation": 99}
    place = {"ph": "X", "pid": 0, "tid": 13, "ts": 900.0, "dur": 50.0, "args": lost}
    rows.append(place | {"cat": "graph_host_node", "name": "HostNode: late"})
    graph = link_events(rows, tmp_path)
    assert "HostNode: late" not in graph.nodes["name"]
    assert graph.nodes.height == link_events(rows[:-1], tmp_path).nodes.height


def test_a_graph_recorded_by_pytorch_costs_what_its_chain_costs(shared_data: Path) -> None:
    path = shared_data / "failing" / "versions" / "graph.json"
    if not path.is_file():
        pytest.skip("the failing inputs are not on this machine")
    graph = link(path).graph
    longer = whatif(graph, "kernels ~ elementwise * 100")
    assert -longer.saved_ns == pytest.approx(570_000, rel=0.01)
