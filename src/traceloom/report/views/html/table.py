"""Tables: their columns stand in the page as data; the script draws the rows that are looked at, sorts and filters.

Numbers stand there as they are, each distinct text once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from traceloom.harmless import harmless
from traceloom.model import units
from traceloom.model.columns.everywhere import IDENTITY
from traceloom.report.island import island
from traceloom.report.names import label, short
from traceloom.report.table import Bar, Col
from traceloom.report.views.html.text import prose

MOST_ROWS = 2_000  # of one table in the page; the JSON report has all
NAME_LENGTH = 64


def table(
    identity: str,
    columns: Sequence[Col],
    rows: Sequence[Mapping[str, Any]],
    reasons: Mapping[str, str],
    label: str,
    *,
    most: int = MOST_ROWS,
    whole: str = "traceloom report -o report.json",
) -> str:
    """A figure with one table. Its first name comes first, so that rows are told apart on every screen.

    Args:
        identity: Its id in the page and in the address.
        columns: What to show; a row lacks what it does not know. What is 0 or unknown in all rows is only named.
        rows: In the order to be shown first; `range` (start-end in ns) lets a row be shown in the timeline.
        reasons: Why a column's unknown values are unknown, by key.
        label: What the table is about, for readers that do not see it.
        most: How many rows it has at most.
        whole: What writes all of them.
    """
    kept = rows[:most]
    lead = next((column for column in columns if column.kind == "name"), None)
    ordered = sorted((column for column in columns if column.kind != "spark"), key=lambda column: column is not lead)
    shown, zero, unknown = [], [], []
    for column in ordered:
        values = [row.get(column.key) for row in kept]
        if kept and all(value is None or value == "" for value in values):
            reason = reasons.get(column.key)
            unknown.append(column.title + (f" ({reason})" if reason else ""))
        elif kept and column.numeric and column.key not in IDENTITY and not any(values):
            zero.append(column.title)
        else:
            shown.append(packed(column, values, reasons.get(column.key, "")))
    data: dict[str, Any] = {"label": label, "rows": len(kept), "columns": shown}
    if any("range" in row for row in kept):
        data["ranges"] = [row.get("range") for row in kept]
    notes = []
    if len(rows) > most:
        notes.append(
            f"The first {units.count(most)} of {units.count(len(rows))} rows; "
            f"<code>{escape(whole)}</code> has all of them."
        )
    if zero or unknown:
        parts = [", ".join(zero) + ": 0 in all rows"] * bool(zero) + [", ".join(unknown) + ": unknown"] * bool(unknown)
        notes.append(f"Not shown: {prose('; '.join(parts))}.")
    after = "".join(f'<p class="quiet">{note}</p>' for note in notes)
    return f'<figure class="table" id="{escape(identity)}">{island(data)}{after}</figure>'


def packed(column: Col, values: list[Any], reason: str) -> dict[str, Any]:
    """What `cells.js` draws a column from.

    Args:
        column: Its declaration.
        values: Of all rows; None where unknown.
        reason: Why they are unknown.
    """
    entry = {"key": column.key, "title": column.title, "kind": column.kind, "hint": column.hint,
            "swatch": column.swatch, "scale": column.scale, "why": reason if None in values else ""}  # fmt: skip
    entry = {name: value for name, value in entry.items() if value}
    if column.numeric or column.kind in ("bar", "delta"):
        bars = (
            [v.whole, v.longest or v.whole, [list(part) for part in v.parts if part[2]]] if isinstance(v, Bar) else v
            for v in values
        )
        return {**entry, "values": list(bars)}
    places: dict[Any, int] = {}
    at = [-1 if value is None else places.setdefault(str(value), len(places)) for value in values]
    texts: list[str | list[str]] = []
    for value in places:  # a name that is too long as [what is shown, all of it]
        whole = harmless(value)
        cut = short(whole, NAME_LENGTH) if column.kind == "name" else label(value)
        texts.append(whole if cut == whole else [cut, whole])
    return {**entry, "texts": texts, "at": at}
