"""FLOPs and bytes of matrix products and convolutions."""

import math

from msgspec import Struct

from traceloom.analyze.flops.registry import (
    DTYPE_BYTES,
    MODELS,
    Call,
    Tensor,
    Unknown,
    Work,
    derive_broadcast_shape,
)

FAMILY = "matrix product"


def estimate_product(
    a: Tensor, b: Tensor, out_dtype: str, *extra: Tensor, b_is_nk: bool = False
) -> Work:
    """(..., M, K) by (K, N), or by (N, K) where `b_is_nk`; every operand and the result once."""
    k = a.shape[-1]
    n, inner = (b.shape[0], b.shape[1]) if b_is_nk else (b.shape[1], b.shape[0])
    if k != inner or len(b.shape) != 2:
        raise Unknown("the recorded shapes are no matrix product")
    m = math.prod(a.shape[:-1])
    moved = (
        a.bytes + b.bytes + m * n * DTYPE_BYTES[out_dtype] + sum(tensor.bytes for tensor in extra)
    )
    return Work(2 * m * n * k, moved, _choose_arithmetic(a, b), matrix=True)


def _choose_arithmetic(a: Tensor, b: Tensor) -> str:
    """Returns the type the matrix units work in: that of the wider operand (8-bit weights are
    widened for 16-bit inputs).
    """
    wide = a if a.size >= b.size else b
    return "int8" if wide.dtype == "uint8" else wide.dtype


@MODELS.register("aten::addmm", "aten::addmm_", "aten::_addmm_activation", family=FAMILY, inputs=6)
@MODELS.register("aten::mm", "aten::_sparse_semi_structured_mm", family=FAMILY, inputs=4)
def estimate_mm(call: Call) -> Work:
    """(a, b) or (bias, a, b, beta): 2·M·N·K; the bias is read where `beta` is not zero."""
    first_input = int("addmm" in call.name)  # (a, b), or (bias, a, b, beta)
    bias = [call.tensor(0)] if first_input and call.number(3, 1.0) else []
    return estimate_product(
        call.tensor(first_input),
        call.tensor(first_input + 1),
        call.tensor(first_input).dtype,
        *bias,
    )


@MODELS.register("aten::baddbmm", "aten::baddbmm_", family=FAMILY, inputs=6)
@MODELS.register("aten::bmm", family=FAMILY, inputs=3)
def estimate_bmm(call: Call) -> Work:
    """(a, b) or (bias, a, b, beta) for a batch: 2·B·M·N·K."""
    first_input = int(call.name != "aten::bmm")
    a, b = call.tensor(first_input), call.tensor(first_input + 1)
    bias = call.tensor(0).bytes if first_input and call.number(3, 1.0) else 0
    (batch, m, k), (other, inner, n) = a.shape, b.shape
    if batch != other or k != inner:
        raise Unknown("the recorded shapes are no batched matrix product")
    moved = a.bytes + b.bytes + batch * m * n * a.size + bias
    return Work(2 * batch * m * n * k, moved, _choose_arithmetic(a, b), matrix=True)


@MODELS.register("aten::addbmm", family=FAMILY)
def estimate_addbmm(call: Call) -> Work:
    """(out, a, b): 2·B·M·N·K; the products of a batch are added to one matrix, which is read and
    written.
    """
    out, a, b = call.tensor(0), call.tensor(1), call.tensor(2)
    (batch, m, k), n = a.shape, b.shape[2]
    if b.shape != (batch, k, n):
        raise Unknown("the recorded shapes are no batched matrix product")
    return Work(2 * batch * m * n * k, a.bytes + b.bytes + 2 * out.bytes, a.dtype, matrix=True)


@MODELS.register(
    "aten::linear",
    "vllm::rocm_unquantized_gemm",
    "vllm::rocm_unquantized_gemm_impl",
    "aten::_weight_int8pack_mm",
    "bitsandbytes::int8_linear_matmul",
    "aiter::gemm_a16w16",
    family=FAMILY,
)
def estimate_linear(call: Call) -> Work:
    """(a, weight [N, K], bias): 2·M·N·K; every operand once."""
    if call.name == "aten::linear" and len(call.shapes) > 4:
        raise Unknown("more inputs are recorded than the operator has")
    a, weight = call.tensor(0), call.tensor(1)
    out = "int32" if call.name.startswith("bitsandbytes") else a.dtype
    if len(weight.shape) == 1:
        return _estimate_vector_product(a, weight)
    return estimate_product(a, weight, out, *call.optional(2), b_is_nk=True)


@MODELS.register(
    "aten::mv", "aten::dot", "aten::vdot", "aten::addmv", "aten::addmv_", family=FAMILY
)
def estimate_mv(call: Call) -> Work:
    """(a, b), or (bias, a, b) of `addmv`: 2 per value of the matrix, or of a vector."""
    if "addmv" not in call.name:  # then (a, b), else (bias, a, b)
        return _estimate_vector_product(call.tensor(0), call.tensor(1))
    work = _estimate_vector_product(call.tensor(1), call.tensor(2))
    return Work(work.flops, work.bytes + call.tensor(0).bytes, work.dtype, matrix=True)


def _estimate_vector_product(a: Tensor, b: Tensor) -> Work:
    if a.shape[-1:] != b.shape:
        raise Unknown("the recorded shapes are no matrix product")
    rows = math.prod(a.shape[:-1])
    return Work(
        2 * a.numel, a.bytes + b.bytes + rows * a.size, _choose_arithmetic(a, b), matrix=True
    )


@MODELS.register("aten::matmul", family=FAMILY, inputs=3)
def estimate_matmul(call: Call) -> Work:
    """2·M·N·K for operands of any rank: a vector counts as one row or column, batches are
    broadcast.
    """
    a, b = call.tensor(0), call.tensor(1)
    if not a.shape or not b.shape or a.shape[-1] != b.shape[-2 if len(b.shape) > 1 else 0]:
        raise Unknown("the recorded shapes are no matrix product")
    left = a.shape if len(a.shape) > 1 else (1, *a.shape)
    right = b.shape if len(b.shape) > 1 else (*b.shape, 1)
    result = math.prod(derive_broadcast_shape(left[:-2], right[:-2])) * left[-2] * right[-1]
    return Work(
        2 * result * a.shape[-1],
        a.bytes + b.bytes + result * a.size,
        _choose_arithmetic(a, b),
        matrix=True,
    )


@MODELS.register("aten::_scaled_mm", "trtllm::cublas_scaled_mm", family=FAMILY)
def estimate_scaled_mm(call: Call) -> Work:
    """(a, b, scale_a, scale_b, bias, ..., out_dtype): the type of the result stands among the
    numbers after.
    """
    a, b = call.tensor(0), call.tensor(1)
    packed = 2 if a.dtype == "fp4" else 1
    out_dtype = next(
        (call.dtype_code(index) for index in range(2, len(call.types)) if call.dtype_code(index)),
        None,
    )
    out = out_dtype or ("bf16" if call.name.startswith("trtllm") else a.dtype)
    work = estimate_product(a, b, out, *call.optional(2, 3, 4))
    return Work(work.flops * packed, work.bytes, a.dtype, matrix=True)


_LIBRARY_INPUTS = {
    "aten::_int_mm": (0, (), False),
    **dict.fromkeys(("_C::cutlass_scaled_mm", "_C::cutlass_scaled_mm_azp"), (1, (3, 4, 5), False)),
    **dict.fromkeys(
        (
            "sgl_kernel::fp8_scaled_mm",
            "sgl_kernel::int8_scaled_mm",
            "sgl_kernel::fp8_blockwise_scaled_mm",
        ),
        (0, (2, 3, 5), False),
    ),
    **dict.fromkeys(
        (
            "aiter::gemm_a8w8",
            "aiter::gemm_a8w8_blockscale",
            "aiter::gemm_a8w8_CK",
            "aiter::gemm_a8w8_bpreshuffle",
            "aiter::gemm_a8w8_blockscale_bpreshuffle",
            "vllm::gemm_with_dynamic_quant",
        ),
        (0, (2, 3), True),
    ),
}
"""Position of the first operand (1: behind the result), those of scales and biases, and whether b
is (N, K).
"""


@MODELS.register(*_LIBRARY_INPUTS, family=FAMILY)
def estimate_library_product(call: Call) -> Work:
    """2·M·N·K; where the operands stand, and which way the second one lies, is known for each
    library.
    """
    first_input, extra_inputs, b_is_nk = _LIBRARY_INPUTS[call.name]
    out = (
        call.tensor(0).dtype if first_input else "int32" if call.name == "aten::_int_mm" else "bf16"
    )
    if call.name.startswith("sgl_kernel"):
        out = call.dtype_code(4) or out
    return estimate_product(
        call.tensor(first_input),
        call.tensor(first_input + 1),
        out,
        *call.optional(*extra_inputs),
        b_is_nk=b_is_nk,
    )


@MODELS.register("tex_ts::te_gemm_ts", family=FAMILY)
def estimate_te_gemm(call: Call) -> Work:
    """TransformerEngine 1: (A, A_scale, fp8, type, transa, B, B_scale, fp8, type, transb, D, ...),
    column-major.
    """
    a, b, out = call.tensor(0), call.tensor(5), call.tensor(10)
    turned_a, turned_b = bool(call.integer(4)), bool(call.integer(9))
    m, k = (a.shape[0], a.shape[1]) if turned_a else (a.shape[1], a.shape[0])
    n = b.shape[1] if turned_b else b.shape[0]
    fp8 = a.dtype in ("uint8", "fp8") and b.dtype in ("uint8", "fp8")
    return Work(
        2 * m * n * k, a.bytes + b.bytes + out.bytes, "fp8" if fp8 else a.dtype, matrix=True
    )


@MODELS.register("aten::_grouped_mm", "aten::_scaled_grouped_mm", family="grouped matrix product")
def estimate_grouped_mm(call: Call) -> Work:
    """Rows (or the inner dimension) are cut in groups by offsets that do not change the sum of the
    work.
    """
    a, b = call.tensor(0), call.tensor(1)
    out = "bf16" if a.dtype == "fp8" else a.dtype
    m, k, n = a.shape[-2], a.shape[-1], b.shape[-1]
    rows = m
    if len(a.shape) == len(b.shape) == 3:
        rows = a.shape[0] * m
    elif len(a.shape) == len(b.shape) == 2:
        offsets = next((tensor for tensor in call.tensors()[2:] if tensor.dtype == "int32"), None)
        if offsets is None:
            raise Unknown("the number of groups is not recorded")
        moved = a.bytes + b.bytes + offsets.shape[0] * m * n * DTYPE_BYTES[out]
        return Work(2 * m * n * k, moved, a.dtype, matrix=True)
    elif len(a.shape) != 2:
        raise Unknown("groups of columns are not modelled")
    return Work(
        2 * rows * n * k, a.bytes + b.bytes + rows * n * DTYPE_BYTES[out], a.dtype, matrix=True
    )


CONVOLUTION_FAMILY = "convolution"


class ConvolutionInputs(Struct, frozen=True):
    """Positions of the inputs in one signature of convolution; None for inputs that it does not
    have.
    """

    stride: int
    padding: int
    dilation: int | None
    groups: int | None
    bias: int | None = 2
    output_padding: int | None = None
    transposed: int | bool = False


_CONVOLUTION_INPUTS = {
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
    "aten::cudnn_convolution_transpose": ConvolutionInputs(
        4, 2, 5, 6, bias=None, output_padding=3, transposed=True
    ),
    "aten::cudnn_convolution_relu": ConvolutionInputs(3, 4, 5, 6),
    "aten::cudnn_convolution_add_relu": ConvolutionInputs(5, 6, 7, 8, bias=4),
    "aten::miopen_convolution": ConvolutionInputs(4, 3, 5, 6),
    "aten::miopen_depthwise_convolution": ConvolutionInputs(4, 3, 5, 6),
    "aten::miopen_convolution_transpose": ConvolutionInputs(
        5, 3, 6, 7, output_padding=4, transposed=True
    ),
    "aten::miopen_convolution_relu": ConvolutionInputs(3, 4, 5, 6),
    "aten::mkldnn_convolution": ConvolutionInputs(4, 3, 5, 6),
    "aten::_conv_depthwise2d": ConvolutionInputs(4, 5, 6, None, bias=3),
    "aten::thnn_conv2d": ConvolutionInputs(4, 5, None, None, bias=3),
    "aten::_slow_conv2d_forward": ConvolutionInputs(4, 5, None, None, bias=3),
    "aten::slow_conv_dilated2d": ConvolutionInputs(4, 5, 6, None, bias=3),
    "aten::slow_conv3d_forward": ConvolutionInputs(4, 5, None, None, bias=3),
}


def _count_macs(
    x: tuple[int, ...], weight: tuple[int, ...], out: tuple[int, ...], *, transposed: bool
) -> int:
    """Returns the multiply-adds: every position of the output (transposed: of the input) meets the
    whole filter once.
    """
    return x[0] * math.prod((x if transposed else out)[2:]) * math.prod(weight)


@MODELS.register(*_CONVOLUTION_INPUTS, family=CONVOLUTION_FAMILY)
def estimate_convolution(call: Call) -> Work:
    """Every position of the result (transposed: of the input) meets the whole filter once, 2 per
    multiply-add.
    """
    inputs = _CONVOLUTION_INPUTS[call.name]
    x, weight = call.tensor(0), call.tensor(1)
    transposed = (
        inputs.transposed if isinstance(inputs.transposed, bool) else call.flag(inputs.transposed)
    )
    rank = len(weight.shape) - 2
    shape = x.shape if len(x.shape) == rank + 2 else (1, *x.shape)
    if len(shape) != rank + 2 or rank < 1:
        raise Unknown("the recorded shapes are no convolution")
    groups = (
        call.integer(inputs.groups) if inputs.groups is not None else shape[1] // weight.shape[1]
    )
    stride = call.sizes(inputs.stride, rank)
    dilation = call.sizes(inputs.dilation, rank) if inputs.dilation is not None else [1] * rank
    word = call.text(inputs.padding).strip('"')
    padding = [0] * rank if word in ("same", "valid") else call.sizes(inputs.padding, rank)
    sizes = []
    for dim, size in enumerate(shape[2:]):
        reach = dilation[dim] * (weight.shape[dim + 2] - 1)
        if word == "same":
            sizes.append(size)
        elif transposed:
            extra_size = (
                call.sizes(inputs.output_padding, rank)[dim]
                if inputs.output_padding is not None
                else 0
            )
            sizes.append((size - 1) * stride[dim] - 2 * padding[dim] + reach + extra_size + 1)
        else:
            sizes.append((size + 2 * padding[dim] - reach - 1) // stride[dim] + 1)
    if min(sizes) < 0 or shape[1] != (weight.shape[0] if transposed else weight.shape[1] * groups):
        raise Unknown("the recorded sizes are no convolution")
    channels = weight.shape[1] * groups if transposed and word != "same" else weight.shape[0]
    out = (shape[0], channels, *sizes)
    more_inputs = call.optional(*([inputs.bias] if inputs.bias is not None else []))
    more_inputs += [call.tensor(2)] if call.name.endswith("add_relu") else []
    moved = (
        x.bytes
        + weight.bytes
        + math.prod(out) * x.size
        + sum(tensor.bytes for tensor in more_inputs)
    )
    return Work(
        2 * _count_macs(shape, weight.shape, out, transposed=transposed),
        moved,
        x.dtype,
        matrix=True,
    )


@MODELS.register(
    "aten::convolution_backward",
    "aten::convolution_backward_overrideable",
    family=CONVOLUTION_FAMILY,
)
def estimate_convolution_backward(call: Call) -> Work:
    """As many multiply-adds as forward for each of the gradients of input and weight that are asked
    for.
    """
    grad, x, weight = call.tensor(0), call.tensor(1), call.tensor(2)
    shift = -1 if call.name.endswith("overrideable") else 0
    mask = call.integers(10 + shift)
    if mask is None or len(mask) != 3:
        raise Unknown("which gradients are asked for is not recorded")
    gradient_flops = 2 * _count_macs(
        x.shape, weight.shape, grad.shape, transposed=call.flag(7 + shift)
    )
    needs_input, needs_weight, needs_bias = (bool(flag) for flag in mask)
    # Gradient of the input reads the weight, that of the weight reads the input; both read the
    # incoming one.
    moved = (
        grad.bytes
        + (needs_input + needs_weight) * (x.bytes + weight.bytes)
        + needs_bias * grad.shape[1] * grad.size
    )
    if needs_input and needs_weight:  # each of the two is read once and written once
        moved = grad.bytes + 2 * x.bytes + 2 * weight.bytes + needs_bias * grad.shape[1] * grad.size
    return Work(gradient_flops * (needs_input + needs_weight), moved, x.dtype, matrix=True)


RECURRENT_FAMILY = "recurrent network"
_GATES = {"0": 1, "1": 1, "2": 4, "3": 3}  # by the mode of the libraries: ReLU, tanh, LSTM, GRU
# Positions of mode, hidden size, size of the projection, layers and bidirectional.
_RECURRENT_INPUTS = {
    "aten::_cudnn_rnn": (6, 7, 8, 9, 13),
    "aten::_cudnn_rnn_backward": (10, 11, 12, 13, 17),
    "aten::miopen_rnn": (5, 6, None, 7, 11),
    "aten::miopen_rnn_backward": (10, 11, None, 12, 16),
}


@MODELS.register(
    "aten::lstm",
    "aten::gru",
    "aten::rnn_tanh",
    "aten::rnn_relu",
    "aten::mkldnn_rnn_layer",
    "aten::mkldnn_rnn_layer_backward",
    *_RECURRENT_INPUTS,
    family=RECURRENT_FAMILY,
)
def estimate_recurrent_network(call: Call) -> Work:
    """Every position of every sequence meets all weights of all layers and directions, 2 per
    multiply-add; backward twice, for the gradients of what goes in and of the weights.
    """
    x = call.tensor(0)
    matrices: list[list[int]]
    if call.name.startswith("aten::mkldnn"):
        matrices = [list(call.tensor(index).shape) for index in (1, 2)]
        out_width = matrices[1][-1]
    elif call.name in _RECURRENT_INPUTS:
        mode, hidden, projection, layers, both = _RECURRENT_INPUTS[call.name]
        directions, gates = 1 + call.flag(both), _GATES.get(call.text(mode), 0)
        width = call.integer(hidden)
        state = (call.integer(projection, 0) if projection is not None else 0) or width
        widths = [x.shape[-1], *[directions * state] * (call.integer(layers) - 1)]
        matrices = [[gates * width, size + state] for size in widths for _ in range(directions)]
        matrices += [[state, width]] * directions * len(widths) if state != width else []
        out_width = directions * state
    else:
        weights = 2 + call.is_list(3)  # a packed sequence has the sizes of its batches, too
        shapes = call.shapes[weights] if call.is_list(weights) else []
        matrices = [shape for shape in shapes if isinstance(shape, list) and len(shape) == 2]
        if len(matrices) < 2:
            raise Unknown("the weights are not recorded")
        out_width = matrices[1][-1] * (1 + call.flag(5 + weights))
    if not all(map(math.prod, matrices)):
        raise Unknown("the kind of network or its sizes are not recorded")
    rows, weight_size = math.prod(x.shape[:-1]), sum(map(math.prod, matrices))
    passes = 2 if call.name.endswith("backward") else 1
    moved = passes * (x.bytes + (weight_size + rows * out_width) * x.size)
    return Work(2 * passes * rows * weight_size, moved, x.dtype, matrix=True)
