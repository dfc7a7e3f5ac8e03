"""Numbers in names and arguments that no real program writes: read, passed over with a reason, never an end."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import polars as pl
import pytest

from traceloom import analyze
from traceloom.formats import read_kineto
from traceloom.report import ReportOptions, build
from traceloom.report.views.terminal import render
from traceloom.testing import TraceBuilder
from traceloom.trace.frames import Result
from traceloom.trace.session import Session
from traceloom.trace.trace import Trace

ARGS = TraceBuilder.collective_args
LONG, VERY_LONG, ARABIC = "9" * 30, "9" * 5000, "٣"
NUMBERS = [LONG, VERY_LONG, ARABIC, "²", "-1", "1e300", "0x10", ""]


def frames(result: Result) -> list[pl.DataFrame]:
    return [value for value in vars(result).values() if isinstance(value, pl.DataFrame)]


def check_finite(result: Result) -> None:
    """No column holds what JSON cannot: infinity, or what is no number."""
    for frame in frames(result):
        for name, kind in frame.schema.items():
            assert not kind.is_float() or frame[name].is_finite().all(), name


# -- names --------------------------------------------------------------------------------------------------------

SERVED = [
    "step[DECODE bs={}]",
    "step[EXTEND bs=2 toks={}]",
    "step[MIXED bs=4 c={} g=1 c_sq=5 c_sk={}]",
    "decode[bs={} tok=2]",
    "prefill[bs={}x=3]",
    "execute_context_{}(5)_generation_2(2)",
    "execute_{}_context_1({})_generation_2(sq{}sk3)",
    "execute_new_{}_cached_3",
]


@pytest.mark.sampled(20)
@pytest.mark.parametrize("number", NUMBERS)
@pytest.mark.parametrize("form", SERVED)
def test_steps_of_servers_with_odd_counts_are_none_or_do_not_say_them(
    form: str, number: str
) -> None:
    name = form.replace("{}", number)
    trace = TraceBuilder().annotation(name, 0, 10).annotation("step[DECODE bs=2]", 20, 10).build()
    found = analyze.inference(trace)
    assert found.steps.height in {1, 2}
    assert found.steps.filter(name="step[DECODE bs=2]")["generation_tokens"].to_list() == [2]
    said = (
        found.steps.filter(name=name)
        .select("context_tokens", "generation_tokens", "requests")
        .row(0, named=True)
        if found.steps.height == 2
        else {}
    )
    assert all(value is None or 0 <= value < 10**15 for value in said.values())
    check_finite(found)


@pytest.mark.parametrize(
    "number", [f"{number}/0" for number in NUMBERS] + [f"0/{LONG}", f"0/{ARABIC}", "0/"]
)
def test_compiled_regions_with_odd_numbers_are_none(number: str) -> None:
    builder = (
        TraceBuilder().annotation(f"Torch-Compiled Region: {number}", 0, 50).op("aten::mm", 5, 10)
    )
    builder.annotation("Torch-Compiled Region: 3/1", 60, 20)
    found = analyze.compiled(builder.build())
    assert found.regions["region"].to_list() == ["3/1"]
    assert found.time["ns"].sum() == 80_000


@pytest.mark.parametrize("number", NUMBERS)
def test_compilations_with_odd_numbers_are_not_numbered(number: str) -> None:
    builder = (
        TraceBuilder()
        .op("_compile.compile_inner (dynamo_timed)", 0, 50)
        .op(f"x compile_id={number}/0", 1, 2)
    )
    found = analyze.compiled(builder.build()).compilations
    assert found["number"].to_list() == [None]
    assert found["duration_ns"].to_list() == [50_000]


@pytest.mark.parametrize("number", NUMBERS)
def test_attention_of_a_batch_with_odd_sums_is_not_modelled(number: str) -> None:
    batch = f"execute_1_context_0(sq0sk0sqsq0sqsk0)_generation_2(sq{number}sk9sqsq2sqsk9)"
    heads = [[2, 8, 64]] * 3
    builder = TraceBuilder().annotation(batch, 0, 50)
    builder.op("vllm::unified_attention", 1, 10, shapes=heads, types=["c10::BFloat16"] * 3)
    builder.launch("cudaLaunchKernel", 2, 2, correlation=1).kernel("flash", 20, 5, correlation=1)
    found = analyze.roofline(builder.build())
    assert found.operators["total_ns"].sum() + found.unmodelled["total_ns"].sum() == 5000
    check_finite(found)


# -- arguments ----------------------------------------------------------------------------------------------------

VALUES: list[Any] = [10**30, 2**63, -1, 1.5, "x", None, [1], True]


def every_analysis(trace: Trace) -> None:
    for name in (
        "collectives",
        "communication",
        "graph_launches",
        "kernel_launches",
        "kernel_efficiency",
        "roofline",
    ):
        check_finite(getattr(analyze, name)(trace))


@pytest.mark.parametrize("value", VALUES)
def test_collectives_with_odd_arguments_are_told_without_them(value: Any) -> None:
    told = {
        "Collective name": "all_to_allv",
        "In msg nelems": value,
        "Out msg nelems": value,
        "Group size": value,
        "dtype": "Float",
        "In split size": f"[{value}, {value}]",
        "Process Group Ranks": f"[{value}, {value}]",
        "Process Group Name": "0",
        "Seq": value,
        "Dst Rank": value,
        "Root": value,
    }
    trace = TraceBuilder(0, 4).kernel("ncclX", 0, 10, **told).build()
    found = analyze.collectives(trace)
    assert found.calls["duration_ns"].to_list() == [10_000]
    every_analysis(trace)
    assert (analyze.matrix(found.calls)["bytes"] >= 0).all()
    analyze.exchanges(found.calls)
    assert analyze.groups(found.calls, analyze.declared_groups(trace), 4).groups["count"].sum() == 1


@pytest.mark.parametrize(
    "kind", ["allreduce", "_allgather_base", "all_to_all", "_reduce_scatter_base", "gather"]
)
@pytest.mark.parametrize("size", [0, -3])
def test_a_group_of_no_ranks_has_no_bandwidth(kind: str, size: int) -> None:
    found = analyze.collectives(
        TraceBuilder(0, 4).kernel("ncclX", 0, 10, **ARGS(kind, "0", size, 64, "Float")).build()
    )
    assert found.calls.select("bus_factor", "bus_gb_per_s").row(0) == (None, None)
    check_finite(found)


@pytest.mark.sampled(5)
@pytest.mark.parametrize(
    "key", ["graph id", "graph node id", "grid", "block", "registers per thread", "shared memory"]
)
@pytest.mark.parametrize("value", [10**30, 1e300, "x", [1e300, 1, 1], [], [1, 2, 3, 4]])
def test_kernels_with_odd_arguments_are_told_without_them(key: str, value: Any) -> None:
    builder = TraceBuilder()
    for number in range(2):
        builder.launch("cudaGraphLaunch", 100 * number, 5, correlation=number + 1)
        for at in (20, 40):
            builder.kernel("gemm", 100 * number + at, 5, correlation=number + 1, **{key: value})
    trace = builder.build()
    every_analysis(trace)
    assert analyze.graph_launches(trace).work_count == 4


@pytest.mark.parametrize("digits", [30, 5000])
def test_a_grid_of_very_many_digits_is_cut(digits: int, tmp_path: Path) -> None:
    builder = TraceBuilder().launch("cudaLaunchKernel", 0, 5, correlation=1)
    builder.kernel("ncclDevKernel_AllReduce", 10, 5, correlation=1, grid=[77777, 1, 1])
    path = tmp_path / "long.json"
    path.write_text(builder.text().replace("77777", "9" * digits))
    found = analyze.collectives(read_kineto(path)).calls
    assert found["channels"].to_list() == [2**31 - 1]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("device", [-1, -2, 2**31, 2**70])
def test_a_device_that_is_no_number_of_one_is_unknown_to_all(device: int) -> None:
    builder = TraceBuilder().step(0, 0, 100).op("aten::mm", 5, 20)
    builder.launch("cudaLaunchKernel", 8, 2, correlation=1).kernel(
        "gemm", 20, 30, correlation=1, device=device
    )
    builder.launch("cudaLaunchKernel", 60, 2, correlation=2).kernel(
        "gemm", 70, 10, correlation=2, device=device
    )
    trace = builder.build()
    assert trace.events["device"].drop_nulls().to_list() == []
    gaps = analyze.idle(trace).gaps
    assert set(gaps["device"]) == {None}
    assert gaps["duration_ns"].sum() == 20_000
    assert set(analyze.gpu_time(trace).steps["device"]) == {None}
    options = ReportOptions(full=True)
    document = build(Session((trace,), "one"), options)
    assert "Why the GPU was idle" in "\n".join(map(str, render(document, options, 100)))


# -- time ---------------------------------------------------------------------------------------------------------


def test_tokens_of_steps_without_time_have_no_rate() -> None:
    found = analyze.inference(
        TraceBuilder().annotation("step[DECODE bs=2]", 5, 0).op("aten::mm", 0, 9).build()
    )
    assert (found.steps.height, found.rates.height) == (1, 0)


def test_memory_that_is_only_given_back_was_most_before() -> None:
    builder = TraceBuilder(device_name=None).op("aten::mm", 0, 100)
    builder.allocation(5, -8, address=1, device_type=0, device=-1).allocation(
        6, -4, address=2, device_type=0, device=-1
    )
    row = analyze.memory(builder.build()).devices.row(0, named=True)
    assert (row["peak_bytes"], row["end_bytes"], row["start_bytes"]) == (0, -12, None)


@pytest.mark.parametrize("base_ns", [0, 1_700_000_000_000_000_000, 2**62])
def test_times_of_any_age_give_the_same_durations(base_ns: int) -> None:
    builder = TraceBuilder(base_ns=base_ns).step(0, 0, 100).op("aten::mm", 5, 20)
    builder.launch("cudaLaunchKernel", 8, 2, correlation=1).kernel("gemm", 20, 30, correlation=1)
    trace = builder.build()
    assert analyze.gpu_time(trace).steps["busy_ns"].to_list()[0] == 30_000
    assert analyze.threads(trace).mean == pytest.approx(0.2)
    assert analyze.launches(trace).totals["delay_max_ns"].to_list() == [10_000]
    assert analyze.idle(trace).gaps.height == 0
