"""What a recorded call and the peaks of a device say: types, values, lists and rates, case by case."""

from __future__ import annotations

from itertools import combinations
from typing import Any

import pytest

from traceloom.analyze.flops import Call, Tensor, Unknown
from traceloom.analyze.flops.registry import (
    DTYPE_BYTES,
    derive_broadcast_shape,
    derive_promoted_dtype,
    parse_dtype,
    parse_json_list,
)
from traceloom.analyze.modelled_calls import find_modelled_calls
from traceloom.analyze.placed_calls import PEAK_TYPES, Peak, find, list_known_devices, parse_peak
from traceloom.analyze.roofline import roofline
from traceloom.errors import UsageError
from traceloom.testing import TraceBuilder


def call(*values: str, **more: Any) -> Call:
    """A call with these recorded values."""
    return Call(
        "my::own",
        [[]] * len(values),
        ["Scalar"] * len(values),
        list(values),
        more.get("strides", []),
    )


@pytest.mark.parametrize(
    ("recorded", "dtype", "size"),
    [
        ("float", "fp32", 4),
        ("double", "fp64", 8),
        ("c10::Half", "fp16", 2),
        ("c10::BFloat16", "bf16", 2),
        ("long int", "int64", 8),
        ("long", "int64", 8),
        ("int", "int32", 4),
        ("short int", "int16", 2),
        ("bool", "bool", 1),
        ("signed char", "int8", 1),
        ("unsigned char", "uint8", 1),
        ("c10::Float8_e4m3fn", "fp8", 1),
        ("c10::Float8_e5m2fnuz", "fp8", 1),
        ("c10::complex<float>", "complex64", 8),
        ("c10::complex<double>", "complex128", 16),
        ("c10::complex<c10::Half>", "complex32", 4),
        ("unsigned int", "uint32", 4),
        ("unsigned long", "uint64", 8),
        ("c10::Float4_e2m1fn_x2", "fp4", 1),
        ("", None, 0),
        ("Scalar", None, 0),
        ("TensorList", None, 0),
        ("c10::quint8", None, 0),
    ],
)
def test_element_types_by_the_names_that_pytorch_records(
    recorded: str, dtype: str | None, size: int
) -> None:
    assert parse_dtype(recorded) == dtype
    assert DTYPE_BYTES.get(dtype or "", 0) == size


@pytest.mark.parametrize(
    ("shape", "strides", "stored"),
    [
        ((6, 4), (4, 1), 24),
        ((6, 4), (0, 1), 4),
        ((6, 4), (0, 0), 1),
        ((6, 4), None, 24),
        ((), (), 1),
        ((0, 4), (0, 1), 0),
        ((6, 4), (1,), 24),  # strides of something else
    ],
)
def test_an_expanded_dimension_lies_once_in_memory(
    shape: tuple[int, ...], strides: tuple[int, ...] | None, stored: int
) -> None:
    tensor = Tensor(shape, "fp64", strides)
    assert (tensor.stored, tensor.bytes) == (stored, 8 * stored)


@pytest.mark.parametrize(
    ("text", "numbers"),
    [
        ("[2, 3]", [2, 3]),
        ("[]", []),
        ("7", [7]),
        ("[True, False]", [1, 0]),
        ("", None),
        ("x", None),
        ("[1.5]", None),
        ('["a"]', None),
        ("{}", None),
        (" [1] ", [1]),
        ("-1", [-1]),
    ],
)
def test_lists_of_numbers_are_read_from_their_text(text: str, numbers: list[int] | None) -> None:
    assert call(text).integers(0) == numbers


def test_one_number_stands_for_every_dimension() -> None:
    assert call("[2]").sizes(0, 3) == call("2").sizes(0, 3) == [2, 2, 2]
    assert call("[1, 2, 3]").sizes(0, 3) == [1, 2, 3]
    for text, why in (
        ("[1, 2]", "input 0 has 2 numbers for 3 dimensions"),
        ("", "the value of input 0 is not recorded"),
    ):
        with pytest.raises(Unknown, match=why):
            call(text).sizes(0, 3)


def test_values_that_are_not_recorded_take_the_default_or_are_unknown() -> None:
    recorded = call("5", "", "True", "0.5", "yes")
    assert (recorded.integer(0), recorded.integer(1, 3), recorded.integer(9, 3)) == (5, 3, 3)
    assert (recorded.number(3, 1.0), recorded.number(1, 1.0), recorded.number(9, 1.0)) == (
        0.5,
        1.0,
        1.0,
    )
    assert recorded.flag(2)
    for at in (1, 4, 9):
        with pytest.raises(Unknown, match=f"the value of input {at} is not recorded"):
            recorded.flag(at)
    with pytest.raises(Unknown, match="the value of input 1 is not recorded"):
        recorded.integer(1)


@pytest.mark.parametrize(
    ("code", "dtype"),
    [
        ("5", "fp16"),
        ("6", "fp32"),
        ("7", "fp64"),
        ("15", "bf16"),
        ("11", "bool"),
        ("4", "int64"),
        ("24", "fp8"),
        ("99", None),
        ("", None),
        ("float", None),
    ],
)
def test_numbers_of_element_types_are_those_of_pytorch(code: str, dtype: str | None) -> None:
    assert call(code).dtype_code(0) == dtype


@pytest.mark.parametrize("text", [None, "", "{}", "[", "7", "null", "[" * 100_000])
def test_what_is_no_list_is_an_empty_one(text: str | None) -> None:
    assert parse_json_list(text) == []


LADDER = ("bool", "int8", "int16", "int32", "int64", "fp16", "fp32", "fp64")


@pytest.mark.parametrize(("low", "high"), list(combinations(LADDER, 2)))
def test_of_two_tensors_the_wider_type_wins_whatever_the_order(low: str, high: str) -> None:
    one, other = Tensor((2,), low), Tensor((3, 1), high)
    assert derive_promoted_dtype([one, other]) == derive_promoted_dtype([other, one]) == high


@pytest.mark.parametrize(
    ("tensor", "number", "result"),
    [
        ("fp16", "fp64", "fp16"),
        ("bf16", "int64", "bf16"),
        ("int32", "int64", "int32"),
        ("int64", "fp64", "fp32"),
        ("bool", "int64", "int64"),
        ("bool", "bool", "bool"),
        ("fp32", "complex64", "complex64"),
        ("int8", "fp16", "fp16"),
    ],
)
def test_a_number_changes_the_kind_of_a_result_and_not_its_width(
    tensor: str, number: str, result: str
) -> None:
    assert derive_promoted_dtype([Tensor((2,), tensor), Tensor((), number)]) == result


def test_two_types_that_do_not_hold_each_other_meet_in_the_next_wider_one() -> None:
    assert derive_promoted_dtype([Tensor((2,), "uint8"), Tensor((2,), "int8")]) == "int16"
    assert derive_promoted_dtype([Tensor((2,), "bf16"), Tensor((2,), "fp16")]) == "fp32"
    assert (
        derive_promoted_dtype([Tensor((2,), "bf16"), Tensor((2,), "fp16"), Tensor((2,), "fp64")])
        == "fp64"
    )
    with pytest.raises(Unknown, match="no input is recorded as a tensor"):
        derive_promoted_dtype([])


def test_broadcasting_is_symmetric_and_refuses_what_does_not_fit() -> None:
    assert derive_broadcast_shape((4, 1), (3,)) == derive_broadcast_shape((3,), (4, 1)) == (4, 3)
    assert derive_broadcast_shape() == ()
    assert derive_broadcast_shape((0, 1), (5,)) == (0, 5)
    with pytest.raises(Unknown, match="do not fit"):
        derive_broadcast_shape((4,), (3,))


# -- element types of lists, from the names of kernels ------------------------------------------------------------


@pytest.mark.parametrize(
    ("kernel", "size"),
    [
        (
            "void multi_tensor_apply_kernel<TensorListMetadata<1>, UnaryOpFunctor<float, 1, 1, 0>>",
            4,
        ),
        (
            "void multi_tensor_apply_kernel<TensorListMetadata<1>, UnaryOpFunctor<double, 1, 1, 0>>",
            8,
        ),
        (
            "void multi_tensor_apply_kernel<TensorListMetadata<1>, UnaryOpFunctor<c10::BFloat16, 1, 1, 0>>",
            2,
        ),
        (
            "void multi_tensor_apply_kernel<TensorListMetadata<1>, UnaryOpFunctor<c10::Half, 1, 1, 0>>",
            2,
        ),
        ("void CatArrayBatchedCopy<OpaqueType<4u>, unsigned int, 2, 64, 64>", 4),
        ("void CatArrayBatchedCopy<OpaqueType<8>, unsigned int, 2, 64, 64>", 8),
        ("void CatArrayBatchedCopy<OpaqueType<1u>, unsigned int, 2, 64, 64>", 1),
        ("CatArrayBatchedCopy", None),
    ],
)
def test_lists_of_tensors_take_the_type_that_the_kernel_names(
    kernel: str, size: int | None
) -> None:
    builder = TraceBuilder().op(
        "aten::cat", 0, 9, shapes=[[[3, 4], [5, 4]], []], types=["TensorList", "Scalar"]
    )
    builder.launch("cudaLaunchKernel", 2, 3, correlation=1).kernel(kernel, 20, 5, correlation=1)
    groups = find_modelled_calls(builder.build()).groups
    assert groups["bytes"].to_list() == [None if size is None else 2 * 32 * size]
    assert groups["reason"].is_null().to_list() == [size is not None]


# -- peaks --------------------------------------------------------------------------------------------------------


def test_matrix_units_and_vector_units_have_rates_of_their_own() -> None:
    peak = Peak(
        "made",
        {"fp64": 1, "fp64_matrix": 2, "fp32": 3, "fp32_matrix": 4, "tf32": 5, "bf16": 6, "int8": 7},
        1,
    )
    on_matrix = [
        peak.rate(dtype, matrix=True) for dtype in ("fp64", "fp32", "tf32", "bf16", "int8", "fp8")
    ]
    assert on_matrix == [2, 4, 5, 6, 7, None]
    vectors = [
        peak.rate(dtype, matrix=False)
        for dtype in ("fp64", "complex128", "fp32", "bf16", "int64", "bool")
    ]
    assert vectors == [1, 1, 3, 3, 3, 3]
    plain = Peak("plain", {"fp64": 1, "fp32": 3}, None)
    assert [plain.rate("fp64", matrix=True), plain.rate("fp32", matrix=True)] == [1, 3]


@pytest.mark.parametrize("name", list_known_devices())
def test_a_device_is_known_in_any_case_and_with_any_blanks_and_in_no_part(name: str) -> None:
    peak = find(name)
    assert isinstance(peak, Peak)
    assert (
        find(f"  {name.upper()} ".replace(" ", "  "))
        == find(name.lower())
        == peak
        == parse_peak(name)
    )
    assert set(peak.flops) <= set(PEAK_TYPES)
    assert isinstance(find(f"{name} 2"), str)


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        ("bf16=fast", "`bf16=fast` is no pair of a name and a number"),
        ("bf16=1e12,memory", "`memory` is no pair of a name and a number"),
        ("speed=3", "`speed` is none of fp64, fp64_matrix, fp32"),
        ("bf16=0", "`bf16` is not a number above 0"),
        ({"memory": -1.0}, "`memory` is not a number above 0"),
        ("H1000", "there are no peaks for a device called 'H1000'"),
    ],
)
def test_peaks_that_cannot_be_are_refused_with_the_reason(spec: Any, says: str) -> None:
    with pytest.raises(UsageError) as refused:
        parse_peak(spec)
    assert says in str(refused.value)


def test_a_device_without_a_name_or_with_a_strange_one_gives_the_reason() -> None:
    for name, why in (
        (None, "the trace does not name the device"),
        ("Abacus", "the peaks of 'Abacus' are not known"),
    ):
        assert find(name) == why
    builder = TraceBuilder(device_name="Abacus").op("aten::mm", 0, 9, shapes=[[8, 8]] * 2)
    trace = (
        builder.launch("cudaLaunchKernel", 2, 3, correlation=1)
        .kernel("k", 20, 5, correlation=1)
        .build()
    )
    found = roofline(trace)
    assert found.flops == 2 * 8**3
    assert found.operators.select("roofline_ns", "bound").row(0) == (None, None)
    assert "the peaks of 'Abacus' are not known" in found.devices.row(0)
