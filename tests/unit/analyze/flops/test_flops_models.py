"""Models of operators against numbers worked out by hand."""

from __future__ import annotations

import itertools
import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given, strategies as st

from traceloom.analyze import flops
from traceloom.analyze.flops.attention import count_unmasked_pairs
from traceloom.analyze.flops.registry import (
    LaunchedKernel,
    Tensor,
    derive_broadcast_shape,
    derive_promoted_dtype,
)
from traceloom.analyze.flops.serving import _count_row_tiles

BF, F, H, L, I8, FP8 = (
    "c10::BFloat16",
    "float",
    "c10::Half",
    "long int",
    "signed char",
    "c10::Float8_e4m3fn",
)
S, SL, TL, NONE = "Scalar", "ScalarList", "TensorList", ""


def work(
    name: str, *inputs: tuple[Any, str] | tuple[Any, str, str], **more: Any
) -> flops.Work | str:
    """Each input: shape, type, value where it is no tensor."""
    return flops.MODELS.work(
        flops.Call(
            name,
            [one[0] for one in inputs],
            [one[1] for one in inputs],
            [one[2] if len(one) > 2 else "" for one in inputs],
            more.get("strides", []),
            more.get("list_type", ""),
            more.get("batch", ""),
            more.get("inside", ()),
            more.get("kernels", ()),
        )
    )


def told(name: str, *inputs: Any, **more: Any) -> tuple[int, int, str, bool]:
    found = work(name, *inputs, **more)
    assert isinstance(found, flops.Work), found
    return found.flops, found.bytes, found.dtype, found.matrix


def none(value: str = "") -> tuple[list[int], str, str]:
    return [], NONE, value


def scalar(value: str) -> tuple[list[int], str, str]:
    return [], S, value


def sizes(value: str) -> tuple[list[int], str, str]:
    return [], SL, value


M, K, N = 7, 5, 11


def test_transformer_engine_1_multiplies_column_major() -> None:
    empty = [([0], F)] * 3
    inputs: list[Any] = [
        ([N, K], "unsigned char"),
        *empty[:1],
        scalar("0"),
        scalar("0"),
        scalar("1"),
        ([M, K], "unsigned char"),
        *empty[:1],
        scalar("0"),
        scalar("0"),
        scalar("0"),
        ([M, N], BF),
    ]
    assert told("tex_ts::te_gemm_ts", *inputs) == (2 * M * N * K, 35 + 55 + 2 * 77, "fp8", True)


def test_shapes_that_fit_no_product_are_refused() -> None:
    assert (
        work("aten::mm", ([7, 5], F), ([6, 11], F)) == "the recorded shapes are no matrix product"
    )
    assert isinstance(work("aten::mm", ([7, 5], F)), str)


def test_a_convolution_counts_every_output_position() -> None:
    inputs = [
        ([2, 4, 17, 15], F),
        ([8, 2, 3, 5], F),
        ([8], F),
        sizes("[2, 1]"),
        sizes("[1, 0]"),
        sizes("[1, 2]"),
        scalar("False"),
        sizes("[0, 0]"),
        scalar("2"),
    ]
    out = (9, 7)  # (17 + 2 - 2 - 1) // 2 + 1, (15 - 8 - 1) // 1 + 1
    expected = 2 * 2 * 8 * (4 // 2) * 3 * 5 * out[0] * out[1]
    moved = 4 * (2 * 4 * 17 * 15 + 8 * 2 * 3 * 5 + 8 + 2 * 8 * out[0] * out[1])
    assert told("aten::convolution", *inputs) == (expected, moved, "fp32", True)


def test_a_transposed_convolution_counts_every_input_position() -> None:
    inputs = [
        ([2, 4, 9, 7], F),
        ([4, 6, 3, 3], F),
        none(),
        sizes("[2, 2]"),
        sizes("[1, 1]"),
        sizes("[1, 1]"),
        scalar("True"),
        sizes("[1, 1]"),
        scalar("1"),
    ]
    moved = 4 * (2 * 4 * 63 + 4 * 6 * 9 + 2 * 6 * 18 * 14)
    assert told("aten::convolution", *inputs) == (2 * 2 * 9 * 7 * 4 * 6 * 9, moved, "fp32", True)


@pytest.mark.parametrize(
    ("mask", "times"),
    [("[True, True, False]", 2), ("[False, True, True]", 1), ("[True, False, False]", 1)],
)
def test_backward_of_a_convolution_counts_the_gradients_asked_for(mask: str, times: int) -> None:
    inputs = [
        ([2, 8, 15, 11], F),
        ([2, 4, 17, 15], F),
        ([8, 4, 3, 5], F),
        sizes("[8]"),
        sizes("[1, 1]"),
        sizes("[0, 0]"),
        sizes("[1, 1]"),
        scalar("False"),
        sizes("[0, 0]"),
        scalar("1"),
        ([], "", mask),
    ]
    assert told("aten::convolution_backward", *inputs)[0] == times * 2 * 2 * 8 * 15 * 11 * 4 * 3 * 5


def test_a_convolution_without_recorded_values_is_not_guessed() -> None:
    call = flops.Call(
        "aten::conv2d",
        [[2, 4, 9, 9], [8, 4, 3, 3], [], [], [], [], []],
        [F, F, "", SL, SL, SL, S],
        [],
        [],
    )
    assert isinstance(flops.MODELS.work(call), str)


@pytest.mark.parametrize("queries", [1, 3, 8])
@pytest.mark.parametrize("keys", [1, 3, 8, 20])
@pytest.mark.parametrize("bottom_right", [False, True])
@pytest.mark.parametrize(("left", "right"), [(-1, 0), (2, 0), (0, 0), (3, 2), (-1, -1)])
def test_unmasked_pairs_are_those_of_the_mask_itself(
    queries: int, keys: int, bottom_right: bool, left: int, right: int
) -> None:
    own = np.arange(queries)[:, None] + (keys - queries if bottom_right else 0)
    key = np.arange(keys)[None, :]
    mask = (key <= own + right) if right >= 0 else np.ones((queries, keys), dtype=bool)
    if left >= 0:
        mask &= key >= own - left
    assert (
        count_unmasked_pairs(queries, keys, bottom_right=bottom_right, left=left, right=right)
        == mask.sum()
    )


def flash(
    causal: str, queries: int, keys: int, heads: int = 8, kv_heads: int = 8, d_v: int = 64
) -> list[Any]:
    return [
        ([2, queries, heads, 64], BF),
        ([2, keys, kv_heads, 64], BF),
        ([2, keys, kv_heads, d_v], BF),
        none(),
        none(),
        scalar(str(queries)),
        scalar(str(keys)),
        scalar("0."),
        scalar(causal),
        scalar("False"),
        scalar("0.125"),
        none(),
        none(),
        none(),
        none(),
    ]


def test_flash_attention_with_a_causal_mask_sees_the_last_key_last() -> None:
    assert (
        told("aten::_flash_attention_forward", *flash("True", 1, 100))[0] == 4 * 2 * 8 * 64 * 100
    )  # decode
    pairs = sum(90 + i + 1 for i in range(10))  # ten new tokens after ninety
    assert (
        told("aten::_flash_attention_forward", *flash("True", 10, 100))[0] == 4 * 2 * 8 * 64 * pairs
    )


def test_grouped_queries_read_fewer_keys_and_count_every_query_head() -> None:
    many, few = flash("False", 16, 16), flash("False", 16, 16, kv_heads=2)
    assert (
        told("aten::_flash_attention_forward", *many)[0]
        == told("aten::_flash_attention_forward", *few)[0]
    )
    moved = 2 * (2 * 2 * 16 * 8 * 64 + 2 * 2 * 16 * 2 * 64)
    assert told("aten::_flash_attention_forward", *few)[1] == moved


def test_keys_and_values_may_differ_in_width() -> None:
    found = told("aten::_flash_attention_forward", *flash("False", 16, 16, d_v=32))
    assert found[0] == 2 * 2 * 8 * 16 * 16 * (64 + 32)


def packed(total: int, longest: int, sequences: int) -> list[Any]:
    return [
        ([total, 8, 64], BF),
        ([total, 8, 64], BF),
        ([total, 8, 64], BF),
        ([sequences + 1], "int"),
        ([sequences + 1], "int"),
        scalar(str(longest)),
        scalar(str(longest)),
        scalar("0."),
        none(),
        scalar("True"),
        scalar("-1"),
        scalar("-1"),
    ]


def test_packed_sequences_are_modelled_only_where_their_lengths_are_known() -> None:
    equal = told("flash_attn::_flash_attn_varlen_forward", *packed(48, 16, 3))
    assert equal[0] == 3 * 4 * 8 * 64 * (16 * 17 // 2)
    unequal = work("flash_attn::_flash_attn_varlen_forward", *packed(40, 16, 3))
    assert unequal == "the lengths of the packed sequences are not recorded"


def test_efficient_attention_tells_the_kind_of_its_mask_by_a_number() -> None:
    def inputs(kind: str) -> list[Any]:
        return [
            ([2, 10, 8, 64], BF),
            ([2, 30, 8, 64], BF),
            ([2, 30, 8, 64], BF),
            none(),
            none(),
            none(),
            none(),
            none(),
            scalar("0."),
            scalar(kind),
            scalar("True"),
        ]

    one = 4 * 2 * 8 * 64
    found = [
        told("aten::_efficient_attention_forward", *inputs(kind))[0] for kind in ("0", "1", "2")
    ]
    assert found == [one * 300, one * 55, one * sum(range(21, 31))]


def test_attention_backward_does_five_products_of_which_one_again() -> None:
    inputs = [([2, 16, 8, 64], BF)] * 4 + [
        ([2, 8, 16], F),
        none(),
        none(),
        scalar("16"),
        scalar("16"),
    ]
    inputs = [
        inputs[0],
        *inputs[:4],
        ([2, 8, 16], F),
        none(),
        none(),
        scalar("16"),
        scalar("16"),
        scalar("0."),
        scalar("False"),
    ]
    found = work("aten::_flash_attention_backward", *inputs)
    assert isinstance(found, flops.Work)
    one = 2 * 2 * 8 * 16 * 16 * 64
    assert (found.flops, found.recomputed) == (5 * one, one)


def test_paged_attention_needs_the_annotation_of_its_batch() -> None:
    inputs = [
        ([64, 32, 128], BF),
        ([64, 8, 128], BF),
        ([64, 8, 128], BF),
        ([64, 32, 128], BF),
        none(),
    ]
    said = "execute_40_context_1(sq8sk8sqsq64sqsk64)_generation_32(sq32sk900sqsq32sqsk900)"
    pairs = (64 - (64 - 8) // 2) + 900
    found = told("vllm::unified_attention_with_output", *inputs, batch=said)
    assert found == (4 * 32 * 128 * pairs, 2 * (40 * 32 * 256 + 908 * 8 * 256), "bf16", True)
    assert isinstance(work("vllm::unified_attention_with_output", *inputs), str)


def test_lists_of_tensors_take_their_type_from_the_kernel() -> None:
    parts = [[[3, 4], [5, 4]], TL]
    assert told("aten::cat", parts, scalar("0"), list_type="2-byte")[:2] == (0, 2 * 2 * 32)
    assert told("aten::_foreach_add_", parts, parts, scalar("1"), list_type="fp32")[:2] == (
        32,
        3 * 4 * 32,
    )
    assert told("aten::_foreach_sqrt", parts, list_type="fp32")[:2] == (32, 2 * 4 * 32)
    adam = told(
        "aten::_fused_adamw_",
        parts,
        parts,
        parts,
        parts,
        ([], TL),
        parts,
        scalar("1e-3"),
        list_type="fp32",
    )
    assert adam[:2] == (14 * 32, 7 * 4 * 32)
    assert "element type" in str(work("aten::cat", parts, scalar("0")))


def test_experts_count_what_was_chosen_and_read_no_more_of_them_than_that() -> None:
    tokens, first, second = ([2, 64], BF), ([16, 256, 64], BF), ([16, 64, 128], BF)
    found = told("vllm::inplace_fused_experts", tokens, first, second, ([2, 4], F), ([2, 4], "int"))
    assert found[0] == 2 * 8 * (64 * 256 + 128 * 64)
    assert found[1] == 2 * 2 * 128 + 8 * 2 * (256 * 64 + 64 * 128) + 2 * 32


def test_expanded_inputs_lie_once_in_memory() -> None:
    plain = told("aten::add", ([6, 8, 4], F), ([8, 4], F), scalar("1"))
    expanded = told(
        "aten::add", ([6, 8, 4], F), ([8, 4], F), scalar("1"), strides=[[4, 0, 1], [4, 1], []]
    )
    assert plain[1] - expanded[1] == 4 * (6 * 8 * 4 - 6 * 4)


def test_shapes_of_a_damaged_file_cost_nothing_and_are_refused() -> None:
    assert count_unmasked_pairs(10**15, 10**15, bottom_right=True) == 10**15 * (10**15 + 1) // 2
    assert (
        work("aten::mm", ([10**9, 10**9], F), ([10**9, 10**9], F))
        == "the recorded shapes are too large to be true"
    )
    assert isinstance(work("aten::mm", ([-4, 5], F), ([5, 3], F)), str)


def test_results_whose_size_the_data_decide_are_not_guessed() -> None:
    assert isinstance(work("aten::where", ([6, 4], "bool")), str)
    assert isinstance(work("aten::index", ([6, 4], F), ([], "")), str)
    assert isinstance(work("aten::nonzero", ([6, 4], F)), str)


@pytest.mark.parametrize("name", ["aten::mm", "aten::linear", "aten::matmul", "aten::mul"])
def test_inputs_of_another_operator_before_its_own_are_noticed(name: str) -> None:
    """A real file records aten::matmul with [[2048,1120],[1120,256],[1120],[2048,2400],[256,2048],[2048,2400]]."""
    left_over = [([2048, 1120], F), ([1120, 256], F), ([1120], F)]
    assert (
        work(name, *left_over, ([256, 2048], F), ([2048, 2400], F))
        == "more inputs are recorded than the operator has"
    )


def test_types_promote_as_in_pytorch() -> None:
    def tensor(dtype: str, *shape: int) -> Tensor:
        return Tensor(shape, dtype)

    assert derive_promoted_dtype([tensor("bf16", 3), tensor("fp64")]) == "bf16"
    assert derive_promoted_dtype([tensor("int64", 3), tensor("fp64")]) == "fp32"
    assert derive_promoted_dtype([tensor("bf16", 3), tensor("fp32", 3)]) == "fp32"
    assert derive_promoted_dtype([tensor("bf16", 3), tensor("fp16", 3)]) == "fp32"
    assert derive_promoted_dtype([tensor("int32", 3), tensor("int64", 3)]) == "int64"
    assert derive_promoted_dtype([tensor("fp32"), tensor("bool", 3)]) == "fp32"


def test_shapes_broadcast_or_are_refused() -> None:
    assert derive_broadcast_shape((3, 1), (4,)) == (3, 4)
    assert derive_broadcast_shape((0, 1), (4,)) == (0, 4)
    with pytest.raises(flops.Unknown):
        derive_broadcast_shape((3,), (4,))


def test_no_model_fails_on_inputs_it_does_not_know() -> None:
    """Whatever is recorded, a model answers or says why not."""
    shapes: list[list[Any]] = [
        [],
        [[]],
        [[2, 3]],
        [[2, 3], [3, 2]],
        [[[2], [3]], []],
        [["a"], None, 5],
        [[0], [0], [0], [0]],
    ]
    kinds, values = (F, "Scalar", "TensorList", "", "unheard of"), ("", "[1, 1]", "x", "True")
    for name, some, kind, value in itertools.product(
        sorted(flops.MODELS.names()), shapes, kinds, values
    ):
        call = flops.Call(name.replace("*", "0"), some, [kind] * len(some), [value] * len(some), [])
        assert isinstance(flops.MODELS.work(call), (flops.Work, str)), call


def test_a_user_adds_a_model_in_three_lines_and_takes_it_away() -> None:
    @flops.register("my::scale")
    def scale(call: flops.Call) -> flops.Work:
        return flops.Work(
            flops=call.tensor(0).numel, bytes=2 * call.tensor(0).bytes, dtype=call.tensor(0).dtype
        )

    try:
        assert told("my::scale", ([6, 4], F)) == (24, 192, "fp32", False)
    finally:
        flops.remove("my::scale")
    assert work("my::scale", ([6, 4], F)) == "no model for this operator"


def test_a_model_of_the_user_that_fails_is_a_reason_and_no_end() -> None:
    @flops.register("my::broken")
    def broken(call: flops.Call) -> flops.Work:
        return flops.Work(flops=1 // len(call.shapes[1:]), bytes=0, dtype="fp32")

    try:
        assert "ZeroDivisionError" in str(work("my::broken", ([6, 4], F)))
    finally:
        flops.remove("my::broken")


def test_patterns_give_way_to_exact_names() -> None:
    registry = flops.Registry()
    registry.register("my::*", family="any")(lambda _: flops.Work(1, 0, "fp32"))
    registry.register("my::one")(lambda _: flops.Work(2, 0, "fp32"))
    calls = [flops.Call(name, [], [], [], []) for name in ("my::one", "my::two", "your::one")]
    assert [getattr(registry.work(call), "flops", None) for call in calls] == [2, 1, None]
    assert json.dumps(registry.names()) == '{"my::one": "own", "my::*": "any"}'


def test_triton_experts_are_told_by_their_grids() -> None:
    """32 tokens, 4 of 32 experts each: 128 rows of 16 in at most 38 tiles; 46 and 24 tiles of 128 columns."""
    sort = flops.Call(
        "SortTokens", [[32, 4], [32, 4], []], [BF, "short int", S], ["", "", "32"], []
    )
    name = "_matmul_ogs_NNT_bf16xbf16xmxfp4_16x128x256x1"
    kernels = (
        LaunchedKernel("_topk_forward", (1, 1, 1)),
        LaunchedKernel(f"{name}_swiglu", (1748, 1, 1)),
        LaunchedKernel(name, (912, 1, 1)),
    )
    inputs = ([32, 3072], BF), ([32, 32], BF), none(), none()
    weights = 3072 * 46 * 128 + 46 * 64 * 24 * 128
    moved = 2 * 32 * 3072 * 2 + 32 * 32 * 2 + round(32 * weights * 17 / 32)
    assert told("vllm::moe_forward", *inputs, inside=(sort,), kernels=kernels) == (
        2 * 128 * weights,
        moved,
        "bf16",
        True,
    )
    for missing in (
        {"kernels": kernels},
        {"inside": (sort,)},
        {"inside": (sort,), "kernels": kernels[:2]},
    ):
        assert (
            work("vllm::moe_forward", *inputs, **missing)
            == "the sizes of the experts are not recorded"
        )
    others = (kernels[1], LaunchedKernel(name, (913, 1, 1)))
    assert "grids" in str(work("vllm::moe_forward", *inputs, inside=(sort,), kernels=others))


@given(
    rows=st.lists(st.integers(0, 300), min_size=1, max_size=40).filter(any),
    block=st.sampled_from([16, 32, 64, 128]),
)
def test_no_spread_of_rows_over_experts_needs_more_tiles(rows: list[int], block: int) -> None:
    assert sum(-(-count // block) for count in rows) <= _count_row_tiles(
        sum(rows), len(rows), block
    )


def test_paged_attention_over_a_cache_takes_the_lengths_of_the_batch() -> None:
    batch = "execute_2_context_0(sq0sk0sqsq0sqsk0)_generation_2(sq2sk30sqsq2sqsk30)"
    query, cache = ([2, 8, 64], BF), ([999, 1, 4, 64], BF)
    of_sglang = [([2, 8, 64], BF), ([7], "unsigned char"), query, cache, cache]
    flop, moved = 2 * 8 * 30 * 128, (2 * 8 * 2 + 30 * 4 * 2) * 128
    name = "sglang_profiler::attention_paged_attention_ragged_100"
    assert told(name, *of_sglang, batch=batch) == (flop, moved, "bf16", True)
    packed = ([999, 4, 8, 16, 8], BF)
    assert told("_C::paged_attention_v1", query, query, packed, packed, batch=batch) == (
        flop,
        moved,
        "bf16",
        True,
    )
    assert "no annotation" in str(work(name, *of_sglang))


def test_sums_and_norms_of_aiter_read_two_tensors_and_write_two() -> None:
    x, weight = ([4, 8], BF), ([8], BF)
    expected = (5 * 32, 4 * 64 + 16, "bf16", False)
    assert told("aiter::add_rmsnorm", x, x, x, x, weight, scalar("1e-6")) == expected
    assert told("aiter::rmsnorm", x, x, weight, scalar("1e-6")) == (
        4 * 32,
        2 * 64 + 16,
        "bf16",
        False,
    )
