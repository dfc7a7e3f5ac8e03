"""What to know about the data."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence

from rich.text import Text

from traceloom.harmless import harmless
from traceloom.report.notices import said_once
from traceloom.report.options import ReportOptions
from traceloom.report.table import Cells
from traceloom.report.views.terminal.columns import heading
from traceloom.report.views.terminal.look import DIM, SEVERITY


def notices(rows: Sequence[Cells], ranks: int, options: ReportOptions, width: int) -> Iterator[Text]:
    """What the user must know about the data of so many ranks, worst first."""
    distinct = said_once(rows, ranks)
    messages = []
    for notice in distinct:
        weakens = f"; weakens {', '.join(notice.weakens)}" if notice.weakens else ""
        messages.append((notice.severity, f"{notice.sentence}{weakens} [{notice.slug}]"))
    yield from notice_lines(messages[: options.top], width)
    if len(distinct) > options.top:
        yield Text(f" … and {len(distinct) - options.top} more, in the JSON report", DIM)


def notice_lines(messages: Sequence[tuple[str, str]], width: int) -> Iterator[Text]:
    """Severity and text of each; nothing where there are none."""
    if messages:
        yield from heading("Notices", "what to know about the data", width)
    for severity, message in messages:
        first, *rest = textwrap.wrap(harmless(message), max(width - 4, 20), break_on_hyphens=False)
        yield Text.assemble(" ", SEVERITY[severity], " ", first)
        yield from (Text("   " + line) for line in rest)
