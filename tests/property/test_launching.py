"""Laws of launching, graphs, patterns, anti-patterns and inference on random traces of every generation of writers."""

from __future__ import annotations

from typing import Any

import polars as pl
from hypothesis import HealthCheck, given, settings, strategies as st

from support.strategies import builders
from traceloom.analyze import (
    anti_patterns,
    graph_launches,
    idle,
    inference,
    launches,
    longest_gaps,
    patterns,
)
from traceloom.testing import TraceBuilder
from traceloom.trace.trace import Trace

slow = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
ANNOTATIONS = (
    "step[DECODE bs=2]",
    "step[EXTEND bs=1 toks=9]",
    "execute_context_1(5)_generation_2(2)",
    "my step",
)


@st.composite
def served(draw: st.DrawFn) -> TraceBuilder:
    """A random trace with graphs over several streams and annotations of a server."""
    builder = draw(builders(max_events=10))
    for number in range(draw(st.integers(0, 5))):
        start = draw(st.integers(0, 200))
        builder.launch(
            draw(st.sampled_from(["cudaGraphLaunch", "hipGraphLaunch"])),
            start,
            5,
            correlation=500 + number,
        )
        for _ in range(draw(st.integers(0, 6))):
            name, stream = draw(st.sampled_from(["a", "b", "c"])), draw(st.sampled_from([7, 8]))
            builder.kernel(
                name,
                draw(st.integers(0, 300)),
                draw(st.integers(0, 20)),
                correlation=500 + number,
                stream=stream,
            )
    for _ in range(draw(st.integers(0, 4))):
        builder.annotation(
            draw(st.sampled_from(ANNOTATIONS)), draw(st.integers(0, 300)), draw(st.integers(0, 90))
        )
    return builder


def _work(trace: Trace) -> pl.DataFrame:
    return trace.gpu_work().with_columns(pl.col("duration_ns").clip(lower_bound=0))


@slow
@given(served())
def test_launches_account_for_all_work(builder: TraceBuilder) -> None:
    trace = builder.build()
    found, work = launches(trace), _work(trace)
    total = found.totals
    assert total["work_count"].sum() == work.height == found.queues["work_count"].sum()
    assert total["unknown_count"].sum() == work["launch"].null_count()
    parts = (
        total["launch_count"].sum() + total["graph_work_count"].sum() + total["unknown_count"].sum()
    )
    assert parts == work.height
    assert found.names["launch_count"].sum() == total["launch_count"].sum()
    for curve in (found.curve, found.device_curve):
        assert (curve["works"] >= curve["launches"]).all()
        assert (curve["launches"] >= 0).all()
        last = curve.group_by("device", "stream", maintain_order=True).last()
        assert last["works"].sum() == 0
    assert (found.queues["empty_ns"] >= 0).all()
    assert (found.queues["max_works"] >= found.queues["max_launches"]).all()
    kernels = work.filter(pl.col("category") == "kernel")
    assert found.bins["kernel_count"].sum() == kernels.height
    assert found.bins["total_ns"].sum() == kernels["duration_ns"].sum()
    assert found.short["short_count"].sum() == found.bins["short_count"].sum()


@slow
@given(served())
def test_replays_and_nodes_add_up(builder: TraceBuilder) -> None:
    trace = builder.build()
    found = graph_launches(trace)
    names = trace.events["name"]
    replayed = _work(trace).filter(pl.col("launch").is_not_null())
    replayed = replayed.filter(names.gather(replayed["launch"]).str.contains("GraphLaunch"))
    assert (
        found.work_count
        == replayed.height
        == found.replays["node_count"].sum()
        == found.nodes["replay_count"].sum()
    )
    whole = replayed["duration_ns"].sum()
    assert (
        whole
        == found.graphs["total_ns"].sum()
        == found.nodes["total_ns"].sum()
        == found.replays["work_ns"].sum()
    )
    assert (found.replays["idle_ns"] <= found.replays["span_ns"]).all()
    assert (found.nodes["min_ns"] <= found.nodes["max_ns"]).all()


@slow
@given(served(), st.integers(2, 3))
def test_sequences_are_where_they_are_said_to_be(builder: TraceBuilder, least: int) -> None:
    trace = builder.build()
    found = patterns(trace, least=least)
    work = _work(trace)
    lanes: dict[Any, list[int]] = {}
    for row in work.select("device", "stream", "event").rows():
        lanes.setdefault(row[:2], []).append(row[2])
    names = trace.events["name"]
    for row in found.sequences.to_dicts():
        places = found.occurrences.filter(sequence=row["sequence"])
        assert places.height == row["count"] >= least
        assert places["span_ns"].sum() == row["span_ns"]
        for device, stream, first in places.select("device", "stream", "first").rows():
            lane = lanes[device, stream]
            at = lane.index(first)
            assert [names[event] for event in lane[at : at + row["length"]]] == row["names"]


@slow
@given(served())
def test_nothing_fails_and_times_are_sane(builder: TraceBuilder) -> None:
    trace = builder.build()
    found = idle(trace)
    gaps = longest_gaps(trace, found)
    assert gaps["duration_ns"].is_sorted(descending=True)
    assert (gaps["cause_ns"] <= gaps["duration_ns"]).all()
    anti = anti_patterns(trace)
    assert anti.patterns.height == 8
    assert (anti.matches["duration_ns"] >= 0).all()
    steps = inference(trace, capture=trace).steps
    assert (steps["gpu_ns"] <= steps["gpu_span_ns"].fill_null(0)).all()
    assert (steps["duration_ns"] >= 0).all()
    assert (steps["between_ns"].drop_nulls().len()) <= max(steps.height - 1, 0)
