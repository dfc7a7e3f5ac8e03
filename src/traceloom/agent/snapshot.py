"""The latest value of every series, with devices, processes and jobs; filtered by what a caller may
see.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from copy import copy
from dataclasses import dataclass, field

import msgspec

from traceloom.agent.accelerators.backend import Device, DeviceEvent, DeviceProcess
from traceloom.agent.collectors.host import OomKill
from traceloom.agent.metrics import METRICS, HistogramReading, Reading, SeriesKey
from traceloom.agent.ownership.model import Process
from traceloom.server.access import _OWNER_LABELS, Caller


@dataclass(slots=True)
class CollectorStatus:
    """State of a collector. Times in nanoseconds since the epoch; 0: never."""

    name: str
    period_s: float
    ran_ns: int = 0
    seconds: float = 0.0
    runs: int = 0
    failures: dict[str, int] = field(default_factory=dict)
    last_error: str = ""  # error of the last run; "" if it succeeded


@dataclass(slots=True)
class CollectorResult:
    """The last delivery of one collector: all its series, and the time."""

    at_ns: int
    values: dict[SeriesKey, float]
    histograms: dict[SeriesKey, HistogramReading]


class Snapshot:
    """Readings by collector, devices, processes and jobs, each replaced as a whole.

    Readings that a collector no longer delivers are gone at once; `stale` removes those of a
    collector that failed. Used from the loop's thread only.
    """

    def __init__(self) -> None:
        self.started_ns = time.time_ns()
        self.results: dict[str, CollectorResult] = {}
        self.collectors: dict[str, CollectorStatus] = {}
        self.devices: dict[str, Device] = {}
        self.device_processes: list[DeviceProcess] = []
        self.events: list[DeviceEvent] = []  # the last ones, oldest first
        self.oom_kills: list[OomKill] = []  # the last ones, oldest first
        self.processes: dict[str, Process] = {}
        # Called with every delivery.
        self.listeners: list[Callable[[str, CollectorResult], None]] = []

    def put(
        self, collector: str, readings: Iterable[Reading | HistogramReading], at_ns: int
    ) -> None:
        """Replace the readings of a collector.

        Raises:
            ValueError: A reading of a metric that is not declared, or with other labels than
                declared.
        """
        result = CollectorResult(at_ns, {}, {})
        for reading in readings:
            metric = METRICS.get(reading.metric)
            if metric is None or len(metric.labels) != len(reading.labels):
                raise ValueError(
                    f"{collector} delivers `{reading.metric}` with labels that are not declared"
                )
            series = (reading.metric, reading.labels)
            if isinstance(reading, HistogramReading):
                result.histograms[series] = reading
            else:
                result.values[series] = reading.value
        self.results[collector] = result
        for watcher in self.listeners:
            watcher(collector, result)

    def stale(self, collector: str) -> None:
        """Remove the readings of a collector, which are outdated."""
        self.results.pop(collector, None)

    def copy(self) -> Snapshot:
        """Returns the current state for another thread; shallow, as its parts are replaced, never
        changed.
        """
        host_snapshot = copy(self)
        host_snapshot.results = dict(self.results)
        return host_snapshot

    def series(self) -> int:
        """The number of series; a histogram is one."""
        return sum(len(result.values) + len(result.histograms) for result in self.results.values())

    def values(self) -> Iterator[tuple[SeriesKey, float, int]]:
        for sheet in self.results.values():
            for series, value in sheet.values.items():
                yield series, value, sheet.at_ns

    def histograms(self) -> Iterator[tuple[HistogramReading, int]]:
        for sheet in self.results.values():
            for histogram in sheet.histograms.values():
                yield histogram, sheet.at_ns


class VisibleSnapshot:
    """The part of the snapshot that a caller may see."""

    def __init__(self, host_snapshot: Snapshot, peer: Caller) -> None:
        self.host_snapshot, self.peer = host_snapshot, peer
        self.devices: dict[str, Device] = host_snapshot.devices
        self.processes = {
            key: p
            if peer.commands or p.uid == peer.uid
            else msgspec.structs.replace(p, command="", declared={})
            for key, p in host_snapshot.processes.items()
            if self._sees(p.uid)
        }
        self.device_processes: list[DeviceProcess] = host_snapshot.device_processes
        self.jobs = {p.owner.job for p in self.processes.values() if p.owner.job}
        foreign_cgroups = {
            p.cgroup for key, p in host_snapshot.processes.items() if key not in self.processes
        }
        self._cgroups = {p.cgroup for p in self.processes.values()} - foreign_cgroups | {""}
        self.oom_kills = [kill for kill in host_snapshot.oom_kills if self._sees(kill.uid)]

    def _sees(self, uid: int | None) -> bool:
        return self.peer.sees == "all" or (
            self.peer.sees == "own" and uid is not None and uid == self.peer.uid
        )

    def shows(self, series: SeriesKey) -> bool:
        if self.peer.sees == "all":
            return True
        name, labels = series
        names = METRICS[name].labels
        for label, value in zip(names, labels, strict=True):
            # The job of a process or cgroup is only descriptive: the owner of the process, or of
            # all processes in the group, may see it.
            if label not in _OWNER_LABELS or (
                label == "job" and not {"process", "cgroup"}.isdisjoint(names)
            ):
                continue
            visible = {"process": self.processes.keys(), "job": self.jobs, "cgroup": self._cgroups}[
                label
            ]
            if value not in visible:
                return False
        return True

    def seen_as(self, series: SeriesKey) -> SeriesKey | None:
        """Returns a series with the labels that the caller may see, without command lines of
        others; None: not visible.
        """
        if not self.shows(series):
            return None
        name, labels = series
        if name == "process_info" and not self.peer.commands:
            names = METRICS[name].labels
            process = self.processes.get(labels[names.index("process")])
            if process is None or not process.command:
                labels = tuple(
                    "" if label == "command" else text
                    for label, text in zip(names, labels, strict=True)
                )
        return name, labels

    def values(self) -> Iterator[tuple[SeriesKey, float, int]]:
        for series, value, at_ns in self.host_snapshot.values():
            if (visible_series := self.seen_as(series)) is not None:
                yield visible_series, value, at_ns

    def histograms(self) -> Iterator[tuple[HistogramReading, int]]:
        for histogram, at_ns in self.host_snapshot.histograms():
            if self.shows((histogram.metric, histogram.labels)):
                yield histogram, at_ns
