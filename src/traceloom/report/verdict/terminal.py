"""A verdict on a terminal: the sentence, each check, what is to know, then what changed."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING, TextIO

from rich.text import Text

from traceloom.report.comparison.terminal import sides
from traceloom.report.options import ReportOptions
from traceloom.report.verdict.tables import headline, reasons, tables
from traceloom.report.views import terminal
from traceloom.report.views.terminal.columns import paragraph
from traceloom.report.views.terminal.sections import table_lines

if TYPE_CHECKING:
    from traceloom.report.documents.verdict import VerdictDocument

_WHOLE = ("verdict-checks", "verdict-conditions", "diff-parts")  # never cut short
_LEFT_OUT = ("diff-kernels", "diff-operators", "diff-host")  # causes has the largest of them; files have all
_COLOURS = {"pass": "bold green", "fail": "bold red", "inconclusive": "bold yellow"}


def show(document: VerdictDocument, top: int, stream: TextIO) -> None:
    """Write the verdict to a stream; tables have at most `top` rows."""
    terminal.put(partial(render, document, top), stream)


def render(document: VerdictDocument, top: int, width: int) -> Iterator[Text]:
    """The lines, none wider than `width`."""
    base, new = ((side["name"], len(side["runs"])) for side in (document["base"], document["new"]))
    yield from sides(base, new, width)
    yield from paragraph(headline(document), width, _COLOURS[document["verdict"]])
    for line in reasons(document):
        yield from paragraph(line, width)
    for table in tables(document):
        if table.key in _LEFT_OUT:
            continue
        rows = len(table.rows) if table.key in _WHOLE else top
        yield from table_lines(table, ReportOptions(top=rows), width)


def say(document: VerdictDocument, stream: TextIO) -> None:
    """The sentence alone."""
    terminal.put(lambda width: paragraph(headline(document), width, _COLOURS[document["verdict"]]), stream)
