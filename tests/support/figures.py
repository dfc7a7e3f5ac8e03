"""Figures as people read them, read back: which numbers a text with three significant digits can stand for."""

from __future__ import annotations

import re
from typing import NamedTuple

_PREFIXES = {"": 1, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15}
_TIMES = {"ns": 1, "µs": 1e3, "ms": 1e6, "s": 1e9}
_FIGURE = re.compile(r"([+-]?)([<>]?)([0-9\u202f]+(?:\.([0-9]+))?(?:e[+-]?[0-9]+)?)\s?(\S*)")


class Range(NamedTuple):
    """The numbers from `low` to `high` are written like this."""

    low: float
    high: float

    def holds(self, value: float) -> bool:
        """Whether a number is one of them, as exactly as a double can say."""
        slack = 1e-9 * max(abs(value), 1e-9)
        return self.low - slack <= value <= self.high + slack


def figure(text: str) -> Range:
    """The numbers that `1.23 ms`, `12.3 %`, `<0.1 %`, `1 234` or `4.10 kB` can stand for, in ns, bytes or fractions.

    Raises:
        ValueError: The text is no figure.
    """
    match = _FIGURE.fullmatch(text.strip())
    if match is None:
        raise ValueError(f"{text!r} is no figure")
    sign, bound, digits, decimals, unit = match.groups()
    factor = _factor(unit)
    number = float(digits.replace("\u202f", ""))
    if unit == "%" and bound == "<":
        low, high = 0.0, number
    elif unit == "%" and bound == ">":
        low, high = number, 100.0
    elif "e" in digits:
        low, high = number * 0.95, number * 1.05
    else:
        half = 0.5 * 10 ** -len(decimals or "")
        low, high = number - half, number + half
    low, high = low * factor, high * factor
    return Range(-high, -low) if sign == "-" else Range(low, high)


def _factor(unit: str) -> float:
    if unit in _TIMES:
        return _TIMES[unit]
    if unit == "%":
        return 0.01
    for name in ("FLOP/s", "FLOP", "B/s", "B"):
        if unit.endswith(name):
            return _PREFIXES[unit.removesuffix(name)]
    if unit:
        raise ValueError(f"{unit!r} is no unit")
    return 1
