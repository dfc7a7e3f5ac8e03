"""Kernels and operators of a usual step, with their spread over the steps."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from traceloom.analyze.work_per_step import KERNELS, OPERATORS, WorkPerStep, work_per_step
from traceloom.model import Trace, units
from traceloom.report.absent import Absent
from traceloom.report.names import short
from traceloom.report.options import ReportOptions
from traceloom.report.sections.section import Section, Study, on_rank, table
from traceloom.report.sections.shapes import Part
from traceloom.report.table import Cells, Table

if TYPE_CHECKING:
    from traceloom.report.documents.sections import PerStepValue

_NAME = 48
_NOT_SAID = {"rank": "the trace does not say"}
_WHY = "the trace holds no whole step with such work"


class PerStepSection(Section[WorkPerStep, "PerStepValue"]):
    """Work of a usual step."""

    key, title = "per_step", "Per step"
    note = "Kernels and operators of a usual step, and how far steps lie apart."
    what = "work of a usual step, with its spread over the whole steps"
    parts = {
        "kernels": Part(
            KERNELS, "GPU work by name and rank, per whole step; the largest mean first", _NOT_SAID, empty=_WHY
        ),
        "operators": Part(OPERATORS, "self time of operators on the host, per whole step", _NOT_SAID, empty=_WHY),
    }

    def measure(self, trace: Trace, options: ReportOptions) -> WorkPerStep:
        return work_per_step(trace)

    def build(self, study: Study[WorkPerStep], absent: Absent) -> PerStepValue:
        return self.lists(study.frames(self.parts), absent)

    def tables(self, value: PerStepValue) -> Iterator[Table]:
        tables: list[tuple[str, str, Sequence[Cells]]] = [
            ("kernels", "total_ns", value["kernels"]),
            ("operators", "self_ns", value["operators"]),
        ]
        for name, time, rows in tables:
            if rows:
                columns = ["?rank", f"mean_{time}", f"+min_{time}", f"max_{time}", "mean_call_count", "+step_count",
                           "name"]  # fmt: skip
                yield table(f"per_step.{name}", name.capitalize(), columns, rows)

    def summary(self, value: PerStepValue) -> str | None:
        rows: Sequence[Cells] = value["kernels"] or value["operators"]
        if not rows:
            return None
        time = "total_ns" if value["kernels"] else "self_ns"
        top = max(rows, key=lambda row: float(row[f"mean_{time}"]))
        low, high = top[f"min_{time}"], top[f"max_{time}"]
        spread = "" if low == high else f" ({units.duration(low)} to {units.duration(high)})"
        mean = units.duration(round(top[f"mean_{time}"]))
        return f"the largest is {short(top['name'], _NAME)}{on_rank(top, rows)}: {mean} per step{spread}"


SECTION = PerStepSection()
