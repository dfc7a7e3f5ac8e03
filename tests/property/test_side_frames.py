"""What single events say beside their time: the side frames of a trace, against what the builder was told to write."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
from hypothesis import given, settings, strategies as st

from support.strategies import builders
from traceloom.formats import arguments, load, read_kineto
from traceloom.formats.arguments import read_all_arguments, read_numeric_arguments
from traceloom.testing import TraceBuilder
from traceloom.trace import storage
from traceloom.trace.trace import Trace

QUICK = settings(deadline=None)
TIMES = st.integers(0, 10**6).map(lambda ns: ns / 1000)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("sides") / "trace.json"


def read(place: Path, made: TraceBuilder) -> Trace:
    trace = read_kineto(made.write(place), processes=1)
    trace.check()
    return trace


def ns(us: float) -> int:
    return round(us * 1000)


# -- allocations -----------------------------------------------------------------------------------------------------

ALLOCATIONS = st.lists(
    st.tuples(
        TIMES,
        st.integers(-(2**40), 2**40),
        st.integers(0, 2**64 - 1),
        st.sampled_from([0, 1, 6, 20]),
        st.integers(1, 3),
    ),
    max_size=10,
)
OPS = st.lists(st.tuples(TIMES, TIMES, st.integers(1, 3)), max_size=6)
TYPES = {0: "cpu", 1: "cuda", 6: "hip", 20: "privateuseone"}


@QUICK
@given(rows=ALLOCATIONS, spans=OPS)
def test_allocations_stand_in_time_with_the_innermost_op_of_their_thread(
    place: Path, rows: list[Any], spans: list[Any]
) -> None:
    made = TraceBuilder()
    for at, (start, length, thread) in enumerate(spans):
        made.op(f"op{at}", start, length, thread=thread)
    for time, size, address, kind, thread in rows:
        made.allocation(
            time, size, address=address, device_type=kind, thread=thread, total_allocated=abs(size)
        )
    trace = read(place, made)
    ordered = sorted(rows, key=lambda row: ns(row[0]))
    told = trace.allocations.select(
        "time_ns", "bytes", "address", "device_type", "thread", "allocated_bytes"
    ).rows()
    assert told == [
        (ns(time), size, address, TYPES[kind], thread, abs(size))
        for time, size, address, kind, thread in ordered
    ]
    events = trace.events.select("event", "thread", "start_ns", "nested_end_ns", "depth").rows()
    for (time, *_, thread), op in zip(ordered, trace.allocations["op"].to_list(), strict=True):
        open_ones = [row for row in events if row[1] == thread and row[2] <= ns(time) < row[3]]
        assert op == (max(open_ones, key=lambda row: row[4])[0] if open_ones else None)


@QUICK
@given(
    rows=st.lists(
        st.tuples(
            TIMES,
            st.sampled_from(["util", "power"]),
            st.sampled_from(["", "a"]),
            st.floats(-1e9, 1e9),
        )
    )
)
def test_counters_are_kept_in_time(place: Path, rows: list[Any]) -> None:
    made = TraceBuilder().op("a", 0, 1)
    for time, name, key, value in rows:
        made.counter(name, time, value, key=key)
    told = read(place, made).counters.select("time_ns", "name", "key", "value").rows()
    assert told == [
        (ns(time), name, key, value)
        for time, name, key, value in sorted(rows, key=lambda row: ns(row[0]))
    ]


# -- copies and syncs ------------------------------------------------------------------------------------------------

COPIES = st.lists(
    st.tuples(TIMES, st.sampled_from(["HtoD", "DtoH", "DtoD", "fill"]), st.integers(0, 2**50)),
    max_size=8,
)


@QUICK
@given(rows=COPIES)
def test_copies_and_fills_have_their_way_and_their_bytes(place: Path, rows: list[Any]) -> None:
    made = TraceBuilder()
    for at, (time, kind, size) in enumerate(rows):
        if kind == "fill":
            made.fill(time, 1, bytes=size, correlation=at)
        else:
            memory = {"H": "Pageable", "D": "Device"}
            made.copy(
                f"Memcpy {kind} ({memory[kind[0]]} -> {memory[kind[-1]]})",
                time,
                1,
                bytes=size,
                correlation=at,
            )
    trace = read(place, made)
    told = trace.copies.with_columns(trace.events["start_ns"].gather(trace.copies["event"])).sort(
        "start_ns", "kind", "bytes"
    )
    assert told.select("start_ns", "kind", "bytes").rows() == sorted(
        (ns(time), kind, size) for time, kind, size in rows
    )
    ways = {"H": "pageable", "D": "device"}
    for kind, source, target in trace.copies.select(
        "kind", "source_memory", "target_memory"
    ).rows():
        assert (source, target) == (
            (None, "device") if kind == "fill" else (ways[kind[0]], ways[kind[-1]])
        ), kind


@pytest.mark.parametrize("nothing", [-1, 2**32 - 1, None, "x", []])
def test_a_synchronisation_that_names_nothing_awaits_nothing(place: Path, nothing: Any) -> None:
    made = TraceBuilder().sync(
        "Stream Wait Event",
        1,
        2,
        stream=3,
        wait_on_stream=nothing,
        wait_on_cuda_event_record_corr_id=nothing,
        wait_on_cuda_event_id=nothing,
    )
    row = read(place, made).syncs.row(0, named=True)
    assert (row["kind"], row["stream"]) == ("Stream Wait Event", 3)
    assert (row["awaited_stream"], row["record_correlation"], row["event_id"]) == (None, None, None)


# -- arrows ----------------------------------------------------------------------------------------------------------


@QUICK
@given(
    pairs=st.lists(st.tuples(st.integers(0, 400), st.integers(0, 400)), max_size=6),
    loose=st.booleans(),
)
def test_arrows_join_the_operators_that_begin_where_they_do(
    place: Path, pairs: list[Any], loose: bool
) -> None:
    made = TraceBuilder()
    for at in range(400):
        if not loose or at % 2:
            made.op(f"op{at}", at, 0.5)
    for number, (forward, backward) in enumerate(pairs, start=1):
        made.forward_backward(number, forward, backward)
    trace = read(place, made)
    starts = dict(trace.events.select("event", pl.col("start_ns") // 1000).rows())
    there = set(starts.values())
    told = {
        flow: (starts.get(source), starts.get(target))
        for flow, source, target in trace.flows.select("flow", "source", "target").rows()
    }
    assert told == {
        number: tuple(at if at in there else None for at in pair)
        for number, pair in enumerate(pairs, start=1)
    }


# -- kept and read again ---------------------------------------------------------------------------------------------


@QUICK
@given(builder=builders())
def test_a_trace_that_was_kept_is_the_trace_that_was_read(
    tmp_path_factory: pytest.TempPathFactory, place: Path, builder: TraceBuilder
) -> None:
    trace = read(place, builder)
    for kept in (True, False):
        folder = tmp_path_factory.mktemp("kept")
        storage.save(trace, folder, permanent=kept)
        again = storage.load_trace(folder, permanent=kept)
        assert again.meta == trace.meta
        assert again.notices == trace.notices
        for name, frame in trace.frames().items():
            assert again.frames()[name].equals(frame), name


@QUICK
@given(builder=builders(), packed=st.booleans())
def test_arguments_that_are_read_again_are_those_of_the_event(
    place: Path, builder: TraceBuilder, packed: bool
) -> None:
    path = place.with_name("again.json.gz") if packed else place
    trace = read_kineto(builder.write(path), processes=1)
    entries = [json.loads(text) for text in builder.events()]
    by_place = {
        (str(entry["name"]), ns(float(entry["ts"])), ns(float(entry["dur"]))): entry
        for entry in entries
        if entry["ph"] == "X"
    }
    every = np.arange(trace.events.height)
    everything = list(read_all_arguments(trace, every))
    sizes = read_numeric_arguments(trace, every, {"bytes": "bytes", "x": ("grid", 0)})
    for event, (name, start, duration) in enumerate(
        trace.events.select("name", "start_ns", "duration_ns").rows()
    ):
        entry = by_place[name, start - trace.meta.base_ns, duration]
        same = [
            one
            for one in entries
            if one["ph"] == "X"
            and by_place.get((str(one["name"]), ns(float(one["ts"])), ns(float(one["dur"]))))
            is entry
        ]
        assert everything[event] in [one.get("args") or {} for one in same]
        assert arguments(trace, event) == everything[event]
        assert sizes["bytes"][event] == everything[event].get("bytes")


def test_the_cache_keeps_every_frame_of_every_rank(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRACELOOM_CACHE_DIR", str(tmp_path / "cache"))
    for rank in range(2):
        made = (
            TraceBuilder(rank, 2)
            .op("aten::mm", 1, 5, shapes=[[rank, 2]])
            .allocation(2, 64, address=7)
        )
        made.launch("cudaLaunchKernel", 2, 1, correlation=1).kernel(
            "gemm", 4, 5, correlation=1
        ).counter("util", 1, 0.5)
        (tmp_path / f"rank{rank}.json.gz").write_bytes(gzip.compress(made.text().encode()))
    first = load(tmp_path)
    second = load(tmp_path)
    for one, other in zip(first.traces, second.traces, strict=True):
        assert one.meta == other.meta
        for name, frame in one.frames().items():
            assert other.frames()[name].equals(frame), name
