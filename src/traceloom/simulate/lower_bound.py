"""Whether a saving is only the least that a change saves: threads wait for what nothing recorded tells."""

from __future__ import annotations

import numpy as np

from traceloom.array_types import Bools
from traceloom.model.graph import Graph
from traceloom.retime import ABSENT, Plan
from traceloom.simulate.scenario import Scenario


def unknown_wakers(graph: Graph) -> Bools:
    """Edges that end an idle time when it ended, since nothing tells for certain who woke the thread; shape (edges,).

    Those of the origin hold a wait's end; guesses hold it by what another thread did long before.
    """
    edges = graph.edges
    pinned = graph.edges_of("origin") & edges["to_end"].to_numpy()
    guessed = graph.edges_of("cross-thread") & (edges["delay_ns"].to_numpy() > 0)
    assumed = (edges["evidence"] == "assumed").to_numpy()
    unknown: Bools = (pinned | guessed) & assumed
    return unknown


def saves_more(before: Scenario, after: Scenario, saved_ns: int, least_ns: int, *plans: Plan) -> bool:
    """Whether a change would save more if threads whose waker is unknown waited for nothing.

    Args:
        before: Without the change.
        after: With it.
        saved_ns: What it saves as the graph stands.
        least_ns: A difference that counts, ns.
        *plans: Of the graph of each; or one for both, that of the measured graph.
    """
    edges = unknown_wakers(before.graph)
    if not edges.any():
        return False
    free = []
    for scenario, own in ((before, plans[0]), (after, plans[-1])):
        released = scenario.copy()
        released.delay_ns[np.flatnonzero(edges)] = ABSENT
        free.append(int(np.ptp(released.times(own))))
    return free[0] - free[1] > saved_ns + least_ns
