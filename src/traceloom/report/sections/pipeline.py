"""Stages of pipelines, and the time in which they had nothing to compute."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from traceloom.analyze.across.across_ranks import across_ranks
from traceloom.analyze.across.pipeline import STAGE_SCHEMA, STEP_SCHEMA
from traceloom.analyze.across.rank_part import RankPart
from traceloom.model import units
from traceloom.report.absent import Absent
from traceloom.report.sections.of_ranks import RanksSection
from traceloom.report.sections.section import Study, table
from traceloom.report.sections.shapes import Part
from traceloom.report.table import Table

if TYPE_CHECKING:
    from traceloom.report.documents.sections import PipelineValue

_MOST = 2000
_WHY = "no ranks that send to each other with known peers were recorded"


class PipelineSection(RanksSection["PipelineValue"]):
    """Pipelines and their bubbles."""

    key, title = "pipeline", "Pipeline"
    note = "Stages by who sends to whom, and the time in which they had nothing to compute."
    what = "pipelines"
    parts = {
        "stages": Part(STAGE_SCHEMA, "ranks of pipelines, with their bubbles", empty=_WHY, ranked=False),
        "steps": Part(STEP_SCHEMA, "bubbles of each step and rank", nullable=("step",), empty=_WHY, ranked=False),
    }

    def build(self, study: Study[RankPart], absent: Absent) -> PipelineValue:
        if len(study.results) < 2:
            return self.lists({"stages": STAGE_SCHEMA.to_frame(), "steps": STEP_SCHEMA.to_frame()}, absent)
        pipelines = across_ranks(study.results).pipeline
        return self.lists({"stages": pipelines.stages, "steps": pipelines.steps.head(_MOST)}, absent)

    def tables(self, value: PipelineValue) -> Iterator[Table]:
        if value["stages"]:
            columns = ["rank", "pipeline", "stage", "bubble_fraction", "mean_bubble_ns", "+min_bubble_ns",
                       "+max_bubble_ns", "mean_compute_ns", "mean_window_ns"]  # fmt: skip
            yield table("pipeline.stages", "Stages", columns, value["stages"])
            columns = ["step", "rank", "stage", "bubble_ns", "warm_up_ns", "steady_ns", "drain_ns", "in_pairs_ns",
                       "+compute_ns", "+other_ns", "+window_ns"]  # fmt: skip
            yield table("pipeline.steps", "Bubbles by step", columns, value["steps"])

    def summary(self, value: PipelineValue) -> str | None:
        stages = value["stages"]
        if not stages:
            return None
        bubble = sum(row["mean_bubble_ns"] for row in stages)
        window = sum(row["mean_window_ns"] for row in stages)
        worst = max(stages, key=lambda row: row["bubble_fraction"])
        many = len({row["pipeline"] for row in stages})
        pipelines = units.counted(many, "pipeline")
        share = units.share(worst["mean_bubble_ns"], worst["mean_window_ns"])
        depth = max(row["stage_count"] for row in stages)
        return (
            f"{pipelines} of {depth} stages; {units.share(bubble, window)} of their time is bubbles, "
            f"most on rank {worst['rank']} (stage {worst['stage']}, {share})"
        )


SECTION = PipelineSection()
