"""A sweep as a document, as a table, and on a terminal."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from rich.text import Text

from traceloom import __version__
from traceloom.model import units
from traceloom.report.names import short
from traceloom.report.table import Row
from traceloom.report.views.terminal.columns import TextColumn, heading, lines
from traceloom.simulate.sweeps import SweepTable

FORMAT = "traceloom-sweep"
VERSION = 1
_ROWS = 20


def build(table: SweepTable, name: str) -> Row:
    """The document: every point, and what the time depends on.

    Args:
        table: The answers.
        name: The workload, as the user named it.
    """
    return {"format": FORMAT, "version": VERSION, "traceloom": __version__, "name": name, **table.to_dict()}


def render(document: Row, width: int) -> Iterator[Text]:
    """The lines on a terminal: the points that nobody beats, the quickest of the others, what the time depends on."""
    keys = document["keys"]
    answered = [row for row in document["points"] if row["time_ns"] is not None]
    refused = [row for row in document["points"] if row["time_ns"] is None]
    answered.sort(key=lambda row: (not row["pareto"], row["time_ns"]))
    yield Text(short(document["name"], width), "bold")
    best = sum(row["pareto"] for row in answered)
    note = f"{best} of {len(answered)} that none beats in time and cost per sample and in ranks (*)"
    yield from heading("Points", note, width)
    optional: dict[str, Callable[[Row], str]] = {
        "ranks": lambda row: f"{row['ranks']:,}",
        "p10_ns": lambda row: units.duration(row["p10_ns"]),
        "p90_ns": lambda row: units.duration(row["p90_ns"]),
        "cost": lambda row: f"{row['cost']:.3g}",
        "memory_bytes": lambda row: units.size(row["memory_bytes"]),
    }
    shown = {
        name: cell
        for name, cell in optional.items()
        if name not in keys and any(row[name] is not None for row in answered)
    }
    rows: list[list[str | Text]] = [
        [
            "*" if row["pareto"] else "",
            *(parameter_text(row[key]) for key in keys),
            units.duration(row["time_ns"]),
            *(units.NONE if row[name] is None else cell(row) for name, cell in shown.items()),
        ]
        for row in answered[:_ROWS]
    ]
    titles = ["", *keys, "time", *(name.removesuffix("_ns").removesuffix("_bytes") for name in shown)]
    yield from lines([TextColumn(title) for title in titles], rows, ("", lambda *_: ""), width)
    if len(answered) > _ROWS:
        yield Text(f" and {len(answered) - _ROWS:,} more: -o sweep.csv has all")
    if refused:
        yield from heading("No answer", units.counted(len(refused), "point"), width)
        counts: dict[str, int] = {}
        for row in refused:
            counts[row["reason"]] = counts.get(row["reason"], 0) + 1
        reasons = sorted(counts.items(), key=lambda item: -item[1])[:_ROWS]
        cells: list[list[str | Text]] = [[f"{count:,}"] for _, count in reasons]
        yield from lines([TextColumn("points")], cells, ("why", lambda i, room: short(reasons[i][0], room)), width)
    depends = document["sensitivities"]
    if depends:
        yield from heading("Sensitivity", "per cent of the time per per cent of a parameter, between neighbours", width)
        cells = [[row["parameter"], *(f"{row[name]:+.3f}" for name in ("median", "low", "high"))] for row in depends]
        columns = [TextColumn("", right=False), *(TextColumn(name) for name in ("median", "least", "most"))]
        yield from lines(columns, cells, ("", lambda *_: ""), width)


def parameter_text(value: Any) -> str:
    """The value of a parameter, in few digits."""
    return f"{value:g}" if isinstance(value, float) else str(value)
