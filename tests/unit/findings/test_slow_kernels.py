"""Kernels that are slower than the same kernels elsewhere: which kernels are the same, and which are no evidence."""

from __future__ import annotations

from traceloom.findings import findings
from traceloom.testing.trace_builder import TraceBuilder
from traceloom.trace.notice import Finding
from traceloom.trace.session import Session

SIZES = [[64, 64], [64, 64]]
TOOK = [200.0, 900, 200, 900, 200, 200, 200]


def told(
    shapes: list[list[int]], took: list[float], blocks: list[float] | None = None
) -> Finding | None:
    """The finding of a run with kernels of one operator in each of its steps, which take so many µs."""
    made, start, number = TraceBuilder(), 0.0, 0
    for step in range(4):
        made.mark(step, start)
        end = start + 150
        for place, us in enumerate(took):
            number += 1
            at = start + 10 * place
            made.op(
                "own::op", at, 8, **{"Input Dims": shapes, "Input type": ["float"] * len(shapes)}
            )
            made.launch("cudaLaunchKernel", at + 1, 5, correlation=number)
            known = {} if blocks is None else {"blocks per SM": blocks[place]}
            made.kernel("own_kernel", end, us, correlation=number, **known)
            end += us + 1
        made.launch("cudaDeviceSynchronize", start + 100, end - start - 95, correlation=1000 + step)
        start = end + 20
    session = Session((made.mark(4, start).build(),), "made")
    return next((one for one in findings(session).time if one.slug == "slow-kernels"), None)


def test_kernels_that_take_longer_are_told_with_what_that_costs() -> None:
    found = told(SIZES, TOOK)
    assert found is not None
    assert found.saving_ns == 2 * 700_000
    assert found.title.startswith(
        "2 kernels take 1.40 ms longer than the same ones elsewhere in the run"
    )


def test_kernels_of_another_grid_do_other_work() -> None:
    assert told(SIZES, TOOK, [us / 100 for us in TOOK]) is None


def test_shapes_without_a_size_do_not_say_that_kernels_do_the_same() -> None:
    assert told([[], []], TOOK) is None
