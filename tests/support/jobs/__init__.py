"""Made training jobs with a planted truth: what their traces show is known, and so is what a change would do.

A job is run by a simulation of its own (threads, streams and ranks as processes that wait for each other), which knows
nothing of graphs. It gives the traces that a profiler would have written; run again with a change, it gives the window
that re-timing the linked traces must answer.

`training_job` makes small jobs for one method at a time; `parallel_job` makes data x tensor x pipeline x expert
parallel jobs with declared faults, whose `truth` says who came last at each communication and why.

Example:
    >>> from support.jobs import Change, Recipe, training_job
    >>> job = training_job(Recipe(steps=2, layers=3))
    >>> job.run(Change(kernels=0.5)).window_ns < job.run().window_ns
    True
    >>> from support.jobs import ParallelRecipe, SlowRank, parallel_job
    >>> truth = parallel_job(ParallelRecipe(tensor=2, steps=1, faults=(SlowRank(1, 3.0),))).run().truth
    >>> set(truth.collectives.filter(kind="allreduce")["last_rank"])
    {1}
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from support.jobs import stage
from support.jobs.asking import changed
from support.jobs.faults import (
    ExtraSync,
    Fault,
    LateHost,
    ShardImbalance,
    SlowLink,
    SlowRank,
    StragglingStep,
    TokenImbalance,
)
from support.jobs.files import host_trace_of, write_run
from support.jobs.layout import Group, Layout
from support.jobs.parallel import ParallelRecipe
from support.jobs.program import Clock, Rank
from support.jobs.simulation import Change, Simulation, Span
from support.jobs.traces import shown_ns, trace_of
from support.jobs.training import Recipe, programs
from support.jobs.truth import Truth
from traceloom.testing.host_trace_builder import HostTraceBuilder
from traceloom.testing.trace_builder import TraceBuilder

__all__ = [
    "Change",
    "Clock",
    "ExtraSync",
    "Fault",
    "Group",
    "Job",
    "LateHost",
    "Layout",
    "ParallelRecipe",
    "Rank",
    "Recipe",
    "Run",
    "ShardImbalance",
    "SlowLink",
    "SlowRank",
    "Span",
    "StragglingStep",
    "TokenImbalance",
    "Truth",
    "changed",
    "parallel_job",
    "training_job",
]


@dataclass(frozen=True)
class Job:
    """A job that can be run again and again; chance is drawn once.

    Attributes:
        ranks: Its processes.
        groups: Its process groups, where it has more than one.
        labels: Of its faults.
    """

    ranks: list[Rank]
    groups: tuple[Group, ...] = ()
    labels: tuple[str, ...] = ()

    def run(self, change: Change | None = None) -> Run:
        """Run the job, with a change where one is given."""
        simulation = Simulation(self.ranks, change or Change())
        simulation.run()
        return Run(self, simulation.spans, change or Change())


@dataclass(frozen=True)
class Run:
    """What happened in one run.

    Attributes:
        job: What was run.
        spans: Everything that took time, ns of the true clock.
        change: What was different from the job as it is.
    """

    job: Job
    spans: list[Span]
    change: Change

    @property
    def ranks(self) -> list[Rank]:
        """The processes of the job."""
        return self.job.ranks

    @property
    def window_ns(self) -> int:
        """From the first start to the last end over all ranks."""
        return max(span.end for span in self.spans) - min(span.start for span in self.spans)

    def shown_ns(self, rank: int, time: int) -> int:
        """What the trace of a rank shows of a time of the true clock: ns since the epoch."""
        return shown_ns(self.ranks[rank].clock, time)

    @cached_property
    def truth(self) -> Truth:
        """What is true of this run."""
        return Truth(self.spans, self.job.groups, self.job.labels, self._without)

    def traces(self, *, sync_records: bool = False) -> list[TraceBuilder]:
        """One trace per rank.

        Args:
            sync_records: Whether the traces say which streams and events were awaited.
        """
        return [self.trace(rank.rank, sync_records=sync_records) for rank in self.ranks]

    def trace(self, rank: int, *, sync_records: bool = False) -> TraceBuilder:
        """The trace of one rank; see `traces`."""
        return trace_of(
            self.ranks[rank],
            self.of_rank(rank),
            len(self.ranks),
            sync_records=sync_records,
            groups=self.job.groups,
        )

    def host_trace(self, rank: int, steps: tuple[int, ...] = ()) -> HostTraceBuilder:
        """The host trace of one rank: of some steps, or of all."""
        return host_trace_of(self.ranks[rank], self.of_rank(rank), len(self.ranks), steps)

    def write(
        self,
        folder: str | Path,
        *,
        host: bool = False,
        ending: str = ".json.gz",
        sync_records: bool = False,
    ) -> Path:
        """Write the files of a capture: `rank<N>.kineto.json.gz`, host traces where asked for, and `capture.json`.

        Args:
            folder: Made where it is not there.
            host: Whether to write host traces too.
            ending: Of the traces: `.json.gz` or `.json`.
            sync_records: See `traces`.
        """
        return write_run(self, Path(folder), host=host, ending=ending, sync_records=sync_records)

    def of_rank(self, rank: int) -> list[Span]:
        """What happened on a rank, by start, longer spans first."""
        return self._by_rank[rank]

    @cached_property
    def _by_rank(self) -> dict[int, list[Span]]:
        out: dict[int, list[Span]] = {rank.rank: [] for rank in self.ranks}
        for span in sorted(self.spans, key=lambda span: (span.start, -span.end)):
            out[span.rank].append(span)
        return out

    def _without(self, label: str) -> list[Span]:
        return self.job.run(replace(self.change, without=self.change.without | {label})).spans


def training_job(recipe: Recipe) -> Job:
    """The job of a recipe."""
    return Job(programs(recipe))


def parallel_job(recipe: ParallelRecipe) -> Job:
    """The parallel job of a recipe."""
    labels = tuple(dict.fromkeys(fault.label for fault in recipe.faults))
    return Job(stage.programs(recipe), tuple(recipe.layout.groups()), labels)
