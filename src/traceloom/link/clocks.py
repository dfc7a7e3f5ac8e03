"""Clocks of hosts against each other, from collectives: these end at the same moment on all ranks.

One offset and drift per host. The fit is robust (medians of differences, Theil-Sen for the drift): a rank whose thread
or kernel ended late by chance does not move it.
"""

from __future__ import annotations

from collections import defaultdict

import numpy as np
import polars as pl
from msgspec import Struct
from numpy.typing import NDArray

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]

# Nobody leaves these before everybody has come.
ENDS_TOGETHER = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "barrier")
_FOR_DRIFT = 8  # meetings, and
_DRIFT_SPAN_NS = 10_000_000  # time between the first and the last, before a drift is fitted
_MOST_PAIRS = 400  # points of the Theil-Sen estimate, spread evenly; it is quadratic


class Clock(Struct, frozen=True):
    """How a host's clock is corrected: `corrected = time + offset_ns + drift * (time - since_ns)`.

    Attributes:
        offset_ns: Added to its times.
        drift: Nanoseconds per nanosecond.
        since_ns: Where the drift is 0.
        residual_ns: Largest of the usual differences that remain (95th percentile); None where nothing was fitted.
        meetings: Number of collectives the fit stands on.
    """

    offset_ns: int = 0
    drift: float = 0.0
    since_ns: int = 0
    residual_ns: int | None = None
    meetings: int = 0

    def corrected(self, times: Ints) -> Ints:
        """Times on the job's clock; never changes the order of times."""
        if not self.drift:
            return times + self.offset_ns
        bent: Ints = np.floor(self.drift * (times - self.since_ns)).astype(np.int64)
        return times + self.offset_ns + bent


def fit_clocks(meetings: pl.DataFrame, hosts: list[str]) -> dict[str, Clock]:
    """One clock per host; the first host of each connected set is the reference.

    Args:
        meetings: `instance`, `host`, `end_ns`: ends of joined collectives of `ENDS_TOGETHER`.
        hosts: Every host, the reference first.
    """
    ends = meetings.group_by("instance", "host").agg(pl.col("end_ns").median().cast(pl.Int64))
    by_host = {
        str(name[0]): dict(zip(frame["instance"].to_list(), frame["end_ns"].to_list(), strict=True))
        for name, frame in ends.group_by("host")
    }
    clocks: dict[str, Clock] = {}
    for first in hosts:
        if first in clocks:
            continue
        clocks[first] = Clock(residual_ns=_spread(meetings, first), meetings=len(by_host.get(first, {})))
        _reach(first, hosts, by_host, clocks)
    return clocks


def _reach(first: str, hosts: list[str], by_host: dict[str, dict[int, int]], clocks: dict[str, Clock]) -> None:
    """Fit every host that shares meetings with one that is fitted, those with most meetings first."""
    on_job_clock: dict[int, list[int]] = defaultdict(list)
    _settle(by_host.get(first, {}), clocks[first], on_job_clock)
    while True:
        shared = [
            (len(by_host[host].keys() & on_job_clock.keys()), host)
            for host in hosts
            if host not in clocks and host in by_host
        ]
        best = max(shared, default=(0, ""), key=lambda pair: pair[0])
        if not best[0]:
            return
        own_ends = by_host[best[1]]
        common = sorted(own_ends.keys() & on_job_clock.keys())
        job_ends = np.array([int(np.median(on_job_clock[key])) for key in common], dtype=np.int64)
        clocks[best[1]] = _fit(np.array([own_ends[key] for key in common], dtype=np.int64), job_ends)
        _settle(own_ends, clocks[best[1]], on_job_clock)


def _settle(ends: dict[int, int], clock: Clock, on_job_clock: dict[int, list[int]]) -> None:
    keys = list(ends)
    times = clock.corrected(np.array([ends[key] for key in keys], dtype=np.int64))
    for key, time in zip(keys, times.tolist(), strict=True):
        on_job_clock[key].append(time)


def _fit(own_ends: Ints, job_ends: Ints) -> Clock:
    order = np.argsort(own_ends, kind="stable")
    own_ends, job_ends = own_ends[order], job_ends[order]
    offsets = job_ends - own_ends
    offset = int(np.median(offsets))
    left = np.abs(offsets - offset)
    residual = _usual(left)
    since = int(own_ends[0])
    drift = _drift((own_ends - since).astype(np.float64), offsets.astype(np.float64))
    if drift:
        drifted = offsets - np.floor(drift * (own_ends - since)).astype(np.int64)
        drifted_offset = int(np.median(drifted))
        drifted_left = np.abs(drifted - drifted_offset)
        # A drift that explains little is chance: it would bend every time for nothing.
        if np.median(drifted_left) < 0.5 * np.median(left):
            return Clock(drifted_offset, drift, since, _usual(drifted_left), len(own_ends))
    # An offset within the noise of its own measurement is none: ranks of one machine share a clock.
    if abs(offset) <= residual and len(own_ends) > 1:
        return Clock(0, 0.0, 0, _usual(np.abs(offsets)), len(own_ends))
    return Clock(offset, 0.0, 0, residual, len(own_ends))


def _drift(since: Floats, offsets: Floats) -> float:
    """Theil-Sen slope; 0 where the meetings are too few or too close."""
    if len(since) < _FOR_DRIFT or since[-1] - since[0] < _DRIFT_SPAN_NS:
        return 0.0
    chosen = np.unique(np.linspace(0, len(since) - 1, min(len(since), _MOST_PAIRS)).astype(np.int64))
    x, y = since[chosen], offsets[chosen]
    first, second = np.triu_indices(len(x), 1)
    wide = x[second] - x[first] > 0
    return float(np.median((y[second] - y[first])[wide] / (x[second] - x[first])[wide])) if wide.any() else 0.0


def _usual(differences: Ints) -> int:
    return int(np.percentile(differences, 95)) if len(differences) else 0


def _spread(meetings: pl.DataFrame, host: str) -> int | None:
    """How far the ranks of one host disagree about the ends."""
    ends = (
        meetings.filter(pl.col("host") == host)
        .group_by("instance")
        .agg((pl.col("end_ns").max() - pl.col("end_ns").min()).alias("apart"), pl.len())
    )
    several = ends.filter(pl.col("len") > 1)["apart"].to_numpy()
    return _usual(several) if len(several) else None
