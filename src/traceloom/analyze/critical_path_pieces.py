"""The window of a critical path, and the path as contiguous pieces of time."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Literal

import numpy as np
import polars as pl
from msgspec import Struct

from traceloom.analyze.data_loading import find_loader_calls
from traceloom.analyze.steps import find_step_spans
from traceloom.errors import UsageError
from traceloom.graph import graph as graph_schema
from traceloom.graph.critical_path import walk_back
from traceloom.graph.graph import Graph, get_point_times
from traceloom.system.text import replace_surrogates
from traceloom.trace.array_types import Bools, Ints
from traceloom.trace.session import Session
from traceloom.trace.trace import Trace
from traceloom.trace.vocabulary import GPU_WORK

_HOST_KINDS = (
    graph_schema.HOST,
    graph_schema.THINK,
    graph_schema.WAIT,
    graph_schema.LAUNCH,
    graph_schema.BLOCK,
)
_NO_LANE = 2**32 - 1
_SIDES: tuple[Literal["left", "right"], ...] = ("left", "right")
_MAX_TIME = int(np.iinfo(np.int64).max)
_CLOCK_EVENTS = 16  # events that relate a trace's clock to the graph's


class PathWindow(Struct, frozen=True):
    """The time of one step (or of everything) in a graph, on the graph's clock.

    Attributes:
        step: The step; None for everything.
        low: Start, ns: where the first rank begins the step.
        high: End, ns: where the last rank ends it.
        last: The point that the path leads to: the end of the step, or of work that it launched and
            that ended later.
    """

    step: int | None
    low: int
    high: int
    last: int


def find_median_step(traces: Iterable[Trace]) -> int | None:
    """Returns the step of median length among the whole ones that most ranks have; None without
    steps that take time.

    The length of a step is that of its slowest rank. Of an even number of steps the longer of the
    two in the middle is taken.
    """
    common = find_common_steps(traces)
    return common[len(common) // 2] if common else None


def find_common_steps(traces: Iterable[Trace]) -> list[int]:
    """Returns the whole steps that most ranks have, from the shortest to the longest on their
    slowest rank.
    """
    steps = [find_step_spans(trace)[["step", "complete", "start_ns", "end_ns"]] for trace in traces]
    lengths = pl.concat(steps) if steps else pl.DataFrame()
    if not lengths.height:
        return []
    lengths = lengths.select("step", "complete", ns=pl.col("end_ns") - pl.col("start_ns")).filter(
        pl.col("ns") > 0
    )
    if not lengths.height:
        return []
    complete_steps = lengths.filter("complete")
    step_totals = (
        (complete_steps if complete_steps.height else lengths)
        .group_by("step")
        .agg(pl.col("ns").max(), pl.len().alias("ranks"))
    )
    common = step_totals.filter(pl.col("ranks") == pl.col("ranks").max()).sort("ns", "step")
    return common["step"].to_list()


def find_median_graph_step(graph: Graph) -> int | None:
    """Returns the median step of a graph alone, where it is unknown which steps are whole."""
    spans = _find_step_spans(graph)
    if not spans.height:
        return None
    step_lengths = spans.group_by("step").agg(
        (pl.col("high").max() - pl.col("low").min()).alias("ns"), pl.len().alias("ranks")
    )
    common = step_lengths.filter(pl.col("ranks") == pl.col("ranks").max()).sort("ns", "step")
    return int(common["step"][common.height // 2])


def find_path_window(graph: Graph, step: int | None, session: Session | None = None) -> PathWindow:
    """Returns the window of a step, or of the whole graph.

    Args:
        graph: A linked graph with at least one node.
        step: The step; None for everything.
        session: The traces that it was linked from, which determine when steps begin and end;
            without them a step is the time that the nodes of its thread cover.

    Raises:
        UsageError: `no-such-step`.
    """
    times = get_point_times(graph)
    if step is None:
        return PathWindow(
            None, int(times.min()), int(times.max()), int(np.flatnonzero(times == times.max())[-1])
        )
    spans = _find_step_spans(graph).filter(pl.col("step") == step)
    # As in the traces, on the graph's clock; the thread is that of the step's own event
    if session is not None:
        thread = dict(spans.select("rank", "lane").iter_rows())
        rows = []
        for trace, clock in match_clocks(graph, session, step):
            row = trace.steps.filter(pl.col("step") == step).row(0, named=True)
            starts = trace.events["start_ns"].to_numpy()
            first, after = (
                int(np.searchsorted(starts, row["start_ns"], side=side)) for side in _SIDES
            )
            marks = first + np.flatnonzero(
                (trace.events["name"][first:after] == row["name"]).to_numpy()
            )
            nodes = _select_event_nodes(graph, trace, clock.rank)
            marked = nodes[np.isin(graph.nodes["event"][nodes].to_numpy(), marks)]
            lanes = graph.nodes["lane"][marked].drop_nulls()
            lane = int(lanes[0]) if lanes.len() else thread.get(clock.rank)
            rows.append(
                (clock.rank, step, lane, row["start_ns"] + clock.shift, row["end_ns"] + clock.shift)
            )
        spans = pl.DataFrame(rows, schema=spans.schema, orient="row")
    if not spans.height:
        raise UsageError(f"there is no step {step} in the graph", slug="no-such-step")
    low, high = int(spans["low"].min()), int(spans["high"].max())  # type: ignore[arg-type]
    # The last point of a step: the end of its thread's time, or of GPU work that it launched.
    in_step = np.flatnonzero((graph.nodes["step"] == step).fill_null(value=False).to_numpy())
    launched = in_step[
        graph.nodes["category"][in_step].is_in(list(GPU_WORK)).fill_null(value=False).to_numpy()
    ]
    candidates = [2 * launched + 1]
    lane_of = graph.nodes["lane"].fill_null(_NO_LANE).to_numpy()
    for span in spans.iter_rows(named=True):
        if span["lane"] is None:
            continue
        # The segment of the thread in which the step ends; segments follow each other without a
        # gap.
        on_lane = np.flatnonzero(
            (lane_of == span["lane"]) & (times[0::2] < max(span["high"], span["low"] + 1))
        )
        candidates.append(2 * on_lane[-1:] + 1)
    points = np.concatenate(candidates)
    if not points.size:
        raise UsageError(f"there is nothing in step {step} of the graph", slug="no-such-step")
    return PathWindow(step, low, high, int(points[np.argmax(times[points])]))


def _find_step_spans(graph: Graph) -> pl.DataFrame:
    """Returns `rank`, `step`, `lane`, `low`, `high` of each step on each rank, on the thread on
    which it begins first.
    """
    columns = graph.nodes.select("rank", "step", "lane", "kind", "start_ns", "duration_ns")
    on_threads = columns.filter(
        pl.col("step").is_not_null()
        & pl.col("lane").is_not_null()
        & pl.col("kind").is_in(_HOST_KINDS)
    )
    lane_spans = on_threads.group_by("rank", "step", "lane").agg(
        pl.col("start_ns").min().alias("low"),
        (pl.col("start_ns") + pl.col("duration_ns")).max().alias("high"),
        pl.len().alias("nodes"),
    )
    return (
        lane_spans.sort("rank", "step", "low", "nodes", descending=[False, False, False, True])
        .group_by("rank", "step", maintain_order=True)
        .agg(pl.col("lane", "low", "high").first())
    )


class RankClock(Struct, frozen=True):
    """The relation of the times of a trace to times of the graph.

    Attributes:
        rank: The rank in the graph.
        shift: Added to its times near the step (near its start, without a step).
    """

    rank: int
    shift: int


def match_clocks(
    graph: Graph, session: Session, step: int | None
) -> Iterator[tuple[Trace, RankClock]]:
    """Yields the traces that are in the graph (one per rank; with a step, those that have it), and
    their clocks.
    """
    done: set[int] = set()
    for trace in session.traces:
        rank = trace.rank
        if rank is None:  # it is identified by its file
            matches = graph.ranks.filter(
                pl.col("device_trace") == replace_surrogates(trace.meta.path)
            )
            rank = int(matches["rank"][0]) if matches.height else None
        reference_ns = trace.start_ns
        if step is not None:
            step_rows = trace.steps.filter(pl.col("step") == step)
            reference_ns = int(step_rows["start_ns"][0]) if step_rows.height else reference_ns
            rank = rank if step_rows.height else None
        if rank is None or rank in done:
            continue
        done.add(rank)
        nodes = _select_event_nodes(graph, trace, rank)
        shift = -graph.epoch_ns
        if nodes.size:  # by the events that begin next to the step
            first = np.full(trace.events.height, _MAX_TIME)
            start_ns = graph.nodes["start_ns"][nodes].to_numpy()
            np.minimum.at(first, graph.nodes["event"][nodes].to_numpy(), start_ns)
            event = np.flatnonzero(first < _MAX_TIME)
            recorded = trace.events["start_ns"].to_numpy()[event]
            distance = np.abs(recorded - reference_ns)
            last_near = min(_CLOCK_EVENTS, distance.size) - 1
            nearest = np.flatnonzero(distance <= np.partition(distance, last_near)[last_near])[
                : last_near + 1
            ]
            # The node of an event that was cut at a bound begins later than the event, never
            # earlier.
            shift = int((first[event] - recorded)[nearest].min())
        yield trace, RankClock(rank, shift)


def _select_event_nodes(graph: Graph, trace: Trace, rank: int) -> Ints:
    return np.flatnonzero((graph.events < trace.events.height) & (graph.node_ranks == rank))


COMPUTE = "compute"
COMMUNICATION = "communication"
COPIES = "copies"
HOST = "host"
DATA = "data"
LAUNCH = "launch"
SYNCHRONISATION = "synchronisation"
PAUSE = "pause"
UNRECORDED = "unrecorded"
RESIDUAL = "residual"
CLASSES = {
    COMPUTE: "kernels that compute",
    COMMUNICATION: "communication, from the meeting of the ranks on",
    COPIES: "copies and fills",
    HOST: "the host's own work: operators, Python, time outside any recorded event",
    DATA: "the training loop waits for its data",
    LAUNCH: "launch calls, and the way from a call to its work",
    SYNCHRONISATION: "calls that wait: what they take themselves, and the way back to the host",
    PAUSE: "the device's own pauses between pieces of work, and from stream to stream",
    UNRECORDED: "waits for what was not recorded: peers, and work from before the window",
    RESIDUAL: "no known cause",
}
"""Every class of time on a path with its meaning in a few words."""
ClassType = pl.Enum(list(CLASSES))

_OWN_WORK = -1
_NODE_CLASSES = {
    graph_schema.KERNEL: COMPUTE,
    graph_schema.COLLECTIVE: COMMUNICATION,
    graph_schema.SEND: COMMUNICATION,
    graph_schema.RECEIVE: COMMUNICATION,
    graph_schema.RENDEZVOUS: COMMUNICATION,
    graph_schema.COPY: COPIES,
    graph_schema.FILL: COPIES,
    graph_schema.LAUNCH: LAUNCH,
    graph_schema.BLOCK: SYNCHRONISATION,
    graph_schema.WAIT: SYNCHRONISATION,
    graph_schema.ARRIVAL: UNRECORDED,
    graph_schema.ORIGIN: UNRECORDED,
}
_EDGE_CLASSES = {
    "origin": UNRECORDED,
    "launch": LAUNCH,
    "queue": LAUNCH,
    "stream": PAUSE,
    "wait": PAUSE,
    "occupancy": PAUSE,
    "synchronize": SYNCHRONISATION,
    "cross-thread": SYNCHRONISATION,
    "rendezvous": COMMUNICATION,
}


class PathPieces(Struct, frozen=True):
    """Pieces of time in their order; the end of one is the start of the next. Arrays of shape
    (pieces,).

    Attributes:
        start: Starts on the graph's clock, ns.
        end: Ends, > starts.
        node: Node of the time; for time along an edge the node that was held back; -1 before the
            path begins.
        edge: Edge along which the time went by, or by which the path came to the node; -1 for none.
        along: Whether the time is that of the edge.
        kind: Number of its class in CLASSES.
    """

    start: Ints
    end: Ints
    node: Ints
    edge: Ints
    along: Bools
    kind: Ints

    def take(self, rows: Ints) -> PathPieces:
        return PathPieces(*(getattr(self, name)[rows] for name in self.__struct_fields__))


def build_path_pieces(graph: Graph, window: PathWindow) -> PathPieces:
    """Walks back from the last point of a window to its beginning.

    Each node on the way contributes the time of its work, each edge its delay, and the remainder on
    either is a residual. Where an edge goes back in time (a call returned, by the clocks, before
    what it awaited was over), the earlier piece is shortened, so that no time counts twice and none
    is negative.
    """
    times = get_point_times(graph)
    points, bound = walk_back(graph, window.last, until=window.low)
    points, bound = points[::-1], bound[::-1]
    is_own_work, edge = bound[1:] == _OWN_WORK, np.where(bound[1:] >= 0, bound[1:], -1)
    node = points[1:] >> 1
    # The edge by which the path came to the node's own work: the one into its start.
    incoming_edge = np.where(is_own_work, bound[:-1], edge)
    start, finish = times[points[:-1]], times[points[1:]]
    length = np.where(
        is_own_work,
        graph.nodes["work_ns"].to_numpy()[node],
        np.append(graph.edges["delay_ns"].to_numpy(), 0)[edge],
    )
    bounds = np.empty(2 * node.size + 2, dtype=np.int64)
    bounds[0], bounds[1] = window.low, times[points[0]]
    bounds[2::2], bounds[3::2] = start + length, finish
    bounds = np.clip(np.minimum.accumulate(bounds[::-1])[::-1], window.low, window.high)
    node_kind = graph.nodes["kind"].to_physical().to_numpy()
    edge_kind = np.append(graph.edges["kind"].to_physical().to_numpy(), 0)
    node_class = np.array(
        [_get_class_number(_NODE_CLASSES.get(kind, HOST)) for kind in graph_schema.NODE_KINDS]
    )[node_kind[node]]
    edge_class = np.array(
        [_get_class_number(_EDGE_CLASSES.get(kind, HOST)) for kind in graph_schema.EDGE_KINDS]
    )[edge_kind[edge]]
    # Edges into an assumed arrival hold the time that unrecorded peers kept this rank waiting.
    edge_class = np.where(
        node_kind[node] == graph_schema.NODE_KINDS.index(graph_schema.ARRIVAL),
        _get_class_number(UNRECORDED),
        edge_class,
    )
    all_pieces = PathPieces(
        start=bounds[:-1],
        end=bounds[1:],
        node=np.append(-1, np.repeat(node, 2)),
        edge=np.append(-1, np.repeat(np.maximum(incoming_edge, -1), 2)),
        along=np.append(False, np.repeat(~is_own_work, 2)),
        kind=np.append(
            _get_class_number(UNRECORDED),
            np.stack(
                [
                    np.where(is_own_work, node_class, edge_class),
                    np.full(node.size, _get_class_number(RESIDUAL)),
                ],
                axis=1,
            ).ravel(),
        ),
    )
    nonempty = all_pieces.take(np.flatnonzero(all_pieces.end > all_pieces.start))
    end = int(nonempty.end[-1]) if nonempty.end.size else window.low
    if end >= window.high:
        return nonempty
    # A path that ends before the window does: what the host did until then is in no recorded event.
    # Where it ends before the window begins, nothing was recorded after it.
    kind = HOST if end > window.low else UNRECORDED
    last = [end, window.high, -1, -1, False, _get_class_number(kind)]
    return PathPieces(
        *(
            np.append(getattr(nonempty, name), value)
            for name, value in zip(nonempty.__struct_fields__, last, strict=True)
        )
    )


def _get_class_number(name: str) -> int:
    return list(CLASSES).index(name)


def split(pieces: PathPieces, may_cut: Bools, start: Ints, end: Ints, kind: str) -> PathPieces:
    """Gives the parts of some pieces that lie in intervals of time another class.

    Args:
        pieces: The pieces.
        may_cut: Which of them may be cut; shape (pieces,).
        start: Starts of the intervals, ascending; they do not overlap.
        end: Their ends.
        kind: The class of time in an interval.
    """
    if not may_cut.any() or not start.size:
        return pieces
    # Cut all of these pieces at all bounds of intervals that lie in them, then look up where each
    # part lies.
    cuts = np.sort(np.concatenate([start, end]))
    low = np.where(may_cut, np.searchsorted(cuts, pieces.start, side="right"), 0)
    high = np.where(may_cut, np.searchsorted(cuts, pieces.end, side="left"), 0)
    cut_count = np.maximum(high - low, 0)
    piece_index = np.repeat(np.arange(pieces.start.size), cut_count + 1)
    nth = np.arange(piece_index.size) - np.repeat(
        np.cumsum(cut_count + 1) - cut_count - 1, cut_count + 1
    )
    starts, finishes = pieces.start[piece_index].copy(), pieces.end[piece_index].copy()
    inner = nth > 0
    starts[inner] = cuts[(low[piece_index] + nth - 1)[inner]]
    finishes[:-1][inner[1:]] = starts[1:][inner[1:]]
    parts = pieces.take(piece_index)
    span = np.searchsorted(start, starts, side="right") - 1
    in_span = may_cut[piece_index] & (span >= 0) & (starts < end[span])
    changed = np.where(in_span, _get_class_number(kind), parts.kind)
    cut = PathPieces(starts, finishes, parts.node, parts.edge, parts.along, changed)
    return cut.take(np.flatnonzero(cut.end > cut.start))


def find_data_waits(
    graph: Graph, trace: Trace, rank: int, shift: int
) -> Iterator[tuple[int, Ints, Ints]]:
    """Returns when a rank waits for its DataLoader, thread by thread.

    Args:
        graph: The graph.
        trace: The trace of the rank.
        rank: The rank in the graph.
        shift: Added to a time of the trace to get a time of the graph.

    Yields:
        The lane of the thread in the graph, and the starts (ascending) and ends of its waits, which
        do not overlap.
    """
    calls = find_loader_calls(trace)
    if not calls.size:
        return
    waits = trace.events[pl.Series(calls, dtype=pl.UInt32)].select(
        "start_ns",
        pl.col("lane").alias("trace_lane"),
        (pl.col("nested_end_ns") - pl.col("start_ns")).alias("duration_ns"),
    )
    nodes = graph.nodes.select("rank", "event", "lane")
    in_rank = (nodes["rank"] == rank) & nodes["event"].is_not_null() & nodes["lane"].is_not_null()
    nodes = nodes.filter(in_rank.fill_null(value=False))
    lane_of = nodes.select("lane", trace_lane=trace.events["lane"][nodes["event"]]).unique()
    placed = waits.join(lane_of, on="trace_lane")
    for (lane,), rows in placed.sort("lane", "start_ns").group_by("lane", maintain_order=True):
        start = rows["start_ns"].to_numpy() + shift
        yield int(lane), start, start + rows["duration_ns"].to_numpy()
