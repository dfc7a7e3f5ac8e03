"""Names of strangers can be shown anywhere: they steer nothing, and they stay short and telling."""

from __future__ import annotations

import pytest
from hypothesis import given, strategies as st

from traceloom.report.labels import fit_name
from traceloom.system.sanitize import sanitize

ADD = (
    "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<c10::BFloat16>, "
    "std::array<char*, 3ul> >(int, at::native::CUDAFunctor_add<c10::BFloat16>, std::array<char*, 3ul>)"
)
COPY = (
    "void at::native::elementwise_kernel<128, 4, at::native::gpu_kernel_impl_nocast<"
    "at::native::direct_copy_kernel_cuda(at::TensorIteratorBase&)::{lambda()#3}::operator()() const::{lambda()#12}"
    "::operator()() const::{lambda(c10::BFloat16)#1}> >(int, at::native::gpu_kernel_impl_nocast<x>)"
)


@pytest.mark.parametrize(
    ("name", "width", "shown"),
    [
        (ADD, 60, "vectorized_elementwise_kernel<CUDAFunctor_add<BFloat16>, a…>"),
        (ADD, 30, "vectorized_elementwise_kernel"),
        (COPY, 52, "elementwise_kernel<direct_copy_kernel_cuda(TensorI…>"),
        (
            "ncclKernel_AllReduce_RING_LL_Sum_float(ncclDevComm*, unsigned long)",
            40,
            "ncclKernel_AllReduce_RING_LL_Sum_float",
        ),
        ("void (anonymous namespace)::softmax<float>(float*)", 20, "softmax<float>"),
        ("Memcpy HtoD (Pageable -> Device)", 40, "Memcpy HtoD (Pageable -> Device)"),
        ("Memcpy HtoD (Pageable -> Device)", 20, "Memcpy HtoD …Device)"),
        ("train.py(90): main", 40, "train.py(90): main"),
        ("", 5, ""),
    ],
)
def test_long_names_lose_what_tells_least(name: str, width: int, shown: str) -> None:
    assert fit_name(name, width) == shown


def test_control_and_invisible_characters_are_spelled_out() -> None:
    assert sanitize("a\x1b[31mb\n\u202ec\u200bd\x9b") == r"a\x1b[31mb\x0a\u202ec\u200bd\x9b"


@given(st.text(), st.integers(0, 50))
def test_a_short_name_fits_and_is_harmless(name: str, width: int) -> None:
    shown = fit_name(name, width)
    assert len(shown) <= width
    assert sanitize(shown) == shown


def test_a_name_of_megabytes_takes_no_time() -> None:
    assert len(fit_name("<" * 5_000_000, 20)) == 20
