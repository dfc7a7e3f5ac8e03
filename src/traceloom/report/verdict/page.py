"""A verdict as a page of its own, in the frame of the report's page."""

from __future__ import annotations

from html import escape
from typing import Any

from traceloom.report.table import Col, Table
from traceloom.report.verdict.tables import headline, reasons, tables
from traceloom.report.views.html.frame import framed, one_after_the_other
from traceloom.report.views.html.table import table
from traceloom.report.views.html.text import text

Row = dict[str, Any]
_UNKNOWN = {"base_kernel": "the base does not launch it", "new_kernel": "the new run does not launch it"}


def render(document: Row) -> str:
    """The verdict as one HTML page that needs nothing but itself."""
    name = f"{document['base']['name']} → {document['new']['name']}"
    paragraphs = "".join(f'<p class="quiet">{text(line)}</p>' for line in reasons(document))
    sections = []
    runs = [{"side": side, **run} for side in ("base", "new") for run in document[side]["runs"]]
    run_columns = [
        Col("side", "Side"),
        Col("undisturbed_steps", "Undisturbed steps", "count"),
        Col("recorded_steps", "Recorded steps", "count"),
        Col("name", "Run", "name"),
    ]
    for data_table in (*tables(document), Table("verdict-runs", "Runs", run_columns, runs)):
        columns = [Col(c.key, c.title, c.kind, c.hint) for c in data_table.columns]
        drawn = table(data_table.key, columns, data_table.rows, _UNKNOWN, data_table.title)
        sections.append((f"{data_table.key}-section", escape(data_table.title), text(data_table.note), drawn))
    return framed(
        title=f"{headline(document)} – {name}",
        name=name,
        headline=f"<h1>{text(headline(document))}</h1>{paragraphs}",
        footer=f"<p>Traceloom {text(document['traceloom'])}</p>",
        **one_after_the_other(sections),
    )
