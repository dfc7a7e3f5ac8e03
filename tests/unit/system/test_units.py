"""Numbers for people are rounded honestly."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest

from traceloom.system.units import (
    format_change,
    format_count,
    format_duration,
    format_quantity,
    format_share,
    format_size,
)

ASSETS = Path(__file__).parents[3] / "src" / "traceloom" / "report" / "views" / "assets"
SCRIPT = ASSETS / "units.js"


@pytest.mark.parametrize(
    ("ns", "text"),
    [
        (None, "–"),
        (0, "0 ns"),
        (999, "999 ns"),
        (1_000, "1.00 µs"),
        (12_345, "12.3 µs"),
        (999_499, "999 µs"),
        (999_500, "1.00 ms"),
        (1_234_567, "1.23 ms"),
        (123_456_789, "123 ms"),
        (61_000_000_000, "61.0 s"),
        (1_234_000_000_000, "1\u202f234 s"),
        (-1_500, "-1.50 µs"),
    ],
)
def test_durations_have_three_digits_and_the_unit_that_fits(ns: int | None, text: str) -> None:
    assert format_duration(ns) == text


@pytest.mark.parametrize(
    ("part", "whole", "text"),
    [
        (0, 0, "–"),
        (0, 5, "0 %"),
        (5, 5, "100 %"),
        (1, 10**6, "<0.1 %"),
        (10**6 - 1, 10**6, ">99.9 %"),
        (1, 8, "12.5 %"),
    ],
)
def test_a_share_is_zero_or_all_only_when_it_is(part: int, whole: int, text: str) -> None:
    assert format_share(part, whole) == text


def test_sizes_are_decimal_and_counts_have_thin_spaces() -> None:
    assert format_size(1_500_000) == "1.50 MB"
    assert format_size(None) == "–"
    assert format_size(512) == "512 B"
    assert format_count(1_234_567) == "1\u202f234\u202f567"


@pytest.mark.parametrize(
    ("fraction", "text"),
    [
        (0, "0 %"),
        (0.261, "+26.1 %"),
        (-0.094, "-9.4 %"),
        (0.0002, "+<0.1 %"),
        (-0.0002, "-<0.1 %"),
        (-1, "-100 %"),
        (-0.9999, "-99.9 %"),
        (6.07, "+607.0 %"),
        (123.4, "+12\u202f340 %"),
    ],
)
def test_a_change_has_a_sign_and_is_nothing_only_when_it_is(fraction: float, text: str) -> None:
    assert format_change(fraction) == text


def test_the_script_of_the_page_writes_numbers_alike(tmp_path: Path) -> None:
    """`units.js` says the same of the same values, with a thin space before the unit and a dash for what is unknown."""
    node = shutil.which("node")
    if node is None:
        pytest.skip("needs node")
    # no exact halves: Python rounds these to even, JavaScript up
    powers = [10**power for power in range(16)]
    near = [
        factor * k // 10_000
        for factor in powers
        for k in (9_994, 9_995, 9_996, 12_344, 99_949, 99_951)
    ]
    numbers = [None, 0, 1, 999, 1_000, -1_500, *powers, *near]
    parts = [(0, 0), (0, 5), (5, 5), (1, 10**6), (10**6 - 1, 10**6), (1, 8), (1, 3), (123, 1000)]
    changes = [0, 1, -1, 0.261, -0.0002, 0.9994, 9.99, 123.4]
    (tmp_path / "units.mjs").write_text(SCRIPT.read_text(encoding="utf-8"), encoding="utf-8")
    (tmp_path / "ask.mjs").write_text(
        "import { duration, byteSize, share, change } from './units.mjs';"
        f"const numbers = {json.dumps(numbers)}, parts = {json.dumps(parts)}, changes = {json.dumps(changes)};"
        "const shares = parts.map((p) => share(...p));"
        "console.log(JSON.stringify([numbers.map(duration), numbers.map(byteSize), shares, changes.map(change)]));",
        encoding="utf-8",
    )
    done = subprocess.run(
        [node, str(tmp_path / "ask.mjs")], capture_output=True, text=True, check=True
    )
    expected = [
        [format_duration(n) for n in numbers],
        [format_size(n) for n in numbers],
        [format_share(*part) for part in parts],
    ]
    expected.append([format_change(fraction) for fraction in changes])
    for of_script, of_package in zip(json.loads(done.stdout), expected, strict=True):
        assert [t.replace("\u202f", " ") for t in of_script] == [
            t.replace("\u202f", " ") for t in of_package
        ]


@pytest.mark.parametrize(
    ("value", "what", "words"),
    [
        (0, "call", "0 calls"),
        (1, "call", "1 call"),
        (2, "retry", "2 retries"),
        (1, "retry", "1 retry"),
        (3, "key", "3 keys"),
        (2, "batch", "2 batches"),
        (1234, "pass", "1\u202f234 passes"),
    ],
)
def test_things_are_counted_in_words(value: int, what: str, words: str) -> None:
    assert format_quantity(value, what) == words
