"""The graph of traces that are loaded already: the whole run, or one step of it."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from dataclasses import replace

import polars as pl

from traceloom.errors import InputError, UsageError
from traceloom.link.cutting import cut_to_step, step_bounds
from traceloom.link.job import join
from traceloom.link.rank import link_rank
from traceloom.model import Graph, Session, Trace
from traceloom.model.notice import Notice
from traceloom.model.parked import ColumnFiles, many
from traceloom.read.freeing import give_back
from traceloom.retime import calibrate

Say = Callable[[str], None]

_KEPT = 2  # graphs remembered: of one run, the whole and a step


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
            self._traces = tuple(weakref.ref(trace, self._forget) for trace in traces)
        return self._graphs

    def _forget(self, gone: weakref.ref[Trace]) -> None:
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
    late it ran, and what ran before it on the same devices (see `traceloom.link.cutting`). `event` and `op` of the
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
    say = progress or _silent
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
    """One trace per rank: with steps those that have the first and the last, else all."""
    if steps is None:
        _one_per_rank(session.traces)
        return list(session.traces), []
    having = [trace for trace in session.traces if all(step_bounds(trace, step) is not None for step in steps)]
    if not having:
        recorded = sorted({number for trace in session.traces for number in trace.steps["step"].to_list()})
        recorded_text = (
            f"; the traces have {recorded[0]} to {recorded[-1]}" if recorded else ": the traces have no steps"
        )
        raise UsageError(f"there is no {_in_words(steps)}{recorded_text}", slug="no-such-step")
    first: dict[int | None, Trace] = {}
    for trace in having:
        first.setdefault(trace.rank, trace)
    if len(first) < len(having) and None in first:
        _one_per_rank(tuple(having))
    lacking = sorted({trace.rank for trace in session.traces if trace.rank is not None} - set(first))
    notices = []
    if lacking:
        who = ", ".join(map(str, lacking[:8])) + ("…" if len(lacking) > 8 else "")
        text = f"{_in_words(steps)} is not in the traces of {len(lacking)} ranks ({who}); they are not in the graph"
        notices.append(Notice("step-missing", "warning", text, len(lacking)))
    return list(first.values()), notices


def _one_per_rank(traces: Iterable[Trace]) -> None:
    seen: dict[int | None, Trace] = {}
    for trace in traces:
        if trace.rank in seen:
            both = f"{seen[trace.rank].meta.path}, {trace.meta.path}"
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
        seen[trace.rank] = trace


def _in_words(steps: tuple[int, int]) -> str:
    first, last = steps
    return f"step {first}" if first == last else f"step {first} to {last}"


def _steps_of(trace: Trace, first: int, last: int) -> Graph:
    begin, end = step_bounds(trace, first), step_bounds(trace, last)
    assert begin is not None, "only traces that have the steps are chosen"
    assert end is not None, "only traces that have the steps are chosen"
    part = cut_to_step(trace, begin[0], end[1])
    graph = link_rank(part.trace)
    rows = pl.Series(part.row, dtype=pl.UInt32)  # events are named by their rows in the whole trace
    nodes = graph.nodes.with_columns(rows.gather(graph.nodes[column]).alias(column) for column in ("event", "op"))
    return replace(graph, nodes=nodes)


def _silent(_: str) -> None:
    """Nobody wants to know."""
