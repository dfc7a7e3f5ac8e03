"""Stacked bars: where one stretch of time went, as one line of colours that always mean the same."""

from __future__ import annotations

from collections.abc import Iterable

from traceloom.model import units
from traceloom.report.views.html.text import text


def bar(parts: Iterable[tuple[str, str, int]], whole: int, longest: int | None = None) -> str:
    """An SVG of one stacked bar.

    Args:
        parts: (label, colour group, nanoseconds), from left to right.
        whole: What the parts are shares of.
        longest: Length of the longest bar of the picture; the width is relative to it. None: full width.
    """
    scale = 1000 / max(longest or whole, 1)
    left, boxes, words = 0.0, [], []
    for label, colour, ns in parts:
        width = ns * scale
        title = text(f"{label} {units.duration(ns)} ({units.share(ns, whole)})")
        words.append(title)
        if width > 0:
            boxes.append(
                f'<rect class="f-{colour}" x="{left:.2f}" width="{width:.2f}" height="1"><title>{title}</title></rect>'
            )
        left += width
    return (
        '<svg class="stack" viewBox="0 0 1000 1" preserveAspectRatio="none" role="img" '
        f'aria-label="{"; ".join(words)}">{"".join(boxes)}</svg>'
    )


def legend(parts: Iterable[tuple[str, str, int]], whole: int) -> str:
    """The parts as a list with their colours, times and shares."""
    items = "".join(
        f'<li><i class="swatch b-{colour}"></i><span>{text(label)}</span> '
        f'<b>{text(units.share(ns, whole))}</b> <span class="quiet">{units.duration(ns)}</span></li>'
        for label, colour, ns in parts
        if ns
    )
    return f'<ul class="legend">{items}</ul>'
