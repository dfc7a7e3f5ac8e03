"""A verdict as Markdown for a pull request."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from traceloom.report.comparison.markdown import table_of
from traceloom.report.verdict.tables import headline, reasons, tables
from traceloom.report.views.markdown import code, text

Row = dict[str, Any]
_MOST_ROWS = 10
_WHOLE = ("verdict-checks", "verdict-conditions")
_LEFT_OUT = ("diff-operators",)  # a comment is read by people; the page has all
_SIGNS = {"pass": "✅", "fail": "❌", "inconclusive": "❔"}


def render(document: Row) -> str:
    """The document as GitHub-flavoured Markdown, ended by a line end."""
    return "\n".join(_lines(document)) + "\n"


def _lines(document: Row) -> Iterator[str]:
    yield f"### Traceloom: {code(document['base']['name'])} → {code(document['new']['name'])}"
    yield ""
    yield f"{_SIGNS[document['verdict']]} **{text(headline(document))}**"
    for line in reasons(document):
        yield ""
        yield text(line)
    for table in tables(document):
        if table.key not in _LEFT_OUT:
            yield from table_of(
                table, len(table.rows) if table.key in _WHOLE else _MOST_ROWS, whole=table.key in _WHOLE
            )
    yield ""
    yield f"<sub>traceloom {document['traceloom']}</sub>"
