"""A picture of numbers by row and column: darker is more."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

_WIDTH, _LEFT, _TOP = 900, 90, 22
_LETTER = 6.4  # width of one, at most but for a few
_MOST = 128  # rows or columns; more are no picture any more


def heat_map(
    cells: Mapping[tuple[Any, Any], float],
    rows: Sequence[Any],
    columns: Sequence[Any],
    labels: Mapping[tuple[Any, Any], str],
    *,
    titles: tuple[str, str],
) -> str:
    """An SVG of `cells` (row, column) -> value.

    Args:
        cells: Values; absent ones are left empty.
        rows: Keys from top to bottom.
        columns: Keys from left to right.
        labels: What a cell says on hover.
        titles: What rows and columns are.

    Returns:
        Empty where there is nothing above 0, or where it would be too large to be seen.
    """
    most = max(cells.values(), default=0)
    if most <= 0 or len(rows) > _MOST or len(columns) > _MOST:
        return ""
    left = max(_LEFT, _LETTER * max(len(str(row)) for row in rows))
    wide = min((_WIDTH - left) / len(columns), 60)
    high = max(min(wide, 22.0), 6.0)
    height = _TOP + high * len(rows) + 20
    caption = f"{titles[0]} by {titles[1]}"
    head = f'<svg viewBox="0 0 {_WIDTH} {height:.0f}" width="100%" role="img" aria-label="{escape(caption)}"'
    out = [
        head + ' font-family="system-ui, sans-serif" font-size="11">',
        f'<text x="0" y="12" fill="currentColor">{escape(titles[0])} ↓ {escape(titles[1])} →</text>',
    ]
    # From the paper to the colour of what is bad, readable on light and dark paper. A cell names its shape: most of the
    # page of a large job would be cells otherwise.
    cell = f"cell-{'-'.join(caption.split())}"
    shape = f'width="{max(wide - 1, 0.5):.1f}" height="{max(high - 1, 0.5):.1f}"'
    out.append(f'<defs><rect id="{cell}" {shape} stroke="var(--line)" stroke-width="0.4"/></defs>')
    label = max(1, round(14 / high))
    for at, row in enumerate(rows):
        top = _TOP + at * high
        if at % label == 0:
            out.append(f'<text x="0" y="{top + high - 2:.1f}" fill="currentColor">{escape(str(row))}</text>')
        out.append(f'<g transform="translate({left:g} {top:.1f})" fill="var(--bad)">')
        for index, column in enumerate(columns):
            value = cells.get((row, column))
            if value is not None:
                part = f"{max(value, 0) / most:.2f}".lstrip("0")
                title = escape(labels.get((row, column), ""))
                out.append(
                    f'<use href="#{cell}" x="{index * wide:.4g}" fill-opacity="{part}"><title>{title}</title></use>'
                )
        out.append("</g>")
    every = max(1, round(34 / wide))
    base = _TOP + len(rows) * high + 13
    out += [
        f'<text x="{left + index * wide:.1f}" y="{base:.1f}" fill="currentColor">{escape(str(columns[index]))}</text>'
        for index in range(0, len(columns), every)
    ]
    return "".join([*out, "</svg>"])


_BLOCKS = " ░▒▓█"


def blocks(value: float, most: float) -> str:
    """One character for a value, for terminals."""
    level = round(4 * value / most) if most > 0 else 0
    return _BLOCKS[min(4, level)] if level > 0 else "·"
