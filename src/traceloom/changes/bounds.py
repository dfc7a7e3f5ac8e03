"""Bounds on the saving of a change: lower bounds of a scenario's time, and savings without
recording overhead.
"""

from collections.abc import Sequence

import numpy as np
import polars as pl

from traceloom.analyze.intervals import merge_intervals, merge_spans
from traceloom.changes.changes import Change
from traceloom.changes.scenario import Scenario, compute_covered_ns, find_exposed_time
from traceloom.graph import ABSENT, Plan, graph as graph_schema
from traceloom.graph.graph import (
    Graph,
    get_column_array,
    get_edge_points,
    get_point_times,
    unwrap_array,
)
from traceloom.graph.host_tree import WORKER_LOADERS
from traceloom.trace.array_types import Bools, Ints
from traceloom.trace.frames import contains


def compute_lower_bound_ns(graph: Graph, scenario: Scenario, total_ns: int) -> int:
    """Returns a lower bound of the time that a scenario can take.

    Args:
        graph: The measured graph.
        scenario: The scenario with the changes.
        total_ns: The length of the graph without them.

    Returns:
        The work that is left on the busiest stream or thread, or the whole time less the time in
        which something that changed went on, whichever is longer; ns.
    """
    return max(compute_busiest_lane_ns(scenario), total_ns - max_saved_ns(graph, scenario))


def compute_busiest_lane_ns(scenario: Scenario) -> int:
    """Returns the work that a scenario leaves on the lane that has the most of it, ns.

    For work that the next one on its lane overlaps, the part before the overlap counts. Work beside
    its stream is on no lane; waiting is not work.
    """
    nodes = scenario.graph.nodes
    order = (
        nodes.select("lane", "start_ns", "node")
        .filter(nodes["lane"].is_not_null() & pl.Series(~scenario.beside))
        .sort("lane", "start_ns", "node")
    )
    if not order.height:
        return 0
    rows, lane = (
        order["node"].to_numpy().astype(np.int64),
        order["lane"].to_numpy().astype(np.int64),
    )
    start, duration = (
        order["start_ns"].to_numpy(),
        unwrap_array(get_column_array(scenario.graph, nodes["duration_ns"])[rows]),
    )
    until = np.minimum(np.append(start[1:], start[-1] + duration[-1]), start + duration)
    until[np.flatnonzero(np.diff(lane))] = (start + duration)[np.flatnonzero(np.diff(lane))]
    alone_share = np.divide(
        np.maximum(until - start, 0), duration, out=np.ones(rows.size), where=duration > 0
    )
    remaining_ns = np.maximum(unwrap_array(scenario.work_ns[rows]), 0) * alone_share
    return int(np.bincount(lane, weights=remaining_ns).max())


def max_saved_ns(graph: Graph, scenario: Scenario) -> int:
    """Returns the time in which, on any rank, something went on that a scenario shortens or no
    longer waits for, ns.

    A chain of waits leads back from the last moment to the first without a gap; a change shortens
    it by no more than the length of the links that it affects.
    """
    base = Scenario.of(graph)
    times = get_point_times(graph)
    start, end = times[0::2], times[1::2]
    shorter = scenario.work_ns < base.work_ns
    source, target = get_edge_points(graph)
    delay = scenario.delay_ns[: target.size]
    less = base.delay_ns - delay
    if scenario.beside.any():  # waits for the start of work become waits for what covers it
        moved = (
            graph.edges["from_end"].to_numpy()
            & ~scenario.graph.edges["from_end"].to_numpy()[: target.size]
        )
        less[moved] += compute_covered_ns(graph, scenario.beside)[source[moved] // 2]
    removed = delay <= ABSENT // 2
    earlier = (less > 0) & ~removed
    released = target[removed] // 2
    return merge_spans(
        merge_intervals(start[shorter], end[shorter]),
        merge_intervals(start[released], end[released]),
        merge_intervals(times[target[earlier]] - less[earlier], times[target[earlier]]),
        *find_exposed_time(graph, scenario.beside),
    ).total


def find_unknown_wakeups(graph: Graph) -> Bools:
    """Returns the edges that end an idle time at its measured end, since it is uncertain what woke
    the thread; shape (edges,).

    Edges of the origin hold a wait's end; guesses hold it by what another thread did long before.
    """
    edges = graph.edges
    pinned = graph.edge_mask("origin") & edges["to_end"].to_numpy()
    guessed = graph.edge_mask("cross-thread") & (edges["delay_ns"].to_numpy() > 0)
    unknown: Bools = (pinned | guessed) & (edges["evidence"] == "assumed").to_numpy()
    return unknown


def is_lower_bound(
    before: Scenario, after: Scenario, saved_ns: int, min_difference_ns: int, *plans: Plan
) -> bool:
    """Whether a change would save more if threads whose waker is unknown waited for nothing.

    Args:
        before: The scenario without the change.
        after: The scenario with it.
        saved_ns: Its saving in the graph as it is.
        min_difference_ns: The smallest difference that counts, ns.
        *plans: The plan of the graph of each; or one for both, that of the measured graph.
    """
    edges = find_unknown_wakeups(before.graph)
    if not edges.any():
        return False
    free = []
    for scenario, scenario_plan in ((before, plans[0]), (after, plans[-1])):
        released = scenario.copy()
        released.delay_ns[np.flatnonzero(edges)] = ABSENT
        free.append(int(np.ptp(released.times(scenario_plan))))
    return free[0] - free[1] > saved_ns + min_difference_ns


def may_lack_batches(graph: Graph, times: Ints, min_difference_ns: int) -> bool:
    """Whether a change asks for batches earlier than they are known to be ready, so that it may
    save less: how long the workers of a loader take that nobody waited for is unknown.

    Args:
        graph: The measured graph.
        times: Times of its points with the change.
        min_difference_ns: The smallest difference that counts, ns.
    """
    calls = graph.node_mask(graph_schema.HOST)
    calls &= np.append(contains(graph.names, WORKER_LOADERS).to_numpy(), False)[graph.name_numbers]
    calls[graph.edges["target"].to_numpy()[Scenario.of(graph).batches()]] = False
    earlier = get_point_times(graph)[0::2][calls] - times[0::2][calls]
    return bool((earlier > min_difference_ns).any())


_HOST_KINDS = (graph_schema.HOST, graph_schema.THINK, graph_schema.LAUNCH, graph_schema.BLOCK)
# Of a saving: a loop of `item`, the cheapest operator, takes three times as long when it is
# recorded
_MAX_RECORDING_SHARE = 2 / 3
# Actions that reduce what is recorded with the work
_ACTIONS_WITH_FEWER_EVENTS = (
    "scale",
    "remove",
    "workers",
)
# Actions after which the step no longer waits for the host, nor for its recording
_ACTIONS_FREEING_HOST = (
    "graph",
    "idle",
)


def unrecorded_saving_ns(
    graph: Graph, changes: Sequence[Change], saved_ns: int, *, total_ns: int, ratio: float | None
) -> int:
    """Returns a saving of a recorded run, corrected for the cost of recording.

    Recording lengthens a step by the time it takes to write down each host event, so a saving loses
    what it cost to write down the events of the work that is removed. Work in which little is
    recorded, such as a pause, loses little; work of the device loses nothing. The ratio is measured
    on few and early steps: where nearly all events are those of the removed work, as in a loop over
    the elements of a tensor, all of it would seem to be recording.

    Ranks record side by side: the one that loses the most events counts. The delay of a rank is
    recorded only as far as it does more than the others.

    Args:
        graph: The graph that the saving was evaluated on.
        changes: The changes that save.
        saved_ns: Their saving on the graph, ns; negative where they cost time.
        total_ns: The recorded step or window that the saving is of, ns.
        ratio: Recorded step / unrecorded step, as measured; None where it was not measured.

    Returns:
        ns, between a third of `saved_ns` and all of it; `saved_ns` where the ratio is unknown or at
        most 1.
    """
    if ratio is None or ratio <= 1:
        return saved_ns
    recording_share = 1 - 1 / ratio
    host = graph.node_mask(*_HOST_KINDS)
    rank = graph.nodes["rank"].rank("dense").fill_null(0).to_numpy()[host]
    recorded = np.bincount(rank)
    remaining_share = np.ones(graph.nodes.height)
    less = 0.0
    for change in changes:
        if change.action in _ACTIONS_FREEING_HOST:
            less = saved_ns * recording_share
        elif change.action in _ACTIONS_WITH_FEWER_EVENTS:
            remaining_share[change.selection.nodes(graph)] *= (
                change.factor if change.action == "scale" else 0.0
            )
        elif change.action == "delay":
            late = np.bincount(rank, change.selection.nodes(graph)[host], recorded.size) > 0
            other_recorded = recorded[(recorded > 0) & ~late]
            typical = np.median(other_recorded) if other_recorded.size else np.inf
            remaining_share[host] *= np.where(
                late, np.minimum(typical / np.maximum(recorded, 1), 1.0), 1.0
            )[rank]
    recording_ns = (
        total_ns
        * recording_share
        * np.bincount(rank, 1 - remaining_share[host])
        / np.maximum(recorded, 1)
    )
    if recording_ns.size:
        less = (
            max(less, float(recording_ns.max()))
            if saved_ns >= 0
            else min(less, float(recording_ns.min()))
        )
    return saved_ns - round(
        min(
            max(less, min(_MAX_RECORDING_SHARE * saved_ns, 0)),
            max(_MAX_RECORDING_SHARE * saved_ns, 0),
        )
    )
