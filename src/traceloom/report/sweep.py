"""Results of `traceloom simulate --sweep`: document, page and terminal."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from html import escape
from typing import TYPE_CHECKING, TypeGuard

from rich.text import Text

from traceloom import __version__
from traceloom.report.document import Cells, Col
from traceloom.report.figure import escape_html
from traceloom.report.labels import fit_name
from traceloom.report.views.page import list_sections, render_key_numbers, render_page
from traceloom.report.views.page_table import render_html_table
from traceloom.report.views.terminal_table import Cell, TextColumn, render_heading, render_table
from traceloom.system import units
from traceloom.system.sanitize import sanitize
from traceloom.trace.frames import to_rows
from traceloom.workload.simulate.sweep import SweepTable, SweptValue

if TYPE_CHECKING:
    from traceloom.report.documents.predictions import (
        AnsweredPointRow,
        SweepDocument,
        SweepPointRow,
    )


FORMAT = "traceloom-sweep"
VERSION = 1
_MAX_ROWS = 20


def build(table: SweepTable, name: str) -> SweepDocument:
    """Builds the document: every point, and the sensitivity of the time to each parameter.

    Args:
        table: The answers.
        name: The workload, as the user named it.
    """
    return {
        "format": FORMAT,
        "version": VERSION,
        "traceloom": __version__,
        "name": name,
        "keys": list(table.keys),
        "points": to_rows(table.points),
        "sensitivities": to_rows(table.sensitivities),
    }


def select_answered_points(points: Iterable[SweepPointRow]) -> list[AnsweredPointRow]:
    """Returns the points that have a time, in their order."""

    def has_time(point: SweepPointRow) -> TypeGuard[AnsweredPointRow]:
        return point["time_ns"] is not None

    return [point for point in points if has_time(point)]


def get_parameter(point: Cells, key: str) -> SweptValue:
    """Returns the value of a parameter at a point: its key is chosen by the user, so no type
    declares it.
    """
    value: SweptValue = point[key]
    return value


def render_sweep(document: SweepDocument, width: int) -> Iterator[Text]:
    """Yields the lines on a terminal: the Pareto-optimal points, the fastest of the others, the
    sensitivities.
    """
    keys = document["keys"]
    answered = select_answered_points(document["points"])
    refused = [row for row in document["points"] if row["time_ns"] is None]
    answered.sort(key=lambda row: (not row["pareto"], row["time_ns"]))
    yield Text(fit_name(document["name"], width), "bold")
    best = sum(row["pareto"] for row in answered)
    note = f"{best} of {len(answered)} that none beats in time and cost per sample and in ranks (*)"
    yield from render_heading("Points", note, width)
    optional: dict[str, Callable[[AnsweredPointRow], str]] = {
        "ranks": lambda row: units.UNKNOWN_TEXT if row["ranks"] is None else f"{row['ranks']:,}",
        "p10_ns": lambda row: units.format_duration(row["p10_ns"]),
        "p90_ns": lambda row: units.format_duration(row["p90_ns"]),
        "cost": lambda row: units.UNKNOWN_TEXT if row["cost"] is None else f"{row['cost']:.3g}",
        "memory_bytes": lambda row: units.format_size(row["memory_bytes"]),
    }
    visible_columns = {
        name: cell
        for name, cell in optional.items()
        if name not in keys and any(cell(row) != units.UNKNOWN_TEXT for row in answered)
    }
    points: list[list[Cell]] = [
        [
            "*" if row["pareto"] else "",
            *(format_parameter(get_parameter(row, key)) for key in keys),
            units.format_duration(row["time_ns"]),
            *(cell(row) for cell in visible_columns.values()),
        ]
        for row in answered[:_MAX_ROWS]
    ]
    titles = [
        "",
        *keys,
        "time",
        *(name.removesuffix("_ns").removesuffix("_bytes") for name in visible_columns),
    ]
    yield from render_table(
        [TextColumn(title) for title in titles], points, ("", lambda *_: ""), width
    )
    if len(answered) > _MAX_ROWS:
        yield Text(f" and {len(answered) - _MAX_ROWS:,} more: -o sweep.csv has all")
    if refused:
        yield from render_heading("No answer", units.format_quantity(len(refused), "point"), width)
        reasons = Counter(row["reason"] or "unknown" for row in refused).most_common(_MAX_ROWS)
        cells: list[list[Cell]] = [[f"{count:,}"] for _, count in reasons]
        yield from render_table(
            [TextColumn("points")],
            cells,
            ("why", lambda i, room: fit_name(reasons[i][0], room)),
            width,
        )
    depends = document["sensitivities"]
    if depends:
        yield from render_heading(
            "Sensitivity",
            "per cent of the time per per cent of a parameter, between neighbours",
            width,
        )
        cells = [
            [
                row["parameter"],
                *(f"{value:+.3f}" for value in (row["median"], row["low"], row["high"])),
            ]
            for row in depends
        ]
        columns = [
            TextColumn("", right=False),
            *(TextColumn(name) for name in ("median", "least", "most")),
        ]
        yield from render_table(columns, cells, ("", lambda *_: ""), width)


def format_parameter(value: SweptValue) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


_WIDTH, _HEIGHT, _LEFT, _RIGHT, _TOP, _BOTTOM = 1000, 300, 84, 230, 14, 40
_MAX_CURVES = 10  # of one figure, the fastest first; more cannot be distinguished
_COLOURS = (
    "accent",
    "c-communication",
    "c-memory",
    "path",
    "c-optimizer",
    "c-backward",
    "c-sync",
    "c-launch",
    "ink",
    "c-loading",
)


def render(document: SweepDocument) -> str:
    """Renders the document as one self-contained HTML page.

    Args:
        document: The result of `traceloom.report.sweep.build`.
    """
    answered = sorted(select_answered_points(document["points"]), key=lambda row: row["time_ns"])
    best, worst = answered[0], answered[-1]
    name = document["name"]
    times = f"{units.format_duration(best['time_ns'])} to {units.format_duration(worst['time_ns'])}"
    headline = f"{units.format_quantity(len(answered), 'point')}: {times}"
    numbers = [
        (
            "Quickest",
            units.format_duration(best["time_ns"]),
            _describe_point(best, document["keys"]),
        ),
        (
            "Slowest",
            units.format_duration(worst["time_ns"]),
            _describe_point(worst, document["keys"]),
        ),
        (
            "Not beaten",
            str(sum(row["pareto"] for row in answered)),
            "in time and cost per sample and in ranks",
        ),
    ]
    return render_page(
        title=f"Sweep: {headline} – {name}",
        name=f"Sweep: {name}",
        headline=f"<h1>{escape_html(headline)}</h1>",
        numbers=render_key_numbers((label, value, "", detail) for label, value, detail in numbers),
        footer=(
            f"<p>Traceloom {escape_html(document.get('traceloom', ''))}</p>"
            "<p>The same for programs: <code>-o sweep.json</code>, <code>.csv</code>, <code>.parquet</code></p>"
        ),
        **list_sections(_render_sections(document, answered)),
    )


def _describe_point(point: AnsweredPointRow, keys: Sequence[str]) -> str:
    return ", ".join(f"{key} {format_parameter(get_parameter(point, key))}" for key in keys)


def _render_sections(
    document: SweepDocument, answered: list[AnsweredPointRow]
) -> Iterator[tuple[str, str, str, str]]:
    keys = document["keys"]
    for number, key in enumerate(keys):
        curves_html = _draw_curves(answered, key, [other for other in keys if other != key])
        if curves_html:
            note = "The time over this parameter, a line for each choice of the others; a band from P10 to P90."
            yield f"over-{number}", f"Over {escape_html(key)}", note, curves_html
    if document["sensitivities"]:
        depends = (
            Col("parameter", "Parameter", "name"),
            Col("median", "Median", "number"),
            Col("low", "Least", "number"),
            Col("high", "Most", "number"),
        )
        body = render_html_table(
            "sensitivity-table", depends, document["sensitivities"], {}, "Sensitivity"
        )
        yield (
            "sensitivity",
            "Sensitivity",
            "Per cent of the time per per cent of a parameter, between neighbours.",
            body,
        )
    points = sorted(
        document["points"],
        key=lambda row: (row["time_ns"] is None, not row["pareto"], row["time_ns"] or 0),
    )
    rows: list[Cells] = [{**row, "mark": "*" if row["pareto"] else ""} for row in points]
    swept = [Col(key, key, "number" if _is_numeric(rows, key) else "text") for key in keys]
    remaining_columns = [
        Col("time_ns", "Time", "time"),
        Col("p10_ns", "P10", "time"),
        Col("p90_ns", "P90", "time"),
        Col("ranks", "Ranks", "count"),
        Col("cost", "Cost", "number"),
        Col("memory_bytes", "Memory", "bytes"),
        Col("flags", "To be known"),
        Col("reason", "Why not"),
    ]
    empty = {name for name in ("flags", "reason") if not any(row[name] for row in rows)}
    columns = (
        Col("mark", "*", hint="no other point beats it"),
        *swept,
        *(c for c in remaining_columns if c.key not in {*keys, *empty}),
    )
    body = render_html_table(
        "points-table", columns, rows, {}, "Points", full_command="-o sweep.csv"
    )
    yield "points", "Points", "Those that none beats come first, then the quickest.", body


def _is_numeric(rows: Sequence[Cells], key: str) -> bool:
    return all(isinstance(row[key], (int, float)) for row in rows)


def _draw_curves(rows: Sequence[AnsweredPointRow], key: str, other_keys: Sequence[str]) -> str:
    """Draws the time over one parameter; empty where it is not a number, or has one value."""

    def at(point: Cells) -> float:
        value: float = point[key]  # a number at every point, otherwise nothing is drawn
        return value

    values = sorted(set(map(at, rows))) if _is_numeric(rows, key) else []
    if len(values) < 2:
        return ""
    curves: dict[tuple[SweptValue, ...], list[AnsweredPointRow]] = {}
    for row in rows:  # the fastest first, and so the fastest curves
        curves.setdefault(tuple(get_parameter(row, other) for other in other_keys), []).append(row)
    visible = list(curves.items())[:_MAX_CURVES]
    highest: float = max(row["p90_ns"] or row["time_ns"] for _, points in visible for row in points)
    logarithmic = values[0] > 0 and values[-1] / values[0] >= 8

    def x(value: float) -> float:
        low, high, scaled = (
            math.log(v) if logarithmic else float(v) for v in (values[0], values[-1], value)
        )
        return _LEFT + (_WIDTH - _LEFT - _RIGHT) * float((scaled - low) / (high - low))

    def y(time_ns: float) -> float:
        return _TOP + (_HEIGHT - _TOP - _BOTTOM) * (1 - time_ns / highest)

    ink = 'fill="currentColor"'
    parts = []
    for share in (0, 0.5, 1):
        level = f"{y(share * highest):.1f}"
        parts.append(
            f'<line stroke="var(--grid)" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{level}" y2="{level}"/>'
        )
        tick = units.format_duration(round(share * highest))
        parts.append(
            f'<text x="{_LEFT - 8}" y="{level}" dy="4" text-anchor="end" {ink}>{tick}</text>'
        )
    label_attributes = f'y="{_HEIGHT - _BOTTOM + 18}" text-anchor="middle" {ink}'
    parts += [
        f'<text x="{x(v):.1f}" {label_attributes}>{format_parameter(v)}</text>'
        for v in values[:: -(-len(values) // 12)]
    ]
    for number, (choice, unordered) in enumerate(visible):
        points = sorted(unordered, key=at)
        colour = f"var(--{_COLOURS[number]})"
        label = escape(
            sanitize(
                ", ".join(
                    f"{other.removeprefix('network.')} {format_parameter(v)}"
                    for other, v in zip(other_keys, choice, strict=True)
                )
            )
        )
        band = [
            (x(at(row)), y(row["p10_ns"]), y(row["p90_ns"]))
            for row in points
            if row["p10_ns"] is not None and row["p90_ns"] is not None
        ]
        if len(band) > 1:
            edge = [f"{across:.1f} {high:.1f}" for across, _, high in band]
            edge += [f"{across:.1f} {low:.1f}" for across, low, _ in reversed(band)]
            parts.append(f'<path d="M{"L".join(edge)}Z" fill="{colour}" fill-opacity=".12"/>')
        line = "L".join(f"{x(at(row)):.1f} {y(row['time_ns']):.1f}" for row in points)
        parts.append(f'<path d="M{line}" fill="none" stroke="{colour}" stroke-width="2"/>')
        for row in points:
            title = escape(
                f"{key} {format_parameter(at(row))}: {units.format_duration(row['time_ns'])}"
            )
            centre = f'cx="{x(at(row)):.1f}" cy="{y(row["time_ns"]):.1f}"'
            parts.append(
                f'<circle {centre} r="3.5" fill="{colour}"><title>{title} {label}</title></circle>'
            )
        top = _TOP + 16 * number + 10
        legend_x = _WIDTH - _RIGHT + 14
        parts.append(f'<rect x="{legend_x}" y="{top - 9}" width="10" height="10" fill="{colour}"/>')
        parts.append(
            f'<text x="{legend_x + 15}" y="{top}" fill="currentColor">{label or "time"}</text>'
        )
    caption = f"Time over {key}" + (
        f"; {len(curves) - len(visible)} slower choices are not drawn"
        if len(curves) > len(visible)
        else ""
    )
    return (
        f"<figure><figcaption>{escape(sanitize(caption))}.</figcaption>"
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" width="100%" role="img" font-family="system-ui, sans-serif" '
        f'font-size="12" aria-label="{escape(sanitize(caption))}">'
        f"{''.join(parts)}</svg></figure>"
    )
