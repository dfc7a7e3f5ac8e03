"""What rules stand on: the step that is looked at, its linked graph, and every analysis of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import polars as pl
from numpy.typing import NDArray

from traceloom.analyze.allocations import Allocations, allocations
from traceloom.analyze.path.window import usual_step
from traceloom.link import link_session
from traceloom.model import Graph, Session, Trace
from traceloom.retime import Plan
from traceloom.retime.law import Law, law
from traceloom.simulate.selection import of_events

Bools = NDArray[np.bool_]


@dataclass
class Ground:
    """One step of a session, ready to be asked.

    Attributes:
        session: The run.
        step: The step of median length; None where there are no steps: then the whole window is looked at.
    """

    session: Session
    step: int | None = field(default=None)

    @classmethod
    def of(cls, session: Session) -> Ground:
        """The usual step of a session."""
        return cls(session, usual_step(session.traces))

    @cached_property
    def graph(self) -> Graph:
        """The linked, calibrated graph of the step."""
        return link_session(self.session, step=self.step)

    @cached_property
    def plan(self) -> Plan:
        """The graph made ready for many evaluations."""
        return Plan(self.graph)

    @cached_property
    def law(self) -> Law:
        """How far the graph can be trusted."""
        return law(self.graph, self.plan)

    @cached_property
    def whole_ns(self) -> int:
        """From the first to the last moment of the graph."""
        times = self.graph.point_times()
        return int(np.ptp(times)) if times.size else 0

    @cached_property
    def host_ratio(self) -> float | None:
        """How much longer recorded steps take than unrecorded ones, where that was measured."""
        parts = [(trace.meta.capture or {}).get("overhead") for trace in self.session.traces]
        ratios = [part.get("ratio") for part in parts if isinstance(part, dict)]
        return max((ratio for ratio in ratios if isinstance(ratio, float)), default=None)

    @property
    def traces(self) -> tuple[Trace, ...]:
        """The traces, one per rank or window."""
        return self.session.traces

    @cached_property
    def kinds(self) -> pl.Series:
        """Kind of each node, as text."""
        return self.graph.nodes["kind"].cast(pl.String)

    @cached_property
    def on_device(self) -> bool:
        """Whether any GPU work was recorded."""
        return bool(self.kinds.is_in(["kernel", "copy", "fill"]).any())

    @cached_property
    def allocations(self) -> list[tuple[Trace, Allocations]]:
        """Whose memory it is, for each trace with allocations."""
        return [(trace, allocations(trace)) for trace in self.traces if trace.allocations.height]

    def nodes_of(self, trace: Trace, events: pl.Series) -> Bools:
        """The graph's nodes for some events (rows) of one trace, shape (nodes,)."""
        several = len(self.session.traces) > 1
        return of_events(self.graph, trace.rank if several else None, events)

    def work_ns(self, nodes: Bools) -> int:
        """Summed work of some nodes."""
        return int(self.graph.nodes["work_ns"].to_numpy()[nodes].sum())
