"""Stages of pipelines, and the time in which they had nothing to compute."""

from __future__ import annotations

from collections.abc import Iterator

from traceloom.analyze.across.pipeline import STAGE_SCHEMA, STEP_SCHEMA
from traceloom.analyze.across.rank_part import RankPart
from traceloom.model import units
from traceloom.report.absent import Absent
from traceloom.report.sections.of_ranks import compared, part_of
from traceloom.report.sections.section import Row, Section, Study
from traceloom.report.sections.shapes import record, rows
from traceloom.report.table import Col, Table

_MOST = 2000
_WHY = "no ranks that send to each other with known peers were recorded"


def _build(study: Study[RankPart], absent: Absent) -> Row:
    several = len(study.results) > 1
    pipelines = compared(study.results).pipeline if several else None
    out = {
        "stages": absent.rows(pipelines.stages, "pipeline.stages") if pipelines else [],
        "steps": absent.rows(pipelines.steps.head(_MOST), "pipeline.steps") if pipelines else [],
    }
    for name, value in out.items():
        if not value:
            absent.say(f"pipeline.{name}")
    return out


def _tables(value: Row) -> Iterator[Table]:
    if not value["stages"]:
        return
    yield Table(
        "pipeline-stages",
        "Stages",
        [
            Col("rank", "Rank", "count"),
            Col("pipeline", "Pipeline", "count"),
            Col("stage", "Stage", "count"),
            Col("bubble_fraction", "Bubble", "share", "of the step of its pipeline"),
            Col("mean_bubble_ns", "Bubble per step", "time"),
            Col("min_bubble_ns", "Least", "time", narrow=False),
            Col("max_bubble_ns", "Most", "time", narrow=False),
            Col("mean_compute_ns", "Compute", "time", "per step"),
            Col("mean_window_ns", "Step", "time", "from the first to the last compute of the pipeline"),
        ],
        value["stages"],
        "pipeline.stages",
    )
    yield Table(
        "pipeline-steps",
        "Bubbles by step",
        [
            Col("step", "Step", "count"),
            Col("rank", "Rank", "count"),
            Col("stage", "Stage", "count"),
            Col("bubble_ns", "Bubble", "time"),
            Col("warm_up_ns", "Warm-up", "time", "before its first compute"),
            Col("steady_ns", "Between", "time", "neither computing nor in other communication"),
            Col("drain_ns", "Drain", "time", "after its last compute"),
            Col("in_pairs_ns", "In messages", "time", "the part that it stood in sends and receives"),
            Col("compute_ns", "Compute", "time", narrow=False),
            Col("other_ns", "Other communication", "time", narrow=False),
            Col("window_ns", "Step", "time", narrow=False),
        ],
        value["steps"],
        "pipeline.steps",
    )


def _summary(value: Row) -> str | None:
    stages = value["stages"]
    if not stages:
        return None
    bubble = sum(row["mean_bubble_ns"] for row in stages)
    window = sum(row["mean_window_ns"] for row in stages)
    worst = max(stages, key=lambda row: row["bubble_fraction"])
    many = len({row["pipeline"] for row in stages})
    pipelines = "1 pipeline" if many == 1 else f"{units.count(many)} pipelines"
    share = units.share(worst["mean_bubble_ns"], worst["mean_window_ns"])
    depth = max(row["stage_count"] for row in stages)
    return (
        f"{pipelines} of {depth} stages; {units.share(bubble, window)} of their time is bubbles, "
        f"most on rank {worst['rank']} (stage {worst['stage']}, {share})"
    )


SECTION = Section(
    key="pipeline",
    title="Pipeline",
    note="Stages by who sends to whom, and the time in which they had nothing to compute.",
    measure=part_of,
    build=_build,
    tables=_tables,
    summary=_summary,
    schema=record(
        {
            "stages": rows(STAGE_SCHEMA, what="ranks of pipelines, with their bubbles"),
            "steps": rows(STEP_SCHEMA, nullable={"step"}, what="bubbles of each step and rank"),
        },
        what="pipelines",
    ),
    reasons={
        "pipeline.stages": _WHY,
        "pipeline.steps": _WHY,
        "pipeline.steps[*].step": "the traces mark no steps",
    },
)
