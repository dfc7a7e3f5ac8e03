"""FLOPs of graph replays from the recording of their capture; times in µs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import polars as pl
import pytest

import traceloom
from support.jobs import ParallelRecipe, parallel_job
from traceloom.analyze.roofline import roofline, select_modelled_work
from traceloom.testing import TraceBuilder
from traceloom.trace.trace import Trace

PEAK = {"bf16": 1e14, "memory": 1e12}
BF = "c10::BFloat16"
SIZES = (100, 200, 100)
FLOPS = sum(2 * size**3 for size in SIZES)


def replays(
    count: int = 2, *, grid: list[int] | None = None, names: tuple[str, ...] = ("a", "b", "c")
) -> TraceBuilder:
    builder = TraceBuilder().step(1, 0, 1000 * count)
    for number in range(count):
        start = 1000 * number
        builder.launch("cudaGraphLaunch", start, 5, correlation=number + 1)
        for place, name in enumerate(names):
            more: dict[str, Any] = {} if grid is None else {"grid": grid}
            builder.kernel(name, start + 20 + 10 * place, 10, correlation=number + 1, **more)
    return builder


def eager(*, grid: list[int] | None = None, work: bool = True) -> TraceBuilder:
    """Each kernel launched by a matrix product of its own; without work only calls that name what they captured."""
    builder = TraceBuilder() if work else TraceBuilder(generation="rocm")
    more: dict[str, Any] = {} if grid is None else {"grid": grid}
    for number, (name, size) in enumerate(zip("abc", SIZES, strict=True)):
        at, shape = 20 * number, [size, size]
        builder.op("aten::mm", at, 15, shapes=[shape, shape], types=[BF, BF])
        if work:
            builder.launch("cudaLaunchKernel", at + 2, 3, correlation=number + 1)
            builder.kernel(name, 500 + 10 * number, 9, correlation=number + 1, **more)
        else:
            builder.launch(
                "hipLaunchKernel",
                at + 2,
                3,
                correlation=number + 1,
                kernel=name,
                flow=False,
                **more,
            )
    return builder


def read(builder: TraceBuilder, path: Path) -> Trace:
    return traceloom.load(str(builder.write(path)), cache=False).traces[0]


def test_every_replay_counts_the_calls_of_the_capture() -> None:
    trace, capture = replays().build(), eager().build()
    assert roofline(trace, PEAK).flops == 0
    found = roofline(trace, PEAK, capture)
    assert found.flops == 2 * FLOPS
    assert found.operators["name"].unique().to_list() == ["aten::mm"]
    assert found.operators["count"].sum() == 6
    assert found.operators["total_ns"].sum() == 60_000
    assert found.unmodelled.height == 0
    step = found.steps.row(0, named=True)
    assert (step["modelled_fraction"], step["flops"]) == (1.0, 2 * FLOPS)
    assert step["hfu"] == pytest.approx(2 * FLOPS / 1e14 / 2e-3)


def test_the_work_of_a_replay_belongs_to_its_launch() -> None:
    trace = replays().build()
    work = select_modelled_work(trace, PEAK, eager().build())
    assert work.height == 6
    assert set(trace.events["name"].gather(work["op"])) == {"cudaGraphLaunch"}
    assert work["flops"].sum() == 2 * FLOPS


def test_calls_that_only_captured_tell_the_shapes_too(tmp_path: Path) -> None:
    capture = read(eager(work=False), tmp_path / "warmup.json")
    assert roofline(replays().build(), PEAK, capture).flops == 2 * FLOPS


def test_a_capture_with_other_grids_is_of_other_shapes(tmp_path: Path) -> None:
    trace = read(replays(grid=[4, 1, 1]), tmp_path / "replays.json")
    same = read(eager(grid=[4, 1, 1]), tmp_path / "same.json")
    other = read(eager(grid=[2, 1, 1]), tmp_path / "other.json")
    assert roofline(trace, PEAK, same).flops == 2 * FLOPS
    found = roofline(trace, PEAK, other)
    assert found.flops == 0
    assert set(found.unmodelled["reason"]) == {
        "the capture ran this kernel with another grid, so with other shapes"
    }


def test_what_the_capture_does_not_tell_stays_unmodelled_with_the_reason() -> None:
    found = roofline(replays(names=("a", "b", "c", "odd")).build(), PEAK, eager().build())
    assert found.flops == 2 * FLOPS
    assert found.unmodelled.select("name", "reason", "count").rows() == [
        ("odd", "no kernel of this name is in the capture", 2)
    ]
    silent = TraceBuilder()
    for number, name in enumerate("abc"):
        silent.op("my::op", 20 * number, 15).launch(
            "cudaLaunchKernel", 20 * number + 2, 3, correlation=number + 1
        )
        silent.kernel(name, 500 + 10 * number, 9, correlation=number + 1)
    reasons = roofline(replays().build(), PEAK, silent.build()).unmodelled["reason"]
    assert set(reasons) == {
        "the capture knows its operator, but not the shapes of its inputs, or there is no model of it"
    }


def test_a_made_job_with_graphs_has_the_flops_of_the_same_job_without() -> None:
    recipes = [ParallelRecipe(steps=2, graphs=graphs, spread=0) for graphs in (True, False)]
    graphs, plain = (parallel_job(recipe).run().traces()[0].build() for recipe in recipes)
    without = roofline(graphs, "H100 SXM").flops
    told, all_of_it = roofline(graphs, "H100 SXM", plain), roofline(plain, "H100 SXM")
    assert without < told.flops == all_of_it.flops
    by_name = [
        one.operators.group_by("name").agg(pl.col("count", "flops").sum()).sort("name")
        for one in (told, all_of_it)
    ]
    assert by_name[0].equals(by_name[1])


def test_attention_of_a_replay_is_that_of_its_batch() -> None:
    """Two replays of one graph, for batches of other lengths; the capture knows none."""
    replayed, captured = TraceBuilder().step(1, 0, 3000), TraceBuilder()
    for number, keys in enumerate((100, 300, 100)):
        batch = f"execute_2_context_0(sq0sk0sqsq0sqsk0)_generation_2(sq2sk{keys}sqsq2sqsk{keys})"
        replayed.annotation(batch, 1000 * number, 900)
        replayed.launch("cudaGraphLaunch", 1000 * number + 5, 5, correlation=number + 1)
        for place, name in enumerate("ab"):
            replayed.kernel(name, 1000 * number + 20 + 10 * place, 10, correlation=number + 1)
    inputs = {
        "vllm::unified_attention": [[2, 8, 64], [2, 4, 64], [2, 4, 64]],
        "aten::mm": [[100, 100]] * 2,
    }
    for number, (name, shapes) in enumerate(inputs.items()):
        captured.op(name, 20 * number, 15, shapes=shapes, types=[BF] * len(shapes))
        captured.launch("cudaLaunchKernel", 20 * number + 2, 3, correlation=number + 1)
        captured.kernel("ab"[number], 500 + 10 * number, 9, correlation=number + 1)
    found = roofline(replayed.build(), PEAK, captured.build())
    assert found.unmodelled.height == 0
    by_name = dict(found.operators.group_by("name").agg(pl.col("flops").sum()).rows())
    assert by_name == {"vllm::unified_attention": 2 * 8 * 500 * 128, "aten::mm": 3 * 2 * 100**3}
