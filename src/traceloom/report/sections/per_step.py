"""Kernels and operators of a usual step, with their spread over the steps."""

from __future__ import annotations

from collections.abc import Iterator

from traceloom.analyze.work_per_step import KERNELS, OPERATORS, WorkPerStep, work_per_step
from traceloom.model import Trace, units
from traceloom.report.absent import Absent
from traceloom.report.names import short
from traceloom.report.options import ReportOptions
from traceloom.report.sections.section import Row, Section, Study, on_rank
from traceloom.report.sections.shapes import ranked, record
from traceloom.report.table import Col, Table

_NAME = 48
_WHY = "the trace holds no whole step with such work"


def _measure(trace: Trace, _options: ReportOptions) -> WorkPerStep:
    return work_per_step(trace)


def _build(study: Study[WorkPerStep], absent: Absent) -> Row:
    out = {
        "kernels": absent.rows(study.concat(lambda measured: measured.kernels), "per_step.kernels"),
        "operators": absent.rows(study.concat(lambda measured: measured.operators), "per_step.operators"),
    }
    for name, rows in out.items():
        if not rows:
            absent.say(f"per_step.{name}")
    return out


def _tables(value: Row) -> Iterator[Table]:
    for name, column, what in (
        ("kernels", "total_ns", "summed duration of such GPU work launched in a step"),
        ("operators", "self_ns", "host time in the operator itself"),
    ):
        rows = value[name]
        if not rows:
            continue
        several = len({row["rank"] for row in rows}) > 1
        columns = [
            *([Col("rank", "Rank", "count")] if several else []),
            Col(f"mean_{column}", "Per step", "time", f"{what}, mean over the whole steps"),
            Col(f"min_{column}", "Least", "time", "in the step with the least of it", narrow=False),
            Col(f"max_{column}", "Most", "time", "in the step with the most of it"),
            Col("mean_call_count", "Calls", "number", "mean per step"),
            Col("step_count", "Steps", "count", "whole steps in which it occurs", narrow=False),
            Col("name", "Name", "name"),
        ]
        yield Table(f"per-step-{name}", name.capitalize(), columns, rows, f"per_step.{name}")


def _summary(value: Row) -> str | None:
    rows = value["kernels"] or value["operators"]
    if not rows:
        return None
    column = "total_ns" if value["kernels"] else "self_ns"
    top = max(rows, key=lambda row: float(row[f"mean_{column}"]))
    low, high = top[f"min_{column}"], top[f"max_{column}"]
    spread = "" if low == high else f" ({units.duration(low)} to {units.duration(high)})"
    mean = units.duration(round(top[f"mean_{column}"]))
    return f"the largest is {short(top['name'], _NAME)}{on_rank(top, rows)}: {mean} per step{spread}"


SECTION = Section(
    key="per_step",
    title="Per step",
    note="Kernels and operators of a usual step, and how far steps lie apart.",
    measure=_measure,
    build=_build,
    tables=_tables,
    summary=_summary,
    schema=record(
        {
            "kernels": ranked(KERNELS, what="GPU work by name and rank, per whole step; the largest mean first"),
            "operators": ranked(OPERATORS, what="self time of operators on the host, per whole step"),
        },
        what="work of a usual step, with its spread over the whole steps",
    ),
    reasons={"per_step.kernels": _WHY, "per_step.operators": _WHY},
)
