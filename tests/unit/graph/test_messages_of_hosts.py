"""Messages that threads of the host send: they last longer than their calls, and overlap."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from random import Random

import polars as pl
import pytest

from traceloom.graph.graph import Graph
from traceloom.graph.linking import link
from traceloom.graph.rank import link_rank
from traceloom.testing.trace_builder import TraceBuilder


def messages(graph: Graph) -> list[tuple[str, str, int, int]]:
    """Returns kind, name, start and duration of each message, in microseconds."""
    graph.check()
    sent = graph.nodes.filter(pl.col("kind").is_in(["send", "receive"])).sort("start_ns", "name")
    columns = sent.select(
        pl.col("kind").cast(pl.String), "name", pl.col("start_ns", "duration_ns") // 1000
    )
    return columns.rows()


def test_a_message_goes_on_while_its_thread_sends_another() -> None:
    built = TraceBuilder().op("c10d::send", 0, 60).annotation("gloo:send", 50, 450)
    built.op("c10d::recv_", 90, 10).annotation("gloo:recv", 95, 505).op("aten::mm", 700, 100)
    graph = link_rank(built.build())
    assert messages(graph) == [("send", "gloo:send", 50, 450), ("receive", "gloo:recv", 95, 505)]
    ops = graph.nodes.filter(pl.col("name").str.contains("c10d::|aten::"))
    assert ops.group_by("name").agg((pl.col("duration_ns").sum() // 1000).alias("us")).sort(
        "name"
    ).rows() == [("aten::mm", 100), ("c10d::recv_", 10), ("c10d::send", 60)]
    main = ops["lane"][0]
    waits = graph.nodes.filter(pl.col("kind") == "wait", pl.col("lane") == main)
    ends = (waits["start_ns"] + waits["duration_ns"]).to_list()
    assert ends == [600_000]  # the receive ends the wait of the thread


@pytest.mark.sampled(4)
@pytest.mark.parametrize("seed", range(30))
def test_every_message_keeps_its_time_whatever_overlaps(seed: int) -> None:
    random, built, time = Random(seed), TraceBuilder(), 0
    sent = []
    for _ in range(25):
        kind, length = random.choice(["send", "recv"]), random.choice([8, 40, 300])
        built.op("c10d::send" if kind == "send" else "c10d::recv_", time, 5)
        built.annotation(f"gloo:{kind}", time + 2, length)
        name = "receive" if kind == "recv" else "send"
        sent.append((name, f"gloo:{kind}", time + 2, length))
        built.op("aten::mul", time + 10, 3)
        time += random.choice([20, 60, 200])
    graph = link_rank(built.build())
    assert messages(graph) == sent
    for _, nodes in graph.nodes.filter(pl.col("lane").is_not_null()).group_by("lane"):
        spans = nodes.select("start_ns", end=pl.col("start_ns") + pl.col("duration_ns"))
        assert all(low[1] <= high[0] for low, high in pairwise(sorted(spans.rows())))


@pytest.fixture
def workloads(shared_data: Path) -> Path:
    folder = shared_data / "failing" / "workloads"
    if not folder.is_dir():
        pytest.skip("the failing inputs are not on this machine")
    return folder


@pytest.mark.parametrize(
    ("run", "sends", "receives"),
    [("gloo_p2p", [5, 0], [0, 5]), ("gloo_isend", [5, 5], [5, 5])],
)
def test_recorded_messages_meet_their_peers(
    workloads: Path, run: str, sends: list[int], receives: list[int]
) -> None:
    graph = link(workloads / run / "run").graph
    graph.check()
    parts = graph.communication.with_columns(
        graph.nodes["rank"].gather(graph.communication["node"])
    )
    counts = [
        [parts.filter(pl.col("kind") == kind, pl.col("rank") == rank).height for rank in (0, 1)]
        for kind in ("send", "receive")
    ]
    assert counts == [sends, receives]
    assert (parts["peer"] == 1 - parts["rank"]).all()
    assert set(parts["tag"]) == {0}
    meetings = parts.group_by("instance").agg(pl.col("kind").sort(), pl.col("rank").n_unique())
    assert meetings.select("kind", "rank").unique().rows() == [(["receive", "send"], 2)]


def test_what_only_the_host_trace_knows_of_a_collective_is_used(workloads: Path) -> None:
    parts = link(workloads / "sizes_in_host_trace").graph.communication
    assert parts.select("kind", "group", "group_size", "in_bytes").unique().rows() == [
        ("all_reduce", "0", 2, 4000)
    ]
    assert parts["ranks"].to_list() == [[0, 1], [0, 1]]
    assert parts["instance"].n_unique() == 1


def test_the_recorded_values_of_a_call_tell_its_peer(workloads: Path, tmp_path: Path) -> None:
    for rank in (0, 1):  # neither a capture nor a host trace beside them
        name = f"rank{rank}.graph.kineto.json.gz"
        content = (workloads / "gloo_isend" / "run" / name).read_bytes()
        (tmp_path / f"rank{rank}.json.gz").write_bytes(content)
    parts = link(tmp_path).graph.communication
    assert parts.select("kind", "peer", "tag").rows() == [
        ("send", 1, 0),
        ("receive", 1, 0),
        ("send", 0, 0),
        ("receive", 0, 0),
    ]
    assert parts["instance"].to_list() == [0, 1, 1, 0]
