"""A replay on a terminal: the answer, what it cannot tell, then where time was lost or won."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from rich.text import Text

from traceloom.report.names import short
from traceloom.report.notices import with_ranks
from traceloom.report.options import ReportOptions
from traceloom.report.replayed.tables import tables
from traceloom.report.views.terminal.columns import heading, paragraph
from traceloom.report.views.terminal.sections import table_lines

if TYPE_CHECKING:
    from traceloom.report.documents import ReplayDocument

_ROWS = 8
_LEFT_TO_FILES = "replay-contents"  # the page and the JSON have it; a limit says what matters of it


def render(document: ReplayDocument, width: int) -> Iterator[Text]:
    """The lines, none wider than `width`."""
    yield Text(short(document["source"], width), "bold")
    yield Text("")
    yield from paragraph(document["sentence"], width, "bold")
    for notice, sentence in with_ranks(document["notices"]):
        if notice["severity"] != "info":
            yield from paragraph(f"{notice['severity']}: {sentence} [{notice['slug']}]", width)
    for each in tables(document):
        if each.key != _LEFT_TO_FILES:
            yield from table_lines(each, ReportOptions(top=_ROWS), width)
    if document["limits"]:
        yield from heading("What it cannot show", "", width)
        for limit in document["limits"]:
            yield from paragraph(limit, width)
