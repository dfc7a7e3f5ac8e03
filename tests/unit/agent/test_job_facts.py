"""What a capture tells of its job: FLOPs per step, types, roofline and copies, counted by hand."""

from __future__ import annotations

from pathlib import Path

import msgspec

from traceloom.agent.topline import TracedFacts, load_traced_facts
from traceloom.testing import TraceBuilder

GEMM = {
    "bf16": "sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64",
    "tf32": "sm80_xmma_gemm_tf32f32_tf32f32_f32",
}
TYPES = {"bf16": "c10::BFloat16", "tf32": "float"}


def _facts(path: Path) -> TracedFacts:
    return msgspec.convert(load_traced_facts(str(path)), TracedFacts)


def _trace(path: Path, *, unmodelled_us: float = 0.0, steps: int = 4) -> Path:
    """Each step: a product of 2·100³ FLOPs in BF16, one of 2·50³ in TF32, and 1 MB to the device."""
    made = TraceBuilder(device_name="NVIDIA H100 80GB HBM3")
    correlation = 0

    def launch(at: float, name: str) -> int:
        nonlocal correlation
        correlation += 1
        made.launch(name, at, 1, correlation=correlation)
        return correlation

    for step in range(steps):
        at = 1000.0 * step
        made.step(step, at, 1000)
        for kind, size, begin in (("bf16", 100, 10), ("tf32", 50, 100)):
            made.op(
                "aten::mm",
                at + begin,
                8,
                shapes=[[size, size], [size, size]],
                types=[TYPES[kind]] * 2,
            )
            made.kernel(
                GEMM[kind],
                at + begin + 20,
                50,
                correlation=launch(at + begin + 2, "cudaLaunchKernel"),
            )
        made.op("aten::mul", at + 180, 8, shapes=[[10, 10], [10, 10]], types=[TYPES["bf16"]] * 2)
        made.kernel(
            "vectorized_elementwise_kernel",
            at + 195,
            5,
            correlation=launch(at + 182, "cudaLaunchKernel"),
        )
        made.copy(
            "Memcpy HtoD (Pinned -> Device)",
            at + 300,
            90,
            bytes=1_000_000,
            correlation=launch(at + 200, "cudaMemcpyAsync"),
        )
        if unmodelled_us:
            made.kernel(
                "secret", at + 400, unmodelled_us, correlation=launch(at + 390, "cudaLaunchKernel")
            )
    return made.write(path)


def test_flops_types_and_copies_of_a_step(tmp_path: Path) -> None:
    facts = _facts(_trace(tmp_path / "trace.json"))
    assert facts.flops_per_step == 2 * 100**3 + 2 * 50**3 + 10 * 10, (
        "the sum of vectors is no matrix work"
    )
    assert facts.dtype_mix == {"bf16": 4 * 2 * 100**3, "tf32": 4 * 2 * 50**3}
    assert facts.copied_bytes_per_step == 1_000_000
    assert facts.roofline_ratio is not None
    assert 0 < facts.roofline_ratio < 1


def test_flops_are_no_reference_where_much_of_the_work_is_not_modelled(tmp_path: Path) -> None:
    facts = _facts(_trace(tmp_path / "trace.json", unmodelled_us=100.0))
    assert facts.flops_per_step is None
    assert facts.dtype_mix, "the types are known all the same"


def test_a_trace_without_steps_or_work_tells_nothing(tmp_path: Path) -> None:
    path = TraceBuilder().op("aten::view", 0, 5).write(tmp_path / "trace.json")
    assert _facts(path) == TracedFacts()


def test_a_job_without_a_device_has_its_flops_counted_too(tmp_path: Path) -> None:
    made = TraceBuilder()
    for step in range(4):
        made.step(step, 1000 * step, 1000)
        made.op(
            "aten::mm",
            1000 * step + 10,
            500,
            shapes=[[100, 100], [100, 100]],
            types=["float", "float"],
        )
    assert _facts(made.write(tmp_path / "trace.json")).flops_per_step == 2 * 100**3
