"""Session: the traces of one run."""

from __future__ import annotations

import importlib
from dataclasses import dataclass, field, replace
from html import escape
from typing import Any, NoReturn

import polars as pl

from traceloom.errors import UsageError, broken
from traceloom.harmless import harmless
from traceloom.model import units
from traceloom.model.beside import ALLOCATIONS, SAMPLES, TELEMETRY, no_allocations, no_samples, no_telemetry
from traceloom.model.notice import Notice
from traceloom.model.trace import Trace

_MOST_ROWS = 20  # of a notebook's table of ranks


@dataclass(frozen=True)
class Session:
    """The traces of one run, by rank (then by start, where one rank has several windows).

    Attributes:
        traces: At least one. The ranks may have gaps and need not start at 0.
        name: What the user gave: the directory or file.
        capture: The run's capture.json, where it was recorded by `traceloom record`.
        notices: Notices about the run as a whole; those of a rank stand in its trace.
        samples: Stacks of its threads that were taken from outside (`traceloom.model.beside`); mostly none.
        telemetry: What its hosts and devices did meanwhile, likewise.
        allocations: What its allocators did, seen from outside, likewise; those of a trace stand in the trace.
    """

    traces: tuple[Trace, ...]
    name: str
    capture: dict[str, Any] | None = None
    notices: tuple[Notice, ...] = ()
    samples: pl.DataFrame = field(default_factory=no_samples)
    telemetry: pl.DataFrame = field(default_factory=no_telemetry)
    allocations: pl.DataFrame = field(default_factory=no_allocations)

    @property
    def ranks(self) -> tuple[int | None, ...]:
        """The ranks of `traces`, in their order (None where a trace does not say)."""
        return tuple(trace.rank for trace in self.traces)

    @property
    def world_size(self) -> int | None:
        """The number of ranks of the job, where a trace says; not the number of traces at hand."""
        return max((t.meta.world_size for t in self.traces if t.meta.world_size is not None), default=None)

    @property
    def event_count(self) -> int:
        """How many events its traces hold."""
        return sum(trace.events.height for trace in self.traces)

    @property
    def epoch_ns(self) -> int:
        """The earliest start of all traces: what report times are relative to."""
        return min((trace.start_ns for trace in self.traces if trace.events.height), default=0)

    @property
    def recording_ratio(self) -> float | None:
        """How much longer recorded steps take than unrecorded ones, the largest over the ranks; None where unknown."""
        parts = [(trace.meta.capture or {}).get("overhead") for trace in self.traces]
        ratios = [part.get("ratio") for part in parts if isinstance(part, dict)]
        return max((ratio for ratio in ratios if isinstance(ratio, float)), default=None)

    def of_rank(self, rank: int) -> Session:
        """The session with only the windows of one rank."""
        return self.of_ranks((rank,))

    def of_ranks(self, ranks: tuple[int, ...]) -> Session:
        """The session with only these ranks; UsageError if one is missing."""
        missing = [rank for rank in ranks if rank not in self.ranks]
        if missing:
            present = sorted({rank for rank in self.ranks if rank is not None})
            have = f"it has {', '.join(map(str, present))}" if present else "its traces do not say their ranks"
            raise UsageError(f"rank {missing[0]} is not in this run; {have}", slug="no-such-rank")
        kept = tuple(trace for trace in self.traces if trace.rank in ranks)
        of_ranks = pl.col("rank").is_in(ranks)
        samples, allocations = self.samples.filter(of_ranks), self.allocations.filter(of_ranks)
        return replace(self, traces=kept, samples=samples, allocations=allocations)

    def all_notices(self) -> tuple[Notice, ...]:
        """The run's notices, then those of every rank."""
        return self.notices + tuple(n.of_rank(t.rank) for t in self.traces for n in t.notices)

    def check(self) -> None:
        """Check every trace, and the frames beside them."""
        for trace in self.traces:
            trace.check()
        for name, columns in (("samples", SAMPLES), ("telemetry", TELEMETRY), ("allocations", ALLOCATIONS)):
            frame: pl.DataFrame = getattr(self, name)
            if frame.schema != columns:
                raise broken("columns", f"frame {name} has {frame.schema}, expected {columns}")
        if (self.samples["period_ns"] < 0).any():
            raise broken("order", "stack samples have negative periods")

    @property
    def kernels(self) -> pl.DataFrame:
        """GPU work by name, of all ranks (`analyze.kernels`), first the column `rank`."""
        return self._of_ranks("kernels", "kernels")

    @property
    def operators(self) -> pl.DataFrame:
        """Operators by name, of all ranks (`analyze.operators`), first the column `rank`."""
        return self._of_ranks("operators", "operators")

    @property
    def steps(self) -> pl.DataFrame:
        """The steps of all ranks (`analyze.step_times`), first the column `rank`."""
        return self._of_ranks("step_times", "steps")

    @property
    def collectives(self) -> pl.DataFrame:
        """Every collective call of all ranks (`analyze.collectives`), first the column `rank`."""
        return self._of_ranks("collectives", "calls")

    def _of_ranks(self, analysis: str, frame: str) -> pl.DataFrame:
        # Analyses import the model, not the other way round: they are looked up when somebody asks.
        analyze = importlib.import_module("traceloom.analyze")
        frames = []
        for trace in self.traces:
            of_trace: pl.DataFrame = getattr(getattr(analyze, analysis)(trace), frame)
            rank = pl.lit(trace.rank, dtype=pl.Int32).alias("rank")
            frames.append(of_trace.select(rank, pl.all().exclude("rank")))
        return pl.concat(frames)

    def __getattr__(self, name: str) -> NoReturn:
        of_trace = name in Trace.__dataclass_fields__ or hasattr(Trace, name)
        hint = f"; its traces have: session.traces[0].{name}" if of_trace else ""
        raise AttributeError(f"a Session has no `{name}`{hint}")

    def _repr_html_(self) -> str:
        rows = "".join(
            f"<tr><td>{'?' if trace.rank is None else trace.rank}</td><td>{units.count(trace.events.height)}</td>"
            f"<td>{units.duration(trace.end_ns - trace.start_ns)}</td><td>{trace.steps.height}</td>"
            f"<td style='text-align:left'>{escape(harmless(trace.meta.path))}</td></tr>"
            for trace in self.traces[:_MOST_ROWS]
        )
        more = f"<p>… and {len(self.traces) - _MOST_ROWS} more</p>" if len(self.traces) > _MOST_ROWS else ""
        head = "".join(f"<th>{title}</th>" for title in ("rank", "events", "time", "steps", "file"))
        return f"<p><b>{escape(harmless(self.name))}</b></p><table><tr>{head}</tr>{rows}</table>{more}"

    def __repr__(self) -> str:
        events = self.event_count
        return f"<Session {self.name}: {len(self.traces)} traces, {events:,} events>"
