"""Which nodes a Chakra node depends on, so that the order of a Graph holds and nothing waits in a circle.

Chakra knows one relation: a node starts after other nodes have ended. An edge of a Graph says more (from start or end,
to start or end), so:
- end to start is a dependency; a `call` edge is a control dependency, everything else a data dependency;
- a launch, which holds from the start of the call, is one too: all Chakra tools let the work start after its call;
- what holds back the *end* of a node (a synchronisation awaits a kernel): a dependency of that node where the awaited
  one started before it; otherwise (a blocking copy, which the call itself submits) of what follows the node;
- other edges from a start (kernels that overlap on one stream) order no ends, and are not said.
Every dependency points to a node that starts earlier, or at the same time and before it in the order of the graph's
points. A circle is therefore impossible; the few edges against the order of the starts are left out.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import polars as pl
from numpy.typing import NDArray

from traceloom.chakra.graph_layout import CARRIED
from traceloom.model.graph import Graph

Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Dependencies:
    """Pairs in the order of `target`, then `source`, no pair twice; both are rows of the graph's nodes."""

    target: Ints
    source: Ints


def written(graph: Graph) -> NDArray[np.bool_]:
    """Which nodes become nodes of a file."""
    flags: NDArray[np.bool_] = graph.nodes.select(~pl.col("kind").is_in(CARRIED)).to_series().to_numpy()
    return flags


def dependencies(graph: Graph) -> tuple[Dependencies, Dependencies]:
    """Control and data dependencies between written nodes of the same rank."""
    source, target = (graph.edges[name].to_numpy().astype(np.int64) for name in ("source", "target"))
    rank, start = graph.nodes["rank"].to_numpy(), graph.nodes["start_ns"].to_numpy()
    solid = written(graph)
    near = solid[source] & solid[target] & (rank[source] == rank[target]) & (source != target)
    kind, from_end, to_end = (graph.edges[name] for name in ("kind", "from_end", "to_end"))
    after, into_end = from_end.to_numpy(), to_end.to_numpy()
    call, launch = (kind == "call").to_numpy(), (kind == "launch").to_numpy()
    forward = start[source] <= start[target]
    before = start[source] < start[target]

    plain = near & ~into_end & (after | launch) & forward
    awaited = near & into_end & after
    late = awaited & ~before
    inherited = _inherited(source[late], target[late], source[plain], target[plain], start)
    control = _unique(target[plain & call], source[plain & call])
    rest = plain & ~call | awaited & before
    data = _unique(np.concatenate([target[rest], inherited[0]]), np.concatenate([source[rest], inherited[1]]))
    return control, data


def _inherited(source: Ints, target: Ints, before: Ints, follower: Ints, start: Ints) -> tuple[Ints, Ints]:
    """What follows a node whose end awaits `source` awaits it too: pairs of follower and source."""
    if not len(source):
        return source, source
    awaits = pl.DataFrame({"node": target, "awaited": source})
    follows = pl.DataFrame({"node": before, "follower": follower})
    pairs = awaits.join(follows, on="node")
    late, early = pairs["follower"].to_numpy(), pairs["awaited"].to_numpy()
    fine = start[early] < start[late]
    return late[fine], early[fine]


def _unique(target: Ints, source: Ints) -> Dependencies:
    if not len(target):
        return Dependencies(target, source)
    order = np.lexsort((source, target))
    target, source = target[order], source[order]
    new: Any = np.concatenate([[True], (target[1:] != target[:-1]) | (source[1:] != source[:-1])])
    return Dependencies(target[new], source[new])
