"""The few numbers of a run, against adding up its events step by step."""

from __future__ import annotations

import re
from collections import defaultdict
from functools import cache
from typing import Any

import pytest

from support.jobs import ParallelRecipe, parallel_job
from support.odd_traces import above, covered, gpu_rows_of, odd_trace, rows_of
from traceloom.analyze import gate, gate_summary
from traceloom.analyze.gate_summary import RunSummary
from traceloom.errors import UsageError
from traceloom.testing import TraceBuilder
from traceloom.trace.session import Session
from traceloom.trace.trace import Trace

Table = dict[str, dict[int, float]]


def measured(*traces: Trace) -> RunSummary:
    return gate_summary.summarise(Session(traces, "made"))


@cache
def job() -> tuple[Trace, ...]:
    run = parallel_job(
        ParallelRecipe(data=2, steps=3, layers=1, autograd=True, item=True, seed=4)
    ).run()
    return tuple(builder.build() for builder in run.traces())


def of_steps(trace: Trace) -> dict[str, Table]:
    """Every table of one rank: the sums by name and step."""
    events, tables = rows_of(trace), defaultdict(lambda: defaultdict(lambda: defaultdict(float)))  # type: ignore[var-annotated]
    for row in gpu_rows_of(trace):
        tables["kernel"][row["name"]][row["step"]] += row["ns"]
        if row["op"] is not None:
            tables["op_gpu"][events[row["op"]]["name"]][row["step"]] += row["ns"]
    ops = {
        row["event"]: row
        for row in events
        if row["category"] == "op" and not row["name"].startswith("traceloom.")
    }
    for row in ops.values():
        tables["op"][row["name"]][row["step"]] += row["ns"]
        around = [other for other in above(events, row) if other["event"] in ops]
        if around:
            tables["op"][around[0]["name"]][around[0]["step"]] -= row["ns"]
    return tables


def test_tables_of_a_job_are_the_mean_over_its_ranks_of_what_each_adds_up() -> None:
    found = measured(*job())
    tables = [of_steps(trace) for trace in job()]
    assert found.steps == sorted(
        set.intersection(*(set(t.steps.filter("complete")["step"]) for t in job()))
    )
    for metric in ("kernel", "op", "op_gpu"):
        names = {
            name
            for of_rank in tables
            for name, values in of_rank[metric].items()
            if set(values) & set(found.steps)
        }
        assert set(found.tables[metric]) == names
        for name in names:
            wanted = [
                sum(of_rank[metric][name][step] for of_rank in tables) / len(tables)
                for step in found.steps
            ]
            assert found.tables[metric][name] == pytest.approx(wanted)
    kinds, kernels = (
        [
            sum(values[at] for values in found.tables[metric].values())
            for at in range(len(found.steps))
        ]
        for metric in ("kind", "kernel")
    )
    assert kinds == pytest.approx(kernels), "every kernel has one kind"


def test_numbers_of_a_step_are_those_of_its_time_on_all_ranks() -> None:
    found = measured(*job())
    for at, step in enumerate(found.steps):
        lengths, busy, launches = [], [], []
        for trace in job():
            low, high = trace.steps.filter(step=step).select("start_ns", "end_ns").row(0)
            work = gpu_rows_of(trace)
            lengths.append(high - low)
            busy.append(covered([(row["start_ns"], row["end_ns"]) for row in work], low, high))
            launches.append(len({row["launch"] for row in work if row["step"] == step}))
        assert found.scalars["step_time"][at] == pytest.approx(sum(lengths) / 2)
        assert found.scalars["gpu_time"][at] == pytest.approx(sum(busy) / 2)
        assert found.scalars["idle"][at] == pytest.approx(sum(lengths) / 2 - sum(busy) / 2)
        assert found.scalars["launches"][at] == pytest.approx(sum(launches) / 2)


def test_the_program_is_the_calls_of_a_step_and_rank() -> None:
    found = measured(*job())
    counts: dict[str, float] = defaultdict(float)
    for trace in job():
        for row in rows_of(trace):
            if row["category"] == "op" and row["step"] in found.steps:
                counts[row["name"]] += 1 / (2 * len(found.steps))
    by_name: dict[str, float] = defaultdict(float)
    for name, count in zip(found.program.operator, found.program.count, strict=True):
        by_name[name] += count
    assert by_name == pytest.approx(counts)


@pytest.mark.parametrize("seed", range(7))
def test_any_trace_is_measured_and_equal_to_itself(seed: int) -> None:
    found = measured(odd_trace(seed))
    columns = [
        *found.scalars.values(),
        *(values for table in found.tables.values() for values in table.values()),
    ]
    assert all(len(values) == len(found.steps) for values in columns)
    assert all(value >= 0 for values in columns for value in values)
    names = {
        name: values for metric in found.tables for name, values in found.tables[metric].items()
    }
    chosen = [
        "step_time > 0%",
        "gpu_time > 0%",
        "idle < 0%",
        *(f"op:^{re.escape(n)}$ > 0ns" for n in found.tables["op"]),
    ]
    verdict = gate.judge([found], [found], [gate.parse(text) for text in chosen])
    assert names
    assert verdict.comparable
    assert "fail" not in verdict.checks["verdict"].to_list()
    assert set(verdict.checks["change"]) == {0.0}
    assert verdict.causes.height == 0


def test_a_trace_without_steps_is_one_window() -> None:
    trace = (
        TraceBuilder().op("aten::mm", 0, 40).kernel("gemm", 50, 30).kernel("gemm", 60, 30).build()
    )
    found = measured(trace)
    assert found.steps == [-1]
    assert found.scalars == {
        "step_time": [90_000],
        "gpu_time": [40_000],
        "idle": [0],
        "exposed_communication": [0],
    }
    assert found.tables["kernel"] == {"gemm": [60_000]}
    assert found.tables["op"] == {"aten::mm": [40_000]}


def test_ranks_recorded_at_other_times_are_held_step_by_step_in_their_order() -> None:
    def rank(number: int, first: int, long: float) -> Trace:
        builder, at = TraceBuilder(number, 2), 0.0
        for step in range(3):
            builder.step(first + step, at, long).op("aten::mm", at + 1, 5.0 + step)
            at += long
        return builder.build()

    found = measured(rank(0, 0, 100), rank(1, 50, 200))
    assert found.steps == [0, 1, 2]
    assert found.scalars["step_time"] == [150_000] * 3
    assert found.tables["op"]["aten::mm"] == [5000, 6000, 7000]


def test_steps_that_not_every_rank_has_are_left_out() -> None:
    def rank(number: int, steps: range) -> Trace:
        builder = TraceBuilder(number, 2)
        for step in steps:
            builder.step(step, 100.0 * step, 100).op("aten::mm", 100.0 * step + 1, 5.0 + number)
        return builder.build()

    found = measured(rank(0, range(4)), rank(1, range(2, 6)))
    assert found.steps == [2, 3]
    assert found.tables["op"]["aten::mm"] == [5500, 5500]


def test_memory_of_a_step_is_the_most_of_its_fullest_device_with_what_was_there_before() -> None:
    builder = TraceBuilder(devices=2)
    for step in range(3):
        builder.step(step, 100.0 * step, 100).op("aten::mm", 100.0 * step + 1, 5)
    builder.allocation(20, 100, address=1, total_allocated=1100).allocation(
        30, -100, address=1, total_allocated=1000
    )
    builder.allocation(150, 700, address=2, total_allocated=1700)
    builder.allocation(160, 900, address=3, total_allocated=1900, device=1)
    builder.allocation(170, -900, address=3, total_allocated=1000, device=1)
    found = measured(builder.build())
    assert found.scalars["memory_peak"] == [1100, 1900, 1700]


def test_memory_of_ranks_is_that_of_the_fullest() -> None:
    def rank(number: int, size: int) -> Trace:
        builder = TraceBuilder(number, 2).step(0, 0, 100).op("aten::mm", 1, 5)
        return builder.allocation(20, size, address=1, total_allocated=size).build()

    assert measured(rank(0, 300), rank(1, 500)).scalars["memory_peak"] == [500]


def test_memory_relative_to_an_unknown_amount_is_not_measured() -> None:
    builder = TraceBuilder(device_name=None).step(0, 0, 100).op("aten::mm", 1, 5)
    builder.allocation(20, 300, address=1, total_allocated=300, device=-1, device_type=0)
    assert "memory_peak" not in measured(builder.build()).scalars


@pytest.mark.parametrize("traces", [[], [TraceBuilder()], [TraceBuilder().op("aten::mm", 5, 0)]])
def test_a_run_without_time_is_refused(traces: list[TraceBuilder]) -> None:
    with pytest.raises(UsageError, match="no timed events") as error:
        measured(*(builder.build() for builder in traces))
    assert error.value.slug == "nothing-to-compare"


@pytest.mark.parametrize(
    ("capture", "stated"),
    [
        ({}, None),
        (
            {"processor": "EPYC", "usable_cpus": 16},
            {"processor": "EPYC", "usable processor cores": "16"},
        ),
    ],
)
def test_the_machine_is_a_condition_where_it_is_recorded(
    capture: dict[str, Any], stated: dict[str, str] | None
) -> None:
    from dataclasses import replace

    trace = TraceBuilder(device_name=None).op("aten::mm", 0, 5).build()
    found = measured(replace(trace, meta=replace(trace.meta, capture=capture)))
    machine = {
        item.condition: item.value
        for item in found.stated
        if item.condition in {"processor", "usable processor cores"}
    }
    assert machine == (stated or {})
    assert all(item.weight == "decisive" for item in found.stated if item.condition in machine)
