"""FLOPs and bytes of data movement and reductions."""

import math

from traceloom.analyze.flops.registry import DTYPE_BYTES, MODELS, Call, Unknown, Work

COPY, INDEX = "copy", "indexing"


@MODELS.register("aten::copy_", family=COPY)
def estimate_copy(call: Call) -> Work:
    """(target, source): the source may be spread over a larger target."""
    target, source = call.tensor(0), call.tensor(1)
    return Work(0, target.bytes + source.bytes, target.dtype)


@MODELS.register(
    "aten::clone", "aten::contiguous", "aten::flip", "aten::roll", "aten::alias_copy", family=COPY
)
def estimate_clone(call: Call) -> Work:
    """The input is read, and written packed."""
    x = call.tensor(0)
    return Work(0, x.bytes + x.numel * x.size, x.dtype)


@MODELS.register("aten::_to_copy", "aten::to", family=COPY)
def estimate_type_conversion(call: Call) -> Work:
    """The new element type stands as a number in one of the first places, or is that of another
    tensor.
    """
    x = call.tensor(0)
    if call.has(1):
        out: str | None = call.tensor(1).dtype
    elif call.name == "aten::to" and len(call.types) in (6, 7):  # to(x, device, dtype, ...)
        out = call.dtype_code(2)
    else:
        out = call.dtype_code(1)
    if out is None and not call.concrete:
        raise Unknown("the new element type is not recorded")
    return Work(0, x.bytes + x.numel * DTYPE_BYTES[out or x.dtype], out or x.dtype)


@MODELS.register(
    "aten::cat", "aten::_cat", "aten::concat", "aten::stack", "aten::_stack", family=COPY
)
def estimate_cat(call: Call) -> Work:
    """Every part is read once and written once."""
    parts = call.tensor_list(0)
    return Work(0, 2 * sum(part.bytes for part in parts), parts[0].dtype)


@MODELS.register("aten::constant_pad_nd", family=COPY)
def estimate_pad(call: Call) -> Work:
    """(input, padding from the last dimension on): a negative padding cuts off."""
    x, pad = call.tensor(0), call.integers(1)
    if pad is None or len(pad) % 2 or len(pad) > 2 * len(x.shape):
        raise Unknown("the padding is not recorded")
    sizes = list(x.shape)
    for dim in range(len(pad) // 2):
        sizes[-1 - dim] += pad[2 * dim] + pad[2 * dim + 1]
    if min(sizes, default=0) < 0:
        raise Unknown("the padding does not fit the shape")
    read = min(x.bytes, math.prod(sizes) * x.size)  # a negative padding cuts off
    return Work(0, read + math.prod(sizes) * x.size, x.dtype)


@MODELS.register(
    "fbgemm::permute_pooled_embs_auto_grad",
    "fbgemm::recat_embedding_grad_output_mixed_D_batch",
    "torch::autograd::CppNode<fbgemm_gpu::PermutePooledEmbsFunction*",
    family=COPY,
)
def estimate_permute(call: Call) -> Work:
    """The first input in another order; the small tables beside it tell the order."""
    x, *tables = call.tensors()
    return Work(0, 2 * x.bytes + sum(table.bytes for table in tables), x.dtype)


@MODELS.register("fbgemm::permute_2D_sparse_data", family=COPY)
def estimate_permute_sparse(call: Call) -> Work:
    """(order, lengths [T, B], values, weights, length of the permuted values)."""
    order, lengths, values = call.tensor(0), call.tensor(1), call.tensor(2)
    out = call.integer(4)
    weights = call.tensor(3).size if call.has(3) else 0
    moved = order.bytes + (lengths.numel + order.numel * lengths.shape[1]) * lengths.size
    return Work(0, moved + 2 * out * (values.size + weights), values.dtype)


@MODELS.register("fbgemm::bounds_check_indices", family=INDEX)
def estimate_bounds_check(call: Call) -> Work:
    """Reads everything; writes only what lies outside."""
    return Work(0, sum(tensor.bytes for tensor in call.tensors()), call.tensor(1).dtype)


@MODELS.register("aten::embedding", family="embedding")
def estimate_embedding(call: Call) -> Work:
    """Each row looked up is read and written once."""
    weight, index = call.tensor(0), call.tensor(1)
    return Work(0, 2 * index.numel * weight.shape[1] * weight.size + index.bytes, weight.dtype)


@MODELS.register("aten::embedding_dense_backward", "aten::embedding_backward", family="embedding")
def estimate_embedding_backward(call: Call) -> Work:
    """Adds the rows of the gradient into a whole table, which is written once."""
    grad, index, rows = call.tensor(0), call.tensor(1), call.integer(2)
    return Work(
        grad.numel, grad.bytes + index.bytes + rows * grad.shape[-1] * grad.size, grad.dtype
    )


@MODELS.register(
    "aten::_embedding_bag",
    "aten::embedding_bag",
    "aten::_embedding_bag_forward_only",
    family="embedding",
)
def estimate_embedding_bag(call: Call) -> Work:
    """One addition per element of each row looked up; one row per bag is written."""
    weight, index, offsets = call.tensor(0), call.tensor(1), call.tensor(2)
    moved = (
        (index.numel + offsets.numel) * weight.shape[1] * weight.size + index.bytes + offsets.bytes
    )
    return Work(index.numel * weight.shape[1], moved, weight.dtype)


@MODELS.register("aten::index_select", "aten::gather", family=INDEX)
def estimate_select(call: Call) -> Work:
    """(input, dimension, index): an element for each index, of `index_select` a whole slice."""
    x, index = call.tensor(0), call.tensor(2)
    out = index.numel
    if call.name == "aten::index_select":
        dim = 0 if len(x.shape) == 1 else call.integer(1)
        out = x.numel // x.shape[dim] * index.numel if x.shape and x.shape[dim] else 0
    return Work(0, 2 * out * x.size + index.bytes, x.dtype)


@MODELS.register(
    "aten::scatter_",
    "aten::scatter",
    "aten::scatter_add_",
    "aten::scatter_add",
    "aten::index_add_",
    "aten::index_add",
    family=INDEX,
)
def estimate_scatter(call: Call) -> Work:
    """(input, dimension, index, source): who adds reads the source, and reads and writes as many
    places.
    """
    x, index = call.tensor(0), call.tensor(2)
    copied_bytes = 0 if call.name.endswith("_") else 2 * x.bytes
    if "index_add" in call.name:
        source = call.tensor(3)
        return Work(source.numel, index.bytes + 3 * source.bytes + copied_bytes, x.dtype)
    if "scatter_add" in call.name:
        return Work(index.numel, index.bytes + 3 * index.numel * x.size + copied_bytes, x.dtype)
    # Else it is a number
    source_bytes = index.numel * x.size if call.has(3) and call.tensor(3).shape else 0
    return Work(0, index.bytes + source_bytes + index.numel * x.size + copied_bytes, x.dtype)


@MODELS.register("aten::index_copy_", family=INDEX)
def estimate_index_copy(call: Call) -> Work:
    """(target, dimension, index, source): reads index and source, and writes as many places."""
    index, source = call.tensor(2), call.tensor(3)
    return Work(0, index.bytes + 2 * source.bytes, source.dtype)


@MODELS.register("aten::index", family=INDEX)
def estimate_indexing(call: Call) -> Work:
    """Only where the shapes of the indices are recorded, and none is a mask (the size of its result
    is unknown).
    """
    x = call.tensor(0)
    index_shapes = call.shapes[1] if len(call.shapes) > 1 else []
    shapes = [tuple(shape) for shape in index_shapes if isinstance(shape, list)]
    if not shapes:
        raise Unknown("the shapes of the indices are not recorded")
    if len(shapes) != 1 or x.shape[: len(shapes[0])] == shapes[0]:
        raise Unknown("the shape of the result cannot be determined from what is recorded")
    count = math.prod(shapes[0])
    return Work(0, 2 * count * (x.numel // x.shape[0]) * x.size + 8 * count, x.dtype)


@MODELS.register(
    "_C_cache_ops::reshape_and_cache_flash",
    "_C_cache_ops::reshape_and_cache",
    "aiter::reshape_and_cache",
    "sglang::store_cache",
    "vllm::unified_kv_cache_update",
    family="cache update",
)
def estimate_cache_update(call: Call) -> Work:
    """(key, value, key cache, value cache, slots, ...): keys and values are read, and written in
    the cache's type.

    Of the unified update neither caches nor slots are inputs.
    """
    key, value = call.tensor(0), call.tensor(1)
    unified = call.name == "vllm::unified_kv_cache_update"
    size, slots = (key.size, 0) if unified else (call.tensor(2).size, call.tensor(4).bytes)
    return Work(0, key.bytes + value.bytes + (key.numel + value.numel) * size + slots, key.dtype)


FAMILY = "reduction"

_BOOL_RESULT_OPS = ("all", "any")
_INDEX_RESULT_OPS = ("argmax", "argmin", "count_nonzero")
_PAIR_RESULT_OPS = ("var_mean", "std_mean")
_OPS_WITH_INDICES = ("max", "min", "median")  # over a dimension; over all only the value
_OPS_WITH_DIMS_AT_1 = (
    "sum",
    "mean",
    "prod",
    "amax",
    "amin",
    "max",
    "min",
    "all",
    "any",
    "argmax",
    "argmin",
    "var",
    "std",
    "nansum",
    "logsumexp",
    "var_mean",
    "std_mean",
    "count_nonzero",
    "median",
    "nanmean",
)
_OPS_WITH_DIMS_AT_2 = ("norm", "linalg_vector_norm")
_FLOPS_PER_ELEMENT = {
    "var": 3,
    "std": 3,
    "var_mean": 3,
    "std_mean": 3,
    "norm": 2,
    "linalg_vector_norm": 2,
    "logsumexp": 3,
}


@MODELS.register(
    *(f"aten::{name}" for name in (*_OPS_WITH_DIMS_AT_1, *_OPS_WITH_DIMS_AT_2)), family=FAMILY
)
def estimate_reduction(call: Call) -> Work:
    """Operations per element of the input; a result for every element of the dimensions that are
    kept.
    """
    short = call.name.removeprefix("aten::")
    if short in ("max", "min") and call.has(1):  # the larger of two tensors
        raise Unknown("it is elementwise here, under another name")
    x = call.tensor(0)
    size = (
        1
        if short in _BOOL_RESULT_OPS
        else 8
        if short in _INDEX_RESULT_OPS
        else 2 * x.size
        if short in _PAIR_RESULT_OPS
        else x.size
    )
    if short == "sum" and x.dtype in ("bool", "int32", "int16", "uint8", "int8"):
        size = 8
    # All dimensions are reduced where the call has no such input, or an empty one; var(x, unbiased)
    # has none.
    rank, dims = len(x.shape), list(range(len(x.shape)))
    if not (short in ("sum", "mean", "prod") and len(call.types) == 2):  # sum(x, dtype)
        dims_index = 2 if short in _OPS_WITH_DIMS_AT_2 else 1
        listed, text = (
            dims_index < len(call.types) and call.types[dims_index] in ("ScalarList", "Scalar"),
            call.text(dims_index),
        )
        if (listed and not text) or (
            not listed and len(call.types) > dims_index + 1 and not call.concrete
        ):
            raise Unknown("the reduced dimensions are not recorded")
        if listed and text not in ("True", "False", "[]"):
            recorded = call.integers(dims_index)
            if recorded is None or any(not -rank <= dim < max(rank, 1) for dim in recorded):
                raise Unknown("the reduced dimensions are not recorded")
            dims = [dim % rank if rank else 0 for dim in recorded]
            size += 8 * (short in _OPS_WITH_INDICES)
    result_count = math.prod(size for dim, size in enumerate(x.shape) if dim not in dims)
    return Work(_FLOPS_PER_ELEMENT.get(short, 1) * x.numel, x.bytes + result_count * size, x.dtype)


@MODELS.register(
    "aten::cumsum",
    "aten::cumprod",
    "aten::cumsum_",
    "aten::logcumsumexp",
    "fbgemm::asynchronous_complete_cumsum",
    "fb::asynchronous_complete_cumsum",
    "fb::offsets_range",
    family="scan",
)
def estimate_scan(call: Call) -> Work:
    """One addition or product per element; whole numbers are added up in 64 bits."""
    x = call.tensor(0)
    if call.name == "fb::offsets_range":  # counts up within each range, as long as it is told to
        return Work(0, x.bytes + call.tensor(1).numel * x.size, x.dtype)
    if call.name.endswith("complete_cumsum"):  # with a leading zero
        return Work(x.numel, x.bytes + (x.numel + 1) * x.size, x.dtype)
    size = (
        8
        if x.dtype in ("bool", "int32", "int16", "uint8", "int8") and not call.name.endswith("_")
        else x.size
    )
    return Work(x.numel, x.bytes + x.numel * size, x.dtype)


@MODELS.register("aten::topk", "aten::sort", "aten::argsort", family="selection")
def estimate_selection(call: Call) -> Work:
    """No arithmetic is counted: comparisons depend on the algorithm.

    An index (8 bytes) for each value.
    """
    x = call.tensor(0)
    result_count, size = x.numel, 0 if call.name == "aten::argsort" else x.size
    if call.name == "aten::topk":
        k, dims = call.integer(1), call.integers(2) or [-1]
        width = x.shape[dims[0]] if x.shape else 1
        result_count = x.numel // width * k if width else 0
    return Work(0, x.bytes + result_count * (size + 8), x.dtype)


_POOL_DIMENSIONS = {
    "aten::max_pool2d_with_indices": 2,
    "aten::max_pool3d_with_indices": 3,
    "aten::avg_pool2d": 2,
    "aten::avg_pool3d": 3,
}


@MODELS.register(*_POOL_DIMENSIONS, family="pooling")
def estimate_pool(call: Call) -> Work:
    """One operation per value under the kernel; `max` keeps an index of 8 bytes for each result."""
    x, rank, is_max = call.tensor(0), _POOL_DIMENSIONS[call.name], "max" in call.name
    # (input, kernel, stride, padding, [dilation], ceil)
    kernel = call.sizes(1, rank)
    stride = call.sizes(2, rank) if call.integers(2) else kernel
    padding = call.sizes(3, rank)
    dilation = call.sizes(4, rank) if is_max else [1] * rank
    up = call.text(5 if is_max else 4) == "True"
    out = math.prod(x.shape[:-rank])
    for dim in range(rank):
        size = x.shape[dim - rank]
        span = size + 2 * padding[dim] - dilation[dim] * (kernel[dim] - 1) - 1
        steps = -(-span // stride[dim]) if up else span // stride[dim]
        if up and steps * stride[dim] >= size + padding[dim]:
            steps -= 1
        out *= steps + 1
    return Work(out * math.prod(kernel), x.bytes + out * (x.size + 8 * is_max), x.dtype)


@MODELS.register(
    "aten::max_pool2d_with_indices_backward", "aten::avg_pool2d_backward", family="pooling"
)
def estimate_pool_backward(call: Call) -> Work:
    """(gradient, input, ..., indices): the values of the input are not needed, its gradient is
    written.
    """
    grad, x = call.tensor(0), call.tensor(1)
    indices = call.tensors()[2:] if "max" in call.name else []
    return Work(
        grad.numel, grad.bytes + x.numel * x.size + sum(tensor.bytes for tensor in indices), x.dtype
    )


@MODELS.register("aten::_adaptive_avg_pool2d", "aten::adaptive_avg_pool2d", family="pooling")
def estimate_adaptive_pool(call: Call) -> Work:
    """Every value of the input is added once."""
    x = call.tensor(0)
    out = math.prod(x.shape[:-2]) * math.prod(call.sizes(1, 2))
    return Work(x.numel, x.bytes + out * DTYPE_BYTES[x.dtype], x.dtype)


_UPSAMPLE_TAPS = {
    "nearest1d": (1, 0),
    "nearest2d": (2, 0),
    "nearest3d": (3, 0),
    "linear1d": (1, 2),
    "bilinear2d": (2, 4),
    "trilinear3d": (3, 8),
    "bicubic2d": (2, 16),
}
"""Dimensions, and how many values of the input each value of the result is computed from (0:
copied).
"""


@MODELS.register(*(f"aten::upsample_{name}" for name in _UPSAMPLE_TAPS), family="resampling")
def estimate_upsample(call: Call) -> Work:
    """A multiply-add per value of the input that a value of the result is made of."""
    rank, taps = _UPSAMPLE_TAPS[call.name.removeprefix("aten::upsample_")]
    x = call.tensor(0)
    out = math.prod(x.shape[:-rank]) * math.prod(call.sizes(1, rank))
    return Work(2 * taps * out, x.bytes + out * x.size, x.dtype)
