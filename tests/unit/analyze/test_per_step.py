"""What a usual step holds: kernels, operators, shapes; means and extremes over whole steps, counted by hand."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

import polars as pl
import pytest

from support.odd_traces import above, gpu_rows_of, rows_of
from traceloom.analyze import kernel_shapes, step_times, work_per_step
from traceloom.analyze.steps import select_whole_steps, summarize_per_step
from traceloom.testing import TraceBuilder
from traceloom.trace.trace import Trace

Sums = dict[str, dict[int, int]]


def spread(sums: Sums, steps: list[int]) -> dict[str, tuple[float, int, int, int]]:
    """Mean, least and most over `steps`, and in how many of them the name occurs."""
    kept = {
        name: {step: value for step, value in of.items() if step in steps}
        for name, of in sums.items()
    }
    return {
        name: (
            pytest.approx(sum(of.values()) / len(steps)),
            min(of.get(step, 0) for step in steps),
            max(of.values()),
            len(of),
        )
        for name, of in kept.items()
        if of
    }


def told(frame: pl.DataFrame, key: str, value: str) -> dict[str, tuple[float, int, int, int]]:
    names = (f"mean_{value}", f"min_{value}", f"max_{value}", "step_count")
    return {row[key]: tuple(row[name] for name in names) for row in frame.to_dicts()}  # type: ignore[misc]


def added(rows: Iterator[tuple[str, int | None, int]]) -> Sums:
    sums: Sums = defaultdict(lambda: defaultdict(int))
    for name, step, value in rows:
        if step is not None:
            sums[name][step] += value
    return sums


def test_kernels_of_a_step_are_those_that_it_launched(odd: Trace) -> None:
    steps = odd.steps.filter("complete")["step"].to_list()
    found = work_per_step(odd)
    assert found.steps == len(steps)
    work = gpu_rows_of(odd)
    times = added((row["name"], row["step"], row["ns"]) for row in work)
    calls = added((row["name"], row["step"], 1) for row in work)
    assert told(found.kernels, "name", "total_ns") == (spread(times, steps) if steps else {})
    assert told(found.kernels, "name", "call_count") == (spread(calls, steps) if steps else {})
    assert found.kernels["mean_total_ns"].is_sorted(descending=True)


def test_operators_of_a_step_are_those_that_begin_in_it_with_all_their_own_time(odd: Trace) -> None:
    steps = odd.steps.filter("complete")["step"].to_list()
    events = rows_of(odd)
    ops = [
        row
        for row in events
        if row["category"] == "op" and not row["name"].startswith("traceloom.")
    ]
    own = {row["event"]: row["ns"] for row in ops}
    for row in ops:
        around = [other for other in above(events, row) if other["event"] in own]
        if around:
            own[around[0]["event"]] -= row["ns"]
    sums = added((row["name"], row["step"], own[row["event"]]) for row in ops)
    assert told(work_per_step(odd).operators, "name", "self_ns") == (
        spread(sums, steps) if steps else {}
    )


def test_shapes_of_inputs_part_the_work_of_an_operator_without_loss(odd: Trace) -> None:
    inputs = dict(odd.tensors.select("event", "shapes").rows())
    names = odd.events["name"]
    sums: dict[tuple[str | None, str | None, str], list[int]] = defaultdict(list)
    for row in gpu_rows_of(odd):
        op = row["op"]
        sums[None if op is None else names[op], inputs.get(op), row["name"]].append(row["ns"])
    found = kernel_shapes(odd)
    assert found.total_ns == sum(sum(ns) for ns in sums.values()) == found.rows["total_ns"].sum()
    rows = {(row["op"], row["shapes"], row["kernel"]): row for row in found.rows.to_dicts()}
    assert rows.keys() == sums.keys()
    for key, ns in sums.items():
        values = [
            rows[key][name]
            for name in ("count", "total_ns", "mean_ns", "min_ns", "max_ns", "fraction")
        ]
        assert values == [
            len(ns),
            sum(ns),
            sum(ns) // len(ns),
            min(ns),
            max(ns),
            pytest.approx(sum(ns) / found.total_ns),
        ]
    in_steps = odd.steps.filter("complete").height
    assert found.rows["step_count"].null_count() == found.rows.height or in_steps


def test_what_a_step_does_not_do_counts_as_nothing_there() -> None:
    steps = pl.DataFrame(
        {"step": [1, 2, 3, 4], "many": [4] * 4}, schema_overrides={"step": pl.Int32}
    )
    rows = [
        ("a", 1, 5),
        ("a", 1, 3),
        ("a", 2, 4),
        ("b", 1, 1),
        ("b", 2, 1),
        ("b", 3, 1),
        ("b", 4, 1),
        ("c", 9, 7),
    ]
    frame = pl.DataFrame(
        rows, schema={"name": pl.String, "step": pl.Int32, "ns": pl.Int64}, orient="row"
    )
    found = summarize_per_step(frame, ["name"], ["ns"], steps)
    assert found.rows() == [("a", 3.0, 0, 8, 2), ("b", 1.0, 1, 1, 4)], "step 9 is no whole step"
    assert summarize_per_step(frame, ["name"], ["ns"], steps.clear()).rows() == []
    assert summarize_per_step(frame.clear(), ["name"], ["ns"], steps).schema == found.schema


def test_means_times_steps_are_the_sums_of_the_whole_steps_alone() -> None:
    builder = TraceBuilder()
    for number in range(4):
        builder.mark(number, 100 * number)
        builder.launch("cudaLaunchKernel", 100 * number + 10, 2, correlation=number)
        builder.kernel("k", 100 * number + 90, 20 + number, correlation=number)
    trace = builder.op(
        "aten::mm", 310, 5
    ).build()  # the last mark closes the last step: this is outside
    assert select_whole_steps(trace)["step"].to_list() == [0, 1, 2]
    row = work_per_step(trace).kernels.row(0, named=True)
    assert (row["mean_total_ns"], row["min_total_ns"], row["max_total_ns"]) == (
        21_000.0,
        20_000,
        22_000,
    )
    assert work_per_step(trace).operators.height == 0


@pytest.mark.parametrize(
    "builder", [TraceBuilder(), TraceBuilder().op("aten::mm", 0, 5).kernel("k", 1, 2)]
)
def test_without_steps_nothing_is_told_per_step_and_the_columns_stay(builder: TraceBuilder) -> None:
    stepped = (
        TraceBuilder()
        .step(0, 0, 50)
        .op("aten::mm", 0, 5)
        .launch("cudaLaunchKernel", 1, 1, correlation=1)
    )
    some = work_per_step(stepped.kernel("k", 9, 1, correlation=1).build())
    none = work_per_step(builder.build())
    assert (none.steps, none.kernels.height, none.operators.height) == (0, 0, 0)
    assert (none.kernels.schema, none.operators.schema) == (
        some.kernels.schema,
        some.operators.schema,
    )


# -- the steps themselves -----------------------------------------------------------------------------------------


def test_lag_and_launches_of_a_step_are_those_of_the_work_that_it_launched(odd: Trace) -> None:
    times, work = step_times(odd), gpu_rows_of(odd)
    for row in times.steps.to_dicts():
        end = row["start_ns"] + row["duration_ns"]
        launched = [w for w in work if w["step"] == row["step"] and w["launch"] is not None]
        assert row["launch_count"] == len({w["launch"] for w in launched})
        wanted = max(max(w["end_ns"] for w in launched) - end, 0) if launched else None
        assert row["lag_ns"] == wanted
    lengths = sorted(times.steps.filter("complete")["duration_ns"].to_list())
    assert times.count == len(lengths)
    if lengths:
        assert (times.min_ns, times.max_ns) == (lengths[0], lengths[-1])
        assert (
            times.median_ns == (lengths[(len(lengths) - 1) // 2] + lengths[len(lengths) // 2]) // 2
        )


@pytest.mark.parametrize(
    ("lengths", "median", "spread_fraction"),
    [
        ([10], 10, 0.0),
        ([10, 20], 15, 1 / 3),
        ([10, 10, 10, 50], 10, 1.0),
        ([10, 20, 30, 40, 50], 30, 2 / 3),
    ],
)
def test_the_spread_is_the_middle_half_over_the_median(
    lengths: list[int], median: int, spread_fraction: float
) -> None:
    builder, at = TraceBuilder(), 0
    for number, length in enumerate(lengths):
        builder.step(number, at, length)
        at += length
    found = step_times(builder.build())
    assert (found.median_ns, found.count) == (median * 1000, len(lengths))
    assert found.spread_fraction == pytest.approx(spread_fraction)
