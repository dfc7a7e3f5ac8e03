"""The end of the page: notices about the data, the inputs, and how it was recorded."""

from __future__ import annotations

import json
from typing import Any

from traceloom.report.html.absence import Reasons
from traceloom.report.html.cells import Column, text
from traceloom.report.html.table import table

Row = dict[str, Any]
_LONGEST = 400  # characters of one setting


def notices(document: Row, reasons: Reasons) -> str:
    """What the reader must know about the data itself, the worst first."""
    rows = document.get("notices") or []
    if not rows:
        return '<p class="quiet">Nothing to note: every event was read, and nothing in the data looks wrong.</p>'
    marked = [{**row, "grade": f'<b class="grade {text(row["severity"])}">{text(row["severity"])}</b>'} for row in rows]
    columns = [
        Column("grade", "Severity", "html"),
        Column("message", "Notice"),
        Column("count", "Events", "count"),
        *((Column("rank", "Rank", "count"),) if any(row.get("rank") is not None for row in rows) else ()),
        Column("slug", "Name", "text", "look it up in docs/reference/messages.md"),
    ]
    return table("notice-table", columns, marked, reasons.columns("notices"), "Notices")


def inputs(document: Row, reasons: Reasons) -> str:
    """The files that were read, and what they say about their recording."""
    rows = [
        {
            **row,
            "versions": _pairs(row.get("versions")),
            "settings": _settings(row.get("settings")),
        }
        for row in document.get("inputs") or []
    ]
    columns = [
        Column("path", "File", "name"),
        Column("rank", "Rank", "count"),
        Column("world_size", "Of", "count", "ranks of the job"),
        Column("host", "Host"),
        Column("events", "Events", "count"),
        Column("settings", "Recorded"),
        Column("versions", "Versions"),
    ]
    return table("input-table", columns, rows, _input_reasons(reasons), "Inputs") + _capture(document, reasons)


def _input_reasons(reasons: Reasons) -> dict[str, str]:
    silent = {"versions": "the file names no versions", "settings": "the file does not tell its settings"}
    return {**reasons.columns("inputs"), **silent}


def _pairs(values: Row | None) -> str | None:
    return ", ".join(f"{key} {value}" for key, value in values.items()) if values else None


def _settings(values: Row | None) -> str | None:
    """The settings that are on, in words; null where the file does not tell."""
    if not values:
        return None
    on = [key.replace("_", " ") for key, value in values.items() if value]
    return ", ".join(on) if on else "none of " + ", ".join(key.replace("_", " ") for key in values)


def _capture(document: Row, reasons: Reasons) -> str:
    capture = document.get("capture")
    if not capture:
        return reasons.line("capture", "Capture settings")
    rows = "".join(
        f"<div><dt>{text(key.replace('_', ' '))}</dt><dd>{_value(value)}</dd></div>"
        for key, value in capture.items()
        if value not in (None, [], {}, "")
    )
    return f'<h3>Capture</h3><dl class="settings">{rows}</dl>'


def _value(value: Any) -> str:
    if isinstance(value, dict) and all(not isinstance(v, (dict, list)) for v in value.values()):
        pairs = (
            f"<span>{text(k.replace('_', ' '))} <b>{text(v)}</b></span>" for k, v in value.items() if v is not None
        )
        return "".join(pairs)
    shown = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return text(shown if len(shown) <= _LONGEST else shown[: _LONGEST - 1] + "…")
