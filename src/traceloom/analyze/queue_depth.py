"""How much work waits on each stream, and which launch calls had to wait because a queue was full."""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

import numpy as np
import polars as pl
from msgspec import structs

from traceloom.analyze.submissions import UNKNOWN, Submissions, plain
from traceloom.analyze.vocabulary import vocabulary
from traceloom.array_types import Ints
from traceloom.model import Trace
from traceloom.model.arrays import nullable
from traceloom.model.frames import schema

DEEP = 900
"""Launches that are pending where a queue is (nearly) full: CUDA takes about 1,022 to 1,024 per stream."""
_LONGER_NS = 8_000  # a launch that is longer than others of its name by this, and this many times, was held up
_TIMES = 2.5
_AT_ONCE_NS = 100_000  # it returns this soon after the work that made room
_CLOCK_NS = 2_000

QUEUES = schema(
    "device stream launch_count work_count unknown_count max_launches mean_launches",
    "max_works mean_works window_ns empty_ns deep_ns held_count held_ns capacity",
)
"""Per stream: its launches, its work, work of unknown launches (not in the depths); the largest number of pending
launches and pieces of work and their means over the window (first call or work .. last end); empty_ns in which nothing
is pending, deep_ns with at least 900 launches pending; launch calls that were held up by a full queue, for how long
beyond the usual, and how many launches the queue held then (null where none was held up)."""
CURVE = schema("device stream time_ns launches works")


class HeldCalls(NamedTuple):
    """Launch calls that a full queue held up; arrays of one length, by position.

    Attributes:
        at: Position in the submissions.
        ns: For how long beyond the usual duration of such a call.
        pending: How many launches were pending when the call returned.
    """

    at: Ints
    ns: Ints
    pending: Ints


class _Curve(NamedTuple):
    """Changes of the depths, by lane and time; one row per instant."""

    lane: Ints
    time: Ints
    launches: Ints
    works: Ints


def curve(made: Submissions) -> pl.DataFrame:
    """How many launches and pieces of work are pending on each stream after every change: `CURVE`."""
    depths = _curve(made)
    bounds = made.bounds()[:-1]
    lane_start = bounds[depths.lane] if bounds.size else depths.lane
    return pl.DataFrame(
        {
            "device": nullable(made.device[lane_start], pl.Int32, UNKNOWN),
            "stream": nullable(made.stream[lane_start], pl.Int64, UNKNOWN),
            "time_ns": depths.time,
            "launches": depths.launches,
            "works": depths.works,
        },
        schema=CURVE,
    )


def _curve(made: Submissions) -> _Curve:
    """+1 where a call begins, -1 where its work starts: per piece of work, and per launch where its first one starts.

    Work that seems to start before its call (clocks differ) starts with it, so that no depth is negative.
    """
    recorded = np.flatnonzero(made.known)
    first = np.zeros(recorded.size, dtype=np.int64)  # 1 for the first work of its launch on its lane
    if recorded.size:
        pair = made.launch[recorded] * (int(made.lane.max()) + 1) + made.lane[recorded]
        order = np.lexsort((made.start[recorded], pair))
        first[order[np.flatnonzero(np.diff(pair[order], prepend=-1))]] = 1
    begun = made.call_start[recorded]
    started = np.maximum(made.start[recorded], begun)
    lane = np.tile(made.lane[recorded], 2)
    time = np.concatenate([begun, started])
    works = np.repeat([1, -1], recorded.size)
    launches = works * np.tile(first, 2)
    order = np.lexsort((time, lane))
    lane, time = lane[order], time[order]
    last = np.ones(lane.size, dtype=np.bool_)
    last[:-1] = (lane[1:] != lane[:-1]) | (time[1:] != time[:-1])
    # every +1 has its -1 on the same lane: the running sums begin and end at 0 on each
    return _Curve(lane[last], time[last], np.cumsum(launches[order])[last], np.cumsum(works[order])[last])


def of_devices(made: Submissions) -> Submissions:
    """The same with all streams of a device as one lane: for the depths of whole devices, whose stream is null."""
    opens = np.diff(made.device, prepend=made.device[:1] - 1) != 0
    return structs.replace(made, lane=np.cumsum(opens) - 1, stream=np.full(made.row.size, UNKNOWN, dtype=np.int64))


def held_up(trace: Trace, made: Submissions) -> HeldCalls:
    """Launch calls that a full queue held up.

    Such a call finds at least 900 launches pending, is longer than calls of its name usually are (by 8 µs and 2.5
    times), and returns within 100 µs after the end of earlier work of its stream, which made room.
    """
    lanes = [(low, high) for low, high in pairwise(made.bounds().tolist()) if high - low >= DEEP]
    nothing = np.zeros(0, dtype=np.int64)
    parts = [(nothing, nothing, nothing)]
    usual = nothing
    if lanes:  # for each work the median duration of the calls that have the name of its call; 0 without a call
        usual = np.zeros(made.row.size, dtype=np.int64)
        at = np.flatnonzero(made.first)
        code = plain(vocabulary(trace).code)[made.launch[at]].astype(np.int64)
        span = made.call_end[at] - made.call_start[at]
        order = np.lexsort((span, code))
        bounds = np.flatnonzero(np.diff(code[order], prepend=-1, append=-1))
        for low, high in pairwise(bounds.tolist()):  # names
            usual[at[order[low:high]]] = span[order[(low + high) // 2]]
    for low, high in lanes:
        by_call = low + np.argsort(made.call_start[low:high], kind="stable")  # in the order of launches
        ends = np.maximum.accumulate(np.sort(made.end[low:high]))
        number = np.flatnonzero(made.first[by_call] & ~made.many[by_call])
        at = by_call[number]
        returned = made.call_end[at]
        span = returned - made.call_start[at]
        done = np.searchsorted(ends, returned + _CLOCK_NS, side="right")
        pending = number + 1 - done
        freed = np.where(done > 0, ends[np.maximum(done - 1, 0)], np.iinfo(np.int64).min)
        held = (pending >= DEEP) & (span >= np.maximum(usual[at] + _LONGER_NS, _TIMES * usual[at]))
        held &= (returned - freed <= _AT_ONCE_NS) & (freed > made.call_start[at])
        parts.append((at[held], (span - usual[at])[held], pending[held]))
    return HeldCalls(*(np.concatenate(arrays) for arrays in zip(*parts, strict=True)))


def queues(made: Submissions, held: HeldCalls) -> pl.DataFrame:
    """The queues of all streams: `QUEUES`."""
    depths = _curve(made)
    bounds = made.bounds()
    changes = np.searchsorted(depths.lane, np.arange(bounds.size))
    rows = []
    for lane, (low, high) in enumerate(pairwise(bounds.tolist())):
        _, time, launches, works = (values[changes[lane] : changes[lane + 1]] for values in depths)
        on_lane = (held.at >= low) & (held.at < high)
        counts, often = np.unique(held.pending[on_lane], return_counts=True)
        start = min(int(made.start[low:high].min()), int(made.call_start[low:high].min()))
        end = int(made.end[low:high].max())
        window = end - start
        lasts = np.maximum(np.diff(time, append=end), 0)
        recorded = made.known[low:high]
        rows.append(
            {
                "device": int(made.device[low]) if made.device[low] >= 0 else None,
                "stream": int(made.stream[low]) if made.stream[low] >= 0 else None,
                "launch_count": int(np.unique(made.launch[low:high][recorded]).size),
                "work_count": high - low,
                "unknown_count": int((~recorded).sum()),
                "max_launches": int(launches.max(initial=0)),
                "mean_launches": float((launches * lasts).sum() / window) if window else 0.0,
                "max_works": int(works.max(initial=0)),
                "mean_works": float((works * lasts).sum() / window) if window else 0.0,
                "window_ns": window,
                "empty_ns": window - int(lasts[launches > 0].sum()),
                "deep_ns": int(lasts[launches >= DEEP].sum()),
                "held_count": int(on_lane.sum()),
                "held_ns": int(held.ns[on_lane].sum()),
                "capacity": int(counts[::-1][often[::-1].argmax()]) if counts.size else None,
            }
        )
    return pl.DataFrame(rows, schema=QUEUES)


def thinned(curve: pl.DataFrame, points: int) -> pl.DataFrame:
    """A `CURVE` with at most `points` rows per stream: of each equal part of the window its first time and the most."""
    keys = ["device", "stream"]
    time = pl.col("time_ns")
    low, span = time.min().over(keys), (time.max() - time.min()).over(keys)
    part = pl.when(span > 0).then((time - low) * (points - 1) // pl.max_horizontal(span, 1)).otherwise(0)
    parts = curve.with_columns(part.alias("part")).group_by(*keys, "part", maintain_order=True)
    return parts.agg(time.first(), pl.col("launches").max(), pl.col("works").max())[list(CURVE)]
