"""Who waits for whom where nothing goes on: the circle of waits in words."""

from __future__ import annotations

import numpy as np

from traceloom.chakra.validation.waiting import Arcs, circles, settle
from traceloom.errors import CheckError
from traceloom.harmless import harmless
from traceloom.model import graph_schema as gs
from traceloom.model.graph import Graph

_LONGEST = 8
_BETWEEN = (gs.RENDEZVOUS, gs.ARRIVAL)


def deadlock(graph: Graph) -> CheckError:
    """The error for a graph whose nodes wait for each other."""
    nodes = graph.nodes.height
    source, target = graph.points()
    own = 2 * np.arange(nodes, dtype=np.int64)
    arcs = Arcs(np.concatenate([source, own]), np.concatenate([target, own + 1]))
    stuck = settle(2 * nodes, arcs, np.arange(2 * nodes)).stuck
    rings = circles(arcs, stuck)
    ring = min(rings, key=len) if rings else []
    labels = []
    table = graph.nodes.select("kind", "rank", "name")
    for point in ring:
        kind, rank, name = table.row(point // 2)
        if kind not in _BETWEEN:
            labels.append((rank, f"`{harmless(name)}`"))
    steps = [step for k, step in enumerate(labels) if step != labels[k - 1] or len(labels) == 1]
    clauses = [
        f"rank {rank}: {name} waits for {awaited}" + (f" of rank {other}" if other != rank else "")
        for (rank, name), (other, awaited) in zip(steps, [*steps[1:], *steps[:1]], strict=True)
    ]
    more = f"; and {len(clauses) - _LONGEST} more" if len(clauses) > _LONGEST else ""
    return CheckError(
        f"deadlock: {'; '.join(clauses[:_LONGEST])}{more}",
        slug="deadlock",
        where=graph.name,
        hint="order the communications of all ranks alike",
    )
