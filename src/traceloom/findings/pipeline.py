"""Bubbles of pipelines."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import polars as pl

from traceloom.findings.ground import Ground
from traceloom.findings.rule import Candidate, Rule, Said
from traceloom.model import units
from traceloom.model.finding import Abstention, Evidence
from traceloom.simulate.changes import Change
from traceloom.simulate.selection import Chosen

_LEAST = 0.05  # of a stage's window
_LEFT = 0.5  # of the bubbles, with twice as many microbatches or two chunks per stage


def bubbles(ground: Ground) -> Iterator[Said]:
    """Stages wait for each other at the beginning and end of each step."""
    if ground.across is None:
        yield Abstention("pipeline-bubbles", "only one rank was recorded")
        return
    rows = ground.in_step(ground.across.pipeline.steps)
    if not rows.height:
        if _pairwise(ground):
            yield Abstention("pipeline-bubbles", "ranks send to each other, but the order of stages is not known")
        return
    window, bubble = float(rows["window_ns"].sum()), float(rows["bubble_ns"].sum())
    if bubble < _LEAST * window:
        return
    share = bubble / max(window, 1.0)
    # all stages wait in turn, so that a shorter bubble shortens the whole step evenly
    everything = Chosen("everything, by half of the bubbles", np.ones(ground.graph.nodes.height, dtype=np.bool_))
    worst = rows.sort("bubble_ns", descending=True).head(3)
    stages = rows["stage"].n_unique()
    yield Candidate(
        title=f"pipeline bubbles take {units.share(share, 1)} of {stages} stages' time",
        changes=(Change("scale", everything, 1 - share * (1 - _LEFT)),),
        confidence=0.4,
        advice="More microbatches per step, or an interleaved or zero-bubble schedule: twice as many microbatches "
        "halve the bubbles, which is what the saving assumes.",
        evidence=tuple(
            Evidence(f"bubbles of stage {row['stage']}", row["rank"], total_ns=row["bubble_ns"])
            for row in worst.to_dicts()
        ),
        at_most_ns=round(ground.whole_ns * share * (1 - _LEFT)),
    )


def _pairwise(ground: Ground) -> bool:
    return bool(ground.graph.communication.select(pl.col("kind").is_in(["send", "receive"]).any()).item())


RULES = (Rule("pipeline-bubbles", "stages of a pipeline wait for each other", bubbles),)
