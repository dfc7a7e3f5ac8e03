"""The sections beyond the core: a line for each, or in full those that were asked for."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Callable, Iterator
from typing import Any

from rich.text import Text

from traceloom.harmless import harmless
from traceloom.model import units
from traceloom.report.names import short
from traceloom.report.options import ReportOptions, ordered
from traceloom.report.sections import shown
from traceloom.report.sections.section import Col, Section, Table
from traceloom.report.views.terminal.columns import Column, lines
from traceloom.report.views.terminal.time import heading

Row = dict[str, Any]
_UNIT = re.compile(r"(?<=\d) (?=%|[a-zA-Zµ]{1,2}\b)")
_WIDE = 100  # from here on all columns are tried
_LEAST_NAME = 16
_MOST_TEXT = 40
_WRITTEN: dict[str, Callable[[Any], str]] = {
    "time": units.duration,
    "bytes": units.size,
    "count": units.count,
    "number": units.number,
    "flops": units.flops,
    "flop_rate": units.flop_rate,
    "byte_rate": units.byte_rate,
}


def sections(document: Row, options: ReportOptions, width: int) -> Iterator[Text]:
    """A line for each section; with `options.only` these sections in full."""
    if options.only is None:
        yield from _lines(document, width)
        return
    for section in shown(document):
        if section.key in options.only:
            yield from _full(section, document, options, width)


def _lines(document: Row, width: int) -> Iterator[Text]:
    candidates = [
        (section.key, section.summary(document[section.key]))
        for section in shown(document)
        if document.get(section.key)
    ]
    summaries = [(key, sentence) for key, sentence in candidates if sentence]
    if not summaries:
        return
    yield from heading("More", "add --only NAME to see one in full", width)
    widest = max(len(key) for key, _ in summaries)
    for key, sentence in summaries:
        parts = _wrapped(sentence, max(width - widest - 3, 20))
        for number, part in enumerate(parts):
            yield Text.assemble((f" {key if number == 0 else '':<{widest}}  ", "bold"), part)


def _wrapped(sentence: str, width: int) -> list[str]:
    """Lines of a sentence; numbers stay with their units."""
    kept = _UNIT.sub("\u00a0", harmless(sentence))
    return [line.replace("\u00a0", " ") for line in textwrap.wrap(kept, width, break_on_hyphens=False)]


def _full(section: Section[Any], document: Row, options: ReportOptions, width: int) -> Iterator[Text]:
    value = document.get(section.key)
    sentence = section.summary(value) if value else None
    yield from heading(section.title, section.note, width)
    tables = list(section.tables(value)) if value else []
    if not tables:
        # The reason for the section, else for what would stand in it.
        reasons = {entry["path"]: entry["reason"] for entry in document["absent"]}
        inside = next((why for path, why in reasons.items() if path.startswith(section.key)), "not recorded")
        for part in textwrap.wrap(f"Nothing to show: {reasons.get(section.key) or inside}.", width - 2):
            yield Text(" " + part)
    for part in _wrapped(sentence or "", width - 2):
        yield Text(" " + part)
    for table in tables:
        yield from table_lines(table, options, width)


def table_lines(table: Table, options: ReportOptions, width: int) -> Iterator[Text]:
    """A declared table: heading, as many columns as there is room for, the first `options.top` rows."""
    rows = ordered(list(table.rows), options)
    if not rows:
        return
    note = f"{len(rows)} of {units.count(len(table.rows))}" if len(rows) < len(table.rows) else ""
    yield from heading(table.title, " · ".join(part for part in (note, table.note) if part), width)
    name = next((c for c in reversed(table.columns) if c.kind == "name"), None)
    columns = [c for c in table.columns if c is not name and (c.narrow or width >= _WIDE)]
    cells = [[_cell(column, row.get(column.key)) for row in rows] for column in columns]
    columns, cells = _fitting(columns, cells, width - (_LEAST_NAME if name else 0))
    heads = [Column(c.title, right=c.kind not in ("text", "name")) for c in columns]

    def last(i: int, room: int) -> str:
        return short(_cell(name, rows[i].get(name.key)), room) if name else ""

    cell_rows = [[column[i] for column in cells] for i in range(len(rows))]
    yield from lines(heads, cell_rows, (name.title if name else "", last), width)


def _fitting(columns: list[Col], cells: list[list[str]], width: int) -> tuple[list[Col], list[list[str]]]:
    """As many columns, from the left, as the width has room for; always the first."""
    used, fitting = 1, 0
    for column, texts in zip(columns, cells, strict=True):
        used += 2 + max(len(column.title), *(len(cell) for cell in texts))
        if used > width and fitting:
            break
        fitting += 1
    return columns[:fitting], cells[:fitting]


def _cell(column: Col, value: Any) -> str:
    if value is None:
        return "-"
    if column.kind == "share":
        return units.share(value, 1.0)
    if column.kind == "name":
        return harmless(str(value))
    write = _WRITTEN.get(column.kind)
    return write(value) if write else short(harmless(str(value)), _MOST_TEXT)
