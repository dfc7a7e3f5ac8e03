"""Threads: roles by what they record, time by activity, how many are active at once."""

from __future__ import annotations

from collections import defaultdict
from itertools import pairwise

import numpy as np
import polars as pl
import pytest

from support.odd_traces import Row, covered, rows_of
from traceloom.analyze import host, threads
from traceloom.analyze.host_events import ACTIVITIES, mark_blocking_calls
from traceloom.testing import TraceBuilder
from traceloom.trace.trace import Trace

NODE = "autograd::engine::evaluate_function: MmBackward0"


def test_roles_are_told_by_what_threads_record() -> None:
    builder = (
        TraceBuilder()
        .op("aten::mm", 0, 10, sequence=1)
        .op(NODE, 20, 10, sequence=1, forward_thread=1, thread=2)
        .python("threading.py(1002): _bootstrap", 0, 90, thread=3)
        .python("torch/utils/data/_utils/pin_memory.py(30): _pin_memory_loop", 1, 80, thread=3)
        .python("threading.py(1002): _bootstrap", 0, 90, thread=4)
        .python("tqdm/_monitor.py(60): run", 1, 80, thread=4)
        .annotation("nccl:all_reduce", 5, 5, thread=5)
        .launch("cudaEventQuery", 5, 1, correlation=1, thread=6)
        .op("aten::add", 5, 1, thread=7)
        .op("GraphLowering.codegen (dynamo_timed)", 5, 1, thread=8)
        .python("torch/utils/data/_utils/fetch.py(51): fetch", 5, 1, thread=9)
    )
    found = threads(builder.build()).threads
    assert dict(found.select("thread", "role").rows()) == {
        "1": "main",
        "2": "autograd",
        "3": "pin_memory",
        "4": "python",
        "5": "communication",
        "6": "runtime",
        "7": "operators",
        "8": "compiler",
        "9": "data_loader",
    }
    says = dict(found.select("thread", "says").rows())
    assert (says["1"], says["2"], says["4"]) == (None, NODE, "tqdm/_monitor.py(60): run")
    assert found["role"][0] == "main"


def test_active_threads_are_counted_over_time_and_add_up_to_the_window() -> None:
    builder = (
        TraceBuilder()
        .step(1, 0, 50, thread=9)
        .step(2, 50, 50, thread=9)
        .op("aten::mm", 0, 60)
        .op("aten::mm", 40, 30, thread=2)
        .launch("cudaDeviceSynchronize", 70, 10, correlation=1, thread=2)
    )
    found = threads(builder.build())
    assert found.concurrency.rows() == [
        (1, 1, 40_000),
        (1, 2, 10_000),
        (2, 0, 30_000),
        (2, 1, 10_000),
        (2, 2, 10_000),
    ]
    assert (found.most, found.mean) == (2, 0.9)
    assert found.curve.height == 200
    assert found.curve["active"].mean() == pytest.approx(0.9)
    assert found.curve["active"][:2].to_list() == [1.0, 1.0]


def test_activities_of_a_thread_add_up_to_the_window() -> None:
    builder = (
        TraceBuilder()
        .op("aten::mm", 0, 60)
        .launch("cudaMalloc", 10, 20, correlation=1)
        .kernel("k", 80, 20)
    )
    row = threads(builder.build()).threads.row(0, named=True)
    assert (row["op_ns"], row["blocking_call_ns"], row["unobserved_ns"]) == (40_000, 20_000, 40_000)
    assert (row["active_ns"], row["busy_ns"], row["window_ns"], row["launch_count"]) == (
        40_000,
        60_000,
        100_000,
        1,
    )


@pytest.mark.parametrize(
    "builder", [TraceBuilder(), TraceBuilder().kernel("k", 0, 5), TraceBuilder().op("x", 5, 0)]
)
def test_columns_do_not_depend_on_the_trace(builder: TraceBuilder) -> None:
    some, none = threads(TraceBuilder().op("aten::mm", 0, 5).build()), threads(builder.build())
    for name in ("threads", "concurrency", "curve"):
        assert getattr(some, name).schema == getattr(none, name).schema


# -- against looking at every stretch of every thread -------------------------------------------------------------


def doing(trace: Trace) -> dict[int, list[tuple[int, int, str]]]:
    """Of each host lane its stretches: from, to, and the activity of the innermost event that has one."""
    events = rows_of(trace)
    blocking = set(np.flatnonzero(mark_blocking_calls(trace)).tolist())
    lanes: dict[int, list[tuple[int, int, str]]] = {}
    for lane in trace.lanes.filter(kind="host")["lane"]:
        own = [row for row in events if row["lane"] == lane]
        bounds = sorted(
            {
                trace.start_ns,
                trace.end_ns,
                *(t for row in own for t in (row["start_ns"], row["end_ns"])),
            }
        )
        lanes[lane] = []
        for low, high in pairwise(bounds):
            around = [row for row in own if row["start_ns"] <= low and row["end_ns"] >= high]
            around.sort(key=lambda row: -row["depth"])
            said = (activity_of(row, blocking) for row in around)
            lanes[lane].append((low, high, next((word for word in said if word), "unobserved")))
    return lanes


def activity_of(row: Row, blocking: set[int]) -> str | None:
    """What a thread does in an event; None for a region that only frames others."""
    if row["category"] == "runtime":
        return "blocking_call" if row["event"] in blocking else "launch"
    if row["category"] == "op":
        return None if row["name"].startswith("traceloom.") else "op"
    if row["category"] == "annotation":
        return "op" if row["name"].startswith("gloo:") else None
    return row["category"]  # type: ignore[no-any-return]


def test_every_stretch_of_a_thread_has_the_activity_of_its_innermost_event(odd: Trace) -> None:
    found = {row["lane"]: row for row in threads(odd).threads.to_dicts()}
    summed = (
        host(odd)
        .account.group_by("lane", pl.col("activity").cast(pl.String))
        .agg(pl.col("ns").sum())
    )
    accounts = {(lane, word): ns for lane, word, ns in summed.rows()}
    for lane, stretches in doing(odd).items():
        sums: dict[str, int] = defaultdict(int)
        for low, high, word in stretches:
            sums[word] += high - low
        row = found[lane]
        for word in ACTIVITIES:
            assert row[f"{word}_ns"] == sums[word], (lane, word)
            assert accounts.get((lane, word), 0) == sums[word]
        assert row["window_ns"] == odd.end_ns - odd.start_ns
        assert row["active_ns"] == row["window_ns"] - sums["unobserved"] - sums["blocking_call"]
        own = [(e["start_ns"], e["end_ns"]) for e in rows_of(odd) if e["lane"] == lane]
        assert (row["busy_ns"], row["event_count"]) == (covered(own), len(own))


def test_the_number_of_active_threads_is_what_counting_them_at_every_instant_gives(
    odd: Trace,
) -> None:
    found, lanes = threads(odd), doing(odd)
    active = {
        lane: [
            (low, high)
            for low, high, word in stretches
            if word not in {"unobserved", "blocking_call"}
        ]
        for lane, stretches in lanes.items()
    }
    steps = odd.steps.select("step", "start_ns", "end_ns").rows()
    bounds = {
        odd.start_ns,
        odd.end_ns,
        *(t for stretches in active.values() for span in stretches for t in span),
    }
    bounds |= {
        time for _, low, high in steps for time in (low, high) if odd.start_ns <= time <= odd.end_ns
    }
    sums: dict[tuple[int | None, int], int] = defaultdict(int)
    for low, high in pairwise(sorted(bounds)):
        count = sum(
            any(start <= low and end >= high for start, end in spans) for spans in active.values()
        )
        step = next((number for number, start, end in steps if start <= low < end), None)
        sums[step, count] += high - low
    assert {(step, count): ns for step, count, ns in found.concurrency.rows()} == sums
    window = odd.end_ns - odd.start_ns
    assert found.mean == pytest.approx(sum(count * ns for (_, count), ns in sums.items()) / window)
    lengths = (
        found.curve["start_ns"].diff().shift(-1).fill_null(odd.end_ns - found.curve["start_ns"][-1])
    )
    assert (found.curve["active"] * lengths).sum() / window == pytest.approx(found.mean)
    assert found.curve["active"].max() <= found.most


def test_phases_of_a_thread_and_step_are_all_of_its_time(odd: Trace) -> None:
    account = host(odd).account
    inside = {
        step: min(high, odd.end_ns) - max(low, odd.start_ns)
        for step, low, high in odd.steps.select("step", "start_ns", "end_ns").rows()
    }
    outside = odd.end_ns - odd.start_ns - sum(inside.values())
    wanted = {
        **{step: ns for step, ns in inside.items() if ns},
        **({None: outside} if outside else {}),
    }
    for lane in host(odd).threads["lane"]:
        own = account.filter(lane=lane).group_by("step").agg(pl.col("ns").sum())
        assert dict(own.rows()) == wanted
