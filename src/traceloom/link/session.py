"""The graph of traces that are loaded already: the whole run, or one step of it."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import polars as pl

from traceloom.array_types import Ints
from traceloom.errors import InputError, UsageError
from traceloom.link.job import join
from traceloom.link.rank import link_rank
from traceloom.model import Graph, Session, Trace
from traceloom.model.arrays import NO_ROW, column_of, plain, row_numbers
from traceloom.model.category import COMMAND, GPU_WORK
from traceloom.model.notice import Notice
from traceloom.model.parked import ColumnFiles, many
from traceloom.model.schema import empty
from traceloom.read.freeing import give_back
from traceloom.retime import calibrate

Say = Callable[[str], None]

_KEPT = 2  # graphs remembered: of one run, the whole and a step
_POINTING = {
    **dict.fromkeys(("collectives", "copies", "syncs", "python", "tensors"), ("event",)), "flows": ("source", "target"),
}  # fmt: skip
_NOT_LINKED = ("allocations", "kernels", "sources")
_BY_TIME = ("counters", "marks")
_REFERENCES = ("parent", "op", "launch")
_MOMENT = 0.01  # of the step: GPU work from before that goes on for less needs no lead


class _Remembered:
    """Graphs of the traces asked for last; forgotten with the first of the traces that goes."""

    def __init__(self) -> None:
        self._traces: tuple[weakref.ref[Trace], ...] = ()
        self._graphs: dict[tuple[int, int] | None, Graph] = {}

    def of(self, traces: tuple[Trace, ...]) -> dict[tuple[int, int] | None, Graph]:
        """The graphs of these traces by first and last step, to be read and added to."""
        if len(traces) != len(self._traces) or any(
            ref() is not trace for ref, trace in zip(self._traces, traces, strict=True)
        ):
            self._graphs = {}
            self._traces = tuple(weakref.ref(trace, self.forget) for trace in traces)
        return self._graphs

    def forget(self, gone: weakref.ref[Trace]) -> None:
        if any(ref is gone for ref in self._traces):
            self._traces, self._graphs = (), {}


_REMEMBERED = _Remembered()


def link_session(
    session: Session,
    *,
    step: int | None = None,
    last: int | None = None,
    progress: Say | None = None,
    remember: bool = True,
) -> Graph:
    """Link the traces of a loaded session into one calibrated graph; the files are not read again.

    With a `step`, every rank is cut to that step before it is linked, so that a step of a large job fits in memory.
    What the host did from the step's beginning to its end is in the graph, the GPU work that this launched, however
    late it ran, and what ran before it on the same devices. `event` and `op` of the
    nodes are rows of the whole traces. Host traces are not looked at.

    The most recent graphs are remembered as long as the traces live: do not change them.

    Args:
        session: The run.
        step: The number of a step; None links all of it.
        last: The last of several steps of which `step` is the first; one step where None.
        progress: Told in words what is being done.
        remember: Whether the graph is kept for the next caller.

    Returns:
        The graph, as `traceloom.link.link` gives it.

    Raises:
        UsageError: `no-such-step`: no trace has that step.
        InputError: `several-windows`: one rank has several traces (and `step` is not given);
            `unknown-ranks`: several traces do not say their rank.

    Example:
        >>> import traceloom
        >>> from traceloom.link.session import link_session
        >>> graph = link_session(traceloom.load("run"), step=12)  # doctest: +SKIP
    """
    remembered = _REMEMBERED.of(session.traces)
    steps = None if step is None else (step, step if last is None else last)
    if steps in remembered:
        return remembered[steps]
    say: Say = progress or (lambda _: None)
    chosen, notices = _chosen(session, steps)
    several = many(chosen)
    parts, storage = [], ColumnFiles()
    for number, trace in enumerate(chosen, 1):
        who = "the trace" if len(chosen) == 1 else f"rank {trace.rank} ({number} of {len(chosen)})"
        say(f"linking {who}")
        part = link_rank(trace) if steps is None else _steps_of(trace, *steps)
        parts.append(storage.graph(part) if several else part)
    say("joining ranks and calibrating")
    merged = join(parts, session.name)
    parts.clear()  # calibrating needs as much again
    merged = ColumnFiles().graph(merged) if several else merged
    give_back()
    graph = calibrate(replace(merged, notices=(*notices, *merged.notices)))
    give_back()
    if not remember:
        return graph
    if len(remembered) >= _KEPT:
        del remembered[next(iter(remembered))]
    remembered[steps] = graph
    return graph


def _chosen(session: Session, steps: tuple[int, int] | None) -> tuple[list[Trace], list[Notice]]:
    """One trace per rank: with steps the first that has the first and the last of them; one may not say its rank."""
    having = list(session.traces)
    words = ""
    if steps is not None:
        words = f"step {steps[0]}" if steps[0] == steps[1] else f"step {steps[0]} to {steps[1]}"
        having = [trace for trace in having if trace.steps["step"].is_in(steps).sum() == len(set(steps))]
        if not having:
            recorded = sorted({number for trace in session.traces for number in trace.steps["step"].to_list()})
            recorded_text = (
                f"; the traces have {recorded[0]} to {recorded[-1]}" if recorded else ": the traces have no steps"
            )
            raise UsageError(f"there is no {words}{recorded_text}", slug="no-such-step")
    unique = steps is None or any(trace.rank is None for trace in having)
    first: dict[int | None, Trace] = {}
    for trace in having:
        if first.setdefault(trace.rank, trace) is trace or not unique:
            continue
        both = f"{first[trace.rank].meta.path}, {trace.meta.path}"
        if trace.rank is None:
            raise InputError(
                f"several traces do not say their rank: {both}",
                slug="unknown-ranks",
                hint="put the rank into the file names, as in rank0.json.gz",
            )
        raise InputError(
            f"there are two device traces of rank {trace.rank}: {both}",
            slug="several-windows",
            hint="a graph is of one window; give one device trace per rank, or ask for one step",
        )
    unnumbered = first.get(None)
    if unnumbered is not None and 0 in first:  # beside others it gets the lowest free number
        free = next(number for number in range(len(first) + 1) if number not in first)
        first[None] = replace(unnumbered, meta=replace(unnumbered.meta, rank=free))
    lacking = sorted({trace.rank for trace in session.traces if trace.rank is not None} - set(first))
    if not lacking:
        return list(first.values()), []
    who = ", ".join(map(str, lacking[:8])) + ("…" if len(lacking) > 8 else "")
    text = f"{words} is not in the traces of {len(lacking)} ranks ({who}); they are not in the graph"
    return list(first.values()), [Notice("step-missing", "warning", text, len(lacking))]


def _steps_of(trace: Trace, first: int, last: int) -> Graph:
    """The graph of some steps; a function of its own, so that the part of the trace is freed."""
    bounds = trace.steps.filter(pl.col("step").is_in((first, last)))  # ascending
    part, row = _cut(trace, int(bounds["start_ns"][0]), int(bounds["end_ns"][-1]))
    graph = link_rank(part)
    rows = pl.Series(row, dtype=pl.UInt32)  # events are named by their rows in the whole trace
    nodes = graph.nodes.with_columns(rows[graph.nodes[column]].alias(column) for column in ("event", "op"))
    return replace(graph, nodes=nodes)


def _cut(trace: Trace, low: int, high: int) -> tuple[Trace, Ints]:
    """Cut a trace to [low, high) of its host time, to the GPU work that belongs to that, and to a lead.

    Kept are: what the host does until `high`; GPU work that it launched, however late it runs, and GPU work launched
    before that still runs. The lead begins where the first GPU work that still runs in
    the step was launched, at most as long before the step as the step is long: waits between streams are told by calls
    that come before the work. Where such work goes on for a moment only there is no lead: it would hold what the host
    did meanwhile, up to a whole step of one rank without its peers. Host events that cross a bound are shortened to it.

    Args:
        trace: The whole trace.
        low: Start of the step, ns.
        high: Its end, ns.

    Returns:
        The part, with rows of its own, for linking (accounts of lanes are those of the whole trace); and the row in
        the whole trace of each of its events.
    """
    events = trace.events
    start = events["start_ns"].to_numpy()
    end = start + np.maximum(events["duration_ns"].to_numpy(), 0)
    device = events["category"].is_in([*GPU_WORK, COMMAND]).to_numpy()
    launch = column_of(events, "launch", NO_ROW, large=False)
    running = device & (start < high) & (end > low) & (launch >= 0)
    before = running.copy()
    before[running] = start[launch[running]] < low
    from_ns = low
    if int(end[before].max(initial=low)) - low >= _MOMENT * (high - low):
        from_ns = max(int(start[launch[running]].min(initial=low)), low - (high - low))
    launched_ns = np.where(launch >= 0, start[launch], start) if start.size else start
    own_work = device & (launched_ns >= from_ns) & (launched_ns < high)
    until = max(high, int(end[own_work].max(initial=high)))
    # What was launched after the step came after its work on each stream: it held nothing of it back.
    ran = device & (end > from_ns) & (start < until) & ((launch < 0) | (launched_ns < high))
    host = (trace.lanes["kind"] == "host").to_numpy()[events["lane"].to_numpy()] if events.height else device
    bound = np.where(host, high, until)
    # What has no length counts where it stands; the first moment belongs to the part, the last does not.
    kept = own_work | ran | (~device & (start < bound) & ((end > from_ns) | (start >= from_ns)))
    parent = column_of(events, "parent", NO_ROW, large=False)
    # parents stand above all children that stood under them
    while (missing := parent[kept & (parent >= 0) & ~kept[parent]]).size:
        kept[missing] = True
    row = np.flatnonzero(kept)
    first = np.where(host[row], np.maximum(start[row], from_ns), start[row])
    order = np.argsort(first, kind="stable")
    row, first = row[order], first[order]
    # the events of these rows and all that goes with them
    number = np.full(events.height + 1, -1, dtype=np.int64)  # the last for rows that are null
    number[row] = np.arange(row.size)
    events, host = events[row], host[row]
    duration, nested = events["duration_ns"].to_numpy(), events["nested_end_ns"].to_numpy()
    last = start[row] + duration
    last = np.where(host, np.minimum(last, high), last)
    nested = np.where(host, np.minimum(nested, high), nested)
    events = events.with_columns(
        pl.int_range(row.size, dtype=pl.UInt32).alias("event"),
        pl.Series("start_ns", first),
        # Negative durations of damaged files stay; others end at the bound, never before they begin.
        pl.Series("duration_ns", np.where(duration < 0, duration, np.maximum(last - first, 0))),
        pl.Series("nested_end_ns", np.maximum(nested, first)),
        *(row_numbers(_moved(events[name], number)).alias(name) for name in _REFERENCES),
    )
    frames: dict[str, Any] = {"events": events, **{name: empty(name) for name in _NOT_LINKED}}
    for name, columns in _POINTING.items():
        frame: pl.DataFrame = getattr(trace, name)
        moved = [_moved(frame[column], number) for column in columns]
        inside = np.flatnonzero(np.min(moved, axis=0) >= 0)
        part = frame[inside]
        for column, rows in zip(columns, moved, strict=True):
            part.replace_column(part.get_column_index(column), plain(rows[inside], pl.UInt32).alias(column))
        frames[name] = part
    for name in _BY_TIME:
        times = getattr(trace, name)["time_ns"].to_numpy()
        frames[name] = getattr(trace, name)[np.flatnonzero((times >= from_ns) & (times < high))]
    return replace(trace, **frames), row


def _moved(rows: pl.Series, number: Ints) -> Ints:
    """References to rows of the whole trace as rows of the part; -1 where the row is not in it."""
    moved: Ints = number[(rows.fill_null(number.size - 1) if rows.null_count() else rows).to_numpy()]
    return moved
