"""A comparison as Markdown for a pull request."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from traceloom.report.comparison.tables import tables
from traceloom.report.table import Table, written
from traceloom.report.views.markdown import code, table, text

if TYPE_CHECKING:
    from traceloom.report.documents.comparison import ComparisonDocument

_MOST_ROWS = 10


def render(document: ComparisonDocument) -> str:
    """The document as GitHub-flavoured Markdown, ended by a line end."""
    base, new = (code(side["name"], cell=False) for side in (document["base"], document["new"]))
    lines = [f"### Traceloom: {base} → {new}", ""]
    lines.append(f"**{text(document['sentence'])}**")
    for data_table in tables(document):
        # What differs, and what the step consists of, is never cut short.
        most = len(data_table.rows) if data_table.key in ("diff-conditions", "diff-parts") else _MOST_ROWS
        lines += table_of(data_table, most, whole=data_table.key == "diff-conditions")
    return "\n".join([*lines, "", f"<sub>traceloom {document['traceloom']}</sub>"]) + "\n"


def table_of(declared: Table, most: int, *, whole: bool = False) -> Iterator[str]:
    """A declared table: at most so many rows, all its columns where `whole`, else the narrow ones."""
    # The first column is text, so what a row is about stands first.
    columns = sorted((column for column in declared.columns if column.narrow), key=lambda column: column.kind != "name")
    columns = list(declared.columns) if whole else columns
    rows = [
        [(code if column.kind == "name" else text)(written(column, row.get(column.key))) for column in columns]
        for row in declared.rows[:most]
    ]
    yield from table(f"{declared.title}: {columns[0].title}", [column.title for column in columns[1:]], rows)
    if len(declared.rows) > most:
        yield f"| … and {len(declared.rows) - most} more |{' |' * (len(columns) - 1)}"
