"""A comparison on a terminal: the sentence, what differs, then what changed, the largest differences first."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING, TextIO

from rich.text import Text

from traceloom.model import units
from traceloom.report.comparison.tables import tables
from traceloom.report.names import short
from traceloom.report.options import ReportOptions
from traceloom.report.views import terminal
from traceloom.report.views.terminal.columns import paragraph
from traceloom.report.views.terminal.look import DIM
from traceloom.report.views.terminal.sections import table_lines

if TYPE_CHECKING:
    from traceloom.report.documents.comparison import ComparisonDocument


def show(document: ComparisonDocument, top: int, stream: TextIO) -> None:
    """Write the comparison to a stream.

    Args:
        document: Of `traceloom.report.comparison.build`.
        top: Rows of each table.
        stream: Where to; with colours where it is a terminal.
    """
    terminal.put(partial(render, document, top), stream)


def render(document: ComparisonDocument, top: int, width: int) -> Iterator[Text]:
    """The lines, none wider than `width`."""
    yield from sides((document["base"]["name"], 1), (document["new"]["name"], 1), width)
    yield from paragraph(document["sentence"], width, "bold")
    for table in tables(document):
        # What differs is never cut short: it decides how the rest is read.
        rows = len(table.rows) if table.key in ("diff-conditions", "diff-parts") else top
        yield from table_lines(table, ReportOptions(top=rows), width)


def sides(base: tuple[str, int], new: tuple[str, int], width: int) -> Iterator[Text]:
    """What the base and the new side are called, and of how many runs each is where they are several."""
    for side, (name, runs) in (("base", base), ("new", new)):
        run_count = f" ({units.counted(runs, 'run')})" if runs > 1 else ""
        shown = short(name, width - 6 - len(run_count))
        yield Text.assemble((f"{side:<5}", DIM), (shown, "bold"), run_count)
    yield Text("")
