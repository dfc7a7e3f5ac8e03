"""The context of rules: the steps that are analysed, their graph and analyses, and names in
sentences.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, TypeVar

import numpy as np
import polars as pl
from numpy.typing import NDArray

from traceloom.analyze import across_ranks
from traceloom.analyze.across_ranks import AcrossRanks
from traceloom.analyze.ancestry import build_forest
from traceloom.analyze.anti_patterns import anti_patterns
from traceloom.analyze.critical_path_pieces import find_common_steps, find_median_step
from traceloom.analyze.host_events import HOST_INTERVALS_SCHEMA
from traceloom.analyze.idle import idle
from traceloom.analyze.memory_answers import Allocations, explain_allocations
from traceloom.analyze.quality import check_sampled_operators
from traceloom.analyze.roofline import PeakSpec
from traceloom.analyze.steps import has_request_steps
from traceloom.changes.bounds import unrecorded_saving_ns
from traceloom.changes.changes import Change, NodeSelection, select_event_nodes
from traceloom.changes.scenario import Scenario, find_exposed_time
from traceloom.findings.vendors import find_vendor
from traceloom.graph import Plan, graph as graph_schema, link_session
from traceloom.graph.graph import Graph, get_point_times
from traceloom.graph.law import Law, law
from traceloom.system import units
from traceloom.trace import vocabulary as vocab
from traceloom.trace.arrays import NO_ROW, gather_rows, get_event_column
from traceloom.trace.batch import concatenate_by_trace
from traceloom.trace.frames import cast_to_schema
from traceloom.trace.notice import Evidence
from traceloom.trace.session import Session, ThreadClock, read_run_steps, read_thread_clocks
from traceloom.trace.trace import Trace

_ANONYMOUS_NAMESPACE_PATTERN = re.compile(r"\(anonymous namespace\)::|<unnamed>::")
_NAMESPACE_PATTERN = re.compile(r"\b(?:[A-Za-z_]\w*::)+")
_ADDRESS_PATTERN = re.compile(r" at 0x[0-9a-fA-F]+")
_OPERATOR_NAMESPACE_PATTERN = re.compile(r"^(aten|torch|autograd|c10d|prims|quantized)::")
_MAX_NAME_CHARS = 60
_MAX_PARSED_CHARS = 2_000  # characters that are parsed


def shorten_name(name: str) -> str:
    """Returns a name without what only a compiler needs (arguments, templates, namespaces), at most
    60 characters.
    """
    name = _ADDRESS_PATTERN.sub("", name[:_MAX_PARSED_CHARS])
    if (
        not _OPERATOR_NAMESPACE_PATTERN.match(name)
        and ("::" in name or "<" in name[1:])
        and not name.startswith("<")
    ):
        name = _ANONYMOUS_NAMESPACE_PATTERN.sub("", name.removeprefix("void "))
        head, bracket, remainder = name.partition("<")
        head = _NAMESPACE_PATTERN.sub("", head.split("(", 1)[0])
        name = f"{head}<…>" if bracket and remainder else head
    return name if len(name) <= _MAX_NAME_CHARS else f"{name[: _MAX_NAME_CHARS - 1]}…"


def get_outermost_operator(path: str) -> str:
    return shorten_name(path.split(" > ", 1)[0])


Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]
S = TypeVar("S")
T = TypeVar("T")

HOST_KINDS = (
    graph_schema.HOST,
    graph_schema.THINK,
    graph_schema.WAIT,
    graph_schema.LAUNCH,
    graph_schema.BLOCK,
)
UNNAMED_HOST_TIME = "host time outside any recorded event"
_DEVICE_KINDS = (
    graph_schema.KERNEL,
    graph_schema.COPY,
    graph_schema.FILL,
    *graph_schema.COMMUNICATION,
)
_MIN_INT64 = int(np.iinfo(np.int64).min)
# Of the steps: with more time than this between them, they are not consecutive
_MAX_STEP_GAP_SHARE = 0.1
# Of an interval of host time: the frame that names it covers at least this much
_MIN_NAME_COVERAGE = 0.6


@dataclass
class Context:
    """Consecutive steps of a session that rules analyse; usually one.

    Attributes:
        session: The run.
        steps: Their consecutive numbers; None where there are no steps: then the whole window is
            analysed.
        peak: Peaks to compare with instead of those of the devices' names.
        caches_graph: Whether the graph is cached for others.
    """

    session: Session
    steps: tuple[int, ...] | None = field(default=None)
    _analysis_cache: dict[tuple[int, Callable[..., Any]], Any] = field(
        default_factory=dict, repr=False
    )
    peak: PeakSpec = field(default=None, kw_only=True)
    caches_graph: bool = field(default=True, kw_only=True)

    @classmethod
    def of(cls, session: Session, peak: PeakSpec = None) -> Context:
        """Returns the step of median length, or the whole window where there are no steps."""
        step = find_median_step(session.traces)
        return cls(session, None if step is None else (step,), peak=peak)

    def around(self, max_count: int) -> tuple[int, ...]:
        """Returns at most `max_count` whole consecutive steps, with the analysed ones in the
        middle.
        """
        if self.steps is None:
            return ()
        numbers = set(find_common_steps(self.traces))
        low, high = self.steps[0], self.steps[-1]
        while low - 1 in numbers and high - low + 1 < 2 * max_count:
            low -= 1
        while high + 1 in numbers and high - self.steps[-1] < max_count:
            high += 1
        first = max(low, min(self.steps[0] - max_count // 2, high + 1 - max_count))
        return tuple(range(first, min(first + max_count, high + 1)))

    def over(self, steps: tuple[int, ...]) -> Context:
        """Returns a context of other steps of the same session; analyses of whole traces are
        shared.
        """
        other = Context(
            self.session, steps, self._analysis_cache, peak=self.peak, caches_graph=False
        )
        other.__dict__.update(rank_comparison=self.rank_comparison, host_ratio=self.host_ratio)
        return other

    @cached_property
    def graph(self) -> Graph:
        """The linked, calibrated graph of the steps."""
        if self.steps is None:
            return link_session(self.session, remember=self.caches_graph)
        return link_session(
            self.session, step=self.steps[0], last=self.steps[-1], remember=self.caches_graph
        )

    @cached_property
    def plan(self) -> Plan:
        """The graph prepared for many evaluations."""
        return Plan(self.graph)

    @cached_property
    def law(self) -> Law:
        """How far the graph can be trusted."""
        return law(self.graph, self.plan)

    @cached_property
    def whole_ns(self) -> int:
        """From the first to the last moment of the graph; of steps with time between them, the sum
        of their lengths.
        """
        times = get_point_times(self.graph)
        if self.apart:
            return int(self.compute_step_lengths(times).sum())
        return int(np.ptp(times)) if times.size else 0

    @property
    def ranks_ns(self) -> int:
        """The length of the graph once for each rank: what sums over ranks are a part of."""
        return self.whole_ns * max(self.rank_count, 1)

    @cached_property
    def apart(self) -> bool:
        """Whether there are several steps with time between them that belongs to none, such as a
        server's requests.
        """
        if self.step_count == 1:
            return False
        for trace in self.traces:
            steps = trace.steps.filter(pl.col("step").is_in(list(self.steps or ()))).sort(
                "start_ns"
            )
            between = int((steps["start_ns"] - steps["end_ns"].shift(1)).clip(0).sum())
            if between > _MAX_STEP_GAP_SHARE * int((steps["end_ns"] - steps["start_ns"]).sum()):
                return True
        return False

    def compute_step_lengths(self, times: Ints) -> Ints:
        """Returns the length of each step in a graph with these times of its points, shape
        (steps,); ns.

        From the end of the step before it, on the last rank, to its own end; of steps with time
        between them, from its own beginning. A step ends with its work on the device: work of a
        thread at its end may wait for the next step. Without a device it ends with its work on the
        host: a helper thread waits until the next step has something for it.
        """
        if self.step_count == 1:
            # Since the measurement began: nothing of the step can be before it, whatever the clock
            # of its work shows.
            return np.array([int(times.max()) - self._begun_ns if times.size else 0])
        step_index, start, end = self.node_step_index, times[0::2], times[1::2]
        counts = (step_index >= 0) & (
            self.select_kinds(*_DEVICE_KINDS)
            if self.has_gpu_work
            else ~self.select_kinds(graph_schema.WAIT)
        )
        last_ends = np.full(self.step_count, _MIN_INT64)
        np.maximum.at(last_ends, step_index[counts], end[counts])
        if self.apart:
            first_starts = np.full(self.step_count, np.iinfo(np.int64).max)
            np.minimum.at(first_starts, step_index[step_index >= 0], start[step_index >= 0])
            return np.where(last_ends > first_starts, last_ends - first_starts, 0)
        lengths: Ints = np.diff(
            np.maximum.accumulate(np.append(start[step_index == 0].min(), last_ends))
        )
        return lengths

    @cached_property
    def step_ns(self) -> int:
        """The mean length of the analysed steps.

        From the end of the device's work of earlier steps (or the beginning of the first step) to
        the end of their own.

        The graph spans more where the host runs ahead of the device: it also holds what the device
        still has to do of earlier steps. Stages of a pipeline are in a step at different times:
        there it is the step of the rank where it takes longest.
        """
        return self._total_length_ns // self.step_count

    @cached_property
    def unrecorded_step_ns(self) -> int:
        """The mean length of the analysed steps without what recording cost: savings, which are
        corrected for it too, are shares of this.
        """
        if (self.host_ratio or 1.0) <= 1:
            return self.step_ns
        host = NodeSelection("the host", self.select_kinds(*HOST_KINDS), "host")
        change = Change("scale", host, 0.0)
        times = self.changed(Scenario.of(self.graph), [change]).times(self.plan)
        measured_ns = self.compute_step_lengths(get_point_times(self.graph)).sum()
        saved_ns = int(measured_ns - self.compute_step_lengths(times).sum()) // self.step_count
        host_ns = min(max(saved_ns, 0), self.step_ns)
        return (
            self.step_ns
            - host_ns
            + unrecorded_saving_ns(
                self.graph, [change], host_ns, total_ns=self.step_ns, ratio=self.host_ratio
            )
        )

    @property
    def step(self) -> int | None:
        """The analysed step; None where there is none, or several."""
        return self.steps[0] if self.steps is not None and len(self.steps) == 1 else None

    @property
    def step_count(self) -> int:
        """The number of analysed steps; 1 where there are none."""
        return 1 if self.steps is None else len(self.steps)

    @cached_property
    def node_step_index(self) -> Ints:
        """For each node the index of its step, shape (nodes,): 0 for the first; -1 for nodes of
        other steps.
        """
        node_step = self.graph.nodes["step"].fill_null(-1).to_numpy().astype(np.int64)
        index = node_step - (self.steps[0] if self.steps else 0)
        index[(node_step < 0) | (index < 0) | (index >= self.step_count)] = -1
        return index

    @cached_property
    def _total_length_ns(self) -> int:
        """The sum over the steps: of all ranks together, or of the longest stage's."""
        if not self.is_pipeline:
            return self._measure_length_ns(np.ones(self.graph.nodes.height, dtype=np.bool_))
        rank = self.graph.node_ranks
        return max(self._measure_length_ns(rank == number) for number in np.unique(rank))

    def _measure_length_ns(self, nodes: Bools) -> int:
        if self.apart:
            return self.whole_ns
        times = get_point_times(self.graph)
        start, end = times[0::2][nodes], times[1::2][nodes]
        span_ns = int(end.max()) - min(int(start.min()), self._begun_ns) if end.size else 0
        if self.elsewhere is None:
            return span_ns
        device = (
            self.elsewhere[nodes]
            & self.select_kinds(
                graph_schema.KERNEL,
                graph_schema.COPY,
                graph_schema.FILL,
                *graph_schema.COMMUNICATION,
            )[nodes]
        )
        host = (
            ~self.elsewhere[nodes]
            & self.select_kinds(graph_schema.HOST, graph_schema.THINK, graph_schema.LAUNCH)[nodes]
        )
        if not device.any() or not host.any():
            return span_ns
        start_ns = max(int(end[device].max()), int(start[host].min()))
        return max(int(end.max()) - start_ns, 0) or span_ns

    @cached_property
    def _begun_ns(self) -> int:
        """When the graph begins: with its first node; with the step of a single rank, where nothing
        is recorded at its beginning.
        """
        first = int(self.graph.nodes["start_ns"].min() or 0)  # type: ignore[arg-type]
        if self.rank_count > 1 or self.steps is None or self.apart:
            return first
        begun = self.traces[0].steps.filter(step=self.steps[0])["start_ns"]
        return min((first, *(int(ns) - self.graph.epoch_ns for ns in begun)))

    @cached_property
    def elsewhere(self) -> Bools | None:
        """Nodes of other steps than those analysed, shape (nodes,); None where there are none."""
        if self.steps is None:
            return None
        other_steps: Bools = self.node_step_index < 0
        if not self.apart:  # time between consecutive steps counts for each of them
            other_steps &= self.graph.nodes["step"].is_not_null().to_numpy()
        return other_steps if other_steps.any() else None

    @cached_property
    def vendor(self) -> str:
        return find_vendor(self.traces)

    @cached_property
    def host_ratio(self) -> float | None:
        """Recorded step / unrecorded step, where that was measured."""
        return self.session.recording_overhead_ratio

    @property
    def traces(self) -> tuple[Trace, ...]:
        """The traces, one per rank or window."""
        return self.session.traces

    @property
    def where(self) -> str:
        """The analysed part, as part of a sentence."""
        if self.steps is None:
            return "the window"
        return f"the {self.unit}" if self.step_count == 1 else f"{self.step_count} {self.unit}s"

    @property
    def unit(self) -> str:
        """The unit of the steps: steps, or requests of a server."""
        return "request" if any(has_request_steps(trace) for trace in self.traces) else "step"

    def ran_ns(self, nodes: Bools) -> tuple[int, int] | None:
        """Returns how long the threads of some nodes ran in them, at least and at most, ns; None
        where it is unknown for all of them.
        """
        min_ns, max_ns = self._compute_cpu_time_bounds(nodes)
        return (
            None
            if (min_ns[nodes] < 0).any()
            else (int(min_ns[nodes].sum()), int(max_ns[nodes].sum()))
        )

    def select_sleeping_nodes(self, nodes: Bools, max_cpu_share: float) -> Bools:
        """Returns those of some nodes whose threads certainly ran at most this share of them."""
        min_ns, max_ns = self._compute_cpu_time_bounds(nodes)
        sleeping: Bools = (
            nodes
            & (min_ns >= 0)
            & (max_ns <= max_cpu_share * self.graph.nodes["duration_ns"].to_numpy())
        )
        return sleeping

    def _compute_cpu_time_bounds(self, nodes: Bools) -> tuple[Ints, Ints]:
        """Returns how long their threads ran in some nodes, at least and at most, ns, shape
        (nodes,); -1 where it is unknown.
        """
        min_ns, max_ns = (np.full(nodes.size, -1, dtype=np.int64) for _ in range(2))
        rows = self.graph.nodes.with_row_index("at").filter(pl.Series(nodes))
        for (rank, lane), thread_nodes in rows.group_by("rank", "lane"):
            trace = self.find_trace(rank)
            threads = self.graph.lanes.filter(pl.col("lane") == lane)["thread"].to_list()
            samples = (
                None
                if trace is None or not threads
                else self.ask(trace, _read_thread_clocks).get(str(threads[0]))
            )
            if samples is not None:
                low = (
                    thread_nodes["start_ns"].to_numpy()
                    + self.graph.epoch_ns
                    - self.rank_clock_offsets.get(rank, 0)
                )
                node_rows = thread_nodes["at"].to_numpy()
                min_ns[node_rows], max_ns[node_rows] = samples.bound_cpu_time(
                    low, low + thread_nodes["duration_ns"].to_numpy()
                )
        return min_ns, max_ns

    @cached_property
    def step_thread_cpu_ns(self) -> int | None:
        """The processor time of the thread that makes the steps in them, on the rank with the most;
        None where it is unknown.
        """
        max_ran = 0
        for trace in self.traces:
            log = read_run_steps(trace.meta)
            if log is None or self.steps is None or self.steps[-1] >= len(log.ran_ns):
                return None
            ran = [log.ran_ns[step] for step in self.steps]
            if None in ran:
                return None
            max_ran = max(max_ran, sum(time for time in ran if time is not None))
        return max_ran

    @cached_property
    def running(self) -> float | None:
        """The share of the window that the threads of the busiest process run, all together; None
        where it is unknown.
        """
        shares = []
        for trace in self.traces:
            samples = self.ask(trace, _read_thread_clocks).values()
            if not samples:
                return None
            window = max(int(sample.time_ns[-1]) for sample in samples) - min(
                int(sample.time_ns[0]) for sample in samples
            )
            shares.append(
                sum(int(sample.ran_ns[-1] - sample.ran_ns[0]) for sample in samples)
                / max(window, 1)
            )
        return max(shares, default=None)

    def ask(self, subject: S, analysis: Callable[[S], T]) -> T:
        """Returns an analysis of a trace, or of this context, computed once."""
        key = (id(subject), analysis)
        if key not in self._analysis_cache:
            self._analysis_cache[key] = analysis(subject)
        result: T = self._analysis_cache[key]
        return result

    def in_step(self, rows: pl.DataFrame) -> pl.DataFrame:
        """Returns the rows of the analysed steps, of a frame with a column `step`."""
        if self.steps is None or not rows.height:
            return rows
        return rows.filter(pl.col("step").is_between(self.steps[0], self.steps[-1]))

    def select_anti_pattern(self, pattern: str) -> tuple[pl.DataFrame, pl.DataFrame]:
        """Returns the rows of `AntiPatterns.patterns` and `.matches` of one pattern in all traces,
        with `trace`.
        """
        analyses = [self.ask(trace, anti_patterns) for trace in self.traces]
        is_pattern = pl.col("pattern") == pattern
        rules = concatenate_by_trace(trace_patterns.patterns for trace_patterns in analyses).filter(
            is_pattern
        )
        return rules, concatenate_by_trace(
            trace_patterns.matches for trace_patterns in analyses
        ).filter(is_pattern)

    def split_by_trace(self, rows: pl.DataFrame) -> Iterator[tuple[Trace, pl.DataFrame]]:
        """Yields each trace that has rows, and these, in their order; `rows` is stacked."""
        for trace_rows in rows.partition_by("trace", maintain_order=True):
            yield self.traces[trace_rows["trace"][0]], trace_rows

    def select_nodes_of_stacked_events(self, rows: pl.DataFrame) -> Bools:
        """Returns the graph's nodes for events of all traces, shape (nodes,); `rows` (stacked) have
        a column `event`.
        """
        mask = np.zeros(self.graph.nodes.height, dtype=np.bool_)
        for trace, trace_rows in self.split_by_trace(rows):
            mask |= self.node_mask(trace, trace_rows["event"])
        return mask

    @cached_property
    def gaps(self) -> pl.DataFrame:
        """The parts of gaps of all devices in the analysed steps: as `Idle.gaps`, with `trace`."""
        return self.in_step(
            concatenate_by_trace(self.ask(trace, idle).gaps for trace in self.traces)
        )

    @cached_property
    def rank_comparison(self) -> AcrossRanks | None:
        return (
            across_ranks(self.session) if len({trace.rank for trace in self.traces}) > 1 else None
        )

    @cached_property
    def is_pipeline(self) -> bool:
        return self.rank_comparison is not None and self.rank_comparison.pipeline.stages.height > 0

    @cached_property
    def rank_count(self) -> int:
        return self.graph.nodes["rank"].drop_nulls().n_unique()

    @cached_property
    def meeting(self) -> frozenset[int]:
        """Ranks that share communication with another one: only they can wait for each other."""
        parts = self.graph.communication.drop_nulls("instance").select(
            "instance",
            rank=self.graph.nodes["rank"][self.graph.communication.drop_nulls("instance")["node"]],
        )
        shared = parts.filter(pl.col("rank").n_unique().over("instance") > 1)
        return frozenset(shared["rank"].drop_nulls().to_list())

    @cached_property
    def kinds(self) -> pl.Series:
        return self.graph.nodes["kind"].cast(pl.String)

    def select_kinds(self, *kinds: str) -> Bools:
        """Returns the nodes of some kinds, shape (nodes,)."""
        return self.graph.node_mask(*kinds)

    @cached_property
    def has_gpu_work(self) -> bool:
        return bool(
            self.select_kinds(graph_schema.KERNEL, graph_schema.COPY, graph_schema.FILL).any()
        )

    @cached_property
    def stacks(self) -> bool:
        """Whether Python frames were recorded."""
        return any(bool((trace.events["category"] == vocab.PYTHON).any()) for trace in self.traces)

    @cached_property
    def sampled(self) -> bool:
        """Whether most operators were left out of a file, so that it is unknown what lies between
        the recorded ones.
        """
        checks = (check_sampled_operators(trace) for trace in self.traces)
        return any(check is not None and check.affected for check in checks)

    @cached_property
    def allocations(self) -> list[tuple[Trace, Allocations]]:
        return [
            (trace, explain_allocations(trace)) for trace in self.traces if trace.allocations.height
        ]

    def node_mask(self, trace: Trace, events: pl.Series) -> Bools:
        """Returns the graph's nodes for some events (rows) of one trace, shape (nodes,)."""
        several = len(self.session.traces) > 1
        return select_event_nodes(self.graph, trace.rank if several else None, events)

    def below(self, trace: Trace, events: pl.Series) -> Bools:
        """Returns the nodes for some host events, for events inside them, and for the GPU work
        launched there, shape (nodes,).
        """
        tree = build_forest(trace)
        roots = np.zeros(tree.row.size, dtype=np.bool_)
        positions = tree.position[
            (events.drop_nulls() if events.null_count() else events).to_numpy().astype(np.int64)
        ]
        roots[positions[positions >= 0]] = True
        return self.inside(trace, roots)

    def inside(self, trace: Trace, roots: Bools) -> Bools:
        """Returns the same for positions in the trace's forest."""
        tree = build_forest(trace)
        host = pl.Series(tree.row[tree.outermost_or_self(roots) >= 0], dtype=pl.UInt32)
        if not host.len():
            return np.zeros(self.graph.nodes.height, dtype=np.bool_)
        # The last for events without a call: NO_ROW
        calls = np.zeros(trace.events.height + 1, dtype=np.bool_)
        calls[host.to_numpy()] = True
        launched = np.flatnonzero(gather_rows(calls, get_event_column(trace, "launch", NO_ROW)))
        return self.node_mask(trace, pl.concat([host, pl.Series(launched, dtype=pl.UInt32)]))

    def changed(self, base: Scenario, changes: Sequence[Change]) -> Scenario:
        """Returns the scenario with changes in the analysed steps only, even if the graph has work
        of other steps.
        """
        if self.elsewhere is None:
            for change in changes:
                base = base.apply(change)
            return base
        out = base
        for change in changes:
            before, out = out, out.apply(change, ~self.elsewhere)
            if out.graph is before.graph:  # some changes affect more than the selected nodes
                out.work_ns[self.elsewhere] = before.work_ns[self.elsewhere]
                edges = self.elsewhere[out.graph.edges["target"].to_numpy()]
                out.delay_ns[edges] = before.delay_ns[edges]
        return out

    def list_ranks(self, nodes: Bools) -> list[int]:
        return [rank for rank in np.unique(self.graph.node_ranks[nodes]).tolist() if rank >= 0]

    def work_ns(self, nodes: Bools) -> int:
        return int(self.graph.nodes["work_ns"].to_numpy()[nodes].sum())

    def compute_work_by_rank(self, nodes: Bools) -> dict[int, int]:
        """Returns the summed work of some nodes by rank, ns, the smallest rank first."""
        ranks, rank_index = np.unique(self.graph.node_ranks[nodes], return_inverse=True)
        sums = np.zeros(ranks.size, dtype=np.int64)
        np.add.at(sums, rank_index, self.graph.nodes["work_ns"].to_numpy()[nodes])
        return dict(zip(ranks.tolist(), sums.tolist(), strict=True))

    def own(self, nodes: Bools) -> Bools:
        """Returns those of some nodes that belong to the analysed steps, without leftover device
        work of earlier steps.
        """
        return nodes if self.elsewhere is None else nodes & ~self.elsewhere

    def format_time_per_step(self, time_ns: int) -> str:
        return units.format_duration(round(time_ns / self.step_count))

    def many(self, count: int, noun: str = "") -> str:
        """Formats a count of all steps as the count per step, with the noun where given."""
        per_step = max(round(count / self.step_count), 1)
        return units.format_quantity(per_step, noun) if noun else units.format_count(per_step)

    @property
    def rank_sum_suffix(self) -> str:
        return f", summed over {self.rank_count} ranks" if self.rank_count > 1 else ""

    def compute_exposed_ns(self, nodes: Bools) -> int:
        """Returns the time in which these run on the device and no kernel of the same rank
        computes, summed over ranks.
        """
        return sum(spans.total for spans in find_exposed_time(self.graph, nodes))

    def evidence(self, nodes: Bools, max_count: int = 4) -> tuple[Evidence, ...]:
        """Returns the longest of some nodes, as they are in their traces."""
        node_rows = np.flatnonzero(nodes)
        longest = np.argsort(-self.graph.nodes["duration_ns"].to_numpy()[node_rows], kind="stable")[
            :max_count
        ]
        entries = []
        for row in self.graph.nodes[node_rows[longest]].to_dicts():
            trace = self.find_trace(row["rank"])
            start = (
                int(row["start_ns"])
                + self.graph.epoch_ns
                - self.rank_clock_offsets.get(row["rank"], 0)
            )
            lane: int | None = None
            if (
                trace is not None
                and row["event"] is not None
                and row["kind"] in (graph_schema.KERNEL, graph_schema.COPY, graph_schema.FILL)
            ):
                start, lane = (trace.events[key][row["event"]] for key in ("start_ns", "lane"))
            on_host = row["kind"] in (graph_schema.HOST, graph_schema.THINK, graph_schema.WAIT)
            frame_name = (
                self._find_covering_frame(trace, row, start)
                if on_host and trace is not None
                else None
            )
            label = frame_name or (
                shorten_name(row["name"])
                if row["name"] and row["kind"] != graph_schema.THINK
                else UNNAMED_HOST_TIME
            )
            entries.append(Evidence(label, row["rank"], start, row["duration_ns"], lane))
        return tuple(entries)

    def stretches(self, nodes: Bools) -> pl.DataFrame:
        """Returns the host time of some nodes in the analysed steps, as `HOST_INTERVALS_SCHEMA`
        with rank, in the times of their traces.
        """
        selected = np.flatnonzero(self.own(nodes) & self.select_kinds(*HOST_KINDS))
        rows = self.graph.nodes[["rank", "lane", "start_ns", "duration_ns"]][selected].drop_nulls(
            "lane"
        )
        lanes, shifts = self._trace_lanes_and_shifts
        lane = rows["lane"].to_numpy()
        start = rows["start_ns"] + shifts[lane]
        times = (
            pl.Series("lane", lanes[lane]),
            start,
            (start + rows["duration_ns"]).alias("end_ns"),
        )
        intervals = pl.DataFrame([rows["rank"], *times])[np.flatnonzero(lanes[lane] >= 0)]
        return intervals.pipe(cast_to_schema, {"rank": pl.Int32, **HOST_INTERVALS_SCHEMA})

    @cached_property
    def _trace_lanes_and_shifts(self) -> tuple[Ints, Ints]:
        """For each lane of the graph the lane of the same host thread in the trace of its rank, -1
        for none; and the offset from times of the graph to times of that trace, ns; shape (lanes,)
        each.
        """
        threads = {
            (rank, process, thread): lane
            for rank in self.rank_clock_offsets
            if (trace := self.find_trace(rank)) is not None
            for lane, kind, process, thread in trace.lanes[
                ["lane", "kind", "process", "thread"]
            ].iter_rows()
            if kind == "host"
        }
        keys = self.graph.lanes[["rank", "process", "thread"]].rows()
        shifts = [self.graph.epoch_ns - self.rank_clock_offsets.get(rank, 0) for rank, *_ in keys]
        return np.array([threads.get(key, -1) for key in keys], dtype=np.int64), np.array(
            shifts, dtype=np.int64
        )

    @cached_property
    def rank_clock_offsets(self) -> dict[int | None, int]:
        """What is added to times of each rank's trace in the graph, ns."""
        return dict(self.graph.ranks.select("rank", pl.col("clock_offset_ns").fill_null(0)).rows())

    def find_trace(self, rank: int | None) -> Trace | None:
        """Returns the trace of a rank; None where several claim it, since it is unknown whose
        events are meant.
        """
        traces = [trace for trace in self.traces if len(self.traces) == 1 or trace.rank == rank]
        return traces[0] if len(traces) == 1 else None

    def _find_covering_frame(self, trace: Trace, row: dict[str, Any], start: int) -> str | None:
        """Returns the innermost Python frame of a node's thread that covers most of it; None where
        none is recorded.
        """
        if row["lane"] is None:
            return None
        end = start + row["duration_ns"]
        frames = self.ask(trace, _select_python_frames).filter(
            pl.col("lane") == self._trace_lanes_and_shifts[0][row["lane"]]
        )
        min_overlap_ns = _MIN_NAME_COVERAGE * max(end - start, 1)
        overlap_ns = pl.min_horizontal(pl.col("end_ns"), end) - pl.max_horizontal(
            pl.col("start_ns"), start
        )
        frames_inside = frames.filter(pl.col("start_ns") < end, pl.col("end_ns") > start).filter(
            overlap_ns >= min_overlap_ns
        )
        return (
            shorten_name(frames_inside.sort("depth")["name"][-1]) if frames_inside.height else None
        )


def _read_thread_clocks(trace: Trace) -> dict[str, ThreadClock]:
    """Returns processor time by thread, where the trace uses the same clock."""
    return read_thread_clocks(trace.meta) if trace.meta.clock == "unix" else {}


def _select_python_frames(trace: Trace) -> pl.DataFrame:
    python = trace.events.filter(pl.col("category") == vocab.PYTHON)
    return python.select(
        "name", "lane", "start_ns", "depth", end_ns=pl.col("start_ns") + pl.col("duration_ns")
    )
