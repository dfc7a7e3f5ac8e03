"""A verdict as a page of its own, in the frame of the report's page."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape
from string import Template
from typing import Any

from traceloom.report.html import page as frame
from traceloom.report.html.cells import Column, text
from traceloom.report.html.table import table
from traceloom.report.sections.section import Col, Table
from traceloom.report.verdict.tables import headline, reasons, tables

Row = dict[str, Any]
_UNKNOWN = {"base_kernel": "the base does not launch it", "new_kernel": "the new run does not launch it"}


def render(document: Row) -> str:
    """The verdict as one HTML page that needs nothing but itself."""
    sections = list(_sections(document))
    name = f"{document['base']['name']} → {document['new']['name']}"
    script, theme = frame.page_script(), frame.page_asset("theme.js")
    style = "\n".join(frame.page_asset(one) for one in frame.STYLES)
    told = "".join(f'<p class="quiet">{text(line)}</p>' for line in reasons(document))
    page = Template(frame.page_asset("page.html")).substitute(
        policy=frame.page_policy([theme, script], style),
        title=text(f"{headline(document)} – {name}"),
        theme=theme,
        style=style,
        name=text(name),
        ranks="",
        headline=f"<h1>{text(headline(document))}</h1>{told}",
        numbers="",
        links="".join(f'<a href="#{key}">{title}</a>' for key, title, _, _ in sections),
        sections="\n".join(frame.page_section(*section) for section in sections),
        footer=f"<p>Traceloom {text(document['traceloom'])}</p>",
        data="",
        script=script,
    )
    return page.encode("utf-8", "replace").decode("utf-8")  # names from JSON may hold halves of surrogate pairs


def _sections(document: Row) -> Iterator[tuple[str, str, str, str]]:
    for one in (*tables(document), _runs(document)):
        columns = [Column(c.key, c.title, c.kind, c.hint) for c in one.columns]
        drawn = table(one.key, columns, one.rows, _UNKNOWN, one.title)
        yield f"{one.key}-section", escape(one.title), text(one.note), drawn


def _runs(document: Row) -> Table:
    rows = [{"side": side, **run} for side in ("base", "new") for run in document[side]["runs"]]
    columns = [
        Col("side", "Side"),
        Col("undisturbed_steps", "Undisturbed steps", "count"),
        Col("recorded_steps", "Recorded steps", "count"),
        Col("name", "Run", "name"),
    ]
    return Table("verdict-runs", "Runs", columns, rows)
