"""A verdict as a page of its own, in the frame of the report's page."""

from __future__ import annotations

from typing import TYPE_CHECKING

from traceloom.report.comparison.page import standing
from traceloom.report.table import Col, Table
from traceloom.report.verdict.tables import headline, reasons, tables
from traceloom.report.views.html.frame import framed, one_after_the_other
from traceloom.report.views.html.text import text

if TYPE_CHECKING:
    from traceloom.report.documents.verdict import VerdictDocument


def render(document: VerdictDocument) -> str:
    """The verdict as one HTML page that needs nothing but itself."""
    name = f"{document['base']['name']} → {document['new']['name']}"
    paragraphs = "".join(f'<p class="quiet">{text(line)}</p>' for line in reasons(document))
    sides = (("base", document["base"]), ("new", document["new"]))
    runs = [{"side": name, **run} for name, side in sides for run in side["runs"]]
    run_columns = [
        Col("side", "Side"),
        Col("undisturbed_steps", "Undisturbed steps", "count"),
        Col("recorded_steps", "Recorded steps", "count"),
        Col("name", "Run", "name"),
    ]
    sections = [standing(each) for each in (*tables(document), Table("verdict-runs", "Runs", run_columns, runs))]
    return framed(
        title=f"{headline(document)} – {name}",
        name=name,
        headline=f"<h1>{text(headline(document))}</h1>{paragraphs}",
        footer=f"<p>Traceloom {text(document['traceloom'])}</p>",
        **one_after_the_other(sections),
    )
