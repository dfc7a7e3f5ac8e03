"""A picture of stacked bars: one per GPU, cut into named parts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from traceloom.model import units
from traceloom.report.names import harmless

_WIDTH, _LEFT, _BAR, _GAP = 900, 130, 22, 8


@dataclass(frozen=True, slots=True)
class Part:
    """One part of a bar, with its time in ns."""

    name: str
    ns: int


def stacked(bars: Sequence[tuple[str, Sequence[Part]]], order: Sequence[str]) -> str:
    """An SVG with one bar per entry; all on one scale, parts in the given order, each with its figures on hover.

    Colours are spread over the circle of hues by the place of a part in the order; `idle` is grey. Empty without time.
    """
    longest = max((sum(part.ns for part in parts) for _, parts in bars), default=0)
    if not longest:
        return ""
    names = dict.fromkeys([*order, *(part.name for _, parts in bars for part in parts)])
    used = [name for name in names if any(part.name == name and part.ns for _, parts in bars for part in parts)]
    height = len(bars) * (_BAR + _GAP) + 24
    head = f'<svg viewBox="0 0 {_WIDTH} {height}" width="100%" role="img" aria-label="GPU time by part"'
    out = [head + ' font-family="system-ui, sans-serif" font-size="12">']
    for row, (label, parts) in enumerate(bars):
        top = row * (_BAR + _GAP)
        out.append(f'<text x="0" y="{top + 15}" fill="currentColor">{_text(label)}</text>')
        at = 0
        whole = sum(part.ns for part in parts)
        for part in sorted(parts, key=lambda one: _place(one.name, order)):
            if not part.ns:
                continue
            left, right = (_LEFT + (_WIDTH - _LEFT) * ns / longest for ns in (at, at + part.ns))
            said = f"{part.name}: {units.duration(part.ns)}, {units.share(part.ns, whole)}"
            out.append(
                f'<rect x="{left:.1f}" y="{top}" width="{max(right - left, 0.3):.1f}" height="{_BAR}" '
                f'fill="{_colour(part.name, order)}"><title>{_text(said)}</title></rect>'
            )
            at += part.ns
    return "".join([*out, *_legend(used, order, height - 8), "</svg>"])


def _legend(used: Sequence[str], order: Sequence[str], base: int) -> list[str]:
    out, at = [], 0
    for name in used:
        out.append(f'<rect x="{at}" y="{base - 9}" width="10" height="10" fill="{_colour(name, order)}"/>')
        out.append(f'<text x="{at + 14}" y="{base}" fill="currentColor">{_text(name)}</text>')
        at += 30 + round(7.4 * len(name))
    return out


def _colour(name: str, order: Sequence[str]) -> str:
    if name == "idle":
        return "hsl(0 0% 75%)"
    return f"hsl({round(360 * _place(name, order) / (len(order) + 1))} 55% 52%)"


def _place(name: str, order: Sequence[str]) -> int:
    """Where a part stands; what the order does not know comes last."""
    return order.index(name) if name in order else len(order)


def _text(value: str) -> str:
    return escape(harmless(value))
