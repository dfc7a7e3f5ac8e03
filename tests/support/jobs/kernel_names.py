"""Names of kernels as they stand in traces of today's training jobs."""

from __future__ import annotations

_TILE = "tilesize128x128x64_warpgroupsize1x1x1_execute_segment_k_off_kernel__5x_cublas"
_ATEN = "void at::native::"
_HIDDEN = f"{_ATEN}(anonymous namespace)::"

NORM = f"{_HIDDEN}vectorized_layer_norm_kernel<c10::BFloat16, float>(int, float)"
NORM_BACK = f"{_HIDDEN}layer_norm_grad_input_kernel_vectorized<c10::BFloat16, float>()"
EMBED = f"{_HIDDEN}indexSelectLargeIndex<c10::BFloat16, long, unsigned int, 2, 2, -2, true>()"
SOFTMAX = f"{_HIDDEN}cunn_SoftMaxForward<4, float, float, float, LogSoftMaxForwardEpilogue>()"
ADAM = f"{_HIDDEN}multi_tensor_apply_kernel<FusedOptimizerTensorListMetadata<4>, FusedAdamMathFunctor<float, 4>>()"
GROUPED = "void cutlass::device_kernel<at::cuda::detail::enable_3x_kernel_for_sm9x<cutlass::gemm::kernel::GemmUniversal<>>>()"


def product(layout: str) -> str:
    """A matrix product; `layout`: `tn`, `nn`, `nt`."""
    return f"sm90_xmma_gemm_bf16bf16_bf16f32_f32_{layout}_n_{_TILE}"


def flash(part: str, traits: str) -> str:
    """FlashAttention: `fwd`, or `bwd_dq_dk_dv_loop` with the traits `bwd`."""
    kinds = "128, 128, 64, 4, false, false, cutlass::bfloat16_t"
    return f"void flash::flash_{part}_kernel<Flash_{traits}_kernel_traits<{kinds}>>(flash::Flash_{traits}_params)"


def pointwise(functor: str) -> str:
    """An element-wise kernel."""
    name = f"at::native::{functor}"
    return f"{_ATEN}vectorized_elementwise_kernel<4, {name}, std::array<char*, 3ul>>(int, {name})"
