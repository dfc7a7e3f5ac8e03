"""Numbers for people are rounded honestly."""

from __future__ import annotations

import pytest

from traceloom.model.units import count, duration, share, size


@pytest.mark.parametrize(
    ("ns", "text"),
    [
        (None, "-"), (0, "0 ns"), (999, "999 ns"), (1_000, "1.00 µs"), (12_345, "12.3 µs"), (999_499, "999 µs"),
        (999_500, "1.00 ms"), (1_234_567, "1.23 ms"), (123_456_789, "123 ms"), (61_000_000_000, "61.0 s"),
        (1_234_000_000_000, "1\u202f234 s"), (-1_500, "-1.50 µs"),
    ],
)  # fmt: skip
def test_durations_have_three_digits_and_the_unit_that_fits(ns: int | None, text: str) -> None:
    assert duration(ns) == text


@pytest.mark.parametrize(
    ("part", "whole", "text"),
    [
        (0, 0, "-"),
        (0, 5, "0 %"),
        (5, 5, "100 %"),
        (1, 10**6, "<0.1 %"),
        (10**6 - 1, 10**6, ">99.9 %"),
        (1, 8, "12.5 %"),
    ],
)
def test_a_share_is_zero_or_all_only_when_it_is(part: int, whole: int, text: str) -> None:
    assert share(part, whole) == text


def test_sizes_are_decimal_and_counts_have_thin_spaces() -> None:
    assert size(1_500_000) == "1.50 MB"
    assert size(None) == "-"
    assert size(512) == "512 B"
    assert count(1_234_567) == "1\u202f234\u202f567"
