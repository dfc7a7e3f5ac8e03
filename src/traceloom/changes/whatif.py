"""What-if analysis: a graph evaluated with changes, and sweeps of one change over several
factors.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice

import numpy as np
import polars as pl

from traceloom.changes.bounds import (
    compute_lower_bound_ns,
    is_lower_bound,
    may_lack_batches,
    unrecorded_saving_ns,
)
from traceloom.changes.changes import Change, format_factor, parse
from traceloom.changes.scenario import Scenario
from traceloom.graph import ABSENT, Plan, link_session
from traceloom.graph.calibrate import scale_overlap
from traceloom.graph.critical_path import find_critical_path, summarize_path
from traceloom.graph.graph import Graph, get_point_times, unwrap_array
from traceloom.graph.law import Law, law
from traceloom.trace.array_types import Bools, Ints
from traceloom.trace.frames import Result, build_schema, cast_to_schema
from traceloom.trace.session import Session

RANKS = build_schema("rank before_ns after_ns saved_ns")
PARTS = build_schema("what kind before_ns after_ns")


@dataclass(frozen=True)
class WhatIf(Result):
    """The effect of some changes together.

    Attributes:
        changes: The changes as they are written.
        before_ns: From the first to the last moment of the graph; of a step, where the graph is of
            one.
        after_ns: The same with the changes.
        saved_ns: The difference; negative where it takes longer.
        saved_fraction: The saving as a fraction of `before_ns`.
        host_ratio: Measured cost of recording: recorded step / unrecorded step. Host work in the
            trace takes that many times as long as without a profiler; None where it was not
            measured.
        rescaled_saved_ns: `saved_ns` without what recording cost the work that is saved (see
            `unrecorded_saving_ns`); `saved_ns` where that was not measured.
        ranks: rank, before_ns, after_ns, saved_ns.
        path: What the critical path consists of, before and after: what, kind, before_ns, after_ns;
            each adds up to the window.
        times: New times of all points (2i start, 2i + 1 end of node i), ns since the graph's epoch.
        error_ns: The graph's honest error: how far it is off without any change.
        trusted: Whether the saving is larger than that error and than 1 % of the time, the law
            holds, and it may not save less.
        lower_bound: Whether it may save more: threads wait for unrecorded causes, which are taken
            as given.
        upper_bound: Whether it may save less: it asks for batches earlier than the workers of the
            data loader are known to have them ready.
        chance_ns: Half the width of the 95 % interval of the saving, where it is of what a rank
            does more than others, which differs from step to step; else 0.
    """

    changes: tuple[str, ...]
    before_ns: int
    after_ns: int
    saved_ns: int
    saved_fraction: float
    host_ratio: float | None
    rescaled_saved_ns: int
    ranks: pl.DataFrame
    path: pl.DataFrame
    times: Ints
    error_ns: int
    trusted: bool
    lower_bound: bool
    upper_bound: bool = False
    chance_ns: int = 0


def whatif(
    graph: Graph | Session,
    changes: str | Sequence[str | Change],
    *,
    plan: Plan | None = None,
    kept: Law | None = None,
    host_ratio: float | None = None,
) -> WhatIf:
    """Evaluates the graph with some changes together.

    Args:
        graph: A calibrated graph, or a session, which is linked first.
        changes: Applied one after the other, as the command line takes them.
        plan: The plan of that graph, where there is one.
        kept: Its law, where it was computed.
        host_ratio: Recorded step / unrecorded step, where that was measured.

    Raises:
        UsageError: slug `nothing-chosen`: a change selects nothing in this graph.

    Example:
        >>> run = traceloom.load("run")  # doctest: +SKIP
        >>> traceloom.whatif(run, "kernels ~ gemm * 0.5").saved_ns  # doctest: +SKIP
    """
    if isinstance(graph, Session):
        if host_ratio is None:
            host_ratio = graph.recording_overhead_ratio
        graph = link_session(graph)
    texts = [changes] if isinstance(changes, str) else changes
    parsed = [parse(change) if isinstance(change, str) else change for change in texts]
    plan = plan or Plan(graph)
    kept = kept or law(graph, plan)
    scenario = scenario_of(graph, parsed)
    times = scenario.times(plan)
    measured = get_point_times(graph)
    start_ns = int(measured.min()) if measured.size else 0
    before = _measure_span(measured, start_ns)
    after = max(_measure_span(times, start_ns), compute_lower_bound_ns(graph, scenario, before))
    saved = before - after
    min_difference_ns = round(_MIN_COUNTED_SHARE * before)
    chance_ns = round(_INTERVAL_DEVIATIONS * scenario.chance_ns)
    upper_bound = saved > 0 and may_lack_batches(graph, times, min_difference_ns)
    ranks = (
        graph.nodes.select(
            "rank",
            start=pl.Series(measured[0::2]),
            end=pl.Series(measured[1::2]),
            new_end=pl.Series(times[1::2]),
        )
        .drop_nulls("rank")
        .group_by("rank")
        .agg(
            before_ns=pl.col("end").max() - pl.col("start").min(),
            after_ns=pl.col("new_end").max() - pl.col("start").min(),
        )
        .sort("rank")
        .with_columns(saved_ns=pl.col("before_ns") - pl.col("after_ns"))
        .pipe(cast_to_schema, RANKS)
    )
    return WhatIf(
        changes=tuple(str(change) for change in parsed),
        before_ns=before,
        after_ns=after,
        saved_ns=saved,
        saved_fraction=saved / max(before, 1),
        host_ratio=host_ratio,
        rescaled_saved_ns=unrecorded_saving_ns(
            graph, parsed, saved, total_ns=before, ratio=host_ratio
        ),
        ranks=ranks,
        path=_compare_critical_paths(graph, scenario, times),
        times=times,
        error_ns=abs(kept.honest_error_ns),
        trusted=kept.holds
        and not upper_bound
        and abs(saved)
        > max(abs(kept.honest_error_ns), min_difference_ns, _MIN_INTERVALS * chance_ns)
        and _measure_span(times, start_ns) == after,
        lower_bound=is_lower_bound(Scenario.of(graph), scenario, saved, min_difference_ns, plan),
        upper_bound=upper_bound,
        chance_ns=chance_ns,
    )


def whatif_many(graph: Graph, scenarios: Iterable[Scenario], plan: Plan | None = None) -> Ints:
    """Returns the total time (first to last moment) of each scenario, ns, shape (scenarios,)."""
    measured = get_point_times(graph)
    start_ns = int(measured.min()) if measured.size else 0
    total_ns = _measure_span(measured, start_ns)
    spans = [
        max(_measure_span(times, start_ns), compute_lower_bound_ns(graph, scenario, total_ns))
        for scenario, times in evaluations(scenarios, plan or Plan(graph))
    ]
    return np.array(spans, dtype=np.int64)


def evaluations(scenarios: Iterable[Scenario], plan: Plan) -> Iterator[tuple[Scenario, Ints]]:
    """Yields the times of all points in each scenario, shape (2 x nodes,); a few with the plan's
    graph are evaluated together.

    Lazily made scenarios are held only in batches of these few.
    """
    graph = plan.graph
    batch_size = max(
        1,
        min(_BATCH_SCENARIOS, _MAX_BATCH_VALUES // max(graph.nodes.height + graph.edges.height, 1)),
    )
    waiting = iter(scenarios)
    while batch := list(islice(waiting, batch_size)):
        if all(scenario.graph is graph for scenario in batch):
            # A single array as it is, wherever it is stored
            works, delays = (
                batch[0].work_ns,
                batch[0].delay_ns,
            )
            if len(batch) > 1:
                works = np.stack([unwrap_array(scenario.work_ns) for scenario in batch])
                delays = np.stack([unwrap_array(scenario.delay_ns) for scenario in batch])
            yield from zip(
                batch, np.atleast_2d(plan.evaluate(works, delays, residuals=False)), strict=True
            )
        else:
            yield from ((scenario, scenario.times(plan)) for scenario in batch)
        batch.clear()


# Of the time: a saving that may be larger or smaller by this much is a bound, and a smaller one is
# within what calls and waits differ by chance
_MIN_COUNTED_SHARE = 0.01
_INTERVAL_DEVIATIONS = 1.96  # standard deviations
_MIN_INTERVALS = (
    7  # times the half of its interval is a trusted saving: at most 15 % of it is chance
)
_BATCH_SCENARIOS = 8
_MAX_BATCH_VALUES = 2_000_000  # works and delays evaluated together


def scenario_of(graph: Graph, changes: Sequence[Change]) -> Scenario:
    """Returns the graph with all of the changes applied."""
    scenario = Scenario.of(graph)
    for change in changes:
        scenario = scenario.apply(change)
    return scenario


def _measure_span(times: Ints, start_ns: int) -> int:
    """Returns the time from the beginning of the measurement: by its clock, work may precede its
    launch.
    """
    return int(times.max()) - start_ns if times.size else 0


def _compare_critical_paths(graph: Graph, scenario: Scenario, times: Ints) -> pl.DataFrame:
    if not times.size:
        return PARTS.to_frame()
    start_ns = int(get_point_times(graph).min())
    before = summarize_path(graph, find_critical_path(graph), start_ns).select(
        "what", "kind", before_ns="time_ns"
    )
    changed = changed_graph(graph, scenario, times)
    after = summarize_path(changed, find_critical_path(changed), start_ns).select(
        "what", "kind", after_ns="time_ns"
    )
    return (
        before.join(after, on=["what", "kind"], how="full", coalesce=True, nulls_equal=True)
        .fill_null(0)
        .sort("before_ns", "after_ns", descending=True)
        .pipe(cast_to_schema, PARTS)
    )


def changed_graph(graph: Graph, scenario: Scenario, times: Ints) -> Graph:
    """Returns the graph as if it had been measured with the changes, to walk its critical path or
    to draw it.
    """
    start, end = times[0::2], times[1::2]
    nodes = graph.nodes.with_columns(
        start_ns=pl.Series(start),
        duration_ns=pl.Series(end - start),
        work_ns=pl.Series(np.maximum(np.minimum(scenario.work_ns, end - start), 0)),
        residual_ns=pl.lit(0, pl.Int64),
    )
    present = scenario.delay_ns > ABSENT // 2
    delay = scale_overlap(scenario.graph, scenario.work_ns, scenario.delay_ns)
    edges = scenario.graph.edges.with_columns(
        delay_ns=pl.Series(delay), residual_ns=pl.lit(0, pl.Int64)
    )
    return replace(graph, nodes=nodes, edges=edges.filter(pl.Series(present)))


def changed_nodes(graph: Graph, scenario: Scenario) -> Bools:
    """Returns the nodes that a scenario changes, shape (nodes,).

    These are nodes with other work; parts of communication with another transfer; calls with
    another wait for the device; and nodes that others no longer wait for.
    """
    base = Scenario.of(graph)
    changed: Bools = (scenario.work_ns != base.work_ns) | scenario.beside
    moved = scenario.delay_ns[: graph.edges.height] != base.delay_ns
    moved &= graph.edge_mask("rendezvous", "synchronize")
    changed[graph.edges["target"].to_numpy()[moved]] = True
    return changed


@dataclass(frozen=True)
class Sweep(Result):
    """One change with several factors.

    Attributes:
        template: The change with `{}` in place of the factor.
        table: factor, time_ns, saved_ns, saved_fraction.
    """

    template: str
    table: pl.DataFrame


def sweep(
    graph: Graph, template: str, factors: Sequence[float], *, plan: Plan | None = None
) -> Sweep:
    """Evaluates a change with several factors: `sweep(graph, "network * {}", [1, 2, 4, 8])`.

    Raises:
        UsageError: slugs `bad-change`, `nothing-chosen`.
    """
    base = Scenario.of(graph)
    scenarios = [
        base,
        *(base.apply(parse(template.format(format_factor(factor)))) for factor in factors),
    ]
    before, *times = whatif_many(graph, scenarios, plan).tolist()
    rows = [
        (float(f), t, before - t, (before - t) / max(before, 1))
        for f, t in zip(factors, times, strict=True)
    ]
    return Sweep(
        template,
        pl.DataFrame(
            rows, schema=build_schema("factor time_ns saved_ns saved_fraction"), orient="row"
        ),
    )
