"""The law: a graph must give back the measured times from works and delays alone, nothing pinned to its start.

Two errors are told. With residuals the measurement must come back to the nanosecond: that proves the evaluation, not
the graph. With nothing but the delay of each edge's class the window should come back within 2 %: that is the honest
error, which says what the edges explain. The residuals' share of the critical path says what they do not.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np
import polars as pl
from numpy.typing import NDArray

from traceloom.model import units
from traceloom.model.graph import Graph
from traceloom.model.result import Result
from traceloom.retime.plan import Plan

Ints = NDArray[np.int64]

HONEST = 0.02  # of the window


@dataclass(frozen=True)
class Law(Result):
    """What re-timing a graph gave.

    Attributes:
        sentence: The verdict.
        holds: Exact with residuals, and within `HONEST` without.
        window_ns: From the first to the last point, as measured.
        exact_error_ns: Largest difference of any point, with residuals.
        honest_error_ns: Difference of the window, with class delays alone.
        honest_error: The same as a fraction of the window.
        residual_ns: Residuals on the critical path.
        residual_share: The same as a fraction of the window.
        pass_ns: Time of one evaluation.
        ranks: `rank`, `window_ns`, `honest_error_ns` of the last point of each rank.
        path: What the critical path consists of: `what`, `kind`, `count`, `time_ns`; the times add up to the window.
    """

    sentence: str
    holds: bool
    window_ns: int
    exact_error_ns: int
    honest_error_ns: int
    honest_error: float
    residual_ns: int
    residual_share: float
    pass_ns: int
    ranks: pl.DataFrame
    path: pl.DataFrame


def law(graph: Graph) -> Law:
    """Evaluate a calibrated graph with and without residuals, and walk its critical path."""
    measured = graph.point_times()
    plan = Plan(graph)
    started = time.perf_counter_ns()
    exact = plan.evaluate()
    took = time.perf_counter_ns() - started
    honest = plan.evaluate(residuals=False)
    window = int(measured.max() - measured.min()) if len(measured) else 0
    exact_error = int(np.abs(exact - measured).max(initial=0))
    honest_error = int(honest.max() - measured.max()) if len(measured) else 0
    path = critical_path(graph)
    residual = int(path.filter(pl.col("what") == "residual")["time_ns"].sum())
    share = residual / window if window else 0.0
    fraction = honest_error / window if window else 0.0
    holds = exact_error == 0 and abs(fraction) <= HONEST
    return Law(
        sentence=_sentence(exact_error, fraction, share, window),
        holds=holds,
        window_ns=window,
        exact_error_ns=exact_error,
        honest_error_ns=honest_error,
        honest_error=fraction,
        residual_ns=residual,
        residual_share=share,
        pass_ns=took,
        ranks=_ranks(graph, measured, honest),
        path=path,
    )


def _sentence(exact_error: int, fraction: float, share: float, window: int) -> str:
    exact = "exactly" if not exact_error else f"but for {units.duration(exact_error)}"
    honest = f"{fraction:+.2%}".replace("%", " %")
    ok = "" if abs(fraction) <= HONEST else " (more than the 2 % at which it can be trusted)"
    return (
        f"Re-timed without any measured start, the {units.duration(window)} come back {exact}; with the usual delay of "
        f"each kind of edge alone {honest}{ok}; unexplained delays are {units.share(share, 1)} of the critical path."
    )


def _ranks(graph: Graph, measured: Ints, honest: Ints) -> pl.DataFrame:
    frame = graph.nodes.select("rank").with_columns(
        pl.Series("start", measured[0::2]), pl.Series("end", measured[1::2]), pl.Series("honest", honest[1::2])
    )
    return (
        frame.filter(pl.col("rank").is_not_null())
        .group_by("rank")
        .agg(
            (pl.col("end").max() - pl.col("start").min()).alias("window_ns"),
            (pl.col("honest").max() - pl.col("end").max()).alias("honest_error_ns"),
        )
        .sort("rank")
    )


def binding_edges(
    graph: Graph, times: Ints | None = None, *, work_ns: Ints | None = None, delay_ns: Ints | None = None
) -> Ints:
    """For each point the row of the edge that was satisfied last; -1: the node's own work; -2: nothing leads there.

    Args:
        graph: A calibrated graph.
        times: Times of its points; the measured ones where None.
        work_ns: Work of each node, with residuals; the graph's where None.
        delay_ns: Delay of each edge, with residuals; the graph's where None.
    """
    times = graph.point_times() if times is None else times
    nodes, edges = graph.nodes, graph.edges
    work = (nodes["work_ns"] + nodes["residual_ns"]).to_numpy() if work_ns is None else work_ns
    delay = (edges["delay_ns"] + edges["residual_ns"]).to_numpy() if delay_ns is None else delay_ns
    source, target = graph.points()
    reached = times[source] + delay
    own = np.full(len(times), np.iinfo(np.int64).min)
    own[1::2] = times[0::2] + work
    bound = np.where(np.arange(len(times)) & 1 == 1, -1, -2)
    order = np.lexsort((reached, target))
    last = order[np.append(target[order][1:] != target[order][:-1], True)] if len(order) else order
    wins = reached[last] > own[target[last]]
    bound[target[last[wins]]] = last[wins]
    return bound


def critical_path(graph: Graph) -> pl.DataFrame:
    """What the way from the last point back to the first consists of.

    Returns:
        `what` (work, delay, residual, before the first point), `kind` (of the node or edge), `count`, `time_ns`.
    """
    times = graph.point_times()
    if not len(times):
        return pl.DataFrame(schema={"what": pl.String, "kind": pl.String, "count": pl.Int64, "time_ns": pl.Int64})
    bound = binding_edges(graph, times).tolist()
    source = graph.points()[0].tolist()
    point = int(np.flatnonzero(times == times.max())[-1])
    edges: list[int] = []
    nodes: list[int] = []
    while True:
        edge = bound[point]
        if edge >= 0:
            edges.append(edge)
            point = source[edge]
        elif edge == -1:
            nodes.append(point >> 1)
            point -= 1
        else:
            break
    rows = pl.concat(
        [
            _share_of(graph.nodes[nodes], "work", "work_ns"),
            _share_of(graph.nodes[nodes], "residual", "residual_ns"),
            _share_of(graph.edges[edges], "delay", "delay_ns"),
            _share_of(graph.edges[edges], "residual", "residual_ns"),
            pl.DataFrame({"what": ["before"], "kind": ["origin"], "time": [int(times[point] - times.min())]}),
        ]
    )
    summed = (
        rows.filter(pl.col("time") != 0)
        .group_by("what", "kind")
        .agg(pl.len().cast(pl.Int64).alias("count"), pl.col("time").sum().alias("time_ns"))
    )
    return summed.sort("time_ns", descending=True)


def _share_of(frame: pl.DataFrame, what: str, column: str) -> pl.DataFrame:
    return frame.select(pl.lit(what).alias("what"), pl.col("kind").cast(pl.String), pl.col(column).alias("time"))
