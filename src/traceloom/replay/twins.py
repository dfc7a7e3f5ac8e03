"""Ops that a replay runs as another op that does the same: what was recorded cannot be called here, or not safely."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple


class Twin(NamedTuple):
    """The op that is called instead.

    Attributes:
        name: The op with its overload.
        renamed: Its arguments that the recorded op has by another name; the others are of equal names.
        constants: Its arguments that the recorded op does not have.
    """

    name: str
    renamed: Mapping[str, str] = {}
    constants: Mapping[str, Any] = {}

    def values(self, recorded: Mapping[str, Any], names: list[str]) -> dict[str, Any]:
        """Values of its arguments, which have these names, from those of the recorded op."""
        named = {name: recorded[old] for name in names if (old := self.renamed.get(name, name)) in recorded}
        return {**named, **self.constants}


PINNING = ("aten::pin_memory", "aten::_pin_memory")
_ANYWHERE = {
    # They take whatever geometry they are given; their twins see that it lies within the storage.
    "aten::_reshape_alias": Twin("aten::as_strided"),
    "aten::_reshape_alias_copy": Twin("aten::as_strided_copy"),
    # A storage cannot be handed over as such: the twins take a tensor and use its storage.
    "aten::set_.source_Storage": Twin("aten::set_.source_Tensor"),
    "aten::set_.source_Storage_storage_offset": Twin("aten::set_.source_Tensor_storage_offset"),
    # Where everything is on one device, a copy into pinned memory is a copy.
    **dict.fromkeys(PINNING, Twin("aten::clone")),
    # A replay's tensors may be views, which cannot be detached in place.
    "aten::detach_": Twin("aten::detach"),
}
_ATTENTION = "aten::_scaled_dot_product_flash_attention_for_cpu"
_BATCH_NORM = Twin("aten::native_batch_norm", {"momentum": "exponential_average_factor", "eps": "epsilon"})
_BATCH_NORM_BACKWARD = Twin(
    "aten::native_batch_norm_backward",
    {"grad_out": "grad_output", "save_invstd": "save_var", "eps": "epsilon"},
    {"train": True, "output_mask": [True, True, True]},
)
_CONVOLUTION = Twin("aten::convolution", {"input": "self"}, {"transposed": False, "output_padding": [0]})
# What libraries of GPUs do, and the CPU by other ops. Dropout within attention does not exist there.
_ON_CPU = {
    "aten::cudnn_batch_norm": _BATCH_NORM,
    "aten::miopen_batch_norm": _BATCH_NORM,
    "aten::cudnn_batch_norm_backward": _BATCH_NORM_BACKWARD,
    "aten::miopen_batch_norm_backward": _BATCH_NORM_BACKWARD,
    "aten::cudnn_convolution": _CONVOLUTION._replace(constants={"bias": None, **_CONVOLUTION.constants}),
    "aten::miopen_convolution": _CONVOLUTION,
    "aten::_scaled_dot_product_flash_attention": Twin(_ATTENTION, {}, {"dropout_p": 0.0}),
    "aten::_scaled_dot_product_efficient_attention": Twin(_ATTENTION, {"attn_mask": "attn_bias"}, {"dropout_p": 0.0}),
    "aten::_scaled_dot_product_cudnn_attention": Twin(_ATTENTION, {"attn_mask": "attn_bias"}, {"dropout_p": 0.0}),
    "aten::_scaled_dot_product_flash_attention_backward": Twin(_ATTENTION + "_backward", {}, {"dropout_p": 0.0}),
    "aten::_scaled_dot_product_cudnn_attention_backward": Twin(
        _ATTENTION + "_backward", {"attn_mask": "attn_bias"}, {"dropout_p": 0.0}
    ),
    "aten::_scaled_dot_product_efficient_attention_backward": Twin(
        _ATTENTION + "_backward", {"grad_out": "grad_out_", "attn_mask": "attn_bias"}, {"dropout_p": 0.0}
    ),
}


def twin_of(name: str, device: str) -> Twin | None:
    """The op to call for another on a kind of device (`cpu`, `cuda`, `meta`); None: itself."""
    return _ANYWHERE.get(name) or (_ON_CPU.get(name) if device == "cpu" else None)
