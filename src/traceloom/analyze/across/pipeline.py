"""Pipelines: which rank is which stage, and the time in which a stage had nothing to compute."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import polars as pl

from traceloom.analyze.across.matched import Matched
from traceloom.analyze.across.rank_part import RankPart
from traceloom.model.frames import as_declared, schema
from traceloom.model.result import Result

STAGE_SCHEMA = schema(
    "rank pipeline stage stage_count step_count mean_window_ns mean_compute_ns",
    "mean_bubble_ns min_bubble_ns max_bubble_ns bubble_fraction",
)
STEP_SCHEMA = schema(
    "step rank pipeline stage window_ns compute_ns other_ns warm_up_ns steady_ns drain_ns bubble_ns in_pairs_ns",
)


@dataclass(frozen=True)
class Pipeline(Result):
    """Stages and bubbles. Definitions: docs/concepts/pipeline.md.

    Attributes:
        stages: One row per rank of a pipeline: pipeline (number), stage (0 first), stage_count, and over the steps the
            window, compute, bubble (mean, least, most) and bubble_fraction (bubble / window).
        steps: One row per step and rank: window_ns (first start to last end of compute over the ranks of the pipeline),
            compute_ns, other_ns (other communication between the rank's computes), warm_up_ns (before its first
            compute), steady_ns (between, neither computing nor in other communication), drain_ns (after its last), and
            bubble_ns = warm_up_ns + steady_ns + drain_ns; all but in_pairs_ns (the part of the bubble that it stood in
            sends and receives, unhidden) add up: compute + other + bubble = window.
    """

    stages: pl.DataFrame
    steps: pl.DataFrame


def pipeline(parts: Sequence[RankPart], matched: Matched) -> Pipeline:
    """Find pipelines by who sends to whom first, and their bubbles, on the job's clock."""
    frames = []
    for number, part in enumerate(parts):
        clock = matched.clock_of[number]
        moved = [pl.Series(name, clock.corrected(part.stages[name].to_numpy())) for name in ("first_ns", "last_ns")]
        frames.append(part.stages.with_columns(*moved, pl.lit(matched.ranks[number], pl.Int32).alias("rank")))
    rows = pl.concat(frames)
    positions = _places(rows)
    if not positions:
        return Pipeline(pl.DataFrame(schema=STAGE_SCHEMA), pl.DataFrame(schema=STEP_SCHEMA))
    stage_rows = pl.DataFrame(
        [(rank, *position) for rank, position in positions.items()],
        schema={"rank": pl.Int32(), "pipeline": pl.Int32(), "stage": pl.Int32()},
        orient="row",
    )
    rows = rows.join(stage_rows, on="rank", how="inner", maintain_order="left")
    begin, end = pl.col("first_ns").min().over("pipeline", "step"), pl.col("last_ns").max().over("pipeline", "step")
    bubbles = rows.with_columns(
        (end - begin).alias("window_ns"),
        (pl.col("first_ns") - begin).alias("warm_up_ns"),
        (end - pl.col("last_ns")).alias("drain_ns"),
        (pl.col("last_ns") - pl.col("first_ns") - pl.col("compute_ns") - pl.col("other_ns")).alias("steady_ns"),
    ).with_columns(
        (pl.col("warm_up_ns") + pl.col("steady_ns") + pl.col("drain_ns")).alias("bubble_ns"),
        (
            pl.min_horizontal("pair_before_ns", "warm_up_ns")
            + pl.min_horizontal("pair_inside_ns", "steady_ns")
            + pl.min_horizontal("pair_after_ns", "drain_ns")
        ).alias("in_pairs_ns"),
    )
    steps = bubbles.pipe(as_declared, STEP_SCHEMA)
    steps = steps.sort("step", "pipeline", "stage", "rank", nulls_last=True)
    sums = steps.group_by("rank", "pipeline", "stage").agg(
        pl.len().alias("step_count"),
        pl.col("window_ns").mean().alias("mean_window_ns"),
        pl.col("compute_ns").mean().alias("mean_compute_ns"),
        pl.col("bubble_ns").mean().alias("mean_bubble_ns"),
        pl.col("bubble_ns").min().alias("min_bubble_ns"),
        pl.col("bubble_ns").max().alias("max_bubble_ns"),
        (pl.col("bubble_ns").sum() / pl.max_horizontal(pl.col("window_ns").sum(), 1)).alias("bubble_fraction"),
    )
    count = (pl.col("stage").max().over("pipeline") + 1).alias("stage_count")
    stages = sums.with_columns(count).pipe(as_declared, STAGE_SCHEMA)
    return Pipeline(stages.sort("pipeline", "stage", "rank"), steps)


def _places(rows: pl.DataFrame) -> dict[int, tuple[int, int]]:
    """Rank -> pipeline and stage: a rank stands behind the one that it first receives from.

    The first receive of a step brings activations, which come from the stage before. The first stage sends before it
    receives: what it then gets are gradients.
    """
    first = rows.sort("rank", "step", nulls_last=True).group_by("rank", maintain_order=True).first()
    gets = first.filter(
        pl.col("receives_from").is_not_null(),
        pl.col("first_send_ns").is_null() | (pl.col("first_receive_ns") <= pl.col("first_send_ns")),
    )
    before = dict(gets.select("rank", "receives_from").rows())
    ranks = {rank for pair in before.items() for rank in pair}
    starts = [rank for rank in sorted(ranks) if rank not in before]
    after: dict[int, list[int]] = {}
    for rank, source in before.items():
        after.setdefault(source, []).append(rank)
    positions: dict[int, tuple[int, int]] = {}
    for number, first in enumerate(starts):
        todo = [(first, 0)]
        while todo:
            rank, stage = todo.pop()
            if rank not in positions:
                positions[rank] = (number, stage)
                todo += [(other, stage + 1) for other in after.get(rank, [])]
    return positions
