"""What looks large and saves nothing is told with its reason."""

from __future__ import annotations

from traceloom.findings import findings
from traceloom.testing.trace_builder import TraceBuilder
from traceloom.trace.session import Session


def test_exposed_communication_that_hides_nothing_is_an_abstention_with_its_reason() -> None:
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
    assert "exposed-communication" not in {finding.slug for finding in ranked.time}
    (said,) = [one for one in ranked.abstentions if one.slug == "exposed-communication"]
    assert "overlapping it saves nothing" in said.reason
    assert "700" in said.reason
