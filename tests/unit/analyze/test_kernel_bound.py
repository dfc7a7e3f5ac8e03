"""What bounds GPU work: the nearer ceiling, latency, or nothing that is known."""

from __future__ import annotations

import pytest

from traceloom.analyze import kernel_bounds
from traceloom.model import Trace
from traceloom.testing import TraceBuilder

PEAK = {"fp32": 1e12, "memory": 1e12}
SIZE = 1000  # [1000, 1000] x [1000, 1000]: 2e9 FLOP, 12e6 bytes; at these peaks 2 ms against 12 µs


def multiplied(length_us: float, size: int = SIZE, name: str = "aten::mm") -> Trace:
    shapes = [[size, size], [size, size]]
    made = TraceBuilder(device_name="nobody's GPU").step(1, 0, 9000).op(name, 0, 90, shapes=shapes)
    return made.launch("cudaLaunchKernel", 20, 5, correlation=1).kernel("sgemm", 100, length_us, correlation=1).build()


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
def test_work_is_bound_by_the_nearer_ceiling_unless_it_is_far_from_both(trace: Trace, bound: str) -> None:
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
