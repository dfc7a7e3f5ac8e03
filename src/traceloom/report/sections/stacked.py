"""A picture of stacked bars: one per GPU, cut into named parts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape

from traceloom.harmless import harmless
from traceloom.model import units

_WIDTH, _LEFT, _BAR, _GAP = 1256, 130, 18, 9


@dataclass(frozen=True, slots=True)
class Part:
    """One part of a bar, with its time in ns."""

    name: str
    ns: int


def stacked(bars: Sequence[tuple[str, Sequence[Part]]], colours: Mapping[str, str]) -> str:
    """A figure with one bar per entry; all on one scale, each part with its figures on hover. Empty without time.

    Args:
        bars: Label and parts of each.
        colours: Colour group of the page by name of a part, in the order of the bar; other parts come last, as `other`.
    """
    longest = max((sum(part.ns for part in parts) for _, parts in bars), default=0)
    if not longest:
        return ""
    order = list(colours)
    names = dict.fromkeys([*order, *(part.name for _, parts in bars for part in parts)])
    used = [name for name in names if any(part.name == name and part.ns for _, parts in bars for part in parts)]
    height = len(bars) * (_BAR + _GAP) - _GAP
    head = f'<figure class="picture"><svg viewBox="0 0 {_WIDTH} {height}" role="img" aria-label="GPU time by part">'
    out = [head]
    for row, (label, parts) in enumerate(bars):
        top = row * (_BAR + _GAP)
        out.append(f'<text x="0" y="{top + 13}">{_text(label)}</text>')
        at = 0
        whole = sum(part.ns for part in parts)
        for part in sorted(parts, key=lambda piece: order.index(piece.name) if piece.name in colours else len(order)):
            if not part.ns:
                continue
            left, right = (_LEFT + (_WIDTH - _LEFT) * ns / longest for ns in (at, at + part.ns))
            hover_text = f"{part.name}: {units.duration(part.ns)}, {units.share(part.ns, whole)}"
            out.append(
                f'<rect class="f-{colours.get(part.name, "other")}" x="{left:.1f}" y="{top}" '
                f'width="{max(right - left, 0.3):.1f}" height="{_BAR}"><title>{_text(hover_text)}</title></rect>'
            )
            at += part.ns
    legend = "".join(f'<li><i class="swatch b-{colours.get(name, "other")}"></i>{_text(name)}</li>' for name in used)
    return "".join([*out, f'</svg><ul class="legend">{legend}</ul></figure>'])


def _text(value: str) -> str:
    return escape(harmless(value))
