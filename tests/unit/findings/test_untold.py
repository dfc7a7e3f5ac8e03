"""What looks large, and what can be done about it."""

from __future__ import annotations

from traceloom.findings import findings
from traceloom.testing.trace_builder import TraceBuilder
from traceloom.trace.session import Session


def test_exposed_communication_that_ends_the_step_is_found_though_nothing_hides_it() -> None:
    made, at, number = TraceBuilder(rank=0, world_size=2), 0, 0
    for step in range(4):
        made.mark(step, at)
        made.launch("cudaLaunchKernel", at + 10, 5, correlation=number + 1)
        made.kernel("gemm", at + 20, 300, stream=7, correlation=number + 1)
        made.launch("cudaLaunchKernel", at + 20, 5, correlation=number + 2)
        made.kernel(
            "ncclDevKernel_AllReduce_Sum_f32_RING_LL",
            at + 330,
            700,
            stream=20,
            correlation=number + 2,
        )
        made.launch(
            "cudaDeviceSynchronize", at + 30, 1002, correlation=number + 3
        )  # the host itself waits for it
        number += 3
        at += 1050
    ranked = findings(Session((made.mark(4, at).build(),), "made"))
    finding = ranked.time[0]
    assert finding.slug == "exposed-communication"
    assert finding.title == "700 µs of all_reduce end the step, with nothing left to overlap"
    assert finding.saving_ns == 700_000
    assert "bucket_cap_mb" in finding.advice
    assert "exposed-communication" not in {one.slug for one in ranked.abstentions}
