"""Steps that took longer than the others can explain, and what was different in them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from traceloom import analyze
from traceloom.analyze.across.rank_part import RankPart
from traceloom.analyze.across.slow_steps import DIFFERENCE_SCHEMA, LEAST_STEPS, STEP_SCHEMA
from traceloom.model import units
from traceloom.report.absent import Absent
from traceloom.report.sections.of_ranks import RanksSection
from traceloom.report.sections.section import Study, table
from traceloom.report.sections.shapes import Part
from traceloom.report.table import Table

if TYPE_CHECKING:
    from traceloom.report.documents.sections import SlowStepsValue

_MOST = 200


class SlowStepsSection(RanksSection["SlowStepsValue"]):
    """Slow steps, and their account against the usual one."""

    key, title = "slow_steps", "Slow steps"
    note = "Steps beyond the spread of the others, and what was different in them."
    what = "slow steps"
    parts = {
        "steps": Part(
            STEP_SCHEMA,
            "every step that all ranks hold completely",
            {"limit_ns": f"fewer than {LEAST_STEPS} whole steps say nothing about what is usual"},
            ("median_ns", "over_ns"),
            "the traces hold no whole step",
            ranked=False,
        ),
        "differences": Part(
            DIFFERENCE_SCHEMA, "the account of slow steps against the usual one", empty="no step is slow", ranked=False
        ),
    }

    def build(self, study: Study[RankPart], absent: Absent) -> SlowStepsValue:
        slow_steps = analyze.slow_steps(list(study.results))
        return self.lists({"steps": slow_steps.steps, "differences": slow_steps.differences.head(_MOST)}, absent)

    def tables(self, value: SlowStepsValue) -> Iterator[Table]:
        slow = [row for row in value["steps"] if row["slow"]]
        if slow:
            columns = ["step", "duration_ns", "over_ns", "median_ns", "limit_ns", "rank"]
            yield table("slow_steps.steps", "Slow steps", columns, slow)
            columns = ["step", "rank", "more_ns", "ns", "usual_ns", "class"]
            yield table("slow_steps.differences", "What was different", columns, value["differences"])

    def summary(self, value: SlowStepsValue) -> str | None:
        slow = [row for row in value["steps"] if row["slow"]]
        if not slow:
            return None
        worst = max(slow, key=lambda row: row["over_ns"] or 0)
        differences = [row for row in value["differences"] if row["step"] == worst["step"]]
        because = ""
        if differences:
            top = differences[0]
            of = f" of rank {top['rank']}" if worst["rank_count"] > 1 else ""
            because = f", mostly {top['class'].replace('_', ' ')}{of} (+{units.duration(top['more_ns'])})"
        return (
            f"{units.count(len(slow))} of {units.count(len(value['steps']))} steps; step {worst['step']} takes "
            f"{units.duration(worst['over_ns'])} longer than the median{because}"
        )


SECTION = SlowStepsSection()
