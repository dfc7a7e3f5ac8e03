"""Clocks of hosts against each other, from collectives: these end at the same moment on all ranks.

One offset and drift per host. The fit is robust (medians of differences, Theil-Sen for the drift): a rank whose thread
or kernel ended late by chance does not move it.
"""

from __future__ import annotations

from collections import defaultdict

import numpy as np
import polars as pl
from msgspec import Struct

from traceloom.array_types import Ints

# Nobody leaves these before everybody has come.
ENDS_TOGETHER = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "barrier")
_FOR_DRIFT = 8  # meetings, and
_DRIFT_SPAN_NS = 10_000_000  # time between the first and the last, before a drift is fitted
_MOST_PAIRS = 400  # points of the Theil-Sen estimate, spread evenly; it is quadratic


class HostClock(Struct, frozen=True):
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


def fit_clocks(meetings: pl.DataFrame, hosts: list[str]) -> dict[str, HostClock]:
    """One clock per host; the first host of each connected set is the reference.

    Args:
        meetings: `instance`, `host`, `end_ns`: ends of joined collectives of `ENDS_TOGETHER`.
        hosts: Every host, the reference first.
    """
    # medians of differences: times since 1970 are too large for their nanoseconds to survive as floating point numbers
    earliest = pl.col("end_ns").min()
    ends = meetings.group_by("instance", "host").agg(earliest + (pl.col("end_ns") - earliest).median().cast(pl.Int64))
    by_host = {
        str(name[0]): dict(zip(frame["instance"].to_list(), frame["end_ns"].to_list(), strict=True))
        for name, frame in ends.group_by("host")
    }
    clocks: dict[str, HostClock] = {}
    for first in hosts:
        if first in clocks:
            continue
        # how far the ranks of the host disagree about the ends
        apart = (
            meetings.filter(pl.col("host") == first)
            .group_by("instance")
            .agg((pl.col("end_ns").max() - pl.col("end_ns").min()).alias("apart"), pl.len())
        )
        several = apart.filter(pl.col("len") > 1)["apart"].to_numpy()
        residual = _usual(several) if len(several) else None
        clocks[first] = HostClock(residual_ns=residual, meetings=len(by_host.get(first, {})))
        # every host that shares meetings with one that is fitted, those with most meetings first
        on_job_clock: dict[int, list[int]] = defaultdict(list)
        host = first
        while True:
            own_ends = by_host.get(host, {})
            times = clocks[host].corrected(np.array(list(own_ends.values()), dtype=np.int64))
            for key, time in zip(own_ends, times.tolist(), strict=True):
                on_job_clock[key].append(time)
            shared = [
                (len(by_host[other].keys() & on_job_clock.keys()), other)
                for other in hosts
                if other not in clocks and other in by_host
            ]
            most, host = max(shared, default=(0, ""), key=lambda pair: pair[0])
            if not most:
                break
            common = sorted(by_host[host].keys() & on_job_clock.keys())
            job_ends = np.array([_middle(np.array(on_job_clock[key], dtype=np.int64)) for key in common])
            clocks[host] = _fit(np.array([by_host[host][key] for key in common], dtype=np.int64), job_ends)
    return clocks


def _fit(own_ends: Ints, job_ends: Ints) -> HostClock:
    """The correction that makes the ends of a host those of the job."""
    order = np.argsort(own_ends, kind="stable")
    own_ends, job_ends = own_ends[order], job_ends[order]
    offsets = job_ends - own_ends
    offset = _middle(offsets)
    left = np.abs(offsets - offset)
    residual = _usual(left)
    since = int(own_ends[0])
    # the Theil-Sen slope, where the meetings are not too few or too close
    drift = 0.0
    if len(own_ends) >= _FOR_DRIFT and own_ends[-1] - since >= _DRIFT_SPAN_NS:
        chosen = np.unique(np.linspace(0, len(own_ends) - 1, min(len(own_ends), _MOST_PAIRS)).astype(np.int64))
        x, y = (own_ends - since).astype(np.float64)[chosen], (offsets - offset).astype(np.float64)[chosen]
        first, second = np.triu_indices(len(x), 1)
        wide = x[second] - x[first] > 0
        if wide.any():
            drift = float(np.median((y[second] - y[first])[wide] / (x[second] - x[first])[wide]))
    if drift:
        drifted = offsets - np.floor(drift * (own_ends - since)).astype(np.int64)
        drifted_offset = _middle(drifted)
        drifted_left = np.abs(drifted - drifted_offset)
        # A drift that explains little is chance: it would bend every time for nothing.
        if np.median(drifted_left) < 0.5 * np.median(left):
            return HostClock(drifted_offset, drift, since, _usual(drifted_left), len(own_ends))
    # An offset within the noise of its own measurement is none: ranks of one machine share a clock.
    if abs(offset) <= residual and len(own_ends) > 1:
        return HostClock(0, 0.0, 0, _usual(np.abs(offsets)), len(own_ends))
    return HostClock(offset, 0.0, 0, residual, len(own_ends))


def _middle(times: Ints) -> int:
    """The median of times of any size, halves towards 0."""
    low, high = (int(np.partition(times, at)[at]) for at in ((times.size - 1) // 2, times.size // 2))
    return (low + high) // 2 if low + high >= 0 else -(-(low + high) // 2)


def _usual(differences: Ints) -> int:
    return int(np.percentile(differences, 95)) if len(differences) else 0
