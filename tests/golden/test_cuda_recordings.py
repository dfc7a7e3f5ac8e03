"""What `traceloom record` wrote on a real GPU (an H200, PyTorch 2.11), in tests/data/cuda.

`streams` is tests/support/gpu_program.py, steps 2 to 4; `compiled` is `examples/train_gpt.py --compile --width 128
--layers 1 --heads 4`, steps 3 and 4. Directories of that machine were cut from their texts.
"""

from __future__ import annotations

from pathlib import Path

import polars as pl
import pytest

from traceloom.formats import load
from traceloom.graph import link_session
from traceloom.graph.graph import Graph
from traceloom.trace.session import Session
from traceloom.workload.replay.plan import NO_SOURCES
from traceloom.workload.replay.planning import make_plan

CUDA = Path(__file__).resolve().parents[1] / "data" / "cuda"


@pytest.fixture(scope="module")
def streams() -> Session:
    return load(str(CUDA / "streams"))


@pytest.fixture(scope="module")
def graph(streams: Session) -> Graph:
    return link_session(streams)


def test_each_stream_waits_for_the_other(graph: Graph) -> None:
    """In both steps the batch's copy comes before the model, and in the second the model of the first before a copy."""
    lanes = dict(graph.lanes.select("lane", "stream").iter_rows())
    lane = graph.nodes["lane"].to_list()
    waits = graph.edges.filter(kind="wait").select("source", "target").rows()
    assert sorted((lanes[lane[source]], lanes[lane[target]]) for source, target in waits) == [
        (7, 13),
        (13, 7),
        (13, 7),
    ]


def test_what_the_host_waited_for_is_measured(graph: Graph) -> None:
    """Three `item()` a step, and the synchronisation at the end, which is for both streams."""
    waits = graph.edges.filter(kind="synchronize")
    assert waits["evidence"].cast(pl.String).unique().to_list() == ["measured"]
    assert waits.height == 2 * 3 + 2


def test_kernels_of_a_cuda_graph_have_its_launch(streams: Session) -> None:
    (trace,) = streams.traces
    names = trace.events["name"].cast(pl.String)
    replays = set((names == "cudaGraphLaunch").arg_true().to_list())
    launched = trace.events.filter(pl.col("launch").is_in(list(replays)))
    assert len(replays) == 2
    assert launched["category"].cast(pl.String).unique().to_list() == ["kernel"]
    assert launched.height == 2 * 3, "a product, GELU, a product"


def test_all_gpu_work_of_a_step_belongs_to_ops_of_the_plan(streams: Session) -> None:
    (plan,) = make_plan(CUDA / "streams")
    (trace,) = streams.traces
    work = trace.events.filter(pl.col("device").is_not_null(), pl.col("launch").is_not_null())
    launches = trace.events["name"].cast(pl.String).gather(work["launch"])
    of_ops = int(work.filter(launches != "cudaGraphLaunch")["duration_ns"].sum()) / 2  # two steps
    assert int(plan.ops["gpu_ns"].sum()) == pytest.approx(of_ops, rel=0.02)
    assert set(plan.ops["stream"].drop_nulls()) == {7, 13}
    assert plan.omitted.height == 0


def test_compiled_kernels_are_calls_with_their_tensors() -> None:
    (plan,) = make_plan(CUDA / "compiled")
    kernels = plan.ops.join(plan.kernels, on="call").filter(
        pl.col("name").str.starts_with("triton_")
    )
    assert kernels.height == 58
    assert plan.kernels["source"].null_count() == plan.kernels.height, (
        "their sources are not in the fixture"
    )
    assert set(plan.ops.filter(action="stand-in")["reason"]) <= {NO_SOURCES, "refused-op"}
    assert kernels["inputs"].list.len().min() >= 1
    assert plan.holes.height == 0, "what a compiled graph does on a GPU is in the host trace"
