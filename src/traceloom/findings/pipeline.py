"""Bubbles of pipelines."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import polars as pl

from traceloom.findings.context import Context
from traceloom.findings.rule import Candidate, FindingRule, Said
from traceloom.model import graph_schema as gs
from traceloom.model import units
from traceloom.model.finding import Abstention, Evidence
from traceloom.simulate import Scenario, whatif_many
from traceloom.simulate.changes import Change
from traceloom.simulate.selection import Chosen

_LEAST = 0.05  # of a stage's window
_LEFT = 0.5  # of the bubbles, with two chunks per stage
_TRIES, _NEAR = 6, 0.01  # until a step is shorter by what the schedule saves, and how near is near enough
_PER_STAGE = 4  # microbatches, from which on bubbles hardly matter (Huang et al., GPipe, 2019, section 2)


def bubbles(context: Context) -> Iterator[Said]:
    """Stages wait for each other at the beginning and end of each step."""
    if context.across is None:
        yield Abstention("pipeline-bubbles", "only one rank was recorded")
        return
    rows = context.in_step(context.across.pipeline.steps)
    if not rows.height:
        messages = pl.col("kind").is_in(["send", "receive"])
        if context.graph.communication.select(messages.any()).item():
            yield Abstention("pipeline-bubbles", "ranks send to each other, but the order of stages is not known")
        return
    window, bubble = float(rows["window_ns"].sum()), float(rows["bubble_ns"].sum())
    if bubble < _LEAST * window:
        return
    share = bubble / max(window, 1.0)
    mean_ns, left_ns, how = _better(context, rows)
    worst = rows.sort("bubble_ns", descending=True).head(3)
    stages = rows["stage"].n_unique()
    yield Candidate(
        title=f"pipeline bubbles take {units.share(share, 1)} of {stages} stages' time",
        changes=(_shorter(context, share, mean_ns, mean_ns - left_ns),),
        confidence=0.4,
        advice=f"More microbatches per step, or an interleaved or zero-bubble schedule: the saving assumes {how}.",
        evidence=tuple(
            Evidence(f"bubbles of stage {row['stage']}", row["rank"], total_ns=row["bubble_ns"])
            for row in worst.to_dicts()
        ),
        at_most_ns=round((mean_ns - left_ns) * context.step_count),
    )


def _shorter(context: Context, share: float, bubble_ns: float, target_ns: float) -> Change:
    """Everything takes less time, so that the step gets as much shorter as the bubbles that go are long.

    All stages wait in turn, so that a shorter bubble shortens the whole step evenly. Stages are in different steps at
    the same time: where the graph of one step also holds a part of others, which the change leaves as they are, it
    takes a smaller factor for the same time.
    """
    everything = np.ones(context.graph.nodes.height, dtype=np.bool_)
    base = Scenario.of(context.graph)

    def change(gone: float) -> Change:
        return Change("scale", Chosen("everything, by the bubbles that go", everything), 1 - gone)

    gone = share * target_ns / max(bubble_ns, 1.0)
    for _ in range(_TRIES):
        times = whatif_many(context.graph, (base, context.changed(base, [change(gone)])), context.plan)
        saved = float(times[0] - times[1]) / context.step_count
        if saved <= 0 or saved >= (1 - _NEAR) * target_ns:
            break
        gone = min(gone * target_ns / saved, 1.0)
    return change(gone)


def _better(context: Context, rows: pl.DataFrame) -> tuple[float, float, str]:
    """Four microbatches per stage where there are fewer; else two chunks per stage.

    With m microbatches each stage waits (stages - 1) / m of the time it computes for the pipeline to fill and to drain;
    smaller ones fill it sooner. What the stage that waits least waits between two microbatches is for messages, and
    comes once for each microbatch, however small.

    Source: Huang et al., GPipe (2019), and Narayanan et al., Megatron-LM (2021), section 2.2.

    Returns:
        Bubbles of a stage, the mean over stages, and what is left of them, ns; and how, in words.
    """
    # how many activations each rank of the last stages gets in the step, where that is one number
    now = None
    if context.steps is not None:
        last = rows.filter(pl.col("stage") == pl.col("stage").max().over("pipeline"))["rank"]
        received = context.graph.nodes.filter(
            pl.Series(context.of_kind(gs.RECEIVE)),
            pl.col("rank").is_in(last.implode()),
            pl.col("step").is_in(list(context.steps)),
        )
        counts = received.group_by("rank", "step").len()["len"].unique().to_list()
        now = int(counts[0]) if len(counts) == 1 else None
    bubble = float(rows["bubble_ns"].mean() or 0)  # type: ignore[arg-type]
    target_count = _PER_STAGE * rows["stage"].n_unique()
    if now is None:
        return bubble, bubble * _LEFT, "two chunks per stage, which halve the bubbles"
    waits = min(float(rows["steady_ns"].min() or 0), bubble)  # type: ignore[arg-type]
    message, filling = waits / max(now - 1, 1), bubble - waits
    if now < target_count:
        left = filling * now / target_count + message * (target_count - 1)
        return bubble, min(left, bubble), f"{target_count} microbatches, four per stage, in place of {now}"
    left = filling * _LEFT + 2 * waits  # each chunk has messages of its own
    return bubble, min(left, bubble), "two chunks per stage, which halve the time until all are busy"


RULES = (FindingRule("pipeline-bubbles", "stages of a pipeline wait for each other", bubbles),)
