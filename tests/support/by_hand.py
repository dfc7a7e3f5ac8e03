"""One step written by hand, and what one rule says of it."""

from __future__ import annotations

from typing import Any

from traceloom.findings import RULES, Context, Ranked, rank
from traceloom.findings.rule import Message
from traceloom.testing import TraceBuilder
from traceloom.trace.session import Session

BY_SLUG = {rule.slug: rule for rule in RULES}
BUSY = "void at::native::vectorized_elementwise_kernel<4>(int)"
GEMM = "ampere_bf16_s16816gemm_bf16_128x128"


class HandStep(TraceBuilder):
    """A trace of one step that begins at 0; calls and their work are numbered as they come.

    Args:
        length_us: Of the step.
        rank: Whose it is.
        world_size: Of the job.
    """

    def __init__(self, length_us: float, rank: int = 0, world_size: int = 1, **more: Any) -> None:
        super().__init__(rank, world_size, **more)
        self.step(1, 0, length_us)
        self.number = 0

    def launched(
        self,
        name: str,
        call_us: float,
        start_us: float,
        duration_us: float,
        *,
        stream: int = 7,
        **more: Any,
    ) -> HandStep:
        """A kernel, and the call of 4 us that launches it."""
        self.number += 1
        self.launch("cudaLaunchKernel", call_us, 4, correlation=self.number)
        self.kernel(name, start_us, duration_us, stream=stream, correlation=self.number, **more)
        return self

    def copied(
        self, kind: str, call_us: float, start_us: float, duration_us: float, *, size: int
    ) -> HandStep:
        """A copy on a stream of its own, and the call of 4 us that launches it."""
        self.number += 1
        self.launch("cudaMemcpyAsync", call_us, 4, correlation=self.number)
        self.copy(
            f"Memcpy {kind}", start_us, duration_us, bytes=size, stream=20, correlation=self.number
        )
        return self


def context_of(*builders: TraceBuilder) -> Context:
    """What rules are asked about."""
    return Context.of(Session(tuple(builder.build() for builder in builders), "by hand"))


def said(slug: str, *builders: TraceBuilder) -> list[Message]:
    """What one rule says of some traces."""
    return list(BY_SLUG[slug].evaluate(context_of(*builders)))


def ranked(slug: str, *builders: TraceBuilder) -> Ranked:
    """What comes of one rule alone, evaluated on the usual step."""
    return rank(context_of(*builders), [BY_SLUG[slug]], steps=1)
