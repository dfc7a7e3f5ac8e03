"""Two runs that differ in one kernel and in their device, and what a comparison and a verdict make of them."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

from support.sessions import busy_step, session_of
from traceloom.analyze import compare, gate, gate_summary
from traceloom.report import comparison, verdict
from traceloom.testing import TraceBuilder
from traceloom.trace.session import Session

if TYPE_CHECKING:
    from traceloom.report.documents.comparison import ComparisonDocument
    from traceloom.report.documents.verdict import VerdictDocument


@cache
def run(name: str, kernel_us: float, device: str) -> Session:
    """Two ranks of six steps each, in which everything has that name."""
    traces = []
    for rank in (0, 1):
        made = TraceBuilder(rank=rank, world_size=2, device_name=device + name, host=name)
        for step in range(6):
            busy_step(made, step, 1000 * step, name=name).python(name, 1000 * step + 20, 100)
            made.launch("cudaLaunchKernel", 1000 * step + 690, 5, correlation=9000 + step)
            made.kernel(f"{name} k", 1000 * step + 700, kernel_us, correlation=9000 + step)
            made.allocation(1000 * step + 20, 1 << 20, address=step + 1)
        traces.append(made)
    return session_of(name, *traces)


@cache
def compared(name: str) -> tuple[ComparisonDocument, VerdictDocument]:
    """The comparison of two runs of that name, and the verdict on them."""
    base, new = run(name, 20, "H100"), run(name, 60, "A100")
    both = comparison.build(compare(base, new), base, new)
    sides = [gate_summary.summarise(session) for session in (base, new)]
    conditions = [gate.parse("step_time > 3%"), gate.parse("kernel:gemm > 1%")]
    judged = gate.judge([sides[0]], [sides[1]], conditions)
    named = [
        (f"{name} {side}", [summary]) for side, summary in zip(("base", "new"), sides, strict=True)
    ]
    return both, verdict.build(judged, *named, strict=False, comparison=both, effect=0.05)
