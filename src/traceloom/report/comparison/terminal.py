"""A comparison on a terminal: the sentence, what differs, then what changed, the largest differences first."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import TextIO

from rich.text import Text

from traceloom.model import units
from traceloom.report.comparison.tables import tables
from traceloom.report.names import short
from traceloom.report.options import ReportOptions
from traceloom.report.table import Row
from traceloom.report.views import terminal
from traceloom.report.views.terminal.columns import paragraph
from traceloom.report.views.terminal.look import DIM
from traceloom.report.views.terminal.sections import table_lines


def show(document: Row, top: int, stream: TextIO) -> None:
    """Write the comparison to a stream.

    Args:
        document: Of `traceloom.report.comparison.build`.
        top: Rows of each table.
        stream: Where to; with colours where it is a terminal.
    """
    terminal.put(partial(render, document, top), stream)


def render(document: Row, top: int, width: int) -> Iterator[Text]:
    """The lines, none wider than `width`."""
    yield from sides(document, width)
    yield from paragraph(document["sentence"], width, "bold")
    for table in tables(document):
        # What differs is never cut short: it decides how the rest is read.
        rows = len(table.rows) if table.key in ("diff-conditions", "diff-parts") else top
        yield from table_lines(table, ReportOptions(top=rows), width)


def sides(document: Row, width: int) -> Iterator[Text]:
    """What the base and the new side are called, and of how many runs each is where they are several."""
    for side in ("base", "new"):
        many = len(document[side].get("runs", ()))
        run_count = f" ({units.counted(many, 'run')})" if many > 1 else ""
        name = short(document[side]["name"], width - 6 - len(run_count))
        yield Text.assemble((f"{side:<5}", DIM), (name, "bold"), run_count)
    yield Text("")
