"""Every model that comes with Traceloom, by its signature in PyTorch or the engine, against numbers worked out by hand.

Calls are written as a trace has them, input by input: `f[6,4]` is a tensor of 32-bit floats, `f{[3],[4]}` a list of
them, `-` nothing, `[2,2]` a list of numbers, anything else a number or a flag.
"""

from __future__ import annotations

import json
import re
from math import prod
from typing import Any

import numpy as np
import pytest

from traceloom.analyze import flops

TYPES = {
    "f": "float",
    "d": "double",
    "h": "c10::Half",
    "bf": "c10::BFloat16",
    "f8": "c10::Float8_e4m3fn",
    "l": "long int",
    "i": "int",
    "i8": "signed char",
    "u8": "unsigned char",
    "b": "bool",
    "f4": "c10::Float4_e2m1fn_x2",
    "c": "c10::complex<float>",
}
TENSOR = re.compile(r"^([a-z]+\d?)(\[.*\])$")
LIST = re.compile(r"^([a-z]+\d?)\{(.*)\}$")


def work(name: str, inputs: str, batch: str = "") -> flops.Work | str:
    shapes: list[Any] = []
    types, values, list_type = [], [], ""
    for entry in inputs.split():
        if match := TENSOR.match(entry):
            shape, kind, value = json.loads(match[2]), TYPES[match[1]], ""
        elif match := LIST.match(entry):
            shape, kind, value, list_type = json.loads(f"[{match[2]}]"), "TensorList", "", "fp32"
        else:
            shape, value = [], "" if entry == "-" else entry
            kind = "" if entry == "-" else "ScalarList" if entry.startswith("[") else "Scalar"
        shapes.append(shape)
        types.append(kind)
        values.append(value)
    return flops.MODELS.work(flops.Call(name, shapes, types, values, [], list_type, batch))


def counted(name: str, inputs: str, batch: str = "") -> tuple[int, int]:
    done = work(name, inputs, batch)
    assert isinstance(done, flops.Work), done
    return done.flops, done.bytes


TESTED: set[str] = set()
"""Names that stand in one of the tables below; the last test asks whether a model is missing."""


def table(*rows: tuple[str, str, tuple[int, int]]) -> list[Any]:
    """(names, inputs, (FLOPs, bytes)) as parameters, one for each name."""
    params = [
        pytest.param(name, inputs, expected, id=f"{name} {inputs}")
        for names, inputs, expected in rows
        for name in names.split()
    ]
    TESTED.update(str(param.values[0]) for param in params)
    return params


def aten(names: str, *, in_place: bool = False, prefix: str = "") -> str:
    return " ".join(f"aten::{prefix}{name}{'_' if in_place else ''}" for name in names.split())


# -- elementwise: 24 elements; 96 bytes in 32 bits ----------------------------------------------------------------

TO_FLOAT = (
    "acos acosh angle asin asinh atan atanh cos cosh deg2rad erf erfc erfinv exp exp2 expm1 lgamma log log10 log1p log2 "
    "logit reciprocal rsqrt sigmoid sin sinc sinh sqrt tan tanh"
)
KEEP = (
    "abs ceil celu elu floor frac gelu hardsigmoid hardswish hardtanh leaky_relu log_sigmoid mish nan_to_num neg "
    "relu relu6 round selu sgn sign silu softplus softshrink square threshold trunc"
)
INTEGER = "bitwise_and bitwise_or bitwise_xor bitwise_left_shift bitwise_right_shift"
BINARY = (
    "add atan2 clamp_max clamp_min copysign div floor_divide fmod logaddexp maximum minimum mul pow prelu remainder "
    "rsub sub true_divide xlogy"
)
OF_TWO = "eq ge gt le lt ne isclose logical_and logical_or logical_xor"
OF_ONE = "isfinite isinf isnan isneginf isposinf logical_not"
GRADIENTS = "elu hardsigmoid hardswish hardtanh leaky_relu logit mish sigmoid silu softplus tanh threshold native_dropout gelu"
GATES = (
    "_C::silu_and_mul _C::gelu_and_mul _C::gelu_tanh_and_mul _C::mul_and_silu _C::swigluoai_and_mul "
    "sgl_kernel::silu_and_mul sgl_kernel::gelu_and_mul sgl_kernel::gelu_tanh_and_mul flashinfer::silu_and_mul "
    "flashinfer::gelu_and_mul flashinfer::gelu_tanh_and_mul aiter::silu_and_mul aiter::gelu_and_mul "
    "aiter::gelu_tanh_and_mul"
)
FILLS = "fill zero normal uniform random bernoulli exponential log_normal cauchy geometric"
ELEMENTWISE = table(
    (aten(f"{TO_FLOAT} {KEEP}"), "f[6,4]", (24, 2 * 96)),
    (aten(f"{TO_FLOAT} {KEEP}", in_place=True), "f[6,4]", (24, 2 * 96)),
    (aten(TO_FLOAT), "l[6,4]", (24, 192 + 96)),  # of whole numbers they are 32-bit floats
    (aten("abs neg sign square sgn"), "l[6,4]", (24, 2 * 192)),
    (aten("bitwise_not"), "l[6,4]", (24, 2 * 192)),
    (aten("bitwise_not", in_place=True), "l[6,4]", (24, 2 * 192)),
    (aten("tril triu"), "f[6,4] 1", (0, 2 * 96)),
    (aten("tril triu", in_place=True), "f[6,4] 1", (0, 2 * 96)),
    (aten(BINARY), "f[6,1] f[4]", (24, 24 + 16 + 96)),
    (aten(BINARY), "bf[6,4] bf[6,4]", (24, 3 * 48)),
    (aten(BINARY, in_place=True), "f[6,4] f[4]", (24, 96 + 16 + 96)),
    (aten("div true_divide atan2 copysign xlogy"), "l[6,4] l[6,4]", (24, 2 * 192 + 96)),
    (aten("add mul remainder"), "l[6,4] l[6,4]", (24, 3 * 192)),
    (aten(INTEGER), "i[6,4] i[4]", (24, 96 + 16 + 96)),
    (aten(INTEGER, in_place=True), "i[6,4] i[4]", (24, 96 + 16 + 96)),
    (aten(OF_TWO), "f[6,1] f[4]", (24, 24 + 16 + 24)),
    (aten(OF_TWO, in_place=True), "f[6,4] f[4]", (24, 96 + 16 + 96)),
    (aten(OF_ONE), "f[6,4]", (24, 96 + 24)),
    (aten(OF_ONE, in_place=True), "f[6,4]", (24, 96 + 96)),
    (aten("clamp clip"), "f[6,4] 0 1", (24, 2 * 96)),
    (aten("clamp clip"), "f[6,4] f[4] f[4]", (24, 2 * 96 + 32)),
    (aten("clamp clip", in_place=True), "f[6,4] 0 1", (24, 2 * 96)),
    (aten("masked_fill"), "f[6,4] b[6,4] 0", (0, 2 * 96 + 24)),
    (aten("masked_fill", in_place=True), "f[6,4] b[6,4] 0", (0, 2 * 96 + 24)),
    (aten("where"), "b[6,4] f[6,4] f[6,4]", (0, 24 + 3 * 96)),
    (aten("addcmul addcdiv lerp"), "f[6,4] f[6,4] f[6,4]", (72, 4 * 96)),
    (aten("addcmul addcdiv lerp", in_place=True), "f[6,4] f[6,4] f[6,4]", (72, 4 * 96)),
    (aten("lerp"), "f[6,4] f[6,4] 0.5", (72, 3 * 96)),
    (
        " ".join(f"aten::{name}_backward" for name in GRADIENTS.split()),
        "f[6,4] f[6,4]",
        (24, 3 * 96),
    ),
    ("aten::log_sigmoid_backward", "f[6,4] f[6,4] f[6,4]", (24, 4 * 96)),
    (
        "aten::native_dropout aten::_fused_dropout",
        "f[6,4] 0.1 True",
        (48, 96 + 96 + 24),
    ),  # with its mask
    ("aten::native_dropout", "bf[6,4] 0.1 True", (48, 48 + 48 + 24)),
    ("aten::glu", "f[6,8] -1", (24 * 2, 192 + 96)),
    (GATES, "bf[6,4] bf[6,8]", (48, 48 + 96)),
    (aten(FILLS, in_place=True), "f[6,4] 0", (0, 96)),
    ("aten::arange", "7 l[7]", (0, 56)),
    ("aten::arange", "2 7 f[5]", (0, 20)),
    ("aten::arange", "10 0 -3 l[4]", (0, 32)),
    ("aten::arange", "5 2 l[0]", (0, 0)),
)


@pytest.mark.parametrize(("name", "inputs", "expected"), ELEMENTWISE)
def test_elementwise_operators(name: str, inputs: str, expected: tuple[int, int]) -> None:
    assert counted(name, inputs) == expected


# -- matrix products: (7, 5) by (5, 11) ---------------------------------------------------------------------------

FLOPS = 2 * 7 * 5 * 11
INT8 = "aiter::gemm_a8w8 aiter::gemm_a8w8_CK aiter::gemm_a8w8_bpreshuffle"
BLOCKS = "aiter::gemm_a8w8_blockscale aiter::gemm_a8w8_blockscale_bpreshuffle"
PRODUCTS = table(
    ("aten::mm aten::_sparse_semi_structured_mm", "f[7,5] f[5,11]", (FLOPS, 4 * (35 + 55 + 77))),
    (
        "aten::mm",
        "bf[7,5] bf[5,11] bf[7,11]",
        (FLOPS, 2 * (35 + 55 + 77)),
    ),  # with a place for the result
    ("aten::mm", "c[7,5] c[5,11]", (FLOPS, 8 * (35 + 55 + 77))),
    ("aten::mm", "f[0,5] f[5,11]", (0, 4 * 55)),
    ("aten::mm", "f[7,0] f[0,11]", (0, 4 * 77)),
    (
        "aten::addmm aten::addmm_ aten::_addmm_activation",
        "f[11] f[7,5] f[5,11] 1 1",
        (FLOPS, 4 * (11 + 35 + 55 + 77)),
    ),
    ("aten::addmm aten::addmm_", "f[7,11] f[7,5] f[5,11] 1 1", (FLOPS, 4 * (77 + 35 + 55 + 77))),
    ("aten::addmm", "f[7,11] f[7,5] f[5,11] 0 1", (FLOPS, 4 * (35 + 55 + 77))),
    ("aten::bmm", "f[3,7,5] f[3,5,11]", (3 * FLOPS, 12 * (35 + 55 + 77))),
    (
        "aten::baddbmm aten::baddbmm_",
        "f[3,7,11] f[3,7,5] f[3,5,11] 1 1",
        (3 * FLOPS, 12 * (77 + 35 + 55 + 77)),
    ),
    (
        "aten::baddbmm aten::baddbmm_",
        "f[3,7,11] f[3,7,5] f[3,5,11] 0 1",
        (3 * FLOPS, 12 * (35 + 55 + 77)),
    ),
    ("aten::addbmm", "f[7,11] f[3,7,5] f[3,5,11] 1 1", (3 * FLOPS, 4 * (2 * 77 + 3 * 35 + 3 * 55))),
    (
        "aten::linear vllm::rocm_unquantized_gemm vllm::rocm_unquantized_gemm_impl aiter::gemm_a16w16",
        "bf[7,5] bf[11,5] -",
        (FLOPS, 2 * (35 + 55 + 77)),
    ),
    ("aten::linear", "bf[2,7,5] bf[11,5] bf[11]", (2 * FLOPS, 2 * (70 + 55 + 154 + 11))),
    ("aten::linear", "f[7,5] f[5] -", (2 * 35, 4 * (35 + 5 + 7))),
    ("aten::_weight_int8pack_mm", "bf[7,5] i8[11,5] bf[11]", (FLOPS, 70 + 55 + 154 + 22)),
    ("bitsandbytes::int8_linear_matmul", "i8[7,5] i8[11,5]", (FLOPS, 35 + 55 + 4 * 77)),
    ("aten::mv", "f[7,5] f[5]", (70, 4 * (35 + 5 + 7))),
    ("aten::dot aten::vdot", "f[5] f[5]", (10, 4 * (5 + 5 + 1))),
    ("aten::addmv aten::addmv_", "f[7] f[7,5] f[5] 1 1", (70, 4 * (7 + 35 + 5 + 7))),
    ("aten::matmul", "f[7,5] f[5,11]", (FLOPS, 4 * (35 + 55 + 77))),
    ("aten::matmul", "f[5] f[5,11]", (2 * 55, 4 * (5 + 55 + 11))),
    ("aten::matmul", "f[5] f[5]", (10, 4 * 11)),
    ("aten::matmul", "f[2,1,7,5] f[3,5,11]", (6 * FLOPS, 4 * (70 + 165 + 6 * 77))),
    ("aten::_scaled_mm", "f8[7,5] f8[5,11] f[] f[] - - 6 False", (FLOPS, 35 + 55 + 8 + 4 * 77)),
    (
        "aten::_scaled_mm",
        "f8[7,5] f8[5,11] f[7,1] f[1,11] bf[11] - 15 True",
        (FLOPS, 35 + 55 + 28 + 44 + 22 + 2 * 77),
    ),
    (
        "aten::_scaled_mm",
        "f4[7,5] f4[5,11] f[] f[] - - 15 False",
        (2 * FLOPS, 35 + 55 + 8 + 2 * 77),
    ),  # two in a byte
    ("trtllm::cublas_scaled_mm", "f8[7,5] f8[5,11] f[1] f[1] - -", (FLOPS, 35 + 55 + 8 + 2 * 77)),
    ("aten::_int_mm", "i8[7,5] i8[5,11]", (FLOPS, 35 + 55 + 4 * 77)),
    (
        "_C::cutlass_scaled_mm _C::cutlass_scaled_mm_azp",
        "bf[7,11] f8[7,5] f8[5,11] f[1] f[1] bf[11]",
        (FLOPS, 2 * 77 + 35 + 55 + 8 + 22),
    ),
    (
        "sgl_kernel::fp8_scaled_mm sgl_kernel::int8_scaled_mm sgl_kernel::fp8_blockwise_scaled_mm",
        "f8[7,5] f8[5,11] f[7] f[11] 5 -",
        (FLOPS, 35 + 55 + 28 + 44 + 2 * 77),
    ),
    (
        "sgl_kernel::fp8_scaled_mm",
        "f8[7,5] f8[5,11] f[7] f[11] 6 f[11]",
        (FLOPS, 35 + 55 + 28 + 44 + 44 + 4 * 77),
    ),
    (
        f"{INT8} {BLOCKS} vllm::gemm_with_dynamic_quant",
        "i8[7,5] i8[11,5] f[7,1] f[1,11]",
        (FLOPS, 35 + 55 + 28 + 44 + 2 * 77),
    ),
    ("tex_ts::te_gemm_ts", "u8[11,5] - 0 0 1 u8[7,5] - 0 0 0 bf[7,11]", (FLOPS, 35 + 55 + 2 * 77)),
    (
        "tex_ts::te_gemm_ts",
        "bf[5,11] - 0 0 0 bf[5,7] - 0 0 1 bf[7,11]",
        (FLOPS, 2 * (35 + 55 + 77)),
    ),
    (
        "aten::_grouped_mm aten::_scaled_grouped_mm",
        "bf[7,5] bf[3,5,11] i[3]",
        (FLOPS, 2 * (35 + 165 + 77)),
    ),
    (
        "aten::_grouped_mm aten::_scaled_grouped_mm",
        "bf[7,5] bf[5,11] i[3]",
        (FLOPS, 2 * (35 + 55 + 231)),
    ),
    ("aten::_grouped_mm", "bf[3,7,5] bf[3,5,11]", (3 * FLOPS, 6 * (35 + 55 + 77))),
    (
        "aten::_scaled_grouped_mm",
        "f8[7,5] f8[3,5,11] f[7] f[3,11] i[3]",
        (FLOPS, 35 + 165 + 2 * 77),
    ),
)


@pytest.mark.parametrize(("name", "inputs", "expected"), PRODUCTS)
def test_matrix_products(name: str, inputs: str, expected: tuple[int, int]) -> None:
    assert counted(name, inputs) == expected
    done = work(name, inputs)
    assert isinstance(done, flops.Work)
    assert done.matrix


@pytest.mark.parametrize(
    ("inputs", "dtype"),
    [
        ("f[7,5] f[5,11]", "fp32"),
        ("h[7,5] h[5,11]", "fp16"),
        ("bf[7,5] i8[5,11]", "bf16"),
        ("i8[7,5] bf[5,11]", "bf16"),
        ("d[7,5] d[5,11]", "fp64"),
        ("u8[7,5] u8[5,11]", "int8"),
        ("f8[7,5] f8[5,11]", "fp8"),
    ],
)
def test_a_product_is_made_in_the_wider_type_of_its_operands(inputs: str, dtype: str) -> None:
    done = work("aten::mm", inputs)
    assert isinstance(done, flops.Work)
    assert done.dtype == dtype


NO_PRODUCT = "the recorded shapes are no matrix product"


@pytest.mark.parametrize(
    ("name", "inputs", "why"),
    [
        ("aten::mm", "f[7,5] f[6,11]", NO_PRODUCT),
        ("aten::mm", "f[7,5] f[2,5,11]", NO_PRODUCT),
        ("aten::bmm", "f[7,5] f[5,11]", "the model cannot read the recorded inputs"),
        (
            "aten::mm",
            "f[7,5] f[5,11] f[7,11] - -",
            "more inputs are recorded than the operator has",
        ),
        ("aten::mm", "f[7,5] -", "input 1 is not recorded as a tensor"),
        ("aten::bmm", "f[3,7,5] f[2,5,11]", "the recorded shapes are no batched matrix product"),
        ("aten::bmm", "f[3,7,5] f[3,4,11]", "the recorded shapes are no batched matrix product"),
        (
            "aten::addbmm",
            "f[7,11] f[3,7,5] f[3,4,11]",
            "the recorded shapes are no batched matrix product",
        ),
        ("aten::mv", "f[7,5] f[4]", NO_PRODUCT),
        ("aten::matmul", "f[] f[5]", NO_PRODUCT),
        ("aten::matmul", "f[7,5] f[4,11]", NO_PRODUCT),
        ("aten::matmul", "f[2,7,5] f[3,5,11]", "the recorded shapes do not fit each other"),
        ("aten::linear", "f[7,5] f[11,5] - - -", "more inputs are recorded than the operator has"),
        ("aten::_grouped_mm", "bf[7,5] bf[5,11]", "the number of groups is not recorded"),
        ("aten::_grouped_mm", "bf[3,7,5] bf[5,11] i[3]", "groups of columns are not modelled"),
        (
            "aten::conv2d",
            "f[2,4,9,9] f[8,3,3,3] - [1,1] [0,0] [1,1] 1",
            "the recorded sizes are no convolution",
        ),
        (
            "aten::conv2d",
            "f[2,4,9,9] f[8,4,3,3] - [1,1,1] [0,0] [1,1] 1",
            "input 3 has 3 numbers for 2 dimensions",
        ),
        (
            "aten::conv2d",
            "f[2,4,9,9] f[8,4,3,3] - - [0,0] [1,1] 1",
            "the value of input 3 is not recorded",
        ),
        (
            "aten::conv2d",
            "f[9,9] f[8,4,3,3] - [1,1] [0,0] [1,1] 1",
            "the recorded shapes are no convolution",
        ),
        (
            "aten::batch_norm",
            "f[2,3,4] f[3] f[3] f[3] f[3] -",
            "the value of input 5 is not recorded",
        ),
        (
            "_C::fused_add_rms_norm",
            "bf[6,4] bf[6,5] bf[4]",
            "the recorded shapes are no sum and normalisation",
        ),
        (
            "aiter::add_rmsnorm",
            "bf[6,4] bf[6,4] bf[5,4] bf[6,4] bf[4]",
            "the recorded shapes are no sum and normalisation",
        ),
        ("aten::max", "f[6,4] f[6,4]", "it is elementwise here, under another name"),
        ("aten::sum", "f[6,4] [2] False -", "the reduced dimensions are not recorded"),
        ("aten::where", "b[6,4]", "how many places are found depends on the data"),
        ("aten::arange", "5 -", "the element type of the result is not recorded"),
        ("aten::arange", "- l[5]", "the bounds are not recorded"),
        ("aten::constant_pad_nd", "f[6,4] [1] 0", "the padding is not recorded"),
        ("aten::constant_pad_nd", "f[6,4] [-3,-2] 0", "the padding does not fit the shape"),
        (
            "aten::index",
            "f[6,4] f{[6]}",
            "the shape of the result cannot be determined from what is recorded",
        ),
        (
            "vllm::fused_experts",
            "bf[2,64] i[16,32,64] i[16,64,16]  f[2,4,1]",
            "the recorded shapes are no mixture of experts",
        ),
        (
            "vllm::fused_experts",
            "bf[2,64] i[16,32,8] i[16,64,16]  f[2,4]",
            "the weights are packed, and the recorded shapes do not say how",
        ),
        ("_C::scaled_fp4_quant", "u8[6,2]", "input and result are not both recorded"),
        (
            "vllm::unified_attention",
            "bf[2,512] bf[2,256] bf[2,256]",
            "the heads cannot be determined from the recorded shapes",
        ),
        (
            "_C::paged_attention_v1",
            "bf[2,8,64] bf[2,8,64] bf[9,4,8]",
            "the heads cannot be determined from the recorded shapes",
        ),
        ("triton_poi_fused_add_0", "24", "no input is recorded as a tensor"),
        (
            "triton_tem_fused_mm_0",
            "f[7,5] f[5,11]",
            "which inputs are multiplied cannot be determined from what is recorded",
        ),
        (
            "triton_tem_fused_mm_0",
            "f[7,5] f[5,11] f[11,7]",
            "which inputs are multiplied cannot be determined from what is recorded",
        ),
        ("my::own", "f[7]", "no model for this operator"),
    ],
)
def test_what_is_not_told_or_cannot_be_has_a_reason(name: str, inputs: str, why: str) -> None:
    done = work(name, inputs)
    assert isinstance(done, str)
    assert done.startswith(why)


# -- convolutions -------------------------------------------------------------------------------------------------

# X input, W filter, B bias, Z a sum, K size of the filter, S stride, P padding, D dilation, O output padding, G groups,
# F a flag, N a number
SIGNATURES = {
    "convolution": "X W B S P D F O G",
    "_convolution": "X W B S P D F O G F F F F",
    "convolution_overrideable": "X W B S P D F O G",
    "conv1d": "X W B S P D G",
    "conv2d": "X W B S P D G",
    "conv3d": "X W B S P D G",
    "cudnn_convolution": "X W P S D G F F F",
    "cudnn_convolution_relu": "X W B S P D G",
    "cudnn_convolution_add_relu": "X W Z N B S P D G",
    "miopen_convolution": "X W B P S D G F F",
    "miopen_depthwise_convolution": "X W B P S D G F F",
    "miopen_convolution_relu": "X W B S P D G",
    "mkldnn_convolution": "X W B P S D G",
    "_conv_depthwise2d": "X W K B S P D",
    "thnn_conv2d": "X W K B S P",
    "_slow_conv2d_forward": "X W K B S P",
    "slow_conv_dilated2d": "X W K B S P D",
    "slow_conv3d_forward": "X W K B S P",
}
TRANSPOSED = {
    "conv_transpose1d": "X W B S P O G D",
    "conv_transpose2d": "X W B S P O G D",
    "conv_transpose3d": "X W B S P O G D",
    "cudnn_convolution_transpose": "X W P O S D G F F F",
    "miopen_convolution_transpose": "X W B P O S D G F F",
    "convolution": "X W B S P D T O G",
    "_convolution": "X W B S P D T O G F F F F",
}
GRADIENT_OPS = ("aten::convolution_backward", "aten::convolution_backward_overrideable")
TESTED.update((*(f"aten::{name}" for name in (*SIGNATURES, *TRANSPOSED)), *GRADIENT_OPS))


def rank_of(name: str) -> int:
    return int(digit[0]) if (digit := re.findall(r"(\d)d", name)) else 2


def written(signature: str, rank: int, **tensors: str) -> str:
    """The inputs of a convolution with stride 2 and padding 1."""
    lists = {"K": 3, "S": 2, "P": 1, "D": 1, "O": 0}
    texts = {key: f"[{','.join([str(number)] * rank)}]" for key, number in lists.items()}
    texts |= {"G": "1", "F": "False", "T": "True", "N": "1", "B": "f[8]"} | tensors
    return " ".join(texts[key] for key in signature.split())


def shaped(*sizes: int) -> str:
    return f"f[{','.join(map(str, sizes))}]"


@pytest.mark.parametrize("name", SIGNATURES)
@pytest.mark.parametrize("bias", [True, False])
def test_convolutions_of_every_signature(name: str, bias: bool) -> None:
    """4 channels of 9 become 8 of (9 + 2 - 3) // 2 + 1 = 5 in each dimension."""
    rank, signature = rank_of(name), SIGNATURES[name]
    x, weight, out = (2, 4, *[9] * rank), (8, 4, *[3] * rank), (2, 8, *[5] * rank)
    inputs = written(
        signature,
        rank,
        X=shaped(*x),
        W=shaped(*weight),
        Z=shaped(*out),
        **({} if bias else {"B": "-"}),
    )
    elements = prod(x) + prod(weight) + prod(out) * (2 if "Z" in signature else 1)
    elements += 8 if bias and "B" in signature else 0
    assert counted(f"aten::{name}", inputs) == (2 * 2 * 8 * 4 * 3**rank * 5**rank, 4 * elements)


@pytest.mark.parametrize("name", TRANSPOSED)
def test_transposed_convolutions_of_every_signature(name: str) -> None:
    """4 channels of 5 become 8 of (5 - 1) * 2 - 2 + 3 = 9 in each dimension."""
    rank, signature = rank_of(name), TRANSPOSED[name]
    x, weight, out = (2, 4, *[5] * rank), (4, 8, *[3] * rank), (2, 8, *[9] * rank)
    inputs = written(signature, rank, X=shaped(*x), W=shaped(*weight))
    elements = prod(x) + prod(weight) + prod(out) + (8 if "B" in signature else 0)
    assert counted(f"aten::{name}", inputs) == (2 * 2 * 4 * 8 * 3**rank * 5**rank, 4 * elements)


@pytest.mark.parametrize(("padding", "out"), [("same", 9), ("valid", 7), ('"same"', 9)])
def test_padding_may_be_a_word(padding: str, out: int) -> None:
    inputs = f"f[2,4,9,9] f[8,4,3,3] - [1,1] {padding} [1,1] 1"
    assert counted("aten::conv2d", inputs) == (
        2 * 2 * 8 * 36 * out**2,
        4 * (648 + 288 + 16 * out**2),
    )


def test_an_image_without_a_batch_is_a_batch_of_one() -> None:
    alone, batch = ("f[4,9,9]", "f[1,4,9,9]")
    rest = "f[8,4,3,3] f[8] [2,2] [1,1] [1,1] 1"
    assert counted("aten::conv2d", f"{alone} {rest}") == counted("aten::conv2d", f"{batch} {rest}")


def test_a_filter_for_each_channel_has_as_many_groups_as_channels() -> None:
    named = counted("aten::conv2d", "f[2,8,9,9] f[8,1,3,3] f[8] [1,1] [1,1] [1,1] 8")
    assert named == (2 * 2 * 8 * 9 * 81, 4 * (2 * 1296 + 72 + 8))
    assert (
        counted("aten::_conv_depthwise2d", "f[2,8,9,9] f[8,1,3,3] [3,3] f[8] [1,1] [1,1] [1,1]")
        == named
    )


@pytest.mark.parametrize(
    ("mask", "products", "elements"),
    [
        ("[True,True,True]", 2, 400 + 2 * 648 + 2 * 288 + 8),
        ("[True,False,False]", 1, 400 + 648 + 288),
        ("[False,True,True]", 1, 400 + 648 + 288 + 8),
        ("[False,False,True]", 0, 400 + 8),
    ],
)
@pytest.mark.parametrize("name", GRADIENT_OPS)
def test_gradients_of_a_convolution(name: str, mask: str, products: int, elements: int) -> None:
    sizes = "" if name.endswith("overrideable") else "[8] "
    inputs = f"f[2,8,5,5] f[2,4,9,9] f[8,4,3,3] {sizes}[2,2] [1,1] [1,1] False [0,0] 1 {mask}"
    assert counted(name, inputs) == (products * 2 * 2 * 8 * 4 * 9 * 25, 4 * elements)


# -- attention: 2 sequences, 4 heads of 16 ------------------------------------------------------------------------

QUERIES, KEYS = 3, 8
# Q, K, V the operands, G the gradient and O the result like the query, L the sums of the rows, C the causal flag, M a
# mask or nothing, N nothing, F another flag, P a probability
FORWARD = {
    "aten::scaled_dot_product_attention": "Q K V M P C",
    "aten::_scaled_dot_product_attention_math": "Q K V M P C N N",
    "aten::_scaled_dot_product_flash_attention": "Q K V P C F",
    "aten::_scaled_dot_product_flash_attention_for_cpu": "Q K V P C M N",
    "aten::_scaled_dot_product_efficient_attention": "Q K V M F P C N",
    "aten::_scaled_dot_product_cudnn_attention": "Q K V M F P C F",
    "aten::_scaled_dot_product_fused_attention_overrideable": "Q K V M P C F",
    "aten::_flash_attention_forward": "Q K V N N N N P C F N N N",
    "flash_attn::_flash_attn_forward": "Q K V P N C N N",
    "flash_attn::_flash_attn_varlen_forward": "Q K V N N N N P N C N N",
}
BACKWARD = {
    "aten::_scaled_dot_product_flash_attention_backward": "G Q K V O L N N N N P C",
    "aten::_scaled_dot_product_flash_attention_for_cpu_backward": "G Q K V O L P C M",
    "aten::_scaled_dot_product_efficient_attention_backward": "G Q K V M O L N N P N C",
    "aten::_scaled_dot_product_cudnn_attention_backward": "G Q K V O L N N M N N N N P C",
    "aten::_flash_attention_backward": "G Q K V O L N N N N P C N N N N N",
    "flash_attn::_flash_attn_backward": "G Q K V O L N N N P N C N N",
    "flash_attn::_flash_attn_varlen_backward": "G Q K V O L N N N N N N N P N C N N",
}
TESTED.update(
    (
        *FORWARD,
        *BACKWARD,
        "aten::_efficient_attention_forward",
        "aten::_efficient_attention_backward",
    )
)


def attention_inputs(name: str, signature: str, causal: str, mask: str) -> str:
    first = "_scaled_dot" in name or name.endswith("::scaled_dot_product_attention")
    query, key = (
        ((2, 4, QUERIES, 16), (2, 4, KEYS, 16))
        if first
        else ((2, QUERIES, 4, 16), (2, KEYS, 4, 16))
    )
    like_query, like_key = (shaped(*shape).replace("f", "bf") for shape in (query, key))
    texts = dict.fromkeys("QGO", like_query) | dict.fromkeys("KV", like_key)
    texts |= {"C": causal, "M": mask, "N": "-", "F": "False", "P": "0.0", "L": f"f[2,4,{QUERIES}]"}
    return " ".join(texts[key] for key in signature.split())


def pairs_of(name: str, causal: bool) -> int:
    """How many pairs the mask itself leaves: flash attention ends at the last key, the others begin at the first."""
    last = "flash" in name and "for_cpu" not in name
    own = np.arange(QUERIES)[:, None] + (KEYS - QUERIES if last else 0)
    return int((np.arange(KEYS)[None, :] <= own).sum()) if causal else QUERIES * KEYS


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("name", [*FORWARD, *BACKWARD])
def test_attention_of_every_signature(name: str, causal: bool) -> None:
    signature = FORWARD.get(name) or BACKWARD[name]
    mask = f"bf[1,1,{QUERIES},{KEYS}]" if "M" in signature else "-"
    done = work(name, attention_inputs(name, signature, str(causal), mask))
    assert isinstance(done, flops.Work), done
    product = 2 * 2 * 4 * 16 * pairs_of(name, causal)
    once = 2 * 2 * 4 * 16 * (2 * QUERIES + 2 * KEYS)  # bytes of query, result, key and value
    of_mask = 2 * QUERIES * KEYS if "M" in signature else 0
    passes = (2, 0, 1) if name in FORWARD else (5, 1, 2)
    assert (done.flops, done.recomputed) == (passes[0] * product, passes[1] * product)
    assert (done.bytes, done.dtype, done.matrix) == (passes[2] * once + of_mask, "bf16", True)


@pytest.mark.parametrize(("left", "right"), [(0, 0), (2, 0), (2, 3), (-1, 1), (100, 100)])
def test_a_sliding_window_leaves_the_pairs_inside_it(left: int, right: int) -> None:
    pairs = sum(
        1
        for query in range(6)
        for key in range(6)
        if (left < 0 or key >= query - left) and (right < 0 or key <= query + right)
    )
    inputs = f"bf[2,6,4,16] bf[2,6,4,16] bf[2,6,4,16] 0.0 - False {left} {right}"
    assert counted("flash_attn::_flash_attn_forward", inputs)[0] == 2 * 2 * 2 * 4 * 16 * pairs


@pytest.mark.parametrize(("kind", "pairs"), [("0", 24), ("1", 1 + 2 + 3), ("2", 6 + 7 + 8)])
def test_efficient_attention_names_the_corner_of_its_mask(kind: str, pairs: int) -> None:
    query, key = "bf[2,3,4,16]", "bf[2,8,4,16]"
    forward = f"{query} {key} {key} - - - - - 0.0 {kind} True"
    backward = f"{query} {query} {key} {key} - {query} - - 3 8 f[2,4,3] 0.0 - - {kind}"
    product = 2 * 2 * 4 * 16 * pairs
    assert counted("aten::_efficient_attention_forward", forward)[0] == 2 * product
    assert counted("aten::_efficient_attention_backward", backward)[0] == 5 * product


BATCH = "execute_3_context_1(sq5sk9sqsq25sqsk45)_generation_2(sq2sk30sqsq2sqsk30)"
OF_BATCH = (
    sum(9 - 5 + at + 1 for at in range(5)) + 30
)  # pairs: five queries of which the last sees nine keys, two more
CACHED = "bf[7,8,64] bf[99,4,8,16,8] bf[99,4,64,16]"
OVER_PAGES = table(
    (
        "vllm::unified_attention vllm::unified_attention_with_output sglang::unified_attention_with_output",
        "bf[7,8,64] bf[7,4,64] bf[7,4,64] bf[7,8,64]",
        (2 * 8 * OF_BATCH * 128, 2 * (7 * 8 + 39 * 4) * 128),
    ),
    (
        "_C::paged_attention_v1",
        f"bf[7,8,64] {CACHED}",
        (2 * 8 * OF_BATCH * 128, 2 * (7 * 8 + 39 * 4) * 128),
    ),
    (
        "_C::paged_attention_v2 _rocm_C::paged_attention",
        f"bf[7,8,64] f[1] f[1] f[1] {CACHED}",
        (2 * 8 * OF_BATCH * 128, 2 * (7 * 8 + 39 * 4) * 128),
    ),
    (
        "aiter::paged_attention_ragged",
        "bf[7,8,64] u8[9] bf[7,8,64] f8[99,1,4,64] f8[99,1,4,64]",
        (2 * 8 * OF_BATCH * 128, (2 * 7 * 8 + 39 * 4) * 128),
    ),
    (
        "sglang_profiler::attention_paged_attention_ragged*",
        "bf[7,8,64] u8[9] bf[7,8,64] bf[99,1,4,64] bf[99,1,4,64]",
        (2 * 8 * OF_BATCH * 128, 2 * (7 * 8 + 39 * 4) * 128),
    ),
)


@pytest.mark.parametrize(("name", "inputs", "expected"), OVER_PAGES)
def test_attention_over_pages_takes_the_lengths_from_the_annotation(
    name: str, inputs: str, expected: tuple[int, int]
) -> None:
    assert counted(name, inputs, BATCH) == expected
    assert "no annotation describes the batch" in str(work(name, inputs))


# -- normalisation, softmax and losses ----------------------------------------------------------------------------

BATCH_NORMS = (
    "batch_norm native_batch_norm cudnn_batch_norm miopen_batch_norm _native_batch_norm_legit _batch_norm_impl_index "
    "_batch_norm_with_update instance_norm"
)
ENGINE_NORMS = "_C::rms_norm sgl_kernel::rmsnorm sgl_kernel::gemma_rmsnorm flashinfer::rmsnorm flashinfer::norm"
ENGINE_SUMS = (
    "_C::fused_add_rms_norm sgl_kernel::fused_add_rmsnorm sgl_kernel::gemma_fused_add_rmsnorm "
    "flashinfer::fused_add_rmsnorm"
)
NORMALISATIONS = table(
    # mean 1, variance 3, subtract and scale 2; weight 1, bias 1; mean and deviation of each row are kept in 32 bits
    (
        "aten::layer_norm aten::native_layer_norm",
        "f[6,4] [4] f[4] f[4] 1e-5",
        (8 * 24, 4 * (48 + 8 + 12)),
    ),
    ("aten::layer_norm aten::native_layer_norm", "f[6,4] [4] - - 1e-5", (6 * 24, 4 * (48 + 12))),
    ("aten::native_layer_norm", "f[2,3,4] [3,4] f[3,4] - 1e-5", (7 * 24, 4 * (48 + 12 + 4))),
    ("aten::rms_norm", "f[6,4] [4] f[4] 1e-5", (4 * 24, 4 * (48 + 4))),
    ("aten::_fused_rms_norm", "bf[6,4] [4] bf[4] 1e-5", (4 * 24, 2 * (48 + 4) + 4 * 6)),
    ("fb::rms_norm", "bf[6,4] bf[4] bf[4]", (5 * 24, 2 * (48 + 8))),
    (aten(BATCH_NORMS), "f[2,3,4] f[3] f[3] f[3] f[3] True 0.1", (8 * 24, 4 * (48 + 6 + 12))),
    (aten(BATCH_NORMS), "f[2,3,4] f[3] f[3] f[3] f[3] False 0.1", (4 * 24, 4 * (48 + 6 + 6))),
    ("aten::batch_norm", "f[2,3,4] - - - - True 0.1", (6 * 24, 4 * 48)),
    ("aten::group_norm", "f[2,6,4] 3 f[6] f[6] 1e-5", (8 * 48, 4 * (96 + 12))),
    ("aten::native_group_norm", "f[2,6,4] f[6] f[6] 2 6 4 3 1e-5", (8 * 48, 4 * (96 + 12 + 12))),
    (
        "aten::native_layer_norm_backward",
        "f[6,4] f[6,4] [4] f[6,1] f[6,1] f[4] f[4] [True,True,True]",
        (12 * 24, 4 * (3 * 24 + 12 + 4 + 8)),
    ),
    (
        "aten::_fused_rms_norm_backward",
        "f[6,4] f[6,4] [4] f[6,1] f[4] [True,True]",
        (8 * 24, 4 * (3 * 24 + 6 + 4 + 4)),
    ),
    (
        "aten::native_batch_norm_backward aten::batch_norm_backward",
        "f[2,3,4] f[2,3,4] f[3] f[3] f[3] f[3] f[3] True",
        (12 * 24, 4 * (3 * 24 + 6 + 3 + 6)),
    ),
    (
        "aten::cudnn_batch_norm_backward aten::miopen_batch_norm_backward",
        "f[2,3,4] f[2,3,4] f[3] f[3] f[3] f[3] f[3] 1e-5",
        (12 * 24, 4 * (3 * 24 + 6 + 3 + 6)),
    ),
    (
        "aten::native_group_norm_backward",
        "f[2,6,4] f[2,6,4] f[2,3] f[2,3] f[6] 2 6 4 3",
        (12 * 48, 4 * (3 * 48 + 12 + 6 + 12)),
    ),
    (f"{ENGINE_NORMS} aiter::rmsnorm", "bf[6,4] bf[6,4] bf[4] 1e-5", (4 * 24, 2 * (48 + 4))),
    ("aiter::rms_norm aiter::rmsnorm2d_fwd", "bf[6,4] bf[4] 1e-5", (4 * 24, 2 * (48 + 4))),
    (ENGINE_SUMS, "bf[6,4] bf[6,4] bf[4] 1e-5", (5 * 24, 2 * (4 * 24 + 4))),
    (
        "aiter::add_rmsnorm aiter::rmsnorm2d_fwd_with_add aiter::rmsnorm2d_fwd_with_add_ck",
        "bf[6,4] bf[6,4] bf[6,4] bf[6,4] bf[4] 1e-5",
        (5 * 24, 2 * (4 * 24 + 4)),
    ),
    ("_C::rms_norm_static_fp8_quant", "f8[6,4] bf[6,4] bf[4] f[1] 1e-5", (6 * 24, 24 + 48 + 8 + 4)),
    (
        "_C::rms_norm_dynamic_per_token_quant",
        "f8[6,4] bf[6,4] bf[4] f[6,1] 1e-5",
        (6 * 24, 24 + 48 + 8 + 24),
    ),
    (
        "_C::fused_add_rms_norm_static_fp8_quant",
        "f8[6,4] bf[6,4] bf[6,4] bf[4] f[1] 1e-5",
        (7 * 24, 24 + 48 + 2 * 48 + 8 + 4),
    ),
    ("aten::softmax aten::log_softmax", "bf[6,4] -1 -", (5 * 24, 2 * 48)),
    (
        "aten::softmax aten::log_softmax aten::_safe_softmax",
        "bf[6,4] -1 6",
        (5 * 24, 48 + 96),
    ),  # in 32 bits
    ("aten::_softmax aten::_log_softmax", "h[6,4] -1 False", (5 * 24, 2 * 48)),
    ("aten::_softmax aten::_log_softmax", "h[6,4] -1 True", (5 * 24, 48 + 96)),
    (
        "aten::_softmax_backward_data aten::_log_softmax_backward_data",
        "f[6,4] f[6,4] -1 6",
        (4 * 24, 3 * 96),
    ),
    ("aten::_softmax_backward_data", "f[6,4] f[6,4] -1 5", (4 * 24, 2 * 96 + 48)),
    ("aten::cross_entropy_loss", "f[6,4] l[6] - 1 -100 0.0", (5 * 24, 96 + 48 + 4)),
    ("aten::cross_entropy_loss", "f[6,4] l[6] f[4] 0 -100 0.0", (5 * 24, 96 + 48 + 16 + 24)),
    ("aten::cross_entropy_loss", "f[6,4] f[6,4] - 2 -100 0.0", (5 * 24, 96 + 96 + 4)),
    ("aten::cross_entropy_loss", "f[2,4,3] l[2,3] - 0 -100 0.0", (5 * 24, 96 + 48 + 24)),
    ("aten::nll_loss_forward aten::nll_loss2d_forward", "f[6,4] l[6] - 1 -100", (6, 24 + 48 + 8)),
    ("aten::nll_loss_forward aten::nll_loss2d_forward", "f[6,4] l[6] - 0 -100", (6, 24 + 48 + 28)),
    (
        "aten::nll_loss_backward aten::nll_loss2d_backward",
        "f[] f[6,4] l[6] - 1 -100 f[]",
        (6, 4 + 48 + 96),
    ),
    (
        aten("mse_loss l1_loss smooth_l1_loss huber_loss kl_div"),
        "f[6,4] f[6,4] 1",
        (72, 2 * 96 + 4),
    ),
    (aten("mse_loss l1_loss smooth_l1_loss huber_loss kl_div"), "f[6,4] f[6,4] 0", (72, 3 * 96)),
    (aten("mse_loss"), "f[6,4] f[6,1] 2", (72, 96 + 24 + 4)),
    ("aten::binary_cross_entropy", "f[6,4] f[6,4] - 0", (72, 3 * 96)),
    ("aten::binary_cross_entropy", "f[6,4] f[6,4] f[4] 1", (72, 2 * 96 + 16 + 4)),
    ("aten::binary_cross_entropy_with_logits", "f[6,4] f[6,4] - - 1", (72, 2 * 96 + 4)),
    (
        " ".join(
            f"aten::{name}_backward"
            for name in ("mse_loss", "smooth_l1_loss", "huber_loss", "binary_cross_entropy")
        ),
        "f[] f[6,4] f[6,4] 1",
        (72, 4 + 3 * 96),
    ),
)


@pytest.mark.parametrize(("name", "inputs", "expected"), NORMALISATIONS)
def test_normalisations_and_losses(name: str, inputs: str, expected: tuple[int, int]) -> None:
    assert counted(name, inputs) == expected


# -- reductions, scans, selection, pooling and resampling ---------------------------------------------------------

ONE_EACH = "sum mean prod amax amin nansum nanmean"
THREE_EACH = "var std logsumexp"
NORMS = "norm linalg_vector_norm"
REDUCTIONS = table(
    (aten(ONE_EACH), "f[6,4] [1] False -", (24, 96 + 24)),
    (aten(ONE_EACH), "f[6,4] [0] True -", (24, 96 + 16)),
    (aten(ONE_EACH), "f[6,4] [0,1] False -", (24, 96 + 4)),
    (aten("sum mean prod"), "f[6,4] -", (24, 96 + 4)),
    (aten("amax amin"), "f[6,4] [] False", (24, 96 + 4)),
    (aten(THREE_EACH), "f[2,3,4] [-1] False", (72, 96 + 24)),
    (aten("var std"), "f[6,4] True", (72, 96 + 4)),
    (aten("var_mean std_mean"), "f[2,3,4] [0,2] 1 False", (72, 96 + 2 * 12)),
    (aten(NORMS), "f[6,4] 2 [1] False -", (48, 96 + 24)),
    (aten(NORMS), "bf[6,4] 2 [0,1] False -", (48, 48 + 2)),
    (aten("all any"), "b[6,4] [1] False", (24, 24 + 6)),
    (aten("all any"), "f[6,4]", (24, 96 + 1)),
    (aten("argmax argmin count_nonzero"), "f[6,4] 1 False", (24, 96 + 48)),
    (aten("argmax argmin count_nonzero"), "f[6,4] - False", (24, 96 + 8)),
    (aten("max min median"), "f[6,4]", (24, 96 + 4)),
    (aten("max min median"), "f[6,4] 1 False", (24, 96 + 6 * 12)),  # each with its place
    (aten("sum"), "i[6,4] [1] False -", (24, 96 + 48)),  # sums of small whole numbers are long
    (aten("sum"), "b[6,4] -", (24, 24 + 8)),
    ("aten::cumsum aten::cumprod aten::logcumsumexp", "f[6,4] 1 -", (24, 2 * 96)),
    ("aten::cumsum aten::cumprod", "i[6,4] 1 -", (24, 96 + 192)),
    ("aten::cumsum_", "i[6,4] 1 -", (24, 2 * 96)),
    ("fbgemm::asynchronous_complete_cumsum fb::asynchronous_complete_cumsum", "i[6]", (6, 24 + 28)),
    ("fb::offsets_range", "l[6] l[9]", (0, 48 + 72)),
    ("aten::topk", "f[6,4] 3 -1 True True", (0, 96 + 6 * 3 * 12)),
    ("aten::topk", "f[6,4] 2 0 True True", (0, 96 + 2 * 4 * 12)),
    ("aten::sort", "f[6,4] -1 False", (0, 96 + 24 * 12)),
    ("aten::argsort", "f[6,4] -1 False", (0, 96 + 24 * 8)),
    (
        "aten::max_pool2d_with_indices",
        "f[1,2,8,8] [2,2] [2,2] [0,0] [1,1] False",
        (32 * 4, 512 + 32 * 12),
    ),
    (
        "aten::max_pool2d_with_indices",
        "f[1,2,7,7] [3,3] [] [1,1] [1,1] False",
        (18 * 9, 392 + 18 * 12),
    ),
    (
        "aten::max_pool3d_with_indices",
        "f[1,2,4,4,4] [2,2,2] [2,2,2] [0,0,0] [1,1,1] False",
        (16 * 8, 512 + 16 * 12),
    ),
    ("aten::avg_pool2d", "f[1,2,8,8] [2,2] [2,2] [0,0] False True -", (32 * 4, 512 + 32 * 4)),
    ("aten::avg_pool2d", "f[1,2,7,7] [2,2] [2,2] [0,0] True True -", (32 * 4, 392 + 32 * 4)),
    ("aten::avg_pool3d", "f[2,4,4,4] [2] [2] [0] False True -", (16 * 8, 512 + 16 * 4)),
    (
        "aten::max_pool2d_with_indices_backward",
        "f[1,2,4,4] f[1,2,8,8] [2,2] [2,2] [0,0] [1,1] False l[1,2,4,4]",
        (32, 128 + 512 + 256),
    ),
    (
        "aten::avg_pool2d_backward",
        "f[1,2,4,4] f[1,2,8,8] [2,2] [2,2] [0,0] False True -",
        (32, 128 + 512),
    ),
    (
        "aten::_adaptive_avg_pool2d aten::adaptive_avg_pool2d",
        "f[2,3,8,8] [1,1]",
        (384, 4 * 384 + 24),
    ),
    ("aten::adaptive_avg_pool2d", "f[2,3,8,8] [4,2]", (384, 4 * 384 + 4 * 48)),
    ("aten::upsample_nearest1d", "f[1,2,8] [16] -", (0, 64 + 128)),
    ("aten::upsample_nearest2d", "f[1,2,4,4] [8,8] - -", (0, 128 + 512)),
    ("aten::upsample_nearest3d", "f[1,1,2,2,2] [4,4,4] - - -", (0, 32 + 256)),
    ("aten::upsample_linear1d", "f[1,2,8] [16] False -", (2 * 2 * 32, 64 + 128)),
    ("aten::upsample_bilinear2d", "f[1,2,4,4] [8,8] False - -", (2 * 4 * 128, 128 + 512)),
    ("aten::upsample_bicubic2d", "f[1,2,4,4] [8,8] False - -", (2 * 16 * 128, 128 + 512)),
    ("aten::upsample_trilinear3d", "f[1,1,2,2,2] [4,4,4] False - - -", (2 * 8 * 64, 32 + 256)),
)


@pytest.mark.parametrize(("name", "inputs", "expected"), REDUCTIONS)
def test_reductions(name: str, inputs: str, expected: tuple[int, int]) -> None:
    assert counted(name, inputs) == expected


# -- data movement, optimizers, serving engines and compiled kernels ----------------------------------------------

CACHE_UPDATES = "_C_cache_ops::reshape_and_cache_flash _C_cache_ops::reshape_and_cache aiter::reshape_and_cache sglang::store_cache"
CACHES = "bf[6,8,64] bf[6,8,64]"
QUANTISED = (
    "_C::static_scaled_fp8_quant _C::dynamic_scaled_fp8_quant _C::dynamic_per_token_scaled_fp8_quant "
    "sgl_kernel::sgl_per_token_quant_fp8 sgl_kernel::sgl_per_tensor_quant_fp8 aiter::dynamic_per_token_scaled_quant "
    "aiter::static_per_tensor_quant aiter::dynamic_per_tensor_quant _C::per_token_group_fp8_quant "
    "sgl_kernel::sgl_per_token_group_quant_fp8"
)
EXPERTS = (
    "vllm::fused_experts vllm::inplace_fused_experts vllm::outplace_fused_experts sglang::inplace_fused_experts "
    "sglang::outplace_fused_experts aiter::fused_moe_ vllm::rocm_aiter_fused_moe"
)
LISTS = "f{[3,4],[5,4]}"  # 32 elements, 128 bytes
ONE_PER_ELEMENT = (
    "abs add ceil clamp_max clamp_min cos div erf erfc exp expm1 floor frac lgamma log log10 log1p log2 maximum minimum "
    "mul neg pow reciprocal round rsqrt sigmoid sign sin sqrt sub tan tanh trunc"
)
MOVED = table(
    ("aten::copy_", "f[6,4] bf[6,4] False", (0, 96 + 48)),
    ("aten::copy_", "f[6,4] f[4] False", (0, 96 + 16)),
    (
        "aten::clone aten::contiguous aten::flip aten::roll aten::alias_copy",
        "bf[6,4] -",
        (0, 2 * 48),
    ),
    ("aten::_to_copy", "f[6,4] 15 - - - False -", (0, 96 + 48)),
    ("aten::_to_copy", "f[6,4] - - - - False -", (0, 2 * 96)),
    ("aten::to", "f[6,4] 5 False False -", (0, 96 + 48)),
    ("aten::to", "f[6,4] - 7 False False -", (0, 96 + 192)),
    ("aten::to", "f[6,4] bf[2] False False -", (0, 96 + 48)),
    ("aten::cat aten::_cat aten::concat aten::stack aten::_stack", f"{LISTS} 0", (0, 2 * 128)),
    ("aten::constant_pad_nd", "f[6,4] [1,1] 0", (0, 96 + 144)),
    ("aten::constant_pad_nd", "f[6,4] [1,1,0,2] 0", (0, 96 + 4 * 8 * 6)),
    ("aten::constant_pad_nd", "f[6,4] [-1,-1] 0", (0, 48 + 48)),
    (
        "fbgemm::permute_pooled_embs_auto_grad fbgemm::recat_embedding_grad_output_mixed_D_batch",
        "f[6,4] l[3] l[3]",
        (0, 2 * 96 + 48),
    ),
    ("torch::autograd::CppNode<fbgemm_gpu::PermutePooledEmbsFunction*", "f[6,4]", (0, 2 * 96)),
    (
        "fbgemm::permute_2D_sparse_data",
        "i[3] i[2,5] l[40] - 60",
        (0, 12 + (10 + 15) * 4 + 2 * 60 * 8),
    ),
    (
        "fbgemm::permute_2D_sparse_data",
        "i[3] i[2,5] l[40] f[40] 60",
        (0, 12 + (10 + 15) * 4 + 2 * 60 * 12),
    ),
    ("fbgemm::bounds_check_indices", "l[3] l[40] l[7] 1 l[1]", (0, 8 * (3 + 40 + 7 + 1))),
    ("aten::embedding", "bf[100,4] l[2,3] -1 False False", (0, 2 * 6 * 8 + 48)),
    (
        "aten::embedding_dense_backward aten::embedding_backward",
        "f[2,3,4] l[2,3] 100 -1 False",
        (24, 96 + 48 + 4 * 400),
    ),
    (
        "aten::_embedding_bag aten::embedding_bag aten::_embedding_bag_forward_only",
        "f[100,4] l[9] l[3] False 0",
        (36, (9 + 3) * 16 + 72 + 24),
    ),
    ("aten::index_select", "f[6,4] 1 l[3]", (0, 2 * 18 * 4 + 24)),
    ("aten::index_select", "f[6] 0 l[3]", (0, 2 * 3 * 4 + 24)),
    ("aten::gather", "f[6,4] 1 l[6,2] False", (0, 2 * 12 * 4 + 96)),
    ("aten::scatter_", "f[6,4] 1 l[6,2] f[6,2]", (0, 96 + 48 + 48)),
    ("aten::scatter_", "f[6,4] 1 l[6,2] 0", (0, 96 + 48)),
    ("aten::scatter", "f[6,4] 1 l[6,2] f[6,2]", (0, 96 + 48 + 48 + 2 * 96)),
    ("aten::scatter_add_", "f[6,4] 1 l[6,2] f[6,2]", (12, 96 + 3 * 48)),
    ("aten::scatter_add", "f[6,4] 1 l[6,2] f[6,2]", (12, 96 + 3 * 48 + 2 * 96)),
    ("aten::index_add_", "f[6,4] 0 l[3] f[3,4] 1", (12, 24 + 3 * 48)),
    ("aten::index_add", "f[6,4] 0 l[3] f[3,4] 1", (12, 24 + 3 * 48 + 2 * 96)),
    ("aten::index_copy_", "f[6,4] 0 l[3] f[3,4]", (0, 24 + 2 * 48)),
    ("aten::index", "f[6,4] f{[3]}", (0, 2 * 3 * 16 + 24)),
    (
        CACHE_UPDATES,
        f"{CACHES} f8[9,16,8,64] f8[9,16,8,64] l[6] -",
        (0, 2 * 3072 * 2 + 2 * 3072 + 48),
    ),
    ("vllm::unified_kv_cache_update", f"{CACHES} -", (0, 4 * 3072 * 2)),
    (aten(ONE_PER_ELEMENT, prefix="_foreach_"), LISTS, (32, 2 * 128)),
    (aten(ONE_PER_ELEMENT, prefix="_foreach_", in_place=True), f"{LISTS} {LISTS}", (32, 3 * 128)),
    (
        aten("addcmul addcdiv", prefix="_foreach_", in_place=True),
        f"{LISTS} {LISTS} {LISTS} 1",
        (96, 4 * 128),
    ),
    (aten("addcmul addcdiv", prefix="_foreach_"), f"{LISTS} {LISTS} {LISTS} 1", (96, 4 * 128)),
    (aten("lerp", prefix="_foreach_", in_place=True), f"{LISTS} {LISTS} 0.1", (96, 3 * 128)),
    (aten("lerp", prefix="_foreach_"), f"{LISTS} {LISTS} 0.1", (96, 3 * 128)),
    (aten("copy copy_", prefix="_foreach_"), f"{LISTS} {LISTS} False", (0, 2 * 128)),
    (aten("mul", prefix="_foreach_", in_place=True), f"{LISTS} f[]", (32, 2 * 128 + 4)),
    ("aten::_foreach_zero_", LISTS, (0, 128)),
    ("aten::_foreach_norm", f"{LISTS} 2", (64, 128 + 8)),
    (
        "aten::_fused_adam_ aten::_fused_adamw_",
        f"{LISTS} {LISTS} {LISTS} {LISTS}",
        (14 * 32, 7 * 128),
    ),
    ("aten::_fused_sgd_", f"{LISTS} {LISTS} {LISTS}", (4 * 32, 5 * 128)),
    ("aten::_fused_adagrad_", f"{LISTS} {LISTS} {LISTS}", (7 * 32, 5 * 128)),
    (
        EXPERTS,
        "bf[2,64] bf[16,32,64] bf[16,64,16] f[2,4] i[2,4]",
        (2 * 8 * (64 * 32 + 16 * 64), 2 * 256 + 8 * 2 * (2048 + 1024) + 2 * 32),
    ),
    (
        EXPERTS,
        "bf[9,64] bf[4,32,64] bf[4,64,16] f[9,2] i[9,2]",
        (2 * 18 * (64 * 32 + 16 * 64), 2 * 9 * 128 + 4 * 2 * (2048 + 1024) + 2 * 72),
    ),
    (
        "_moe_C::topk_softmax sgl_kernel::topk_softmax aiter::topk_softmax",
        "f[6,2] i[6,2] i[6,2] bf[6,16]",
        (5 * 96, 3 * 48 + 192),
    ),
    ("_moe_C::grouped_topk sgl_kernel::moe_fused_gate", "f[6,16] f[16] 4 2", (5 * 96, 384 + 64)),
    ("_moe_C::moe_sum sgl_kernel::moe_sum aiter::moe_sum", "bf[6,2,4] bf[6,4]", (48, 96 + 48)),
    (
        "_C::rotary_embedding sgl_kernel::rotary_embedding aiter::rope_cached_positions_2c_fwd_inplace",
        "l[6] bf[6,32] bf[6,8] 8 bf[100,8] True",
        (3 * 240, 48 + 2 * 480 + 96),
    ),
    ("_C::rotary_embedding", "l[6] bf[6,32] - 8 bf[100,8] True", (3 * 192, 48 + 2 * 384 + 96)),
    (
        "sgl_kernel::apply_rope_pos_ids_cos_sin_cache",
        "bf[6,32] bf[6,8] bf[6,32] bf[6,8] f[100,8] l[6]",
        (3 * 240, 2 * 480 + 48 + 192),
    ),
    (QUANTISED, "f8[6,4] bf[6,4] f[6,1]", (48, 24 + 48 + 24)),
    (
        "_C::static_scaled_int8_quant _C::dynamic_scaled_int8_quant sgl_kernel::sgl_per_token_group_quant_int8",
        "i8[6,4] bf[6,4] f[6,1]",
        (48, 24 + 48 + 24),
    ),
    ("_C::scaled_fp4_quant", "u8[6,2] bf[6,4] u8[6,1] f[]", (48, 12 + 48 + 6 + 4)),
    ("fbgemm::FloatToFP8RowwiseQuantized", "f[6,16] True", (192, 384 + 6 * 24)),
    ("fbgemm::FP8RowwiseQuantizedToFloat", "u8[6,24] True", (192, 144 + 6 * 16 * 4)),
    ("fbgemm::FloatToHFP8Quantized", "f[6,16] 4 7 1", (192, 384 + 96)),
    ("fbgemm::HFP8QuantizedToFloat", "u8[6,16] 4 7", (192, 96 + 384)),
    # an operation for each operator in the name that computes
    ("triton_poi_fused_add_mul_7", "f[24] f[24] f[24] 24", (48, 3 * 96)),
    ("triton_poi_fused_clone_view_3", "bf[24] bf[24] 24", (0, 2 * 48)),
    ("triton_poi_fused_add", "f[24] f[1] 24", (24, 96 + 4)),
    ("triton_red_fused__softmax_2", "f[6,4] f[6,4] 6 4", (5 * 24, 2 * 96)),
    ("triton_per_fused_native_layer_norm_1", "f[6,4] f[4] f[4] f[6,4] 6 4", (8 * 24, 2 * 96 + 32)),
    ("triton_per_fused_add_lerp_0", "f[24] f[24] f[24] 24", (4 * 24, 3 * 96)),
    ("triton_tem_fused_mm_4", "bf[7,5] bf[5,11] bf[7,11]", (FLOPS, 2 * (35 + 55 + 77))),
    (
        "triton_tem_fused_addmm_4",
        "bf[11] bf[7,5] bf[5,11] bf[7,11]",
        (FLOPS, 2 * (11 + 35 + 55 + 77)),
    ),
)


@pytest.mark.parametrize(("name", "inputs", "expected"), MOVED)
def test_movement_optimizers_and_engines(name: str, inputs: str, expected: tuple[int, int]) -> None:
    assert counted(name, inputs) == expected


# -- all of them --------------------------------------------------------------------------------------------------

BY_PATTERN = {
    "triton_poi_fused_*",
    "triton_red_fused_*",
    "triton_per_fused_*",
    "triton_tem_fused_*",
}
ELSEWHERE = {
    "vllm::moe_forward",  # by the grids of its kernels: test_flops_models.py
    "aten::where_",  # PyTorch has none
    # by their closed form: test_recurrent.py
    *("aten::lstm", "aten::gru", "aten::rnn_tanh", "aten::rnn_relu"),
    *("aten::_cudnn_rnn", "aten::_cudnn_rnn_backward", "aten::miopen_rnn"),
    *("aten::miopen_rnn_backward", "aten::mkldnn_rnn_layer", "aten::mkldnn_rnn_layer_backward"),
}


def test_every_model_stands_in_a_table() -> None:
    assert set(flops.MODELS.names()) - TESTED - BY_PATTERN - ELSEWHERE == set()
