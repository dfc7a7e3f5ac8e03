"""How much later each thing could come without the end coming later."""

from __future__ import annotations

import numpy as np
import polars as pl

from traceloom.array_types import Ints
from traceloom.model.graph import Graph
from traceloom.model.graph_arrays import array, point_times, points
from traceloom.retime.plan import Plan


def latest_times(graph: Graph, end_ns: int | None = None) -> Ints:
    """The latest time of each point at which nothing that follows from it comes after the end.

    What nothing waits for may come as late as `end_ns`, or as late as it came where that was later. From there the
    graph is evaluated backwards: a point comes no later than each of its targets less the delay (with residual) of the
    edge, and a node starts no later than its end less its work.

    Args:
        graph: A calibrated graph.
        end_ns: The end that shall stay; the last time of all points where None.

    Returns:
        Times of points 2i (start of node i) and 2i + 1 (its end), ns; never earlier than the measured ones.
    """
    times = point_times(graph)
    if not times.size:
        return times
    last = int(times.max())
    until = last if end_ns is None else end_ns
    # The graph with time running backwards from `last`: ends become starts, and every edge turns round. It has one node
    # more: the end, which gives its time to every node that nothing waits for.
    nodes, edges = graph.nodes, graph.edges
    source, _ = points(graph)
    awaited = np.zeros(times.size, dtype=np.bool_, like=times)
    awaited[source] = True
    free = np.flatnonzero(~awaited[1::2])
    end_delay = last - np.maximum(times[1::2][free], until)
    lane = nodes["lane"].cast(pl.Int64)
    turned = nodes.select(
        # Mirrored with the time, so that lanes stay runs of neighbours.
        pl.Series("lane", (lane.max() or 0) - lane, dtype=pl.Int64),
        pl.Series("start_ns", last - times[1::2]),
        pl.Series("duration_ns", times[1::2] - times[0::2]),
        "work_ns",
        "residual_ns",
    )
    end = pl.DataFrame([[None], [0], [0], [0], [0]], schema=turned.schema)
    links = pl.DataFrame(
        {
            "source": np.concatenate([array(graph, edges["target"]), np.full(free.size, nodes.height)]),
            "target": np.concatenate([array(graph, edges["source"]), free]),
            "from_end": np.concatenate([~edges["to_end"].to_numpy(), np.ones(free.size, dtype=np.bool_)]),
            "to_end": np.concatenate([~edges["from_end"].to_numpy(), np.zeros(free.size, dtype=np.bool_)]),
            "delay_ns": np.concatenate([array(graph, edges["delay_ns"]), end_delay]),
            "residual_ns": np.concatenate([array(graph, edges["residual_ns"]), np.zeros(free.size, dtype=np.int64)]),
        }
    )
    mirrored = Plan(Graph(nodes=pl.concat([turned, end]), edges=links)).evaluate()[:-2]
    latest = np.empty(times.size, dtype=np.int64, like=times)
    latest[0::2], latest[1::2] = last - mirrored[1::2], last - mirrored[0::2]
    return latest


def slack_ns(graph: Graph, end_ns: int | None = None) -> Ints:
    """How much later each node could end without the end coming later; shape (nodes,), ns, never below 0.

    A node may take longer by its slack, but only one of the nodes of a chain may: they share it.

    Args:
        graph: A calibrated graph.
        end_ns: As for `latest_times`.
    """
    return (latest_times(graph, end_ns) - point_times(graph))[1::2]
