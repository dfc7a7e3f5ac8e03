"""Normalisations: fixed operations per element (they are bound by memory; the numbers only place them on the picture).

Forward: mean 1, variance 3, subtract and scale 2, weight 1, bias 1 per element; RMS norm: square and sum 2, scale 1,
weight 1. Backward: two sums over the group (4), the gradient of the input (5), of the weight (2), of the bias (1).
"""

from __future__ import annotations

import math

from traceloom.analyze.flops.call import Call, Tensor, Unknown
from traceloom.analyze.flops.registry import MODELS, Work

FAMILY = "normalisation"
_CENTRED, _RMS, _AFFINE = 6, 3, 1
_BACKWARD, _RMS_BACKWARD = 9, 6


def _forward(x: Tensor, affine: list[Tensor], statistics: int, per_element: int) -> Work:
    moved = x.bytes + x.numel * x.size + sum(tensor.bytes for tensor in affine) + statistics
    return Work((per_element + _AFFINE * len(affine)) * x.numel, moved, x.dtype)


def _rows(call: Call, x: Tensor, at: int) -> int:
    dims = call.integers(at)
    width = math.prod(dims) if dims else x.shape[-1]
    return x.numel // width if width else 0


@MODELS.register("aten::native_layer_norm", "aten::layer_norm", family=FAMILY)
def layer_norm(call: Call) -> Work:
    """(input, shape, weight, bias, ...): 6 per element, 1 more for weight and bias each; mean, deviation in fp32."""
    x = call.tensor(0)
    return _forward(x, call.optional(2, 3), 2 * 4 * _rows(call, x, 1), _CENTRED)


@MODELS.register("aten::rms_norm", "aten::_fused_rms_norm", "fb::rms_norm", family=FAMILY)
def rms_norm(call: Call) -> Work:
    """(input, shape, weight, ...): 3 per element, 1 more for a weight; the fused form keeps an fp32 number per row."""
    x = call.tensor(0)
    places = (1, 2) if call.name.startswith("fb::") else (2,)
    rows = 4 * _rows(call, x, 1) if call.name == "aten::_fused_rms_norm" else 0
    return _forward(x, call.optional(*places), rows, _RMS)


@MODELS.register(
    "aten::batch_norm", "aten::native_batch_norm", "aten::cudnn_batch_norm", "aten::miopen_batch_norm",
    "aten::_native_batch_norm_legit", "aten::_batch_norm_impl_index", "aten::_batch_norm_with_update",
    "aten::instance_norm", family=FAMILY,
)  # fmt: skip
def batch_norm(call: Call) -> Work:
    """(input, weight, bias, running mean, running variance, training, ...): frozen statistics are read, not made."""
    x = call.tensor(0)
    affine, running = call.optional(1, 2), call.optional(3, 4)
    training = call.flag(5)
    of_channels = sum(tensor.bytes for tensor in running) * (2 if training else 1)
    return _forward(x, affine, of_channels, _CENTRED if training else 2)


@MODELS.register("aten::group_norm", "aten::native_group_norm", family=FAMILY)
def group_norm(call: Call) -> Work:
    """As layer norm; mean and deviation are kept for each sample and group where the call names the groups."""
    x = call.tensor(0)
    affine = call.optional(*((1, 2) if call.name.endswith("native_group_norm") else (2, 3)))
    groups = call.integer(6) if call.name.endswith("native_group_norm") else 0
    return _forward(x, affine, 2 * x.size * x.shape[0] * groups, _CENTRED)


_BACKWARD_INPUTS = {
    "aten::native_layer_norm_backward": (0, 1, (3, 4), (5, 6)),
    "aten::_fused_rms_norm_backward": (0, 1, (3,), (4,)),
    "aten::cudnn_batch_norm_backward": (1, 0, (5, 6), (2,)),
    "aten::miopen_batch_norm_backward": (1, 0, (5, 6), (2,)),
    "aten::native_batch_norm_backward": (0, 1, (5, 6), (2,)),
    "aten::batch_norm_backward": (0, 1, (5, 6), (2,)),
    "aten::native_group_norm_backward": (0, 1, (2, 3), (4,)),
}
"""Places of gradient and input, of what the forward pass saved, and of the weight (with a bias, where that is one)."""


@MODELS.register(*_BACKWARD_INPUTS, family=FAMILY)
def backward(call: Call) -> Work:
    """Reads gradient, input, statistics and weight; writes the gradients of input, weight and bias."""
    at_grad, at_input, saved, at_affine = _BACKWARD_INPUTS[call.name]
    grad, x = call.tensor(at_grad), call.tensor(at_input)
    affine = call.optional(*at_affine)
    per_element = _BACKWARD + (3 if affine else 0)
    written = sum(tensor.bytes for tensor in affine)
    if "rms_norm" in call.name:  # it has no bias
        per_element = _RMS_BACKWARD + 2 * len(affine)
    elif "layer_norm" not in call.name:  # the bias is no input, and as large as the weight
        written *= 2
    read = sum(tensor.bytes for tensor in (*call.optional(*saved), *affine[:1]))
    return Work(per_element * x.numel, grad.bytes + x.bytes + x.numel * x.size + read + written, x.dtype)


@MODELS.register(
    "_C::rms_norm", "sgl_kernel::rmsnorm", "sgl_kernel::gemma_rmsnorm", "flashinfer::rmsnorm", "flashinfer::norm",
    "aiter::rms_norm", "aiter::rmsnorm2d_fwd", "aiter::rmsnorm", family=FAMILY,
)  # fmt: skip
def engine_rms_norm(call: Call) -> Work:
    """Serving engines write the result into their first input; some calls of aiter return it."""
    if call.name in ("aiter::rms_norm", "aiter::rmsnorm2d_fwd"):
        x, weight = call.tensor(0), call.tensor(1)
        return _forward(x, [weight], 0, _RMS)
    out, x, weight = call.tensor(0), call.tensor(1), call.tensor(2)
    return Work((_RMS + _AFFINE) * x.numel, out.bytes + x.bytes + weight.bytes, x.dtype)


@MODELS.register(
    "_C::fused_add_rms_norm", "sgl_kernel::fused_add_rmsnorm", "sgl_kernel::gemma_fused_add_rmsnorm",
    "flashinfer::fused_add_rmsnorm", family=FAMILY,
)  # fmt: skip
def engine_add_rms_norm(call: Call) -> Work:
    """(input, residual, weight): both are read and written."""
    x, residual, weight = call.tensor(0), call.tensor(1), call.tensor(2)
    if x.shape != residual.shape:
        raise Unknown("the recorded shapes are no sum and normalisation")
    return Work((1 + _RMS + _AFFINE) * x.numel, 2 * (x.bytes + residual.bytes) + weight.bytes, x.dtype)


@MODELS.register(
    "aiter::add_rmsnorm", "aiter::rmsnorm2d_fwd_with_add", "aiter::rmsnorm2d_fwd_with_add_ck", family=FAMILY
)
def aiter_add_rms_norm(call: Call) -> Work:
    """(result, input, residual, new residual, weight): everything once."""
    x = call.tensor(1)
    if any(call.tensor(at).shape != x.shape for at in (0, 2, 3)):
        raise Unknown("the recorded shapes are no sum and normalisation")
    moved = sum(call.tensor(at).bytes for at in range(5))
    return Work((1 + _RMS + _AFFINE) * x.numel, moved, x.dtype)


@MODELS.register(
    "_C::rms_norm_static_fp8_quant", "_C::rms_norm_dynamic_per_token_quant",
    "_C::fused_add_rms_norm_static_fp8_quant", family=FAMILY,
)  # fmt: skip
def engine_rms_norm_quant(call: Call) -> Work:
    """(result, input, ...): everything once, the sum with a residual reads and writes that."""
    out, x = call.tensor(0), call.tensor(1)
    again = call.tensor(2).bytes if "fused_add" in call.name else 0
    more = 3 if "fused_add" in call.name else 2
    return Work(
        (_RMS + _AFFINE + more) * x.numel, out.bytes + sum(t.bytes for t in call.tensors()[1:]) + again, x.dtype
    )
