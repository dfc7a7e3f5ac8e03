"""FLOPs and bytes of elementwise operators, losses, normalisation and optimizers.

Forward: mean 1, variance 3, subtract and scale 2, weight 1, bias 1 per element; RMS norm: square
and sum 2, scale 1, weight 1. Backward: two sums over the group (4), the gradient of the input (5),
of the weight (2), of the bias (1).
"""

import math

from traceloom.analyze.flops.registry import (
    DTYPE_BYTES,
    MODELS,
    Call,
    Tensor,
    Unknown,
    Work,
    derive_broadcast_shape,
    derive_promoted_dtype,
)

FAMILY = "elementwise"

_ONE_FLOP_OPS = (
    "abs acos acosh add angle asin asinh atan atan2 atanh bitwise_and bitwise_not bitwise_or bitwise_xor ceil celu "
    "clamp clamp_max clamp_min clip copysign cos cosh deg2rad div elu erf erfc erfinv exp exp2 expm1 floor "
    "floor_divide fmod frac gelu hardsigmoid hardswish hardtanh leaky_relu lgamma log log10 log1p log2 log_sigmoid "
    "logaddexp logit masked_fill maximum minimum mish mul nan_to_num neg pow prelu reciprocal relu relu6 remainder "
    "round rsqrt rsub selu sigmoid sign silu sin sinc sinh softplus softshrink sqrt square sub tan tanh threshold "
    "tril triu trunc true_divide xlogy where bitwise_left_shift bitwise_right_shift sgn"
)
_COMPARISON_OPS = "eq ge gt isfinite isinf isnan le logical_and logical_not logical_or logical_xor lt ne isclose isposinf isneginf"
_THREE_FLOP_OPS = "addcmul addcdiv lerp"
_BACKWARD_OPS = (
    "elu_backward gelu_backward hardsigmoid_backward hardswish_backward hardtanh_backward leaky_relu_backward "
    "logit_backward mish_backward sigmoid_backward silu_backward softplus_backward tanh_backward threshold_backward "
    "native_dropout_backward log_sigmoid_backward"
)
_UNARY_OPS = (
    "abs acos acosh angle asin asinh atan atanh bitwise_not ceil celu cos cosh deg2rad elu erf erfc erfinv exp exp2 "
    "expm1 floor frac gelu hardsigmoid hardswish hardtanh isfinite isinf isnan isneginf isposinf leaky_relu lgamma log "
    "log10 log1p log2 log_sigmoid logical_not logit mish nan_to_num neg reciprocal relu relu6 round rsqrt selu sgn "
    "sigmoid sign silu sin sinc sinh softplus softshrink sqrt square tan tanh threshold tril triu trunc"
)
_ARITY = {
    **dict.fromkeys(_UNARY_OPS.split(), 1),
    **dict.fromkeys(
        (
            "where",
            "masked_fill",
            "clamp",
            "clip",
            "addcmul",
            "addcdiv",
            "lerp",
            "log_sigmoid_backward",
        ),
        3,
    ),
}
"""Number of input tensors; two where nothing else is stated."""
_MAX_UNARY_INPUTS = 5  # inputs with numbers and a tensor for the result: `nan_to_num`
_MAX_INPUTS = {"elu_backward": 7}
_FLOAT_RESULT_OPS = (
    "acos acosh angle asin asinh atan atan2 atanh copysign cos cosh deg2rad div erf erfc erfinv exp exp2 expm1 lgamma "
    "log log10 log1p log2 logit reciprocal rsqrt sigmoid sin sinc sinh sqrt tan tanh true_divide xlogy"
)
"""Operators whose result is a floating-point number where the inputs are whole numbers."""
_COPYING_OPS = ("where", "masked_fill", "tril", "triu")


def _list_spellings(names: str) -> list[str]:
    """Returns each name, and the name of its in-place form."""
    return [f"aten::{name}{end}" for name in names.split() for end in ("", "_")]


def _extract_operands(call: Call) -> list[Tensor]:
    """Returns the inputs; a tensor after them is the caller's output tensor, which is only
    written.
    """
    tensors = call.tensors()
    if not tensors:
        raise Unknown("no input is recorded as a tensor")
    name = call.name.removeprefix("aten::").removesuffix("_")
    arity = _ARITY.get(name, 2)
    if len(call.shapes) > _MAX_INPUTS.get(name, _MAX_UNARY_INPUTS if arity == 1 else arity + 2):
        raise Unknown("more inputs are recorded than the operator has")
    return tensors[:arity]


@MODELS.register(
    *_list_spellings(_ONE_FLOP_OPS + " " + _THREE_FLOP_OPS),
    *(f"aten::{name}" for name in _BACKWARD_OPS.split()),
    family=FAMILY,
)
def estimate_arithmetic(call: Call) -> Work:
    """One operation per element of the result, 3 of `addcmul` and its like, none where values are
    only chosen.
    """
    if call.name == "aten::where" and len(call.shapes) < 3:
        raise Unknown("how many places are found depends on the data")
    operands, name = _extract_operands(call), call.name.removeprefix("aten::")
    out = operands[0]  # an in-place call writes its first input
    if not name.endswith("_"):  # else the shapes broadcast and the types promote
        dtype = derive_promoted_dtype(
            operands[1:] if name == "where" and len(operands) > 1 else operands
        )
        if name in _FLOAT_RESULT_OPS.split() and dtype in (
            "bool",
            "int8",
            "uint8",
            "int16",
            "int32",
            "int64",
        ):
            dtype = "fp32"
        out = Tensor(derive_broadcast_shape(*(operand.shape for operand in operands)), dtype)
    name = name.rstrip("_")
    per_element = 0 if name in _COPYING_OPS else 3 if name in _THREE_FLOP_OPS.split() else 1
    moved = sum(operand.bytes for operand in operands) + out.numel * out.size
    return Work(per_element * out.numel, moved, out.dtype)


@MODELS.register(*_list_spellings(_COMPARISON_OPS), family=FAMILY)
def estimate_comparison(call: Call) -> Work:
    """One comparison per element; the result has a byte for each, unless it is written into the
    first input.
    """
    operands = _extract_operands(call)
    shape = (
        operands[0].shape
        if call.name.endswith("_")
        else derive_broadcast_shape(*(operand.shape for operand in operands))
    )
    size = operands[0].size if call.name.endswith("_") else 1
    moved = sum(operand.bytes for operand in operands) + math.prod(shape) * size
    return Work(math.prod(shape), moved, derive_promoted_dtype(operands))


@MODELS.register("aten::native_dropout", "aten::_fused_dropout", family=FAMILY)
def estimate_dropout(call: Call) -> Work:
    """2 per element: a comparison and a product; the result, and a mask of a byte per element."""
    x = call.tensor(0)
    return Work(2 * x.numel, x.bytes + x.numel * (x.size + 1), x.dtype)


@MODELS.register("aten::glu", family=FAMILY)
def estimate_glu(call: Call) -> Work:
    """A sigmoid and a product per element of the result, which is half as wide as the input."""
    x = call.tensor(0)
    return Work(x.numel, x.bytes + x.numel // 2 * x.size, x.dtype)


@MODELS.register(
    "_C::silu_and_mul",
    "_C::gelu_and_mul",
    "_C::gelu_tanh_and_mul",
    "_C::mul_and_silu",
    "_C::swigluoai_and_mul",
    "sgl_kernel::silu_and_mul",
    "sgl_kernel::gelu_and_mul",
    "sgl_kernel::gelu_tanh_and_mul",
    "flashinfer::silu_and_mul",
    "flashinfer::gelu_and_mul",
    "flashinfer::gelu_tanh_and_mul",
    "aiter::silu_and_mul",
    "aiter::gelu_and_mul",
    "aiter::gelu_tanh_and_mul",
    family="gated activation",
)
def estimate_gated_activation(call: Call) -> Work:
    """(result, input twice as wide): one activation and one product per element of the result."""
    out, x = call.tensor(0), call.tensor(1)
    return Work(2 * out.numel, out.bytes + x.bytes, x.dtype)


@MODELS.register(
    "aten::fill_",
    "aten::zero_",
    "aten::normal_",
    "aten::uniform_",
    "aten::random_",
    "aten::bernoulli_",
    "aten::exponential_",
    "aten::log_normal_",
    "aten::cauchy_",
    "aten::geometric_",
    family="fill",
)
def estimate_fill(call: Call) -> Work:
    """No arithmetic; the tensor is written once."""
    x = call.tensor(0)
    return Work(0, x.bytes, x.dtype)


@MODELS.register("aten::arange", family="fill")
def estimate_arange(call: Call) -> Work:
    """(end, result) or (start, end, step, result)."""
    out = call.tensors()
    if len(out) != 1:
        raise Unknown("the element type of the result is not recorded")
    numbers = [float(call.text(index)) for index in range(len(call.types) - 1) if call.text(index)]
    if not numbers:
        raise Unknown("the bounds are not recorded")
    start, end, step = (0.0, *numbers, 1.0) if len(numbers) == 1 else (*numbers, 1.0)[:3]
    return Work(0, max(0, math.ceil((end - start) / step)) * out[0].size, out[0].dtype)


# Largest, difference, exponential, sum, division (log softmax: logarithm and difference for the
# last)
_SOFTMAX_FLOPS = 5


@MODELS.register(
    "aten::softmax",
    "aten::_softmax",
    "aten::log_softmax",
    "aten::_log_softmax",
    "aten::_safe_softmax",
    family="softmax",
)
def estimate_softmax(call: Call) -> Work:
    """5 per element: largest, difference, exponential, sum, division; half precision may be widened
    to fp32.
    """
    x = call.tensor(0)
    if call.name in ("aten::_softmax", "aten::_log_softmax"):
        out = "fp32" if call.text(2) == "True" else x.dtype
    else:
        out = call.dtype_code(2) or x.dtype
    return Work(_SOFTMAX_FLOPS * x.numel, x.bytes + x.numel * DTYPE_BYTES[out], x.dtype)


@MODELS.register(
    "aten::_softmax_backward_data", "aten::_log_softmax_backward_data", family="softmax"
)
def estimate_softmax_backward(call: Call) -> Work:
    """(gradient, result): product, sum, difference and product: 4 per element."""
    grad, y = call.tensor(0), call.tensor(1)
    out = call.dtype_code(3) or y.dtype
    return Work(4 * y.numel, grad.bytes + y.bytes + y.numel * DTYPE_BYTES[out], y.dtype)


@MODELS.register("aten::cross_entropy_loss", family="loss")
def estimate_cross_entropy(call: Call) -> Work:
    """5 per logit as softmax; the target holds classes or probabilities."""
    x, target = call.tensor(0), call.tensor(1)
    rows = x.numel // (x.shape[1] if len(x.shape) > 1 else x.shape[0])
    weight = call.tensor(2).bytes if call.has(2) else 0
    out = rows if call.integer(3, 1) == 0 else 1
    return Work(_SOFTMAX_FLOPS * x.numel, x.bytes + target.bytes + weight + out * x.size, x.dtype)


@MODELS.register("aten::nll_loss_forward", "aten::nll_loss2d_forward", family="loss")
def estimate_nll(call: Call) -> Work:
    """One value of the input for each target; a result each, or one in all, and the weight in
    all.
    """
    x, target = call.tensor(0), call.tensor(1)
    out = target.numel if call.integer(3, 1) == 0 else 1
    return Work(target.numel, target.numel * x.size + target.bytes + (out + 1) * x.size, x.dtype)


_REDUCTION_POSITION = {
    "aten::mse_loss": 2,
    "aten::l1_loss": 2,
    "aten::smooth_l1_loss": 2,
    "aten::huber_loss": 2,
    "aten::kl_div": 2,
    "aten::binary_cross_entropy": 3,
    "aten::binary_cross_entropy_with_logits": 4,
}
"""Position of the reduction: 0 keeps every element, 1 and 2 leave one."""


@MODELS.register(*_REDUCTION_POSITION, family="loss")
def estimate_pairwise_loss(call: Call) -> Work:
    """Difference, square or logarithm, sum: 3 per element."""
    operands = call.tensors()
    shape = derive_broadcast_shape(*(operand.shape for operand in operands))
    dtype = derive_promoted_dtype(operands)
    out = math.prod(shape) if call.integer(_REDUCTION_POSITION[call.name], 1) == 0 else 1
    return Work(
        3 * math.prod(shape),
        sum(operand.bytes for operand in operands) + out * DTYPE_BYTES[dtype],
        dtype,
    )


@MODELS.register(
    "aten::nll_loss_backward",
    "aten::nll_loss2d_backward",
    "aten::mse_loss_backward",
    "aten::smooth_l1_loss_backward",
    "aten::huber_loss_backward",
    "aten::binary_cross_entropy_backward",
    family="loss",
)
def estimate_loss_backward(call: Call) -> Work:
    """(gradient, input, target): the gradient of the input is written whole."""
    grad, x, target = call.tensor(0), call.tensor(1), call.tensor(2)
    moved = grad.bytes + target.bytes + x.numel * x.size
    if "nll" in call.name:  # it needs no values of the input
        return Work(target.numel, moved, x.dtype)
    return Work(3 * x.numel, moved + x.bytes, x.dtype)


NORMALISATION_FAMILY = "normalisation"
_CENTRED_NORM_FLOPS, _RMS_NORM_FLOPS, _AFFINE_FLOPS = 6, 3, 1
_NORM_BACKWARD_FLOPS, _RMS_BACKWARD_FLOPS = 9, 6


def _estimate_norm(x: Tensor, affine: list[Tensor], statistics: int, per_element: int) -> Work:
    moved = x.bytes + x.numel * x.size + sum(tensor.bytes for tensor in affine) + statistics
    return Work((per_element + _AFFINE_FLOPS * len(affine)) * x.numel, moved, x.dtype)


def _count_rows(call: Call, x: Tensor, dims_index: int) -> int:
    dims = call.integers(dims_index)
    width = math.prod(dims) if dims else x.shape[-1]
    return x.numel // width if width else 0


@MODELS.register("aten::native_layer_norm", "aten::layer_norm", family=NORMALISATION_FAMILY)
def estimate_layer_norm(call: Call) -> Work:
    """(input, shape, weight, bias, ...): 6 per element, 1 more for weight and bias each; mean,
    deviation in fp32.
    """
    x = call.tensor(0)
    return _estimate_norm(
        x, call.optional(2, 3), 2 * 4 * _count_rows(call, x, 1), _CENTRED_NORM_FLOPS
    )


@MODELS.register(
    "aten::rms_norm", "aten::_fused_rms_norm", "fb::rms_norm", family=NORMALISATION_FAMILY
)
def estimate_rms_norm(call: Call) -> Work:
    """(input, shape, weight, ...): 3 per element, 1 more for a weight; the fused form keeps an fp32
    number per row.
    """
    x = call.tensor(0)
    weight_inputs = (1, 2) if call.name.startswith("fb::") else (2,)
    rows = 4 * _count_rows(call, x, 1) if call.name == "aten::_fused_rms_norm" else 0
    return _estimate_norm(x, call.optional(*weight_inputs), rows, _RMS_NORM_FLOPS)


@MODELS.register(
    "aten::batch_norm",
    "aten::native_batch_norm",
    "aten::cudnn_batch_norm",
    "aten::miopen_batch_norm",
    "aten::_native_batch_norm_legit",
    "aten::_batch_norm_impl_index",
    "aten::_batch_norm_with_update",
    "aten::instance_norm",
    family=NORMALISATION_FAMILY,
)
def estimate_batch_norm(call: Call) -> Work:
    """(input, weight, bias, running mean, running variance, training, ...): frozen statistics are
    read, not made.
    """
    x = call.tensor(0)
    affine, running = call.optional(1, 2), call.optional(3, 4)
    training = call.flag(5)
    channel_bytes = sum(tensor.bytes for tensor in running) * (2 if training else 1)
    return _estimate_norm(x, affine, channel_bytes, _CENTRED_NORM_FLOPS if training else 2)


@MODELS.register("aten::group_norm", "aten::native_group_norm", family=NORMALISATION_FAMILY)
def estimate_group_norm(call: Call) -> Work:
    """As layer norm; mean and deviation are kept for each sample and group where the call names the
    groups.
    """
    x = call.tensor(0)
    affine = call.optional(*((1, 2) if call.name.endswith("native_group_norm") else (2, 3)))
    groups = call.integer(6) if call.name.endswith("native_group_norm") else 0
    return _estimate_norm(x, affine, 2 * x.size * x.shape[0] * groups, _CENTRED_NORM_FLOPS)


_BACKWARD_INPUTS = {
    "aten::native_layer_norm_backward": (0, 1, (3, 4), (5, 6)),
    "aten::_fused_rms_norm_backward": (0, 1, (3,), (4,)),
    "aten::cudnn_batch_norm_backward": (1, 0, (5, 6), (2,)),
    "aten::miopen_batch_norm_backward": (1, 0, (5, 6), (2,)),
    "aten::native_batch_norm_backward": (0, 1, (5, 6), (2,)),
    "aten::batch_norm_backward": (0, 1, (5, 6), (2,)),
    "aten::native_group_norm_backward": (0, 1, (2, 3), (4,)),
}
"""Positions of gradient and input, of what the forward pass saved, and of the weight (with a bias,
where there is one).
"""


@MODELS.register(*_BACKWARD_INPUTS, family=NORMALISATION_FAMILY)
def estimate_norm_backward(call: Call) -> Work:
    """Reads gradient, input, statistics and weight; writes the gradients of input, weight and
    bias.
    """
    at_grad, at_input, saved, at_affine = _BACKWARD_INPUTS[call.name]
    grad, x = call.tensor(at_grad), call.tensor(at_input)
    affine = call.optional(*at_affine)
    per_element = _NORM_BACKWARD_FLOPS + (3 if affine else 0)
    written = sum(tensor.bytes for tensor in affine)
    if "rms_norm" in call.name:  # it has no bias
        per_element = _RMS_BACKWARD_FLOPS + 2 * len(affine)
    elif "layer_norm" not in call.name:  # the bias is not an input, and as large as the weight
        written *= 2
    read = sum(tensor.bytes for tensor in (*call.optional(*saved), *affine[:1]))
    return Work(
        per_element * x.numel, grad.bytes + x.bytes + x.numel * x.size + read + written, x.dtype
    )


@MODELS.register(
    "_C::rms_norm",
    "sgl_kernel::rmsnorm",
    "sgl_kernel::gemma_rmsnorm",
    "flashinfer::rmsnorm",
    "flashinfer::norm",
    "aiter::rms_norm",
    "aiter::rmsnorm2d_fwd",
    "aiter::rmsnorm",
    family=NORMALISATION_FAMILY,
)
def estimate_engine_rms_norm(call: Call) -> Work:
    """Serving engines write the result into their first input; some calls of aiter return it."""
    if call.name in ("aiter::rms_norm", "aiter::rmsnorm2d_fwd"):
        x, weight = call.tensor(0), call.tensor(1)
        return _estimate_norm(x, [weight], 0, _RMS_NORM_FLOPS)
    out, x, weight = call.tensor(0), call.tensor(1), call.tensor(2)
    return Work(
        (_RMS_NORM_FLOPS + _AFFINE_FLOPS) * x.numel, out.bytes + x.bytes + weight.bytes, x.dtype
    )


@MODELS.register(
    "_C::fused_add_rms_norm",
    "sgl_kernel::fused_add_rmsnorm",
    "sgl_kernel::gemma_fused_add_rmsnorm",
    "flashinfer::fused_add_rmsnorm",
    family=NORMALISATION_FAMILY,
)
def estimate_engine_add_rms_norm(call: Call) -> Work:
    """(input, residual, weight): both are read and written."""
    x, residual, weight = call.tensor(0), call.tensor(1), call.tensor(2)
    if x.shape != residual.shape:
        raise Unknown("the recorded shapes are no sum and normalisation")
    return Work(
        (1 + _RMS_NORM_FLOPS + _AFFINE_FLOPS) * x.numel,
        2 * (x.bytes + residual.bytes) + weight.bytes,
        x.dtype,
    )


@MODELS.register(
    "aiter::add_rmsnorm",
    "aiter::rmsnorm2d_fwd_with_add",
    "aiter::rmsnorm2d_fwd_with_add_ck",
    family=NORMALISATION_FAMILY,
)
def estimate_aiter_add_rms_norm(call: Call) -> Work:
    """(result, input, residual, new residual, weight): everything once."""
    x = call.tensor(1)
    if any(call.tensor(index).shape != x.shape for index in (0, 2, 3)):
        raise Unknown("the recorded shapes are no sum and normalisation")
    moved = sum(call.tensor(index).bytes for index in range(5))
    return Work((1 + _RMS_NORM_FLOPS + _AFFINE_FLOPS) * x.numel, moved, x.dtype)


@MODELS.register(
    "_C::rms_norm_static_fp8_quant",
    "_C::rms_norm_dynamic_per_token_quant",
    "_C::fused_add_rms_norm_static_fp8_quant",
    family=NORMALISATION_FAMILY,
)
def estimate_engine_rms_norm_quant(call: Call) -> Work:
    """(result, input, ...): everything once, the sum with a residual reads and writes that."""
    out, x = call.tensor(0), call.tensor(1)
    residual_bytes = call.tensor(2).bytes if "fused_add" in call.name else 0
    extra_flops = 3 if "fused_add" in call.name else 2
    return Work(
        (_RMS_NORM_FLOPS + _AFFINE_FLOPS + extra_flops) * x.numel,
        out.bytes + sum(t.bytes for t in call.tensors()[1:]) + residual_bytes,
        x.dtype,
    )


OPTIMIZER_FAMILY = "optimizer"

_ONE_FLOP_FOREACH_OPS = (
    "abs add ceil clamp_max clamp_min cos div erf erfc exp expm1 floor frac lgamma log log10 log1p log2 maximum "
    "minimum mul neg pow reciprocal round rsqrt sigmoid sign sin sqrt sub tan tanh trunc"
)
_FOREACH_FLOPS = {
    **dict.fromkeys(_ONE_FLOP_FOREACH_OPS.split(), 1),
    "addcmul": 3,
    "addcdiv": 3,
    "lerp": 3,
    "copy": 0,
}


@MODELS.register(
    *(f"aten::_foreach_{name}{end}" for name in _FOREACH_FLOPS for end in ("", "_")),
    family=OPTIMIZER_FAMILY,
)
def estimate_foreach(call: Call) -> Work:
    """Every list once; the in-place form writes its first list, `copy` does not read it."""
    lists = [call.tensor_list(index) for index in range(len(call.types)) if call.is_list(index)]
    first = lists[0]
    written = sum(tensor.bytes for tensor in first)
    read = sum(tensor.bytes for part in lists for tensor in part) + sum(
        tensor.bytes for tensor in call.tensors()
    )
    short = call.name.removeprefix("aten::_foreach_").rstrip("_")
    if short == "copy":
        read -= written
    return Work(
        _FOREACH_FLOPS[short] * sum(tensor.numel for tensor in first),
        read + written,
        first[0].dtype,
    )


@MODELS.register("aten::_foreach_zero_", "aten::_foreach_norm", family=OPTIMIZER_FAMILY)
def estimate_foreach_norm(call: Call) -> Work:
    """The norm: square and sum, one number per tensor."""
    first, norm = call.tensor_list(0), call.name.endswith("norm")
    moved = sum(tensor.bytes + norm * tensor.size for tensor in first)
    return Work(2 * norm * sum(tensor.numel for tensor in first), moved, first[0].dtype)


# Weight decay 1, first moment 3, second moment 4, root, division and sum 3, step 3
_ADAM_FLOPS = 14
_FUSED_OPTIMIZERS = {
    "aten::_fused_adam_": (_ADAM_FLOPS, (0, 1, 2, 3), 3),
    "aten::_fused_adamw_": (_ADAM_FLOPS, (0, 1, 2, 3), 3),
    "aten::_fused_sgd_": (4, (0, 1, 2), 2),
    "aten::_fused_adagrad_": (7, (0, 1, 2), 2),
}
"""Operations per element, the lists that are read, and how many of them are written (not the
gradients).
"""


@MODELS.register(*_FUSED_OPTIMIZERS, family=OPTIMIZER_FAMILY)
def estimate_fused_optimizer(call: Call) -> Work:
    """Parameters, gradients, moments: all read; all but the gradients written."""
    per_element, list_inputs, written = _FUSED_OPTIMIZERS[call.name]
    lists = [
        call.tensor_list(index)
        for index in list_inputs
        if call.is_list(index) and call.shapes[index]
    ]
    parameters = lists[0]
    moved = sum(tensor.bytes for part in lists for tensor in part)
    moved += min(written, len(lists) - 1) * sum(tensor.bytes for tensor in parameters)
    return Work(
        per_element * sum(tensor.numel for tensor in parameters), moved, parameters[0].dtype
    )
