"""torch.compile: time by part, regions, graph breaks, compilations."""

from __future__ import annotations

import random
from functools import cache

import polars as pl
import pytest

from traceloom.analyze import compiled
from traceloom.testing import TraceBuilder
from traceloom.trace.trace import Trace


def call(builder: TraceBuilder, at: int, number: int = 0) -> TraceBuilder:
    """A region with a graph, an uncompiled operator, and its continuation inside: 100 µs."""
    return (
        builder.op("TorchDynamo Cache Lookup", at, 5)
        .op(f"Torch-Compiled Region: 0/{number}", at + 5, 95)
        .python("train.py(3): forward", at + 6, 90)
        .op("Pregraph bytecode", at + 7, 3)
        .op("CompiledFunction", at + 10, 30, sequence=at)
        .annotation("## Call CompiledFxGraph fabc ##", at + 12, 20)
        .launch("cudaLaunchKernel", at + 15, 2, correlation=at + 1)
        .kernel("triton_fused", at + 20, 8, correlation=at + 1)
        .op("aten::nonzero", at + 42, 8)
        .launch("cudaLaunchKernel", at + 43, 2, correlation=at + 2)
        .kernel("nonzero", at + 60, 4, correlation=at + 2)
        .op("TorchDynamo Cache Lookup", at + 52, 4)
        .op("Torch-Compiled Region: 1/0", at + 58, 30)
        .python("train.py(9): torch_dynamo_resume_in_forward_at_9", at + 59, 28)
        .op("CompiledFunction", at + 60, 20, sequence=at + 1)
    )


def backward(builder: TraceBuilder, at: int, sequence: int) -> TraceBuilder:
    named = "autograd::engine::evaluate_function: CompiledFunctionBackward"
    return (
        builder.op(named, at, 12, sequence=sequence, forward_thread=1, thread=2)
        .op("CompiledFunctionBackward", at + 1, 10, sequence=sequence, forward_thread=1, thread=2)
        .launch("cudaLaunchKernel", at + 3, 2, correlation=at, thread=2)
        .kernel("triton_backward", at + 6, 7, correlation=at)
    )


def test_time_by_part_adds_up_to_the_window_of_each_thread() -> None:
    trace = backward(call(TraceBuilder().op("aten::sum", 110, 6), 0), 130, 0).build()
    found = compiled(trace)
    main = dict(
        found.time.filter(pl.col("lane") == 0).group_by("part").agg(pl.col("ns").sum()).rows()
    )
    assert main == {
        "lookup": 9000,
        "graph": 50_000,
        "break": 8000,
        "wrapper": 33_000,
        "outside": 6000,
        "unobserved": trace.end_ns - trace.start_ns - 106_000,
    }
    other = dict(
        found.time.filter(pl.col("lane") == 1).group_by("part").agg(pl.col("ns").sum()).rows()
    )
    assert (other["graph"], other["outside"]) == (10_000, 2000)
    assert dict(found.device.select("part", "device_ns").rows()) == {"graph": 15_000, "break": 4000}


def test_regions_have_their_own_time_and_that_of_their_backward() -> None:
    found = compiled(backward(call(TraceBuilder(), 0), 130, 0).build())
    first, second = found.regions.to_dicts()
    assert (first["region"], first["function"], first["count"]) == (
        "0/0",
        "train.py(3): forward",
        1,
    )
    assert (first["host_ns"], first["graph_ns"], first["break_ns"], first["wrapper_ns"]) == (
        61_000,
        30_000,
        8000,
        23_000,
    )
    assert (first["graph_break_count"], first["device_ns"]) == (1, 12_000)
    assert (first["backward_host_ns"], first["backward_device_ns"]) == (10_000, 7000)
    assert (
        second["region"],
        second["host_ns"],
        second["graph_ns"],
        second["backward_host_ns"],
    ) == (
        "1/0",
        30_000,
        20_000,
        0,
    )


def test_a_graph_break_is_a_continuation_inside_its_region() -> None:
    row = compiled(call(TraceBuilder(), 0).build()).breaks.row(0, named=True)
    assert row == {
        "region": "0/0",
        "resumed": "1/0",
        "place": "train.py:9",
        "count": 1,
        "between_ns": 18_000,  # from the end of the graph (40) to the continuation (58)
        "lookup_ns": 4000,
        "uncompiled_device_ns": 4000,
    }


def test_what_ran_uncompiled_is_named() -> None:
    found = compiled(call(TraceBuilder().op("aten::sum", 110, 6), 0).build()).uncompiled
    assert found.select("part", "name", "host_ns", "device_ns").rows() == [
        ("break", "aten::nonzero", 8000, 4000),
        ("outside", "aten::sum", 6000, 0),
    ]


def test_a_region_without_graph_events_runs_its_graphs_operator_by_operator() -> None:
    builder = (
        TraceBuilder()
        .op("Torch-Compiled Region: 0/0", 0, 50)
        .op("aten::mm", 10, 20)
        .op("aten::mm", 30, 10)
    )
    found = compiled(builder.build())
    assert dict(found.time.select("part", "ns").rows()) == {"graph": 30_000, "wrapper": 20_000}
    assert found.graphs.select("name", "region", "count", "host_ns").rows() == [
        ("aten::mm", "0/0", 2, 30_000)
    ]
    assert found.uncompiled.height == 0


def test_compilations_are_numbered_and_told_by_stage() -> None:
    builder = TraceBuilder().op("TorchDynamo Cache Lookup", 0, 5)
    builder.op("dynamo", 5, 100).annotation("dynamo_data: compile_id=3/1", 6, 1)
    builder.op("_compile.compile_inner (dynamo_timed)", 10, 90).op("backend_compile", 20, 60)
    builder.op("inductor_compile", 30, 40).op("async_compile.wait (dynamo_timed)", 40, 20).op(
        "build_guards", 85, 10
    )
    builder.op("aten::mm", 45, 5)  # the compiler may run operators
    call(builder, 200, number=1)
    found = compiled(builder.build())
    row = found.compilations.row(0, named=True)
    assert (row["region"], row["number"], row["recompile"], row["direction"]) == (
        "3/1",
        1,
        True,
        "forward",
    )
    assert [
        row[name] for name in ("dynamo_ns", "guards_ns", "autograd_ns", "inductor_ns", "code_ns")
    ] == [
        30_000,
        10_000,
        20_000,
        20_000,
        20_000,
    ]
    assert (found.lookup_count, found.miss_count, found.recompile_count) == (3, 1, 1)
    assert found.time.filter(pl.col("part") == "compile")["ns"].sum() == 100_000
    assert "aten::mm" not in found.uncompiled["name"].to_list()


def test_compilations_without_numbers_are_not_called_first_or_again() -> None:
    found = compiled(TraceBuilder().op("_compile.compile_inner (dynamo_timed)", 0, 100).build())
    assert found.compilations.select("region", "number", "recompile").rows() == [(None, None, None)]
    assert found.recompile_count is None


def test_a_trace_without_compiled_code_says_so() -> None:
    some, none = (
        compiled(call(TraceBuilder(), 0).build()),
        compiled(TraceBuilder().op("aten::mm", 0, 5).build()),
    )
    assert (some.seen, none.seen) == (True, False)
    for name in ("time", "device", "regions", "graphs", "breaks", "compilations", "uncompiled"):
        assert getattr(none, name).schema == getattr(some, name).schema
        assert getattr(none, name).height == 0


# -- laws of random nestings --------------------------------------------------------------------------------------

MARKS = (
    "TorchDynamo Cache Lookup",
    "Torch-Compiled Region: 0/0",
    "Torch-Compiled Region: 1/2",
    "CompiledFunction",
    "## Call CompiledFxGraph fabc ##",
    "aten::mm",
    "_compile.compile_inner (dynamo_timed)",
    "dynamo_data: compile_id=1/2",
    "inductor_compile",
    "build_guards",
    "backend_compile",
    "Pregraph bytecode",
)


@cache
def nested(seed: int) -> Trace:
    """Marks of the compiler in each other in any order, on two threads, with GPU work and steps."""
    chance, builder = random.Random(seed), TraceBuilder()
    launched: list[int] = []

    def fill(thread: int, low: int, high: int, depth: int) -> None:
        at = low + chance.randrange(4)
        while at < high - 6:
            long = min(chance.randrange(4, 10 + (high - low) // 2), high - at)
            name = chance.choice(MARKS)
            (builder.annotation if name.startswith(("##", "dynamo_data")) else builder.op)(
                name, at, long, thread=thread
            )
            if chance.random() < 0.3:
                launched.append(len(launched) + 1)
                builder.launch(
                    "cudaLaunchKernel", at, min(2, long), correlation=launched[-1], thread=thread
                )
                builder.kernel(
                    "triton", chance.randrange(800), chance.randrange(20), correlation=launched[-1]
                )
            elif depth < 5:
                fill(thread, at, at + long, depth + 1)
            at += long + chance.randrange(12)

    for thread in (1, 2):
        fill(thread, chance.randrange(20), 800, 0)
    for step, low in enumerate((100, 300, 600)):
        builder.mark(step, low, thread=5)
    return builder.kernel("orphan", 1, 7).build()


@pytest.mark.parametrize("seed", range(12))
def test_whatever_stands_in_what_every_part_adds_up_and_no_time_is_below_nothing(seed: int) -> None:
    trace = nested(seed)
    found = compiled(trace)
    window = trace.end_ns - trace.start_ns
    lanes = found.time.group_by("lane").agg(pl.col("ns").sum())
    assert set(lanes["ns"]) == {window}
    work = trace.gpu_work()
    assert found.device["device_ns"].sum() == work["duration_ns"].sum()
    assert found.device["kernel_count"].sum() == work.height
    for frame in (
        found.time,
        found.regions,
        found.breaks,
        found.graphs,
        found.compilations,
        found.uncompiled,
    ):
        for column in frame.select(pl.col("^(.*_)?ns$").exclude("start_ns")):
            assert (column.drop_nulls() >= 0).all(), column.name
    for row in found.regions.to_dicts():
        assert row["host_ns"] == row["graph_ns"] + row["wrapper_ns"] + row["break_ns"]
    assert found.regions["graph_break_count"].sum() == found.breaks["count"].sum()
    for row in found.compilations.to_dicts():
        parts = [
            row[name]
            for name in ("dynamo_ns", "guards_ns", "autograd_ns", "inductor_ns", "code_ns")
        ]
        assert sum(parts) == row["duration_ns"]
    assert found.miss_count <= found.lookup_count


def test_a_region_that_stands_in_a_graph_of_another_is_no_time_after_it() -> None:
    builder = TraceBuilder().op("Torch-Compiled Region: 0/0", 0, 100).op("CompiledFunction", 10, 80)
    builder.op("Torch-Compiled Region: 1/0", 30, 20)
    row = compiled(builder.build()).breaks.row(0, named=True)
    assert (row["region"], row["resumed"], row["between_ns"]) == ("0/0", "1/0", 30_000)


def test_stages_of_a_compilation_inside_another_stage_count_once() -> None:
    builder = (
        TraceBuilder()
        .op("_compile.compile_inner (dynamo_timed)", 0, 100)
        .op("backend_compile", 10, 80)
    )
    builder.op("build_guards", 20, 10).op("inductor_compile", 40, 40).op("build_guards", 92, 3)
    row = compiled(builder.build()).compilations.row(0, named=True)
    assert [
        row[name] for name in ("dynamo_ns", "guards_ns", "autograd_ns", "inductor_ns", "code_ns")
    ] == [17_000, 3000, 40_000, 40_000, 0]
