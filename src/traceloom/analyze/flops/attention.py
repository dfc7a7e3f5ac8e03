"""Attention: 2 · heads · pairs · (d_qk + d_v), where pairs are the (query, key) pairs that the mask leaves."""

from __future__ import annotations

import re

from msgspec import Struct

from traceloom.analyze.flops.registry import MODELS, Call, Tensor, Unknown, Work

FAMILY, PAGED = "attention", "paged attention"


def unmasked_pairs(queries: int, keys: int, *, bottom_right: bool, left: int = -1, right: int = 0) -> int:
    """How many (query, key) pairs a causal or sliding mask leaves, exactly.

    Args:
        queries: Number of queries.
        keys: Number of keys.
        bottom_right: The last query sees the last key (decode, chunked prefill); else the first sees the first.
        left: How many keys before its own a query sees; -1 for all.
        right: How many keys after its own; 0 is causal, -1 for all.

    Example:
        >>> unmasked_pairs(4, 4, bottom_right=False), unmasked_pairs(1, 100, bottom_right=True)
        (10, 100)
    """
    shift = keys - queries if bottom_right else 0
    up_to_last = queries * keys if right < 0 else _clipped_sum(queries, keys, shift + right + 1)
    before_first = 0 if left < 0 else _clipped_sum(queries, keys, shift - left)
    return up_to_last - before_first


def _clipped_sum(count: int, top: int, first: int) -> int:
    """Sum of `first`, `first` + 1, ... (`count` of them), each cut to 0..`top`."""
    rising = min(max(-first, 0), count)  # position of the first that is above 0
    full = min(max(top - first, rising), count)  # position of the first that reaches the top
    return (full - rising) * (2 * first + rising + full - 1) // 2 + (count - full) * top


class AttentionInputs(Struct, frozen=True):
    """Where the inputs of one spelling stand.

    Attributes:
        causal: Place of the flag (of the kind of mask for efficient attention); None for full attention.
        heads_first: (batch, heads, length, size) instead of (batch, length, heads, size).
        query: Place of the query; key and value follow it.
        mask: Place of a mask or bias that is read.
        bottom_right: The causal mask ends at the last key.
        lengths: Place of the first of: offsets of the queries, of the keys, longest of each; None without them.
        window: Place of the left reach of a sliding window; the right one follows.
    """

    causal: int | None
    heads_first: bool = True
    query: int = 0
    mask: int | None = None
    bottom_right: bool = False
    lengths: int | None = None
    window: int | None = None


_FORWARD = {
    "aten::scaled_dot_product_attention": AttentionInputs(5, mask=3),
    "aten::_scaled_dot_product_attention_math": AttentionInputs(5, mask=3),
    "aten::_scaled_dot_product_flash_attention": AttentionInputs(4, bottom_right=True),
    "aten::_scaled_dot_product_flash_attention_for_cpu": AttentionInputs(4, mask=5),
    "aten::_scaled_dot_product_efficient_attention": AttentionInputs(6, mask=3),
    "aten::_scaled_dot_product_cudnn_attention": AttentionInputs(6, mask=3),
    "aten::_scaled_dot_product_fused_attention_overrideable": AttentionInputs(5, mask=3),
    "aten::_flash_attention_forward": AttentionInputs(8, heads_first=False, bottom_right=True, lengths=3, window=11),
    "aten::_efficient_attention_forward": AttentionInputs(9, heads_first=False, mask=3, lengths=4),
    "flash_attn::_flash_attn_forward": AttentionInputs(5, heads_first=False, bottom_right=True, window=6),
    "flash_attn::_flash_attn_varlen_forward": AttentionInputs(
        9, heads_first=False, bottom_right=True, lengths=3, window=10
    ),
}
_BACKWARD = {
    "aten::_scaled_dot_product_flash_attention_backward": AttentionInputs(11, query=1, bottom_right=True),
    "aten::_scaled_dot_product_flash_attention_for_cpu_backward": AttentionInputs(7, query=1, mask=8),
    "aten::_scaled_dot_product_efficient_attention_backward": AttentionInputs(11, query=1, mask=4),
    "aten::_scaled_dot_product_cudnn_attention_backward": AttentionInputs(14, query=1, mask=8),
    "aten::_flash_attention_backward": AttentionInputs(
        11, query=1, heads_first=False, bottom_right=True, lengths=6, window=15
    ),
    "aten::_efficient_attention_backward": AttentionInputs(14, query=1, heads_first=False, mask=4, lengths=6),
    "flash_attn::_flash_attn_backward": AttentionInputs(11, query=1, heads_first=False, bottom_right=True, window=12),
    "flash_attn::_flash_attn_varlen_backward": AttentionInputs(
        15, query=1, heads_first=False, bottom_right=True, lengths=9, window=16
    ),
}


def _pairs(call: Call, where: AttentionInputs, queries: int, keys: int) -> int:
    if where.causal is None:
        return queries * keys
    left = call.integer(where.window, -1) if where.window is not None else -1
    right = call.integer(where.window + 1, -1) if where.window is not None else -1
    if call.name.startswith("aten::_efficient_attention"):
        kind = call.integer(where.causal)
        causal, bottom_right = kind > 0, kind == 2
    else:
        causal, bottom_right = call.flag(where.causal), where.bottom_right
    if not causal and left < 0 and right < 0:
        return queries * keys
    return unmasked_pairs(queries, keys, bottom_right=bottom_right, left=left, right=0 if causal else right)


@MODELS.register(*_FORWARD, *_BACKWARD, family=FAMILY)
def attention(call: Call) -> Work:
    """2 · heads · pairs · (d_qk + d_v), where pairs are the (query, key) pairs that the mask leaves; backward five
    products: the scores again (d_qk), and the gradients of V, of the scores (d_v), of Q and of K (d_qk).
    """
    where = _FORWARD.get(call.name) or _BACKWARD[call.name]
    query, key, value = (call.tensor(where.query + at) for at in range(3))
    at = where.lengths
    if at is not None and call.has(at):  # packed sequences: all must have the greatest length, else nobody can tell
        batch, heads = call.tensor(at).shape[0] - 1, query.shape[-2]
        other = call.tensor(at + 1).shape[0] - 1 if call.has(at + 1) else batch
        rows, columns = (tensor.numel // (tensor.shape[-1] * tensor.shape[-2]) for tensor in (query, key))
        queries, keys = call.integer(at + 2), call.integer(at + 3)
        if batch < 1 or other != batch or queries * batch != rows or keys * batch != columns:
            raise Unknown("the lengths of the packed sequences are not recorded")
    else:
        shape, key_shape = (tensor.shape if len(tensor.shape) == 4 else (1, *tensor.shape) for tensor in (query, key))
        length = 2 if where.heads_first else 1
        batch, queries, keys, heads = shape[0], shape[length], key_shape[length], shape[3 - length]
    d_qk, d_v = query.shape[-1], value.shape[-1]
    flops_per_width = 2 * heads * batch * _pairs(call, where, queries, keys)
    out = query.numel // d_qk * d_v * query.size
    operands = query.bytes + key.bytes + value.bytes
    moved = operands + out + sum(mask.bytes for mask in call.optional(*([] if where.mask is None else [where.mask])))
    if call.name in _FORWARD:
        return Work(flops_per_width * (d_qk + d_v), moved, query.dtype, matrix=True)
    flops, again = flops_per_width * (3 * d_qk + 2 * d_v), flops_per_width * d_qk
    return Work(flops, moved + out + operands, query.dtype, matrix=True, recomputed=again)


_PAGED = (
    "vllm::unified_attention", "vllm::unified_attention_with_output", "sglang::unified_attention_with_output",
)  # fmt: skip
BATCH = re.compile(r"(?:context|generation)_\d+\(sq(\d+)sk(\d+)sqsq(\d+)sqsk(\d+)\)")
"""How serving engines annotate their steps: sums over the requests."""


def batch_sums(annotation: str) -> tuple[int, int, int, int]:
    """Sums over the requests of a serving engine's step: queries, keys, queries squared, queries times keys.

    They stand in annotations such as `execute_32_context_0(sq0sk0sqsq0sqsk0)_generation_32(sq32sk900sqsq32sqsk900)`.

    Raises:
        Unknown: The annotation holds none.
    """
    groups = BATCH.findall(annotation)
    if not groups:
        raise Unknown("the lengths of the requests are not recorded (no annotation describes the batch)")
    queries, keys, squares, products = (sum(int(group[at]) for group in groups) for at in range(4))
    return queries, keys, squares, products


@MODELS.register(*_PAGED, family=PAGED)
def paged(call: Call) -> Work:
    """Causal attention over a paged cache: a request with q queries and k keys has q·k - q·(q - 1)/2 pairs."""
    query, key, value = call.tensor(0), call.tensor(1), call.tensor(2)
    if len(query.shape) != 3 or len(key.shape) != 3:
        raise Unknown("the heads cannot be determined from the recorded shapes")
    (_, heads, d_qk), (_, kv_heads, d_v) = query.shape, value.shape
    return _over_requests(call, query, key, (heads, kv_heads), (d_qk, d_v))


_OVER_CACHE = {
    "_C::paged_attention_v1": (1, 1),
    "_C::paged_attention_v2": (4, 1),
    "_rocm_C::paged_attention": (4, 1),
    "aiter::paged_attention_ragged": (2, -2),
    "sglang_profiler::attention_paged_attention_ragged*": (2, -2),
}
"""Place of the query, before both caches, and which dimension of a cache has the heads of the keys."""


@MODELS.register(*_OVER_CACHE, family=PAGED, inputs=32)
def paged_over_cache(call: Call) -> Work:
    """Decoding over a paged cache: one query a request, and all keys of it."""
    at, dimension = next(places for name, places in _OVER_CACHE.items() if call.name.startswith(name.removesuffix("*")))
    query, key = call.tensor(at), call.tensor(at + 1)
    if len(query.shape) != 3 or len(key.shape) < 4:
        raise Unknown("the heads cannot be determined from the recorded shapes")
    _, heads, size = query.shape
    return _over_requests(call, query, key, (heads, key.shape[dimension]), (size, size))


def _over_requests(call: Call, query: Tensor, key: Tensor, heads: tuple[int, int], widths: tuple[int, int]) -> Work:
    """Causal attention of all requests of the batch, with these heads (queries, keys) and widths (keys, values)."""
    queries, keys, squares, products = batch_sums(call.batch)
    pairs = products - (squares - queries) // 2
    moved = (queries * heads[0] * query.size + keys * heads[1] * key.size) * sum(widths)
    return Work(2 * heads[0] * pairs * sum(widths), moved, query.dtype, matrix=True)
