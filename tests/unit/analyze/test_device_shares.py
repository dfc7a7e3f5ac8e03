"""The time of devices, shared and accounted for in several ways that must agree: counted stretch by stretch."""

from __future__ import annotations

from collections import defaultdict
from itertools import pairwise
from typing import Any

import polars as pl
import pytest

from support.odd_traces import Row, covered, gpu_rows_of, odd_trace
from traceloom.analyze import (
    communication,
    copies,
    gpu_time,
    idle,
    kernel_kinds,
    kernels,
    longest_gaps,
)
from traceloom.analyze.gpu_time import PARTS, build_device_account, has_step_time
from traceloom.analyze.kernel_kinds import PRIORITY, classify_kinds
from traceloom.analyze.steps import build_tiles
from traceloom.testing import TraceBuilder
from traceloom.trace.trace import Trace


def by_device(trace: Trace) -> dict[int, list[Row]]:
    kind = dict(classify_kinds(trace).select("event", pl.col("kind").cast(pl.String)).rows())
    rows: dict[int, list[Row]] = defaultdict(list)
    for row in gpu_rows_of(trace):
        rows[row["device"]].append(row | {"kind": kind[row["event"]]})
    return rows


def step_spans(trace: Trace) -> list[tuple[int | None, int, int]]:
    """Number, start and end of each tile of the trace; steps and what lies between them."""
    cut = build_tiles(trace)
    numbers = [*trace.steps["step"].to_list(), None]
    spans = zip(cut.row.tolist(), cut.spans.start.tolist(), cut.spans.end.tolist(), strict=True)
    return [(numbers[row], low, high) for row, low, high in spans]


def test_exclusive_time_belongs_to_the_first_kind_that_runs(odd: Trace) -> None:
    found = kernel_kinds(odd)
    found.check()
    for device, rows in by_device(odd).items():
        wanted: dict[tuple[int | None, str], int] = defaultdict(int)
        bounds = {time for row in rows for time in (row["start_ns"], row["end_ns"])}
        for step, low, high in step_spans(odd):
            for start, end in pairwise(
                sorted({low, high, *(time for time in bounds if low < time < high)})
            ):
                running = {
                    row["kind"] for row in rows if row["start_ns"] <= start and row["end_ns"] >= end
                }
                if running:
                    wanted[step, min(running, key=PRIORITY.index)] += end - start
        steps = found.steps.filter(device=device)
        got = {
            (step, str(kind)): ns
            for step, kind, ns in steps.select("step", "kind", "exclusive_ns").rows()
            if ns
        }
        assert got == wanted
        for row in found.kinds.filter(device=device).to_dicts():
            own = [r for r in rows if r["kind"] == row["kind"]]
            assert (row["count"], row["sum_ns"]) == (len(own), sum(r["ns"] for r in own))
            assert row["exclusive_ns"] == sum(
                ns for (_, kind), ns in wanted.items() if kind == row["kind"]
            )


def test_busy_and_idle_time_is_the_same_whoever_tells_it(odd: Trace) -> None:
    account = kernel_kinds(odd).devices
    time = gpu_time(odd).devices
    assert (
        account.select("device", "window_ns", "busy_ns", "idle_ns").rows()
        == time.select("device", "window_ns", "busy_ns", "idle_ns").rows()
    )
    assert account["sum_ns"].sum() == kernels(odd).kernels["total_ns"].sum()
    idling = dict(idle(odd).totals.group_by("device").agg(pl.col("idle_ns").sum()).rows())
    assert {device: ns for device, ns in time.select("device", "idle_ns").rows() if ns} == idling
    for device, rows in by_device(odd).items():
        busy = covered([(row["start_ns"], row["end_ns"]) for row in rows])
        assert account.filter(device=device)["busy_ns"].item() == busy
    assert copies(odd).kinds["total_ns"].sum() == sum(
        row["ns"] for rows in by_device(odd).values() for row in rows if row["kind"] == "copy"
    )
    assert communication(odd).devices["total_ns"].sum() == sum(
        row["ns"]
        for rows in by_device(odd).values()
        for row in rows
        if row["kind"] == "communication"
    )


def test_the_account_of_a_report_is_all_of_the_steps_or_of_the_gpu_work(odd: Trace) -> None:
    account = build_device_account(odd, gpu_time(odd), idle(odd))
    assert account.window == ("steps" if odd.steps.height else "gpu_work")
    rows = account.devices
    assert (
        rows.select(pl.sum_horizontal(PARTS)).to_series().to_list() == rows["window_ns"].to_list()
    )
    length = sum(high - low for low, high in odd.steps.select("start_ns", "end_ns").rows())
    for device, own in by_device(odd).items():
        row = rows.filter(device=device).row(0, named=True)
        first, last = min(r["start_ns"] for r in own), max(r["end_ns"] for r in own)
        assert row["window_ns"] == (length if odd.steps.height else last - first)
        spans = odd.steps.select("start_ns", "end_ns").rows() or [(first, last)]
        edges = sum(
            max(min(high, first) - low, 0) + max(high - max(low, last), 0) for low, high in spans
        )
        assert row["edge_idle_ns"] == edges
        busy = sum(
            covered([(r["start_ns"], r["end_ns"]) for r in own], low, high) for low, high in spans
        )
        assert row["idle_ns"] == row["window_ns"] - busy
    assert account.idle["idle_ns"].sum() + rows["edge_idle_ns"].sum() == rows["idle_ns"].sum()


@pytest.mark.parametrize("lengths", [[], [0], [0, 0]])
def test_steps_without_time_are_no_steps_to_account_for(lengths: list[float]) -> None:
    builder = TraceBuilder().kernel("k", 5, 10).kernel("k", 25, 10)
    for number, length in enumerate(lengths):
        builder.step(number, 3, length)
    trace = builder.build()
    assert has_step_time(trace) == any(trace.steps["end_ns"] > trace.steps["start_ns"])
    account = build_device_account(trace, gpu_time(trace), idle(trace))
    assert account.devices.height == 1
    assert (
        account.devices["idle_ns"].sum()
        == account.idle["idle_ns"].sum() + account.devices["edge_idle_ns"].sum()
    )


# -- gaps ---------------------------------------------------------------------------------------------------------


def test_gaps_are_where_no_stream_of_a_device_runs_anything(odd: Trace) -> None:
    whole = (
        idle(odd)
        .gaps.group_by("gap")
        .agg(
            pl.col("device").first(), pl.col("duration_ns").sum(), pl.col("before", "after").first()
        )
    )
    for device, rows in by_device(odd).items():
        reach, wanted = rows[0]["start_ns"], []
        for row in sorted(rows, key=lambda r: (r["start_ns"], r["event"])):
            if row["start_ns"] > reach:
                wanted.append((row["start_ns"] - reach, row["start_ns"]))
            reach = max(reach, row["end_ns"])
        found = whole.filter(device=device)
        assert sorted(found["duration_ns"].to_list()) == sorted(ns for ns, _ in wanted)
        starts = odd.events["start_ns"]
        assert sorted(starts[row] for row in found["after"]) == sorted(end for _, end in wanted)
        ends = {row["event"]: row["end_ns"] for row in rows}
        for before, after, ns in found.select("before", "after", "duration_ns").rows():
            assert starts[after] - ends[before] == ns


@pytest.mark.parametrize("count", [0, 1, 5, 10_000])
def test_the_longest_gaps_come_first_with_their_main_cause(count: int) -> None:
    trace = odd_trace(2)
    time = idle(trace)
    lengths: dict[int, int] = defaultdict(int)
    causes: dict[int, dict[str, int]] = defaultdict(lambda: defaultdict(int))
    for gap, ns, cause in time.gaps.select(
        "gap", "duration_ns", pl.col("cause").cast(pl.String)
    ).rows():
        lengths[gap] += ns
        causes[gap][cause] += ns
    found = longest_gaps(trace, time, count)
    assert found["duration_ns"].to_list() == sorted(lengths.values(), reverse=True)[:count]
    names: Any = trace.events["name"]
    for row in found.to_dicts():
        assert row["duration_ns"] == lengths[row["gap"]]
        assert (
            row["cause_ns"] == max(causes[row["gap"]].values()) == causes[row["gap"]][row["cause"]]
        )
        for what in ("before", "after", "launch", "producer", "wait"):
            assert row[f"{what}_name"] == (None if row[what] is None else names[row[what]])
        if row["host_event"] is not None:
            parents, at = [], trace.events["parent"][row["host_event"]]
            while at is not None:
                parents.append(names[at])
                at = trace.events["parent"][at]
            assert row["stack"] == parents[::-1]
