"""Which kind of work each kernel is, and how the time of a GPU is shared among kinds."""

from __future__ import annotations

import json
from importlib.resources import files
from pathlib import Path

import polars as pl
import pytest

from traceloom.analyze import KindRule, kernel_kinds, read_kind_rules
from traceloom.analyze.kernel_kinds import PRIORITY, classify_kinds
from traceloom.analyze.kernel_rules import WORK_KINDS, load_built_in_kind_rules
from traceloom.errors import InputError, UsageError
from traceloom.testing import TraceBuilder
from traceloom.trace.trace import Trace

TABLE = json.loads(
    files("traceloom.analyze").joinpath("kind_rules.json").read_text(encoding="utf-8")
)
ADD = "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>, std::array<char*, 3ul> >(int)"
GEMM = "ampere_sgemm_128x64_nn"
NCCL = "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)"


def launched(kernel: str, op: str = "", under: str = "") -> Trace:
    """One kernel, launched by `op` under the annotation or operator `under`."""
    made = TraceBuilder()
    if under:
        made = made.annotation(under, 0, 90) if "#" in under else made.op(under, 0, 90)
    if op:
        made.op(op, 10, 70)
    return (
        made.launch("cudaLaunchKernel", 20, 5, correlation=1)
        .kernel(kernel, 100, 50, correlation=1)
        .build()
    )


def told(kernel: str, op: str = "", under: str = "") -> tuple[str, str]:
    row = classify_kinds(launched(kernel, op, under)).row(0, named=True)
    return row["kind"], row["rule"]


@pytest.mark.sampled(14)
@pytest.mark.parametrize("row", TABLE, ids=lambda row: row["rule"])
def test_each_rule_decides_its_example(row: dict[str, str]) -> None:
    found = told(row["example"], row.get("example_op", ""), row.get("example_under", ""))
    assert found == (row["kind"], row["rule"])


def test_rules_have_unique_names_and_reasons() -> None:
    names = [row["rule"] for row in TABLE]
    assert len(set(names)) == len(names)
    assert all(row["why"] for row in TABLE)
    assert [rule.name for rule in load_built_in_kind_rules()] == names


@pytest.mark.parametrize(
    ("kernel", "op", "under", "kind"),
    [
        (GEMM, "aten::addmm", "", "gemm"),
        (GEMM, "aten::cudnn_convolution", "", "convolution"),
        (GEMM, "aten::bmm", "aten::_scaled_dot_product_attention_math", "attention"),
        (
            GEMM,
            "aten::mm",
            "Optimizer.step#Muon.step",
            "gemm",
        ),  # a product is one, whoever asks for it
        (ADD, "aten::add", "", "elementwise"),
        (ADD, "aten::add_", "Optimizer.step#SGD.step", "optimizer"),
        (ADD, "aten::add_", "Optimizer.zero_grad#SGD.zero_grad", "optimizer"),
        (ADD, "aten::_foreach_add_", "", "optimizer"),
        (ADD, "aten::native_layer_norm", "", "normalisation"),
        (
            ADD,
            "aten::add",
            "aten::native_layer_norm",
            "elementwise",
        ),  # only what the norm launches itself
        ("some_vendor_kernel_17", "aten::linear", "", "gemm"),
        ("some_vendor_kernel_17", "", "", "other"),
        ("fbgemm_gpu::permute_2D_data_kernel", "", "", "embedding"),
        (
            "triton_poi_fused_convolution_relu_3",
            "",
            "",
            "elementwise",
        ),  # what follows the convolution
        ("void vllm::rotary_embedding_kernel<float>()", "", "", "elementwise"),
        ("fmha_cutlassF_bf16_aligned_64x64_rf_sm80", "", "", "attention"),
        ("_ZN5aiter24add_rmsnorm_quant_kernelIDF16bDF16b", "", "", "normalisation"),
        ("gen_conv_kernel", "", "", "convolution"),
        ("void at::native::lambda_kernel()", "", "", "other"),
        (
            NCCL,
            "",
            "Optimizer.step#ZeRO.step",
            "communication",
        ),  # communication stays that wherever it is launched
        ("__amd_rocclr_copyBuffer.kd", "aten::cudnn_convolution", "", "copy"),
    ],
)
def test_the_name_decides_and_the_launcher_where_the_name_is_ambiguous(
    kernel: str, op: str, under: str, kind: str
) -> None:
    assert told(kernel, op, under)[0] == kind


@pytest.mark.parametrize(
    ("kernel", "kind"),
    [
        ("nvjet_hsh_128x256_64x4_1x2_h_bz_coopA_TNT", "gemm"),
        ("void deep_gemm::fp8_gemm_kernel<4096u, 7168u, 128u, 128u>(float*)", "gemm"),
        ("void ck::kernel_gemm_xdl_cshuffle_v3<ck::GridwiseGemm>()", "gemm"),
        ("fused_moe_kernel", "gemm"),
        ("void Marlin<256, 1, 8, 8, 4, 8>(int4 const*, int4 const*)", "gemm"),
        ("gemm_kernel", "gemm"),  # oneDNN
        (
            "_ZN7ck_tile6kentryILi2ENS_13FmhaFwdKernelINS_28BlockFmhaPipelineQRKSVSAsync",
            "attention",
        ),
        (
            "void flashinfer::BatchPrefillWithPagedKVCacheKernel<flashinfer::KernelTraits>()",
            "attention",
        ),
        (
            "cudnn_generated_fort_native_sdpa_sm80_flash_fprop_wmma_f16_knob_3_64x64x64_4x1x1_kernel0_0",
            "attention",
        ),
        ("micro_sdpa", "attention"),  # oneDNN
        ("void vllm::paged_attention_v2_kernel<c10::BFloat16, 128, 16>()", "attention"),
        ("miopenSp3AsmConvRxSf3x2_v4_f32_stride1", "convolution"),
        ("Im2d2Col.kd", "convolution"),
        ("kernel_grouped_conv_fwd_multiple_abd_xdl_cshuffle", "convolution"),
        ("MIOpenBatchNormFwdTrainSpatial.kd", "normalisation"),
        ("void cuApplyLayerNorm<float, float, float>(float*)", "normalisation"),
        ("_rms_norm_forward_kernel", "normalisation"),
        ("scaled_upper_triang_masked_softmax_warp_forward<half, half, float, 11>", "normalisation"),
        (
            "at::native::xpu::VectorizedElementwiseKernel<4, at::native::xpu::AddFunctor>",
            "elementwise",
        ),
        ("void transformer_engine::cast_transpose_fused_kernel<true>()", "elementwise"),
        ("_triton_rope", "elementwise"),
        ("void vllm::act_and_mul_kernel<c10::BFloat16, &vllm::silu_kernel>()", "elementwise"),
        ("void kOptimizer32bit2State<float, 0>(float*)", "optimizer"),
        ("void at::native::(anonymous namespace)::FusedAdamMathFunctor<float>", "optimizer"),
        ("liger_cross_entropy_kernel", "reduction"),
        ("void vllm::moe::moe_align_block_size_kernel<int>()", "other"),
        ("void at::native::bitonicSortKVInPlace<2, -1, 16, 16>()", "other"),
    ],
)
def test_kernels_of_all_vendors_and_servers(kernel: str, kind: str) -> None:
    assert told(kernel)[0] == kind


def test_names_of_python_frames_are_no_operators() -> None:
    made = TraceBuilder().python("conv2d.py(3): Optimizer.step#", 0, 90).op("aten::add", 10, 70)
    trace = (
        made.launch("cudaLaunchKernel", 20, 5, correlation=1)
        .kernel(GEMM, 100, 50, correlation=1)
        .build()
    )
    assert classify_kinds(trace)["kind"].to_list() == ["gemm"]


def test_copies_and_fills_are_copies_whatever_they_are_called() -> None:
    trace = (
        TraceBuilder()
        .copy("Memcpy HtoD (Pinned -> Device)", 0, 5, bytes=8)
        .fill(10, 5, bytes=8)
        .build()
    )
    assert classify_kinds(trace).select("kind", "rule").rows() == [("copy", "category")] * 2


def test_the_users_rules_come_first_even_before_communication() -> None:
    trace = TraceBuilder().kernel(NCCL, 0, 5).kernel("mine_17", 10, 5).build()
    mine = [KindRule("ours", "attention", "^mine_"), KindRule("ring", "other", "nccl")]
    assert classify_kinds(trace, mine).select("kind", "rule").rows() == [
        ("other", "ring"),
        ("attention", "ours"),
    ]
    assert (
        kernel_kinds(trace, mine).kinds.filter(pl.col("kind") == "attention")["sum_ns"].item()
        == 5000
    )


def test_rules_of_the_user_are_read_and_checked(tmp_path: Path) -> None:
    path = tmp_path / "rules.json"
    path.write_text('[{"rule": "ours", "kind": "gemm", "op": "^my::linear$"}]')
    assert read_kind_rules(path) == (KindRule("ours", "gemm", "", "^my::linear$"),)
    for text in (
        "{",
        "{}",
        '[{"rule": "a"}]',
        '[{"rule": "a", "kind": "gemm"}]',
        '[{"rule": "a", "kind": "gemm", "op": 3}]',
    ):
        path.write_text(text)
        with pytest.raises(InputError):
            read_kind_rules(path)
    for bad in (
        '[{"rule": "a", "kind": "gem", "op": "x"}]',
        '[{"rule": "a", "kind": "gemm", "op": "("}]',
    ):
        path.write_text(bad)
        with pytest.raises(UsageError):
            read_kind_rules(path)


def test_every_kind_has_a_place_in_the_priority() -> None:
    assert sorted(PRIORITY) == sorted(WORK_KINDS)


def test_a_nanosecond_of_several_kinds_belongs_to_the_first_in_the_priority() -> None:
    #      0    10   20   30   40   50   60
    # gemm |---------|
    # nccl      |---------|
    # copy           |---------|         |  two of them overlap each other: their sum is 25, together 20
    trace = (
        TraceBuilder()
        .kernel(GEMM, 0, 20)
        .kernel(NCCL, 10, 20, stream=8)
        .copy("Memcpy HtoD (Pinned -> Device)", 20, 20, bytes=8, stream=9)
        .copy("Memcpy DtoH (Device -> Pinned)", 25, 5, bytes=8, stream=10)
        .kernel("some_kernel", 60, 0)
        .build()
    )
    found = kernel_kinds(trace)
    found.check()
    shares = {
        row["kind"]: (row["count"], row["sum_ns"], row["exclusive_ns"])
        for row in found.kinds.to_dicts()
    }
    assert shares["gemm"] == (1, 20_000, 20_000)
    assert shares["communication"] == (1, 20_000, 10_000)
    assert shares["copy"] == (2, 25_000, 10_000)
    assert shares["other"] == (1, 0, 0)
    device = found.devices.row(0, named=True)
    assert (device["window_ns"], device["busy_ns"], device["idle_ns"], device["sum_ns"]) == (
        60_000,
        40_000,
        20_000,
        65_000,
    )


def test_steps_share_what_runs_in_them() -> None:
    made = TraceBuilder().step(1, 0, 100).step(2, 100, 100).step(3, 200, 100)
    made = (
        made.kernel(GEMM, 10, 20).kernel(GEMM, 90, 30).kernel(ADD, 210, 40)
    )  # the second lies in two steps
    found = kernel_kinds(made.build())
    rows = {(row["step"], row["kind"]): row["exclusive_ns"] for row in found.steps.to_dicts()}
    assert rows == {(1, "gemm"): 30_000, (2, "gemm"): 20_000, (3, "elementwise"): 40_000}
    usual = {row["kind"]: row for row in found.per_step.to_dicts()}
    assert (usual["gemm"]["min_sum_ns"], usual["gemm"]["max_sum_ns"]) == (0, 30_000)
    assert usual["gemm"]["mean_sum_ns"] == pytest.approx(50_000 / 3)


def test_each_device_has_its_own_account() -> None:
    trace = TraceBuilder(devices=2).kernel(GEMM, 0, 10).kernel(ADD, 50, 30, device=1).build()
    found = kernel_kinds(trace)
    found.check()
    assert found.devices.select("device", "window_ns").rows() == [(0, 10_000), (1, 30_000)]
    assert found.kinds.height == 2 * len(WORK_KINDS)


def test_a_trace_without_gpu_work_has_empty_tables_of_the_same_columns() -> None:
    empty, full = (
        kernel_kinds(TraceBuilder().op("aten::add", 0, 5).build()),
        kernel_kinds(launched(GEMM)),
    )
    for name in ("devices", "kinds", "rules", "steps", "per_step"):
        assert getattr(empty, name).height == 0
        assert getattr(empty, name).schema == getattr(full, name).schema


def test_the_documentation_shows_every_rule() -> None:
    docs = Path(__file__).resolve().parents[3] / "docs" / "concepts"
    text = (docs / "kernel-kinds.md").read_text(encoding="utf-8")
    assert [
        row["rule"] for row in TABLE if f"| `{row['rule']}` | {row['kind']} |" not in text
    ] == []
    matrix = json.loads(
        files("traceloom.analyze").joinpath("matrix_rules.json").read_text(encoding="utf-8")
    )
    text = (docs / "kernel-efficiency.md").read_text(encoding="utf-8")
    assert [row["rule"] for row in matrix if f"| `{row['rule']}` |" not in text] == []
