"""What findings say: words of the vendor, sums of ranks against the time of all ranks, and who comes first."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from traceloom.findings import RULES, Context, rank
from traceloom.findings.rule import Candidate
from traceloom.findings.vendors import CUDA, OTHER, ROCM, find_vendor, translate
from traceloom.testing import TraceBuilder
from traceloom.trace.session import Session

TEXTS = (
    "set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True; cudaFree in a step",
    "Warm up, or load at the start: CUDA_MODULE_LOADING=EAGER.",
    "CUDA graphs (torch.cuda.graphs, mode='reduce-overhead')",
    "replay it as a CUDA graph",
    "Give communication fewer SMs (NCCL_MAX_CTAS, NCCL_MIN_CTAS)",
    "(nvidia-smi topo -m, nvidia-smi nvlink -s, errors), which way NCCL takes (NCCL_DEBUG=INFO)",
    "torch.backends.cudnn.benchmark=False",
    "no tensor cores",
)


def session(*builders: TraceBuilder) -> Session:
    return Session(tuple(builder.build() for builder in builders), "made")


@pytest.mark.parametrize("text", TEXTS)
def test_no_knob_of_one_vendor_is_advised_on_another(text: str) -> None:
    assert translate(text, CUDA) == text
    for vendor in (ROCM, OTHER):
        assert not re.search(
            r"CUDA|cuda[A-Z]|nvidia|CTAS|cudnn|tensor cores", translate(text, vendor)
        )


def test_the_vendor_is_known_by_calls_and_else_by_the_name_of_the_device() -> None:
    def of(name: str | None, call: str | None = None) -> str:
        builder = TraceBuilder(device_name=name).op("aten::mm", 0, 10)
        if call is not None:
            builder.launch(call, 1, 2, correlation=1)
        return find_vendor([builder.build()])

    assert (
        of(None, "hipLaunchKernel")
        == of("AMD Instinct MI300X")
        == of("AMD Radeon Pro V620")
        == ROCM
    )
    assert of(None, "cudaLaunchKernel") == of("NVIDIA H100 80GB HBM3") == of("Tesla V100") == CUDA
    assert of("AMD Instinct MI300X", "cuLaunchKernel") == CUDA
    assert (
        of(None)
        == of("Intel(R) Data Center GPU Max 1550")
        == of(None, "urEnqueueKernelLaunch")
        == OTHER
    )


def test_garbage_is_summed_over_all_ranks_whose_device_waits_for_it() -> None:
    builders = []
    for number in range(2):
        builder = TraceBuilder(rank=number, world_size=2).step(1, 0, 10_000)
        for at, correlation in ((10, 1), (6_000, 2)):
            builder.op("aten::mm", at, 20)
            builder.launch("cudaLaunchKernel", at + 5, 5, correlation=correlation)
            builder.kernel("gemm", at + 15, 500, correlation=correlation)
        builders.append(builder.python("<built-in function collect>", 600, 5_000))
    context = Context.of(session(*builders))
    (candidate,) = next(rule for rule in RULES if rule.slug == "garbage-collection").evaluate(
        context
    )
    assert isinstance(candidate, Candidate)
    assert context.list_ranks(candidate.changes[0].selection.nodes(context.graph)) == [0, 1]
    assert candidate.title.endswith("summed over 2 ranks")


def overloaded(waited_ns: int, ran_ns: int) -> Session:
    builder = TraceBuilder(device_name=None).step(1, 0, 1_000).op("aten::mm", 10, 900)
    trace = builder.build()
    columns = {
        "thread": [1, 1],
        "time_ns": [10, 10**9],
        "cpu_ns": [5, 5 + ran_ns],
        "waited_ns": [7, 7 + waited_ns],
    }
    meta = replace(trace.meta, capture={"thread_cpu": columns})
    return Session((replace(trace, meta=meta),), "made")


def test_an_overloaded_machine_is_told_before_all_findings() -> None:
    found = rank(Context.of(overloaded(600, 400)), RULES).time
    assert found[0].slug == "overloaded-host"
    assert "60.0 %" in found[0].title
    assert found[0].severity == "high"
    quiet = rank(Context.of(overloaded(100, 900)), RULES).time
    assert "overloaded-host" not in [finding.slug for finding in quiet]
