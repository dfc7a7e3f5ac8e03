"""Step curves over time as one SVG picture: depths of queues, counts of requests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape

from traceloom.harmless import harmless
from traceloom.model import units

_WIDTH, _HEIGHT, _TOP, _LEFT, _BOTTOM = 1256, 200, 14, 46, 20
_MOST = 8  # lines in one picture
_COLOURS = ("compute", "communication", "memory", "annotation", "blocking", "forward", "launch", "other")  # of the page


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
        parts.append(f'<path class="l-{colour}" d="{path}"><title>{escape(harmless(name))}</title></path>')
    legend = "".join(
        f'<li><i class="swatch b-{colour}"></i>{escape(harmless(name))}</li>'
        for colour, name in zip(_COLOURS, drawn, strict=False)
    )
    base = _HEIGHT - _BOTTOM
    return (
        f'<figure class="picture"><figcaption>{escape(what.capitalize())}</figcaption>'
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{escape(what)} over time">'
        f'<path class="axis" d="M{_LEFT} {_TOP}V{base}H{_WIDTH}"/>'
        f'<text x="{_LEFT - 4}" y="{_TOP + 4}" text-anchor="end">{units.count(most)}</text>'
        f'<text x="{_LEFT - 4}" y="{base}" text-anchor="end">0</text>'
        f'<text x="{_LEFT}" y="{_HEIGHT - 5}">{units.duration(first)}</text>'
        f'<text x="{_WIDTH}" y="{_HEIGHT - 5}" text-anchor="end">{units.duration(last)}</text>'
        f'{"".join(parts)}</svg><ul class="legend">{legend}</ul></figure>'
    )
