"""Step curves over time as one SVG picture: depths of queues, counts of requests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape

from traceloom.model import units

_WIDTH, _HEIGHT, _TOP, _LEFT, _BOTTOM = 900, 180, 14, 46, 20
_MOST = 8  # lines in one picture
_COLOURS = ("#3b6ea5", "#c2703d", "#5b8c5a", "#8a6bb0", "#b0555f", "#4c8f95", "#a08a3c", "#777")


def curves(lines: Mapping[str, Sequence[tuple[int, int]]], what: str) -> str:
    """A picture of step curves; empty where there is nothing to draw.

    Args:
        lines: Name -> (time in ns, value from then on), by time. The first eight with the largest values are drawn.
        what: What the values are, for the title.
    """
    drawn = sorted((name for name, line in lines.items() if line), key=lambda name: -max(v for _, v in lines[name]))
    drawn = drawn[:_MOST]
    if not drawn:
        return ""
    first = min(lines[name][0][0] for name in drawn)
    last = max(lines[name][-1][0] for name in drawn)
    most = max(1, *(value for name in drawn for _, value in lines[name]))
    across = (_WIDTH - _LEFT) / max(last - first, 1)
    up = (_HEIGHT - _TOP - _BOTTOM) / most
    parts = []
    for colour, name in zip(_COLOURS, drawn, strict=False):
        path = ""
        for number, (time, value) in enumerate(lines[name]):
            x, y = _LEFT + (time - first) * across, _HEIGHT - _BOTTOM - value * up
            path += f"M{x:.1f} {y:.1f}" if number == 0 else f"H{x:.1f}V{y:.1f}"
        parts.append(f'<path d="{path}" fill="none" stroke="{colour}"><title>{escape(name)}</title></path>')
    legend = " · ".join(
        # no inline style: the page's policy lets none be
        f'<svg width="10" height="10" aria-hidden="true"><rect width="10" height="10" fill="{colour}"/></svg> '
        f"{escape(name)}"
        for colour, name in zip(_COLOURS, drawn, strict=False)
    )
    base = _HEIGHT - _BOTTOM
    return (
        f'<figure><svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{escape(what)} over time" '
        f'width="100%">'
        f'<path d="M{_LEFT} {_TOP}V{base}H{_WIDTH}" fill="none" stroke="#999"/>'
        f'<g font-size="11" fill="currentColor">'
        f'<text x="{_LEFT - 4}" y="{_TOP + 4}" text-anchor="end">{units.count(most)}</text>'
        f'<text x="{_LEFT - 4}" y="{base}" text-anchor="end">0</text>'
        f'<text x="{_LEFT}" y="{_HEIGHT - 5}">{units.duration(first)}</text>'
        f'<text x="{_WIDTH}" y="{_HEIGHT - 5}" text-anchor="end">{units.duration(last)}</text></g>'
        f"{''.join(parts)}</svg><figcaption>{escape(what.capitalize())}: {legend}</figcaption></figure>"
    )
