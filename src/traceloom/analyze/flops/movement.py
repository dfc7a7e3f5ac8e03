"""Operators that move data: copies, concatenation, embedding, indexing, gather and scatter."""

from __future__ import annotations

import math

from traceloom.analyze.flops.call import SIZES, Call, Unknown
from traceloom.analyze.flops.registry import MODELS, Work

COPY, INDEX = "copy", "indexing"


@MODELS.register("aten::copy_", family=COPY)
def copy(call: Call) -> Work:
    """(target, source): the source may be spread over a larger target."""
    target, source = call.tensor(0), call.tensor(1)
    return Work(0, target.bytes + source.bytes, target.dtype)


@MODELS.register("aten::clone", "aten::contiguous", "aten::flip", "aten::roll", "aten::alias_copy", family=COPY)
def clone(call: Call) -> Work:
    """The input is read, and written packed."""
    x = call.tensor(0)
    return Work(0, x.bytes + x.numel * x.size, x.dtype)


@MODELS.register("aten::_to_copy", "aten::to", family=COPY)
def to_other_type(call: Call) -> Work:
    """The new element type stands as a number in one of the first places, or is that of another tensor."""
    x = call.tensor(0)
    if call.has(1):
        out: str | None = call.tensor(1).dtype
    elif call.name == "aten::to" and len(call.types) in (6, 7):  # to(x, device, dtype, ...)
        out = call.dtype_code(2)
    else:
        out = call.dtype_code(1)
    if out is None and not call.concrete:
        raise Unknown("the new element type is not recorded")
    return Work(0, x.bytes + x.numel * SIZES[out or x.dtype], out or x.dtype)


@MODELS.register("aten::cat", "aten::_cat", "aten::concat", "aten::stack", "aten::_stack", family=COPY)
def cat(call: Call) -> Work:
    """Every part is read once and written once."""
    parts = call.tensor_list(0)
    return Work(0, 2 * sum(part.bytes for part in parts), parts[0].dtype)


@MODELS.register("aten::constant_pad_nd", family=COPY)
def pad(call: Call) -> Work:
    """(input, padding from the last dimension on): a negative padding cuts off."""
    x, pad = call.tensor(0), call.integers(1)
    if pad is None or len(pad) % 2 or len(pad) > 2 * len(x.shape):
        raise Unknown("the padding is not recorded")
    sizes = list(x.shape)
    for at in range(len(pad) // 2):
        sizes[-1 - at] += pad[2 * at] + pad[2 * at + 1]
    if min(sizes, default=0) < 0:
        raise Unknown("the padding does not fit the shape")
    read = min(x.bytes, math.prod(sizes) * x.size)  # a negative padding cuts off
    return Work(0, read + math.prod(sizes) * x.size, x.dtype)


@MODELS.register(
    "fbgemm::permute_pooled_embs_auto_grad", "fbgemm::recat_embedding_grad_output_mixed_D_batch",
    "torch::autograd::CppNode<fbgemm_gpu::PermutePooledEmbsFunction*", family=COPY,
)  # fmt: skip
def permute(call: Call) -> Work:
    """The first input in another order; the small tables beside it tell the order."""
    x, *tables = call.tensors()
    return Work(0, 2 * x.bytes + sum(table.bytes for table in tables), x.dtype)


@MODELS.register("fbgemm::permute_2D_sparse_data", family=COPY)
def permute_sparse(call: Call) -> Work:
    """(order, lengths [T, B], values, weights, length of the permuted values)."""
    order, lengths, values = call.tensor(0), call.tensor(1), call.tensor(2)
    out = call.integer(4)
    weights = call.tensor(3).size if call.has(3) else 0
    moved = order.bytes + (lengths.numel + order.numel * lengths.shape[1]) * lengths.size
    return Work(0, moved + 2 * out * (values.size + weights), values.dtype)


@MODELS.register("fbgemm::bounds_check_indices", family=INDEX)
def bounds_check(call: Call) -> Work:
    """Reads everything; writes only what lies outside."""
    return Work(0, sum(tensor.bytes for tensor in call.tensors()), call.tensor(1).dtype)


@MODELS.register("aten::embedding", family="embedding")
def embedding(call: Call) -> Work:
    """Each row looked up is read and written once."""
    weight, index = call.tensor(0), call.tensor(1)
    return Work(0, 2 * index.numel * weight.shape[1] * weight.size + index.bytes, weight.dtype)


@MODELS.register("aten::embedding_dense_backward", "aten::embedding_backward", family="embedding")
def embedding_backward(call: Call) -> Work:
    """Adds the rows of the gradient into a whole table, which is written once."""
    grad, index, rows = call.tensor(0), call.tensor(1), call.integer(2)
    return Work(grad.numel, grad.bytes + index.bytes + rows * grad.shape[-1] * grad.size, grad.dtype)


@MODELS.register("aten::_embedding_bag", "aten::embedding_bag", "aten::_embedding_bag_forward_only", family="embedding")
def embedding_bag(call: Call) -> Work:
    """One addition per element of each row looked up; one row per bag is written."""
    weight, index, offsets = call.tensor(0), call.tensor(1), call.tensor(2)
    moved = (index.numel + offsets.numel) * weight.shape[1] * weight.size + index.bytes + offsets.bytes
    return Work(index.numel * weight.shape[1], moved, weight.dtype)


@MODELS.register("aten::index_select", "aten::gather", family=INDEX)
def select(call: Call) -> Work:
    """(input, dimension, index): an element for each index, of `index_select` a whole slice."""
    x, index = call.tensor(0), call.tensor(2)
    out = index.numel
    if call.name == "aten::index_select":
        dim = 0 if len(x.shape) == 1 else call.integer(1)
        out = x.numel // x.shape[dim] * index.numel if x.shape and x.shape[dim] else 0
    return Work(0, 2 * out * x.size + index.bytes, x.dtype)


@MODELS.register(
    "aten::scatter_", "aten::scatter", "aten::scatter_add_", "aten::scatter_add", "aten::index_add_", "aten::index_add",
    family=INDEX,
)  # fmt: skip
def scatter(call: Call) -> Work:
    """(input, dimension, index, source): who adds reads the source, and reads and writes as many places."""
    x, index = call.tensor(0), call.tensor(2)
    rest = 0 if call.name.endswith("_") else 2 * x.bytes
    if "index_add" in call.name:
        source = call.tensor(3)
        return Work(source.numel, index.bytes + 3 * source.bytes + rest, x.dtype)
    if "scatter_add" in call.name:
        return Work(index.numel, index.bytes + 3 * index.numel * x.size + rest, x.dtype)
    source_bytes = index.numel * x.size if call.has(3) and call.tensor(3).shape else 0  # else it is a number
    return Work(0, index.bytes + source_bytes + index.numel * x.size + rest, x.dtype)


@MODELS.register("aten::index_copy_", family=INDEX)
def index_copy(call: Call) -> Work:
    """(target, dimension, index, source): reads index and source, and writes as many places."""
    index, source = call.tensor(2), call.tensor(3)
    return Work(0, index.bytes + 2 * source.bytes, source.dtype)


@MODELS.register("aten::index", family=INDEX)
def indexed(call: Call) -> Work:
    """Only where the shapes of the indices are recorded, and none is a mask (the size of its result is unknown)."""
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
    "_C_cache_ops::reshape_and_cache_flash", "_C_cache_ops::reshape_and_cache", "aiter::reshape_and_cache",
    "sglang::store_cache", "vllm::unified_kv_cache_update", family="cache update",
)  # fmt: skip
def cache_update(call: Call) -> Work:
    """(key, value, key cache, value cache, slots, ...): keys and values are read, and written in the cache's type.

    Of the unified update neither caches nor slots are inputs.
    """
    key, value = call.tensor(0), call.tensor(1)
    unified = call.name == "vllm::unified_kv_cache_update"
    size, slots = (key.size, 0) if unified else (call.tensor(2).size, call.tensor(4).bytes)
    return Work(0, key.bytes + value.bytes + (key.numel + value.numel) * size + slots, key.dtype)
