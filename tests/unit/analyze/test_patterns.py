"""Frequent sequences of kernels, with planted answers; times in µs."""

from __future__ import annotations

from collections import defaultdict

import pytest

from support.odd_traces import Row, gpu_rows_of, odd_trace
from traceloom.analyze import patterns
from traceloom.testing import TraceBuilder

ADD = "void at::native::vectorized_elementwise_kernel<add>"
MUL = "void at::native::vectorized_elementwise_kernel<mul>"


def run(
    names: list[str],
    *,
    stream: int = 7,
    at: float = 0.0,
    builder: TraceBuilder | None = None,
    gap: float = 1,
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
    assert (row["names"], row["count"], row["length"], row["launch_count"]) == (
        ["gemm", ADD, "norm"],
        6,
        3,
        18,
    )
    assert (row["kernel_ns"], row["gap_ns"], row["span_ns"]) == (180_000, 12_000, 192_000)
    assert row["fraction"] == 18 / 20
    assert not row["elementwise"]
    assert found.occurrences.height == 6
    assert found.occurrences["start_ns"].diff().drop_nulls().to_list() == [33_000] * 5


def test_elementwise_runs_are_candidates_wherever_they_stand() -> None:
    names = ["a", ADD, MUL, "b", ADD, MUL, "c", ADD, MUL, "d"]
    found = patterns(run(names).build()).sequences.filter(kind="elementwise").to_dicts()
    assert [(row["names"], row["count"], row["elementwise"]) for row in found] == [
        ([ADD, MUL], 3, True)
    ]
    assert (
        not patterns(run(["gemm", "norm"] * 4).build()).sequences.filter(kind="elementwise").height
    )


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
    assert (row["names"], row["count"], row["launch_count"], row["gap_ns"]) == (
        ["gemm", "norm", "act"],
        3,
        3,
        0,
    )


def test_steps_tell_how_often_per_step() -> None:
    builder = run(["a", "b"] * 3 + ["x"] + ["a", "b"]).step(1, 0, 66).step(2, 66, 40)
    found = patterns(builder.build())
    assert found.steps.select(
        "sequence", "mean_call_count", "min_call_count", "max_call_count"
    ).rows() == [(0, 2.0, 1, 3)]


def test_without_gpu_work_there_is_nothing() -> None:
    found = patterns(TraceBuilder().op("aten::mm", 0, 5).build())
    assert (
        found.sequences.height,
        found.occurrences.height,
        found.steps.height,
        found.work_count,
    ) == (0, 0, 0, 0)


# -- against looking at the streams -------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(7))
def test_every_sequence_stands_where_it_is_said_to_with_its_times(seed: int) -> None:
    trace = odd_trace(seed)
    found = patterns(trace, least=2)
    lanes: dict[tuple[int, int], list[Row]] = defaultdict(list)
    for row in gpu_rows_of(trace):
        lanes[row["device"], row["stream"]].append(row)
    assert found.work_count == sum(map(len, lanes.values()))
    assert found.work_ns == sum(row["ns"] for rows in lanes.values() for row in rows)
    for row in found.sequences.to_dicts():
        kernel_ns = gap_ns = span_ns = 0
        taken: set[int] = set()
        own = found.occurrences.filter(sequence=row["sequence"])
        for device, stream, first, last, start, span in own.select(
            "device", "stream", "first", "last", "start_ns", "span_ns"
        ).rows():
            rows = lanes[device, stream]
            at = next(place for place, work in enumerate(rows) if work["event"] == first)
            work = rows[at : at + row["length"]]
            assert [w["name"] for w in work] == row["names"]
            assert (work[-1]["event"], work[0]["start_ns"]) == (last, start)
            assert not taken & {w["event"] for w in work}, "occurrences do not overlap"
            taken |= {w["event"] for w in work}
            assert span == max(w["end_ns"] for w in work) - start
            kernel_ns, span_ns = kernel_ns + sum(w["ns"] for w in work), span_ns + span
            for place in range(at + 1, at + row["length"]):
                gap_ns += max(rows[place]["start_ns"] - max(w["end_ns"] for w in rows[:place]), 0)
        assert (row["count"], row["kernel_ns"], row["gap_ns"], row["span_ns"]) == (
            own.height,
            kernel_ns,
            gap_ns,
            span_ns,
        )
        assert row["fraction"] == pytest.approx(kernel_ns / found.work_ns)


@pytest.mark.parametrize(
    ("shortest", "longest", "least", "most"),
    [(2, 3, 2, 25), (3, 64, 2, 25), (2, 64, 4, 25), (2, 64, 2, 1)],
)
def test_limits_of_a_search_are_kept(shortest: int, longest: int, least: int, most: int) -> None:
    found = patterns(
        odd_trace(1), shortest=shortest, longest=longest, least=least, most=most
    ).sequences
    assert (found["length"] >= shortest).all()
    assert (found["length"] <= longest).all()
    assert (found["count"] >= least).all()
    assert all(part.height <= most for _, part in found.group_by("kind"))
