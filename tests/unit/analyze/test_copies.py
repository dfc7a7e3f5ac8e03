"""Copies by direction and memory, their bandwidth over time, and recorded counters."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

import pytest

from support.odd_traces import Row, covered, gpu_rows_of
from traceloom.analyze import copies, counters, quality
from traceloom.formats import read_kineto
from traceloom.testing import TraceBuilder
from traceloom.trace.trace import Trace

PAGEABLE = "Memcpy HtoD (Pageable -> Device)"
PINNED = "Memcpy HtoD (Pinned -> Device)"


def test_bandwidth_is_bytes_over_the_time_of_the_copies_that_have_both() -> None:
    made = TraceBuilder().copy(PINNED, 0, 10, bytes=100_000).copy(PINNED, 20, 30, bytes=100_000)
    made = made.copy(PINNED, 60, 0, bytes=7)  # too short for the clock: in no bandwidth
    row = copies(made.build()).kinds.row(0, named=True)
    assert (row["kind"], row["source_memory"], row["target_memory"], row["pageable"]) == (
        "HtoD",
        "pinned",
        "device",
        False,
    )
    assert (
        row["count"],
        row["bytes"],
        row["total_ns"],
        row["instant_count"],
        row["instant_bytes"],
    ) == (
        3,
        200_007,
        40_000,
        1,
        7,
    )
    assert row["bytes_per_s"] == pytest.approx(200_000 / 40e-6)
    assert (row["min_bytes_per_s"], row["max_bytes_per_s"]) == pytest.approx(
        (100_000 / 30e-6, 100_000 / 10e-6)
    )


def test_directions_and_memories_are_rows_of_their_own() -> None:
    made = TraceBuilder().copy(PAGEABLE, 0, 10, bytes=1000).copy(PINNED, 20, 5, bytes=1000)
    made = (
        made.copy("Memcpy DtoD (Device -> Device)", 30, 3, bytes=10)
        .fill(40, 2, bytes=64)
        .copy("Memcpy PtoP (Device -> Device)", 50, 1, bytes=9)
    )
    rows = [
        (r["kind"], r["source_memory"], r["pageable"])
        for r in copies(made.build()).kinds.to_dicts()
    ]
    assert rows == [
        ("HtoD", "pageable", True),
        ("HtoD", "pinned", False),
        ("DtoD", "device", False),
        ("fill", None, False),
        ("PtoP", "device", False),
    ]


def test_memory_of_the_host_that_is_not_described_may_be_pageable_or_not() -> None:
    made = TraceBuilder(generation="rocm").copy("Memcpy HtoD (Host -> Device)", 0, 10, bytes=1000)
    assert copies(made.build()).kinds["pageable"].to_list() == [None]


def test_copies_that_a_kernel_makes_have_no_size() -> None:
    row = copies(
        TraceBuilder(generation="rocm").kernel("__amd_rocclr_copyBuffer.kd", 0, 10).build()
    ).kinds.row(0, named=True)
    assert (row["kind"], row["by_kernel"], row["bytes"], row["unsized_count"]) == (
        "DtoD",
        True,
        None,
        1,
    )
    assert row["bytes_per_s"] is None


def test_the_curve_is_the_sum_of_the_copies_that_run_and_its_area_their_bytes() -> None:
    made = TraceBuilder().copy(PINNED, 0, 20, bytes=2000).copy(PINNED, 10, 20, bytes=4000, stream=8)
    curve = copies(made.build()).curve
    start = curve["time_ns"][0]
    assert [(at - start, rate) for at, rate in curve.select("time_ns", "bytes_per_s").rows()] == [
        (0, pytest.approx(1e8)),
        (10_000, pytest.approx(3e8)),
        (20_000, pytest.approx(2e8)),
        (30_000, 0.0),
    ]
    times, rates = curve["time_ns"].to_numpy(), curve["bytes_per_s"].to_numpy()
    assert float((rates[:-1] * (times[1:] - times[:-1])).sum() / 1e9) == pytest.approx(6000)


def test_copies_by_operator_and_per_step() -> None:
    made = TraceBuilder()
    for number, size in enumerate((100, 300)):
        at = 100 * number
        made = (
            made.step(number + 1, at, 100)
            .op("aten::to", at, 50)
            .launch("cudaMemcpyAsync", at + 5, 2, correlation=number)
        )
        made = made.copy(PAGEABLE, at + 10, 10, bytes=size, correlation=number)
    found = copies(made.fill(150, 1, bytes=4).build())
    assert found.ops.rows() == [
        ("aten::to", "HtoD", True, 2, 400, 20_000),
        (None, "fill", False, 1, 4, 1_000),
    ]
    usual = {row["kind"]: row for row in found.per_step.to_dicts()}
    assert (
        usual["HtoD"]["mean_copied_bytes"],
        usual["HtoD"]["min_copied_bytes"],
        usual["HtoD"]["max_copied_bytes"],
    ) == (200, 100, 300)


def test_a_trace_without_copies_has_the_same_columns() -> None:
    empty = copies(TraceBuilder().op("aten::add", 0, 5).build())
    full = copies(TraceBuilder().copy(PINNED, 0, 5, bytes=5).build())
    for name in ("kinds", "ops", "per_step", "curve"):
        assert getattr(empty, name).height == 0
        assert getattr(empty, name).schema == getattr(full, name).schema


# -- counters ------------------------------------------------------------------------------------------------------


def profiled(folder: Path, launches: int, ranges: int, *, driver: bool = False) -> Trace:
    """Launches of kernels under operators op0, op1 ..., and ranges with counters."""
    made = TraceBuilder()
    for number in range(launches):
        made = made.op(f"op{number}", 100 * number, 90)
        made = made.launch("cudaLaunchKernel", 100 * number + 10, 20, correlation=number)
        if driver:
            made = made.launch(
                "cuLaunchKernelEx", 100 * number + 15, 5, correlation=number, driver=True
            )
        made = made.launch("cudaMemsetAsync", 100 * number + 50, 2, correlation=1000 + number)
    events = [
        f'{{"ph": "X", "cat": "cuda_profiler_range", "name": "{"__missing__" if number == 1 else f"kernel{number}"}", '
        f'"pid": 0, "tid": 0, "ts": {number}, "dur": 1, "args": {{"flops": {number + 1}, "stalls": {10 * number}, "text": "x"}}}}'
        for number in range(ranges)
    ]
    path = folder / "trace.json"
    text = made.text()
    path.write_text(
        text.replace("\n  ],", ",\n  " + ",\n  ".join(events) + "\n  ],") if events else text
    )
    return read_kineto(path)


@pytest.mark.parametrize("driver", [False, True])
def test_the_kth_range_belongs_to_the_kth_launch(tmp_path: Path, driver: bool) -> None:
    found = counters(profiled(tmp_path, 3, 3, driver=driver))
    flops = [row for row in found.ranges.to_dicts() if row["counter"] == "flops"]
    assert [(row["range"], row["kernel"], row["op"], row["value"]) for row in flops] == [
        (0, "kernel0", "op0", 1.0),
        (1, None, "op1", 2.0),  # the writer could not name it
        (2, "kernel2", "op2", 3.0),
    ]
    assert ("op2", "stalls", 1, 20.0) in found.operators.rows()
    assert (found.range_count, found.launch_count, found.unpaired) == (3, 3, None)


def test_ranges_are_not_paired_where_their_number_differs_from_that_of_launches(
    tmp_path: Path,
) -> None:
    found = counters(profiled(tmp_path, 3, 2))
    assert found.unpaired == "counts-differ"
    assert found.ranges["value"].len() == 4
    assert found.ranges["launch"].null_count() == 4
    assert found.operators.height == 0
    checks = {
        row["check"]: row["affected_count"]
        for row in quality(profiled(tmp_path, 3, 2)).checks.to_dicts()
    }
    assert checks["unpaired-counters"] == 2
    assert quality(profiled(tmp_path, 2, 2)).checks.filter(check="unpaired-counters")[
        "affected_count"
    ].to_list() == [0]


def test_samples_over_time_are_told_by_source_and_counter(tmp_path: Path) -> None:
    made = (
        TraceBuilder()
        .counter("sm__cycles", 0, 4.0)
        .counter("sm__cycles", 10, 8.0)
        .counter("power", 5, 1.0, key="W")
    )
    found = counters(made.build())
    assert [
        (row["counter"], row["samples"], row["min"], row["mean"], row["max"])
        for row in found.series.to_dicts()
    ] == [
        ("power W", 1, 1.0, 1.0, 1.0),
        ("sm__cycles", 2, 4.0, 6.0, 8.0),
    ]
    assert (found.range_count, found.unpaired) == (0, None)


def test_ranges_of_a_file_that_is_gone_have_no_values(tmp_path: Path) -> None:
    trace = profiled(tmp_path, 2, 2)
    (tmp_path / "trace.json").unlink()
    found = counters(trace)
    assert (found.absent, found.ranges.height, found.range_count) == ("file-gone", 0, 2)


# -- against adding up copy by copy -------------------------------------------------------------------------------


def copied(trace: Trace) -> list[Row]:
    """The copies and fills with what is recorded of each."""
    described = {row["event"]: row for row in trace.copies.to_dicts()}
    rows = [row for row in gpu_rows_of(trace) if row["category"] != "kernel"]
    for row in rows:
        row |= {
            name: described[row["event"]][name]
            for name in ("kind", "bytes", "source_memory", "target_memory")
        }
    return rows


def test_directions_are_what_adding_up_copy_by_copy_gives(odd: Trace) -> None:
    groups: dict[tuple[object, ...], list[Row]] = defaultdict(list)
    for row in copied(odd):
        groups[row["device"], row["kind"], row["source_memory"], row["target_memory"]].append(row)
    found = copies(odd).kinds
    assert found.height == len(groups)
    for row in found.to_dicts():
        rows = groups[row["device"], row["kind"], row["source_memory"], row["target_memory"]]
        timed = [(r["bytes"], r["ns"]) for r in rows if r["ns"]]
        assert (row["count"], row["bytes"]) == (len(rows), sum(r["bytes"] for r in rows))
        assert (row["total_ns"], row["unsized_count"]) == (sum(r["ns"] for r in rows), 0)
        assert row["union_ns"] == covered([(r["start_ns"], r["end_ns"]) for r in rows])
        assert row["instant_count"] == len(rows) - len(timed)
        assert row["instant_bytes"] == row["bytes"] - sum(size for size, _ in timed)
        rates = [size / ns * 1e9 for size, ns in timed]
        usual = sum(size for size, _ in timed) / sum(ns for _, ns in timed) * 1e9 if timed else None
        wanted = (usual, min(rates, default=None), max(rates, default=None))
        got = [row[name] for name in ("bytes_per_s", "min_bytes_per_s", "max_bytes_per_s")]
        assert got == [None if value is None else pytest.approx(value) for value in wanted]
    assert found["pageable"].to_list() == [
        row["source_memory"] == "pageable" if row["kind"] in {"HtoD", "DtoH"} else False
        for row in found.to_dicts()
    ]


def test_copies_by_operator_are_all_copies(odd: Trace) -> None:
    names, groups = odd.events["name"], defaultdict(list)
    for row in copied(odd):
        crosses = row["kind"] in {"HtoD", "DtoH"}
        pageable = crosses and "pageable" in {row["source_memory"], row["target_memory"]}
        groups[None if row["op"] is None else names[row["op"]], row["kind"], pageable].append(
            (row["bytes"], row["ns"])
        )
    found = {
        (row["op"], row["kind"], row["pageable"]): (row["count"], row["bytes"], row["total_ns"])
        for row in copies(odd).ops.to_dicts()
    }
    assert found == {
        key: (len(v), sum(b for b, _ in v), sum(ns for _, ns in v)) for key, v in groups.items()
    }


def test_the_area_below_the_curve_is_the_bytes_of_the_timed_copies_and_it_ends_at_nothing(
    odd: Trace,
) -> None:
    result = copies(odd)
    sizes: dict[tuple[object, object], int] = defaultdict(int)
    for row in copied(odd):
        sizes[row["device"], row["kind"]] += row["bytes"] if row["ns"] else 0
    for (device, kind), part in result.curve.group_by("device", "kind"):
        assert part["time_ns"].is_sorted()
        area = (part["bytes_per_s"] * part["time_ns"].diff().shift(-1)).sum() / 1e9
        assert area == pytest.approx(sizes[device, kind], rel=1e-9)
        assert part["bytes_per_s"][-1] == 0
        assert (part["bytes_per_s"] >= 0).all()


def test_where_one_size_of_a_kind_is_not_recorded_a_step_has_no_bytes() -> None:
    builder = TraceBuilder(generation="rocm").step(0, 0, 50).step(1, 50, 50)
    for number, at in enumerate((5, 55)):
        builder.launch("hipMemcpyAsync", at, 2, correlation=number)
        builder.copy(
            "Memcpy HtoD (Host -> Device)", at + 5, 3, bytes=100 + number, correlation=number
        )
        builder.launch("hipLaunchKernel", at + 3, 2, correlation=10 + number)
        builder.kernel("__amd_rocclr_copyBuffer.kd", at + 20, 4, correlation=10 + number)
    found = {row["kind"]: row for row in copies(builder.build()).per_step.to_dicts()}
    sized, unsized = found["HtoD"], next(row for kind, row in found.items() if kind != "HtoD")
    assert [sized[f"{how}_copied_bytes"] for how in ("mean", "min", "max")] == [100.5, 100, 101]
    assert [unsized[f"{how}_copied_bytes"] for how in ("mean", "min", "max")] == [None] * 3
    assert (unsized["mean_total_ns"], unsized["mean_call_count"]) == (4000.0, 1.0)


@pytest.mark.parametrize("size", [1, 2**31, 2**53 + 1, 2**62])
def test_sizes_of_any_magnitude_stay_exact(size: int) -> None:
    row = copies(TraceBuilder().copy(PINNED, 0, 10, bytes=size).build()).kinds.row(0, named=True)
    assert (row["bytes"], row["bytes_per_s"]) == (size, pytest.approx(size / 10e-6))
