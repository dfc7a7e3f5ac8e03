"""Steps that took longer than the others can explain, and what was different in them."""

from __future__ import annotations

from collections.abc import Iterator

from traceloom import analyze
from traceloom.analyze.across.rank_part import RankPart
from traceloom.analyze.across.slow_steps import DIFFERENCE_SCHEMA, LEAST_STEPS, STEP_SCHEMA
from traceloom.model import units
from traceloom.report.absent import Absent
from traceloom.report.sections.of_ranks import part_of
from traceloom.report.sections.section import Row, Section, Study
from traceloom.report.sections.shapes import record, rows
from traceloom.report.table import Col, Table

_MOST = 200
_UNKNOWN = {
    "median_ns": "there are no whole steps",
    "limit_ns": f"fewer than {LEAST_STEPS} whole steps say nothing about what is usual",
    "over_ns": "there are no whole steps",
}


def _build(study: Study[RankPart], absent: Absent) -> Row:
    slow_steps = analyze.slow_steps(list(study.results))
    out = {
        "steps": absent.rows(slow_steps.steps, "slow_steps.steps"),
        "differences": absent.rows(slow_steps.differences.head(_MOST), "slow_steps.differences"),
    }
    if not out["steps"]:
        absent.say("slow_steps.steps")
    if not out["differences"]:
        absent.say("slow_steps.differences")
    return out


def _tables(value: Row) -> Iterator[Table]:
    slow = [row for row in value["steps"] if row["slow"]]
    if not slow:
        return
    yield Table(
        "slow-steps-steps",
        "Slow steps",
        [
            Col("step", "Step", "count"),
            Col("duration_ns", "Duration", "time", "of the rank that took longest"),
            Col("over_ns", "Over the median", "time"),
            Col("median_ns", "Median", "time"),
            Col("limit_ns", "Usual up to", "time"),
            Col("rank", "Rank", "count"),
        ],
        slow,
        "slow_steps.steps",
    )
    yield Table(
        "slow-steps-differences",
        "What was different",
        [
            Col("step", "Step", "count"),
            Col("rank", "Rank", "count"),
            Col("more_ns", "More", "time", "than usual; the account of a step adds up to its length"),
            Col("ns", "In this step", "time"),
            Col("usual_ns", "Usual", "time", "median over the steps that are not slow"),
            Col("class", "Class", "name"),
        ],
        value["differences"],
        "slow_steps.differences",
    )


def _summary(value: Row) -> str | None:
    slow = [row for row in value["steps"] if row["slow"]]
    if not slow:
        return None
    worst = max(slow, key=lambda row: row["over_ns"])
    differences = [row for row in value["differences"] if row["step"] == worst["step"]]
    because = (
        f", mostly {differences[0]['class']} (+{units.duration(differences[0]['more_ns'])})" if differences else ""
    )
    return (
        f"{units.count(len(slow))} of {units.count(len(value['steps']))} steps; step {worst['step']} takes "
        f"{units.duration(worst['over_ns'])} longer than the median{because}"
    )


SECTION = Section(
    key="slow_steps",
    title="Slow steps",
    note="Steps beyond the spread of the others, and what was different in them.",
    measure=part_of,
    build=_build,
    tables=_tables,
    summary=_summary,
    schema=record(
        {
            "steps": rows(STEP_SCHEMA, nullable=set(_UNKNOWN), what="every step that all ranks hold completely"),
            "differences": rows(DIFFERENCE_SCHEMA, what="the account of slow steps against the usual one"),
        },
        what="slow steps",
    ),
    reasons={
        "slow_steps.steps": "the traces hold no whole step",
        "slow_steps.differences": "no step is slow",
        **{f"slow_steps.steps[*].{name}": why for name, why in _UNKNOWN.items()},
    },
)
