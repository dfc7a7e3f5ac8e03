"""Edges while they are collected, and the selection of those that form no cycle."""

from typing import Any

import numpy as np
import polars as pl
from msgspec import Struct, field
from numpy.typing import NDArray

from traceloom.errors import InvariantError
from traceloom.graph.graph import (
    EDGE_KINDS,
    EVIDENCE,
    GRAPH_SCHEMAS,
    EdgeKind,
    Evidence,
    sort_topologically,
)
from traceloom.trace.array_types import Bools, Ints

# Points below which both ends and the kind of an edge fit into 64 bits
_MAX_PACKED_POINTS = 1 << 29


class Edges(Struct):
    """Edges in columns; a node has the points 2 x node (start) and 2 x node + 1 (end).

    *Firm* edges are the order of calls on threads, launches and the order of streams: these lead
    from hosts to devices and forward on each, so they never form a cycle. All others may, where
    times are coarse or clocks disagree, and are only kept where they fit.
    """

    source: list[Ints] = field(default_factory=list)
    target: list[Ints] = field(default_factory=list)
    kind: list[NDArray[Any]] = field(default_factory=list)
    evidence: list[NDArray[Any]] = field(default_factory=list)
    firm: list[Bools] = field(default_factory=list)

    def add(
        self,
        kind: str,
        evidence: str | NDArray[Any],
        source: Ints,
        target: Ints,
        *,
        from_end: Any,
        to_end: Any,
        firm: bool = False,
    ) -> None:
        """Adds edges of one kind; `evidence`, `from_end` and `to_end` are one value, or one per
        edge.
        """
        count = source.size
        self.source.append(2 * source + np.asarray(from_end, dtype=np.int64))
        self.target.append(2 * target + np.asarray(to_end, dtype=np.int64))
        self.kind.append(np.full(count, EDGE_KINDS.index(kind), dtype=np.uint8))
        evidence_names = np.asarray(evidence)
        codes = np.zeros(count, dtype=np.uint8)
        for code, word in enumerate(EVIDENCE):
            codes[np.broadcast_to(evidence_names == word, (count,))] = code
        self.evidence.append(codes)
        self.firm.append(np.full(count, firm))

    def frame(self, times: Ints) -> tuple[pl.DataFrame, pl.DataFrame]:
        """Returns the `edges` frame, sorted by target, and how many edges of each kind did not fit
        (kind, count).

        Releases the edges that were added. Nodes whose start nothing holds back are held by the
        origin, which is node 0.

        Args:
            times: Measured time of each point, ns; shape (2 x nodes,).
        """
        source, target = _join_parts(self.source, np.int64), _join_parts(self.target, np.int64)
        kind, evidence = _join_parts(self.kind, np.uint8), _join_parts(self.evidence, np.uint8)
        firm = _join_parts(self.firm, np.bool_)
        retained = np.flatnonzero(select_acyclic_edges(source, target, firm, times))
        refused = np.bincount(np.delete(kind, retained), minlength=len(EDGE_KINDS))
        has_cause = np.zeros(times.size, dtype=np.bool_)
        has_cause[target[retained]] = True
        free = np.flatnonzero(~has_cause[2::2]) + 1
        source = _join_parts([source[retained], np.ones_like(free)], np.int64)
        target = _join_parts([target[retained], 2 * free], np.int64)
        kind = _join_parts(
            [kind[retained], np.full(free.size, EDGE_KINDS.index("origin"), dtype=np.uint8)],
            np.uint8,
        )
        evidence = _join_parts(
            [evidence[retained], np.full(free.size, EVIDENCE.index("assumed"), dtype=np.uint8)],
            np.uint8,
        )
        # By target, source and kind; of duplicates the first, since one edge between two points is
        # enough.
        columns: tuple[NDArray[Any], ...] = (target, source, kind)
        if times.size < _MAX_PACKED_POINTS:
            columns = ((target * times.size + source) * len(EDGE_KINDS) + kind,)
        order: Ints = (
            np.argsort(columns[0], kind="stable")
            if len(columns) == 1
            else np.lexsort(columns[::-1])
        )
        new = np.ones(order.size, dtype=np.bool_)
        new[1:] = np.any([column[order][1:] != column[order][:-1] for column in columns], axis=0)
        order = order[new]
        source, target, kind, evidence = source[order], target[order], kind[order], evidence[order]
        frame = pl.DataFrame(
            {
                "source": source // 2,
                "target": target // 2,
                "kind": pl.Series(EDGE_KINDS, dtype=EdgeKind)[pl.Series(kind)],
                "evidence": pl.Series(EVIDENCE, dtype=Evidence)[pl.Series(evidence)],
                "from_end": source % 2 == 1,
                "to_end": target % 2 == 1,
                "delay_ns": np.minimum(
                    times[target] - times[source], 0
                ),  # clocks disagree: some effects precede their causes
                "residual_ns": np.zeros(order.size, dtype=np.int64),
            },
            schema_overrides=GRAPH_SCHEMAS["edges"],
        )
        refused_rows = [
            (name, int(count))
            for name, count in zip(EDGE_KINDS, refused.tolist(), strict=True)
            if count
        ]
        return frame, pl.DataFrame(
            refused_rows, schema={"kind": pl.String, "count": pl.Int64}, orient="row"
        )


def _join_parts(parts: list[Any], dtype: Any) -> NDArray[Any]:
    """Joins the parts into one array, and releases them."""
    joined = np.concatenate([np.zeros(0, dtype=dtype), *parts])
    parts.clear()
    return joined


def select_acyclic_edges(source: Ints, target: Ints, firm: Bools, times: Ints) -> Bools:
    """Returns which edges form no cycle together: the firm ones, and those that agree with the
    order they define.

    Edges that take no time, or go back in time (a call that returned, by its clock, before what it
    awaited), are checked against the firm ones first. The resulting order, with times moved on
    where they must be, decides about all others.
    """
    nodes = times.size // 2
    basis = firm | (times[target] <= times[source])
    while True:
        rows = np.flatnonzero(basis)
        try:
            order = sort_topologically(nodes, source[rows], target[rows])
        except InvariantError:
            stuck = _drop_cycles(nodes, source[rows], target[rows])
        else:
            break
        in_cycle = basis & ~firm & stuck[source] & stuck[target]
        if not in_cycle.any():
            raise InvariantError(
                "the order of calls, launches and streams contradicts itself", slug="broken-cycle"
            )
        basis &= ~in_cycle
    position = np.empty(times.size, dtype=np.int64)
    position[order] = np.arange(times.size)
    # Move times on until no edge goes back and no node ends before it starts.
    moved, before, after = times.copy(), source[rows], target[rows]
    while True:
        late = np.flatnonzero(moved[after] < moved[before])
        if not late.size and not (moved[1::2] < moved[0::2]).any():
            break
        np.maximum.at(moved, after[late], moved[before[late]])
        moved[1::2] = np.maximum(moved[1::2], moved[0::2])
    forward = (moved[source] < moved[target]) | (
        (moved[source] == moved[target]) & (position[source] < position[target])
    )
    acyclic: Bools = basis | forward
    return acyclic


def _drop_cycles(nodes: int, source: Ints, target: Ints) -> Bools:
    """Returns the points left over when points without predecessors, then without successors, are
    removed repeatedly.
    """
    starts = np.arange(nodes, dtype=np.int64) * 2
    before, after = np.concatenate([source, starts]), np.concatenate([target, starts + 1])
    remaining = np.ones(2 * nodes, dtype=np.bool_)
    for tails, heads in ((before, after), (after, before)):
        order = np.argsort(tails, kind="stable")
        reached = heads[order]
        bounds = np.searchsorted(tails[order], np.arange(2 * nodes + 1))
        waits = np.bincount(heads[remaining[before] & remaining[after]], minlength=2 * nodes)
        ready = np.flatnonzero((waits == 0) & remaining).tolist()
        while ready:
            point = ready.pop()
            remaining[point] = False
            for follower in reached[bounds[point] : bounds[point + 1]].tolist():
                waits[follower] -= 1
                if waits[follower] == 0 and remaining[follower]:
                    ready.append(follower)
    return remaining
