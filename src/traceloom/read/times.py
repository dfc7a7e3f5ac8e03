"""Decimal microseconds of a file to integer nanoseconds, exactly.

A double holds whole microseconds exactly up to 2^53, and tells nanoseconds apart up to 2^43 (8.8e12 µs, more than the
quarter year that Kineto's `ts` spans since it has a base time). Unix microseconds with a fraction lie beyond; these are
read as text.
"""

from __future__ import annotations

import re
from decimal import Decimal, InvalidOperation
from typing import Any

import numpy as np

from traceloom.array_types import Bools, Floats, Ints

# A time with an exponent, of which more than three digits are a fraction, or with a fraction behind 13 digits or more.
_FINE = re.compile(rb'"(?:ts|dur)"\s*:\s*"?-?(?:\d+(?:(?:\.\d+)?[eE]|\.\d{4})|(\d{13,})\.\d*[1-9])')
_MOST_NS = 2**62  # times beyond (146 years) are no times
_MOST_US = _MOST_NS // 1000
_MOST_DURATION_NS = 2**60  # 36 years; base time (see `metadata.base_ns`), start and duration add up to an int64
_DIGITS = len(str(_MOST_US))
_PLACES = 12  # digits behind the point that are looked at: a half of a nanosecond is told from what is just above
_PARTS_OF_NS = 10 ** (_PLACES - 3)


def needs_text(sample: bytes) -> bool:
    """Whether doubles lose something: fractions of large numbers, or more than three digits after the point."""
    return any(match[1] is None or int(match[1]) >= 2**43 for match in _FINE.finditer(sample, 0, 1 << 18))


def from_doubles(start_us: Floats, duration_us: Floats) -> tuple[Ints, Ints, Bools, Bools]:
    """Start and duration in ns, and which of each are usable (finite, within 146 and 36 years); others are 0."""
    us = np.array((start_us, duration_us), dtype=np.float64)
    with np.errstate(invalid="ignore", over="ignore"):
        usable = np.abs(us) < np.array(((_MOST_NS / 1000,), (_MOST_DURATION_NS / 1000,)))
    if not usable.all():
        us[~usable] = 0.0
    # Row 0 holds starts; row 1 durations first, ends then. Whole microseconds and fractions stay apart, to be exact.
    whole = np.floor(us)
    us -= whole
    us[1] += us[0]
    us *= 1000
    ns = whole.astype(np.int64)
    ns[1] += ns[0]
    ns *= 1000
    ns += np.rint(us, out=us).astype(np.int64)
    ns[1] -= ns[0]
    return ns[0], ns[1], usable[0], usable[1]


def from_text(starts: list[Any], durations: list[Any]) -> tuple[Ints, Ints, Bools, Bools]:
    """The same from JSON text: numbers, or numbers in quotes. End = round(start + duration), as in exact decimals."""
    start_us, start_fraction, good = _split(starts, _MOST_US)
    more_us, more_fraction, timed = _split(durations, _MOST_DURATION_NS // 1000)
    start = start_us * 1000 + _rounded(start_fraction)
    end = (start_us + more_us) * 1000 + _rounded(start_fraction + more_fraction)
    return start, end - start, good, timed


def _rounded(parts: Ints) -> Ints:
    """Fractions of a microsecond to the nearest nanosecond, halves to the even one as Decimal does."""
    floor = parts // _PARTS_OF_NS
    rest = parts - floor * _PARTS_OF_NS
    up = (rest > _PARTS_OF_NS // 2) | ((rest == _PARTS_OF_NS // 2) & (floor % 2 == 1))
    rounded: Ints = floor + up
    return rounded


def _split(texts: list[Any], most_us: int) -> tuple[Ints, Ints, Bools]:
    """Whole microseconds, the first digits behind the point (same sign), and which are numbers below the most."""
    whole, fractions = [], []
    for text in texts:
        digits, _, fraction = bytes(text).partition(b".")
        if digits.isdigit() and len(digits) <= _DIGITS and (fraction.isdigit() or not fraction):
            whole.append(int(digits))
            fractions.append(int(fraction.ljust(_PLACES, b"0")[:_PLACES]))
        else:
            # Exponents and other spellings, one by one.
            try:
                value = Decimal(bytes(text).strip(b'" ').decode("ascii", "replace"))
            except InvalidOperation:
                value = Decimal(most_us)
            usable = value.is_finite() and abs(value) < most_us
            whole.append(int(value) if usable else most_us)
            fractions.append(int((value - int(value)) * 10**_PLACES) if usable else 0)
    us, parts = np.array(whole, dtype=np.int64), np.array(fractions, dtype=np.int64)
    good = us < most_us
    us[~good] = parts[~good] = 0
    return us, parts, good
