"""What decides how long a step takes? The chain of work and waits that leads through it, and the slack of the rest.

Exact definitions: docs/concepts/critical-path.md.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import polars as pl

from traceloom.analyze.path import tables
from traceloom.analyze.path.pieces import CLASSES, DATA, HOST, RESIDUAL, UNRECORDED, pieces, split, waits_for_data
from traceloom.analyze.path.window import PathWindow, clocks, usual_step, usual_step_of, window_of
from traceloom.errors import UsageError
from traceloom.link import link_session
from traceloom.model import Session, Trace, units
from traceloom.model.graph import Graph
from traceloom.model.graph_arrays import point_times
from traceloom.model.result import Result
from traceloom.retime.law import HONEST, Law, law
from traceloom.retime.slack import slack_ns

_WORTH_SAYING = 0.005


@dataclass(frozen=True)
class CriticalPath(Result):
    """The critical path of a step.

    Attributes:
        sentence: Where its time goes.
        step: The step; None for the whole window.
        start_ns: Where the window begins, on the session's clock: where the first rank begins the step.
        window_ns: To where the last rank ends it.
        path: The path as pieces that follow each other without a gap, from the window's start to its end: `start_ns`
            (on the session's clock), `duration_ns`, `class` (see CLASSES), `node` (row of the graph; null before the
            path begins and after it ends), `kind` (of the node), `name`, `rank`, `lane` (row of the graph's lanes),
            `thread` (name of the lane), `event` (row of the rank's trace), `edge` (the kind of edge by which the path
            came to it, or along which the time went by), `along_edge`, `evidence` (of the edge).
        stretches: The same, neighbouring pieces of one lane as one: `start_ns`, `duration_ns`, `rank`, `where` (name of
            the lane), what tells the lane apart (`kind`, `process`, `thread`, `device`, `stream`), `class` and `name`
            with the most of its time (`class_ns`, `name_ns`), `piece_count`, `first_event` and `last_event` (rows of
            the rank's trace), `edge` and `evidence` (how the path came
            there).
        classes: `class`, `duration_ns`, `fraction`, `piece_count`: every class, in the order of CLASSES. The
            durations add up to `window_ns`.
        ranks: `rank`, `class`, `duration_ns`, `fraction`: which ranks the path goes through; adds up to `window_ns`.
            Time before the path begins counts to the rank it begins on: the others waited for it.
        names: What lies in the window, by name: `class`, `name`, `count` (nodes), `duration_ns` (of all of them),
            `path_ns` (of the path), `path_fraction`, `least_slack_ns` (of those that are not on the path; null where
            all are), `near_count` and `near_ns` (those not on the path whose slack is at most `near_slack_ns`). The
            most of the path first.
        node_slack: `node`, `rank`, `event`, `slack_ns` of every node of the graph: how much later it could end
            without the step ending later; 0 where its work is on the path.
        near_slack_ns: What counts as nearly critical: 1 % of the window.
        law: How well the graph explains the run that it was made from: both errors.
    """

    sentence: str
    step: int | None
    start_ns: int
    window_ns: int
    path: pl.DataFrame
    stretches: pl.DataFrame
    classes: pl.DataFrame
    ranks: pl.DataFrame
    names: pl.DataFrame
    node_slack: pl.DataFrame
    near_slack_ns: int
    law: Law

    def check(self) -> None:
        """Raise AssertionError where the pieces do not tile the window, or a sum does not add up to it."""
        start, length = self.path["start_ns"].to_numpy(), self.path["duration_ns"].to_numpy()
        assert (length > 0).all()
        assert (start[1:] == (start + length)[:-1]).all()
        assert not start.size or (start[0] == self.start_ns)
        for frame in (self.path, self.stretches, self.classes, self.ranks):
            assert int(frame["duration_ns"].sum()) == self.window_ns
        assert (self.node_slack["slack_ns"] >= 0).all()


def critical_path(of: Session | Trace | Graph, step: int | None = None) -> CriticalPath:
    """Find the critical path of a step over host, devices and all ranks.

    The path begins with the last thing of the step (the end of its thread's time, or of GPU work it launched that
    ended later), goes back over what each thing waited for last, and is cut to the time of the step.

    Args:
        of: A session or a trace, of which only the step is linked; or a linked graph.
        step: The step; None takes the whole step of median length, and without steps the whole window.

    Raises:
        UsageError: `no-such-step`; `nothing-to-link`: there is nothing in the graph.
        InputError: As `traceloom.link.link_session`.

    Example:
        >>> import traceloom
        >>> path = traceloom.analyze.critical_path(traceloom.load("run"))  # doctest: +SKIP
        >>> print(path.sentence)  # doctest: +SKIP
    """
    if isinstance(of, Graph):
        session, graph = None, of
        step = usual_step_of(graph) if step is None else step
    else:
        session = Session((of,), of.meta.path) if isinstance(of, Trace) else of
        step = usual_step(session.traces) if step is None else step
        graph = link_session(session, step=step)
    if graph.nodes.height <= graph.ranks.height:
        raise UsageError("the traces hold no timed events, so there is no path through them", slug="nothing-to-link")
    window = window_of(graph, step, session)
    path_pieces = pieces(graph, window)
    if session is not None:
        # Host time on the path in which the loop waits for its data
        lane_of = np.append(graph.nodes["lane"].cast(pl.Int64).fill_null(-1).to_numpy(), -1)
        code = list(CLASSES).index(HOST)
        ranks = set(
            graph.nodes["rank"].gather(
                np.unique(path_pieces.node[(path_pieces.node >= 0) & (path_pieces.kind == code)])
            )
        )
        for trace, clock in clocks(graph, session, window.step):
            if clock.rank not in ranks:
                continue
            for lane, start, end in waits_for_data(graph, trace, clock.rank, clock.shift):
                on_lane = (path_pieces.kind == code) & (lane_of[path_pieces.node] == lane)
                path_pieces = split(path_pieces, on_lane, start, end, DATA)
    length = window.high - window.low
    near = length // 100
    slack = slack_ns(graph, int(point_times(graph)[window.last]))
    path = tables.path(graph, path_pieces)
    classes = tables.classes(path, length)
    names = tables.names(graph, window, path, slack, near)
    nodes = graph.nodes.select("node", "rank", "event", pl.Series("slack_ns", slack))
    graph_law = law(graph)
    return CriticalPath(
        sentence=_sentence(window, path, classes, graph_law),
        step=window.step,
        start_ns=graph.epoch_ns + window.low,
        window_ns=length,
        path=path,
        stretches=tables.stretches(graph, path),
        classes=classes,
        ranks=tables.ranks(path, length),
        names=names,
        node_slack=nodes,
        near_slack_ns=near,
        law=graph_law,
    )


_LABELS = {
    DATA: "waiting for data",
    HOST: "the host",
    UNRECORDED: "waits for what was not recorded",
    RESIDUAL: "without a known cause",
}


def _sentence(window: PathWindow, path: pl.DataFrame, classes: pl.DataFrame, graph_law: Law) -> str:
    length = window.high - window.low
    sums = dict(classes.select("class", "duration_ns").rows())
    late = path.head(1).filter(pl.col("node").is_null())
    parts = [(_LABELS.get(kind, kind), ns) for kind, ns in sums.items()]
    if late.height:
        waited = int(late["duration_ns"][0])
        rank = late["rank"][0]
        begins = "before anything is recorded" if rank is None else f"before rank {rank} began"
        parts = [(label, ns - waited if label == _LABELS[UNRECORDED] else ns) for label, ns in parts]
        parts.append((begins, waited))
    largest = sorted((part for part in parts if part[1] >= max(_WORTH_SAYING * length, 1)), key=lambda part: -part[1])
    listing = ", ".join(f"{label} {units.share(ns, length)}" for label, ns in largest)
    subject = f"step {window.step}" if window.step is not None else "the window"
    text = f"What decides the {units.duration(length)} of {subject}: {listing or 'nothing that takes time'}"
    if abs(graph_law.honest_error) > HONEST:
        off = f"{graph_law.honest_error:+.1%}".replace("%", " %")
        text += f"; with usual delays alone the graph misses the measured time by {off}, so take this with care"
    return text + "."
