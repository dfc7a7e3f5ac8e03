"""Questions about history: a metric over time, by job, rank, device or process.

What stands on a device becomes a job's by the share that the job's processes had of the device at that time: values
that add up (power, energy, memory, FLOP/s) are split, properties (busy, clocks, temperatures) are averaged over the
devices that the job was on, weighted by its shares. Counters are answered as rates per second.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping
from itertools import repeat
from typing import NamedTuple

from traceloom.agent.history import Points, label_columns
from traceloom.agent.metrics import METRICS, PREFIX
from traceloom.errors import UsageError, nearest

_HELD_NS = 60 * 10**9  # a share or an owner is taken to hold so long after it was seen last
OWNERS = ("job", "rank", "user", "account", "namespace", "pod", "framework", "process", "pid")
PARTS = (*OWNERS, "device")
ATTRIBUTION = ("process_gpu_share_ratio", "process_info")  # metrics by which values become those of jobs
# Series of a metric in a span of time.
Fetch = Callable[[str], list[Points]]


class Curve(NamedTuple):
    """One line of an answer: what it is of, instants in ns since the epoch, values."""

    of: dict[str, str]
    times_ns: list[int]
    values: list[float]


def unit(metric: str, *, raw: bool = False) -> str:
    """The unit of what `answer` gives: the metric's, per second for a counter."""
    declared = METRICS[metric]
    return f"{declared.unit or '1'}/s" if declared.kind == "counter" and not raw else declared.unit


def plain_name(metric: str) -> str:
    """The name of a metric without the prefix.

    Raises:
        UsageError: `no-such-metric`: there is none; the nearest is named.
    """
    name = metric.removeprefix(PREFIX)
    if name not in METRICS:
        raise UsageError(
            f"there is no metric `{metric}`", slug="no-such-metric",
            hint=nearest(name, METRICS) + "`traceloom agent query` without a metric lists them",
        )  # fmt: skip
    return name


def needed(metric: str, parts: Iterable[str]) -> list[str]:
    """The metrics whose history an answer by these labels or owners needs."""
    foreign = set(parts) - set(METRICS[metric].labels)
    return list(dict.fromkeys([metric, *(ATTRIBUTION if foreign else ())]))


def answer(
    metric: str, fetch: Fetch, *, by: tuple[str, ...] = (), where: Mapping[str, str] | None = None, raw: bool = False
) -> list[Curve]:
    """Answer a question.

    Args:
        metric: Name without the prefix.
        fetch: Gives the series of a metric in the time asked for.
        by: Labels of the metric, or `job`, `rank`, `user`, `account`, `namespace`, `pod`, `framework`, `process`,
            `device`; without any every series is a row.
        where: Label or owner -> the value that rows have.
        raw: Counters as they are, not as rates.

    Raises:
        UsageError: `no-such-label`: the metric has no such label, and it stands on nothing that has an owner.
    """
    declared = METRICS[metric]
    where = dict(where or {})
    columns = label_columns(metric)
    foreign = [part for part in (*by, *where) if part not in columns]
    wrong = [part for part in foreign if part not in PARTS or not ({"device", "process"} & set(columns))]
    if wrong:
        possible = [*columns, *(PARTS if {"device", "process"} & set(columns) else ())]
        raise UsageError(
            f"`{metric}` has no `{wrong[0]}`", slug="no-such-label",
            hint=nearest(wrong[0], possible) + f"it has {', '.join(dict.fromkeys(possible)) or 'no labels'}",
        )  # fmt: skip
    wanted = {columns[key]: value for key, value in where.items() if key in columns}
    series = [p for p in fetch(metric) if all(p.labels[column] == value for column, value in wanted.items())]
    if declared.kind == "counter" and not raw:
        series = [rates for points in series if (rates := rate(points)).times_ns]
    if not by and not (set(where) - set(columns)):
        return [
            Curve(dict(zip(declared.labels, points.labels, strict=True)), list(points.times_ns), list(points.values))
            for points in series
        ]
    owners = _Owners(fetch, foreign, shares="process" not in columns) if foreign else None
    groups: dict[tuple[str, ...], _Sums] = {}
    averaged = declared.sharing == "mean" or declared.unit == "ratio"
    for points in series:
        own = {label: points.labels[column] for label, column in columns.items()}
        alone = [(own, 1.0)]
        parts = owners.over_time(own, points.times_ns) if owners else repeat(alone)
        for at, value, on in zip(points.times_ns, points.values, parts, strict=False):
            for facts, weight in on:
                if all(facts.get(key, "") == wanted for key, wanted in where.items()):
                    key = tuple(facts.get(part, "") for part in by)
                    groups.setdefault(key, _Sums({}, {})).add(at, value, weight)
    curves = [
        Curve(dict(zip(by, key, strict=True)), *sums.columns(averaged=averaged)) for key, sums in sorted(groups.items())
    ]
    return [curve for curve in curves if curve.times_ns]


def rate(points: Points) -> Points:
    """A counter as its rate per second between instants; where it was set back, it began anew at 0."""
    times, values = array("q"), array("d")
    for index in range(1, len(points.times_ns)):
        seconds = (points.times_ns[index] - points.times_ns[index - 1]) / 1e9
        more = points.values[index] - points.values[index - 1]
        if seconds > 0:
            times.append(points.times_ns[index])
            values.append((more if more >= 0 else points.values[index]) / seconds)
    return Points(points.labels, times, values)


class _Sums(NamedTuple):
    """Values of a group by instant: their weighted sum, and the weights."""

    totals: dict[int, float]
    weights: dict[int, float]

    def add(self, at_ns: int, value: float, weight: float) -> None:
        self.totals[at_ns] = self.totals.get(at_ns, 0.0) + value * weight
        self.weights[at_ns] = self.weights.get(at_ns, 0.0) + weight

    def columns(self, *, averaged: bool) -> tuple[list[int], list[float]]:
        times = sorted(self.totals)
        if averaged:
            times = [at for at in times if self.weights[at]]  # who had nothing of any device has no temperature either
            return times, [self.totals[at] / self.weights[at] for at in times]
        return times, [self.totals[at] for at in times]


class _Owners:
    """Who was on a device, and whose a process was, at an instant."""

    def __init__(self, fetch: Fetch, foreign: list[str], *, shares: bool) -> None:
        self.shares: dict[str, list[tuple[str, Points]]] = {}  # device -> process and its share over time
        if shares:
            columns = label_columns("process_gpu_share_ratio")
            for points in fetch("process_gpu_share_ratio"):
                device, process = points.labels[columns["device"]], points.labels[columns["process"]]
                self.shares.setdefault(device, []).append((process, points))
        self.facts: dict[str, dict[str, str]] = {}
        if set(foreign) - {"process", "device"}:
            names = METRICS["process_info"].labels
            for points in fetch("process_info"):  # the owner that was known last
                facts = dict(zip(names, points.labels, strict=True))
                self.facts[facts["process"]] = facts

    def over_time(self, own: dict[str, str], times_ns: Iterable[int]) -> list[list[tuple[dict[str, str], float]]]:
        """For each instant the owners of a series, with their weights; those of no owner have "" for everything."""
        if "process" in own:
            facts = {**self.facts.get(own["process"], {}), **own}
            return [[(facts, 1.0)] for _ in times_ns]
        on = [
            ({**self.facts.get(process, {}), "process": process, **own}, points)
            for process, points in self.shares.get(own.get("device", ""), [])
        ]
        result = []
        for at in times_ns:
            parts = []
            for facts, points in on:
                index = bisect_right(points.times_ns, at) - 1
                if index >= 0 and at - points.times_ns[index] <= _HELD_NS:
                    parts.append((facts, points.values[index]))
            result.append(parts or [(own, 1.0)])
        return result
