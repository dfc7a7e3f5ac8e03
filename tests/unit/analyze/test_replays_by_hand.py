"""Calls on the roofline, with and without replays of graphs, against products and sums worked out by hand; in µs."""

from __future__ import annotations

from typing import Any

import polars as pl
import pytest

from traceloom.analyze.placed_calls import Peak, place_on_roofline
from traceloom.analyze.roofline import roofline, select_modelled_work
from traceloom.testing import TraceBuilder
from traceloom.trace.session import Session

BF = "c10::BFloat16"
PEAK = Peak("made", {"bf16": 1e13, "fp32": 1e12, "tf32": 5e12}, 1e12)  # 10 FLOP and 1 byte in a ps


def product(size: int) -> tuple[int, int]:
    """FLOPs and bytes of a square product in 16 bits."""
    return 2 * size**3, 3 * 2 * size**2


def replays(
    steps: int, each: int, names: tuple[str, ...] = ("a", "b"), rank: int = 0
) -> TraceBuilder:
    """Steps of 1000 µs, each with so many replays of a graph of kernels of 10 µs."""
    builder = TraceBuilder(rank=rank, world_size=2)
    for step in range(steps):
        builder.step(step, 1000 * step, 1000)
        for number in range(each):
            at, correlation = 1000 * step + 100 * number, 1 + step * each + number
            builder.launch("cudaGraphLaunch", at, 5, correlation=correlation)
            for place, name in enumerate(names):
                builder.kernel(name, at + 10 + 12 * place, 10, correlation=correlation)
    return builder


def captured(
    calls: list[tuple[int, tuple[str, ...]]], start: float = 0, rank: int = 0
) -> TraceBuilder:
    """A product of each size, which launches these kernels."""
    builder, correlation = TraceBuilder(rank=rank, world_size=2), 0
    for number, (size, kernels) in enumerate(calls):
        at = start + 40 * number
        builder.op("aten::mm", at, 30, shapes=[[size, size]] * 2, types=[BF, BF])
        for place, kernel in enumerate(kernels):
            correlation += 1
            builder.launch("cudaLaunchKernel", at + 2 + 5 * place, 3, correlation=correlation)
            builder.kernel(kernel, 900 + 20 * correlation, 9, correlation=correlation)
    return builder


@pytest.mark.parametrize(("steps", "each"), [(1, 1), (1, 5), (4, 1), (3, 4)])
def test_every_replay_of_every_step_counts_anew(steps: int, each: int) -> None:
    found = roofline(
        replays(steps, each).build(), PEAK, captured([(64, ("a",)), (96, ("b",))]).build()
    )
    flops, moved = (sum(values) for values in zip(product(64), product(96), strict=True))
    assert found.steps["flops"].to_list() == [each * flops] * steps
    assert found.steps["bytes"].to_list() == [each * moved] * steps
    assert found.steps["gpu_ns"].to_list() == [each * 20_000] * steps
    assert found.steps["hfu"].to_list() == pytest.approx([each * flops / 1e13 / 1e-3] * steps)
    sizes = found.operators.sort("flops").select("count", "flops", "total_ns").rows()
    assert sizes == [
        (steps * each, steps * each * product(size)[0], steps * each * 10_000) for size in (64, 96)
    ]


def test_a_call_with_two_kernels_counts_once_per_replay() -> None:
    trace, capture = replays(1, 3).build(), captured([(64, ("a", "b"))]).build()
    found = roofline(trace, PEAK, capture)
    assert found.operators.select("count", "flops", "total_ns").rows() == [
        (3, 3 * product(64)[0], 60_000)
    ]
    work = select_modelled_work(trace, PEAK, capture)
    assert work["flops"].to_list() == [product(64)[0] // 2] * 6
    assert work["bytes"].to_list() == [product(64)[1] // 2] * 6


def test_kernels_of_one_name_are_told_apart_by_their_order() -> None:
    capture = captured([(64, ("a",)), (96, ("a",)), (32, ("b",))]).build()
    work = select_modelled_work(replays(1, 2, ("a", "a", "b")).build(), PEAK, capture)
    assert work["flops"].to_list() == [product(size)[0] for size in (64, 96, 32)] * 2


def test_what_runs_beside_replays_keeps_its_own_operator() -> None:
    builder = replays(1, 2)
    builder.op("aten::mm", 500, 30, shapes=[[128, 128]] * 2, types=[BF, BF])
    builder.launch("cudaLaunchKernel", 505, 3, correlation=99).kernel("a", 540, 10, correlation=99)
    trace = builder.build()
    work = select_modelled_work(trace, PEAK, captured([(64, ("a",)), (96, ("b",))]).build())
    assert work["flops"].to_list() == [product(size)[0] for size in (64, 96, 64, 96, 128)]
    owners = trace.events["name"].gather(work["op"]).to_list()
    assert owners == ["cudaGraphLaunch"] * 4 + ["aten::mm"]


def test_when_the_capture_was_made_does_not_matter() -> None:
    trace = replays(2, 2).build()
    calls: list[tuple[int, tuple[str, ...]]] = [(64, ("a",)), (96, ("b",))]
    early, late = (roofline(trace, PEAK, captured(calls, start).build()) for start in (0, 5_000))
    assert early.operators.equals(late.operators)
    assert early.whole.equals(late.whole)


def test_each_rank_takes_the_capture_of_its_own_rank() -> None:
    run = Session(tuple(replays(1, 1, ("a",), rank).build() for rank in (0, 1)), "made")
    sizes = {0: 64, 1: 96}
    captures = [captured([(size, ("a",))], rank=rank).build() for rank, size in sizes.items()]
    for order in (captures, captures[::-1]):
        found = roofline(run, PEAK, Session(tuple(order), "captures"))
        assert dict(found.operators.select("rank", "flops").rows()) == {
            rank: product(size)[0] for rank, size in sizes.items()
        }
    first = roofline(run, PEAK, captures[0]).operators
    assert first["flops"].to_list() == [product(64)[0]] * 2  # the only capture there is


def test_a_recording_without_graphs_is_the_same_with_any_capture() -> None:
    trace = captured([(64, ("a",)), (96, ("b",))]).build()
    alone, beside = roofline(trace, PEAK), roofline(trace, PEAK, captured([(32, ("a",))]).build())
    assert alone.operators.equals(beside.operators)
    assert alone.unmodelled.equals(beside.unmodelled)


def test_an_empty_capture_explains_nothing() -> None:
    trace = replays(1, 1).build()
    found = roofline(trace, PEAK, TraceBuilder().build())
    assert found.flops == 0
    assert found.unmodelled.select("name", "count").sort("name").rows() == [("a", 1), ("b", 1)]


# -- one call on the roofline -------------------------------------------------------------------------------------


def called(
    name: str, shapes: list[Any], types: list[str], kernel: str = "k", length: float = 10
) -> TraceBuilder:
    builder = TraceBuilder().op(name, 0, 20, shapes=shapes, types=types)
    return builder.launch("cudaLaunchKernel", 2, 3, correlation=1).kernel(
        kernel, 30, length, correlation=1
    )


TF32, SIMT = "cutlass_80_tensorop_s1688gemm_64x64", "ampere_sgemm_128x64_nn"
SQUARE = [[200, 200]] * 2
PLACED: list[tuple[str, list[Any], list[str], str, tuple[str, str, float, float, str]]] = [
    # arithmetic, evidence, time to compute and to move in ns, bound
    (
        "aten::mm",
        SQUARE,
        [BF, BF],
        "k",
        ("bf16", "recorded type", 16e6 / 1e4, 240e3 / 1e3, "compute"),
    ),
    (
        "aten::mm",
        SQUARE,
        ["float"] * 2,
        "k",
        ("fp32", "assumed", 16e6 / 1e3, 480e3 / 1e3, "compute"),
    ),
    (
        "aten::mm",
        SQUARE,
        ["float"] * 2,
        TF32,
        ("tf32", "kernel name", 16e6 / 5e3, 480e3 / 1e3, "compute"),
    ),
    (
        "aten::mm",
        SQUARE,
        ["float"] * 2,
        SIMT,
        ("fp32", "kernel name", 16e6 / 1e3, 480e3 / 1e3, "compute"),
    ),
    (
        "aten::mm",
        [[1000, 1], [1, 1000]],
        [BF, BF],
        "k",
        ("bf16", "recorded type", 200.0, 2004.0, "memory"),
    ),
    (
        "aten::add",
        [[1000], [1000], []],
        ["float", "float", "Scalar"],
        "k",
        ("fp32", "recorded type", 1.0, 12.0, "memory"),
    ),
    (
        "aten::add",
        [[1000], [1000], []],
        [BF, BF, "Scalar"],
        "k",
        ("bf16", "recorded type", 1.0, 6.0, "memory"),
    ),
    (
        "aten::copy_",
        [[1000], [1000]],
        ["float", BF],
        "k",
        ("fp32", "recorded type", 0.0, 6.0, "memory"),
    ),
]


@pytest.mark.parametrize(("name", "shapes", "types", "kernel", "expected"), PLACED)
def test_a_call_takes_the_longer_of_computing_and_moving(
    name: str,
    shapes: list[Any],
    types: list[str],
    kernel: str,
    expected: tuple[str, str, float, float, str],
) -> None:
    row = place_on_roofline(called(name, shapes, types, kernel).build(), PEAK).calls.row(
        0, named=True
    )
    arithmetic, evidence, compute, memory, bound = expected
    assert (row["arithmetic"], row["evidence"], row["bound"]) == (arithmetic, evidence, bound)
    assert (row["compute_ns"], row["memory_ns"]) == (pytest.approx(compute), pytest.approx(memory))
    assert row["roofline_ns"] == max(row["compute_ns"], row["memory_ns"])
    assert (row["gpu_ns"], row["time_ns"], row["kernels"]) == (10_000, 10_000, 1)


@pytest.mark.parametrize(
    ("flops", "memory", "known"),
    [
        ({"bf16": 1e13}, None, False),  # nobody knows how long moving takes
        ({"fp32": 1e12}, 1e12, False),  # nor how fast the matrix units are
        ({"bf16": 1e13}, 1e12, True),
        ({}, 1e12, False),
    ],
)
def test_a_product_without_both_peaks_has_no_time_at_the_peaks(
    flops: dict[str, float], memory: float | None, known: bool
) -> None:
    row = place_on_roofline(
        called("aten::mm", SQUARE, [BF, BF]).build(), Peak("made", flops, memory)
    ).calls.row(0, named=True)
    assert (row["roofline_ns"] is not None, row["bound"] is not None) == (known, known)


def test_a_vector_unit_of_unknown_rate_leaves_the_bound_of_memory() -> None:
    trace = called("aten::add", [[1000], [1000]], ["float", "float"]).build()
    row = place_on_roofline(trace, Peak("made", {}, 1e12)).calls.row(0, named=True)
    assert (row["compute_ns"], row["roofline_ns"], row["bound"]) == (None, 12.0, "memory")


@pytest.mark.parametrize("factor", [2, 10])
def test_faster_peaks_shorten_every_time_at_them_by_as_much(factor: int) -> None:
    trace = captured([(64, ("a",)), (512, ("b",))]).build()
    faster = Peak("faster", {key: factor * rate for key, rate in PEAK.flops.items()}, factor * 1e12)
    slow, fast = (place_on_roofline(trace, peak).calls for peak in (PEAK, faster))
    assert (slow["roofline_ns"] / fast["roofline_ns"]).to_list() == pytest.approx([factor] * 2)
    assert slow.select("flops", "bytes", "bound", "gpu_ns").equals(
        fast.select("flops", "bytes", "bound", "gpu_ns")
    )


def test_operators_add_up_to_the_whole() -> None:
    trace = captured([(64, ("a",)), (96, ("b", "c")), (64, ("a",))]).build()
    found = roofline(trace, PEAK)
    assert found.operators.select(pl.col("flops", "bytes").sum()).row(0) == (
        2 * product(64)[0] + product(96)[0],
        2 * product(64)[1] + product(96)[1],
    )
    assert found.operators["fraction"].sum() == pytest.approx(1)
    rows = {row["flops"]: row for row in found.operators.to_dicts()}
    twice = rows[2 * product(64)[0]]
    assert (twice["count"], twice["total_ns"]) == (2, 18_000)
    assert twice["intensity"] == pytest.approx(2 * 64**3 / (6 * 64**2))
    assert twice["flop_rate"] == pytest.approx(2 * product(64)[0] / 18e-6)
    assert twice["byte_rate"] == pytest.approx(2 * product(64)[1] / 18e-6)
    assert (twice["peak_flop_rate"], twice["peak_byte_rate"]) == (1e13, 1e12)
