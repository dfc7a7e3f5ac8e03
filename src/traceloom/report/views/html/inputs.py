"""Notices about the data, and the files that were read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from traceloom.report.table import Cells, Col
from traceloom.report.views.html.absence import Reasons
from traceloom.report.views.html.table import table

if TYPE_CHECKING:
    from traceloom.report.documents import ReportDocument


def notices(rows: Sequence[Cells], reasons: Reasons) -> str:
    """What the reader must know about the data itself, the worst first."""
    if not rows:
        return '<p class="quiet">Nothing to note: every event was read, and nothing in the data looks wrong.</p>'
    marked = [
        {
            **row,
            "weakens": "; ".join(f"{effect['part']}: {effect['how']}" for effect in row.get("affects", [])),
        }
        for row in rows
    ]
    columns = [
        Col("severity", "Severity", "grade"),
        Col("message", "Notice"),
        Col("weakens", "Weakens", "text", "parts of the report that are less certain for it"),
        Col("count", "Events", "count"),
        *((Col("rank", "Rank", "count"),) if any(row.get("rank") is not None for row in rows) else ()),
        Col("slug", "Name", "text", "traceloom explain NAME says what it means"),
    ]
    return table("notice-table", columns, marked, reasons.columns("notices"), "Notices")


def runs(document: ReportDocument, reasons: Reasons) -> str:
    """The runs that the inputs hold, with the command that reports each alone."""
    columns = [
        Col("name", "Run", "name"),
        Col("sentence", "Answer"),
        Col("ranks", "Ranks", "count", "traces at hand"),
        Col("world_size", "Of", "count", "ranks of the job"),
        Col("window_ns", "Window", "time"),
        Col("steps", "Steps", "count"),
        Col("events", "Events", "count"),
        Col("command", "Report it alone", "name"),
    ]
    return table("run-table", columns, document["runs"], reasons.columns("runs"), "Runs")


def inputs(document: ReportDocument, reasons: Reasons) -> str:
    """The files that were read, and what they say about their recording."""
    rows = []
    for row in document.get("inputs") or []:
        versions = ", ".join(f"{key} {value}" for key, value in (row.get("versions") or {}).items())
        settings = {key.replace("_", " "): value for key, value in (row.get("settings") or {}).items()}
        on = ", ".join(name for name, value in settings.items() if value) or "none of " + ", ".join(settings)
        rows.append({**row, "versions": versions or None, "settings": on if settings else None})
    columns = [
        Col("path", "File", "name"),
        Col("rank", "Rank", "count"),
        Col("world_size", "Of", "count", "ranks of the job"),
        Col("host", "Host"),
        Col("events", "Events", "count"),
        Col("settings", "Recorded"),
        Col("versions", "Versions"),
    ]
    why_unknown = {
        **reasons.columns("inputs"),
        "versions": "the file names no versions",
        "settings": "the file does not record its settings",
    }
    return table("input-table", columns, rows, why_unknown, "Inputs")
