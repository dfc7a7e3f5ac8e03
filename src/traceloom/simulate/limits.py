"""What no answer can go beyond: the busiest lane's work, and the time in which something that changed went on."""

from __future__ import annotations

import numpy as np
import polars as pl

from traceloom.analyze.intervals import merge, union
from traceloom.model.graph import Graph
from traceloom.model.graph_arrays import array, plain, point_times, points
from traceloom.retime import ABSENT
from traceloom.simulate.beside import covered_ns, exposed
from traceloom.simulate.scenario import Scenario


def least_ns(graph: Graph, scenario: Scenario, whole_ns: int) -> int:
    """The shortest time that a scenario can take.

    Args:
        graph: As it was measured.
        scenario: With the changes.
        whole_ns: How long the graph takes without them.

    Returns:
        The work that is left on the busiest stream or thread, or the whole time less the time in which something that
        changed went on, whichever is longer; ns.
    """
    return max(busiest_lane_ns(scenario), whole_ns - most_saved_ns(graph, scenario))


def busiest_lane_ns(scenario: Scenario) -> int:
    """The work that a scenario leaves on the lane that has most of it, ns.

    Of work that the next one on its lane overlaps the part before that counts. What runs beside its stream is on none;
    waiting is no work.
    """
    nodes = scenario.graph.nodes
    order = (
        nodes.select("lane", "start_ns", "node")
        .filter(nodes["lane"].is_not_null() & pl.Series(~scenario.beside))
        .sort("lane", "start_ns", "node")
    )
    if not order.height:
        return 0
    at, lane = order["node"].to_numpy().astype(np.int64), order["lane"].to_numpy().astype(np.int64)
    start, duration = order["start_ns"].to_numpy(), plain(array(scenario.graph, nodes["duration_ns"])[at])
    until = np.minimum(np.append(start[1:], start[-1] + duration[-1]), start + duration)
    until[np.flatnonzero(np.diff(lane))] = (start + duration)[np.flatnonzero(np.diff(lane))]
    alone = np.divide(np.maximum(until - start, 0), duration, out=np.ones(at.size), where=duration > 0)
    left = np.maximum(plain(scenario.work_ns[at]), 0) * alone
    return int(np.bincount(lane, weights=left).max())


def most_saved_ns(graph: Graph, scenario: Scenario) -> int:
    """The time in which, on any rank, something went on that a scenario makes shorter or lets nobody wait for, ns.

    A chain of waits leads back from the last moment to the first without a gap; a change shortens it by no more than
    those of its links take that it touches.
    """
    base = Scenario.of(graph)
    times = point_times(graph)
    start, end = times[0::2], times[1::2]
    shorter = scenario.work_ns < base.work_ns
    source, target = points(graph)
    delay = scenario.delay_ns[: target.size]
    less = base.delay_ns - delay
    if scenario.beside.any():  # what waits for the start of work now, waits for what covers it, too
        moved = graph.edges["from_end"].to_numpy() & ~scenario.graph.edges["from_end"].to_numpy()[: target.size]
        less[moved] += covered_ns(graph, scenario.beside)[source[moved] // 2]
    removed = delay <= ABSENT // 2
    earlier = (less > 0) & ~removed
    held = target[removed] // 2
    return merge(
        union(start[shorter], end[shorter]),
        union(start[held], end[held]),
        union(times[target[earlier]] - less[earlier], times[target[earlier]]),
        *exposed(graph, scenario.beside),
    ).total
