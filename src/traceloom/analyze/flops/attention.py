"""Attention: 2 · heads · pairs · (d_qk + d_v), where pairs are the (query, key) pairs that the mask
leaves.
"""

import re

from msgspec import Struct

from traceloom.analyze.flops.registry import MODELS, Call, Tensor, Unknown, Work

FAMILY, PAGED_FAMILY = "attention", "paged attention"


def count_unmasked_pairs(
    queries: int, keys: int, *, bottom_right: bool, left: int = -1, right: int = 0
) -> int:
    """Returns the exact number of (query, key) pairs that a causal or sliding mask leaves.

    Args:
        queries: Number of queries.
        keys: Number of keys.
        bottom_right: The last query sees the last key (decode, chunked prefill); else the first
            sees the first.
        left: How many keys before its own a query sees; -1 for all.
        right: How many keys after its own; 0 is causal, -1 for all.

    Example:
        >>> count_unmasked_pairs(4, 4, bottom_right=False)
        10
        >>> count_unmasked_pairs(1, 100, bottom_right=True)
        100
    """
    shift = keys - queries if bottom_right else 0
    up_to_last = (
        queries * keys if right < 0 else _sum_clipped_range(queries, keys, shift + right + 1)
    )
    before_first = 0 if left < 0 else _sum_clipped_range(queries, keys, shift - left)
    return up_to_last - before_first


def _sum_clipped_range(count: int, limit: int, first: int) -> int:
    """Returns the sum of `first`, `first` + 1, ... (`count` of them), each clipped to
    0..`limit`.
    """
    first_positive = min(max(-first, 0), count)  # position of the first that is above 0
    # Position of the first that reaches the limit
    first_at_limit = min(max(limit - first, first_positive), count)
    return (first_at_limit - first_positive) * (
        2 * first + first_positive + first_at_limit - 1
    ) // 2 + (count - first_at_limit) * limit


class AttentionInputPositions(Struct, frozen=True):
    """Positions of the inputs in one signature.

    Attributes:
        causal: Position of the flag (of the kind of mask for efficient attention); None for full
            attention.
        heads_first: (batch, heads, length, size) instead of (batch, length, heads, size).
        query: Position of the query; key and value follow it.
        mask: Position of a mask or bias that is read.
        bottom_right: The causal mask ends at the last key.
        lengths: Position of the first of: offsets of the queries, of the keys, longest of each;
            None without them.
        window: Position of the left reach of a sliding window; the right one follows.
    """

    causal_index: int | None
    heads_first: bool = True
    query: int = 0
    mask: int | None = None
    causal_bottom_right: bool = False
    lengths: int | None = None
    window: int | None = None


_FORWARD_POSITIONS = {
    "aten::scaled_dot_product_attention": AttentionInputPositions(5, mask=3),
    "aten::_scaled_dot_product_attention_math": AttentionInputPositions(5, mask=3),
    "aten::_scaled_dot_product_flash_attention": AttentionInputPositions(
        4, causal_bottom_right=True
    ),
    "aten::_scaled_dot_product_flash_attention_for_cpu": AttentionInputPositions(4, mask=5),
    "aten::_scaled_dot_product_efficient_attention": AttentionInputPositions(6, mask=3),
    "aten::_scaled_dot_product_cudnn_attention": AttentionInputPositions(6, mask=3),
    "aten::_scaled_dot_product_fused_attention_overrideable": AttentionInputPositions(5, mask=3),
    "aten::_flash_attention_forward": AttentionInputPositions(
        8, heads_first=False, causal_bottom_right=True, lengths=3, window=11
    ),
    "aten::_efficient_attention_forward": AttentionInputPositions(
        9, heads_first=False, mask=3, lengths=4
    ),
    "flash_attn::_flash_attn_forward": AttentionInputPositions(
        5, heads_first=False, causal_bottom_right=True, window=6
    ),
    "flash_attn::_flash_attn_varlen_forward": AttentionInputPositions(
        9, heads_first=False, causal_bottom_right=True, lengths=3, window=10
    ),
}
_BACKWARD_POSITIONS = {
    "aten::_scaled_dot_product_flash_attention_backward": AttentionInputPositions(
        11, query=1, causal_bottom_right=True
    ),
    "aten::_scaled_dot_product_flash_attention_for_cpu_backward": AttentionInputPositions(
        7, query=1, mask=8
    ),
    "aten::_scaled_dot_product_efficient_attention_backward": AttentionInputPositions(
        11, query=1, mask=4
    ),
    "aten::_scaled_dot_product_cudnn_attention_backward": AttentionInputPositions(
        14, query=1, mask=8
    ),
    "aten::_flash_attention_backward": AttentionInputPositions(
        11, query=1, heads_first=False, causal_bottom_right=True, lengths=6, window=15
    ),
    "aten::_efficient_attention_backward": AttentionInputPositions(
        14, query=1, heads_first=False, mask=4, lengths=6
    ),
    "flash_attn::_flash_attn_backward": AttentionInputPositions(
        11, query=1, heads_first=False, causal_bottom_right=True, window=12
    ),
    "flash_attn::_flash_attn_varlen_backward": AttentionInputPositions(
        15, query=1, heads_first=False, causal_bottom_right=True, lengths=9, window=16
    ),
}


def _count_pairs(call: Call, positions: AttentionInputPositions, queries: int, keys: int) -> int:
    if positions.causal_index is None:
        return queries * keys
    left = call.integer(positions.window, -1) if positions.window is not None else -1
    right = call.integer(positions.window + 1, -1) if positions.window is not None else -1
    if call.name.startswith("aten::_efficient_attention"):
        mask_kind = call.integer(positions.causal_index)
        causal, bottom_right = mask_kind > 0, mask_kind == 2
    else:
        causal, bottom_right = call.flag(positions.causal_index), positions.causal_bottom_right
    if not causal and left < 0 and right < 0:
        return queries * keys
    return count_unmasked_pairs(
        queries, keys, bottom_right=bottom_right, left=left, right=0 if causal else right
    )


@MODELS.register(*_FORWARD_POSITIONS, *_BACKWARD_POSITIONS, family=FAMILY)
def estimate_attention(call: Call) -> Work:
    """2 · heads · pairs · (d_qk + d_v), where pairs are the (query, key) pairs that the mask
    leaves; backward five products: the scores again (d_qk), and the gradients of V, of the
    scores (d_v), of Q and of K (d_qk).
    """
    positions = _FORWARD_POSITIONS.get(call.name) or _BACKWARD_POSITIONS[call.name]
    query, key, value = (call.tensor(positions.query + lengths_index) for lengths_index in range(3))
    lengths_index = positions.lengths
    # Packed sequences: all must have the greatest length, else the number of pairs is unknown
    if lengths_index is not None and call.has(lengths_index):
        batch, heads = call.tensor(lengths_index).shape[0] - 1, query.shape[-2]
        key_batch = (
            call.tensor(lengths_index + 1).shape[0] - 1 if call.has(lengths_index + 1) else batch
        )
        query_tokens, key_tokens = (
            tensor.numel // (tensor.shape[-1] * tensor.shape[-2]) for tensor in (query, key)
        )
        queries, keys = call.integer(lengths_index + 2), call.integer(lengths_index + 3)
        if (
            batch < 1
            or key_batch != batch
            or queries * batch != query_tokens
            or keys * batch != key_tokens
        ):
            raise Unknown("the lengths of the packed sequences are not recorded")
    else:
        query_shape, key_shape = (
            tensor.shape if len(tensor.shape) == 4 else (1, *tensor.shape)
            for tensor in (query, key)
        )
        length_dim = 2 if positions.heads_first else 1
        batch, queries, keys, heads = (
            query_shape[0],
            query_shape[length_dim],
            key_shape[length_dim],
            query_shape[3 - length_dim],
        )
    d_qk, d_v = query.shape[-1], value.shape[-1]
    flops_per_width = 2 * heads * batch * _count_pairs(call, positions, queries, keys)
    out_bytes = query.numel // d_qk * d_v * query.size
    operand_bytes = query.bytes + key.bytes + value.bytes
    moved_bytes = (
        operand_bytes
        + out_bytes
        + sum(
            mask.bytes
            for mask in call.optional(*([] if positions.mask is None else [positions.mask]))
        )
    )
    if call.name in _FORWARD_POSITIONS:
        return Work(flops_per_width * (d_qk + d_v), moved_bytes, query.dtype, matrix=True)
    flops, recomputed_flops = flops_per_width * (3 * d_qk + 2 * d_v), flops_per_width * d_qk
    return Work(
        flops,
        moved_bytes + out_bytes + operand_bytes,
        query.dtype,
        matrix=True,
        recomputed=recomputed_flops,
    )


_UNIFIED_ATTENTION_OPS = (
    "vllm::unified_attention",
    "vllm::unified_attention_with_output",
    "sglang::unified_attention_with_output",
)
BATCH_ANNOTATION_PATTERN = re.compile(
    r"(?:context|generation)_\d+\(sq(\d+)sk(\d+)sqsq(\d+)sqsk(\d+)\)"
)
"""Annotations of steps by serving engines: sums over the requests."""


def parse_batch_annotation(annotation: str) -> tuple[int, int, int, int]:
    """Returns sums over the requests of a serving engine's step: queries, keys, queries squared,
    queries times keys.

    They are in annotations such as
    `execute_32_context_0(sq0sk0sqsq0sqsk0)_generation_32(sq32sk900sqsq32sqsk900)`.

    Raises:
        Unknown: The annotation holds none.
    """
    groups = BATCH_ANNOTATION_PATTERN.findall(annotation)
    if not groups:
        raise Unknown(
            "the lengths of the requests are not recorded (no annotation describes the batch)"
        )
    queries, keys, squares, products = (
        sum(int(group[index]) for group in groups) for index in range(4)
    )
    return queries, keys, squares, products


@MODELS.register(*_UNIFIED_ATTENTION_OPS, family=PAGED_FAMILY)
def estimate_paged_attention(call: Call) -> Work:
    """Causal attention over a paged cache: a request with q queries and k keys has q·k - q·(q -
    1)/2 pairs.
    """
    query, key, value = call.tensor(0), call.tensor(1), call.tensor(2)
    if len(query.shape) != 3 or len(key.shape) != 3:
        raise Unknown("the heads cannot be determined from the recorded shapes")
    (_, heads, d_qk), (_, kv_heads, d_v) = query.shape, value.shape
    return _estimate_paged_batch(call, query, key, (heads, kv_heads), (d_qk, d_v))


_PAGED_DECODE_POSITIONS = {
    "_C::paged_attention_v1": (1, 1),
    "_C::paged_attention_v2": (4, 1),
    "_rocm_C::paged_attention": (4, 1),
    "aiter::paged_attention_ragged": (2, -2),
    "sglang_profiler::attention_paged_attention_ragged*": (2, -2),
}
"""Position of the query, before both caches, and the dimension of a cache with the heads of the
keys.
"""


@MODELS.register(*_PAGED_DECODE_POSITIONS, family=PAGED_FAMILY, inputs=32)
def estimate_paged_decode(call: Call) -> Work:
    """Decoding over a paged cache: one query a request, and all keys of it."""
    query_index, heads_dim = next(
        inputs
        for name, inputs in _PAGED_DECODE_POSITIONS.items()
        if call.name.startswith(name.removesuffix("*"))
    )
    query, key = call.tensor(query_index), call.tensor(query_index + 1)
    if len(query.shape) != 3 or len(key.shape) < 4:
        raise Unknown("the heads cannot be determined from the recorded shapes")
    _, heads, head_dim = query.shape
    return _estimate_paged_batch(
        call, query, key, (heads, key.shape[heads_dim]), (head_dim, head_dim)
    )


def _estimate_paged_batch(
    call: Call, query: Tensor, key: Tensor, heads: tuple[int, int], head_dims: tuple[int, int]
) -> Work:
    """Computes causal attention of all requests of the batch, with these heads (queries, keys) and
    widths (keys, values).
    """
    queries, keys, query_squares, query_key_products = parse_batch_annotation(call.batch)
    pairs = query_key_products - (query_squares - queries) // 2
    moved_bytes = (queries * heads[0] * query.size + keys * heads[1] * key.size) * sum(head_dims)
    return Work(2 * heads[0] * pairs * sum(head_dims), moved_bytes, query.dtype, matrix=True)
