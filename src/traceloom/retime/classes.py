"""Classes of edges: which edges should take equally long, and the constant of each class."""

from __future__ import annotations

import numpy as np
import polars as pl
from msgspec import Struct
from numpy.typing import NDArray

from traceloom.array_types import Bools, Ints
from traceloom.model import graph_schema as gs
from traceloom.model.arrays import lookup
from traceloom.model.graph import Graph
from traceloom.model.graph_arrays import array, point_times, points
from traceloom.retime.of_last import OfLast
from traceloom.retime.running import running, usual_parts

# Kinds whose edges take time of their own; all others only order. `place` of each: which ends are named, and how.
_CALL_FIRST = ("launch",)  # call > kind of work
_CALL_LAST = ("synchronize", "queue")  # kind of work > call
_KINDS = ("stream", "wait", "occupancy", "cross-thread")  # kind > kind
TIMED = (*_CALL_FIRST, *_CALL_LAST, *_KINDS)
ANY = ""  # place of the row that stands for all of a kind
TRANSFER = "transfer"  # place of what leads out of a meeting: takes what this one communication took
# Where no edge of a kind shows how long it takes, in ns: medians of public traces of H100, A100 and V100.
_USUAL = {"launch": 6_500, "synchronize": 5_000, "stream": 1_000, "wait": 1_500}
_START = " start"  # of a source whose start is what counts


class Classes(Struct, frozen=True):
    """Which edge is of which class.

    Attributes:
        of: Number of each edge's class; -1 where the edge only orders, or its time is its own.
        table: `kind` and `place` of each class.
        transfer: Edges from a rendezvous to the end of a part.
        given: Edges whose time is given from outside: from the origin, into an assumed arrival, and where it is a guess
            who woke a thread.
        running: Rows of the edges to work that starts while the one before on its stream runs: a part of that work.
    """

    of: NDArray[np.int32]
    table: pl.DataFrame
    transfer: Bools
    given: Bools
    running: Ints


_KNOWN: OfLast[Classes] = OfLast()


def same_classes(graph: Graph, edge_classes: Classes) -> None:
    """Remember these classes for a graph that differs from theirs only in its times."""
    _KNOWN.put(graph, edge_classes)


def classes(graph: Graph) -> Classes:
    """Sort the edges of a graph into classes.

    A class is the kind of edge and its place: for launches the call and the kind of work, for what a call waits for
    the kind of work and the call, else the kinds of both nodes.
    """
    remembered = _KNOWN.of(graph)
    if remembered is not None:
        return remembered
    nodes, edges = graph.nodes, graph.edges
    source, target, kind = (array(graph, edges[column]) for column in ("source", "target", "kind"))
    node_kind = array(graph, nodes["kind"])
    from_kind, to_kind = node_kind[source], node_kind[target]
    transfer = (from_kind == gs.NODE_KINDS.index(gs.RENDEZVOUS)) & edges["to_end"].to_numpy()
    external = (to_kind == gs.NODE_KINDS.index(gs.ARRIVAL)) | np.isin(kind, _codes(("origin",)))
    guessed = array(graph, edges["evidence"]) == gs.EVIDENCE.index("assumed")
    external |= guessed & (kind == gs.EDGE_KINDS.index("cross-thread"))
    timed = np.isin(kind, _codes(TIMED)) & ~transfer & ~external
    # What orders the ends of works that overlap takes no time.
    timed &= ~(edges["to_end"].to_numpy() & (kind == gs.EDGE_KINDS.index("stream")))
    meanwhile = running(graph)
    timed[meanwhile] = False
    at = np.flatnonzero(timed)
    kind, source, target = kind[at], source[at], target[at]
    first, last = np.isin(kind, _codes(_CALL_FIRST)), np.isin(kind, _codes(_CALL_LAST))
    called = np.where(first, source, target)[first | last]
    names, name_of = np.unique(called, return_inverse=True)
    calls = nodes["name"][names]
    code = calls.rank("dense").to_numpy() if calls.len() else np.zeros(0, dtype=np.int64)
    name = np.zeros(at.size, dtype=np.int64, like=kind)
    name[first | last] = code[name_of]
    overlapping = ~edges["from_end"].to_numpy()[at] & ~first & ~last
    kinds = len(gs.NODE_KINDS)
    ends = np.where(first, 0, from_kind[at]) * kinds + np.where(last, 0, to_kind[at])
    key = ((kind.astype(np.int64) * kinds * kinds + ends) * 2 + overlapping) * (calls.len() + 1) + name
    _, example, number = np.unique(key, return_index=True, return_inverse=True)
    of = np.full(edges.height, -1, dtype=np.int32, like=kind)
    of[at] = number
    # The kind and place of each class, as one of its edges tells.
    examples = edges[at[example]]
    end_names = []
    for end, by_name in (("source", _CALL_FIRST), ("target", _CALL_LAST)):
        at_end = nodes.select("name", "kind")[examples[end]].with_columns(pl.col("kind").cast(pl.String))
        named = examples["kind"].cast(pl.String).is_in(by_name)
        end_names.append(pl.select(pl.when(named).then(at_end["name"]).otherwise(at_end["kind"])).to_series())
    starts = ~examples["from_end"] & ~examples["kind"].cast(pl.String).is_in((*_CALL_FIRST, *_CALL_LAST))
    between = pl.when(starts).then(pl.lit(f"{_START} > ")).otherwise(pl.lit(" > "))
    class_name = pl.concat_str(end_names[0].alias("source"), between, end_names[1].alias("target")).alias("place")
    return Classes(of, pl.select(examples["kind"], class_name), transfer, external, meanwhile)


def _codes(kinds: tuple[str, ...]) -> list[int]:
    return [gs.EDGE_KINDS.index(kind) for kind in kinds if kind in gs.EDGE_KINDS]


def usual_ns(table: pl.DataFrame) -> Ints:
    """What edges of each class usually take on any machine; 0 where nothing is usual. Shape (classes,)."""
    kind = table["kind"].cast(pl.String)
    usual: Ints = kind.replace_strict(list(_USUAL), list(_USUAL.values()), default=0, return_dtype=pl.Int64).to_numpy()
    starts: Bools = table["place"].str.contains(f"{_START} > ", literal=True).to_numpy()
    return np.where(starts, 0, usual)


def class_delays(graph: Graph) -> Ints:
    """The delay of each edge by calibration alone: its class's, nothing that only this edge showed.

    Of edges with a time of their own (transfers, times given from outside) see `own_times`. Shape (edges,), ns; 0 for
    edges that only order, and for classes that the graph's `delays` do not know.
    """
    edge_classes = classes(graph)
    table = edge_classes.table.join(graph.delays, on=["kind", "place"], how="left", maintain_order="left")
    of_kinds = graph.delays.filter(pl.col("place") == ANY).select("kind", pl.col("median_ns").alias("of_kind"))
    table = table.join(of_kinds, on="kind", how="left", maintain_order="left")
    median = table.select(pl.coalesce("median_ns", "of_kind").fill_null(0)).to_series().to_numpy()
    return spread(edge_classes, median, own_times(graph, edge_classes))


def spread(edge_classes: Classes, median: Ints, own: Ints) -> Ints:
    """The constant of each edge from that of its class; `own` where it has no class."""
    constant: Ints = np.where(edge_classes.of >= 0, lookup(np.append(median, 0), edge_classes.of), own)
    return constant


def own_times(graph: Graph, edge_classes: Classes) -> Ints:
    """Times of edges that stand for work of their own, as measured; 0 for all others. Shape (edges,), ns.

    A transfer takes the median over the parts of its communication: it is work of that communication, as the duration
    of a kernel is work of that kernel. What is given from outside (when a lane that nothing else explains begins, how
    long peers that were not recorded kept us waiting) stays as it was. Work that starts while the one before runs does
    so after a part of that, see `usual_parts`.
    """
    own = np.zeros(edge_classes.of.size, dtype=np.int64, like=edge_classes.of)
    own[edge_classes.running] = usual_parts(graph)
    external, at = np.flatnonzero(edge_classes.given), np.flatnonzero(edge_classes.transfer)
    if not external.size and not at.size:
        return own
    source, target = points(graph)
    times = point_times(graph)
    own[external] = times[target[external]] - times[source[external]]
    meeting = source[at]
    slack = times[target[at]] - times[meeting]
    order = np.lexsort((slack, meeting))
    opens = np.flatnonzero(np.append(True, np.diff(meeting[order]) != 0)) if at.size else at
    size = np.diff(np.append(opens, at.size))
    middle = slack[order][opens + (size - 1) // 2] if at.size else slack
    own[at[order]] = np.repeat(middle, size)
    return own
