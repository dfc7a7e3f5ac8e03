"""Numbers, equations and policies, each against what it must be, counted or worked out another way."""

from __future__ import annotations

import json
import math
import random
import string
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest

from traceloom.workload.anonymize.collapse import build_border_events, format_microseconds
from traceloom.workload.anonymize.policy import CHOICES, Policy, read_policy
from traceloom.workload.anonymize.sizes import (
    Shapes,
    find_prime_factors,
    rewrite_argument,
    round_prime_factors,
    round_to_power_of_two,
    round_total,
)
from traceloom.workload.replay.schema import parse_schema

EINSUM = parse_schema("aten::einsum(str equation, Tensor[] tensors, *, int[]? path=None) -> Tensor")


def equation(text: str) -> Any:
    return rewrite_argument(text, EINSUM.arguments[0], EINSUM, round_to_power_of_two)


def form(text: str) -> list[Any]:
    """An equation with each letter as the number of the first place at which it stands."""
    letters = [sign for sign in text if sign.isalpha()]
    return [letters.index(sign) if sign.isalpha() else sign for sign in text]


@pytest.mark.parametrize("seed", range(40))
def test_an_equation_means_the_same_in_other_letters(seed: int) -> None:
    chance = random.Random(seed)
    alphabet = chance.sample(string.ascii_letters, chance.choice([2, 5, 26, 40, 52]))
    terms = [
        "".join(chance.sample(alphabet, min(len(alphabet), chance.randint(1, 20))))
        for _ in range(3)
    ]
    text = f"{terms[0]}, {terms[1]}...,{''.join(alphabet)}" + chance.choice(
        ["", f" -> {terms[2]}", "->"]
    )
    result = equation(text)
    assert form(result) == form(text)
    first = list(dict.fromkeys(sign for sign in result if sign.isalpha()))
    assert first == list(string.ascii_letters[: len(first)])
    assert equation(result) == result


@pytest.mark.parametrize("text", ["secret project", "a_b->c", "é,b->b", "ij->>k", "1j->j"])
def test_what_is_no_equation_goes(text: str) -> None:
    assert equation(text) is None or form(equation(text)) == form(text) != list(text)
    assert "secret" not in str(equation(text))


@pytest.mark.parametrize("value", [3e-5, -0.25, 0.999, 1.5, -7.0, 1e30, 3, -12, 2**62])
def test_a_number_keeps_its_sign_and_its_side_of_one(value: float) -> None:
    schema = parse_schema("aten::clamp(Tensor self, Scalar? min=None) -> Tensor")
    result = rewrite_argument(value, schema.arguments[1], schema, round_to_power_of_two)
    assert math.copysign(1, result) == math.copysign(1, value)
    assert (abs(result) > 1, type(result)) == (abs(value) > 1, type(value))
    assert result in (0.5, -0.5, 2, -2)
    for plain in (0, 1, -1, 0.0, 1.0, math.inf, -math.inf):
        assert rewrite_argument(plain, schema.arguments[1], schema, round_to_power_of_two) == plain


def test_prime_factors_are_prime_and_multiply_to_the_number() -> None:
    primes = [
        number for number in range(2, 2000) if all(number % factor for factor in range(2, number))
    ]
    for number in range(1, 2000):
        factors = find_prime_factors(number)
        assert math.prod(factors) == number
        assert list(factors) == sorted(factors)
        assert set(factors) <= set(primes)


def test_rounding_by_factors_is_done_factor_by_factor() -> None:
    for number in range(1, 1500):
        for kept in ((), (3,), (5, 7)):
            rounded = 1
            rest = number
            for factor in range(2, number + 1):
                while rest % factor == 0:
                    rest //= factor
                    # the nearest power of two by ratio
                    power = min(
                        (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048),
                        key=lambda p: (max(Fraction(p, factor), Fraction(factor, p)), p),
                    )
                    rounded *= factor if factor in kept else power
            assert round_prime_factors(number, kept) == (rounded if number > 2 else number)
    assert round_prime_factors(1 << 48) == 1 << 48
    assert round_prime_factors(-6) == -6


def test_times_are_written_exactly() -> None:
    chance = random.Random(1)
    for _ in range(300):
        time_ns = chance.choice([1, -1]) * chance.randrange(10 ** chance.randint(1, 19))
        text = format_microseconds(time_ns).decode()
        whole, _, part = text.lstrip("-").partition(".")
        assert Fraction(int(whole + part), 10 ** len(part)) == Fraction(abs(time_ns), 1000)
        assert text.startswith("-") == (time_ns < 0)
        assert len(part) in {0, 3}
    first, last = (json.loads(event) for event in build_border_events(-1500, 2**62))
    assert (first["ts"], first["dur"], last["dur"]) == (-1.5, 0, 0)
    assert b'"ts":4611686018427387.904' in build_border_events(0, 2**62)[1]


def test_a_running_total_has_five_leading_bits_and_grows_as_the_numbers_do() -> None:
    numbers = [*range(5000), *(3**power for power in range(8, 39))]
    totals = [round_total(number) for number in numbers]
    assert totals == sorted(totals)
    for total in totals:
        significant = bin(total).rstrip("0").removeprefix("0b")
        assert len(significant) <= 5
    assert [round_total(-number) for number in numbers] == [-total for total in totals]


@pytest.mark.parametrize("mode", ["keep", "bucket", "drop"])
def test_sizes_that_stay_exact_are_those_of_the_report(mode: str) -> None:
    shapes = Shapes(Policy(shapes=mode))
    assert json.loads(shapes.counts(b"[[3, 5], [], [[7]], [0, 9]]") or b"") == (
        [[16], [], [[8]], [0]] if mode == "bucket" else [[15], [], [[7]], [0]]
    )
    grid = shapes.grid(b"[12, 5, 1]")
    assert grid == {"keep": b"[12,5,1]", "bucket": b"[16,4,1]", "drop": None}[mode]
    splits = shapes.splits(b'"[100, 28]"')
    assert json.loads(json.loads(splits or b"")) == ([128, 32] if mode == "bucket" else [100, 28])
    assert (
        shapes.exact
        == {"keep": {15, 7, 0, 60, 100, 28}, "bucket": set(), "drop": {15, 7, 0, 100, 28}}[mode]
    )


@pytest.mark.parametrize("seed", range(20))
def test_a_policy_is_read_back_as_it_is_reported(seed: int, tmp_path: Path) -> None:
    chance = random.Random(seed)
    chosen = {key: chance.choice(list(values)) for key, values in CHOICES.items()}
    policy = Policy(**chosen, keep_names=("my_op.*",), keep_arguments=("beta",))
    path = tmp_path / "policy.toml"
    path.write_text(
        "\n".join(f"{key} = {json.dumps(value)}" for key, value in policy.to_dict().items())
    )
    assert read_policy(path) == policy
