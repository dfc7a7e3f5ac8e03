"""A comparison as a page of its own, in the frame of the report's page."""

from __future__ import annotations

from html import escape
from typing import Any

from traceloom.model import units
from traceloom.report.comparison.tables import tables
from traceloom.report.table import Col, Table
from traceloom.report.views.html.bars import bar, legend
from traceloom.report.views.html.frame import framed, one_after_the_other
from traceloom.report.views.html.table import table
from traceloom.report.views.html.text import text

Row = dict[str, Any]

_COLOURS = {"compute": "compute", "communication": "communication", "copies": "memory", "operators": "op"}
_REASONS = {"base_kernel": "the base does not launch it", "new_kernel": "the new run does not launch it"}


def render(document: Row) -> str:
    """The comparison as one HTML page that needs nothing but itself."""
    name = f"{document['base']['name']} → {document['new']['name']}"
    sections = [(f"{t.key}-section", escape(t.title), text(t.note), _drawn(t)) for t in tables(document)]
    files = [{"side": side, **entry} for side in ("base", "new") for entry in document[side]["inputs"]]
    columns = [
        Col("side", "Side"),
        Col("rank", "Rank", "count"),
        Col("events", "Events", "count"),
        Col("path", "File", "name"),
    ]
    inputs = Table("diff-inputs", "Files", columns, files)
    sections.append(("diff-data-section", "Data", "What was read.", _drawn(inputs)))
    # Both steps as bars of one scale
    longest = max(document["base_ns"], document["new_ns"], 1)
    out = []
    for side in ("base", "new"):
        sums: dict[str, int] = {}  # by kind: idle time as one
        for row in document["breakdown"]:
            kind = row["part"].split(":")[0]
            sums[kind] = sums.get(kind, 0) + row[f"{side}_ns"]
        parts = [(kind, _COLOURS.get(kind, "idle"), ns) for kind, ns in sums.items()]
        whole = document[f"{side}_ns"]
        out.append(
            f'<p class="quiet">{side}: {units.duration(whole)}</p>{bar(parts, whole, longest)}{legend(parts, whole)}'
        )

    def steps(side: str) -> str:
        count = sum(row["side"] == side for row in document["steps"])
        return f"mean of {count} steps" if count > 1 else "one step"

    change = document["difference_ns"] / max(document["base_ns"], 1)
    shown = [
        ("Base step", document["base_ns"], steps("base")),
        ("New step", document["new_ns"], steps("new")),
        ("Difference", document["difference_ns"], f"{change:+.1%} of the base".replace("%", " %")),
    ]
    items = "".join(
        f'<div><dt>{label}</dt><dd><b title="{ns} ns">{units.duration(ns)}</b><span>{more}</span></dd></div>'
        for label, ns, more in shown
    )
    return framed(
        title=f"{document['sentence']} – {name}",
        name=name,
        headline=f'<h1>{text(document["sentence"])}</h1><div class="answer-bar">' + "".join(out) + "</div>",
        numbers=f'<dl class="key">{items}</dl>',
        footer=(
            f"<p>Traceloom {text(document['traceloom'])}</p>"
            "<p>The same numbers for programs: <code>traceloom diff … -o diff.json</code></p>"
        ),
        **one_after_the_other(sections),
    )


def _drawn(data_table: Table) -> str:
    columns = [Col(c.key, c.title, c.kind, c.hint) for c in data_table.columns]
    return table(data_table.key, columns, data_table.rows, _REASONS, data_table.title)
