"""Blocking calls by place: who asks, how long, what the GPU does meanwhile and after."""

from __future__ import annotations

from typing import Any

import numpy as np
import polars as pl
import pytest

from support.odd_traces import above, covered, gpu_rows_of, rows_of
from traceloom.analyze import blocking_calls, threads
from traceloom.analyze.host_events import mark_blocking_calls as waiting
from traceloom.testing import TraceBuilder
from traceloom.trace.trace import Trace


def sites(builder: TraceBuilder) -> list[dict[str, Any]]:
    return blocking_calls(builder.build()).sites.to_dicts()


def test_a_read_of_a_value_names_its_operators_and_its_line() -> None:
    builder = (
        TraceBuilder()
        .python("train.py(3): main", 0, 100)
        .python("losses.py(9): value", 5, 60)
        .python("torch/_tensor.py(30): wrapped", 6, 50)
        .python("contextlib.py(81): inner", 7, 45)
        .op("aten::item", 10, 30)
        .op("aten::_local_scalar_dense", 12, 26)
        .launch("cudaStreamSynchronize", 15, 20, correlation=3)
        .launch("cudaLaunchKernel", 1, 2, correlation=1)
        .kernel("gemm", 10, 15, correlation=1)
        .launch("cudaLaunchKernel", 70, 2, correlation=2)
        .kernel("gemm", 75, 5, correlation=2)
    )
    (row,) = sites(builder)
    assert (row["kind"], row["op"]) == ("item", "aten::item > aten::_local_scalar_dense")
    assert row["frame"] == "losses.py(9): value"
    assert row["stack"] == "train.py(3): main\nlosses.py(9): value"
    # it waits from 15 to 35; the kernel runs from 10 to 25, the next one begins at 75
    assert (row["blocked_ns"], row["gpu_busy_ns"], row["gpu_idle_ns"]) == (20_000, 10_000, 10_000)
    assert row["idle_after_ns"] == 40_000


def test_idle_time_after_a_call_ends_with_the_next_call_that_waits() -> None:
    builder = (
        TraceBuilder()
        .launch("cudaLaunchKernel", 0, 2, correlation=1)
        .kernel("k", 3, 5, correlation=1)
    )
    for at in (10, 30):
        builder.launch("cudaDeviceSynchronize", at, 5, correlation=at)
    builder.launch("cudaLaunchKernel", 60, 2, correlation=2).kernel("k", 65, 5, correlation=2)
    result = blocking_calls(builder.build())
    assert result.calls["idle_after_ns"].to_list() == [15_000, 30_000]
    assert result.idle_after_ns == 45_000
    assert result.sites.select("kind", "count", "max_ns").rows() == [("synchronize", 2, 5000)]


def test_after_the_last_work_the_gpu_starves_of_nothing() -> None:
    builder = (
        TraceBuilder()
        .launch("cudaLaunchKernel", 0, 2, correlation=1)
        .kernel("k", 3, 5, correlation=1)
    )
    assert (
        sites(builder.launch("cudaDeviceSynchronize", 10, 5, correlation=2))[0]["idle_after_ns"]
        == 0
    )


@pytest.mark.parametrize(
    ("op", "call", "kind"),
    [
        ("aten::nonzero", "cudaStreamSynchronize", "data_dependent_shape"),
        ("aten::copy_", "cudaMemcpy", "other_copy"),
        ("aten::empty", "cudaMalloc", "allocation"),
        ("aten::item", "cudaMalloc", "allocation"),
        ("aten::mm", "cuModuleLoadData", "module_load"),
        ("aten::add", "cudaEventSynchronize", "event_synchronize"),
        ("aten::add", "hipStreamSynchronize", "synchronize"),
        ("aten::zero_", "cudaMemset", "fill"),
    ],
)
def test_kinds(op: str, call: str, kind: str) -> None:
    (row,) = sites(TraceBuilder().op(op, 0, 20).launch(call, 5, 10, correlation=1))
    assert row["kind"] == kind


@pytest.mark.parametrize(("way", "kind"), [("DtoH", "copy_to_host"), ("HtoD", "copy_to_device")])
def test_a_copy_and_the_wait_for_it_are_of_one_kind(way: str, kind: str) -> None:
    memory = {"DtoH": "Device -> Pageable", "HtoD": "Pageable -> Device"}[way]
    builder = (
        TraceBuilder()
        .op("aten::copy_", 0, 40)
        .launch("cudaMemcpyAsync", 2, 20, correlation=1)
        .copy(f"Memcpy {way} ({memory})", 5, 10, correlation=1, bytes=64)
        .launch("cudaStreamSynchronize", 25, 10, correlation=2)
    )
    found = blocking_calls(builder.build()).sites
    assert set(found["kind"]) == {kind}
    assert found["pageable_count"].to_list() == [1, 1]
    assert found["blocked_ns"].sum() == 30_000


def test_python_waits_stand_last_and_the_wait_for_autograd_is_none() -> None:
    builder = (
        TraceBuilder()
        .python("<built-in method acquire of _thread.lock object at 0x7f>", 0, 50)
        .python("<built-in method run_backward of torch._C._EngineBase object at 0x7f>", 60, 90)
        .launch("cudaDeviceSynchronize", 200, 5, correlation=1)
    )
    assert [(row["kind"], row["blocked_ns"]) for row in sites(builder)] == [
        ("synchronize", 5000),
        ("python", 50_000),
    ]


def test_without_gpu_work_what_the_gpu_does_is_unknown() -> None:
    result = blocking_calls(
        TraceBuilder(device_name=None).python("<built-in function sleep>", 0, 5).build()
    )
    assert result.sites.select("gpu_busy_ns", "gpu_idle_ns", "idle_after_ns").row(0) == (
        None,
        None,
        None,
    )
    assert result.idle_after_ns is None


def test_places_are_told_per_step() -> None:
    builder = TraceBuilder()
    for number, length in ((1, 10), (2, 30)):
        builder.step(number, 100 * number, 100)
        builder.launch("cudaDeviceSynchronize", 100 * number + 5, length, correlation=number)
    row = sites(builder)[0]
    assert (row["count"], row["mean_blocked_ns"], row["min_blocked_ns"], row["max_blocked_ns"]) == (
        2,
        20_000.0,
        10_000,
        30_000,
    )


def test_a_trace_without_waits_has_empty_frames_of_the_same_columns() -> None:
    some = blocking_calls(
        TraceBuilder().launch("cudaDeviceSynchronize", 0, 5, correlation=1).build()
    )
    none = blocking_calls(TraceBuilder().op("aten::mm", 0, 5).build())
    assert (none.sites.schema, none.calls.schema, none.blocked_ns) == (
        some.sites.schema,
        some.calls.schema,
        0,
    )
    assert isinstance(none.sites, pl.DataFrame)


def test_what_the_recorder_waits_for_is_in_no_account() -> None:
    made = TraceBuilder()
    made.python("train.py(4): <module>", 0, 1000).python("<built-in function sleep>", 100, 300)
    made.python("traceloom/capture/crossing.py(93): settle", 500, 300).python(
        "<built-in function sleep>", 510, 280
    )
    made.python("threading.py(1002): _bootstrap", 0, 1000, thread=7)
    made.python("/x/traceloom/capture/moments.py(128): _watch", 0, 1000, thread=7)
    made.python("<built-in method wait of Event object>", 0, 1000, thread=7)
    trace = made.build()
    found = blocking_calls(trace)
    assert (found.sites["frame"].to_list(), found.blocked_ns) == (
        ["train.py(4): <module>"],
        300_000,
    )
    assert threads(trace).threads.height == 1


# -- against looking at every call --------------------------------------------------------------------------------


def test_every_call_that_waits_is_there_once_with_what_the_gpu_did_meanwhile(odd: Trace) -> None:
    events = rows_of(odd)
    waits = set(np.flatnonzero(waiting(odd)).tolist())
    outermost = [
        e
        for e in events
        if e["event"] in waits and not {a["event"] for a in above(events, e)} & waits
    ]
    busy = [(row["start_ns"], row["end_ns"]) for row in gpu_rows_of(odd) if row["ns"]]
    found = blocking_calls(odd)
    assert found.calls["event"].to_list() == [row["event"] for row in outermost]
    for row, call in zip(found.calls.to_dicts(), outermost, strict=True):
        assert (row["start_ns"], row["blocked_ns"]) == (call["start_ns"], call["ns"])
        if not busy:
            assert (row["gpu_busy_ns"], row["gpu_idle_ns"], row["idle_after_ns"]) == (
                None,
                None,
                None,
            )
            continue
        inside = covered(
            [(max(low, call["start_ns"]), min(high, call["end_ns"])) for low, high in busy]
        )
        assert (row["gpu_busy_ns"], row["gpu_idle_ns"]) == (inside, call["ns"] - inside)
        later = [low for low, high in busy if high > call["end_ns"]]
        following = [
            c["start_ns"]
            for c in outermost
            if c["lane"] == call["lane"] and c["start_ns"] > call["start_ns"]
        ]
        until = min([*later, *following], default=0) if later else 0
        assert row["idle_after_ns"] == max(until - call["end_ns"], 0)
    assert found.blocked_ns == sum(call["ns"] for call in outermost)


def test_places_are_their_calls_added_up(odd: Trace) -> None:
    found = blocking_calls(odd)
    names = odd.events["name"]
    for site, part in found.calls.group_by("site"):
        row = found.sites.row(site[0], named=True)  # type: ignore[arg-type]
        assert row["count"] == part.height
        assert row["max_ns"] == part["blocked_ns"].max()
        for name in ("blocked_ns", "gpu_busy_ns", "gpu_idle_ns", "idle_after_ns"):
            wanted = None if part[name].null_count() == part.height else part[name].sum()
            assert row[name] == wanted
        assert {names[event] for event in part["event"]} == {row["call"]}
    assert found.sites["blocked_ns"].sum() == found.blocked_ns
    on_host = found.sites.filter(pl.col("kind").cast(pl.String) != "python")
    assert on_host["blocked_ns"].is_sorted(descending=True)
