"""Formats numbers for people: durations, bytes, rates, shares.

A share is never rounded to 0 or 100 %. `units.js` implements the same for the web page.
"""

import re
from collections.abc import Callable, Collection, Iterable
from math import floor
from typing import Any

UNKNOWN_TEXT = "–"
"""Stands for an unknown number."""

Scale = tuple[float, str]  # divisor, and the unit after the division
_PREFIXES = ((10**15, "P"), (10**12, "T"), (10**9, "G"), (10**6, "M"), (10**3, "k"), (1, ""))
_SCALES: dict[str, tuple[Scale, ...]] = {
    "time": ((1_000_000_000, "s"), (1_000_000, "ms"), (1_000, "µs"), (1, "ns")),
    "bytes": ((10**12, "TB"), (10**9, "GB"), (10**6, "MB"), (10**3, "kB"), (1, "B")),
    **{
        rate: tuple((factor, prefix + unit) for factor, prefix in _PREFIXES)
        for rate, unit in (("flops", "FLOP"), ("flop_rate", "FLOP/s"), ("byte_rate", "B/s"))
    },
}


def format_percent(fraction: float) -> str:
    """Returns a fraction in per cent, without the sign; never 0 or 100 unless it is exactly that."""
    if fraction in (0, 1):
        return f"{fraction * 100:.0f}"
    if 0 < fraction < 0.001:
        return "<0.1"
    return ">99.9" if 0.999 < fraction < 1 else f"{fraction * 100:.1f}"


def _format_three_digits(value: float) -> str:
    """Three significant digits, thousands in groups: 1.23, 12.3, 123, 1 234 (thin space)."""
    size = abs(value)
    digits = 2 if size < 9.995 else 1 if size < 99.95 else 0
    return f"{value:,.{digits}f}".replace(",", "\u202f")


def _format_scaled(value: float | None, unit: str) -> str:
    """Returns a value in the largest unit in which it is at least 1; `–` for None."""
    if value is None:
        return UNKNOWN_TEXT
    factor, name = next(
        (scale for scale in _SCALES[unit] if abs(value) >= scale[0] * 0.9995), _SCALES[unit][-1]
    )
    if factor == 1 and unit in ("time", "bytes"):  # round means as units.js does
        return f"{value if isinstance(value, int) else floor(value + 0.5)} {name}"
    return f"{_format_three_digits(value / factor)} {name}"


def format_duration(ns: int | None) -> str:
    """1234567 -> `1.23 ms`; None -> `–`."""
    return _format_scaled(ns, "time")


def format_size(count: int | None) -> str:
    """1500000 -> `1.50 MB` (10^6); None -> `–`."""
    return _format_scaled(count, "bytes")


def format_flops(value: float | None) -> str:
    """1.5e12 -> `1.50 TFLOP`; None -> `–`."""
    return _format_scaled(value, "flops")


def format_flop_rate(value: float | None) -> str:
    """1.5e12 -> `1.50 TFLOP/s`; None -> `–`."""
    return _format_scaled(value, "flop_rate")


def format_byte_rate(value: float | None) -> str:
    """1.5e9 -> `1.50 GB/s` (10^9); None -> `–`."""
    return _format_scaled(value, "byte_rate")


def format_number(value: float | None) -> str:
    """Returns a number without unit: integers in full, others with three significant digits; None
    -> `–`.
    """
    if value is None:
        return UNKNOWN_TEXT
    if float(value).is_integer():
        return f"{int(value):,}".replace(",", "\u202f")
    return f"{value:.2g}" if abs(value) < 0.01 else _format_three_digits(value)


def format_share(part: float, total: float) -> str:
    """Returns a share in per cent that is never 0 % or 100 % unless it is exactly that; `–` if
    `total` is 0.
    """
    return f"{format_percent(part / total)} %" if total else UNKNOWN_TEXT


def format_change(fraction: float) -> str:
    """A relative change with its sign: 0.261 -> `+26.1 %`; never 0 or -100 % unless it is exactly
    that.
    """
    size = abs(fraction)
    percent = format_count(round(100 * size)) if size >= 10 else format_percent(size).lstrip(">")
    return f"{'+' if fraction > 0 else '-' if fraction else ''}{percent} %"


def format_count(value: int | None) -> str:
    """1234567 -> `1 234 567` with thin spaces; None -> `–`."""
    return UNKNOWN_TEXT if value is None else f"{value:,}".replace(",", "\u202f")


def format_quantity(value: int, noun: str) -> str:
    """(1, `call`) -> `1 call`; (1234, `copy`) -> `1 234 copies`."""
    ending = (
        "ies" if re.search("[^aeiou]y$", noun) else "es" if re.search("(s|x|ch|sh)$", noun) else "s"
    )
    noun_form = noun if value == 1 else (noun[:-1] if ending == "ies" else noun) + ending
    return f"{format_count(value)} {noun_form}"


_FORMATTERS: dict[str, Callable[[Any], str]] = {
    "time": format_duration,
    "bytes": format_size,
    "count": format_count,
    "share": lambda value: format_share(value, 1.0),
    "change": format_change,
    "number": format_number,
    "flops": format_flops,
    "flop_rate": format_flop_rate,
    "byte_rate": format_byte_rate,
}
NUMERIC_UNITS = tuple(_FORMATTERS)
"""The units of numeric columns."""


def format_value(value: Any, unit: str) -> str:
    """Returns a number formatted for the unit of its column; `–` for None."""
    return _FORMATTERS[unit](value) if value is not None else UNKNOWN_TEXT


def find_runs(values: Iterable[int]) -> list[list[int]]:
    """Returns the first and the last number of each run of numbers that follow each other."""
    runs: list[list[int]] = []
    for value in sorted(values):
        if runs and value == runs[-1][1] + 1:
            runs[-1][1] = value
        else:
            runs.append([value, value])
    return runs


def format_ranges(values: Iterable[int]) -> str:
    """Formats numbers with runs of three and more as ranges: `0-3, 5`."""
    parts = (
        f"{first}-{last}" if last > first + 1 else ", ".join(map(str, range(first, last + 1)))
        for first, last in find_runs(values)
    )
    return ", ".join(parts)


def format_ranks(ranks: Collection[int]) -> str:
    """Formats ranks with their noun: `rank 5`, `ranks 0-3, 5`."""
    return f"rank{'' if len(ranks) == 1 else 's'} {format_ranges(ranks)}"
