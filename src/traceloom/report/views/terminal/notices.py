"""What to know about the data."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from typing import Any

from rich.text import Text

from traceloom.harmless import harmless
from traceloom.report.notices import said_once
from traceloom.report.options import ReportOptions
from traceloom.report.views.terminal.columns import heading
from traceloom.report.views.terminal.look import DIM, SEVERITY

Row = dict[str, Any]


def notices(document: Row, options: ReportOptions, width: int) -> Iterator[Text]:
    """What the user must know about the data, worst first."""
    distinct = said_once(document["notices"], len(document["ranks"]))
    if not distinct:
        return
    yield from heading("Notices", "what to know about the data", width)
    for notice in distinct[: options.top]:
        sign, style = SEVERITY[notice.severity]
        weakens = f"; weakens {', '.join(notice.weakens)}" if notice.weakens else ""
        message = harmless(f"{notice.sentence}{weakens} [{notice.slug}]")
        first, *rest = textwrap.wrap(message, max(width - 4, 20), break_on_hyphens=False)
        yield Text.assemble(" ", (sign, style), " ", first)
        for line in rest:
            yield Text("   " + line)
    if len(distinct) > options.top:
        yield Text(f" … and {len(distinct) - options.top} more, in the JSON report", DIM)
