"""Host events folded by path: calls with the same names above them, on the same thread, are one node."""

from __future__ import annotations

import numpy as np
import polars as pl
from msgspec import Struct

from traceloom.analyze.ancestry import forest
from traceloom.analyze.frames import ADDRESS
from traceloom.analyze.remembered import per_trace
from traceloom.analyze.vocabulary import vocabulary
from traceloom.array_types import Ints
from traceloom.model import Trace
from traceloom.model import category as cat
from traceloom.model.arrays import column

KINDS = ("thread", "python", "module", "op", "annotation", "launch", "other")
THREAD = 0
MODULE = "nn.Module: "
DEEPEST = 1024  # levels; what lies deeper counts to the level above

# Differs from call to call and names no other place.
_STEP = r"^(ProfilerStep|traceloom\.step)#.*$"


class CallTree(Struct, frozen=True):
    """Paths of calls, one level after the other: parents stand before their children.

    Attributes:
        node: For each host event (in the forest's order) its node; shape (host events,).
        parent: For each node its parent; -1 for threads. Shape (nodes,).
        label: For each node the index of its name in `names`; -1 for threads.
        kind: For each node its index in KINDS.
        lane: For each node the lane it stands on.
        level: First node of each level, and the number of nodes at the end; level 0 are the threads.
        names: The distinct names, without addresses and step numbers.
        name_of: For each host event the index of its name.
    """

    node: Ints
    parent: Ints
    label: Ints
    kind: Ints
    lane: Ints
    level: tuple[int, ...]
    names: pl.Series
    name_of: Ints

    def sums(self, values: Ints) -> Ints:
        """Per node the sum of `values`, given per host event."""
        total = np.zeros(self.parent.size, dtype=np.int64)
        np.add.at(total, self.node, values)
        return total

    def totals(self, own: Ints) -> Ints:
        """Per node its own value and those of all nodes below it."""
        total = own.copy()
        for low, high in reversed(list(zip(self.level[1:-1], self.level[2:], strict=True))):
            np.add.at(total, self.parent[low:high], total[low:high])
        return total

    def paths(self, nodes: Ints) -> list[list[int]]:
        """For each of `nodes` the path from its thread down to the node itself; for a few nodes, since it walks up."""
        paths = []
        for node in nodes.tolist():
            path = []
            at = node
            while at >= 0:
                path.append(at)
                at = int(self.parent[at])
            paths.append(path[::-1])
        return paths


_KIND_OF = {
    cat.PYTHON: "python",
    cat.OP: "op",
    cat.ANNOTATION: "annotation",
    cat.RUNTIME: "launch",
    cat.DRIVER: "launch",
}
_KIND_OF_CODE = np.array([KINDS.index(_KIND_OF.get(name, "other")) for name in cat.CATEGORIES], dtype=np.int64)


@per_trace
def call_tree(trace: Trace) -> CallTree:
    """Fold the host events of a trace.

    Goes down level by level, where a path is known by its parent's node and its own name; the work is that of sorting
    the events once.
    """
    tree, words = forest(trace), vocabulary(trace)
    # names without what differs from call to call, and for each name of the vocabulary the index of its plain one
    text = pl.col("name").fill_null("").str.replace_all(ADDRESS, "").str.replace(_STEP, "${1}#")
    plain = words.names.to_frame("name").select(text)
    names = plain["name"].unique(maintain_order=True)
    index = names.to_frame().with_row_index("number")
    code = plain.join(index, on="name", how="left", maintain_order="left")["number"]
    name_of = code.cast(pl.Int64).to_numpy()[words.code[tree.row]]
    width = max(len(names), 1)
    depth = np.minimum(column(trace, "depth")[tree.row].astype(np.int64), DEEPEST)
    lanes = int(tree.lane.max(initial=-1)) + 1
    order = np.argsort(depth, kind="stable")
    bounds = np.searchsorted(depth[order], np.arange(int(depth.max(initial=-1)) + 2))
    node = np.full(tree.row.size, -1, dtype=np.int64, like=tree.row)
    parents, labels, examples = [np.full(lanes, -1)], [np.full(lanes, -1)], []
    starts, count = [0], lanes
    above = np.where(tree.parent >= 0, tree.parent, 0)
    for level, (low, high) in enumerate(zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True)):
        if level == DEEPEST:
            break
        events = order[low:high]
        up = tree.lane[events] if level == 0 else node[above[events]]
        distinct, first, number = np.unique(up * width + name_of[events], return_index=True, return_inverse=True)
        turn = np.argsort(first, kind="stable")  # nodes are numbered in the order in which they are first called
        position = np.empty_like(turn)
        position[turn] = np.arange(turn.size)
        node[events] = count + position[number]
        parents.append(distinct[turn] // width)
        labels.append(distinct[turn] % width)
        examples.append(events[first[turn]])
        starts.append(count)
        count += distinct.size
    if bounds.size > DEEPEST:
        node = node[tree.nearest_or_self(depth < DEEPEST)]
    # kind and lane of a node are those of its first event; threads have none
    example = np.concatenate([np.zeros(0, dtype=np.int64), *examples])
    kind = _KIND_OF_CODE[column(trace, "category")[tree.row[example]]]
    if example.size:
        kind[names.str.starts_with(MODULE).to_numpy()[name_of[example]]] = KINDS.index("module")
    return CallTree(
        node,
        np.concatenate(parents),
        np.concatenate(labels),
        np.concatenate([np.full(lanes, THREAD), kind]),
        np.concatenate([np.arange(lanes), tree.lane[example]]),
        (*starts, count),
        names,
        name_of,
    )
