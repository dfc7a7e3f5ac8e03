"""Made training jobs with a planted truth: what their traces show is known, and so is what a change would do.

A job is run by a simulation of its own (threads, streams and ranks as processes that wait for each other), which knows
nothing of graphs. It gives the traces that a profiler would have written; run again with a change, it gives the window
that re-timing the linked traces must answer.

Example:
    >>> from traceloom.testing.jobs import Change, Recipe, training_job
    >>> job = training_job(Recipe(steps=2, layers=3))
    >>> job.run(Change(kernels=0.5)).window_ns < job.run().window_ns
    True
"""

from __future__ import annotations

from dataclasses import dataclass

from traceloom.testing.builder import TraceBuilder
from traceloom.testing.jobs.asking import changed
from traceloom.testing.jobs.program import Clock, Rank
from traceloom.testing.jobs.simulation import Change, Simulation, Span
from traceloom.testing.jobs.traces import trace_of
from traceloom.testing.jobs.training import Recipe, programs

__all__ = ["Change", "Clock", "Job", "Rank", "Recipe", "Run", "Span", "changed", "training_job"]


@dataclass(frozen=True)
class Run:
    """What happened in one run.

    Attributes:
        ranks: The processes of the job.
        spans: Everything that took time, ns of the true clock.
    """

    ranks: list[Rank]
    spans: list[Span]

    @property
    def window_ns(self) -> int:
        """From the first start to the last end over all ranks."""
        return max(span.end for span in self.spans) - min(span.start for span in self.spans)

    def traces(self, *, sync_records: bool = False) -> list[TraceBuilder]:
        """One trace per rank.

        Args:
            sync_records: Whether the traces say which streams and events were awaited.
        """
        of_rank: dict[int, list[Span]] = {rank.rank: [] for rank in self.ranks}
        for span in sorted(self.spans, key=lambda span: (span.start, -span.end)):
            of_rank[span.rank].append(span)
        return [
            trace_of(rank, of_rank[rank.rank], len(self.ranks), sync_records=sync_records) for rank in self.ranks
        ]  # fmt: skip


@dataclass(frozen=True)
class Job:
    """A job that can be run again and again; chance is drawn once."""

    ranks: list[Rank]

    def run(self, change: Change | None = None) -> Run:
        """Run the job, with a change where one is given."""
        simulation = Simulation(self.ranks, change or Change())
        simulation.run()
        return Run(self.ranks, simulation.spans)


def training_job(recipe: Recipe) -> Job:
    """The job of a recipe."""
    return Job(programs(recipe))
