"""When the threads of a graph wait for the training loop's data, on the graph's clock."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import polars as pl
from numpy.typing import NDArray

from traceloom.analyze.data_loading import loader_calls
from traceloom.model import Trace
from traceloom.model.graph import Graph

Ints = NDArray[np.int64]


class Waits(NamedTuple):
    """Waits of one thread.

    Attributes:
        lane: Lane of the graph.
        start: Starts, ascending; waits do not overlap.
        end: Ends.
    """

    lane: int
    start: Ints
    end: Ints


def waits_for_data(graph: Graph, trace: Trace, rank: int, shift: int) -> Iterator[Waits]:
    """The waits of a rank for its DataLoader, thread by thread.

    Args:
        graph: The graph.
        trace: The trace of the rank.
        rank: What the graph calls it.
        shift: Added to a time of the trace to get a time of the graph.
    """
    calls = loader_calls(trace)
    if not calls.size:
        return
    waits = trace.events[pl.Series(calls, dtype=pl.UInt32)].select(
        "start_ns",
        pl.col("lane").alias("trace_lane"),
        (pl.col("nested_end_ns") - pl.col("start_ns")).alias("duration_ns"),
    )
    nodes = graph.nodes.select("rank", "event", "lane")
    of_rank = (nodes["rank"] == rank) & nodes["event"].is_not_null() & nodes["lane"].is_not_null()
    nodes = nodes.filter(of_rank.fill_null(value=False))
    lane_of = nodes.select("lane", trace_lane=trace.events["lane"].gather(nodes["event"])).unique()
    placed = waits.join(lane_of, on="trace_lane")
    for (lane,), rows in placed.sort("lane", "start_ns").group_by("lane", maintain_order=True):
        start = rows["start_ns"].to_numpy() + shift
        yield Waits(int(lane), start, start + rows["duration_ns"].to_numpy())
