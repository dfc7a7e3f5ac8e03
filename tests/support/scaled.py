"""Jobs of which some ranks are shown, and what the step of all of them truly takes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from support.jobs import ParallelRecipe, Run, parallel_job
from traceloom.graph import calibrate
from traceloom.graph.graph import Graph
from traceloom.graph.job import join_ranks
from traceloom.graph.rank import link_rank
from traceloom.workload.simulate.scale import Scaled, scale


@dataclass(frozen=True)
class ShownJob:
    """A job that was run whole, and the graph of some of its ranks.

    Attributes:
        run: What happened.
        graph: Of the ranks that are shown.
        roles: Of its groups.
    """

    run: Run
    graph: Graph
    roles: dict[str, str]


@dataclass(frozen=True)
class Compared:
    """A scaled job beside the truth."""

    answer: Scaled
    true_ns: float

    @property
    def error(self) -> float:
        """Of the median, as a fraction of the truth."""
        return self.answer.after_ns / self.true_ns - 1

    @property
    def held(self) -> bool:
        """Whether the truth lies between P10 and P90."""
        return self.answer.p10_ns <= self.true_ns <= self.answer.p90_ns


# Of 64 ranks: which 8 are shown, and of what job. `recorded` is the smaller job that is shown instead, where there is one.
JOBS_OF_64: dict[str, dict[str, Any]] = {
    "data 64": {"data": 64},
    "data 64, durations spread by 20 %": {"data": 64, "spread": 0.2},
    "data 64, sharded": {"data": 64, "sharded": True},
    "data 16, tensor 4": {"data": 16, "tensor": 4},
    "data 64, experts 8": {"data": 64, "expert": 8},
    "data 16, tensor 2, pipeline 2": {
        "data": 16,
        "tensor": 2,
        "pipeline": 2,
        "microbatches": 3,
        "layers": 1,
    },
    "data 64, recorded with 8": {"data": 64, "spread": 0.1},
}
_SHOWN = {"data 16, tensor 2, pipeline 2": (0, 1, 2, 3, 32, 33, 34, 35)}


def scaled_recipe(**options: Any) -> ParallelRecipe:
    """Four steps of two layers, but for the options."""
    return ParallelRecipe(**{"steps": 4, "layers": 2, **options})


def shown(ranks: Iterable[int], recipe: ParallelRecipe) -> ShownJob:
    """Run the job of a recipe, and link some of its ranks."""
    run = parallel_job(recipe).run()
    graph = calibrate(join_ranks([link_rank(run.trace(rank).build()) for rank in ranks], "made"))
    return ShownJob(run, graph, {group.name: group.role for group in run.job.groups})


def compared(name: str, seed: int) -> Compared:
    """One of `JOBS_OF_64`: 64 ranks as 8 tell of them, and as they are."""
    options = JOBS_OF_64[name]
    job = (
        shown(_SHOWN.get(name, range(8)), scaled_recipe(seed=seed, **options))
        if "recorded" not in name
        else None
    )
    if job is not None:
        return Compared(scale(job.graph, ranks=64, roles=job.roles), true_step_ns(job.run))
    small = shown(range(8), scaled_recipe(seed=seed, **options | {"data": 8}))
    # A ring of 64 moves 63 / 64 of a buffer twice, one of 8 moves 7 / 8; another job, with another chance.
    whole = scaled_recipe(seed=1000 + seed, transfer_us=60 * (63 / 64) / (7 / 8), **options)
    return Compared(
        scale(small.graph, ranks=64, roles=small.roles), true_step_ns(parallel_job(whole).run())
    )


def true_step_ns(run: Run) -> float:
    """Median time from the end of a step's last GPU work, over all ranks, to that of the next."""
    ends: dict[int, int] = {}
    for rank in range(len(run.ranks)):
        spans = run.of_rank(rank)
        marks = [span.start for span in spans if span.name.startswith("ProfilerStep#")]
        launched = {span.correlation: span.start for span in spans if span.kind == "call"}
        for span in spans:
            if span.stream is not None:
                step = sum(mark <= launched[span.correlation] for mark in marks)
                ends[step] = max(ends.get(step, 0), span.end)
    return float(np.median(np.diff([ends[step] for step in sorted(ends)])))
