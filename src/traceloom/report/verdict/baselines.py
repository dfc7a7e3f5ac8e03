"""The list of baselines."""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np
from rich.text import Text

from traceloom.analyze.gate.summary import Baseline
from traceloom.report.options import ReportOptions
from traceloom.report.table import Col, Table
from traceloom.report.views.terminal.sections import table_lines

if TYPE_CHECKING:
    from traceloom.report.documents.verdict import BaselineRow


def row(name: str, baseline: Baseline) -> BaselineRow:
    """The row of a baseline in the list."""
    runs = baseline.runs
    wall = [run.wall_ns for run in runs if run.wall_ns]
    step_times = wall if len(wall) == len(runs) else [run.scalars["step_time"] for run in runs if run.steps]
    devices = {value for run in runs for fact in run.stated if fact.condition == "device" for value in [fact.value]}
    return {
        "name": name,
        "saved_unix_s": baseline.saved_unix_s,
        "runs": len(runs),
        "steps": sum(len(values) for values in step_times),
        "step_ns": round(float(np.mean([np.mean(values) for values in step_times]))) if step_times else None,
        "device": ", ".join(sorted(devices)),
        "traceloom": baseline.traceloom,
    }


def render(rows: list[BaselineRow], top: int, width: int) -> Iterator[Text]:
    """The list as a table."""
    shown = [
        {**entry, "when": f"{dt.datetime.fromtimestamp(entry['saved_unix_s'], dt.timezone.utc):%Y-%m-%d %H:%M}"}
        for entry in rows
    ]
    columns = [
        Col("when", "Saved (UTC)"),
        Col("runs", "Runs", "count"),
        Col("steps", "Steps", "count"),
        Col("step_ns", "Mean step", "time"),
        Col("device", "Device", narrow=False),
        Col("name", "Name", "name"),
    ]
    yield from table_lines(Table("baselines", "Baselines", columns, shown), ReportOptions(top=top), width)
