"""Which track of the exported trace every event stands on, so that the slices of a track nest.

Perfetto draws the slices of one track as a stack and drops those that cross. Host events are given up to
`nested_end_ns`, so they nest; device work that overlaps on one stream is spread over overflow tracks, `stream 7 (2)`.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import polars as pl

from traceloom.array_types import Ints
from traceloom.harmless import harmless
from traceloom.model import Trace

_KINDS = ["host", "device_annotation", "device", "device_sync", "other"]
# Kineto draws a GPU annotation one nanosecond around its kernels: neighbours overlap by up to two.
_ANNOTATION_RIM_NS = 2


@dataclass(frozen=True)
class Tracks:
    """The tracks of one trace, in the order they are shown.

    Attributes:
        names: Of each track.
        track: Track of each event, an index into `names`.
        end_ns: End of each event on its track.
    """

    names: list[str]
    track: Ints
    end_ns: Ints


def lay_out(trace: Trace) -> Tracks:
    """Give every event a track on which it nests."""
    events = trace.events
    # Host threads first, the busiest on top; then the devices, each with its annotations, streams and waits.
    kind = pl.col("kind").cast(pl.String)
    lanes = trace.lanes.filter(pl.col("events") > 0).sort(
        pl.when(kind.str.starts_with("device")).then(1).when(kind == "other").then(2).otherwise(0),
        pl.col("device").fill_null(-1),
        pl.col("stream").fill_null(-1),
        kind.replace_strict(_KINDS, range(len(_KINDS)), return_dtype=pl.Int8),
        -pl.col("events").cast(pl.Int64),
        maintain_order=True,
    )
    lane = events["lane"].to_numpy().astype(np.int64)
    start, end = events["start_ns"].to_numpy(), events["nested_end_ns"].to_numpy().copy()
    names: list[str] = []
    track = np.zeros(events.height, dtype=np.int64)
    order = np.argsort(lane, kind="stable")
    numbers, first = np.unique(lane[order], return_index=True)
    rows_of = dict(zip(numbers.tolist(), np.split(order, first[1:]), strict=True)) if lane.size else {}
    for row in lanes.iter_rows(named=True):
        rows = rows_of[row["lane"]]
        name = harmless(str(row["name"]))
        if row["kind"].startswith("device"):
            suffix = {"device_annotation": " annotations", "device_sync": " waits"}.get(row["kind"], "")
            name = f"GPU {row['device']} {name}{suffix}"
        level = np.zeros(rows.size, dtype=np.int64)
        if row["kind"] not in {"host", "other"}:
            if row["kind"] == "device_annotation":
                following = np.append(start[rows][1:], np.iinfo(np.int64).max)
                over = end[rows] - following
                rim = (over > 0) & (over <= _ANNOTATION_RIM_NS)
                end[rows] = np.where(rim, np.maximum(following, start[rows]), end[rows])
            level = levels(start[rows], end[rows])
        track[rows] = len(names) + level
        names += [name if i == 0 else f"{name} ({i + 1})" for i in range(int(level.max(initial=0)) + 1)]
    return Tracks(names, track, end)


def levels(start: Ints, end: Ints) -> Ints:
    """The lowest level for each span (sorted by start) on which it overlaps none; 0 where nothing overlaps.

    Only clusters of overlapping spans are walked one by one.
    """
    level = np.zeros(start.size, dtype=np.int64)
    if start.size < 2:
        return level
    reach = np.maximum.accumulate(end)
    begins = np.append(True, start[1:] >= reach[:-1])  # a new cluster: all before has ended
    bounds = np.append(np.flatnonzero(begins), start.size)
    for low, high in pairwise(bounds.tolist()):
        if high - low > 1:
            level[low:high] = _cluster(start[low:high].tolist(), end[low:high].tolist())
    return level


def _cluster(start: list[int], end: list[int]) -> list[int]:
    busy: list[tuple[int, int]] = []  # (end, level)
    free: list[int] = []
    out: list[int] = []
    for begin, stop in zip(start, end, strict=True):
        while busy and busy[0][0] <= begin:
            heapq.heappush(free, heapq.heappop(busy)[1])
        level = heapq.heappop(free) if free else len(busy)
        heapq.heappush(busy, (stop, level))
        out.append(level)
    return out
