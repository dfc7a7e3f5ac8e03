"""Cells: numbers of one column in one unit, three significant digits, aligned on the decimal, exact when asked."""

from __future__ import annotations

from collections.abc import Callable
from html import escape
from typing import Any

from traceloom.harmless import harmless
from traceloom.model import units
from traceloom.report.names import short
from traceloom.report.table import Bar, Col
from traceloom.report.views.html.bars import bar
from traceloom.report.views.html.text import text

UNKNOWN = "–"
NAME_LENGTH = 64
_ONE_LINE = 32  # characters that never wrap


def cells(column: Col, values: list[Any], scale: units.Scale, reason: str) -> list[str]:
    """The `<td>` of each value; null as a dash that says why on hover."""
    if not column.numeric:
        return [_worded(column, value, reason) for value in values]
    write: Callable[[Any], str] = units.count
    if column.kind == "share":
        write = units.per_cent
    elif column.kind != "count":
        write = lambda value: units.rounded(value / scale[0])  # noqa: E731
    shown = [None if value is None else write(value) for value in values]
    widest = max((len(s.partition(".")[2]) for s in shown if s is not None), default=0)
    return [_numeric(column, value, s, widest, reason) for value, s in zip(values, shown, strict=True)]


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
