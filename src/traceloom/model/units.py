"""Numbers for people: durations, bytes, shares; honest rounding."""

from __future__ import annotations

_TIME = ((1_000_000_000, "s"), (1_000_000, "ms"), (1_000, "µs"))
_PREFIXES = ((10**15, "P"), (10**12, "T"), (10**9, "G"), (10**6, "M"), (10**3, "k"))
_BYTES = ((10**12, "TB"), (10**9, "GB"), (10**6, "MB"), (10**3, "kB"))


def _three(value: float) -> str:
    """Three significant digits, thousands in groups: 1.23, 12.3, 123, 1 234 (thin space)."""
    size = abs(value)
    digits = 2 if size < 9.995 else 1 if size < 99.95 else 0
    return f"{value:,.{digits}f}".replace(",", "\u202f")


def duration(ns: int | None) -> str:
    """1234567 -> `1.23 ms`; None -> `-`."""
    if ns is None:
        return "-"
    for factor, unit in _TIME:
        if abs(ns) >= factor * 0.9995:
            return f"{_three(ns / factor)} {unit}"
    return f"{ns} ns"


def size(count: int | None) -> str:
    """1500000 -> `1.50 MB` (10^6); None -> `-`."""
    if count is None:
        return "-"
    for factor, unit in _BYTES:
        if abs(count) >= factor * 0.9995:
            return f"{_three(count / factor)} {unit}"
    return f"{count} B"


def flops(value: float | None) -> str:
    """1.5e12 -> `1.50 TFLOP`; None -> `-`."""
    return "-" if value is None else f"{_prefixed(value)}FLOP"


def flop_rate(value: float | None) -> str:
    """1.5e12 -> `1.50 TFLOP/s`; None -> `-`."""
    return "-" if value is None else f"{_prefixed(value)}FLOP/s"


def byte_rate(value: float | None) -> str:
    """1.5e9 -> `1.50 GB/s` (10^9); None -> `-`."""
    return "-" if value is None else f"{_prefixed(value)}B/s"


def _prefixed(value: float) -> str:
    factor, prefix = next(((f, p) for f, p in _PREFIXES if abs(value) >= f * 0.9995), (1, ""))
    return f"{_three(value / factor)} {prefix}"


def number(value: float | None) -> str:
    """A number without unit: whole ones as they are, others with three significant digits; None -> `-`."""
    if value is None:
        return "-"
    if float(value).is_integer():
        return f"{int(value):,}".replace(",", "\u202f")
    return f"{value:.2g}" if abs(value) < 0.01 else _three(value)


def share(part: float, whole: float) -> str:
    """A share in per cent that is never 0 % or 100 % unless it is exactly that; `-` of nothing."""
    if not whole:
        return "-"
    fraction = part / whole
    if part == 0:
        return "0 %"
    if part == whole:
        return "100 %"
    if 0 < fraction < 0.001:
        return "<0.1 %"
    if 0.999 < fraction < 1:
        return ">99.9 %"
    return f"{fraction * 100:.1f} %"


def count(value: int | None) -> str:
    """1234567 -> `1 234 567` with thin spaces; None -> `-`."""
    return "-" if value is None else f"{value:,}".replace(",", "\u202f")
