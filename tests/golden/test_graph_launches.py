"""Graph launches of the public traces, counted again from the JSON by a plain loop."""

from __future__ import annotations

import gzip
import json
from collections import defaultdict
from decimal import Decimal
from typing import Any

import pytest

from support.public_traces import CALLS, DATA, GPU_WORK
from traceloom.analyze import graph_launches
from traceloom.formats import load

KINETO = DATA / "kineto"
FILES = sorted(path.name.removesuffix(".json.gz") for path in KINETO.glob("*.json.gz"))
VLLM, SGLANG = "mi300_vllm_piecewise_graphs", "mi300_sglang_decode_graphs"

pytestmark = [
    pytest.mark.data,
    pytest.mark.skipif(
        not FILES, reason="the public traces (../shared/data) are not on this machine"
    ),
]


def replays(name: str) -> list[list[tuple[str, int, int]]]:
    """(name, start, duration) of the kernels of every graph launch, in the order of starts."""
    events = json.loads(
        gzip.decompress((KINETO / f"{name}.json.gz").read_bytes()), parse_float=Decimal
    )["traceEvents"]
    spans = [event for event in events if event.get("ph") == "X" and "args" in event]
    calls = {
        e["args"].get("correlation")
        for e in spans
        if "GraphLaunch" in e["name"] and e["cat"] in CALLS
    }
    found: dict[Any, list[tuple[str, int, int]]] = defaultdict(list)
    for event in spans:
        if event.get("cat") in GPU_WORK and event["args"].get("correlation") in calls:
            ts, dur = (int(Decimal(str(event[key])) * 1000) for key in ("ts", "dur"))
            found[event["args"]["correlation"]].append((event["name"], ts, dur))
    return [sorted(works, key=lambda work: work[1]) for _, works in sorted(found.items())]


@pytest.mark.parametrize("name", FILES)
def test_graph_launches_equal_a_plain_count(name: str) -> None:
    told = replays(name)
    found = graph_launches(load(KINETO / f"{name}.json.gz").traces[0])
    assert found.replays.height == len(told)
    assert found.work_count == sum(map(len, told))
    assert sorted(found.replays["node_count"].to_list()) == sorted(map(len, told))
    assert found.nodes["total_ns"].sum() == sum(work[2] for works in told for work in works)
    assert (
        found.graphs["total_ns"].sum()
        == found.nodes["total_ns"].sum()
        == found.replays["work_ns"].sum()
    )


@pytest.mark.parametrize("name", [VLLM, SGLANG])
@pytest.mark.skipif(VLLM not in FILES, reason="the traces are not on this machine")
def test_nodes_equal_a_plain_count_by_position(name: str) -> None:
    alike: dict[tuple[str, ...], list[list[int]]] = defaultdict(list)
    for works in replays(name):
        alike[tuple(work[0] for work in works)].append([work[2] for work in works])
    found = graph_launches(load(KINETO / f"{name}.json.gz").traces[0])
    for graph in found.graphs["graph"].to_list():
        nodes = found.nodes.filter(graph=graph).sort("node")
        lengths = alike[tuple(nodes["name"])]
        columns = list(zip(*lengths, strict=True))
        assert nodes["replay_count"].to_list() == [len(lengths)] * nodes.height
        assert nodes["min_ns"].to_list() == [min(column) for column in columns]
        assert nodes["max_ns"].to_list() == [max(column) for column in columns]
        assert nodes["mean_ns"].to_list() == pytest.approx(
            [sum(column) / len(column) for column in columns], abs=0.5
        )
    assert found.graphs.height == len(alike)


@pytest.mark.skipif(VLLM not in FILES, reason="the traces are not on this machine")
def test_what_is_known_of_the_two_servers_graphs() -> None:
    vllm = graph_launches(load(KINETO / f"{VLLM}.json.gz").traces[0])
    assert vllm.graphs.select("replay_count", "node_count").rows() == [(1, 4), (23, 15), (1, 12)]
    assert vllm.graphs["launch_name"].unique().to_list() == ["hipGraphLaunch"]
    sglang = graph_launches(load(KINETO / f"{SGLANG}.json.gz").traces[0])
    assert sglang.graphs.select("replay_count", "node_count").rows() == [(1, 544)]
    assert sglang.fraction == pytest.approx(0.9875, abs=1e-4)
