"""The sections on a terminal: the core, and of the others a line for each, or in full those that were asked for."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from itertools import zip_longest
from typing import TYPE_CHECKING, Any

from rich.text import Text

from traceloom.harmless import harmless
from traceloom.model import units
from traceloom.report.names import short
from traceloom.report.options import ReportOptions, ordered
from traceloom.report.sections import CORE, core, shown
from traceloom.report.table import PICTURES, Bar, Col, Table, written
from traceloom.report.views.terminal.bars import from_the_middle, sparkline, stacked
from traceloom.report.views.terminal.columns import Cell, TextColumn, heading, lines, paragraph, with_bars
from traceloom.report.views.terminal.look import CURVE, FILLS

if TYPE_CHECKING:
    from traceloom.report.documents import ReportDocument
    from traceloom.report.sections.section import Section

_UNIT = re.compile(r"(?<=\d) (?=%|[a-zA-Zµ]{1,2}\b)")
_WIDE = 100  # from here on all columns are tried
_LEAST_NAME = 16
_MOST_TEXT = 40
_MOST_NAME = 400
_WIDEST_SPARK = 72
_DELTA = 15  # cells of a bar from the middle


def sections(document: ReportDocument, options: ReportOptions, width: int) -> Iterator[Text]:
    """The core and a line for each other section; with `options.only` these sections in full."""
    only = options.only
    for section in core():
        if only is not None and section.key in only:
            yield from _full(section, document, options, width)
        elif only is None or CORE in only:
            value = section.value(document)  # nothing where there is nothing to show
            if sentence := section.summary(value):
                yield from heading(section.title, "", width)
                for part in wrapped(sentence, width - 2):
                    yield Text(" " + part)
            for table in section.tables(value):
                if table.brief:
                    yield from table_lines(table, options, width)
    if only is None:
        candidates = [
            (section.key, section.summary(value)) for section in shown(document) if (value := section.value(document))
        ]
        summaries = [(key, sentence) for key, sentence in candidates if sentence]
        if summaries:
            yield from heading("More", "add --only NAME to see one in full", width)
        widest = max((len(key) for key, _ in summaries), default=0)
        for key, sentence in summaries:
            for number, part in enumerate(wrapped(sentence, max(width - widest - 3, 20))):
                yield Text.assemble((f" {key if number == 0 else '':<{widest}}  ", "bold"), part)
        return
    for section in shown(document):
        if section.key in only:
            yield from _full(section, document, options, width)


def wrapped(sentence: str, width: int) -> list[str]:
    """Lines of a sentence; numbers stay with their units."""
    kept = _UNIT.sub("\u00a0", harmless(sentence))
    return [line.replace("\u00a0", " ") for line in textwrap.wrap(kept, width, break_on_hyphens=False)]


def _full(section: Section[Any, Any], document: ReportDocument, options: ReportOptions, width: int) -> Iterator[Text]:
    value = section.value(document)
    sentence = section.summary(value) if value else None
    yield from heading(section.title, section.note, width)
    tables = list(section.tables(value)) if value else []
    if not tables:
        # The reason for the section, else for what would stand in it.
        reasons = {entry["path"]: entry["reason"] for entry in document["absent"]}
        at = section.path or section.key
        inside = next((why for path, why in reasons.items() if path.startswith(at)), "not recorded")
        yield from paragraph(f"Nothing to show: {reasons.get(at) or inside}.", width)
    for part in wrapped(sentence or "", width - 2):
        yield Text(" " + part)
    for table in tables:
        yield from table_lines(table, options, width)


def table_lines(table: Table, options: ReportOptions, width: int) -> Iterator[Text]:
    """A declared table: heading, as many columns as there is room for, the first `options.top` rows."""
    rows = ordered(table, options)
    if not rows:
        return
    note = f"{len(rows)} of {units.count(len(table.rows))}" if len(rows) < len(table.rows) else ""
    yield from heading(table.title, " · ".join(part for part in (note, table.note) if part), width)
    last = next((c for c in reversed(table.columns) if c.kind in ("name", *PICTURES)), None)
    tried = [_Column(c, rows) for c in table.columns if c is not last and (c.narrow or width >= _WIDE)]
    # What is kept, else the first; of the others as many, from the left, as the width has room for.
    kept = [column for column in tried if column.declared.kept] or tried[:1]
    room = width - 1 - (_LEAST_NAME if last and last.kind == "name" else 0) - sum(column.size for column in kept)
    while room < 0 and last is None and (widest := max(kept, key=lambda column: column.size)).size > _LEAST_NAME:
        widest.size -= 1  # its texts wrap
        room += 1
    columns = []
    for column in tried:
        room -= 0 if column in kept else column.size
        if column in kept or room >= 0:
            columns.append(column)
    heads = [column.head for column in columns]
    cell_rows = list(zip(*(column.cells for column in columns), strict=True)) or [()] * len(rows)
    if last is None:
        wrapped: list[tuple[Cell, ...]] = []
        for row in cell_rows:  # texts that have too little room take several lines
            rooms = [column.size - 2 for column in columns]
            pieces = [
                textwrap.wrap(cell, room) if isinstance(cell, str) and len(cell) > room else [cell]
                for cell, room in zip(row, rooms, strict=True)
            ]
            wrapped += zip_longest(*pieces, fillvalue="")
        cell_rows = wrapped
    if last is not None and last.kind in PICTURES:
        key = last.key

        def bar(i: int, room: int) -> Text:
            value = rows[i].get(key)
            if isinstance(value, Bar):
                return stacked(value, room)
            return Text(sparkline(value or [], min(room, _WIDEST_SPARK)), CURVE)

        yield from with_bars(heads, cell_rows, bar, width)
        return

    def name(i: int, room: int) -> str:
        return short(_cell(last, rows[i].get(last.key)), room) if last else ""

    yield from lines(heads, cell_rows, (last.title if last else "", name), width)


class _Column:
    """A column that is tried: `size` cells of the terminal with the gap before it."""

    def __init__(self, declared: Col, rows: Sequence[Mapping[str, Any]]) -> None:
        values = [row.get(declared.key) for row in rows]
        # Before a heading stands the pattern of its part of the bar beside it.
        fill = (FILLS[declared.swatch], " ") if declared.swatch else ()
        self.declared = declared
        self.head = TextColumn(Text.assemble(*fill, (declared.title, "bold")), right=declared.numeric)
        self.cells: list[Cell] = [_cell(declared, value) for value in values]
        if declared.kind == "delta":
            differences: list[int] = [row[declared.key] for row in rows]
            largest = max(map(abs, differences))
            self.cells = [from_the_middle(difference, largest, _DELTA) for difference in differences]
        self.size = 2 + max(len(self.head.heading), *map(len, self.cells))


def _cell(column: Col, value: Any) -> str:
    shown_value = written(column, value)
    long = column.kind == "name" or column.kept
    return shown_value if column.numeric else short(shown_value, _MOST_NAME if long else _MOST_TEXT)
