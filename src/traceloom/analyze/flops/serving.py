"""FLOPs and bytes of operators of serving engines, and of Inductor kernels."""

import math
import re

from traceloom.analyze.flops.registry import DTYPE_BYTES, MODELS, Call, Unknown, Work


@MODELS.register(
    "vllm::fused_experts",
    "vllm::inplace_fused_experts",
    "vllm::outplace_fused_experts",
    "sglang::inplace_fused_experts",
    "sglang::outplace_fused_experts",
    "aiter::fused_moe_",
    "vllm::rocm_aiter_fused_moe",
    family="mixture of experts",
)
def estimate_fused_experts(call: Call) -> Work:
    """Each token goes through its chosen experts: 2·K·N1 + 2·N2·K; no more experts are read than
    are chosen.
    """
    # Routing: tokens by experts per token
    tokens, first, second, routing = (call.tensor(index) for index in range(4))
    if len(first.shape) != 3 or len(second.shape) != 3 or len(routing.shape) != 2:
        raise Unknown("the recorded shapes are no mixture of experts")
    routed_count = routing.numel
    experts, n1, k = first.shape
    n2 = second.shape[2]
    if k != tokens.shape[-1]:
        raise Unknown("the weights are packed, and the recorded shapes do not say how")
    weights = min(experts, routed_count) * (first.bytes + second.bytes) // experts
    moved = 2 * tokens.bytes + weights + 2 * routing.bytes
    return Work(2 * routed_count * (k * n1 + n2 * second.shape[1]), moved, first.dtype, matrix=True)


_MATMUL_OGS_KERNEL = re.compile(
    r"^_matmul_ogs_[NT]{3}_(\w+?)x(\w+?)x(mx\w+?|\w+?)_(\d+)x(\d+)x\d+x1(_swiglu)?(?:_|$)"
)
_PACKED_BYTES = {"mxfp4": 17 / 32, "mxfp8": 33 / 32}  # with one byte of scale for 32 values


@MODELS.register("vllm::moe_forward", family="mixture of experts", inside=True)
def estimate_triton_experts(call: Call) -> Work:
    """Two products of triton_kernels, (tokens, scores of the experts); of their weights only the
    grids tell the sizes.

    A grid has a block for each tile of columns of each tile of rows. Tiles of rows are as many as
    rows that are spread over the experts can need at most, tiles of columns what is left; so
    columns are counted up to a whole tile. Of a gated product half of the columns goes into the
    next one.
    """
    tokens, scores = call.tensor(0), call.tensor(1)
    (count, width), experts = tokens.shape, scores.shape[-1]
    per_token = next(
        (inner.shapes[0][-1] for inner in call.inside if inner.name == "SortTokens"), None
    )
    products = [
        (match, kernel.grid)
        for kernel in call.kernels
        if (match := _MATMUL_OGS_KERNEL.match(kernel.name))
    ]
    if per_token is None or len(products) != 2:
        raise Unknown("the sizes of the experts are not recorded")
    routed_count = count * per_token
    flops = weights = 0
    for match, grid in products:
        block_rows, block_columns = int(match[4]), int(match[5])
        columns, remainder = divmod(
            math.prod(grid), _count_row_tiles(routed_count, experts, block_rows)
        )
        if remainder or not columns:
            raise Unknown("the grids do not determine the sizes of the experts")
        columns *= block_columns
        flops += 2 * routed_count * width * columns
        weights += width * columns
        width = columns // 2 if match[6] else columns
    weight_bytes = _PACKED_BYTES.get(products[0][0][3]) or DTYPE_BYTES.get(
        products[0][0][3], tokens.size
    )
    moved = (
        2 * tokens.bytes + scores.bytes + round(min(experts, routed_count) * weights * weight_bytes)
    )
    return Work(flops, moved, tokens.dtype, matrix=True)


def _count_row_tiles(rows: int, experts: int, block: int) -> int:
    """Returns the most tiles of rows that this many rows need, however they are spread over the
    experts.
    """
    return rows if rows <= experts else experts - 1 - (experts - rows - 1) // block


@MODELS.register(
    "_moe_C::topk_softmax",
    "sgl_kernel::topk_softmax",
    "aiter::topk_softmax",
    "_moe_C::grouped_topk",
    "sgl_kernel::moe_fused_gate",
    family="mixture of experts",
)
def estimate_gating(call: Call) -> Work:
    """Softmax over the experts (5 per score); every tensor once."""
    tensors = call.tensors()
    scores = max(tensors, key=lambda tensor: tensor.numel)
    return Work(5 * scores.numel, sum(tensor.bytes for tensor in tensors), scores.dtype)


@MODELS.register(
    "_moe_C::moe_sum", "sgl_kernel::moe_sum", "aiter::moe_sum", family="mixture of experts"
)
def estimate_combine(call: Call) -> Work:
    """(tokens by experts per token by width, result): the outputs of a token's experts are
    added.
    """
    x, out = call.tensor(0), call.tensor(1)
    return Work(x.numel, x.bytes + out.bytes, x.dtype)


_ROTARY_INPUTS = {
    **dict.fromkeys(
        (
            "_C::rotary_embedding",
            "sgl_kernel::rotary_embedding",
            "aiter::rope_cached_positions_2c_fwd_inplace",
        ),
        (0, (1, 2), 4),
    ),
    "sgl_kernel::apply_rope_pos_ids_cos_sin_cache": (
        5,
        (0, 1),
        4,
    ),  # the results are inputs 2 and 3
}
"""Positions of the positions, of query and key, and of the table of cosines."""


@MODELS.register(*_ROTARY_INPUTS, family="rotary embedding")
def estimate_rotary(call: Call) -> Work:
    """Query and key (where there is one) are turned, 3 operations per element; cosines per
    position.
    """
    at_positions, at_parts, at_table = _ROTARY_INPUTS[call.name]
    positions, query = call.tensor(at_positions), call.tensor(at_parts[0])
    parts = [query, *call.optional(at_parts[1])]
    cosines = sum(
        positions.numel * table.shape[-1] * table.size for table in call.optional(at_table)
    )
    moved = 2 * sum(tensor.bytes for tensor in parts) + positions.bytes + cosines
    return Work(3 * sum(tensor.numel for tensor in parts), moved, query.dtype)


@MODELS.register(
    "_C::static_scaled_fp8_quant",
    "_C::dynamic_scaled_fp8_quant",
    "_C::dynamic_per_token_scaled_fp8_quant",
    "_C::static_scaled_int8_quant",
    "_C::dynamic_scaled_int8_quant",
    "_C::per_token_group_fp8_quant",
    "_C::scaled_fp4_quant",
    "sgl_kernel::sgl_per_token_group_quant_fp8",
    "sgl_kernel::sgl_per_token_quant_fp8",
    "sgl_kernel::sgl_per_tensor_quant_fp8",
    "sgl_kernel::sgl_per_token_group_quant_int8",
    "aiter::dynamic_per_token_scaled_quant",
    "aiter::static_per_tensor_quant",
    "aiter::dynamic_per_tensor_quant",
    family="quantisation",
)
def estimate_quantisation(call: Call) -> Work:
    """Input, result and scales once; scale and round: 2 per element."""
    tensors = call.tensors()
    if len(tensors) < 2:
        raise Unknown("input and result are not both recorded")
    widest = max(tensors, key=lambda tensor: (tensor.numel, tensor.size))
    return Work(2 * widest.numel, sum(tensor.bytes for tensor in tensors), widest.dtype)


@MODELS.register(
    "fbgemm::FloatToFP8RowwiseQuantized",
    "fbgemm::FP8RowwiseQuantizedToFloat",
    "fbgemm::FloatToHFP8Quantized",
    "fbgemm::HFP8QuantizedToFloat",
    family="quantisation",
)
def estimate_fbgemm(call: Call) -> Work:
    """Between floats and bytes; rowwise rows carry 8 bytes of scale behind them."""
    x = call.tensor(0)
    rowwise, to_float = "Rowwise" in call.name, call.name.endswith("ToFloat")
    rows = math.prod(x.shape[:-1])
    width = x.shape[-1] + (0 if not rowwise else -8 if to_float else 8)
    out = rows * width * (4 if to_float else 1)
    return Work(2 * rows * min(width, x.shape[-1]), x.bytes + out, "fp32")


_INDUCTOR_KERNEL = re.compile(r"^triton_(?P<kind>poi|red|per|tem)_fused_(?P<ops>.*?)_?\d*$")
_OPS_WITHOUT_ARITHMETIC = {
    "to",
    "copy",
    "clone",
    "view",
    "permute",
    "transpose",
    "expand",
    "slice",
    "select",
    "unsqueeze",
    "squeeze",
    "cat",
    "stack",
    "constant",
    "pad",
    "nd",
    "reshape",
    "unsafe",
    "split",
    "zeros",
    "ones",
    "full",
    "fill",
    "empty",
    "like",
    "embedding",
    "index",
    "gather",
    "scatter",
    "arange",
    "t",
    "detach",
    "alias",
    "lift",
    "fresh",
    "backward",
    "native",
    "new",
    "scalar",
    "tensor",
    "",
    "prims",
    "convert",
    "element",
    "type",
    "dtype",
    "with",
    "inplace",
    "put",
    "as",
    "strided",
    "moe",
    "forward",
    "where",
    "unbind",
    "repeat",
    "dropout",
    "layer",
    "norm",
}
_FLOPS_PER_ELEMENT = {"softmax": 5, "native_layer_norm": 8, "addcmul": 3, "addcdiv": 3, "lerp": 3}


@MODELS.register(
    "triton_poi_fused_*", "triton_red_fused_*", "triton_per_fused_*", family="compiled kernel"
)
def estimate_inductor_kernel(call: Call) -> Work:
    """Each tensor once, and no more elements of it than the kernel has (a larger one is only looked
    up in).

    One operation per element for every operator in the kernel's name that computes. The name lists
    each operator once, so a chain that repeats one is counted low; such kernels are bound by
    memory.
    """
    match = _INDUCTOR_KERNEL.match(call.name)
    tensors = call.tensors()
    if match is None or not tensors:
        raise Unknown("no input is recorded as a tensor")
    numbers = [
        call.integer(index)
        for index, kind in enumerate(call.types)
        if kind == "Scalar" and call.text(index)
    ]
    elements = 1
    for number in numbers or [max(tensor.numel for tensor in tensors)]:
        elements *= max(number, 1)
    moved = sum(min(tensor.bytes, elements * tensor.size) for tensor in tensors)
    # Of operators, joined by underscores; those of `_SEVERAL` may contain some themselves
    names = match["ops"]
    operations = sum(count for name, count in _FLOPS_PER_ELEMENT.items() if name in names)
    for name in _FLOPS_PER_ELEMENT:
        names = names.replace(name, "")
    operations += sum(word not in _OPS_WITHOUT_ARITHMETIC for word in names.split("_"))
    floats = {tensor.dtype for tensor in tensors if tensor.dtype.startswith(("fp", "bf"))}
    # Compiled kernels compute 16-bit floats in 32 bits.
    dtype = "fp64" if "fp64" in floats else "fp32" if floats else tensors[0].dtype
    return Work(operations * elements, moved, dtype)


@MODELS.register("triton_tem_fused_*", family="compiled kernel")
def estimate_template(call: Call) -> Work:
    """A matrix product from a template: (M, K), (K, N) and (M, N) must be the only matrices that
    fit each other.
    """
    matrices = [tensor for tensor in call.tensors() if len(tensor.shape) == 2]
    if not re.search(r"_(?:add)?mm(?:_|$)", call.name) or len(matrices) != 3:
        raise Unknown("which inputs are multiplied cannot be determined from what is recorded")
    a, b, out = matrices
    if (a.shape[1], a.shape[0], b.shape[1]) != (b.shape[0], out.shape[0], out.shape[1]):
        raise Unknown("which inputs are multiplied cannot be determined from what is recorded")
    moved = sum(tensor.bytes for tensor in call.tensors())
    return Work(2 * a.shape[0] * a.shape[1] * b.shape[1], moved, a.dtype, matrix=True)
