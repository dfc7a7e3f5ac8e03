"""Models of operators against doing the same in NumPy (or by sliding a window) and counting what goes in and comes out."""

from __future__ import annotations

import math
import random
from itertools import product
from typing import Any

import numpy as np
import pytest

from traceloom.analyze import flops

F, BF, L, B, I32 = "float", "c10::BFloat16", "long int", "bool", "int"
SIZES = {F: 4, BF: 2, L: 8, B: 1, I32: 4}
NUMPY: dict[str, Any] = {F: np.float32, L: np.int64, B: np.bool_, I32: np.int32}
Input = tuple[Any, str] | tuple[Any, str, str]


def told(name: str, *inputs: Input, list_type: str = "") -> tuple[int, int]:
    """FLOPs and bytes of a call."""
    texts = [one[2] if len(one) > 2 else "" for one in inputs]
    call = flops.Call(
        name, [one[0] for one in inputs], [one[1] for one in inputs], texts, [], list_type
    )
    found = flops.MODELS.work(call)
    assert isinstance(found, flops.Work), found
    return found.flops, found.bytes


def refused(name: str, *inputs: Input) -> str:
    texts = [one[2] if len(one) > 2 else "" for one in inputs]
    found = flops.MODELS.work(
        flops.Call(name, [one[0] for one in inputs], [one[1] for one in inputs], texts, [])
    )
    assert isinstance(found, str), found
    return found


def number(value: Any) -> Input:
    return [], "Scalar", str(value)


def numbers(values: list[int] | tuple[int, ...]) -> Input:
    return [], "ScalarList", str(list(values))


def filled(shape: tuple[int, ...], kind: str) -> np.ndarray:
    return np.ones(shape, dtype=NUMPY[kind])


SHAPES = [(), (5,), (3, 4), (2, 1, 4), (1, 3, 1, 2), (0, 4), (6, 0)]


# -- elementwise --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("left", SHAPES)
@pytest.mark.parametrize("right", [(), (4,), (3, 1), (1, 1, 4), (2, 1, 1)])
def test_binary_operators_read_both_and_write_what_numpy_gives(
    left: tuple[int, ...], right: tuple[int, ...]
) -> None:
    one, other = filled(left, F), filled(right, F)
    inputs: list[Input] = [(list(left), F), (list(right), F)]
    try:
        result = one + other
    except ValueError:
        refused("aten::add", *inputs)
        return
    assert told("aten::add", *inputs) == (result.size, one.nbytes + other.nbytes + result.nbytes)
    compared = one < other
    assert told("aten::lt", *inputs) == (result.size, one.nbytes + other.nbytes + compared.nbytes)
    chosen = np.where(filled(left, B), one, other)
    found = told("aten::where", (list(left), B), (list(left), F), (list(right), F))
    assert found == (0, one.size + one.nbytes + other.nbytes + chosen.nbytes)


@pytest.mark.parametrize("shape", SHAPES)
def test_unary_operators_read_and_write_every_element_once(shape: tuple[int, ...]) -> None:
    x = filled(shape, F)
    for name in ("exp", "relu", "neg", "sqrt_", "abs_"):
        assert told(f"aten::{name}", (list(shape), F)) == (x.size, 2 * x.nbytes)
    assert told("aten::fill_", (list(shape), F), number(0)) == (0, x.nbytes)
    assert told("aten::clone", (list(shape), F)) == (0, 2 * x.nbytes)


# -- reductions ---------------------------------------------------------------------------------------------------


def dims_of(rank: int) -> list[tuple[int, ...]]:
    return [
        dims
        for size in range(1, rank + 1)
        for dims in product(range(-rank, rank), repeat=size)
        if len({d % rank for d in dims}) == size
    ][:12]


@pytest.mark.parametrize("shape", [(5,), (3, 4), (2, 3, 4)])
def test_reductions_read_all_and_write_what_numpy_leaves(shape: tuple[int, ...]) -> None:
    x = filled(shape, F)
    for dims in dims_of(len(shape)):
        given: list[Input] = [(list(shape), F), numbers(dims), number(False), number("")]
        left = np.sum(x, axis=dims)
        assert told("aten::sum", *given) == (x.size, x.nbytes + left.nbytes)
        assert told("aten::mean", *given) == (x.size, x.nbytes + left.nbytes)
        assert told("aten::amax", *given[:3]) == (x.size, x.nbytes + np.max(x, axis=dims).nbytes)
        assert told("aten::all", (list(shape), B), *given[1:3])[1] == x.size + left.size
    for dim in range(-len(shape), len(shape)):
        places = np.argmax(x, axis=dim)
        found = told("aten::argmax", (list(shape), F), number(dim), number(False))
        assert found == (x.size, x.nbytes + places.size * 8)
        found = told("aten::max", (list(shape), F), number(dim), number(False))
        assert found == (x.size, x.nbytes + places.size * (4 + 8)), "the values and their places"
        assert told("aten::cumsum", (list(shape), F), number(dim)) == (
            x.size,
            x.nbytes + np.cumsum(x, axis=dim).nbytes,
        )


@pytest.mark.parametrize("kind", [F, L, I32, B])
def test_sums_of_small_integers_are_long_ones_as_in_pytorch(kind: str) -> None:
    x = filled((3, 4), kind)
    out = np.sum(x.astype(np.int64), axis=0) if kind != F else np.sum(x, axis=0)
    found = told("aten::sum", ([3, 4], kind), numbers([0]), number(False), number(""))
    assert found == (12, x.nbytes + out.nbytes)


@pytest.mark.parametrize("dims", ["[7]", "[-4]", "[0, 9]", "x"])
def test_dimensions_that_the_input_does_not_have_are_refused(dims: str) -> None:
    assert refused("aten::sum", ([3, 4], F), ([], "ScalarList", dims), number(False), number(""))


@pytest.mark.parametrize(("k", "dim"), [(1, 0), (2, 1), (3, -1), (4, -2)])
def test_the_largest_k_are_written_with_their_places(k: int, dim: int) -> None:
    x = filled((5, 4), F)
    kept = np.take(np.sort(x, axis=dim), range(k), axis=dim)
    assert told("aten::topk", ([5, 4], F), number(k), number(dim)) == (
        0,
        x.nbytes + kept.nbytes + 8 * kept.size,
    )
    assert told("aten::sort", ([5, 4], F), number(dim)) == (0, 2 * x.nbytes + 8 * x.size)
    assert told("aten::argsort", ([5, 4], F), number(dim)) == (0, x.nbytes + 8 * x.size)


# -- moving -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("parts", [[(3, 4), (5, 4)], [(2,), (3,), (4,)], [(1, 2, 3)]])
def test_what_is_joined_is_read_and_written_once(parts: list[tuple[int, ...]]) -> None:
    arrays = [filled(shape, F) for shape in parts]
    joined = np.concatenate(arrays, axis=0)
    found = told(
        "aten::cat", ([list(shape) for shape in parts], "TensorList"), number(0), list_type="fp32"
    )
    assert found == (0, sum(array.nbytes for array in arrays) + joined.nbytes)


@pytest.mark.parametrize("pad", [[1, 2], [0, 0, 3, 1], [2, 0, 0, 1, 1, 1], [-1, 0], [-2, 1, 0, -1]])
def test_padding_widens_from_the_last_dimension_on_and_cuts_where_negative(pad: list[int]) -> None:
    x = filled((4, 5, 6), F)
    widths = [(0, 0)] * (3 - len(pad) // 2) + [
        (pad[2 * at], pad[2 * at + 1]) for at in reversed(range(len(pad) // 2))
    ]
    cut = x[
        tuple(
            slice(max(-low, 0), size - max(-high, 0))
            for size, (low, high) in zip(x.shape, widths, strict=True)
        )
    ]
    out = np.pad(cut, [(max(low, 0), max(high, 0)) for low, high in widths])
    assert told("aten::constant_pad_nd", ([4, 5, 6], F), numbers(pad), number(0)) == (
        0,
        min(x.nbytes, out.nbytes) + out.nbytes,
    )


@pytest.mark.parametrize("pad", [[1], [1, 2, 3], [0] * 8, [-9, 0]])
def test_padding_that_does_not_fit_is_refused(pad: list[int]) -> None:
    assert refused("aten::constant_pad_nd", ([4, 5, 6], F), numbers(pad), number(0))


@pytest.mark.parametrize("dim", [0, 1, 2, -1, -3])
def test_chosen_slices_are_read_and_written_with_their_index(dim: int) -> None:
    x, index = filled((4, 5, 6), F), np.array([0, 3, 3])
    out = np.take(x, index, axis=dim)
    assert told("aten::index_select", ([4, 5, 6], F), number(dim), ([3], L)) == (
        0,
        2 * out.nbytes + index.nbytes,
    )


def test_rows_of_a_table_are_added_by_bag() -> None:
    weight, index, offsets = filled((100, 8), F), np.zeros(12, np.int64), np.array([0, 5, 9])
    gathered, out = weight[index], np.add.reduceat(weight[index], offsets)
    found = told("aten::_embedding_bag", ([100, 8], F), ([12], L), ([3], L))
    assert found == (gathered.size, gathered.nbytes + out.nbytes + index.nbytes + offsets.nbytes)


@pytest.mark.parametrize("rows", [1, 7])
def test_rows_by_one_index_are_gathered(rows: int) -> None:
    x, index = filled((20, 6), F), np.zeros(rows, np.int64)
    found = told("aten::index", ([20, 6], F), ([[rows]], "TensorList"))
    assert found == (0, 2 * x[index].nbytes + index.nbytes)


@pytest.mark.parametrize("shapes", [[[20]], [[3], [3]], []])
def test_indices_whose_result_nobody_knows_are_refused(shapes: list[Any]) -> None:
    assert refused("aten::index", ([20, 6], F), (shapes, "TensorList"))


@pytest.mark.parametrize(
    ("name", "adds"), [("scatter_", 0), ("scatter_add_", 9), ("index_add_", 9)]
)
def test_scattered_elements_are_written_and_read_where_they_add(name: str, adds: int) -> None:
    source, index = filled((9,), F), np.zeros(9, np.int64)
    found = told(f"aten::{name}", ([50], F), number(0), ([9], L), ([9], F))
    assert found == (adds, index.nbytes + (3 if adds else 2) * source.nbytes)
    whole = told(f"aten::{name.rstrip('_')}", ([50], F), number(0), ([9], L), ([9], F))
    assert whole == (adds, found[1] + 2 * 50 * 4), "what is not in place copies its input first"


@pytest.mark.parametrize(
    ("start", "end", "step"), [(0, 9, 1), (2, 9, 2), (9, 2, -3), (5, 5, 1), (0, 1, 0.25)]
)
def test_numbers_in_a_row_are_as_many_as_in_numpy(start: float, end: float, step: float) -> None:
    out = np.arange(start, end, step)
    assert told("aten::arange", number(start), number(end), number(step), ([0], L)) == (
        0,
        8 * out.size,
    )


# -- windows ------------------------------------------------------------------------------------------------------


def positions(
    size: int, kernel: int, stride: int, padding: int, dilation: int, *, up: bool = False
) -> int:
    """How many windows fit, slid one by one; rounded up, a last one may stick out if it begins inside the input."""
    count, at = 0, -padding
    while at + dilation * (kernel - 1) < size + padding or (
        up and at < size and count and short(at, size, kernel, stride, padding, dilation)
    ):
        count, at = count + 1, at + stride
    return count


def short(at: int, size: int, kernel: int, stride: int, padding: int, dilation: int) -> bool:
    """Whether the window before this one fitted, so that this one is the one that sticks out."""
    return at - stride + dilation * (kernel - 1) < size + padding - 1


WINDOWS = [
    (8, 2, 2, 0, 1),
    (9, 3, 2, 1, 1),
    (10, 3, 1, 1, 2),
    (7, 3, 3, 0, 1),
    (11, 4, 3, 2, 1),
    (5, 5, 1, 0, 1),
]


@pytest.mark.parametrize(("size", "kernel", "stride", "padding", "dilation"), WINDOWS)
def test_pooling_has_a_value_per_window(
    size: int, kernel: int, stride: int, padding: int, dilation: int
) -> None:
    out = 2 * 3 * positions(size, kernel, stride, padding, dilation) ** 2
    inputs: list[Input] = [
        ([2, 3, size, size], F),
        numbers([kernel] * 2),
        numbers([stride] * 2),
        numbers([padding] * 2),
    ]
    found = told("aten::max_pool2d_with_indices", *inputs, numbers([dilation] * 2), number(False))
    assert found == (out * kernel**2, 4 * 6 * size**2 + out * 12)
    if dilation == 1:
        assert told("aten::avg_pool2d", *inputs, number(False)) == (
            out * kernel**2,
            4 * 6 * size**2 + 4 * out,
        )


@pytest.mark.parametrize(
    ("size", "kernel", "stride", "padding", "out"),
    [
        (6, 3, 2, 0, 3),
        (7, 3, 2, 0, 3),
        (5, 2, 2, 0, 3),
        (4, 1, 3, 0, 2),
        (3, 2, 2, 1, 2),
        (6, 2, 4, 1, 2),
        (5, 1, 5, 0, 1),
    ],
)
def test_pooling_rounded_up_has_a_window_more_only_where_it_begins_inside(
    size: int, kernel: int, stride: int, padding: int, out: int
) -> None:
    inputs: list[Input] = [
        ([1, 1, size, size], F),
        numbers([kernel] * 2),
        numbers([stride] * 2),
        numbers([padding] * 2),
    ]
    assert told("aten::avg_pool2d", *inputs, number(True))[0] == out**2 * kernel**2


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize(("size", "kernel", "stride", "padding", "dilation"), WINDOWS)
def test_a_convolution_multiplies_the_filter_at_every_window(
    size: int, kernel: int, stride: int, padding: int, dilation: int, groups: int
) -> None:
    places = positions(size, kernel, stride, padding, dilation) ** 2
    x, weight = ([2, 4, size, size], F), ([6, 4 // groups, kernel, kernel], F)
    where = [numbers([stride] * 2), numbers([padding] * 2), numbers([dilation] * 2)]
    found = told("aten::conv2d", x, weight, ([6], F), *where, number(groups))
    multiplied = 2 * 6 * places * (4 // groups) * kernel**2
    moved = 4 * (2 * 4 * size**2 + math.prod(weight[0]) + 6 + 2 * 6 * places)
    assert found == (2 * multiplied, moved)
    again = told(
        "aten::convolution",
        x,
        weight,
        ([6], F),
        *where,
        number(False),
        numbers([0, 0]),
        number(groups),
    )
    assert again == found, "the same under its other name"


@pytest.mark.parametrize(
    ("size", "kernel", "stride", "padding", "more"),
    [
        (4, 3, 2, 1, 0),
        (4, 3, 2, 1, 1),
        (5, 2, 2, 0, 1),
        (3, 4, 1, 1, 0),
        (6, 3, 3, 0, 0),
        (6, 3, 3, 0, 2),
    ],
)
def test_a_transposed_convolution_spreads_every_element_over_the_filter(
    size: int, kernel: int, stride: int, padding: int, more: int
) -> None:
    # the size whose convolution has `size` windows, and the padding beside it
    out = (
        next(
            width for width in range(1, 99) if positions(width, kernel, stride, padding, 1) == size
        )
        + more
    )
    inputs = [
        ([2, 4, size], F),
        ([4, 6, kernel], F),
        ([6], F),
        numbers([stride]),
        numbers([padding]),
        numbers([more]),
    ]
    found = told("aten::conv_transpose1d", *inputs, number(1), numbers([1]))
    assert found == (
        2 * 2 * 4 * size * 6 * kernel,
        4 * (2 * 4 * size + 4 * 6 * kernel + 6 + 2 * 6 * out),
    )


@pytest.mark.parametrize("scale", [(16, 12), (4, 4), (8, 9)])
def test_resampling_writes_the_new_size(scale: tuple[int, int]) -> None:
    found = told(
        "aten::upsample_nearest2d", ([1, 2, 8, 8], F), numbers(scale), number(""), number("")
    )
    assert found == (0, 4 * (128 + 2 * math.prod(scale)))


# -- products -----------------------------------------------------------------------------------------------------


def counted(left: tuple[int, ...], right: tuple[int, ...]) -> tuple[int, int]:
    """Multiply-adds and size of a product, by what NumPy gives."""
    out = np.matmul(np.zeros(left, np.float32), np.zeros(right, np.float32))
    return out.size * left[-1], out.size


PRODUCTS = [
    ((3, 4), (4, 5)),
    ((4,), (4, 5)),
    ((3, 4), (4,)),
    ((4,), (4,)),
    ((2, 3, 4), (4, 5)),
    ((2, 1, 3, 4), (6, 4, 5)),
    ((6, 3, 4), (4,)),
    ((3, 0), (0, 5)),
    ((4,), (2, 4, 5)),
]


@pytest.mark.parametrize(("left", "right"), PRODUCTS)
def test_matmul_is_that_of_numpy(left: tuple[int, ...], right: tuple[int, ...]) -> None:
    macs, size = counted(left, right)
    found = told("aten::matmul", (list(left), F), (list(right), F))
    assert found == (2 * macs, 4 * (math.prod(left) + math.prod(right) + size))


@pytest.mark.parametrize("seed", range(5))
def test_the_same_product_is_the_same_work_in_every_spelling(seed: int) -> None:
    chance = random.Random(seed)
    m, k, n = (chance.randrange(1, 40) for _ in range(3))
    plain = told("aten::mm", ([m, k], BF), ([k, n], BF))
    assert plain == (2 * m * k * n, 2 * (m * k + k * n + m * n))
    assert told("aten::linear", ([m, k], BF), ([n, k], BF), ([], "")) == plain
    assert told("aten::matmul", ([m, k], BF), ([k, n], BF)) == plain
    assert told("aten::bmm", ([1, m, k], BF), ([1, k, n], BF)) == plain
    assert told("aten::addmm", ([n], BF), ([m, k], BF), ([k, n], BF), number(1), number(1)) == (
        plain[0],
        plain[1] + 2 * n,
    )
    many = told("aten::bmm", ([7, m, k], BF), ([7, k, n], BF))
    assert many == (7 * plain[0], 7 * plain[1])


@pytest.mark.parametrize(
    ("name", "inputs"),
    [
        ("aten::mm", [([3, 4], F), ([5, 6], F)]),
        ("aten::matmul", [([3, 4], F), ([5, 6], F)]),
        ("aten::matmul", [([], F), ([4, 5], F)]),
        ("aten::matmul", [([2, 3, 4], F), ([3, 4, 5], F)]),
        ("aten::bmm", [([2, 3, 4], F), ([3, 4, 5], F)]),
        ("aten::linear", [([3, 4], F), ([5, 6], F), ([], "")]),
        ("aten::mv", [([3, 4], F), ([5], F)]),
        ("aten::dot", [([3], F), ([4], F)]),
        ("aten::addbmm", [([3, 5], F), ([2, 3, 4], F), ([2, 9, 5], F)]),
        (
            "aten::conv2d",
            [
                ([1, 4, 8], F),
                ([6, 4, 3, 3], F),
                ([], ""),
                numbers([1]),
                numbers([0]),
                numbers([1]),
                number(1),
            ],
        ),
    ],
)
def test_shapes_that_do_not_fit_each_other_are_refused(name: str, inputs: list[Input]) -> None:
    assert refused(name, *inputs)


# -- lists --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "lists", "per_element", "written"),
    [
        ("_foreach_add_", 2, 1, 1),
        ("_foreach_mul", 2, 1, 1),
        ("_foreach_addcmul_", 3, 3, 1),
        ("_foreach_sqrt", 1, 1, 1),
        ("_foreach_copy_", 2, 0, 0),
    ],
)
def test_loops_over_lists_read_every_list_and_write_one(
    name: str, lists: int, per_element: int, written: int
) -> None:
    shapes = [[3, 4], [5], []]
    elements = 12 + 5 + 1
    given: list[Input] = [(shapes, "TensorList")] * lists
    found = told(f"aten::{name}", *given, number(1), list_type="fp32")
    assert found == (per_element * elements, 4 * elements * (lists + written))


def test_norms_of_lists_write_one_number_per_tensor() -> None:
    shapes = [[3, 4], [5]]
    assert told("aten::_foreach_norm", (shapes, "TensorList"), number(2), list_type="fp32") == (
        2 * 17,
        4 * (17 + 2),
    )
    assert told("aten::_foreach_zero_", (shapes, "TensorList"), list_type="fp32") == (0, 4 * 17)


def test_a_compiled_template_multiplies_the_matrices_that_fit() -> None:
    inputs: list[Input] = [([3, 4], BF), ([4, 5], BF), ([3, 5], BF), ([], "Scalar", "7")]
    assert told("triton_tem_fused_mm_3", *inputs) == (2 * 3 * 4 * 5, 2 * (12 + 20 + 15))
    assert refused("triton_tem_fused_mm_3", inputs[0], inputs[0], inputs[2])
    assert refused("triton_tem_fused_convolution_3", *inputs)
