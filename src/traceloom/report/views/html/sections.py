"""The sections in the page: a sentence, a picture, tables."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape
from typing import TYPE_CHECKING, Any

from traceloom.model import units
from traceloom.report.names import rank_name
from traceloom.report.sections import core, shown
from traceloom.report.sections.section import Section
from traceloom.report.table import Table
from traceloom.report.views.html.absence import Reasons
from traceloom.report.views.html.navigation import PageSection
from traceloom.report.views.html.table import MOST_ROWS, table
from traceloom.report.views.html.text import prose

if TYPE_CHECKING:
    from traceloom.report.documents import ReportDocument

MOST_RANKS = 64  # whose own tables stand in the page
_MOST_ROWS_OF_MANY = 500  # of one table, where the page is about many ranks


def sections(document: ReportDocument, near: ReportDocument, reasons: Reasons) -> Iterator[PageSection]:
    """The sections that were made; of many ranks, tables have fewer rows of each.

    Args:
        document: The report.
        near: The same with only the ranks that are shown one by one.
        reasons: Why values are unknown.
    """
    for section in (*core(), *shown(document)):
        anchor = section.anchor or section.key.replace("_", "-")
        sentence = section.summary(value) if (value := section.value(document)) else None
        if sentence:
            sentence = sentence[0].upper() + sentence[1:] + ("" if sentence.endswith((".", "!", "?")) else ".")
        body = _body(section, document, near, reasons, sentence or "")
        yield PageSection(section.key, anchor, section.title, section.note, body, sentence or "")


def _body(
    section: Section[Any, Any], document: ReportDocument, near: ReportDocument, reasons: Reasons, sentence: str
) -> str:
    most = MOST_ROWS if near is document else _MOST_ROWS_OF_MANY
    value, shown_value = section.value(document), section.value(near)
    tables = [t for t in section.tables(value) if t.position is None] if value else []
    of_ranks = [t for t in section.tables(shown_value) if t.position is not None] if shown_value else []
    picture = section.picture(shown_value) if shown_value else ""
    if not tables and not of_ranks and not picture:
        # Why the section is missing, else why something that would stand in it is.
        path = section.path or section.key
        paths = [entry["path"] for entry in document.get("absent") or [] if entry["path"].startswith(path)]
        if section.nothing and path not in paths:
            return f'<p class="quiet">{section.nothing}</p>'
        return reasons.line(path if path in paths else next(iter(paths), path), section.title)
    body = (f'<p class="sentence">{prose(sentence)}</p>' if sentence else "") + picture
    if tables:
        body += drawn(tables[0], reasons, most, alone=len(tables) == 1 and not of_ranks)
    for each in tables[1:]:  # lines that unfold
        size = f"{units.count(len(each.rows))} {'row' if len(each.rows) == 1 else 'rows'}"
        head = f'<summary><h3>{escape(each.title)}</h3> <span class="quiet">{size}</span></summary>'
        body += f'<details class="fold">{head}{drawn(each, reasons, most, alone=True)}</details>'
    for position, rank in enumerate(near["ranks"][:MOST_RANKS] if of_ranks else ()):
        own = [each for each in of_ranks if each.position == position]
        inside = "".join(drawn(each, reasons, most, alone=not tables) for each in own)
        if not own:
            inside = reasons.line(section.path or section.key, f"{section.title} of {rank_name(rank, position)}")
        body += inside if len(near["ranks"]) == 1 else f'<div data-of-rank="{position}">{inside}</div>'
    if definition := section.definition(value):
        body += f'<details class="definition"><summary>How it is counted</summary>{definition}</details>'
    return body


def drawn(data_table: Table, reasons: Reasons, most: int = MOST_ROWS, *, alone: bool = True) -> str:
    """One table with its picture; with heading unless it stands alone in its section."""
    head = "" if alone else f"<h3>{escape(data_table.title)}</h3>"
    note = f'<p class="quiet">{prose(data_table.note)}</p>' if data_table.note else ""
    why = {**(reasons.columns(data_table.path) if data_table.path else {}), **(data_table.unknown or {})}
    figure = table(data_table.key, data_table.columns, data_table.rows, why, data_table.title, most=most)
    return head + note + data_table.picture + figure
