"""The graph of one rank keeps its laws, whatever the trace."""

from __future__ import annotations

import gzip
import json
import tempfile
from pathlib import Path

import numpy as np
import polars as pl
import pytest
from hypothesis import given

from support.public_traces import CALLS, DATA, GPU_WORK
from support.strategies import builders, waiting_builders
from traceloom.formats import read_kineto
from traceloom.graph.graph import Graph
from traceloom.graph.rank import link_rank

FOLDERS = ("kineto", "critical_path", "diff", "multirank", "pairs")
FILES = sorted(
    p for folder in FOLDERS for p in (DATA / folder).glob("*.json.gz") if ".host." not in p.name
)


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


@given(builder=builders(max_events=25))
def test_random_traces_make_graphs_that_keep_the_law(builder):
    graph, trace = linked(builder)
    graph.check()
    tiled(graph)
    work = trace.gpu_work()
    assert sorted(
        graph.nodes.filter(pl.col("event").is_in(work["event"].implode()))["event"]
    ) == list(work["event"])
    counted = graph.coverage.filter(pl.col("subject") == "gpu-work")["count"].sum()
    assert counted == work.height


@given(builder=waiting_builders())
def test_whatever_waits_for_whatever_there_is_no_circle_and_nothing_before_its_cause(builder):
    graph, trace = linked(builder)
    graph.check()
    tiled(graph)
    work = trace.gpu_work()
    assert graph.coverage.filter(pl.col("subject") == "gpu-work")["count"].sum() == work.height
    # everything is held back by something: nothing but the origin stands where it stands without a cause
    held = set(graph.edges.filter(~pl.col("to_end"))["target"])
    assert set(graph.nodes["node"]) - held == {0}


def plain_orphans(path: Path) -> int | None:
    """GPU work of the file whose correlation no call has; None where it has no GPU work of a plain category."""
    events = [
        e
        for e in json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
        if e.get("ph") == "X"
    ]
    work = [e["args"].get("correlation") for e in events if e.get("cat") in GPU_WORK]
    called = {e.get("args", {}).get("correlation") for e in events if e.get("cat") in CALLS} - {
        None
    }
    return sum(correlation not in called for correlation in work) if work else None


@pytest.mark.sampled(8)
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
    expected = plain_orphans(path)
    assert orphans == (work["launch"].null_count() if expected is None else expected)
