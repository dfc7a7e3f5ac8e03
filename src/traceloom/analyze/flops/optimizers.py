"""Optimizers: loops over lists of tensors in one kernel."""

from __future__ import annotations

from traceloom.analyze.flops.call import Call
from traceloom.analyze.flops.registry import MODELS, Work

FAMILY = "optimizer"

_ONE = (
    "abs add ceil clamp_max clamp_min cos div erf erfc exp expm1 floor frac lgamma log log10 log1p log2 maximum "
    "minimum mul neg pow reciprocal round rsqrt sigmoid sign sin sqrt sub tan tanh trunc"
)
_PER_ELEMENT = {**dict.fromkeys(_ONE.split(), 1), "addcmul": 3, "addcdiv": 3, "lerp": 3, "copy": 0}


@MODELS.register(*(f"aten::_foreach_{name}{end}" for name in _PER_ELEMENT for end in ("", "_")), family=FAMILY)
def foreach(call: Call) -> Work:
    """Every list once; the in-place form writes its first list, `copy` does not read it."""
    lists = [call.tensor_list(at) for at in range(len(call.types)) if call.is_list(at)]
    first = lists[0]
    written = sum(tensor.bytes for tensor in first)
    read = sum(tensor.bytes for part in lists for tensor in part) + sum(tensor.bytes for tensor in call.tensors())
    short = call.name.removeprefix("aten::_foreach_").rstrip("_")
    if short == "copy":
        read -= written
    return Work(_PER_ELEMENT[short] * sum(tensor.numel for tensor in first), read + written, first[0].dtype)


@MODELS.register("aten::_foreach_zero_", "aten::_foreach_norm", family=FAMILY)
def foreach_tensor(call: Call) -> Work:
    """The norm: square and sum, one number per tensor."""
    first, norm = call.tensor_list(0), call.name.endswith("norm")
    moved = sum(tensor.bytes + norm * tensor.size for tensor in first)
    return Work(2 * norm * sum(tensor.numel for tensor in first), moved, first[0].dtype)


_ADAM = 14  # weight decay 1, first moment 3, second moment 4, root, division and sum 3, step 3
_FUSED = {
    "aten::_fused_adam_": (_ADAM, (0, 1, 2, 3), 3),
    "aten::_fused_adamw_": (_ADAM, (0, 1, 2, 3), 3),
    "aten::_fused_sgd_": (4, (0, 1, 2), 2),
    "aten::_fused_adagrad_": (7, (0, 1, 2), 2),
}
"""Operations per element, the lists that are read, and how many of them are written (not the gradients)."""


@MODELS.register(*_FUSED, family=FAMILY)
def fused(call: Call) -> Work:
    """Parameters, gradients, moments: all read; all but the gradients written."""
    per_element, places, written = _FUSED[call.name]
    lists = [call.tensor_list(at) for at in places if call.is_list(at) and call.shapes[at]]
    parameters = lists[0]
    moved = sum(tensor.bytes for part in lists for tensor in part)
    moved += min(written, len(lists) - 1) * sum(tensor.bytes for tensor in parameters)
    return Work(per_element * sum(tensor.numel for tensor in parameters), moved, parameters[0].dtype)
