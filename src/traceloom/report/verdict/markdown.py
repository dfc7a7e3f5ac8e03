"""A verdict as Markdown for a pull request."""

from __future__ import annotations

from typing import TYPE_CHECKING

from traceloom.report.comparison.markdown import table_of
from traceloom.report.verdict.tables import headline, reasons, tables
from traceloom.report.views.markdown import code, text

if TYPE_CHECKING:
    from traceloom.report.documents.verdict import VerdictDocument

_MOST_ROWS = 10
_WHOLE = ("verdict-checks", "verdict-conditions")
_LEFT_OUT = ("diff-operators", "diff-host")  # a comment is read by people; the page has all
_SIGNS = {"pass": "✅", "fail": "❌", "inconclusive": "❔"}


def render(document: VerdictDocument) -> str:
    """The document as GitHub-flavoured Markdown, ended by a line end."""
    base, new = (code(side["name"], cell=False) for side in (document["base"], document["new"]))
    lines = [f"### Traceloom: {base} → {new}", ""]
    lines.append(f"{_SIGNS[document['verdict']]} **{text(headline(document))}**")
    for line in reasons(document):
        lines += ["", text(line)]
    for table in tables(document):
        if table.key not in _LEFT_OUT:
            whole = table.key in _WHOLE
            lines += table_of(table, len(table.rows) if whole else _MOST_ROWS, whole=whole)
    return "\n".join([*lines, "", f"<sub>traceloom {document['traceloom']}</sub>"]) + "\n"
