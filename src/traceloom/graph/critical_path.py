"""Binding edges, the critical path of a graph, and the slack of its nodes."""

import numpy as np
import polars as pl
from msgspec import Struct

from traceloom.errors import broken
from traceloom.graph.evaluate import Plan
from traceloom.graph.graph import (
    Graph,
    LastGraphCache,
    get_column_array,
    get_edge_points,
    get_point_times,
    unwrap_array,
)
from traceloom.trace.array_types import Ints
from traceloom.trace.arrays import gather_rows

_OWN_WORK = -1
_NO_CAUSE = -2


class Path(Struct, frozen=True):
    """A path through the graph on which each point waits for the one before it, the last first.

    Attributes:
        edges: Rows of the edges on it.
        nodes: Rows of the nodes whose work is on it.
        first: The point it begins with.
        last: The point it ends with.
    """

    edges: Ints
    nodes: Ints
    first: int
    last: int


def find_binding_edges(
    graph: Graph,
    times: Ints | None = None,
    *,
    work_ns: Ints | None = None,
    delay_ns: Ints | None = None,
) -> Ints:
    """Returns for each point the row of the edge that was satisfied last; -1 where the node's own
    work was last, -2 where no edge leads to the point.

    Args:
        graph: A calibrated graph.
        times: Times of its points; the measured ones where None.
        work_ns: Work of each node, with residuals; the graph's where None.
        delay_ns: Delay of each edge, with residuals; the graph's where None.
    """
    source, target = get_edge_points(graph)
    times = get_point_times(graph) if times is None else times
    nodes, edges = graph.nodes, graph.edges
    work = (
        get_column_array(graph, nodes["work_ns"]) + get_column_array(graph, nodes["residual_ns"])
        if work_ns is None
        else work_ns
    )
    delay = (
        get_column_array(graph, edges["delay_ns"]) + get_column_array(graph, edges["residual_ns"])
        if delay_ns is None
        else delay_ns
    )
    reached = gather_rows(times, source) + delay
    own_end = np.full(len(times), np.iinfo(np.int64).min, like=source)
    own_end[1::2] = times[0::2] + work
    bound = np.full(len(times), _NO_CAUSE, like=source)
    bound[1::2] = _OWN_WORK
    if not target.size:
        return bound
    # For each point with edges, ascending, the edge that reaches it last; of equal ones the last in
    # the order of edges.
    order = None if (target[1:] >= target[:-1]).all() else np.argsort(target, kind="stable")
    sorted_target, sorted_reached = (
        (target, reached) if order is None else (target[order], reached[order])
    )
    first = np.flatnonzero(np.append(True, sorted_target[1:] != sorted_target[:-1]))
    size = np.diff(np.append(first, target.size))
    winning = np.flatnonzero(
        sorted_reached == np.repeat(np.maximum.reduceat(sorted_reached, first), size)
    )
    winners = sorted_target[winning]
    last = winning[np.append(winners[1:] != winners[:-1], True)]
    last = last if order is None else order[last]
    is_last = reached[last] > own_end[target[last]]
    bound[target[last[is_last]]] = last[is_last]
    return bound


# `find_binding_edges` by the measured times, for the most recent graph
_binding_cache: LastGraphCache[Ints] = LastGraphCache()


def walk_back(
    graph: Graph, last: int, *, times: Ints | None = None, until: int | None = None
) -> tuple[Ints, Ints]:
    """Walks back from a point over what each point waited for last.

    Args:
        graph: A calibrated graph.
        last: The point to begin with.
        times: Times of its points; the measured ones where None.
        until: Stop at the first point that is not later than this; at the first that waits for
            nothing where None.

    Returns:
        The points, `last` first, and for each what bound it: the row of an edge (the next point is
        its source), -1 for the node's own work (the next point is the node's start), -2 for
        nothing.

    Raises:
        InvariantError: `broken-cycle`: points wait for each other.
    """
    if times is None:
        cached = _binding_cache.of(graph)
        bound = _binding_cache.put(graph, find_binding_edges(graph)) if cached is None else cached
        times = get_point_times(graph)
    else:
        bound = find_binding_edges(graph, times)
    # For each point the one before it on the path; itself where there is none.
    before = np.arange(len(times), like=bound)
    before -= bound == _OWN_WORK
    has_edge = bound >= 0
    before[has_edge] = get_edge_points(graph)[0][bound[has_edge]]
    is_stop = before == np.arange(len(times), like=bound)
    if until is not None:
        is_stop |= times <= until
    # A run in which each point follows its neighbour is walked at once.
    run = np.arange(len(before), like=before)
    run[(before == run - 1) & ~is_stop] = 0
    np.maximum.accumulate(run, out=run)
    first, earlier, stops = run.data, before.data, is_stop.data
    lows: list[int] = []
    highs: list[int] = []
    while len(lows) <= len(before):
        low = first[last]
        lows.append(low)
        highs.append(last)
        if stops[low]:
            break
        last = earlier[low]
    else:
        raise broken("cycle", f"the points before point {last} wait for each other")
    high = np.array(highs, dtype=np.int64)
    sizes = high + 1 - np.array(lows, dtype=np.int64)
    walked: Ints = np.repeat(high + np.cumsum(sizes) - sizes, sizes) - np.arange(sizes.sum())
    return walked, unwrap_array(bound[walked])


def find_critical_path(graph: Graph, times: Ints | None = None) -> Path:
    """Walks back from the point that is reached last.

    Args:
        graph: A calibrated graph with at least one node.
        times: Times of its points; the measured ones where None.
    """
    point_times = get_point_times(graph) if times is None else times
    last = int(np.flatnonzero(point_times == point_times.max())[-1])
    points, bound = walk_back(graph, last, times=times)
    return Path(bound[bound >= 0], points[bound == _OWN_WORK] >> 1, int(points[-1]), last)


def summarize_path(graph: Graph, path: Path, begin_ns: int | None = None) -> pl.DataFrame:
    """Summarizes a path by kind; the times add up to the time from the first point of the graph to
    the path's last.

    Args:
        graph: The graph.
        path: The path.
        begin_ns: Start of the summarized time; the first point of the graph where None.

    Returns:
        `what` (work, delay, residual, before the path begins), `kind` (of the node or edge),
        `count`, `time_ns`.
    """
    times = get_point_times(graph)
    nodes = graph.nodes.select("kind", "work_ns", "residual_ns")[path.nodes]
    edges = graph.edges.select("kind", "delay_ns", "residual_ns")[path.edges]
    before = int(times[path.first]) - (int(times.min()) if begin_ns is None else begin_ns)
    summed = pl.concat(
        [
            _add_up_by_kind(nodes, "work", "work_ns"),
            _add_up_by_kind(nodes, "residual", "residual_ns"),
            _add_up_by_kind(edges, "delay", "delay_ns"),
            _add_up_by_kind(edges, "residual", "residual_ns"),
            pl.DataFrame(
                [("before", "origin", 1, before)] if before else [],
                schema=_PARTS_SCHEMA,
                orient="row",
            ),
        ]
    )
    # Nodes and edges share names of kinds.
    summary = summed.group_by("what", "kind", maintain_order=True).agg(
        pl.col("count", "time_ns").sum()
    )
    return summary.sort("time_ns", descending=True, maintain_order=True)


def list_largest_residuals(graph: Graph, path: Path, limit: int = 5) -> pl.DataFrame:
    """Returns the largest residuals on a path.

    Returns:
        `time_ns`, `kind` (of the edge or node that bears it), and `node`, `name`, `rank` and
        `start_ns` of the node that came so much later than its causes explain.
    """
    on_edges = graph.edges.select("kind", pl.col("target").alias("node"), "residual_ns")[path.edges]
    on_nodes = graph.nodes.select("kind", "node", "residual_ns")[path.nodes]
    residuals = pl.concat(
        [
            frame.filter(pl.col("residual_ns") > 0).with_columns(pl.col("kind").cast(pl.String))
            for frame in (on_edges, on_nodes)
        ]
    )
    first = residuals.sort("residual_ns", descending=True, maintain_order=True).head(limit)
    node_fields = graph.nodes.select("name", "rank", "start_ns")[first["node"]]
    return first.select(pl.col("residual_ns").alias("time_ns"), "kind", "node").hstack(node_fields)


_PARTS_SCHEMA = {"what": pl.String, "kind": pl.String, "count": pl.Int64, "time_ns": pl.Int64}


def _add_up_by_kind(frame: pl.DataFrame, label: str, column: str) -> pl.DataFrame:
    """Returns how many rows of each kind have a time, and its sum, in order of first appearance."""
    nonzero = frame.filter(pl.col(column) != 0).group_by("kind", maintain_order=True)
    return nonzero.agg(pl.len().alias("count"), pl.col(column).sum().alias("time_ns")).select(
        pl.lit(label).alias("what"),
        pl.col("kind").cast(pl.String),
        pl.col("count").cast(pl.Int64),
        "time_ns",
    )


def compute_latest_times(graph: Graph, end_ns: int | None = None) -> Ints:
    """Returns the latest time of each point at which nothing that follows from it comes after the
    end.

    Points that nothing waits for may come as late as `end_ns`, or as late as they came where that
    was later. From there the graph is evaluated backwards: a point comes no later than each of its
    targets less the delay (with residual) of the edge, and a node starts no later than its end less
    its work.

    Args:
        graph: A calibrated graph.
        end_ns: The end to keep; the last time of all points where None.

    Returns:
        Times of points 2i (start of node i) and 2i + 1 (its end), ns; never earlier than the
        measured ones.
    """
    times = get_point_times(graph)
    if not times.size:
        return times
    last = int(times.max())
    until = last if end_ns is None else end_ns
    # The graph with time running backwards from `last`: ends become starts, and every edge is
    # reversed. It has one node more, the end, which gives its time to every node that nothing waits
    # for.
    nodes, edges = graph.nodes, graph.edges
    source, _ = get_edge_points(graph)
    awaited = np.zeros(times.size, dtype=np.bool_, like=times)
    awaited[source] = True
    free = np.flatnonzero(~awaited[1::2])
    end_delay = last - np.maximum(times[1::2][free], until)
    lane = nodes["lane"].cast(pl.Int64)
    turned = nodes.select(
        # Mirrored with the time, so that lanes stay contiguous.
        pl.Series("lane", (lane.max() or 0) - lane, dtype=pl.Int64),
        pl.Series("start_ns", last - times[1::2]),
        pl.Series("duration_ns", times[1::2] - times[0::2]),
        "work_ns",
        "residual_ns",
    )
    end = pl.DataFrame([[None], [0], [0], [0], [0]], schema=turned.schema)
    links = pl.DataFrame(
        {
            "source": np.concatenate(
                [get_column_array(graph, edges["target"]), np.full(free.size, nodes.height)]
            ),
            "target": np.concatenate([get_column_array(graph, edges["source"]), free]),
            "from_end": np.concatenate(
                [~edges["to_end"].to_numpy(), np.ones(free.size, dtype=np.bool_)]
            ),
            "to_end": np.concatenate(
                [~edges["from_end"].to_numpy(), np.zeros(free.size, dtype=np.bool_)]
            ),
            "delay_ns": np.concatenate([get_column_array(graph, edges["delay_ns"]), end_delay]),
            "residual_ns": np.concatenate(
                [get_column_array(graph, edges["residual_ns"]), np.zeros(free.size, dtype=np.int64)]
            ),
        }
    )
    mirrored = Plan(Graph(nodes=pl.concat([turned, end]), edges=links)).evaluate()[:-2]
    latest = np.empty(times.size, dtype=np.int64, like=times)
    latest[0::2], latest[1::2] = last - mirrored[1::2], last - mirrored[0::2]
    return latest


def compute_slack_ns(graph: Graph, end_ns: int | None = None) -> Ints:
    """Returns how much later each node could end without delaying the end; shape (nodes,), ns,
    never negative.

    A node may take longer by its slack, but only one of the nodes of a chain may: they share it.

    Args:
        graph: A calibrated graph.
        end_ns: As for `compute_latest_times`.
    """
    return (compute_latest_times(graph, end_ns) - get_point_times(graph))[1::2]
