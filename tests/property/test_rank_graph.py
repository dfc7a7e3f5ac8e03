"""The graph of one rank keeps its laws, whatever the trace."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import numpy as np
import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.strategies import builders
from traceloom.link.rank import link_rank
from traceloom.model.graph import Graph
from traceloom.read import read_kineto
from traceloom.testing.builder import TraceBuilder

DATA = Path(__file__).resolve().parents[2].parent / "shared" / "data"
FOLDERS = ("kineto", "critical_path", "diff", "multirank", "pairs")
_GOLDEN = DATA / "golden" / "gpu_time.json"
GOLDEN = json.loads(_GOLDEN.read_text()) if _GOLDEN.exists() else {}
FILES = sorted(p for folder in FOLDERS for p in (DATA / folder).glob("*.json.gz") if ".host." not in p.name)


def linked(builder) -> tuple[Graph, object]:
    with tempfile.TemporaryDirectory() as folder:
        trace = read_kineto(builder.write(Path(folder) / "trace.json"))
    return link_rank(trace), trace


def tiled(graph: Graph) -> None:
    """The nodes of a host thread follow each other without a gap and without overlap."""
    host = graph.lanes.filter(pl.col("kind") == "host")["lane"]
    nodes = graph.nodes.filter(pl.col("lane").is_in(host.implode()))
    for _, lane in nodes.group_by("lane", maintain_order=True):
        start, length = lane["start_ns"].to_numpy(), lane["duration_ns"].to_numpy()
        assert (start[1:] == start[:-1] + length[:-1]).all()


@settings(max_examples=50)
@given(builder=builders(most_events=25))
def test_random_traces_make_graphs_that_keep_the_law(builder):
    graph, trace = linked(builder)
    graph.check()
    tiled(graph)
    work = trace.gpu_work()
    assert sorted(graph.nodes.filter(pl.col("event").is_in(work["event"].implode()))["event"]) == list(work["event"])
    counted = graph.coverage.filter(pl.col("subject") == "gpu-work")["count"].sum()
    assert counted == work.height


_CALLS = (
    "cudaLaunchKernel", "cudaMemcpyAsync", "cudaMemcpy", "hipMemcpyWithStream", "cudaGraphLaunch", "cudaEventRecord",
    "cudaStreamWaitEvent", "cudaEventSynchronize", "cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventQuery",
)  # fmt: skip
_OPS = ("aten::mm", "autograd::engine::evaluate_function: MmBackward0", "c10d::allreduce_", "record_param_comms")
_SPANS = ("## backward ##", "gloo:all_reduce", "nccl:all_reduce", "ProfilerStep#3")
_WORK = ("gemm", "ncclDevKernel_AllReduce_Sum_f32", "Memcpy DtoH (Device -> Pageable)", "void ep::dispatch<8>()")
_SYNCS = ("Context Sync", "Stream Sync", "Event Sync", "Stream Wait Event")


@st.composite
def busy(draw: st.DrawFn) -> TraceBuilder:
    """Traces full of what waits and what is waited for, at times that contradict each other."""
    builder = TraceBuilder(generation=draw(st.sampled_from(["2023", "2024", "2026", "rocm"])))
    scale = draw(st.sampled_from([1, 10, 300]))
    times = st.integers(0, 60).map(lambda at: at * scale)
    small = st.integers(1, 12)
    for _ in range(draw(st.integers(5, 40))):
        at, length, thread, number = draw(times), draw(times), draw(st.integers(1, 3)), draw(small)
        stream = draw(st.sampled_from([7, 20, 24]))
        match draw(st.integers(0, 5)):
            case 0:
                name = draw(st.sampled_from(_OPS))
                back = {"sequence": number, "forward_thread": draw(st.integers(0, 1))}
                builder.op(name, at, length, thread=thread, **back)
            case 1:
                builder.annotation(draw(st.sampled_from(_SPANS)), at, length, thread=thread)
            case 2 | 3:
                name, driver = draw(st.sampled_from(_CALLS)), draw(st.booleans())
                builder.launch(name, at, length, correlation=number, thread=thread, driver=driver)
            case 4:
                builder.kernel(draw(st.sampled_from(_WORK)), at, length, stream=stream, correlation=number)
            case _:
                known = {"wait_on_stream": 7, "wait_on_cuda_event_record_corr_id": draw(small)}
                builder.sync(draw(st.sampled_from(_SYNCS)), at, length, stream=stream, correlation=number, **known)
    return builder


@settings(max_examples=50)
@given(builder=busy())
def test_whatever_waits_for_whatever_there_is_no_circle_and_nothing_before_its_cause(builder):
    graph, trace = linked(builder)
    graph.check()
    tiled(graph)
    work = trace.gpu_work()
    assert graph.coverage.filter(pl.col("subject") == "gpu-work")["count"].sum() == work.height
    # everything is held back by something: nothing but the origin stands where it stands without a cause
    held = set(graph.edges.filter(~pl.col("to_end"))["target"])
    assert set(graph.nodes["node"]) - held == {0}


@pytest.mark.data
@pytest.mark.skipif(not FILES, reason="the public traces (../shared/data) are not on this machine")
@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name.split(".json")[0])
def test_public_traces_make_graphs_that_keep_the_law(path):
    trace = read_kineto(path)
    graph = link_rank(trace)
    graph.check()
    tiled(graph)
    work = trace.gpu_work()
    rows = graph.nodes.filter(pl.col("category").cast(pl.String).is_in(["kernel", "copy", "fill"]))
    assert np.array_equal(np.sort(rows["event"].to_numpy()), work["event"].to_numpy())
    assert (rows.sort("event")["duration_ns"] == work["duration_ns"].clip(lower_bound=0)).all()
    attached = graph.coverage.filter(pl.col("subject") == "gpu-work")
    assert attached["count"].sum() == work.height
    orphans = attached.filter(pl.col("outcome").str.starts_with("orphan"))["count"].sum()
    golden = GOLDEN[str(path.relative_to(DATA))]
    expected = golden["orphan_gpu_work"] if golden["kernel_count"] else work["launch"].null_count()
    assert orphans == expected
