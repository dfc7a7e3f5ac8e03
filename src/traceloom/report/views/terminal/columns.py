"""Aligned columns of a fixed width: numbers to the right, and a last column that takes what is left."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from rich.text import Text

from traceloom.harmless import harmless
from traceloom.report.views.terminal.look import DIM

Cell = str | Text
_GAP = "  "
_INDENT = " "
_LEAST_BAR, _MOST_BAR = 14, 64


def heading(title: str, note: str, width: int) -> Iterator[Text]:
    """A section's heading after a blank line; a long note stands below it. Those of strangers are made harmless."""
    title, note = harmless(title), harmless(note)
    yield Text("")
    if len(title) + len(note) + 2 <= width:
        yield Text.assemble((title, "bold"), ("  " + note if note else "", DIM))
        return
    yield Text(title, "bold")
    yield from paragraph(note, width, DIM)


def paragraph(words: str, width: int, style: str = "", indent: int = len(_INDENT)) -> Iterator[Text]:
    """Words as indented lines; those of strangers made harmless."""
    for line in textwrap.wrap(harmless(words), width - indent - 1, break_on_hyphens=False):
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
