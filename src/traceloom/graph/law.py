"""The law: re-timing a graph from works and delays alone must reproduce the measured times.

Two errors are reported. With residuals the measurement must come back to the nanosecond: that
proves the evaluation, not the graph. With nothing but the delay of each edge's class the window
should come back within 2 %: that is the honest error, which shows how much the edges explain. The
residuals' share of the critical path shows how much they do not, and the assumed share how much is
only taken as given.
"""

import time
from dataclasses import dataclass

import numpy as np
import polars as pl

from traceloom.graph.critical_path import (
    Path,
    find_critical_path,
    list_largest_residuals,
    summarize_path,
)
from traceloom.graph.evaluate import Plan
from traceloom.graph.graph import Graph, LastGraphCache, get_point_times, unwrap_array
from traceloom.system import units
from traceloom.trace.frames import Result

MAX_ERROR_SHARE = 0.02  # of the window
MAX_POINT_ERROR_SHARE = 0.05  # of the window
_MAX_SAMPLE = 2_000_000  # points sampled at most for the usual error
_MAX_NAME_CHARS = 60  # characters of a name in a sentence


@dataclass(frozen=True)
class Law(Result):
    """The result of re-timing a graph.

    Attributes:
        sentence: The verdict in words.
        holds: Exact with residuals, and within `MAX_ERROR_SHARE` without; no communication ends
            before it began.
        window_ns: From the first to the last point, as measured.
        exact_error_ns: Largest difference of any point, with residuals.
        honest_error_ns: Difference of the window, with class delays alone.
        honest_error: The same as a fraction of the window.
        point_error_ns: The error that 95 % of all points stay within, with class delays alone: the
            window may come back while points within it do not.
        point_error: The same as a fraction of the window.
        points_hold: Exact with residuals, and points within `MAX_POINT_ERROR_SHARE` without:
            results that depend on single points can be trusted.
        residual_ns: Residuals on the critical path.
        residual_share: The same as a fraction of the window.
        assumed_ns: Delays of `assumed` edges on the critical path, which are taken as given without
            being recorded.
        assumed_share: The same as a fraction of the window.
        pass_ns: Processor time of one evaluation.
        ranks: `rank`, `window_ns`, `exact_error_ns` (largest of its points), `honest_error_ns` (of
            its last point) and `honest_error` (fraction of its window) of each rank.
        path: What the critical path consists of: `what`, `kind`, `count`, `time_ns`; the times add
            up to the window.
        unexplained: The largest residuals on it: `time_ns`, `kind`, `node`, `name`, `rank`,
            `start_ns`.
    """

    sentence: str
    holds: bool
    window_ns: int
    exact_error_ns: int
    honest_error_ns: int
    honest_error: float
    point_error_ns: int
    point_error: float
    points_hold: bool
    residual_ns: int
    residual_share: float
    assumed_ns: int
    assumed_share: float
    pass_ns: int
    ranks: pl.DataFrame
    path: pl.DataFrame
    unexplained: pl.DataFrame


_law_cache: LastGraphCache[Law] = LastGraphCache()


def law(graph: Graph, plan: Plan | None = None) -> Law:
    """Evaluates a calibrated graph with and without residuals, and walks its critical path.

    The result for the most recent graph is cached.

    Args:
        graph: A calibrated graph.
        plan: The plan of that graph, where there is one already.
    """
    cached = _law_cache.of(graph)
    if cached is not None:
        return cached
    measured = get_point_times(graph)
    plan = plan or Plan(graph)
    started = time.thread_time_ns()  # other threads may be writing the graph
    exact = plan.evaluate()
    pass_ns = time.thread_time_ns() - started
    honest = plan.evaluate(residuals=False)
    path = (
        find_critical_path(graph)
        if measured.size
        else Path(*(np.zeros(0, dtype=np.int64),) * 2, -1, -1)
    )
    consists = summarize_path(graph, path) if measured.size else _EMPTY_PARTS
    largest = list_largest_residuals(graph, path)
    window = int(np.ptp(measured)) if measured.size else 0
    residual = int(consists.filter(pl.col("what") == "residual")["time_ns"].sum())
    on_path = graph.edges.select("evidence", "delay_ns")[path.edges]
    assumed = int(on_path.filter(pl.col("evidence") == "assumed")["delay_ns"].sum())
    exact_error = int(np.abs(exact - measured).max(initial=0))
    honest_error = int(honest.max() - measured.max()) if measured.size else 0
    fraction = honest_error / max(window, 1)
    sample = slice(None, None, measured.size // _MAX_SAMPLE + 1)
    points = (
        int(
            np.percentile(np.abs(unwrap_array(honest[sample]) - unwrap_array(measured[sample])), 95)
        )
        if measured.size
        else 0
    )
    off = points / max(window, 1)
    off_ns = np.abs(exact - measured)
    rank_groups = (
        graph.nodes.select("rank")
        .with_columns(
            pl.Series("start", measured[0::2]),
            pl.Series("end", measured[1::2]),
            pl.Series("honest", honest[1::2]),
            pl.Series("off", np.maximum(off_ns[0::2], off_ns[1::2])),
        )
        .drop_nulls("rank")
        .group_by("rank")
    )
    ranks = rank_groups.agg(
        (pl.col("end").max() - pl.col("start").min()).alias("window_ns"),
        pl.col("off").max().alias("exact_error_ns"),
        (pl.col("honest").max() - pl.col("end").max()).alias("honest_error_ns"),
    ).sort("rank")
    result = Law(
        sentence=_describe_law(exact_error, (fraction, off), window, residual, assumed, largest),
        holds=exact_error == 0
        and abs(fraction) <= MAX_ERROR_SHARE
        and not any(
            notice.slug in ("clocks-contradict", "collectives-circle") for notice in graph.notices
        ),
        window_ns=window,
        exact_error_ns=exact_error,
        honest_error_ns=honest_error,
        honest_error=fraction,
        point_error_ns=points,
        point_error=off,
        points_hold=exact_error == 0 and off <= MAX_POINT_ERROR_SHARE,
        residual_ns=residual,
        residual_share=residual / max(window, 1),
        assumed_ns=assumed,
        assumed_share=assumed / max(window, 1),
        pass_ns=pass_ns,
        ranks=ranks.with_columns(
            (pl.col("honest_error_ns") / pl.max_horizontal("window_ns", 1)).alias("honest_error")
        ),
        path=consists,
        unexplained=largest,
    )
    return _law_cache.put(graph, result)


_EMPTY_PARTS = pl.DataFrame(
    schema={"what": pl.String, "kind": pl.String, "count": pl.Int64, "time_ns": pl.Int64}
)


def _describe_law(  # noqa: PLR0917  (the figures in the order of the sentence)
    exact_error: int,
    errors: tuple[float, float],
    window: int,
    residual: int,
    assumed: int,
    largest: pl.DataFrame,
) -> str:
    exact = "exactly" if not exact_error else f"but for {units.format_duration(exact_error)}"
    fraction, points = errors
    honest = f"{fraction:+.2%}".replace("%", " %")
    ok = (
        ""
        if abs(fraction) <= MAX_ERROR_SHARE
        else " (more than the 2 % at which it can be trusted)"
    )
    within = f", and 95 % of what happens within {units.format_share(points, 1)} of its time"
    within += (
        ""
        if points <= MAX_POINT_ERROR_SHARE
        else " (more than the 5 % at which single moments can be trusted)"
    )
    share = residual / max(window, 1)
    clauses = [
        f"Re-timed without any measured start, the {units.format_duration(window)} come back {exact}",
        f"with the usual delay of each kind of edge alone {honest}{ok}{within}",
        f"unexplained delays are {units.format_share(share, 1)} of the critical path",
    ]
    if share > MAX_ERROR_SHARE and largest.height:
        first = largest.row(0, named=True)
        name = "".join(letter if letter.isprintable() else " " for letter in first["name"] or "")
        short = name if len(name) <= _MAX_NAME_CHARS else f"{name[: _MAX_NAME_CHARS - 1]}…"
        clauses[-1] += (
            f", of which {units.format_duration(first['time_ns'])} before `{short}` ({first['kind']})"
        )
    if assumed > MAX_ERROR_SHARE * window:
        clauses.append(
            f"{units.format_share(assumed / max(window, 1), 1)} of it are waits for what was not recorded"
        )
    return "; ".join(clauses) + "."
