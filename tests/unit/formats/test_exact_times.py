"""Times of a file, against exact decimals; and which texts must be read as such."""

from __future__ import annotations

import random
from decimal import ROUND_HALF_EVEN, Decimal

import numpy as np
import pytest

from traceloom.formats.kineto_fields import convert_double_times, needs_text, parse_text_times

SEEDS = range(20)


def spelled(chance: random.Random, digits: int, places: int) -> str:
    """A number with at most so many digits before and behind the point."""
    whole = str(chance.randrange(10 ** chance.randrange(1, digits + 1)))
    fraction = "".join(chance.choice("0012345678995") for _ in range(chance.randrange(places + 1)))
    return f"{whole}.{fraction}" if fraction else whole


def nanoseconds(us: Decimal) -> int:
    return int((us * 1000).to_integral_value(ROUND_HALF_EVEN))


@pytest.mark.parametrize("seed", SEEDS)
def test_text_is_read_as_exact_decimals(seed: int) -> None:
    chance = random.Random(seed)
    pairs = [(spelled(chance, 15, 12), spelled(chance, 9, 12)) for _ in range(50)]
    # the same value with an exponent, in quotes, or below zero
    pairs += [
        ("-12.0005", "3"),
        ("1.5e3", "25e-4"),
        ('"77.125"', '"0.0005"'),
        ("-0.0015", "0.002"),
        ("8.0005000001", "0.0025"),
    ]
    start, duration, good, timed = parse_text_times(
        [s.encode() for s, _ in pairs], [d.encode() for _, d in pairs]
    )
    assert good.all()
    assert timed.all()
    for (begin, length), start_ns, duration_ns in zip(
        pairs, start.tolist(), duration.tolist(), strict=True
    ):
        exact_start, exact_length = (Decimal(text.strip('"')) for text in (begin, length))
        assert start_ns == nanoseconds(exact_start)
        assert start_ns + duration_ns == nanoseconds(exact_start + exact_length)


@pytest.mark.parametrize(
    "text", ["NaN", "Infinity", "-Infinity", "9" * 30, "1e40", "one", "", "1.2.3", "--4", "null"]
)
def test_what_is_no_time_is_none(text: str) -> None:
    _, _, good, timed = parse_text_times([text.encode(), b"1"], [b"1", text.encode()])
    assert (good.tolist(), timed.tolist()) == ([False, True], [True, False])


@pytest.mark.parametrize("seed", SEEDS)
def test_doubles_are_exact_where_text_is_not_needed(seed: int) -> None:
    """Whatever `needs_text` lets pass as doubles has the nanoseconds of the exact decimals."""
    chance = random.Random(seed)
    for _ in range(60):
        begin, length = spelled(chance, 13, 3), spelled(chance, 7, 3)
        if needs_text(f'{{"ts": {begin}, "dur": {length}}}'.encode()):
            continue
        start, duration, good, timed = convert_double_times(
            np.array([float(begin)]), np.array([float(length)])
        )
        assert good.all()
        assert timed.all()
        assert start.tolist() == [nanoseconds(Decimal(begin))]
        assert duration.tolist() == [nanoseconds(Decimal(begin) + Decimal(length)) - start[0]]


def loses(text: str) -> bool:
    """Whether a double of it may lose something: an exponent, picoseconds, or nanoseconds beyond 2^43 µs."""
    whole, _, fraction = text.strip('"').lstrip("-").partition(".")
    if "e" in text.lower():
        return True
    return len(fraction) > 3 or (int(whole) >= 2**43 and int(fraction or "0") > 0)


@pytest.mark.parametrize("seed", SEEDS)
def test_which_texts_need_to_be_read_exactly(seed: int) -> None:
    chance = random.Random(seed)
    for _ in range(60):
        number = chance.choice(["", "-"]) + spelled(chance, 17, 5)
        number += chance.choice(["", "", "", "e3", "E-2"])
        number = chance.choice([number, f'"{number}"'])
        key, space = chance.choice(["ts", "dur"]), chance.choice(["", " ", "\n "])
        harmless = '{"name": "ts", "ts": 5, "dur": 3.125, "args": {"tsx": 1.23456789}}, '
        assert needs_text(f'{harmless}{{"{key}"{space}:{space}{number}}}'.encode()) == loses(number)


def test_only_the_beginning_of_a_text_decides() -> None:
    late = b" " * (1 << 18) + b'{"ts": 1.23456}'
    assert not needs_text(late)
    assert needs_text(late.lstrip())
