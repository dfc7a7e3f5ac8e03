"""The list of baselines."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from rich.text import Text

from traceloom.analyze.gate.summary import Baseline
from traceloom.report.options import ReportOptions
from traceloom.report.sections.section import Col, Table
from traceloom.report.terminal.sections import table_lines

Row = dict[str, Any]


def row(name: str, baseline: Baseline) -> Row:
    """What the list tells of a baseline."""
    runs = baseline.runs
    wall = [run.wall_ns for run in runs if run.wall_ns]
    told = wall if len(wall) == len(runs) else [run.scalars["step_time"] for run in runs if run.steps]
    said = {value for run in runs for one in run.stated if one.condition == "device" for value in [one.value]}
    return {
        "name": name,
        "saved_unix_s": baseline.saved_unix_s,
        "runs": len(runs),
        "steps": sum(len(values) for values in told),
        "step_ns": round(float(np.mean([np.mean(values) for values in told]))) if told else None,
        "device": ", ".join(sorted(said)),
        "traceloom": baseline.traceloom,
    }


def render(rows: list[Row], top: int, width: int) -> Iterator[Text]:
    """The list as a table; `saved` of a row is when, in UTC."""
    shown = [one | {"when": f"{one['saved']:%Y-%m-%d %H:%M}"} for one in rows]
    columns = [
        Col("when", "Saved (UTC)"),
        Col("runs", "Runs", "count"),
        Col("steps", "Steps", "count"),
        Col("step_ns", "Mean step", "time"),
        Col("device", "Device", narrow=False),
        Col("name", "Name", "name"),
    ]
    yield from table_lines(Table("baselines", "Baselines", columns, shown), ReportOptions(top=top), width)
