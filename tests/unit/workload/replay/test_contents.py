"""What tensors from outside must hold."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import polars as pl
import pytest

from support.plans import PlanBuilder
from traceloom.errors import InvariantError
from traceloom.workload.replay.contents import RecordedIntegers, settle_contents

T = [{"tensor": number} for number in range(8)]
EMBEDDING = "aten::embedding(Tensor weight, Tensor indices, SymInt padding_idx=-1, bool g=False, bool s=False) -> Tensor"
NLL = "aten::nll_loss_forward(Tensor self, Tensor target, Tensor? weight, int reduction, SymInt ignore_index) -> (Tensor output, Tensor total_weight)"
SELF_DIM_INDEX = "(Tensor self, int dim, Tensor index) -> Tensor"
SQRT = "aten::sqrt(Tensor self) -> Tensor"
Settled = tuple[str, int | None, int | None, str]


class Build(PlanBuilder):
    def floats(self, *shape: int) -> int:
        return self.tensor(*shape, external=True)

    def integers(self, *shape: int) -> int:
        return self.tensor(*shape, dtype="int64", item=8, external=True)

    def made(self, *shape: int, dtype: str = "float32") -> int:
        return self.tensor(*shape, dtype=dtype, item=8 if dtype == "int64" else 4)

    def lookup(self, indices: int, rows: int = 50) -> None:
        """Rows of a table at indices."""
        self.run(
            EMBEDDING,
            [T[0], T[1], -1, False, False],
            [self.floats(rows, 4), indices],
            [self.made(3, 4)],
        )

    def of(self, tensor: int, **seen: Any) -> Settled:
        plan, _ = settle_contents(self.build(), **seen)
        row = plan.storages.row(self.rows["tensors"][tensor]["storage"], named=True)
        return row["content"], row["low"], row["high"], row["evidence"]


def test_an_index_lies_within_its_table() -> None:
    build = Build()
    indices = build.integers(3)
    build.lookup(indices)
    assert build.of(indices) == ("integers", 0, 49, "consumer")


def test_of_several_consumers_the_tightest_counts() -> None:
    build = Build()
    indices = build.integers(3)
    for rows in (50, 7, 20):
        build.lookup(indices, rows)
    assert build.of(indices) == ("integers", 0, 6, "consumer")


def test_demands_go_back_through_views_and_copies() -> None:
    build = Build()
    packed = build.integers(2, 6)  # tokens, of which all but the first are what is to be said next
    storage = build.rows["tensors"][packed]["storage"]
    tokens = build.view(storage, [2, 5], [6, 1], dtype="int64")
    targets = build.view(storage, [2, 5], [6, 1], offset=1, dtype="int64")
    build.run(
        "aten::slice.Tensor(Tensor(a) self, int dim=0, SymInt? start=None, SymInt? end=None, SymInt step=1) -> Tensor(a)",
        [T[0], 1, 0, 5, 1],
        [packed],
        [tokens],
    )
    moved, flat, both = (
        build.made(2, 5, dtype="int64"),
        build.made(10, dtype="int64"),
        build.made(20, dtype="int64"),
    )
    build.run(
        "aten::_to_copy(Tensor self, *, ScalarType? dtype=None) -> Tensor",
        [T[0], None],
        [tokens],
        [moved],
    )
    build.run(
        "aten::reshape(Tensor(a) self, SymInt[] shape) -> Tensor(a)", [T[0], [10]], [moved], [flat]
    )
    build.run(
        "aten::cat(Tensor[] tensors, int dim=0) -> Tensor", [[T[0], T[1]], 0], [flat, flat], [both]
    )
    build.lookup(both, 40)
    build.run(
        NLL,
        [T[0], T[1], None, 1, -100],
        [build.floats(10, 33), targets],
        [build.made(), build.made()],
    )
    assert build.of(packed) == ("integers", 0, 32, "consumer")


@pytest.mark.parametrize(
    ("schema", "arguments", "shape", "high"),
    [
        ("aten::gather" + SELF_DIM_INDEX, [T[0], 1, T[1]], (5, 9), 8),
        ("aten::index_select" + SELF_DIM_INDEX, [T[0], -2, T[1]], (5, 9), 4),
        (
            "aten::scatter_add_(Tensor(a!) self, int dim, Tensor index, Tensor src) -> Tensor(a!)",
            [T[0], 0, T[1], T[0]],
            (5, 9),
            4,
        ),
        ("aten::take(Tensor self, Tensor index) -> Tensor", [T[0], T[1]], (5, 9), 44),
        (
            "aten::index.Tensor(Tensor self, Tensor?[] indices) -> Tensor",
            [T[0], [None, T[1]]],
            (5, 9),
            8,
        ),
        (
            "aten::index_put_(Tensor(a!) self, Tensor?[] indices, Tensor values, bool accumulate=False) -> Tensor(a!)",
            [T[0], [T[1]], T[0], False],
            (5, 9),
            4,
        ),
        ("aten::cross_entropy_loss(Tensor self, Tensor target) -> Tensor", [T[0], T[1]], (5, 9), 8),
        (
            "aten::embedding_dense_backward(Tensor grad_output, Tensor indices, SymInt num_weights, SymInt padding_idx, bool s) -> Tensor",
            [T[0], T[1], 77, -1, False],
            (5, 9),
            76,
        ),
        (
            "aten::max_pool2d_with_indices_backward(Tensor grad_output, Tensor self, int[2] kernel_size, Tensor indices) -> Tensor",
            [T[0], T[0], [2], T[1]],
            (2, 3, 4, 6),
            23,
        ),
    ],
)
def test_limits_of_indices(
    schema: str, arguments: list[Any], shape: tuple[int, ...], high: int
) -> None:
    build = Build()
    index = build.integers(4)
    build.run(schema, arguments, [build.floats(*shape), index], [build.made(4)])
    assert build.of(index) == ("integers", 0, high, "consumer")


def test_a_mask_takes_as_many_dimensions_as_it_has() -> None:
    build = Build()
    mask, index = build.tensor(2, 3, dtype="bool", item=1, external=True), build.integers(4)
    build.run(
        "aten::index.Tensor(Tensor self, Tensor?[] indices) -> Tensor",
        [T[0], [T[1], T[2]]],
        [build.floats(2, 3, 8), mask, index],
        [build.made(4)],
    )
    assert build.of(index) == ("integers", 0, 7, "consumer")
    assert build.of(mask) == ("integers", 0, 1, "guess")


@pytest.mark.parametrize(("include_last", "high"), [(False, 15), (True, 20)])
def test_offsets_of_bags(include_last: bool, high: int) -> None:
    build = Build()
    indices, offsets = build.integers(20), build.integers(4)
    build.run(
        "aten::_embedding_bag(Tensor weight, Tensor indices, Tensor offsets, bool include_last_offset=False) -> (Tensor, Tensor)",
        [T[0], T[1], T[2], include_last],
        [build.floats(30, 4), indices, offsets],
        [build.made(4, 4), None],
    )
    assert build.of(indices) == ("integers", 0, 29, "consumer")
    assert build.of(offsets) == ("offsets", 0, high, "consumer")


def test_lengths_and_starts_of_sequences() -> None:
    build = Build()
    lengths, starts, query = build.integers(4), build.integers(5), build.floats(24, 2, 8)
    sorted_lengths, order = build.made(4, dtype="int64"), build.made(4, dtype="int64")
    build.run(
        "aten::sort(Tensor self, int dim=-1, bool descending=False) -> (Tensor values, Tensor indices)",
        [T[0], -1, True],
        [lengths],
        [sorted_lengths, order],
    )
    build.run(
        "aten::index_select" + SELF_DIM_INDEX,
        [T[0], 1, T[1]],
        [build.floats(9, 4), order],
        [build.made(9, 4)],
    )
    build.run(
        "aten::_pack_padded_sequence(Tensor input, Tensor lengths, bool batch_first) -> (Tensor, Tensor)",
        [T[0], T[1], True],
        [build.floats(4, 9, 2), sorted_lengths],
        [build.made(24, 2), build.made(9, dtype="int64")],
    )
    build.run(
        "aten::_flash_attention_forward(Tensor query, Tensor key, Tensor? cum_seq_q, Tensor? cum_seq_k) -> Tensor",
        [T[0], T[0], T[1], None],
        [query, starts],
        [build.made(24, 2, 8)],
    )
    assert build.of(lengths) == ("lengths", 9, 24, "consumer")
    assert build.of(starts) == ("offsets", 0, 24, "consumer")


def test_what_is_under_a_root_is_positive_through_the_maths_of_an_optimizer() -> None:
    build = Build()
    square, grad = build.floats(6), build.floats(6)
    build.run(
        "aten::mul_.Tensor(Tensor(a!) self, Tensor other) -> Tensor(a!)",
        T[:2],
        [square, build.floats()],
        [square],
    )
    build.run(
        "aten::addcmul_(Tensor(a!) self, Tensor tensor1, Tensor tensor2, *, Scalar value=1) -> Tensor(a!)",
        [*T[:3], 0.001],
        [square, grad, grad],
        [square],
    )
    build.run(SQRT, T[:1], [square], [build.made(6)])
    assert build.of(square) == ("positive", None, None, "consumer")
    assert build.of(grad) == (
        "floats",
        None,
        None,
        "guess",
    )  # its square is positive whatever it is


def test_repetitions_add_up_to_what_came_out() -> None:
    build = Build()
    repeats = build.integers(3)
    build.run(
        "aten::repeat_interleave.self_Tensor(Tensor self, Tensor repeats, int? dim=None) -> Tensor",
        [T[0], T[1], 0],
        [build.floats(3, 6), repeats],
        [build.made(8, 6)],
    )
    assert build.of(repeats) == ("lengths", 3, 8, "consumer")


def test_positive_by_the_name_of_an_argument_and_in_lists() -> None:
    build = Build()
    variance, mean, first, second = (build.floats(4) for _ in range(4))
    build.run(
        "aten::batch_norm(Tensor input, Tensor? running_mean, Tensor? running_var) -> Tensor",
        T[:3],
        [build.floats(2, 4), mean, variance],
        [build.made(2, 4)],
    )
    build.run("aten::_foreach_sqrt_(Tensor(a!)[] self) -> ()", [[T[0], T[1]]], [first, second], [])
    assert {build.of(tensor) for tensor in (variance, first, second)} == {
        ("positive", None, None, "consumer")
    }
    assert build.of(mean)[0] == "floats"


def test_probabilities() -> None:
    build = Build()
    given, target = build.floats(4), build.floats(4)
    build.run(
        "aten::binary_cross_entropy(Tensor self, Tensor target) -> Tensor",
        T[:2],
        [given, target],
        [build.made()],
    )
    build.run("aten::log(Tensor self) -> Tensor", T[:1], [given], [build.made(4)])
    assert build.of(given) == build.of(target) == ("probability", None, None, "consumer")


def test_weights_keep_the_size_of_what_they_are_multiplied_with() -> None:
    build = Build()
    x, weight, filters = build.floats(8, 6), build.floats(6, 5), build.floats(3, 2, 5, 5)
    build.run(
        "aten::mm(Tensor self, Tensor mat2) -> Tensor", T[:2], [x, weight], [build.made(8, 5)]
    )
    build.run(
        "aten::mm(Tensor self, Tensor mat2) -> Tensor",
        T[:2],
        [build.made(5, 8), x],
        [build.made(5, 6)],
    )  # its gradient
    build.run(
        "aten::conv2d(Tensor input, Tensor weight) -> Tensor",
        T[:2],
        [build.made(1, 2, 9, 9), filters],
        [None],
    )
    assert build.of(weight) == ("weights", None, 6, "consumer")
    assert build.of(filters) == ("weights", None, 50, "consumer")
    assert build.of(x) == ("floats", None, None, "guess")


def test_guesses() -> None:
    build = Build()
    tensors = [build.floats(3), build.floats(), build.integers(3), build.integers()]
    for tensor in tensors:
        build.run("aten::neg(Tensor self) -> Tensor", T[:1], [tensor], [build.made(3)])
    assert [build.of(tensor) for tensor in tensors] == [
        ("floats", None, None, "guess"),
        ("integers", 1, 1, "guess"),
        ("zeros", None, None, "guess"),
        ("integers", 1, 1, "guess"),
    ]


def test_made_storages_hold_what_their_ops_make() -> None:
    build = Build()
    y = build.made(3)
    build.run(SQRT, T[:1], [build.floats(3)], [y])
    assert build.of(y) == (None, None, None, None)


def test_an_added_number_shifts_the_bounds() -> None:
    build = Build()
    fields, start = build.integers(3), build.integers(3)
    shifted, added = build.made(3, dtype="int64"), build.made(3, dtype="int64")
    build.run(
        "aten::add.Scalar(Tensor self, Scalar other, Scalar alpha=1) -> Tensor",
        [T[0], 2, 1],
        [fields],
        [shifted],
    )
    build.run(
        "aten::add.Tensor(Tensor self, Tensor other, *, Scalar alpha=1) -> Tensor",
        [T[0], T[1], 1],
        [shifted, start],
        [added],
    )
    build.lookup(added, 21)
    one_less, last = build.made(3, dtype="int64"), build.integers(3)
    build.run(
        "aten::sub.Tensor(Tensor self, Tensor other, *, Scalar alpha=1) -> Tensor",
        [T[0], T[1], 1],
        [last, build.integers()],
        [one_less],
    )
    build.lookup(one_less, 12)
    assert build.of(last) == ("integers", 1, 12, "consumer")
    assert build.of(start) == ("integers", 0, 10, "consumer")
    assert build.of(fields) == ("integers", 0, 8, "consumer")


def test_values_that_were_exchanged() -> None:
    build = Build()
    sent, received = build.integers(3), build.made(6, dtype="int64")
    build.collective("all_gather", [sent], [received])
    build.lookup(received, 9)
    assert build.of(sent) == ("integers", 0, 8, "consumer")


def test_recorded_ranges_come_before_what_consumers_allow() -> None:
    build = Build()
    indices, counts = build.integers(3), build.integers(3)
    build.lookup(indices)  # node 100; the table is input 0
    build.run("aten::zero_(Tensor(a!) self) -> Tensor(a!)", T[:1], [counts], [counts])  # node 101
    build.run(
        "aten::neg(Tensor self) -> Tensor", T[:1], [counts], [build.made(3, dtype="int64")]
    )  # node 102
    seen = {
        100: {1: RecordedIntegers(3, 17)},
        101: {0: RecordedIntegers(5, 10**15)},
        102: {0: RecordedIntegers(0, 0)},
    }
    assert build.of(indices, recorded_integers=seen) == ("integers", 3, 17, "range")
    assert build.of(counts, recorded_integers=seen) == (
        "zeros",
        None,
        None,
        "guess",
    )  # it was written first


def test_what_is_read_before_any_op_wrote_to_it_comes_from_outside() -> None:
    build = Build()
    empty, taken, written = (
        build.made(3, dtype="int64"),
        build.made(3, dtype="int64"),
        build.made(3, dtype="int64"),
    )
    for tensor in (empty, written):
        build.run("aten::empty.memory_format(SymInt[] size) -> Tensor", [[3]], [], [tensor])
    build.run("aten::lift_fresh(Tensor(a) self) -> Tensor(a)", T[:1], [empty], [empty])
    build.run("aten::detach_(Tensor(a!) self) -> Tensor(a!)", T[:1], [empty], [empty])
    build.run(
        "aten::copy_(Tensor(a!) self, Tensor src) -> Tensor(a!)", T[:2], [written, empty], [written]
    )
    build.lookup(written, 5)
    build.run("aten::_to_copy(Tensor self) -> Tensor", T[:1], [written], [taken])
    plan, _ = settle_contents(build.build())
    plan.check()
    assert plan.storages.filter("external")["storage"].to_list() == [0, 3]  # it, and the table
    assert plan.ops["outputs"].to_list()[:2] == [[None], [written]]
    assert plan.storages.row(0, named=True)["high"] == 4


def test_a_variance_that_is_taken_from_squares_stays_positive() -> None:
    build = Build()
    square, mean = build.floats(6), build.floats(6)
    variance = build.made(6)
    build.run(
        "aten::addcmul(Tensor self, Tensor tensor1, Tensor tensor2, *, Scalar value=1) -> Tensor",
        [*T[:3], -1],
        [square, mean, mean],
        [variance],
    )
    build.run("aten::sqrt_(Tensor(a!) self) -> Tensor(a!)", T[:1], [variance], [variance])
    assert build.of(square) == ("positive", None, None, "consumer")
    assert build.of(mean) == ("zeros", None, None, "consumer")


def test_dumped_data_are_what_a_tensor_holds() -> None:
    build = Build()
    indices = build.integers(3)
    build.lookup(indices)  # node 100
    values = np.array([7, 49, 0])
    assert build.of(indices, recorded_integers={100: {1: RecordedIntegers(0, 49, values)}}) == (
        "data",
        0,
        49,
        "data",
    )
    plan, refused = settle_contents(build.build(), {100: {1: RecordedIntegers(0, 49, values)}})
    plan.check()
    assert refused == 0
    assert plan.data.rows() == [(0, indices, values.tobytes())]


def test_data_that_an_op_must_not_be_given_are_guessed() -> None:
    build = Build()
    indices, classes = build.integers(3), build.integers(2)
    build.lookup(indices)  # node 100: a table of 50 rows
    loss = (
        "aten::nll_loss(Tensor self, Tensor target, Tensor? weight=None, int reduction=1, SymInt ignore_index=-100) "
        "-> Tensor"
    )
    build.run(
        loss, [T[0], T[1], None, 1, -100], [build.floats(2, 9), classes], [build.made()]
    )  # node 101
    seen = {
        100: {1: RecordedIntegers(0, 50, np.array([0, 50, 1]))},
        101: {1: RecordedIntegers(-100, 8, np.array([-100, 8]))},
    }
    plan, refused = settle_contents(build.build(), seen)
    assert refused == 1
    assert build.of(indices, recorded_integers=seen) == ("integers", 0, 49, "consumer")
    assert build.of(classes, recorded_integers=seen) == (
        "data",
        0,
        8,
        "data",
    )  # what stands for no class may be among them
    assert plan.data["tensor"].to_list() == [classes]
    assert build.of(classes, recorded_integers={101: {1: RecordedIntegers(-100, 8)}}) == (
        "integers",
        0,
        8,
        "range",
    )


def test_data_of_a_copy_are_those_of_what_was_copied() -> None:
    build = Build()
    indices, copied = build.integers(3), build.made(3, dtype="int64")
    build.run("aten::_to_copy(Tensor self) -> Tensor", T[:1], [indices], [copied])
    build.lookup(copied)  # node 101
    assert build.of(
        indices, recorded_integers={101: {1: RecordedIntegers(1, 3, np.array([1, 2, 3]))}}
    ) == (
        "data",
        1,
        3,
        "data",
    )


@pytest.mark.parametrize("row", [(0, 0, bytes(8)), (0, 1, bytes(23)), (0, 2, bytes(12))])
def test_data_are_of_integers_from_outside_alone(row: tuple[int, int, bytes]) -> None:
    build = Build()
    indices = build.integers(3)
    build.lookup(indices)  # rows of tensors: the indices 0, the table 1, what is found 2
    plan, _ = settle_contents(build.build())
    data = pl.DataFrame([row], schema=plan.data.schema, orient="row")
    with pytest.raises(InvariantError, match="data are of integer tensors"):
        replace(plan, data=data).check()
