"""A way back through a graph as pieces of time that follow each other without a gap and add up to the window."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import polars as pl
from msgspec import Struct

from traceloom.analyze.data_loading import loader_calls
from traceloom.analyze.path.window import PathWindow
from traceloom.array_types import Bools, Ints
from traceloom.model import Trace
from traceloom.model import graph_schema as gs
from traceloom.model.graph import Graph
from traceloom.model.graph_arrays import point_times
from traceloom.retime.critical_path import trail

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

_OWN = -1
_OF_NODE = {
    gs.KERNEL: COMPUTE,
    gs.COLLECTIVE: COMMUNICATION,
    gs.SEND: COMMUNICATION,
    gs.RECEIVE: COMMUNICATION,
    gs.RENDEZVOUS: COMMUNICATION,
    gs.COPY: COPIES,
    gs.FILL: COPIES,
    gs.LAUNCH: LAUNCH,
    gs.BLOCK: SYNCHRONISATION,
    gs.WAIT: SYNCHRONISATION,
    gs.ARRIVAL: UNRECORDED,
    gs.ORIGIN: UNRECORDED,
}
_OF_EDGE = {
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
    """Pieces of time in their order; the end of one is the start of the next. Arrays of shape (pieces,).

    Attributes:
        start: Starts on the graph's clock, ns.
        end: Ends, > starts.
        node: Node whose time it is; of the time along an edge the node that was held back; -1 before the path begins.
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
        """Some of the pieces."""
        return PathPieces(*(getattr(self, name)[rows] for name in self.__struct_fields__))


def pieces(graph: Graph, window: PathWindow) -> PathPieces:
    """Walk back from the last point of a window to its beginning.

    Each node on the way gives the time of its work, each edge its delay, and what is left over on either is a residual.
    Where an edge goes back in time (a call returned, by the clocks, before what it awaited was over), the earlier piece
    is shortened, so that no time counts twice and none is negative.
    """
    times = point_times(graph)
    points, bound = trail(graph, window.last, until=window.low)
    points, bound = points[::-1], bound[::-1]
    own, edge = bound[1:] == _OWN, np.where(bound[1:] >= 0, bound[1:], -1)
    node = points[1:] >> 1
    # What the path came along before the node's own work: the edge into its start.
    came = np.where(own, bound[:-1], edge)
    begin, finish = times[points[:-1]], times[points[1:]]
    length = np.where(
        own, graph.nodes["work_ns"].to_numpy()[node], np.append(graph.edges["delay_ns"].to_numpy(), 0)[edge]
    )
    bounds = np.empty(2 * node.size + 2, dtype=np.int64)
    bounds[0], bounds[1] = window.low, times[points[0]]
    bounds[2::2], bounds[3::2] = begin + length, finish
    bounds = np.clip(np.minimum.accumulate(bounds[::-1])[::-1], window.low, window.high)
    node_kind = graph.nodes["kind"].to_physical().to_numpy()
    edge_kind = np.append(graph.edges["kind"].to_physical().to_numpy(), 0)
    of_node = np.array([_number(_OF_NODE.get(kind, HOST)) for kind in gs.NODE_KINDS])[node_kind[node]]
    of_edge = np.array([_number(_OF_EDGE.get(kind, HOST)) for kind in gs.EDGE_KINDS])[edge_kind[edge]]
    # Into an assumed arrival goes what the peers that were not recorded kept us waiting.
    of_edge = np.where(node_kind[node] == gs.NODE_KINDS.index(gs.ARRIVAL), _number(UNRECORDED), of_edge)
    all_pieces = PathPieces(
        start=bounds[:-1],
        end=bounds[1:],
        node=np.append(-1, np.repeat(node, 2)),
        edge=np.append(-1, np.repeat(np.maximum(came, -1), 2)),
        along=np.append(False, np.repeat(~own, 2)),
        kind=np.append(
            _number(UNRECORDED),
            np.stack([np.where(own, of_node, of_edge), np.full(node.size, _number(RESIDUAL))], axis=1).ravel(),
        ),
    )
    kept = all_pieces.take(np.flatnonzero(all_pieces.end > all_pieces.start))
    end = int(kept.end[-1]) if kept.end.size else window.low
    if end >= window.high:
        return kept
    # A path that ends before the window does, even before it begins: nothing was recorded after it.
    last = [end, window.high, -1, -1, False, _number(UNRECORDED)]
    return PathPieces(
        *(np.append(getattr(kept, name), value) for name, value in zip(kept.__struct_fields__, last, strict=True))
    )


def _number(name: str) -> int:
    return list(CLASSES).index(name)


def split(pieces: PathPieces, at: Bools, start: Ints, end: Ints, kind: str) -> PathPieces:
    """Give the parts of some pieces that lie in spans of time another class.

    Args:
        pieces: The pieces.
        at: Which of them may be cut; shape (pieces,).
        start: Starts of the spans, ascending; they do not overlap.
        end: Their ends.
        kind: The class of what lies in a span.
    """
    if not at.any() or not start.size:
        return pieces
    # Cut all of these pieces at all bounds of spans that lie in them, then look where each part lies.
    cuts = np.sort(np.concatenate([start, end]))
    low = np.where(at, np.searchsorted(cuts, pieces.start, side="right"), 0)
    high = np.where(at, np.searchsorted(cuts, pieces.end, side="left"), 0)
    more = np.maximum(high - low, 0)
    of = np.repeat(np.arange(pieces.start.size), more + 1)
    nth = np.arange(of.size) - np.repeat(np.cumsum(more + 1) - more - 1, more + 1)
    begins, finishes = pieces.start[of].copy(), pieces.end[of].copy()
    inner = nth > 0
    begins[inner] = cuts[(low[of] + nth - 1)[inner]]
    finishes[:-1][inner[1:]] = begins[1:][inner[1:]]
    parts = pieces.take(of)
    span = np.searchsorted(start, begins, side="right") - 1
    inside = at[of] & (span >= 0) & (begins < end[span])
    changed = np.where(inside, _number(kind), parts.kind)
    cut = PathPieces(begins, finishes, parts.node, parts.edge, parts.along, changed)
    return cut.take(np.flatnonzero(cut.end > cut.start))


def waits_for_data(graph: Graph, trace: Trace, rank: int, shift: int) -> Iterator[tuple[int, Ints, Ints]]:
    """When a rank waits for its DataLoader, thread by thread.

    Args:
        graph: The graph.
        trace: The trace of the rank.
        rank: What the graph calls it.
        shift: Added to a time of the trace to get a time of the graph.

    Yields:
        The lane of the thread in the graph, and the starts (ascending) and ends of its waits, which do not overlap.
    """
    calls = loader_calls(trace)
    if not calls.size:
        return
    waits = trace.events[pl.Series(calls, dtype=pl.UInt32)].select(
        "start_ns",
        pl.col("lane").alias("trace_lane"),
        (pl.col("nested_end_ns") - pl.col("start_ns")).alias("duration_ns"),
    )
    nodes = graph.nodes.select("rank", "event", "lane")
    of_rank = (nodes["rank"] == rank) & nodes["event"].is_not_null() & nodes["lane"].is_not_null()
    nodes = nodes.filter(of_rank.fill_null(value=False))
    lane_of = nodes.select("lane", trace_lane=trace.events["lane"][nodes["event"]]).unique()
    placed = waits.join(lane_of, on="trace_lane")
    for (lane,), rows in placed.sort("lane", "start_ns").group_by("lane", maintain_order=True):
        start = rows["start_ns"].to_numpy() + shift
        yield int(lane), start, start + rows["duration_ns"].to_numpy()
