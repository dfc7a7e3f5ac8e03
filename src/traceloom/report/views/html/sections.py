"""The sections beyond the core in the page: a sentence, a picture, tables."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape
from typing import Any

from traceloom.model import units
from traceloom.report.sections import shown
from traceloom.report.sections.section import Table
from traceloom.report.views.html.absence import Reasons
from traceloom.report.views.html.cells import Column, text
from traceloom.report.views.html.table import MOST_ROWS, table

Row = dict[str, Any]
_MOST_ROWS_OF_MANY = 500  # of one table, where the page is about many ranks


def sections(document: Row, reasons: Reasons, *, few: bool = True) -> Iterator[tuple[str, str, str, str]]:
    """Id, title, note and body of each section that was made; of many ranks, tables have fewer rows of each."""
    most = MOST_ROWS if few else _MOST_ROWS_OF_MANY
    for section in shown(document):
        value = document.get(section.key)
        tables = list(section.tables(value)) if value else []
        picture = section.picture(value) if value else ""
        name = section.key.replace("_", "-")
        if not tables and not picture:
            # Why the section is missing, else why something that would stand in it is.
            paths = [entry["path"] for entry in document.get("absent") or [] if entry["path"].startswith(section.key)]
            path = section.key if section.key in paths else next(iter(paths), section.key)
            yield name, section.title, section.note, reasons.line(path, section.title)
            continue
        body, sentence = "", section.summary(value)
        if sentence:
            ended = sentence if sentence.endswith((".", "!", "?")) else f"{sentence}."
            body = f'<p class="sentence">{text(ended[0].upper() + ended[1:])}</p>'
        body += picture + _table(tables[0], reasons, most, alone=len(tables) == 1) if tables else picture
        body += "".join(_folded(data_table, reasons, most) for data_table in tables[1:])
        yield name, section.title, section.note, body


def _folded(data_table: Table, reasons: Reasons, most: int) -> str:
    """A table that is not the first one of its section: a line that unfolds."""
    size = f"{units.count(len(data_table.rows))} {'row' if len(data_table.rows) == 1 else 'rows'}"
    head = f'<summary><h3>{escape(data_table.title)}</h3> <span class="quiet">{size}</span></summary>'
    return f'<details class="fold">{head}{_table(data_table, reasons, most, alone=True)}</details>'


def _table(data_table: Table, reasons: Reasons, most: int, *, alone: bool) -> str:
    columns = [Column(c.key, c.title, c.kind, c.hint) for c in data_table.columns]
    head = "" if alone else f"<h3>{escape(data_table.title)}</h3>"
    note = f'<p class="quiet">{text(data_table.note)}</p>' if data_table.note else ""
    why = reasons.columns(data_table.path) if data_table.path else {}
    return head + note + table(data_table.key, columns, data_table.rows, why, data_table.title, most=most)
