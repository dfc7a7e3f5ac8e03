"""Reductions and scans: one operation per element of the input; pooling and resampling."""

from __future__ import annotations

import math

from traceloom.analyze.flops.call import SIZES, Call, Unknown
from traceloom.analyze.flops.registry import MODELS, Work

FAMILY = "reduction"

_TO_BOOL = ("all", "any")
_TO_INDEX = ("argmax", "argmin", "count_nonzero")
_PAIRS = ("var_mean", "std_mean")
_WITH_PLACES = ("max", "min", "median")  # over a dimension; over all only the value
_DIMS_AT_1 = (
    "sum", "mean", "prod", "amax", "amin", "max", "min", "all", "any", "argmax", "argmin", "var", "std", "nansum",
    "logsumexp", "var_mean", "std_mean", "count_nonzero", "median", "nanmean",
)  # fmt: skip
_DIMS_AT_2 = ("norm", "linalg_vector_norm")
_PER_ELEMENT = {"var": 3, "std": 3, "var_mean": 3, "std_mean": 3, "norm": 2, "linalg_vector_norm": 2, "logsumexp": 3}


@MODELS.register(*(f"aten::{name}" for name in (*_DIMS_AT_1, *_DIMS_AT_2)), family=FAMILY)
def reduce(call: Call) -> Work:
    """Operations per element of the input; a result for every element of the dimensions that are kept."""
    short = call.name.removeprefix("aten::")
    if short in ("max", "min") and call.has(1):  # the larger of two tensors
        raise Unknown("it is elementwise here, under another name")
    x = call.tensor(0)
    size = 1 if short in _TO_BOOL else 8 if short in _TO_INDEX else 2 * x.size if short in _PAIRS else x.size
    if short == "sum" and x.dtype in ("bool", "int32", "int16", "uint8", "int8"):
        size = 8
    # All dimensions are reduced where the call has no such input, or an empty one; var(x, unbiased) has none.
    rank, dims = len(x.shape), list(range(len(x.shape)))
    if not (short in ("sum", "mean", "prod") and len(call.types) == 2):  # sum(x, dtype)
        at = 2 if short in _DIMS_AT_2 else 1
        listed, text = at < len(call.types) and call.types[at] in ("ScalarList", "Scalar"), call.text(at)
        if (listed and not text) or (not listed and len(call.types) > at + 1 and not call.concrete):
            raise Unknown("the reduced dimensions are not recorded")
        if listed and text not in ("True", "False", "[]"):
            recorded = call.integers(at)
            if recorded is None or any(not -rank <= dim < max(rank, 1) for dim in recorded):
                raise Unknown("the reduced dimensions are not recorded")
            dims = [dim % rank if rank else 0 for dim in recorded]
            size += 8 * (short in _WITH_PLACES)
    kept = math.prod(size for dim, size in enumerate(x.shape) if dim not in dims)
    return Work(_PER_ELEMENT.get(short, 1) * x.numel, x.bytes + kept * size, x.dtype)


@MODELS.register(
    "aten::cumsum", "aten::cumprod", "aten::cumsum_", "aten::logcumsumexp", "fbgemm::asynchronous_complete_cumsum",
    "fb::asynchronous_complete_cumsum", "fb::offsets_range", family="scan",
)  # fmt: skip
def scan(call: Call) -> Work:
    """One addition or product per element; whole numbers are added up in 64 bits."""
    x = call.tensor(0)
    if call.name == "fb::offsets_range":  # counts up within each range, as long as it is told to
        return Work(0, x.bytes + call.tensor(1).numel * x.size, x.dtype)
    if call.name.endswith("complete_cumsum"):  # with a leading zero
        return Work(x.numel, x.bytes + (x.numel + 1) * x.size, x.dtype)
    size = 8 if x.dtype in ("bool", "int32", "int16", "uint8", "int8") and not call.name.endswith("_") else x.size
    return Work(x.numel, x.bytes + x.numel * size, x.dtype)


@MODELS.register("aten::topk", "aten::sort", "aten::argsort", family="selection")
def selection(call: Call) -> Work:
    """No arithmetic is counted: comparisons depend on the algorithm. An index (8 bytes) for each value."""
    x = call.tensor(0)
    kept, size = x.numel, 0 if call.name == "aten::argsort" else x.size
    if call.name == "aten::topk":
        k, dims = call.integer(1), call.integers(2) or [-1]
        width = x.shape[dims[0]] if x.shape else 1
        kept = x.numel // width * k if width else 0
    return Work(0, x.bytes + kept * (size + 8), x.dtype)


_POOLS = {
    "aten::max_pool2d_with_indices": 2, "aten::max_pool3d_with_indices": 3, "aten::avg_pool2d": 2,
    "aten::avg_pool3d": 3,
}  # fmt: skip


@MODELS.register(*_POOLS, family="pooling")
def pool(call: Call) -> Work:
    """One operation per value under the kernel; `max` keeps an index of 8 bytes for each result."""
    x, rank, is_max = call.tensor(0), _POOLS[call.name], "max" in call.name
    # (input, kernel, stride, padding, [dilation], ceil)
    kernel = call.sizes(1, rank)
    stride = call.sizes(2, rank) if call.integers(2) else kernel
    padding = call.sizes(3, rank)
    dilation = call.sizes(4, rank) if is_max else [1] * rank
    up = call.text(5 if is_max else 4) == "True"
    out = math.prod(x.shape[:-rank])
    for at in range(rank):
        size = x.shape[at - rank]
        span = size + 2 * padding[at] - dilation[at] * (kernel[at] - 1) - 1
        steps = -(-span // stride[at]) if up else span // stride[at]
        if up and steps * stride[at] >= size + padding[at]:
            steps -= 1
        out *= steps + 1
    return Work(out * math.prod(kernel), x.bytes + out * (x.size + 8 * is_max), x.dtype)


@MODELS.register("aten::max_pool2d_with_indices_backward", "aten::avg_pool2d_backward", family="pooling")
def pool_backward(call: Call) -> Work:
    """(gradient, input, ..., indices): the values of the input are not needed, its gradient is written."""
    grad, x = call.tensor(0), call.tensor(1)
    indices = call.tensors()[2:] if "max" in call.name else []
    return Work(grad.numel, grad.bytes + x.numel * x.size + sum(tensor.bytes for tensor in indices), x.dtype)


@MODELS.register("aten::_adaptive_avg_pool2d", "aten::adaptive_avg_pool2d", family="pooling")
def adaptive(call: Call) -> Work:
    """Every value of the input is added once."""
    x = call.tensor(0)
    out = math.prod(x.shape[:-2]) * math.prod(call.sizes(1, 2))
    return Work(x.numel, x.bytes + out * SIZES[x.dtype], x.dtype)


_TAPS = {
    "nearest1d": (1, 0), "nearest2d": (2, 0), "nearest3d": (3, 0), "linear1d": (1, 2), "bilinear2d": (2, 4),
    "trilinear3d": (3, 8), "bicubic2d": (2, 16),
}  # fmt: skip
"""Dimensions, and how many values of the input each value of the result is made of (0: copied)."""


@MODELS.register(*(f"aten::upsample_{name}" for name in _TAPS), family="resampling")
def upsample(call: Call) -> Work:
    """A multiply-add per value of the input that a value of the result is made of."""
    rank, taps = _TAPS[call.name.removeprefix("aten::upsample_")]
    x = call.tensor(0)
    out = math.prod(x.shape[:-rank]) * math.prod(call.sizes(1, rank))
    return Work(2 * taps * out, x.bytes + out * x.size, x.dtype)
