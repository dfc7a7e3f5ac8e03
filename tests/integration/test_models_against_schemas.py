"""Where models look for an input is where PyTorch's own schema puts it."""

from __future__ import annotations

from typing import Any

import pytest

from traceloom.analyze.flops import MODELS, attention, pointwise, products

torch = pytest.importorskip("torch")


def arguments(name: str) -> list[str]:
    """Names of the arguments of the default overload."""
    packet = getattr(torch.ops.aten, name.removeprefix("aten::"), None)
    if packet is None:
        pytest.skip(f"this PyTorch has no {name}")
    overload = "default" if "default" in packet.overloads() else packet.overloads()[0]
    return [argument.name for argument in getattr(packet, overload)._schema.arguments]


def at(name: str, place: int | None) -> str | None:
    return None if place is None else arguments(name)[place]


ATTENTION = {**attention._FORWARD_POSITIONS, **attention._BACKWARD_POSITIONS}


@pytest.mark.parametrize("name", [name for name in ATTENTION if name.startswith("aten::")])
def test_attention(name: str) -> None:
    where = ATTENTION[name]
    told = arguments(name)
    assert told[where.query : where.query + 3] == ["query", "key", "value"]
    assert at(name, where.causal_index) in ("is_causal", "custom_mask_type")
    assert at(name, where.mask) in (None, "attn_mask", "attn_bias", "bias")
    if where.lengths is not None:
        first = where.lengths
        assert told[first] in ("cum_seq_q", "cu_seqlens_q")
        assert told[first + 1] in ("cum_seq_k", "cu_seqlens_k")
        assert told[first + 2] in ("max_q", "max_seqlen_q")
        assert told[first + 3] in ("max_k", "max_seqlen_k")
    if where.window is not None:
        assert told[where.window : where.window + 2] == ["window_size_left", "window_size_right"]


@pytest.mark.parametrize("name", products._CONVOLUTION_INPUTS)
def test_convolutions(name: str) -> None:
    where = products._CONVOLUTION_INPUTS[name]
    told = arguments(name)
    assert told[0] in ("self", "input")
    assert told[1] == "weight"
    assert told[where.stride] == "stride"
    assert told[where.padding] == "padding"
    assert at(name, where.dilation) in (None, "dilation")
    assert at(name, where.groups) in (None, "groups")
    assert at(name, where.bias) in (None, "bias")
    assert at(name, where.output_padding) in (None, "output_padding")
    if not isinstance(where.transposed, bool):
        assert told[where.transposed] == "transposed"


def test_the_gradients_of_a_convolution() -> None:
    told = arguments("aten::convolution_backward")
    assert told[:3] == ["grad_output", "input", "weight"]
    assert (told[7], told[10]) == ("transposed", "output_mask")
    other = arguments("aten::convolution_backward_overrideable")
    assert (other[6], other[9]) == ("transposed", "output_mask")


@pytest.mark.parametrize(
    "name", [name for name in pointwise._BACKWARD_INPUTS if "batch_norm" in name]
)
def test_batch_norm_backward(name: str) -> None:
    grad, x, saved, (weight,) = pointwise._BACKWARD_INPUTS[name]
    told = arguments(name)
    assert told[grad] in ("grad_output", "grad_out")
    assert told[x] == "input"
    assert told[weight] == "weight"
    assert all(told[place].startswith("save_") for place in saved)


@pytest.mark.parametrize("name", pointwise._REDUCTION_POSITION)
def test_reductions_of_losses(name: str) -> None:
    assert arguments(name)[pointwise._REDUCTION_POSITION[name]] == "reduction"


@pytest.mark.parametrize("name", pointwise._FUSED_OPTIMIZERS)
def test_fused_optimizers(name: str) -> None:
    _, places, written = pointwise._FUSED_OPTIMIZERS[name]
    told = [arguments(name)[place] for place in places]
    assert told[:2] == ["self", "grads"]
    assert len(told) - 1 == written


PLACES: dict[str, dict[int, Any]] = {
    "aten::native_layer_norm": {1: "normalized_shape", 2: "weight", 3: "bias"},
    "aten::layer_norm": {1: "normalized_shape", 2: "weight", 3: "bias"},
    "aten::native_layer_norm_backward": {3: "mean", 4: "rstd", 5: "weight", 6: "bias"},
    "aten::rms_norm": {1: "normalized_shape", 2: "weight"},
    "aten::_fused_rms_norm": {1: "normalized_shape", 2: "weight"},
    "aten::_fused_rms_norm_backward": {3: "rstd", 4: "weight"},
    "aten::native_group_norm": {1: "weight", 2: "bias", 6: "group"},
    "aten::group_norm": {2: "weight", 3: "bias"},
    "aten::native_group_norm_backward": {2: "mean", 3: "rstd", 4: "weight"},
    "aten::native_batch_norm": {1: "weight", 3: "running_mean", 5: "training"},
    "aten::batch_norm": {1: "weight", 3: "running_mean", 5: "training"},
    "aten::cudnn_batch_norm": {1: "weight", 3: "running_mean", 5: "training"},
    "aten::miopen_batch_norm": {1: "weight", 3: "running_mean", 5: "training"},
    "aten::_batch_norm_impl_index": {1: "weight", 3: "running_mean", 5: "training"},
    "aten::_native_batch_norm_legit": {1: "weight", 3: "running_mean", 5: "training"},
    "aten::instance_norm": {1: "weight", 3: "running_mean", 5: "use_input_stats"},
    "aten::addmm": {1: "mat1", 2: "mat2", 3: "beta"},
    "aten::baddbmm": {1: "batch1", 2: "batch2", 3: "beta"},
    "aten::addbmm": {1: "batch1", 2: "batch2"},
    "aten::_scaled_mm": {2: "scale_a", 3: "scale_b", 4: "bias", 6: "out_dtype"},
    "aten::_grouped_mm": {0: "self", 1: "mat2", 2: "offs"},
    "aten::_softmax": {2: "half_to_float"},
    "aten::_softmax_backward_data": {0: "grad_output", 1: "output", 3: "input_dtype"},
    "aten::cross_entropy_loss": {1: "target", 2: "weight", 3: "reduction"},
    "aten::nll_loss_forward": {1: "target", 3: "reduction"},
    "aten::nll_loss_backward": {0: "grad_output", 1: "self", 2: "target"},
    "aten::mse_loss_backward": {0: "grad_output", 1: "self", 2: "target"},
    "aten::topk": {1: "k", 2: "dim"},
    "aten::linalg_vector_norm": {2: "dim"},
    "aten::embedding": {0: "weight", 1: "indices"},
    "aten::embedding_dense_backward": {0: "grad_output", 1: "indices", 2: "num_weights"},
    "aten::_embedding_bag": {0: "weight", 1: "indices", 2: "offsets"},
    "aten::index_select": {1: "dim", 2: "index"},
    "aten::gather": {1: "dim", 2: "index"},
    "aten::scatter_add_": {2: "index", 3: "src"},
    "aten::index_add_": {2: "index", 3: "source"},
    "aten::index_copy_": {2: "index", 3: "source"},
    "aten::constant_pad_nd": {1: "pad"},
    "aten::_to_copy": {1: "dtype"},
    "aten::max_pool2d_with_indices": {
        1: "kernel_size",
        2: "stride",
        3: "padding",
        4: "dilation",
        5: "ceil_mode",
    },
    "aten::avg_pool2d": {1: "kernel_size", 2: "stride", 3: "padding", 4: "ceil_mode"},
    "aten::_adaptive_avg_pool2d": {1: "output_size"},
    "aten::upsample_bilinear2d": {1: "output_size"},
    "aten::upsample_nearest3d": {1: "output_size"},
}


@pytest.mark.parametrize("name", PLACES)
def test_other_operators(name: str) -> None:
    assert MODELS.find(name) is not None
    told = arguments(name)
    assert {place: told[place] for place in PLACES[name]} == PLACES[name]


def test_models_name_operators_that_exist() -> None:
    """Names of this PyTorch, or of another one that is known to have them."""
    elsewhere = {
        "aten::_fused_dropout",
        "aten::thnn_conv2d",
        "aten::_cat",
        "aten::_stack",
        "aten::concat",
    }
    unknown = {
        name
        for name in MODELS.names()
        if name.startswith("aten::") and not hasattr(torch.ops.aten, name.removeprefix("aten::"))
    }
    in_place = {
        name for name in unknown if name.endswith("_")
    }  # not every operator has the form in place
    assert unknown - in_place <= elsewhere
