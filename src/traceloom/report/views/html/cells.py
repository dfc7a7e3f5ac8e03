"""Cells: numbers of one column in one unit, three significant digits, aligned on the decimal, exact when asked."""

from __future__ import annotations

from html import escape
from typing import Any

from traceloom.harmless import harmless
from traceloom.report.names import short
from traceloom.report.table import EXACT, Bar, Col
from traceloom.report.views.html.bars import bar
from traceloom.report.views.html.text import text

UNKNOWN = "–"
_TIME = ((1_000_000_000, "s"), (1_000_000, "ms"), (1_000, "µs"), (1, "ns"))
_PREFIXES = ((10**15, "P"), (10**12, "T"), (10**9, "G"), (10**6, "M"), (10**3, "k"), (1, ""))
_RATES = ("flops", "flop_rate", "byte_rate")
_BYTES = ((10**12, "TB"), (10**9, "GB"), (10**6, "MB"), (10**3, "kB"), (1, "B"))
_DECIMALS = 3
NAME_LENGTH = 64
_ONE_LINE = 32  # characters that never wrap


Unit = tuple[float, str]


def unit_of(column: Col, values: list[Any]) -> Unit:
    """The unit in which the largest value of a column is at least 1; none for a column of zeros."""
    if column.kind == "share":
        return 0.01, "%"
    if column.kind not in ("time", "bytes", *_RATES):
        return 1, ""
    largest = max((abs(value) for value in values if value is not None), default=0)
    units = {"time": _TIME, "bytes": _BYTES}.get(column.kind) or tuple(
        (factor, prefix + EXACT[column.kind]) for factor, prefix in _PREFIXES
    )
    return next(((factor, unit) for factor, unit in units if largest >= factor), (1, ""))


def rounded(value: float) -> str:
    """Three significant digits, at most three decimals, thin spaces; what is not zero never shows as zero."""
    size = abs(value)
    if size == 0 or float(value).is_integer():
        return f"{int(value):,}".replace(",", "\u202f")
    if size < 0.001:
        return "<0.001"
    decimals = next((d for d in range(_DECIMALS) if size >= 99.95 / 10**d), _DECIMALS)
    shown = f"{value:,.{decimals}f}".replace(",", "\u202f")
    return shown.rstrip("0").rstrip(".") if size < 0.01 else shown


def cells(column: Col, values: list[Any], unit: Unit, reason: str) -> list[str]:
    """The `<td>` of each value; null as a dash that says why on hover."""
    if not column.numeric:
        return [_worded(column, value, reason) for value in values]
    shown = [None if value is None else _number(column, value, unit[0]) for value in values]
    widest = max((len(s.partition(".")[2]) for s in shown if s is not None), default=0)
    return [_numeric(column, value, s, widest, reason) for value, s in zip(values, shown, strict=True)]


def _number(column: Col, value: float, factor: float) -> str:
    if column.kind == "share":
        if value in (0, 1):
            return f"{value * 100:.0f}"
        if 0 < value < 0.001:
            return "<0.1"
        return ">99.9" if 0.999 < value < 1 else f"{value * 100:.1f}"
    return rounded(value / factor) if column.kind != "count" else f"{value:,}".replace(",", "\u202f")


def _numeric(column: Col, value: Any, shown: str | None, widest: int, reason: str) -> str:
    if shown is None:
        return _unknown("n", reason)
    _, dot, fraction = shown.partition(".")
    missing = widest - len(fraction)
    pad = f" p{missing}" + ("" if dot else " w") if missing else ""
    exact = round(value * 100, 6) if column.kind == "share" else value
    if column.kind == "share":
        strip = f'<svg class="strip"><rect width="{min(max(value, 0.0), 1.0) * 100:.4g}%"/></svg>'
        return f'<td class="n" data-v="{exact}">{strip}<span class="sh">{escape(shown)}</span></td>'
    return f'<td class="n{pad}" data-v="{exact}">{escape(shown)}</td>'


def _worded(column: Col, value: Any, reason: str) -> str:
    if value is None:
        return _unknown("", reason)
    if isinstance(value, Bar):
        return f'<td class="bar">{bar(value.parts, value.whole, value.longest)}</td>'
    if column.kind == "name":
        whole = harmless(str(value))
        cut = short(whole, NAME_LENGTH)
        title = f' title="{escape(whole)}"' if cut != whole else ""
        return f'<td class="name"{title}>{escape(cut)}</td>'
    if column.kind == "html":
        return f"<td>{value}</td>"
    short_one = ' class="s"' if len(str(value)) <= _ONE_LINE else ""
    return f"<td{short_one}>{text(value)}</td>"


def _unknown(look: str, reason: str) -> str:
    why = f' title="{escape(reason)}"' if reason else ""
    return f'<td class="{look} none"{why}>{UNKNOWN}</td>'.replace('class=" none"', 'class="none"')
