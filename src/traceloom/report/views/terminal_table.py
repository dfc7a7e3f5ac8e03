"""Aligned columns, bars, colours.

Every kind of time has a colour and a pattern, so that a bar can be read without colour too. Colours are told apart by
people with any common colour blindness and on light and dark backgrounds.
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from rich.text import Text

from traceloom.report.document import Bar
from traceloom.system.sanitize import sanitize

FILLS = {
    "compute": ("█", "#3b82d6"),
    "communication": ("▞", "#e08a00"),
    "memory": ("▒", "#c2578f"),
    "idle": ("·", "bright_black"),
    "loading": ("░", "#c2578f"),
    "forward": ("█", "#3b82d6"),
    "backward": ("▓", "#7a5fc9"),
    "optimizer": ("▒", "#009e73"),
    "other": ("·", "bright_black"),
    "op": ("█", "#3b82d6"),
    "launch": ("▓", "#7a5fc9"),
    "blocking": ("▒", "#d55e00"),
    "python": ("░", "#009e73"),
}
"""Pattern and colour of each colour group of `report.parts`."""

SLOWER, FASTER = "#d55e00", "#3b82d6"  # of differences
CURVE = "#c2578f"  # of curves of memory
SEVERITY = {"error": ("✖", "bold red"), "warning": ("▲", "yellow"), "info": ("•", "bright_black")}
DIM = "bright_black"

# What an output that knows no Unicode shows instead.
ASCII = str.maketrans(
    {
        "█": "#", "▓": "=", "▒": "%", "░": ":", "▞": "/", "·": ".", "µ": "u", "\u202f": " ", "…": "~", "✖": "x",
        "▲": "!", "•": "-", "→": ">", "│": "|", "▕": "|",
        "▁": "_", "▂": "_", "▃": "-", "▄": "-", "▅": "=", "▆": "=", "▇": "#", "─": "-", "–": "-", "×": "x",
        "▏": "|", "▎": "|", "▍": "|", "▌": "|", "▋": "|", "▊": "|", "▉": "#",
    }
)  # fmt: skip

Cell = str | Text
_GAP = "  "
_INDENT = " "
_LEAST_BAR, _MOST_BAR = 14, 64


def heading(title: str, note: str, width: int) -> Iterator[Text]:
    """A section's heading after a blank line; a long note stands below it. Those of strangers are made harmless."""
    title, note = sanitize(title), sanitize(note)
    yield Text("")
    if len(title) + len(note) + 2 <= width:
        yield Text.assemble((title, "bold"), ("  " + note if note else "", DIM))
        return
    yield Text(title, "bold")
    yield from paragraph(note, width, DIM)


def paragraph(words: str, width: int, style: str = "", indent: int = len(_INDENT)) -> Iterator[Text]:
    """Words as indented lines; those of strangers made harmless."""
    for line in textwrap.wrap(sanitize(words), width - indent - 1, break_on_hyphens=False):
        yield Text(" " * indent + line, style)


def fitted(drawn: Iterable[Text], width: int) -> Iterator[Text]:
    """The lines; those that are wider end with an ellipsis, as with names whose letters take two cells each.

    What has to stand whole, as a command, says so by its `overflow` of "ignore".
    """
    for line in drawn:
        if line.cell_len > width and line.overflow != "ignore":
            line.truncate(width, overflow="ellipsis")
        yield line


@dataclass(frozen=True, slots=True)
class TextColumn:
    """A column: its heading and on which side its cells stand."""

    heading: Cell
    right: bool = True


def with_bars(
    columns: Sequence[TextColumn], rows: Sequence[Sequence[Cell]], bar: Callable[[int, int], Text], width: int
) -> list[Text]:
    """Rows with a bar at the end of each, or below it where too little room is left.

    Args:
        columns: All columns but the bar.
        rows: Their cells.
        bar: (row number, cells that are left) -> the bar.
        width: Of the whole line.
    """
    bare = lines(columns, rows, ("", lambda *_: ""), width)
    room = width - max(line.cell_len for line in bare) - len(_GAP)
    if room >= _LEAST_BAR:
        return lines(columns, rows, ("", lambda i, left: bar(i, min(left, _MOST_BAR))), width)
    for number in reversed(range(len(rows))):
        bare.insert(number + 2, Text(_INDENT) + bar(number, min(width - 2 * len(_INDENT), _MOST_BAR)))
    return bare


def lines(
    columns: Sequence[TextColumn],
    rows: Sequence[Sequence[Cell]],
    last: tuple[Cell, Callable[[int, int], Cell]],
    width: int,
) -> list[Text]:
    """The heading and one line per row.

    Args:
        columns: All columns but the last.
        rows: Their cells.
        last: Heading of the last column, and what stands there: (row number, cells that are left) -> text.
        width: Of the whole line.
    """
    head, fill = last
    table = [[_text(column.heading, "bold") for column in columns], *([_text(cell) for cell in row] for row in rows)]
    widths = [max(row[i].cell_len for row in table) for i in range(len(columns))]
    used = len(_INDENT) + sum(widths) + len(_GAP) * len(widths)
    out: list[Text] = []
    for number, row in enumerate(table):
        line = Text(_INDENT, no_wrap=True)
        for column, cell, size in zip(columns, row, widths, strict=True):
            blank = Text(" " * (size - cell.cell_len))
            line = line + (blank + cell if column.right else cell + blank) + Text(_GAP)
        line = line + (_text(head, "bold") if number == 0 else _text(fill(number - 1, max(width - used, 0))))
        line.rstrip()
        out.append(line)
    return out


def _text(cell: Cell, style: str = "") -> Text:
    return cell if isinstance(cell, Text) else Text(cell, style)


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


def signed_bar(difference: int, largest: int, width: int) -> Text:
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
