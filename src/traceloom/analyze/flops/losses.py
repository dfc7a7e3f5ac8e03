"""Softmax, cross entropy and losses of two tensors."""

from __future__ import annotations

import math

from traceloom.analyze.flops.call import SIZES, Call, broadcast, promoted
from traceloom.analyze.flops.registry import MODELS, Work

_SOFTMAX = 5  # largest, difference, exponential, sum, division (log softmax: logarithm and difference for the last)


@MODELS.register(
    "aten::softmax", "aten::_softmax", "aten::log_softmax", "aten::_log_softmax", "aten::_safe_softmax",
    family="softmax",
)  # fmt: skip
def softmax(call: Call) -> Work:
    """5 per element: largest, difference, exponential, sum, division; half precision may be widened to fp32."""
    x = call.tensor(0)
    if call.name in ("aten::_softmax", "aten::_log_softmax"):
        out = "fp32" if call.text(2) == "True" else x.dtype
    else:
        out = call.dtype_code(2) or x.dtype
    return Work(_SOFTMAX * x.numel, x.bytes + x.numel * SIZES[out], x.dtype)


@MODELS.register("aten::_softmax_backward_data", "aten::_log_softmax_backward_data", family="softmax")
def softmax_backward(call: Call) -> Work:
    """(gradient, result): product, sum, difference and product: 4 per element."""
    grad, y = call.tensor(0), call.tensor(1)
    out = call.dtype_code(3) or y.dtype
    return Work(4 * y.numel, grad.bytes + y.bytes + y.numel * SIZES[out], y.dtype)


@MODELS.register("aten::cross_entropy_loss", family="loss")
def cross_entropy(call: Call) -> Work:
    """5 per logit as softmax; the target holds classes or probabilities."""
    x, target = call.tensor(0), call.tensor(1)
    rows = x.numel // (x.shape[1] if len(x.shape) > 1 else x.shape[0])
    weight = call.tensor(2).bytes if call.has(2) else 0
    out = rows if call.integer(3, 1) == 0 else 1
    return Work(_SOFTMAX * x.numel, x.bytes + target.bytes + weight + out * x.size, x.dtype)


@MODELS.register("aten::nll_loss_forward", "aten::nll_loss2d_forward", family="loss")
def nll(call: Call) -> Work:
    """One value of the input for each target; a result each, or one in all, and the weight in all."""
    x, target = call.tensor(0), call.tensor(1)
    out = target.numel if call.integer(3, 1) == 0 else 1
    return Work(target.numel, target.numel * x.size + target.bytes + (out + 1) * x.size, x.dtype)


_REDUCTION = {
    "aten::mse_loss": 2,
    "aten::l1_loss": 2,
    "aten::smooth_l1_loss": 2,
    "aten::huber_loss": 2,
    "aten::kl_div": 2,
    "aten::binary_cross_entropy": 3,
    "aten::binary_cross_entropy_with_logits": 4,
}
"""Where the reduction stands: 0 keeps every element, 1 and 2 leave one."""


@MODELS.register(*_REDUCTION, family="loss")
def of_two(call: Call) -> Work:
    """Difference, square or logarithm, sum: 3 per element."""
    operands = call.tensors()
    shape = broadcast(*(operand.shape for operand in operands))
    dtype = promoted(operands)
    out = math.prod(shape) if call.integer(_REDUCTION[call.name], 1) == 0 else 1
    return Work(3 * math.prod(shape), sum(operand.bytes for operand in operands) + out * SIZES[dtype], dtype)


@MODELS.register(
    "aten::nll_loss_backward", "aten::nll_loss2d_backward", "aten::mse_loss_backward", "aten::smooth_l1_loss_backward",
    "aten::huber_loss_backward", "aten::binary_cross_entropy_backward", family="loss",
)  # fmt: skip
def backward(call: Call) -> Work:
    """(gradient, input, target): the gradient of the input is written whole."""
    grad, x, target = call.tensor(0), call.tensor(1), call.tensor(2)
    moved = grad.bytes + target.bytes + x.numel * x.size
    if "nll" in call.name:  # it needs no values of the input
        return Work(target.numel, moved, x.dtype)
    return Work(3 * x.numel, moved + x.bytes, x.dtype)
