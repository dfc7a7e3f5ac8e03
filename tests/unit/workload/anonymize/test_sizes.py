"""Sizes: rounding is one function, so that what was equal stays equal; what is left out is left out."""

from __future__ import annotations

import json
import math

import pytest
from hypothesis import given, strategies as st

from traceloom.workload.anonymize.policy import Policy
from traceloom.workload.anonymize.sizes import (
    Shapes,
    round_prime_factors,
    round_to_power_of_two,
    round_total,
)


@given(st.integers(-(2**62), 2**62))
def test_a_bucket_is_a_power_of_two_within_a_factor_of_root_two(number: int) -> None:
    rounded = round_to_power_of_two(number)
    assert abs(rounded).bit_count() <= 1
    assert (rounded > 0) == (number > 0)
    if number:
        assert abs(math.log2(abs(rounded)) - math.log2(abs(number))) <= 0.5 + 1e-9


@given(st.integers(1, 2**40), st.integers(0, 20))
def test_powers_of_two_pass_through_rounding(number: int, power: int) -> None:
    assert (
        round_to_power_of_two(number << power) == round_to_power_of_two(number) << power
        or number < 3
    )


@given(st.integers(-(2**62), 2**62))
def test_a_coarse_total_is_at_most_three_percent_off(number: int) -> None:
    assert abs(round_total(number) - number) <= 0.032 * abs(number)


def test_each_choice_does_what_it_says() -> None:
    raw = b"[[768, 50257], []]"
    assert Shapes(Policy(shapes="keep")).dims(raw) == b"[[768,50257],[]]"
    assert Shapes(Policy()).dims(raw) == b"[[1024,65536],[]]"
    assert Shapes(Policy(shapes="drop")).dims(raw) is None
    assert Shapes(Policy(shapes="drop")).size(1000) == 1000
    assert Shapes(Policy()).size(1000) == 1024


@pytest.mark.parametrize(
    "raw", [b'["x"]', b'{"a":1}', b"[1.5]", b"[true]", b"nonsense", b'"[1]"', b"[null]", b"[" * 200]
)
def test_what_is_no_shape_is_left_out(raw: bytes) -> None:
    for mode in ("keep", "bucket", "drop"):
        assert Shapes(Policy(shapes=mode)).dims(raw) is None


@given(st.permutations([0, 1, 2]), st.lists(st.integers(2, 300), min_size=3, max_size=3))
def test_strides_of_permuted_tensors_stay_in_their_order(
    order: list[int], shape: list[int]
) -> None:
    strides, step = [0, 0, 0], 1
    for at in order:
        strides[at], step = step, step * shape[at]
    made = json.loads(
        Shapes(Policy()).strides(json.dumps([strides]).encode(), json.dumps([shape]).encode())
        or b""
    )
    rounded = [round_to_power_of_two(size) for size in shape]
    expected, step = [0, 0, 0], 1
    for at in order:
        expected[at], step = step, step * rounded[at]
    assert made == [expected]


def test_strides_with_gaps_are_left_out() -> None:
    assert Shapes(Policy()).strides(b"[[700, 1]]", b"[[5, 77]]") == b"[[]]"


@given(
    st.lists(st.integers(1, 3000), min_size=1, max_size=4), st.sets(st.sampled_from([3, 5, 7, 11]))
)
def test_products_stay_products_of_the_same(sizes: list[int], kept: set[int]) -> None:
    made = [round_prime_factors(size, kept) for size in sizes]
    assert math.prod(made) == round_prime_factors(math.prod(sizes), kept)
    shapes = Shapes(Policy().for_replay())
    shapes.keep_factors(frozenset(kept))
    assert json.loads(shapes.dims(json.dumps(sizes).encode()) or b"") == made
    assert shapes.size(math.prod(sizes)) == math.prod(made)
    steps = [math.prod(sizes[at + 1 :]) for at in range(len(sizes))]
    strides = json.loads(
        shapes.strides(json.dumps(steps).encode(), json.dumps(sizes).encode()) or b""
    )
    assert strides == [math.prod(made[at + 1 :]) for at in range(len(sizes))]


def test_factors_that_are_kept_stay_and_no_size_is_what_is_none() -> None:
    assert round_prime_factors(50257) == 32 * 2048
    assert round_prime_factors(50257, {29, 1733}) == 50257
    assert round_prime_factors(3 * 29, {3}) == 3 * 32
    for number in (-1, 0, 1, 2, -100, 2**63 - 1):
        assert round_prime_factors(number) == number
    exact = Shapes(Policy().for_replay())
    exact.keep_factors(None)
    assert exact.size(50257) == 50257
