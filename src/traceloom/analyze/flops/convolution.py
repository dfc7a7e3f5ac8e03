"""Convolutions: 2 · batch · C_out · (C_in / groups) · kernel · output positions; backward the same per gradient."""

from __future__ import annotations

import math

from msgspec import Struct

from traceloom.analyze.flops.call import Call, Unknown
from traceloom.analyze.flops.registry import MODELS, Work

FAMILY = "convolution"


class ConvolutionInputs(Struct, frozen=True):
    """Where the inputs of one spelling of convolution stand; None for what it does not have."""

    stride: int
    padding: int
    dilation: int | None
    groups: int | None
    bias: int | None = 2
    output_padding: int | None = None
    transposed: int | bool = False


_FORWARD = {
    "aten::convolution": ConvolutionInputs(3, 4, 5, 8, output_padding=7, transposed=6),
    "aten::_convolution": ConvolutionInputs(3, 4, 5, 8, output_padding=7, transposed=6),
    "aten::convolution_overrideable": ConvolutionInputs(3, 4, 5, 8, output_padding=7, transposed=6),
    "aten::conv1d": ConvolutionInputs(3, 4, 5, 6),
    "aten::conv2d": ConvolutionInputs(3, 4, 5, 6),
    "aten::conv3d": ConvolutionInputs(3, 4, 5, 6),
    "aten::conv_transpose1d": ConvolutionInputs(3, 4, 7, 6, output_padding=5, transposed=True),
    "aten::conv_transpose2d": ConvolutionInputs(3, 4, 7, 6, output_padding=5, transposed=True),
    "aten::conv_transpose3d": ConvolutionInputs(3, 4, 7, 6, output_padding=5, transposed=True),
    "aten::cudnn_convolution": ConvolutionInputs(3, 2, 4, 5, bias=None),
    "aten::cudnn_convolution_transpose": ConvolutionInputs(4, 2, 5, 6, bias=None, output_padding=3, transposed=True),
    "aten::cudnn_convolution_relu": ConvolutionInputs(3, 4, 5, 6),
    "aten::cudnn_convolution_add_relu": ConvolutionInputs(5, 6, 7, 8, bias=4),
    "aten::miopen_convolution": ConvolutionInputs(4, 3, 5, 6),
    "aten::miopen_depthwise_convolution": ConvolutionInputs(4, 3, 5, 6),
    "aten::miopen_convolution_transpose": ConvolutionInputs(5, 3, 6, 7, output_padding=4, transposed=True),
    "aten::miopen_convolution_relu": ConvolutionInputs(3, 4, 5, 6),
    "aten::mkldnn_convolution": ConvolutionInputs(4, 3, 5, 6),
    "aten::_conv_depthwise2d": ConvolutionInputs(4, 5, 6, None, bias=3),
    "aten::thnn_conv2d": ConvolutionInputs(4, 5, None, None, bias=3),
    "aten::_slow_conv2d_forward": ConvolutionInputs(4, 5, None, None, bias=3),
    "aten::slow_conv_dilated2d": ConvolutionInputs(4, 5, 6, None, bias=3),
    "aten::slow_conv3d_forward": ConvolutionInputs(4, 5, None, None, bias=3),
}


def _macs(x: tuple[int, ...], weight: tuple[int, ...], out: tuple[int, ...], *, transposed: bool) -> int:
    """Multiply-adds: every position of the output (transposed: of the input) meets the whole filter once."""
    return x[0] * math.prod((x if transposed else out)[2:]) * math.prod(weight)


@MODELS.register(*_FORWARD, family=FAMILY)
def forward(call: Call) -> Work:
    """Every position of the result (transposed: of the input) meets the whole filter once, 2 per multiply-add."""
    where = _FORWARD[call.name]
    x, weight = call.tensor(0), call.tensor(1)
    transposed = where.transposed if isinstance(where.transposed, bool) else call.flag(where.transposed)
    rank = len(weight.shape) - 2
    shape = x.shape if len(x.shape) == rank + 2 else (1, *x.shape)
    if len(shape) != rank + 2 or rank < 1:
        raise Unknown("the recorded shapes are no convolution")
    groups = call.integer(where.groups) if where.groups is not None else shape[1] // weight.shape[1]
    stride = call.sizes(where.stride, rank)
    dilation = call.sizes(where.dilation, rank) if where.dilation is not None else [1] * rank
    word = call.text(where.padding).strip('"')
    padding = [0] * rank if word in ("same", "valid") else call.sizes(where.padding, rank)
    sizes = []
    for at, size in enumerate(shape[2:]):
        reach = dilation[at] * (weight.shape[at + 2] - 1)
        if word == "same":
            sizes.append(size)
        elif transposed:
            more = call.sizes(where.output_padding, rank)[at] if where.output_padding is not None else 0
            sizes.append((size - 1) * stride[at] - 2 * padding[at] + reach + more + 1)
        else:
            sizes.append((size + 2 * padding[at] - reach - 1) // stride[at] + 1)
    if min(sizes) < 0 or shape[1] != (weight.shape[0] if transposed else weight.shape[1] * groups):
        raise Unknown("the recorded sizes are no convolution")
    channels = weight.shape[1] * groups if transposed and word != "same" else weight.shape[0]
    out = (shape[0], channels, *sizes)
    more_inputs = call.optional(*([where.bias] if where.bias is not None else []))
    more_inputs += [call.tensor(2)] if call.name.endswith("add_relu") else []
    moved = x.bytes + weight.bytes + math.prod(out) * x.size + sum(tensor.bytes for tensor in more_inputs)
    return Work(2 * _macs(shape, weight.shape, out, transposed=transposed), moved, x.dtype, matrix=True)


@MODELS.register("aten::convolution_backward", "aten::convolution_backward_overrideable", family=FAMILY)
def backward(call: Call) -> Work:
    """As many multiply-adds as forward for each of the gradients of input and weight that are asked for."""
    grad, x, weight = call.tensor(0), call.tensor(1), call.tensor(2)
    shift = -1 if call.name.endswith("overrideable") else 0
    mask = call.integers(10 + shift)
    if mask is None or len(mask) != 3:
        raise Unknown("which gradients are asked for is not recorded")
    gradient_flops = 2 * _macs(x.shape, weight.shape, grad.shape, transposed=call.flag(7 + shift))
    of_input, of_weight, of_bias = (bool(flag) for flag in mask)
    # Gradient of the input reads the weight, that of the weight reads the input; both read the incoming one.
    moved = grad.bytes + (of_input + of_weight) * (x.bytes + weight.bytes) + of_bias * grad.shape[1] * grad.size
    if of_input and of_weight:  # each of the two is read once and written once
        moved = grad.bytes + 2 * x.bytes + 2 * weight.bytes + of_bias * grad.shape[1] * grad.size
    return Work(gradient_flops * (of_input + of_weight), moved, x.dtype, matrix=True)
