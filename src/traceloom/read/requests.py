"""Requests: bursts of work between waits, of a program that has no steps, such as a server."""

from __future__ import annotations

from typing import Any

import numpy as np
import polars as pl
from numpy.typing import NDArray

from traceloom.model.thread_cpu import ThreadClock, samples_of

Ints = NDArray[np.int64]

_FEWEST = 5  # requests that make a server
_LEAST_GAP_NS = 200_000  # between two
_APART = 4.0  # times as long as the pauses inside of them
_ALIKE, _OFTEN = 0.6, 0.1  # of them begin alike: with operators with which so many begin
_MOST_RUNNING = 0.8  # of the window that the threads of a program run that waits for requests


def find_requests(events: pl.DataFrame, hosts: pl.Series, capture: dict[str, Any] | None, path: str) -> pl.DataFrame:
    """Requests of a program that waits between them, by the processor time of its threads.

    Args:
        events: The events in time order.
        hosts: Lanes of the host.
        capture: This rank's part of capture.json; without samples of processor time nobody knows that it waited.
        path: Of the trace.

    Returns:
        `name`, `start_ns`, `end_ns` of each; no row where the program does not wait, or no requests are seen.
    """
    nothing = pl.DataFrame(schema={"name": pl.String, "start_ns": pl.Int64, "end_ns": pl.Int64})
    samples = samples_of(capture, path)
    if not samples or (capture or {}).get("world_size") not in (None, 1):
        return nothing
    roots = events.filter(
        (pl.col("category") == "op") & pl.col("parent").is_null() & pl.col("lane").is_in(hosts.implode())
    ).select("start_ns", "nested_end_ns", "name")
    if roots.height < _FEWEST or not _waits(samples, int(roots["start_ns"][0]), int(roots["nested_end_ns"][-1])):
        return nothing
    start, reached = roots["start_ns"].to_numpy(), np.maximum.accumulate(roots["nested_end_ns"].to_numpy())
    pause = start[1:] - reached[:-1]
    longest = _longest_inside(pause[pause > 0])
    if longest is None:
        return nothing
    first = np.flatnonzero(np.append(True, pause > longest))
    names = roots["name"].gather(first)
    often = names.value_counts(sort=True).filter(pl.col("count") >= _OFTEN * first.size)
    if first.size < _FEWEST or often["count"].sum() < _ALIKE * first.size:
        return nothing
    first = first[names.is_in(often["name"].implode()).to_numpy()]  # the system may have interrupted one in its midst
    last = np.append(first[1:], start.size) - 1
    return pl.DataFrame({"name": "request", "start_ns": start[first], "end_ns": reached[last]})


def _waits(samples: dict[str, ThreadClock], low: int, high: int) -> bool:
    """Whether all threads together hardly ran."""
    ran = sum(int(thread.ran_ns[-1] - thread.ran_ns[0]) for thread in samples.values())
    begins = min(int(thread.time_ns[0]) for thread in samples.values())
    ends = max(int(thread.time_ns[-1]) for thread in samples.values())
    return begins < high and ends > low and ran <= _MOST_RUNNING * max(ends - begins, 1)


def _longest_inside(pauses: Ints) -> int | None:
    """The longest pause inside of requests: where the pauses fall into two groups, one far longer than the other."""
    if pauses.size < _FEWEST:
        return None
    ordered = np.sort(pauses)
    logs = np.log(ordered)
    count = np.arange(1, logs.size)
    below = np.cumsum(logs)[:-1] / count
    above = (logs.sum() - np.cumsum(logs)[:-1]) / (logs.size - count)
    between = count * (logs.size - count) * (above - below) ** 2  # the split with which both groups vary least
    at = int(np.argmax(between))
    inside, outside = np.median(ordered[: at + 1]), np.median(ordered[at + 1 :])
    if outside < max(_APART * inside, _LEAST_GAP_NS):
        return None
    return int(ordered[at])
