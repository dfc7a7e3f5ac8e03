"""A job of two ranks, small enough that every number of its report can be worked out by hand.

Three steps of 1,000 µs each. In each step the host calls two operators, a collective and a copy; the GPU works from
100 to 450 µs (`gemm` 300 µs, `add` 50 µs), communicates until 650 µs, and copies from 700 to 750 µs. The collective
begins at 450 µs on rank 0 and at 500 µs on rank 1, which comes later.
"""

from __future__ import annotations

from traceloom.testing import TraceBuilder
from traceloom.trace.session import Session

STEPS = 3
STEP_US = 1_000
COPIED = 1_000_000  # bytes in each step
ELEMENTS = 1_024
WATTS = 100.0  # in the first step; 50 more in each that follows
GEMM_US, ADD_US, COPY_US = 300, 50, 50
COLLECTIVE_US = {0: 200, 1: 150}  # it ends at 650 µs on both
NCCL = "ncclDevKernel_AllReduce_Sum_f32_RING_LL"


def hand_rank(
    rank: int,
    name: str = "gemm",
    *,
    begin_us: float = 0,
    times: float = 1,
    generation: str = "2024",
) -> TraceBuilder:
    """One rank of the job.

    Args:
        rank: 0 or 1.
        name: Of its longest kernel.
        begin_us: When its first step begins.
        times: So many times as long lasts everything.
        generation: Of the writer, as `TraceBuilder` has it.
    """
    trace = TraceBuilder(rank=rank, world_size=2, process=100 + rank, generation=generation)
    for step in range(STEPS):
        first = 10 * step + 1  # of the correlations of the step

        def at(time_us: float, step: int = step) -> float:
            return begin_us + (STEP_US * step + time_us) * times

        trace.step(step, at(0), STEP_US * times).counter("power", at(5), WATTS + 50 * step)
        trace.op("aten::mm", at(10), 100 * times).launch(
            "cudaLaunchKernel", at(20), 5 * times, correlation=first
        )
        trace.kernel(name, at(100), GEMM_US * times, correlation=first)
        trace.op("aten::add", at(120), 30 * times).launch(
            "cudaLaunchKernel", at(130), 5 * times, correlation=first + 1
        )
        trace.kernel("add", at(400), ADD_US * times, correlation=first + 1)
        trace.collective("allreduce", at(160), 20 * times, elements=ELEMENTS)
        trace.launch("cudaLaunchKernel", at(165), 5 * times, correlation=first + 2)
        about = trace.collective_args("allreduce", "0", 2, ELEMENTS, "Float")
        lasts_us = COLLECTIVE_US[rank]
        trace.kernel(
            NCCL, at(650 - lasts_us), lasts_us * times, stream=20, correlation=first + 2, **about
        )
        trace.launch("cudaMemcpyAsync", at(200), 5 * times, correlation=first + 3)
        trace.copy(
            "Memcpy HtoD (Pageable -> Device)",
            at(700),
            COPY_US * times,
            bytes=COPIED,
            correlation=first + 3,
        )
    return trace


def hand_job(
    name: str = "gemm", *, begin_us: float = 0, times: float = 1, generation: str = "2024"
) -> Session:
    """Both ranks."""
    ranks = (
        hand_rank(rank, name, begin_us=begin_us, times=times, generation=generation).build()
        for rank in range(2)
    )
    return Session(tuple(ranks), "by hand")
