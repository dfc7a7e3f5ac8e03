"""Frequent sequences of kernels, with planted answers; times in µs."""

from __future__ import annotations

from traceloom.analyze import patterns
from traceloom.testing import TraceBuilder

ADD = "void at::native::vectorized_elementwise_kernel<add>"
MUL = "void at::native::vectorized_elementwise_kernel<mul>"


def run(
    names: list[str], *, stream: int = 7, at: float = 0.0, builder: TraceBuilder | None = None, gap: float = 1
) -> TraceBuilder:
    """Kernels of 10 µs, one after the other."""
    builder = builder or TraceBuilder()
    for number, name in enumerate(names):
        correlation = int(at) + number + 1
        start = at + (10 + gap) * number
        builder.launch("cudaLaunchKernel", start, 1, correlation=correlation, flow=False)
        builder.kernel(name, start + 2, 10, correlation=correlation, stream=stream)
    return builder


def test_a_planted_layer_is_found_with_its_time_and_gaps() -> None:
    names = ["embed", *["gemm", ADD, "norm"] * 6, "loss"]
    found = patterns(run(names).build())
    row = found.sequences.to_dicts()[0]
    assert (row["names"], row["count"], row["length"], row["launch_count"]) == (["gemm", ADD, "norm"], 6, 3, 18)
    assert (row["kernel_ns"], row["gap_ns"], row["span_ns"]) == (180_000, 12_000, 192_000)
    assert row["fraction"] == 18 / 20
    assert not row["elementwise"]
    assert found.occurrences.height == 6
    assert found.occurrences["start_ns"].diff().drop_nulls().to_list() == [33_000] * 5


def test_elementwise_runs_are_candidates_wherever_they_stand() -> None:
    names = ["a", ADD, MUL, "b", ADD, MUL, "c", ADD, MUL, "d"]
    found = patterns(run(names).build()).sequences.filter(kind="elementwise").to_dicts()
    assert [(row["names"], row["count"], row["elementwise"]) for row in found] == [([ADD, MUL], 3, True)]
    assert not patterns(run(["gemm", "norm"] * 4).build()).sequences.filter(kind="elementwise").height


def test_streams_are_searched_together_and_never_across() -> None:
    builder = run(["a", "b", "x", "a", "b"])
    run(["a", "b", "y"], stream=9, at=1000, builder=builder)
    found = patterns(builder.build())
    assert found.sequences.select("names", "count").rows() == [(["a", "b"], 3)]
    assert found.occurrences["stream"].to_list() == [7, 7, 9]
    alone = run(["a"])
    for stream in range(8, 13):
        run(["b"] if stream % 2 == 0 else ["a"], stream=stream, at=100.0 * stream, builder=alone)
    assert not patterns(alone.build()).sequences.height


def test_a_graph_launches_once() -> None:
    builder = TraceBuilder()
    for number in range(3):
        now = 100.0 * number
        builder.launch("cudaGraphLaunch", now, 2, correlation=number + 1)
        for place, name in enumerate(["gemm", "norm", "act"]):
            builder.kernel(name, now + 5 + 10 * place, 10, correlation=number + 1)
        builder.launch("cudaLaunchKernel", now + 50, 2, correlation=number + 11)
        builder.kernel(f"other {number}", now + 55, 2, correlation=number + 11)
    row = patterns(builder.build()).sequences.to_dicts()[0]
    assert (row["names"], row["count"], row["launch_count"], row["gap_ns"]) == (["gemm", "norm", "act"], 3, 3, 0)


def test_steps_tell_how_often_per_step() -> None:
    builder = run(["a", "b"] * 3 + ["x"] + ["a", "b"]).step(1, 0, 66).step(2, 66, 40)
    found = patterns(builder.build())
    assert found.steps.select("sequence", "mean_call_count", "min_call_count", "max_call_count").rows() == [
        (0, 2.0, 1, 3)
    ]


def test_without_gpu_work_there_is_nothing() -> None:
    found = patterns(TraceBuilder().op("aten::mm", 0, 5).build())
    assert (found.sequences.height, found.occurrences.height, found.steps.height, found.work_count) == (0, 0, 0, 0)
