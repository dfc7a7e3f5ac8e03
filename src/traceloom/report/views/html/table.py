"""Tables: real ones, that print and copy; the script only sorts, filters and unfolds what stands here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from traceloom.model.units import EXACT, common_scale
from traceloom.report.table import Col
from traceloom.report.views.html.cells import NAME_LENGTH, cells
from traceloom.report.views.html.text import text

MOST_ROWS = 2_000  # of one table in the page; the JSON report has all
_FEW = 7  # columns
_FILTER_FROM = 13  # rows; a filter over fewer is clutter


def table(
    identity: str,
    columns: Sequence[Col],
    rows: Sequence[Mapping[str, Any]],
    reasons: Mapping[str, str],
    label: str,
    *,
    most: int = MOST_ROWS,
) -> str:
    """A figure with one table.

    Args:
        identity: Its id in the page and in the address.
        columns: What to show; a row lacks what it does not know.
        rows: In the order to be shown first; `range` (start-end in ns) lets a row be shown in the timeline.
        reasons: Why a column's unknown values are unknown, by key.
        label: What the table is about, for readers that do not see it.
        most: How many rows it has at most.
    """
    kept = rows[:most]
    columns = [column for column in columns if column.kind != "spark"]
    values = {column.key: [row.get(column.key) for row in kept] for column in columns}
    scales: dict[str, list[Any]] = {}
    for column in columns:
        scales.setdefault(column.scale or column.key, []).extend(values[column.key])
    units = [common_scale(column.kind, scales[column.scale or column.key]) for column in columns]
    shown = [cells(c, values[c.key], unit, reasons.get(c.key, "")) for c, unit in zip(columns, units, strict=True)]
    heads = "".join(_head(column, unit) for column, (_, unit) in zip(columns, units, strict=True))
    full = [_full(columns, row) for row in kept]
    body = "\n".join(f"<tr{more}>{''.join(row)}</tr>" for more, *row in zip(full, *shown, strict=True))
    # A few short columns stand close together, so that the eye finds the way along a row.
    narrow = len(columns) <= _FEW and not any(column.kind in ("name", "bar") for column in columns)
    search = rest = ""
    if len(kept) >= _FILTER_FROM:
        search = (
            f'<div class="filter"><input type="search" placeholder="Filter {len(kept)} rows" '
            f'aria-label="Filter: {escape(label)}" autocomplete="off" spellcheck="false">'
            '<span class="count" role="status"></span></div>'
        )
    if len(rows) > most:
        rest = (
            f'<p class="quiet">The first {most:,} of {len(rows):,} rows; '
            "<code>traceloom report -o report.json</code> has all of them.</p>"
        ).replace(",", "\u202f")
    return (
        f'<figure class="table{" narrow" if narrow else ""}" id="{identity}">{search}'
        f'<div class="scroll" tabindex="0" role="region" aria-label="{escape(label)}">'
        f'<table><caption class="unseen">{escape(label)}</caption>'
        f"<thead><tr>{heads}</tr></thead><tbody>{body}</tbody></table></div>"
        f'<button type="button" class="more" hidden></button>{rest}</figure>'
    )


def _head(column: Col, unit: str) -> str:
    small = f" <small>{unit}</small>" if unit else ""
    swatch = f'<i class="swatch b-{column.swatch}"></i>' if column.swatch else ""
    hint = f' title="{escape(column.hint)}"' if column.hint else ""
    look = ' class="n"' if column.numeric else ' class="bar"' if column.kind == "bar" else ""
    inside = f"{swatch}{escape(column.title)}{small}"
    if column.kind != "bar":
        inside = f'<button type="button"{hint}>{inside}</button>'
    exact = f' data-exact="{EXACT[column.kind]}"' if column.kind in EXACT else ""
    return f'<th scope="col"{look} data-key="{column.key}"{exact}>{inside}</th>'


def _full(columns: Sequence[Col], row: Mapping[str, Any]) -> str:
    """What the script needs of a row: whole names for the filter where cells show them cut, the range of time."""
    names = [str(row[c.key]) for c in columns if c.kind == "name" and row.get(c.key) is not None]
    whole = " ".join(name for name in names if len(name) > NAME_LENGTH)
    full = f' data-full="{text(whole)}"' if whole else ""
    return full + (f' data-range="{row["range"]}"' if "range" in row else "")
