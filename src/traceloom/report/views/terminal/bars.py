"""Bars and sparklines of characters. The cells of a bar add up to its width; a small part is not lost."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from rich.text import Text

from traceloom.report.table import Bar
from traceloom.report.views.terminal.look import DIM, FASTER, FILLS, SLOWER

_LEVELS = "▁▂▃▄▅▆▇█"
_EIGHTHS = ("", "▏", "▎", "▍", "▌", "▋", "▊", "▉")


def cells(parts: Sequence[int], width: int) -> list[int]:
    """How many of `width` cells each part gets: by largest remainder, at least one where the part is not zero."""
    whole = sum(parts)
    if whole <= 0 or width <= 0:
        return [0] * len(parts)
    exact = [part * width / whole for part in parts]
    counts = [max(int(share), 1 if part > 0 else 0) for share, part in zip(exact, parts, strict=True)]
    by_remainder = sorted(range(len(parts)), key=lambda i: exact[i] - counts[i])
    while sum(counts) > width:
        counts[max(range(len(counts)), key=lambda i: counts[i])] -= 1
    while sum(counts) < width:
        counts[by_remainder.pop()] += 1
    return counts


def stacked(bar: Bar, width: int) -> Text:
    """A stacked bar, as many of `width` cells long as it is of the longest (empty where all parts are nothing)."""
    drawn = Text()
    length = width if bar.longest is None else round(width * bar.whole / bar.longest) if bar.longest else 0
    for (_, group, _), count in zip(bar.parts, cells([ns for _, _, ns in bar.parts], length), strict=True):
        fill, color = FILLS[group]
        drawn.append(fill * count, color)
    return drawn


def plain(fraction: float, width: int, style: str) -> Text:
    """A bar of a share, to an eighth of a cell; at least that where the share is not nothing."""
    eighths = min(width * 8, max(round(fraction * width * 8), 1 if fraction > 0 else 0))
    return Text("█" * (eighths // 8) + _EIGHTHS[eighths % 8], style)


def from_the_middle(difference: int, largest: int, width: int) -> Text:
    """A difference as a bar: to the right of the line in the middle what takes longer, to the left what takes less."""
    half = (width - 1) // 2
    bar = "█" * round(half * abs(difference) / max(largest, 1))
    left, right = (bar or "▕", "") if difference < 0 else ("", bar or "▏" * bool(difference))
    return Text.assemble((left.rjust(half), FASTER), ("│", DIM), (right.ljust(half), SLOWER))


def sparkline(values: Sequence[float], width: int) -> str:
    """The values (>= 0) as at most `width` small bars; neighbours share one, which shows the largest of them."""
    if not values:
        return ""
    count = min(width, len(values))
    bounds = [len(values) * i // count for i in range(count + 1)]
    highest = [max(values[low:high]) for low, high in pairwise(bounds)]
    top = max(highest)
    if top <= 0:
        return _LEVELS[0] * count
    return "".join(_LEVELS[min(7, int(max(value, 0) / top * 8))] for value in highest)
