"""Where in the program each event without a duration happened: the innermost host event on its thread."""

from __future__ import annotations

from typing import Any

import numpy as np
import polars as pl

from traceloom.analyze.ancestry import Forest
from traceloom.array_types import Ints
from traceloom.model import Trace

_PIECE = 1 << 20
_SHORT: Any = np.int32  # of positions that are kept: half of the memory


def innermost(trace: Trace, tree: Forest, rows: pl.DataFrame) -> Ints:
    """Position (in the forest) of the innermost host event open at each row's time on its thread; -1 for none.

    Args:
        trace: The trace.
        tree: Its forest.
        rows: time_ns, process, thread.

    Returns:
        Short integers, shape (rows,); found piece by piece, because there may be many times more rows than events.
    """
    out = np.empty(rows.height, dtype=_SHORT)
    for low in range(0, rows.height, _PIECE):
        piece = rows.slice(low, _PIECE)
        lane, time = _lanes(trace, piece), piece["time_ns"].to_numpy()
        position = np.full(time.size, -1, dtype=np.int64)
        for number in np.unique(lane[lane >= 0]).tolist():
            first, last = np.searchsorted(tree.lane, [number, number + 1])
            on_lane = np.flatnonzero(lane == number)
            at = first + np.searchsorted(tree.start_ns[first:last], time[on_lane], side="right") - 1
            position[on_lane] = np.where(at >= first, at, -1)
        todo = np.flatnonzero(position >= 0)
        while todo.size:
            todo = todo[tree.end_ns[position[todo]] <= time[todo]]
            position[todo] = tree.parent[position[todo]]
            todo = todo[position[todo] >= 0]
        out[low : low + _PIECE] = position
    return out


def _lanes(trace: Trace, rows: pl.DataFrame) -> Ints:
    """The host lane of each row's thread; -1 where nothing of that thread was recorded."""
    lanes = trace.lanes.filter(pl.col("kind") == "host").select(
        pl.col("process", "thread").cast(pl.Int64, strict=False), "lane"
    )
    threads = rows.select("process", "thread").unique()
    thread_lanes = threads.join(lanes, on=["process", "thread"], how="left", nulls_equal=True)
    if thread_lanes.height == 1:
        lane = thread_lanes["lane"][0]
        return np.full(rows.height, -1 if lane is None else lane, dtype=np.int64)
    joined = rows.select("process", "thread").join(
        lanes.unique(["process", "thread"]),
        on=["process", "thread"],
        how="left",
        maintain_order="left",
        nulls_equal=True,
    )
    return joined["lane"].cast(pl.Int64).fill_null(-1).to_numpy()
