"""Aligned columns, bars and colours of a terminal.

Every kind of time has a colour and a pattern, so that a bar can be read without colour too. The
colours are distinguishable with any common colour blindness and on light and dark backgrounds.
"""

import textwrap
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from rich.text import Text

from traceloom.report.document import Bar
from traceloom.system.sanitize import sanitize

BAR_FILLS = {
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

SLOWER_COLOUR, FASTER_COLOUR = "#d55e00", "#3b82d6"  # of differences
MEMORY_CURVE_COLOUR = "#c2578f"  # of curves of memory
SEVERITY_STYLES = {
    "error": ("✖", "bold red"),
    "warning": ("▲", "yellow"),
    "info": ("•", "bright_black"),
}
DIM_STYLE = "bright_black"

# Replacements on an output without Unicode.
ASCII_FALLBACKS = str.maketrans(
    {
        "█": "#",
        "▓": "=",
        "▒": "%",
        "░": ":",
        "▞": "/",
        "·": ".",
        "µ": "u",
        "\u202f": " ",
        "…": "~",
        "✖": "x",
        "▲": "!",
        "•": "-",
        "→": ">",
        "│": "|",
        "▕": "|",
        "▁": "_",
        "▂": "_",
        "▃": "-",
        "▄": "-",
        "▅": "=",
        "▆": "=",
        "▇": "#",
        "─": "-",
        "–": "-",
        "×": "x",
        "▏": "|",
        "▎": "|",
        "▍": "|",
        "▌": "|",
        "▋": "|",
        "▊": "|",
        "▉": "#",
    }
)

Cell = str | Text
_GAP = "  "
_INDENT = " "
_MIN_BAR_WIDTH, _MAX_BAR_WIDTH = 14, 64


def render_heading(title: str, note: str, width: int) -> Iterator[Text]:
    """Yields a section's heading after a blank line; a long note follows below it.

    Untrusted text is sanitized.
    """
    title, note = sanitize(title), sanitize(note)
    yield Text("")
    if len(title) + len(note) + 2 <= width:
        yield Text.assemble((title, "bold"), ("  " + note if note else "", DIM_STYLE))
        return
    yield Text(title, "bold")
    yield from render_paragraph(note, width, DIM_STYLE)


def render_paragraph(
    text: str, width: int, style: str = "", indent: int = len(_INDENT)
) -> Iterator[Text]:
    """Yields text as indented lines; untrusted text is sanitized."""
    for line in textwrap.wrap(sanitize(text), width - indent - 1, break_on_hyphens=False):
        yield Text(" " * indent + line, style)


def truncate_lines(lines: Iterable[Text], width: int) -> Iterator[Text]:
    """Truncates wider lines with an ellipsis, for example names whose characters take two cells
    each.

    A line that must not be truncated, such as a command, has `overflow` "ignore".
    """
    for line in lines:
        if line.cell_len > width and line.overflow != "ignore":
            line.truncate(width, overflow="ellipsis")
        yield line


@dataclass(frozen=True, slots=True)
class TextColumn:
    """A column: its heading and the alignment of its cells."""

    heading: Cell
    right: bool = True


def render_bar_table(
    columns: Sequence[TextColumn],
    rows: Sequence[Sequence[Cell]],
    draw_row_bar: Callable[[int, int], Text],
    width: int,
) -> list[Text]:
    """Renders rows with a bar at the end of each, or below it where it does not fit.

    Args:
        columns: All columns but the bar.
        rows: Their cells.
        draw_row_bar: (row number, remaining cells) -> the bar.
        width: Width of the whole line.
    """
    without_bars = render_table(columns, rows, ("", lambda *_: ""), width)
    if width - max(line.cell_len for line in without_bars) - len(_GAP) >= _MIN_BAR_WIDTH:
        return render_table(
            columns, rows, ("", lambda i, left: draw_row_bar(i, min(left, _MAX_BAR_WIDTH))), width
        )
    for number in reversed(range(len(rows))):
        without_bars.insert(
            number + 2,
            Text(_INDENT) + draw_row_bar(number, min(width - 2 * len(_INDENT), _MAX_BAR_WIDTH)),
        )
    return without_bars


def render_table(
    columns: Sequence[TextColumn],
    rows: Sequence[Sequence[Cell]],
    last_column: tuple[Cell, Callable[[int, int], Cell]],
    width: int,
) -> list[Text]:
    """Renders the heading and one line per row.

    Args:
        columns: All columns but the last.
        rows: Their cells.
        last_column: Heading of the last column, and its cells: (row number, remaining cells) ->
            text.
        width: Width of the whole line.
    """
    last_heading, make_last_cell = last_column
    table = [
        [_convert_to_text(column.heading, "bold") for column in columns],
        *([_convert_to_text(cell) for cell in row] for row in rows),
    ]
    widths = [max(row[i].cell_len for row in table) for i in range(len(columns))]
    used = len(_INDENT) + sum(widths) + len(_GAP) * len(widths)
    out: list[Text] = []
    for number, row in enumerate(table):
        line = Text(_INDENT, no_wrap=True)
        for column, cell, size in zip(columns, row, widths, strict=True):
            padding = Text(" " * (size - cell.cell_len))
            line = line + (padding + cell if column.right else cell + padding) + Text(_GAP)
        line = line + (
            _convert_to_text(last_heading, "bold")
            if number == 0
            else _convert_to_text(make_last_cell(number - 1, max(width - used, 0)))
        )
        line.rstrip()
        out.append(line)
    return out


def _convert_to_text(cell: Cell, style: str = "") -> Text:
    return cell if isinstance(cell, Text) else Text(cell, style)


_SPARKLINE_LEVELS = "▁▂▃▄▅▆▇█"
_EIGHTH_BLOCKS = ("", "▏", "▎", "▍", "▌", "▋", "▊", "▉")


def allocate_cells(parts: Sequence[int], width: int) -> list[int]:
    """Returns how many of `width` cells each part gets: by largest remainder, at least one where
    the part is not zero.
    """
    total = sum(parts)
    if total <= 0 or width <= 0:
        return [0] * len(parts)
    exact = [part * width / total for part in parts]
    counts = [
        max(int(share), 1 if part > 0 else 0) for share, part in zip(exact, parts, strict=True)
    ]
    remainder_order = sorted(range(len(parts)), key=lambda i: exact[i] - counts[i])
    while sum(counts) > width:
        counts[max(range(len(counts)), key=lambda i: counts[i])] -= 1
    while sum(counts) < width:
        counts[remainder_order.pop()] += 1
    return counts


def draw_stacked_bar(bar: Bar, width: int) -> Text:
    """Draws a stacked bar; its share of `width` cells is its ratio to the longest bar (empty where
    all parts are zero).
    """
    bar_text = Text()
    length = (
        width
        if bar.longest is None
        else round(width * bar.whole / bar.longest)
        if bar.longest
        else 0
    )
    for (_, group, _), count in zip(
        bar.parts, allocate_cells([ns for _, _, ns in bar.parts], length), strict=True
    ):
        fill, color = BAR_FILLS[group]
        bar_text.append(fill * count, color)
    return bar_text


def draw_bar(fraction: float, width: int, style: str) -> Text:
    """Draws a share as a bar, to an eighth of a cell; at least that where the share is not zero."""
    eighths = min(width * 8, max(round(fraction * width * 8), 1 if fraction > 0 else 0))
    return Text("█" * (eighths // 8) + _EIGHTH_BLOCKS[eighths % 8], style)


def draw_signed_bar(difference: int, largest: int, width: int) -> Text:
    """Draws a difference as a bar: increases to the right of the middle, decreases to the left."""
    half = (width - 1) // 2
    bar = "█" * round(half * abs(difference) / max(largest, 1))
    left_part, right = (bar or "▕", "") if difference < 0 else ("", bar or "▏" * bool(difference))
    return Text.assemble(
        (left_part.rjust(half), FASTER_COLOUR), ("│", DIM_STYLE), (right.ljust(half), SLOWER_COLOUR)
    )


def draw_sparkline(values: Sequence[float], width: int) -> str:
    """Draws the values (>= 0) as at most `width` small bars; neighbours share one, which shows
    their max.
    """
    if not values:
        return ""
    count = min(width, len(values))
    bounds = [len(values) * i // count for i in range(count + 1)]
    highest = [max(values[low:high]) for low, high in pairwise(bounds)]
    top = max(highest)
    if top <= 0:
        return _SPARKLINE_LEVELS[0] * count
    return "".join(_SPARKLINE_LEVELS[min(7, int(max(value, 0) / top * 8))] for value in highest)
