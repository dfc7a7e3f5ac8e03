"""What bounds GPU work: the nearer ceiling, latency, or nothing that is known."""

from __future__ import annotations

import random

import pytest

from traceloom.analyze import kernel_bounds
from traceloom.analyze.kernel_efficiency import BOUNDS
from traceloom.testing import TraceBuilder
from traceloom.trace.trace import Trace

PEAK = {"fp32": 1e12, "memory": 1e12}
SIZE = 1000  # [1000, 1000] x [1000, 1000]: 2e9 FLOP, 12e6 bytes; at these peaks 2 ms against 12 µs


def multiplied(length_us: float, size: int = SIZE, name: str = "aten::mm") -> Trace:
    shapes = [[size, size], [size, size]]
    made = TraceBuilder(device_name="nobody's GPU").step(1, 0, 9000).op(name, 0, 90, shapes=shapes)
    return (
        made.launch("cudaLaunchKernel", 20, 5, correlation=1)
        .kernel("sgemm", 100, length_us, correlation=1)
        .build()
    )


@pytest.mark.parametrize(
    ("trace", "bound"),
    [
        (multiplied(4000), "compute"),  # half of the peak
        (multiplied(8, 20), "latency"),  # 16 ns at the peak, and short
        (multiplied(100, 20), "latency"),  # not short, but nowhere near either ceiling
        (multiplied(20, name="aten::add"), "memory"),
        (multiplied(100, name="mine::operator"), "unknown"),
    ],
)
def test_work_is_bound_by_the_nearer_ceiling_unless_it_is_far_from_both(
    trace: Trace, bound: str
) -> None:
    found = kernel_bounds(trace, PEAK)
    rows = {row["bound"]: row["sum_ns"] for row in found.bounds.to_dicts() if row["count"]}
    assert rows == {bound: trace.gpu_work()["duration_ns"].sum()}
    assert found.known_fraction == (0.0 if bound == "unknown" else 1.0)
    assert found.per_step["bound"].to_list() == [bound]


def test_without_a_peak_nothing_is_known() -> None:
    found = kernel_bounds(multiplied(4000))
    assert found.known_fraction == 0.0
    assert found.kinds["roofline_ns"].to_list() == [None]


def test_bounds_add_up_to_all_work_and_to_busy_time() -> None:
    made = TraceBuilder().kernel("a", 0, 30).kernel("b", 20, 30, stream=8).kernel("c", 90, 10)
    found = kernel_bounds(made.build()).bounds
    assert (found["sum_ns"].sum(), found["exclusive_ns"].sum(), found.height) == (70_000, 60_000, 4)


def test_a_trace_without_gpu_work_has_no_rows() -> None:
    found = kernel_bounds(TraceBuilder().op("aten::mm", 0, 5).build())
    assert (found.bounds.height, found.kinds.height, found.known_fraction) == (0, 0, None)


@pytest.mark.parametrize("seed", range(4))
def test_every_piece_of_work_has_the_bound_of_its_time_and_ceiling(seed: int) -> None:
    """Products of random sizes: 2 n³ operations and 12 n² bytes, at peaks of 10^12 each."""
    chance = random.Random(seed)
    made, sums = TraceBuilder(device_name="nobody's GPU"), dict.fromkeys(BOUNDS, 0)
    for number in range(20):
        size, length = (
            chance.choice([4, 30, 300, 1000, 3000]),
            chance.choice([1, 9, 11, 200, 5000, 60_000]),
        )
        modelled = chance.random() < 0.8
        at = 100_000.0 * number
        made.op("aten::mm" if modelled else "mine::operator", at, 90, shapes=[[size, size]] * 2)
        made.launch("cudaLaunchKernel", at + 20, 5, correlation=number + 1).kernel(
            "sgemm", at + 100, length, correlation=number + 1
        )
        computing, moving = 2 * size**3 / 1e3, 12 * size**2 / 1e3  # ns
        ceiling, ns = max(computing, moving), 1000 * length
        far = (ns < 10_000 and ceiling < 0.25 * ns) or ceiling < 0.05 * ns
        bound = "latency" if far else "compute" if computing > moving else "memory"
        sums[bound if modelled else "unknown"] += ns
    found = kernel_bounds(made.build(), PEAK)
    assert dict(found.bounds.select("bound", "sum_ns").rows()) == sums
    whole = sum(sums.values())
    assert found.known_fraction == pytest.approx(1 - sums["unknown"] / whole)
    assert found.bounds["fraction"].to_list() == pytest.approx([ns / whole for ns in sums.values()])
    assert found.kinds["sum_ns"].sum() == whole
