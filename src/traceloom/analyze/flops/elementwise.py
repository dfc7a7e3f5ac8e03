"""Elementwise operators: a number of operations per element of the result; inputs and result once."""

from __future__ import annotations

import math

from traceloom.analyze.flops.call import Call, Tensor, Unknown, broadcast, promoted
from traceloom.analyze.flops.registry import MODELS, Work

FAMILY = "elementwise"

_ONE = (
    "abs acos acosh add angle asin asinh atan atan2 atanh bitwise_and bitwise_not bitwise_or bitwise_xor ceil celu "
    "clamp clamp_max clamp_min clip copysign cos cosh deg2rad div elu erf erfc erfinv exp exp2 expm1 floor "
    "floor_divide fmod frac gelu hardsigmoid hardswish hardtanh leaky_relu lgamma log log10 log1p log2 log_sigmoid "
    "logaddexp logit masked_fill maximum minimum mish mul nan_to_num neg pow prelu reciprocal relu relu6 remainder "
    "round rsqrt rsub selu sigmoid sign silu sin sinc sinh softplus softshrink sqrt square sub tan tanh threshold "
    "tril triu trunc true_divide xlogy where bitwise_left_shift bitwise_right_shift sgn"
)
_COMPARE = (
    "eq ge gt isfinite isinf isnan le logical_and logical_not logical_or logical_xor lt ne isclose isposinf isneginf"
)
_THREE = "addcmul addcdiv lerp"
_BACKWARD = (
    "elu_backward gelu_backward hardsigmoid_backward hardswish_backward hardtanh_backward leaky_relu_backward "
    "logit_backward mish_backward sigmoid_backward silu_backward softplus_backward tanh_backward threshold_backward "
    "native_dropout_backward log_sigmoid_backward"
)
_UNARY = (
    "abs acos acosh angle asin asinh atan atanh bitwise_not ceil celu cos cosh deg2rad elu erf erfc erfinv exp exp2 "
    "expm1 floor frac gelu hardsigmoid hardswish hardtanh isfinite isinf isnan isneginf isposinf leaky_relu lgamma log "
    "log10 log1p log2 log_sigmoid logical_not logit mish nan_to_num neg reciprocal relu relu6 round rsqrt selu sgn "
    "sigmoid sign silu sin sinc sinh softplus softshrink sqrt square tan tanh threshold tril triu trunc"
)
_ARITY = {
    **dict.fromkeys(_UNARY.split(), 1),
    **dict.fromkeys(("where", "masked_fill", "clamp", "clip", "addcmul", "addcdiv", "lerp", "log_sigmoid_backward"), 3),
}
"""How many tensors go in; two where nothing else is said."""
_MOST_OF_UNARY = 5  # inputs with numbers and a tensor for the result: `nan_to_num`
_MOST = {"elu_backward": 7}
_FLOATS = (
    "acos acosh angle asin asinh atan atan2 atanh copysign cos cosh deg2rad div erf erfc erfinv exp exp2 expm1 lgamma "
    "log log10 log1p log2 logit reciprocal rsqrt sigmoid sin sinc sinh sqrt tan tanh true_divide xlogy"
)
"""Those whose result is a floating-point number where the inputs are whole numbers."""
_COPIES = ("where", "masked_fill", "tril", "triu")


def _spelled(names: str) -> list[str]:
    """Each name, and with the underscore of its in-place form."""
    return [f"aten::{name}{end}" for name in names.split() for end in ("", "_")]


def _operands(call: Call) -> list[Tensor]:
    """The inputs; a tensor after them is the caller's output tensor, which is only written."""
    tensors = call.tensors()
    if not tensors:
        raise Unknown("no input is recorded as a tensor")
    name = call.name.removeprefix("aten::").removesuffix("_")
    arity = _ARITY.get(name, 2)
    if len(call.shapes) > _MOST.get(name, _MOST_OF_UNARY if arity == 1 else arity + 2):
        raise Unknown("more inputs are recorded than the operator has")
    return tensors[:arity]


@MODELS.register(*_spelled(_ONE + " " + _THREE), *(f"aten::{name}" for name in _BACKWARD.split()), family=FAMILY)
def arithmetic(call: Call) -> Work:
    """One operation per element of the result, 3 of `addcmul` and its like, none where values are only chosen."""
    if call.name == "aten::where" and len(call.shapes) < 3:
        raise Unknown("how many places are found depends on the data")
    operands, name = _operands(call), call.name.removeprefix("aten::")
    out = operands[0]  # an in-place call writes its first input
    if not name.endswith("_"):  # else the shapes broadcast and the types promote
        dtype = promoted(operands[1:] if name == "where" and len(operands) > 1 else operands)
        if name in _FLOATS.split() and dtype in ("bool", "int8", "uint8", "int16", "int32", "int64"):
            dtype = "fp32"
        out = Tensor(broadcast(*(operand.shape for operand in operands)), dtype)
    name = name.rstrip("_")
    per_element = 0 if name in _COPIES else 3 if name in _THREE.split() else 1
    moved = sum(operand.bytes for operand in operands) + out.numel * out.size
    return Work(per_element * out.numel, moved, out.dtype)


@MODELS.register(*_spelled(_COMPARE), family=FAMILY)
def compare(call: Call) -> Work:
    """One comparison per element; the result has a byte for each, unless it is written into the first input."""
    operands = _operands(call)
    shape = operands[0].shape if call.name.endswith("_") else broadcast(*(operand.shape for operand in operands))
    size = operands[0].size if call.name.endswith("_") else 1
    moved = sum(operand.bytes for operand in operands) + math.prod(shape) * size
    return Work(math.prod(shape), moved, promoted(operands))


@MODELS.register("aten::native_dropout", "aten::_fused_dropout", family=FAMILY)
def dropout(call: Call) -> Work:
    """2 per element: a comparison and a product; the result, and a mask of a byte per element."""
    x = call.tensor(0)
    return Work(2 * x.numel, x.bytes + x.numel * (x.size + 1), x.dtype)


@MODELS.register("aten::glu", family=FAMILY)
def glu(call: Call) -> Work:
    """A sigmoid and a product per element of the result, which is half as wide as the input."""
    x = call.tensor(0)
    return Work(x.numel, x.bytes + x.numel // 2 * x.size, x.dtype)


@MODELS.register(
    "_C::silu_and_mul", "_C::gelu_and_mul", "_C::gelu_tanh_and_mul", "_C::mul_and_silu", "_C::swigluoai_and_mul",
    "sgl_kernel::silu_and_mul", "sgl_kernel::gelu_and_mul", "sgl_kernel::gelu_tanh_and_mul",
    "flashinfer::silu_and_mul", "flashinfer::gelu_and_mul", "flashinfer::gelu_tanh_and_mul", "aiter::silu_and_mul",
    "aiter::gelu_and_mul", "aiter::gelu_tanh_and_mul", family="gated activation",
)  # fmt: skip
def gated(call: Call) -> Work:
    """(result, input twice as wide): one activation and one product per element of the result."""
    out, x = call.tensor(0), call.tensor(1)
    return Work(2 * out.numel, out.bytes + x.bytes, x.dtype)


@MODELS.register(
    "aten::fill_", "aten::zero_", "aten::normal_", "aten::uniform_", "aten::random_", "aten::bernoulli_",
    "aten::exponential_", "aten::log_normal_", "aten::cauchy_", "aten::geometric_", family="fill",
)  # fmt: skip
def fill(call: Call) -> Work:
    """No arithmetic; the tensor is written once."""
    x = call.tensor(0)
    return Work(0, x.bytes, x.dtype)


@MODELS.register("aten::arange", family="fill")
def arange(call: Call) -> Work:
    """(end, result) or (start, end, step, result)."""
    out = call.tensors()
    if len(out) != 1:
        raise Unknown("the element type of the result is not recorded")
    numbers = [float(call.text(at)) for at in range(len(call.types) - 1) if call.text(at)]
    if not numbers:
        raise Unknown("the bounds are not recorded")
    start, end, step = (0.0, *numbers, 1.0) if len(numbers) == 1 else (*numbers, 1.0)[:3]
    count = max(0, math.ceil((end - start) / step))
    return Work(0, count * out[0].size, out[0].dtype)
