"""Copies and tiny operators of runs on the host."""

from __future__ import annotations

import pytest

from traceloom.findings import findings
from traceloom.findings.ranking import Ranked
from traceloom.testing.trace_builder import TraceBuilder
from traceloom.trace.notice import Finding
from traceloom.trace.session import Session

STEP = 20_000


def run(
    *, copies: int = 0, tiny: int = 0, name: str = "aten::contiguous", device: bool = False
) -> Ranked:
    """Four steps of a product of 10 ms, with copies of 500 µs and pairs of operators of 5 µs each."""
    built, at = TraceBuilder(), 0
    for number in range(4):
        built.mark(number, at)
        for _ in range(copies):
            built.op(name, at, 500).op("aten::copy_", at + 20, 470)
            at += 505
        for _ in range(tiny):
            built.op("aten::mul", at, 4).op("aten::add", at + 5, 4)
            at += 10
        built.op("aten::mm", at, 10_000)
        if device:
            built.launch("cudaLaunchKernel", at + 1, 3, correlation=number + 1)
            built.kernel("gemm", at + 10, 9_000, correlation=number + 1)
        at += 10_001
        built.annotation("Optimizer.step#SGD.step", at, 1_000).op("aten::copy_", at + 10, 900)
        at += 1_001
    return findings(Session((built.mark(4, at).build(),), "made"))


def of(ranked: Ranked, slug: str) -> list[Finding]:
    return [finding for finding in ranked.time if finding.slug == slug]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", ["aten::contiguous", "aten::clone", "aten::to", "aten::reshape"])
def test_copies_save_what_they_take(name: str) -> None:
    (finding,) = of(run(copies=8, name=name), "host-copies")
    assert finding.saving_ns == pytest.approx(8 * 500_000, rel=0.02)
    assert "8 copies" in finding.title
    assert name in finding.title


def test_copies_of_the_optimizer_and_operators_that_copy_nothing_are_none() -> None:
    assert not of(run(), "host-copies")
    assert not of(run(copies=8, name="aten::matmul"), "host-copies")


def test_the_same_few_operators_again_and_again_save_all_but_one_of_each() -> None:
    (finding,) = of(run(tiny=500), "tiny-operators")
    assert finding.saving_ns == pytest.approx(499 / 500 * 500 * 10_000, rel=0.02)
    assert "1 000 tiny operators" in finding.title.replace("\u202f", " ").replace("\xa0", " ")


def test_a_few_of_them_are_a_model() -> None:
    assert not of(run(tiny=20), "tiny-operators")


def test_those_that_make_a_batch_are_the_loaders() -> None:
    built, at = TraceBuilder(), 0
    for number in range(4):
        built.mark(number, at).annotation(
            "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__", at, 12_900
        )
        for _ in range(64):
            at += 200
            built.op("aten::full", at - 20, 10)
        built.op("aten::mm", at + 200, 10_000)
        at += 10_300
    ranked = findings(Session((built.mark(4, at).build(),), "made"))
    assert ranked.time[0].slug == "data-starved"
    assert not of(ranked, "tiny-operators")


@pytest.mark.sampled(1)
@pytest.mark.parametrize("slug", ["host-copies", "tiny-operators"])
def test_with_a_device_others_tell_that(slug: str) -> None:
    assert slug in {
        abstention.slug for abstention in run(copies=8, tiny=500, device=True).abstentions
    }


def test_what_a_closure_does_inside_the_optimizer_is_not_the_optimizers() -> None:
    built, at = TraceBuilder(), 0
    for number in range(3):
        built.mark(number, at).annotation("Optimizer.step#Adam.step", at, 9_000)
        built.op("aten::linear", at + 10, 3_000, sequence=5)
        name = "autograd::engine::evaluate_function: AddmmBackward0"
        built.op(name, at + 3_100, 3_000, sequence=5, forward_thread=1)
        for update in range(20):
            begin = at + 6_200 + 100 * update
            correlation = 100 * number + update + 1
            built.op("aten::addcmul_", begin, 90).launch(
                "cudaLaunchKernel", begin + 5, 80, correlation=correlation
            )
            built.kernel("adam", begin + 90, 5, correlation=correlation)
        at += 10_000
    ranked = findings(Session((built.mark(3, at).build(),), "made"))
    (finding,) = of(ranked, "unfused-optimizer")
    assert "3.00 ms of host time" in finding.title  # of the 9 ms in its annotation
