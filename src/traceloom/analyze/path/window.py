"""Which time of a graph a path is asked for: one step of all ranks, or everything."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Literal

import numpy as np
import polars as pl
from msgspec import Struct

from traceloom.array_types import Ints
from traceloom.errors import UsageError
from traceloom.model import Session, Trace
from traceloom.model import graph_schema as gs
from traceloom.model.category import GPU_WORK
from traceloom.model.graph import Graph
from traceloom.model.graph_arrays import point_times
from traceloom.plain_text import clean

_HOST = (gs.HOST, gs.THINK, gs.WAIT, gs.LAUNCH, gs.BLOCK)
_NO_LANE = 2**32 - 1
_SIDES: tuple[Literal["left", "right"], ...] = ("left", "right")
_NEVER = int(np.iinfo(np.int64).max)
_NEIGHBOURS = 16  # events that tell how a trace's clock relates to the graph's


class PathWindow(Struct, frozen=True):
    """The time of one step (or of everything) in a graph, on the graph's clock.

    Attributes:
        step: The step; None for everything.
        low: From, ns: where the first rank begins the step.
        high: To, ns: where the last rank ends it.
        last: The point that the path leads to: the last thing of the step, be it work it launched that ended later.
    """

    step: int | None
    low: int
    high: int
    last: int


def usual_step(traces: Iterable[Trace]) -> int | None:
    """The step of median length among the whole ones that most ranks have; None without steps that take time.

    The length of a step is that of its slowest rank. Of an even number the longer of the two in the middle is taken.
    """
    common = common_steps(traces)
    return common[len(common) // 2] if common else None


def common_steps(traces: Iterable[Trace]) -> list[int]:
    """The whole steps that most ranks have, from the shortest to the longest on their slowest rank."""
    steps = [trace.steps[["step", "complete", "start_ns", "end_ns"]] for trace in traces]
    lengths = pl.concat(steps) if steps else pl.DataFrame()
    if not lengths.height:
        return []
    lengths = lengths.select("step", "complete", ns=pl.col("end_ns") - pl.col("start_ns")).filter(pl.col("ns") > 0)
    if not lengths.height:
        return []
    whole = lengths.filter("complete")
    by_step = (whole if whole.height else lengths).group_by("step").agg(pl.col("ns").max(), pl.len().alias("ranks"))
    common = by_step.filter(pl.col("ranks") == pl.col("ranks").max()).sort("ns", "step")
    numbers: list[int] = common["step"].to_list()
    return numbers


def usual_step_of(graph: Graph) -> int | None:
    """The same for a graph alone, which does not say which steps are whole."""
    spans = _spans(graph)
    if not spans.height:
        return None
    by_step = spans.group_by("step").agg(
        (pl.col("high").max() - pl.col("low").min()).alias("ns"), pl.len().alias("ranks")
    )
    common = by_step.filter(pl.col("ranks") == pl.col("ranks").max()).sort("ns", "step")
    return int(common["step"][common.height // 2])


def window_of(graph: Graph, step: int | None, session: Session | None = None) -> PathWindow:
    """The window of a step, or of the whole graph.

    Args:
        graph: A linked graph with at least one node.
        step: The step; None for everything.
        session: The traces that it was linked from, which know when steps begin and end; without them a step is what
            the nodes of its thread cover.

    Raises:
        UsageError: `no-such-step`.
    """
    times = point_times(graph)
    if step is None:
        return PathWindow(None, int(times.min()), int(times.max()), int(np.flatnonzero(times == times.max())[-1]))
    spans = _spans(graph).filter(pl.col("step") == step)
    if session is not None:  # as the traces say them, on the graph's clock; the thread is that of the step's own event
        thread = dict(spans.select("rank", "lane").iter_rows())
        rows = []
        for trace, clock in clocks(graph, session, step):
            row = trace.steps.filter(pl.col("step") == step).row(0, named=True)
            starts = trace.events["start_ns"].to_numpy()
            first, after = (int(np.searchsorted(starts, row["start_ns"], side=side)) for side in _SIDES)
            marks = first + np.flatnonzero((trace.events["name"][first:after] == row["name"]).to_numpy())
            nodes = _events_of(graph, trace, clock.rank)
            marked = nodes[np.isin(graph.nodes["event"][nodes].to_numpy(), marks)]
            lanes = graph.nodes["lane"][marked].drop_nulls()
            lane = int(lanes[0]) if lanes.len() else thread.get(clock.rank)
            rows.append((clock.rank, step, lane, row["start_ns"] + clock.shift, row["end_ns"] + clock.shift))
        spans = pl.DataFrame(rows, schema=spans.schema, orient="row")
    if not spans.height:
        raise UsageError(f"there is no step {step} in the graph", slug="no-such-step")
    low, high = int(spans["low"].min()), int(spans["high"].max())  # type: ignore[arg-type]
    # The last point of a step: the end of its thread's time, or of GPU work that it launched
    in_step = np.flatnonzero((graph.nodes["step"] == step).fill_null(value=False).to_numpy())
    launched = in_step[graph.nodes["category"][in_step].is_in(list(GPU_WORK)).fill_null(value=False).to_numpy()]
    candidates = [2 * launched + 1]
    lane_of = graph.nodes["lane"].fill_null(_NO_LANE).to_numpy()
    for span in spans.iter_rows(named=True):
        if span["lane"] is None:
            continue
        # The stretch of the thread in which the step ends; stretches follow each other without a gap.
        on_lane = np.flatnonzero((lane_of == span["lane"]) & (times[0::2] < max(span["high"], span["low"] + 1)))
        candidates.append(2 * on_lane[-1:] + 1)
    points = np.concatenate(candidates)
    if not points.size:
        raise UsageError(f"there is nothing in step {step} of the graph", slug="no-such-step")
    return PathWindow(step, low, high, int(points[np.argmax(times[points])]))


def _spans(graph: Graph) -> pl.DataFrame:
    """`rank`, `step`, `lane`, `low`, `high` of each step on each rank: the thread on which it begins first."""
    columns = graph.nodes.select("rank", "step", "lane", "kind", "start_ns", "duration_ns")
    on_threads = columns.filter(
        pl.col("step").is_not_null() & pl.col("lane").is_not_null() & pl.col("kind").is_in(_HOST)
    )
    by_lane = on_threads.group_by("rank", "step", "lane").agg(
        pl.col("start_ns").min().alias("low"),
        (pl.col("start_ns") + pl.col("duration_ns")).max().alias("high"),
        pl.len().alias("nodes"),
    )
    return (
        by_lane.sort("rank", "step", "low", "nodes", descending=[False, False, False, True])
        .group_by("rank", "step", maintain_order=True)
        .agg(pl.col("lane", "low", "high").first())
    )


class RankClock(Struct, frozen=True):
    """How the times of a trace become times of the graph.

    Attributes:
        rank: What the graph calls the rank.
        shift: Added to its times near the step (near its start, without a step).
    """

    rank: int
    shift: int


def clocks(graph: Graph, session: Session, step: int | None) -> Iterator[tuple[Trace, RankClock]]:
    """The traces that are in the graph (one per rank; with a step, those that have it), and their clocks."""
    done: set[int] = set()
    for trace in session.traces:
        rank = trace.rank
        if rank is None:  # it is identified by its file
            matches = graph.ranks.filter(pl.col("device_trace") == clean(trace.meta.path))
            rank = int(matches["rank"][0]) if matches.height else None
        at = trace.start_ns
        if step is not None:
            step_rows = trace.steps.filter(pl.col("step") == step)
            at = int(step_rows["start_ns"][0]) if step_rows.height else at
            rank = rank if step_rows.height else None
        if rank is None or rank in done:
            continue
        done.add(rank)
        nodes = _events_of(graph, trace, rank)
        shift = -graph.epoch_ns
        if nodes.size:  # as the events that begin next to the step tell
            first = np.full(trace.events.height, _NEVER)
            begin = graph.nodes["start_ns"][nodes].to_numpy()
            np.minimum.at(first, graph.nodes["event"][nodes].to_numpy(), begin)
            event = np.flatnonzero(first < _NEVER)
            recorded = trace.events["start_ns"].to_numpy()[event]
            away = np.abs(recorded - at)
            few = min(_NEIGHBOURS, away.size) - 1
            near = np.flatnonzero(away <= np.partition(away, few)[few])[: few + 1]
            # The node of an event that was cut at a bound begins later than the event: never earlier.
            shift = int((first[event] - recorded)[near].min())
        yield trace, RankClock(rank, shift)


def _events_of(graph: Graph, trace: Trace, rank: int) -> Ints:
    """Nodes of the recorded events of a rank."""
    return np.flatnonzero((graph.events < trace.events.height) & (graph.rank_numbers == rank))
