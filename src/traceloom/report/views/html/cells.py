"""Columns of a table as the page carries them: numbers as they are, each distinct text once; the script writes them."""

from __future__ import annotations

from typing import Any

from traceloom.harmless import harmless
from traceloom.report.names import label, short
from traceloom.report.table import Bar, Col

NAME_LENGTH = 64


def packed(column: Col, values: list[Any], reason: str) -> dict[str, Any]:
    """What `cells.js` draws a column from.

    Args:
        column: Its declaration.
        values: Of all rows; None where unknown.
        reason: Why they are unknown.
    """
    told = {"key": column.key, "title": column.title, "kind": column.kind, "hint": column.hint,
            "swatch": column.swatch, "scale": column.scale, "why": reason if None in values else ""}  # fmt: skip
    told = {name: value for name, value in told.items() if value}
    if column.numeric or column.kind == "bar":
        return {**told, "values": [_bar(value) if isinstance(value, Bar) else value for value in values]}
    places: dict[Any, int] = {}
    at = [-1 if value is None else places.setdefault(str(value), len(places)) for value in values]
    return {**told, "texts": [_text(column, value) for value in places], "at": at}


def _text(column: Col, value: str) -> str | list[str]:
    """A text; a name that is too long as [what is shown, all of it]."""
    whole = harmless(value)
    cut = short(whole, NAME_LENGTH) if column.kind == "name" else label(value)
    return whole if cut == whole else [cut, whole]


def _bar(value: Bar) -> list[Any]:
    return [value.whole, value.longest or value.whole, [list(part) for part in value.parts if part[2]]]
