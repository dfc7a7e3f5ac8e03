"""A sweep as a document, as a table, and on a terminal."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, TypeGuard

from rich.text import Text

from traceloom import __version__
from traceloom.model import units
from traceloom.model.frames import rows
from traceloom.report.names import short
from traceloom.report.table import Cells
from traceloom.report.views.terminal.columns import Cell, TextColumn, heading, lines
from traceloom.simulate.sweeps import SweepTable, SweptValue

if TYPE_CHECKING:
    from traceloom.report.documents.sweep import AnsweredPointRow, SweepDocument, SweepPointRow

FORMAT = "traceloom-sweep"
VERSION = 1
_ROWS = 20


def build(table: SweepTable, name: str) -> SweepDocument:
    """The document: every point, and what the time depends on.

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
        "points": rows(table.points),
        "sensitivities": rows(table.sensitivities),
    }


def answered_points(points: Iterable[SweepPointRow]) -> list[AnsweredPointRow]:
    """The points that have a time, in their order."""

    def has_time(point: SweepPointRow) -> TypeGuard[AnsweredPointRow]:
        return point["time_ns"] is not None

    return [point for point in points if has_time(point)]


def parameter(point: Cells, key: str) -> SweptValue:
    """The value of a parameter at a point: its key is the user's, and in no type."""
    value: SweptValue = point[key]
    return value


def render(document: SweepDocument, width: int) -> Iterator[Text]:
    """The lines on a terminal: the points that nobody beats, the quickest of the others, what the time depends on."""
    keys = document["keys"]
    answered = answered_points(document["points"])
    refused = [row for row in document["points"] if row["time_ns"] is None]
    answered.sort(key=lambda row: (not row["pareto"], row["time_ns"]))
    yield Text(short(document["name"], width), "bold")
    best = sum(row["pareto"] for row in answered)
    note = f"{best} of {len(answered)} that none beats in time and cost per sample and in ranks (*)"
    yield from heading("Points", note, width)
    optional: dict[str, Callable[[AnsweredPointRow], str]] = {
        "ranks": lambda row: units.NONE if row["ranks"] is None else f"{row['ranks']:,}",
        "p10_ns": lambda row: units.duration(row["p10_ns"]),
        "p90_ns": lambda row: units.duration(row["p90_ns"]),
        "cost": lambda row: units.NONE if row["cost"] is None else f"{row['cost']:.3g}",
        "memory_bytes": lambda row: units.size(row["memory_bytes"]),
    }
    shown = {
        name: cell
        for name, cell in optional.items()
        if name not in keys and any(cell(row) != units.NONE for row in answered)
    }
    points: list[list[Cell]] = [
        [
            "*" if row["pareto"] else "",
            *(parameter_text(parameter(row, key)) for key in keys),
            units.duration(row["time_ns"]),
            *(cell(row) for cell in shown.values()),
        ]
        for row in answered[:_ROWS]
    ]
    titles = ["", *keys, "time", *(name.removesuffix("_ns").removesuffix("_bytes") for name in shown)]
    yield from lines([TextColumn(title) for title in titles], points, ("", lambda *_: ""), width)
    if len(answered) > _ROWS:
        yield Text(f" and {len(answered) - _ROWS:,} more: -o sweep.csv has all")
    if refused:
        yield from heading("No answer", units.counted(len(refused), "point"), width)
        reasons = Counter(row["reason"] or "unknown" for row in refused).most_common(_ROWS)
        cells: list[list[Cell]] = [[f"{count:,}"] for _, count in reasons]
        yield from lines([TextColumn("points")], cells, ("why", lambda i, room: short(reasons[i][0], room)), width)
    depends = document["sensitivities"]
    if depends:
        yield from heading("Sensitivity", "per cent of the time per per cent of a parameter, between neighbours", width)
        cells = [
            [row["parameter"], *(f"{value:+.3f}" for value in (row["median"], row["low"], row["high"]))]
            for row in depends
        ]
        columns = [TextColumn("", right=False), *(TextColumn(name) for name in ("median", "least", "most"))]
        yield from lines(columns, cells, ("", lambda *_: ""), width)


def parameter_text(value: SweptValue) -> str:
    """The value of a parameter, in few digits."""
    return f"{value:g}" if isinstance(value, float) else str(value)
