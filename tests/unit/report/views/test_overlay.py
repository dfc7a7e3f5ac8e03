"""Stack samples and telemetry on the time axis of the events: as spans and counters, in Perfetto's file and the page."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from support.beside import allocations, put, series, stacks, telemetry
from traceloom.formats import arguments, load
from traceloom.report.exports import perfetto
from traceloom.report.views.timeline import add_overlay
from traceloom.testing import TraceBuilder
from traceloom.trace.session import Session

BASE = 1_700_000_000_000_000_000
US = 1000


def _session(
    directory: Path, samples: list[list[Any]] | None = None, *curves: dict[str, Any]
) -> Session:
    """A trace from 100 to 1000 us after the base: an op with a launch and its kernel, a later op."""
    builder = TraceBuilder(0, 1, host="node1", base_ns=BASE).op(
        "aten::mm", 100, 400, shapes=[[2, 3]]
    )
    builder.launch("cudaLaunchKernel", 200, 10, correlation=1).kernel(
        "gemm", 300, 50, correlation=1
    )
    builder.op("aten::add", 600, 400).write(directory / "rank0.kineto.json.gz")
    if samples is not None:
        moved = [
            [BASE + start * US, thread, period * US, frames]
            for start, thread, period, frames in samples
        ]
        put(directory / "rank0.stacks.json.gz", stacks(moved))
    if curves:
        put(directory / "node1.telemetry.json.gz", telemetry(*curves))
    return load(directory, cache=False)


def _spans(session: Session) -> dict[str, list[tuple[str, float, float, int]]]:
    """Of each lane of sampled stacks: name, start and end in us after the base, depth."""
    (trace,) = add_overlay(session).traces
    trace.check()
    events = trace.events.join(
        trace.lanes.select("lane", lane_name="name"), on="lane", maintain_order="left"
    )
    out: dict[str, list[tuple[str, float, float, int]]] = {}
    for row in events.filter(pl.col("lane_name").str.starts_with("stacks")).iter_rows(named=True):
        start = (row["start_ns"] - BASE) / US
        span = (row["name"].partition(" ")[0], start, start + row["duration_ns"] / US, row["depth"])
        out.setdefault(row["lane_name"], []).append(span)
    return out


def test_calls_go_on_as_long_as_they_are_seen_with_the_same_callers(tmp_path: Path) -> None:
    samples = [
        [200, 0, 100, [0, 1]],
        [300, 0, 50, [0, 1, 2]],
        [350, 0, 50, [0, 2]],
        [700, 0, 20, [0]],
        [200, 1, 10, [2]],
    ]
    assert _spans(_session(tmp_path, samples)) == {
        "stacks · MainThread": [
            ("main", 200, 400, 0),
            ("step", 200, 350, 1),
            ("load", 300, 350, 2),
            ("load", 350, 400, 1),
            ("main", 700, 720, 0),
        ],
        "stacks · loader": [("load", 200, 210, 0)],
    }


def test_a_call_is_shown_by_its_function_and_what_matters_of_its_file(tmp_path: Path) -> None:
    files = [
        "/x/lib/python3.11/site-packages/torch/optim/adam.py",
        "/usr/lib/python3.11/queue.py",
        "/a/(b): c/d.py",
        "<string>",
    ]
    directory = tmp_path / "capture"
    directory.mkdir()
    frames = [
        *([f"f{at}", file, 7] for at, file in enumerate(files)),
        ["c10d::Work::wait", "libtorch_cpu.so", 0],
    ]
    TraceBuilder(0, 1, base_ns=BASE).op("aten::mm", 100, 400).write(
        directory / "rank0.kineto.json.gz"
    )
    sample = [BASE + 200 * US, 0, US, list(range(len(frames)))]
    put(directory / "rank0.stacks.json.gz", stacks([sample], frames=frames))
    (trace,) = add_overlay(load(directory, cache=False)).traces
    assert trace.events.filter(pl.col("category") == "other").sort("depth")["name"].to_list() == [
        "f0 (torch/optim/adam.py:7)",
        "f1 (queue.py:7)",
        "f2 (d.py:7)",
        "f3 (<string>:7)",
        "c10d::Work::wait",
    ]


def test_what_lies_outside_the_trace_is_cut_off(tmp_path: Path) -> None:
    samples = [[0, 0, 150, [0]], [990, 0, 500, [0, 1]], [2000, 0, 5, [2]]]
    assert _spans(_session(tmp_path, samples)) == {
        "stacks · MainThread": [
            ("main", 100, 150, 0),
            ("main", 990, 1000, 0),
            ("step", 990, 1000, 1),
        ]
    }


def test_samples_that_overlap_are_cut_so_that_spans_nest(tmp_path: Path) -> None:
    spans = _spans(_session(tmp_path, [[200, 0, 200, [0, 1]], [300, 0, 200, [2]]]))
    assert spans == {
        "stacks · MainThread": [("main", 200, 400, 0), ("step", 200, 400, 1), ("load", 400, 500, 0)]
    }


def test_the_events_of_the_trace_are_as_they_were(tmp_path: Path) -> None:
    session = _session(tmp_path, [[100, 0, 900, [0, 1]], [550, 1, 10, [2]]])
    (before,), (after,) = session.traces, add_overlay(session).traces
    kept = after.events.filter(pl.col("lane") < before.lanes.height)
    columns = [
        "name",
        "category",
        "start_ns",
        "duration_ns",
        "lane",
        "depth",
        "correlation",
        "step",
    ]
    assert kept.select(columns).equals(before.events.select(columns))
    for column in ("parent", "op", "launch"):
        names = [
            trace.events["name"].gather(trace.events[column].drop_nulls()).to_list()
            for trace in (before, after)
        ]
        assert names[0] == [name for name in names[1] if ".py:" not in name]
    assert after.lanes.head(before.lanes.height).equals(before.lanes)
    assert after.sources.height == after.events.height
    mm = after.events.filter(pl.col("name") == "aten::mm")["event"].item()
    assert arguments(after, mm) == arguments(before, 0)  # events are found again in the file


def _counters(session: Session) -> dict[str, list[tuple[float, float]]]:
    (trace,) = add_overlay(session).traces
    out: dict[str, list[tuple[float, float]]] = {}
    for row in trace.counters.iter_rows(named=True):
        out.setdefault(f"{row['name']} {row['key']}".strip(), []).append(
            ((row["time_ns"] - BASE) / US, row["value"])
        )
    return out


def test_counters_become_rates_and_gauges_stay(tmp_path: Path) -> None:
    times = [BASE + at * US for at in (50, 150, 250, 2000)]
    session = _session(
        tmp_path,
        None,
        series("gpu_power_watts", times, [100, 200, 300, 400], device="GPU-0"),
        series(
            "host_network_bytes_total",
            times,
            [0, 1000, 1000, 9999],
            "counter",
            interface="eth0",
            direction="receive",
        ),
        series("host_cpu_seconds_total", times, [0, 1, 2, 3], "counter", mode="idle"),
        series("host_load_ratio", times, [1, 2, 3, 4]),
    )
    assert _counters(session) == {
        "gpu_power_watts GPU-0": [
            (100, 100),
            (150, 200),
            (250, 300),
        ],  # at 100 us it is what it was at 50
        "host_network_bytes/s receive eth0": [
            (100, 1e7),
            (150, 0),
            (250, pytest.approx(8999 / 1750e-6)),
        ],
    }


def test_a_counter_that_begins_anew_has_no_rate_there(tmp_path: Path) -> None:
    times = [BASE + at * US for at in (150, 250, 350)]
    reset = series(
        "host_network_bytes_total",
        times,
        [500, 10, 20],
        "counter",
        interface="eth0",
        direction="receive",
    )
    assert _counters(_session(tmp_path, None, reset)) == {
        "host_network_bytes/s receive eth0": [(250, pytest.approx(1e5))]
    }


def test_allocated_memory_is_a_curve_for_each_device(tmp_path: Path) -> None:
    events = [
        [BASE + 50 * US, 77, 1, 100, "cpu", 0, None, None],
        [BASE + 150 * US, 77, 2, 200, "cpu", 0, None, None],
        [BASE + 160 * US, 77, 3, 10, "cuda:0", 0, 5000, 8000],
        [BASE + 250 * US, 77, 1, -100, "cpu", -1, None, None],
        [BASE + 3000 * US, 77, 2, -200, "cpu", -1, None, None],
    ]
    put(tmp_path / "rank0.allocations.json.gz", allocations(events))
    assert _counters(_session(tmp_path)) == {
        "allocated_bytes cpu": [(100, 100), (150, 300), (250, 200)],
        "allocated_bytes cuda:0": [(160, 5000)],  # its own total counts where it says one
    }


def test_perfetto_has_samples_and_telemetry_on_the_axis_of_the_events(tmp_path: Path) -> None:
    times = [BASE + at * US for at in (150, 250)]
    session = _session(
        tmp_path,
        [[310, 0, 20, [0, 1]]],
        series("gpu_power_watts", times, [100, 200], device="GPU-0"),
    )
    handle = io.BytesIO()
    perfetto.write(session, session.epoch_ns, handle)
    rows = json.loads(handle.getvalue())["traceEvents"]
    threads = {row["tid"]: row["args"]["name"] for row in rows if row.get("name") == "thread_name"}
    spans = {row["name"]: row for row in rows if row["ph"] == "X"}
    step = spans["step (train.py:20)"]
    assert threads[step["tid"]] == "stacks · MainThread"
    assert (step["ts"], step["dur"]) == (210, 20)  # the trace begins at 100 us
    kernel = spans["gemm"]
    assert kernel["ts"] <= step["ts"] < step["ts"] + step["dur"] <= kernel["ts"] + kernel["dur"]
    power = [
        (row["ts"], row["args"]["value"])
        for row in rows
        if row["ph"] == "C" and row["name"] == "gpu_power_watts GPU-0"
    ]
    assert power == [(50, 100), (150, 200)]


def test_a_session_without_either_is_the_same(tmp_path: Path) -> None:
    session = _session(tmp_path)
    assert add_overlay(session) is session
