"""Watches of host conditions: metric, OOM kill, Xid, hang, step regression, schedule.

adapter.py evaluates them, and requests traces from the trace service; store.py selects targets and
limits costs.

A step regression has two conditions. The median of the last N steps exceeds that of the steps
before by the rule's ratio. And the number of the last N steps above the previous median is so large
that chance gives it once in a million checks: without a change, each would be above it as often as
below. Steps during a trace are ignored, as tracing slows them down.
"""

from __future__ import annotations

import hashlib
import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import NamedTuple, Protocol, TypeVar

from traceloom.agent.config import CadenceRule, MetricRule, StepRegressionRule, XidRule
from traceloom.agent.hangs.service import HangService
from traceloom.agent.history import get_unit
from traceloom.agent.metrics import METRICS, PREFIX
from traceloom.agent.snapshot import CollectorResult, Snapshot
from traceloom.agent.steps import StepCounter
from traceloom.errors import nearest
from traceloom.system.units import (
    format_byte_rate,
    format_duration,
    format_percent,
    format_quantity,
    format_size,
)


class Occurrence(NamedTuple):
    """The condition of a rule is met now.

    `labels` identify the object: `process` (a key), `device` (a uuid), `cgroup`, or `job` and
    perhaps `rank`; without any it is the whole host. `episode` is constant for as long as it is the
    same occurrence. `what` is the sentence for the request. `lasts`: whether another trace is
    useful while it lasts.
    """

    labels: Mapping[str, str]
    episode: str
    what: str
    lasts: bool = False


class Watch(Protocol):
    """The condition of a rule. Called in the agent's loop, about once a second."""

    def check(self, now_ns: int) -> Iterable[Occurrence]:
        """Returns the current occurrences; an event is returned once.

        Args:
            now_ns: Nanoseconds since the epoch, of a clock that never jumps.
        """

    def find_problem(self) -> str:
        """Returns why it cannot fire now; "" if it can."""


Labels = tuple[str, ...]


class MatchingSeries(NamedTuple):
    """Series of a metric with given labels (column and value)."""

    metric: str
    labels: tuple[tuple[int, str], ...]

    def takes(self, labels: Labels) -> bool:
        return all(labels[column] == value for column, value in self.labels)

    @property
    def key(self) -> tuple[str, int, str]:
        """The index key, with the first label only."""
        return (self.metric, *(self.labels[0] if self.labels else (-1, "")))


def match_series(metric: str, where: Mapping[str, str]) -> MatchingSeries:
    """Returns the series of a metric that match those of the labels that the metric has."""
    names = METRICS[metric].labels
    return MatchingSeries(
        metric,
        tuple((names.index(label), value) for label, value in where.items() if label in names),
    )


class SeriesValues:
    """The last delivered values; counters as rates per second since the previous delivery.

    Args:
        host_snapshot: Their source.
        watched: The series of all rules.
    """

    def __init__(self, host_snapshot: Snapshot, watched: Iterable[MatchingSeries]) -> None:
        self._board = host_snapshot
        self._columns: dict[str, set[int]] = {}
        self._filed = {matching.key for matching in watched}
        for metric, column, _ in self._filed:
            self._columns.setdefault(metric, set()).add(column)
        self._sheets: dict[str, CollectorResult] = {}
        self._files: dict[str, dict[tuple[str, int, str], dict[Labels, float]]] = {}  # by collector
        self.changed = 0  # number of changes

    def refresh(self) -> None:
        """Read new values of the snapshot: once per tick, for all rules."""
        for collector in [name for name in self._sheets if name not in self._board.results]:
            del self._sheets[collector], self._files[collector]
            self.changed += 1
        for collector, sheet in self._board.results.items():
            before = self._sheets.get(collector)
            if before is not sheet:
                files: dict[tuple[str, int, str], dict[Labels, float]] = {}
                for series, value in sheet.values.items():
                    columns = self._columns.get(series[0])
                    if columns is None:
                        continue
                    now = value
                    # The rate per second, unknown at the first delivery.
                    if METRICS[series[0]].kind == "counter":
                        last = before.values.get(series) if before is not None else None
                        if before is None or last is None or sheet.at_ns <= before.at_ns:
                            continue
                        # A counter that was reset started again at 0.
                        now = (value - last if value >= last else value) / (
                            (sheet.at_ns - before.at_ns) / 1e9
                        )
                    for column in columns:
                        key = (series[0], column, series[1][column] if column >= 0 else "")
                        if key in self._filed:
                            files.setdefault(key, {})[series[1]] = now
                self._files[collector] = files
                self._sheets[collector] = sheet
                self.changed += 1

    def of(self, matching: MatchingSeries) -> Iterable[tuple[Labels, float]]:
        for files in self._files.values():
            for labels, value in files.get(matching.key, {}).items():
                if matching.takes(labels):
                    yield labels, value

    def delivered(self) -> set[str]:
        return {metric for sheet in self._board.results.values() for metric, _ in sheet.values}


_MAX_ENDED_SERIES = 10_000  # absent series kept


@dataclass(slots=True)
class _SeriesState:
    """State of a series: its last value; since when the rule's condition holds (None: it does not);
    and when it was last present.
    """

    value: float
    since_ns: int | None
    at_ns: int
    # Monotonic queues of candidates for the min and max of the window, oldest first: (instant,
    # value).
    least: deque[tuple[int, float]] = field(default_factory=deque)
    greatest: deque[tuple[int, float]] = field(default_factory=deque)


class MetricWatch:
    """Checks series when they are delivered.

    Args:
        rule: The condition.
        values: The snapshot's values.
        still_there: Whether the objects that labels name still exist, so that their series could,
            too.
    """

    def __init__(
        self,
        rule: MetricRule,
        values: SeriesValues,
        still_there: Callable[[Mapping[str, str]], bool],
    ) -> None:
        self.rule = rule
        self.matching = match_rule_series(rule)
        self._values, self._still_there = values, still_there
        self._series: dict[Labels, _SeriesState] = {}
        self._looked = -1
        metric = METRICS[self.matching.metric]
        # The `device` of a network card is not one that processes use.
        owner_labels = (
            ()
            if metric.name.startswith("rdma_")
            else ("process", "device", "cgroup", "job", "rank")
        )
        self._whose = [
            (column, label) for column, label in enumerate(metric.labels) if label in owner_labels
        ]

    def check(self, now_ns: int) -> Iterator[Occurrence]:
        """Yields the series for which the condition holds, for as long as it does."""
        rule, fresh = self.rule, self._values.changed != self._looked
        if fresh:
            self._looked = self._values.changed
            self._take(now_ns)
        for labels, state in list(self._series.items()):
            if rule.absent is not None:
                if now_ns - state.at_ns < rule.absent * 1e9:
                    continue
                if not self._still_there({label: labels[column] for column, label in self._whose}):
                    del self._series[labels]
                    continue
                since_ns, description = (
                    state.at_ns,
                    f"was absent for {(now_ns - state.at_ns) / 1e9:.0f} s",
                )
            elif (
                state.since_ns is not None
                and state.at_ns - state.since_ns >= rule.for_seconds * 1e9
            ):
                measure, since_ns = get_unit(self.matching.metric), state.since_ns
                value = _format_measure(state.value, measure)
                if rule.changed is not None:
                    value_range = state.greatest[0][1] - state.least[0][1]
                    description = f"changed by {_format_measure(value_range, measure)} within {rule.within:g} s, to {value}"
                else:
                    side, limit = (
                        ("above", rule.above) if rule.above is not None else ("below", rule.below)
                    )
                    lasting = f" for {rule.for_seconds:g} s" if rule.for_seconds else ""
                    description = (
                        f"is {value}, {side} {_format_measure(limit or 0.0, measure)}{lasting}"
                    )
            else:
                continue
            names = METRICS[self.matching.metric].labels
            label_text = ", ".join(
                f"{name} {value}" for name, value in zip(names, labels, strict=True) if value
            )
            yield Occurrence(
                ({label: labels[column] for column, label in self._whose}),
                f"{labels}@{since_ns}",
                f"{self.matching.metric}{f' of {label_text}' if label_text else ''} {description}",
                lasts=True,
            )

    def find_problem(self) -> str:
        if self._series or any(True for _ in self._values.of(self.matching)):
            return ""
        delivered, metric = self._values.delivered(), self.matching.metric
        if metric not in delivered:
            likely = nearest(metric, delivered).removeprefix("did you mean ").rstrip("? ")
            return f"no collector delivers `{metric}` here now" + (
                f", but {likely}" if likely else ""
            )
        if METRICS[metric].kind == "counter" and not self.matching.labels:
            return ""  # a rate needs two deliveries
        return f"no series of `{metric}` has the labels of `where`"

    def _take(self, now_ns: int) -> None:
        rule, present = self.rule, set()
        for labels, value in self._values.of(self.matching):
            if math.isnan(value):
                continue
            present.add(labels)
            state = self._series.get(labels)
            if state is None:
                state = self._series[labels] = _SeriesState(value, None, now_ns)
            state.value, state.at_ns = value, now_ns
            if rule.changed is not None and rule.within is not None:
                # The range of the values since then; each value enters and leaves each queue once.
                oldest_ns = now_ns - int(rule.within * 1e9)
                for queue, sign in ((state.least, 1.0), (state.greatest, -1.0)):
                    while queue and queue[0][0] < oldest_ns:
                        queue.popleft()
                    while queue and sign * queue[-1][1] >= sign * state.value:
                        queue.pop()
                    queue.append((state.at_ns, state.value))
                is_met = state.greatest[0][1] - state.least[0][1] >= rule.changed
            else:
                is_met = (rule.above is not None and value > rule.above) or (
                    rule.below is not None and value < rule.below
                )
            state.since_ns = (
                (state.since_ns if state.since_ns is not None else now_ns) if is_met else None
            )
        missing = [labels for labels in self._series if labels not in present]
        # A missing series does not exceed anything; an absent one is kept until its object is gone.
        for labels in missing if rule.absent is None else missing[:-_MAX_ENDED_SERIES]:
            del self._series[labels]


def _format_measure(value: float, measure: str) -> str:
    if measure in ("bytes", "bytes/s") and math.isfinite(value):
        return format_size(int(value)) if measure == "bytes" else format_byte_rate(value)
    return f"{value:.4g}" if measure in ("", "1", "ratio") else f"{value:.4g} {measure}"


def match_rule_series(rule: MetricRule) -> MatchingSeries:
    return match_series(rule.metric.removeprefix(PREFIX), rule.where)


Event = TypeVar("Event")


class OomKillWatch:
    """Returns each kill once; it is about the remaining processes of the job.

    Args:
        host_snapshot: Has the kills.
    """

    def __init__(self, host_snapshot: Snapshot) -> None:
        self._board = host_snapshot
        self._last = host_snapshot.oom_kills[-1] if host_snapshot.oom_kills else None

    def check(self, now_ns: int) -> Iterator[Occurrence]:  # noqa: ARG002  (of the protocol)
        """Yields the kills since the last call."""
        kills, last = self._board.oom_kills, self._last
        self._last = kills[-1] if kills else last
        for kill in _select_new_events(kills, last):
            yield Occurrence(
                {"job": kill.job} if kill.job else {"cgroup": kill.cgroup},
                f"{kill.cgroup}@{kill.at_ns}",
                f"{format_quantity(kill.kills, 'process')} killed for want of memory in {kill.cgroup}",
            )

    def find_problem(self) -> str:
        counted_here = any(
            metric == "oom_kills_total" for (metric, _), _, _ in self._board.values()
        )
        return (
            ""
            if counted_here
            else "no collector counts processes that are killed for want of memory"
        )


class XidWatch:
    """Returns each error of a device once.

    Args:
        rule: Selects the errors.
        host_snapshot: Has the events of devices.
    """

    def __init__(self, rule: XidRule, host_snapshot: Snapshot) -> None:
        self._rule, self._board = rule, host_snapshot
        self._last = host_snapshot.events[-1] if host_snapshot.events else None

    def check(self, now_ns: int) -> Iterator[Occurrence]:  # noqa: ARG002  (of the protocol)
        """Yields the errors since the last call."""
        events, last = self._board.events, self._last
        self._last = events[-1] if events else last
        for event in _select_new_events(events, last):
            if event.kind == "xid" and (not self._rule.codes or event.code in self._rule.codes):
                code = "" if event.code is None else f" {event.code}"
                text = f": {event.text}" if event.text else ""
                yield Occurrence(
                    {"device": event.device},
                    f"{event.device}@{event.at_ns}{code}",
                    f"Xid{code} of device {event.device}{text}",
                )

    def find_problem(self) -> str:
        """Reports that no device has such errors."""
        nvidia = any(device.vendor == "nvidia" for device in self._board.devices.values())
        return "" if nvidia else "no device of NVIDIA is here, and only those have Xid errors"


def _select_new_events(events: Sequence[Event], last: Event | None) -> Sequence[Event]:
    """Returns the events after the last one seen; all if that is no longer in the list."""
    for index in range(len(events) - 1, -1, -1):
        if events[index] is last:
            return events[index + 1 :]
    return events


class HangWatch:
    """Returns each hang once it is confirmed.

    Args:
        hangs: Detects them.
    """

    def __init__(self, hangs: HangService) -> None:
        self._hangs = hangs
        # At the last call; None before it: those of an earlier agent.
        self._known: frozenset[str] | None = None

    def check(self, now_ns: int) -> Iterator[Occurrence]:  # noqa: ARG002  (of the protocol)
        """Yields the hangs that started since the last call and whose blocking ranks are known."""
        described = [record for record in self._hangs.records if record.sentence]
        before, self._known = self._known, frozenset(record.id for record in described)
        for record in described:
            if before is not None and record.id not in before and record.state == "hangs":
                yield Occurrence({"job": record.hang.job}, record.id, record.sentence)

    def find_problem(self) -> str:
        return (
            ""
            if self._hangs.config.hangs.watch
            else "hangs are not watched for: `hangs.watch` is off"
        )


class CadenceWatch:
    """Fires at the start of each period, but not in the one in which the agent started.

    Args:
        rule: The period.
        host: Its name, which shifts the periods: hosts of a fleet are not traced at the same time.
        now_ns: Start of the agent.
    """

    def __init__(self, rule: CadenceRule, host: str, now_ns: int) -> None:
        self._name, self._every_ns = rule.name, int(rule.every * 1e9)
        digest = hashlib.sha256(f"{host}\0{rule.name}".encode()).digest()
        self.phase_ns = int.from_bytes(digest[:8], "big") % self._every_ns
        self._first = (now_ns - self.phase_ns) // self._every_ns

    def check(self, now_ns: int) -> Iterator[Occurrence]:
        period = (now_ns - self.phase_ns) // self._every_ns
        if period != self._first:
            yield Occurrence(
                {}, f"{self._name}#{period}", f"every {format_duration(self._every_ns)}"
            )

    def find_problem(self) -> str:
        """Always "": it can always fire."""
        return ""


_HISTORY_FACTOR = 4  # the baseline has at most so many times N steps
_DEVIATIONS = 4.9  # standard deviations of the number above the median: one chance in two million
_MAX_PROCESSES = 4096


@dataclass(slots=True)
class _StepHistory:
    """Step durations of a process in seconds: the baseline, and the last ones until there are N."""

    before: deque[float]
    last: list[float] = field(default_factory=list)
    slow: tuple[float, float] | None = None  # (baseline, current) median, while it is slower
    episode: int = 0


class StepRegressionWatch:
    """Collects step durations, and compares each N of them with the baseline.

    Args:
        rule: The ratio, and the number of steps.
        steps: Source of step durations.
        is_traced: Whether a process is being traced, by key.
        exists: Whether the process exists.
    """

    def __init__(
        self,
        rule: StepRegressionRule,
        steps: StepCounter,
        is_traced: Callable[[str], bool],
        exists: Callable[[str], bool],
    ) -> None:
        self._rule, self._is_traced, self._exists = rule, is_traced, exists
        self._past: dict[str, _StepHistory] = {}
        steps.listeners.append(self._on_steps)

    def check(self, now_ns: int) -> Iterator[Occurrence]:  # noqa: ARG002  (of the protocol)
        """Yields the processes that are slower than before."""
        for process, past in list(self._past.items()):
            if past.slow is None:
                continue
            if not self._exists(process):
                del self._past[process]
                continue
            before, now = past.slow
            pid = process.partition("@")[0]
            yield Occurrence(
                {"process": process},
                f"{process}#{past.episode}",
                f"the last {self._rule.last} steps of process {pid} took {format_duration(int(now * 1e9))} "
                f"in the median, {format_percent(now / before - 1)} % more than the {format_duration(int(before * 1e9))} before",
            )

    def find_problem(self) -> str:
        """Reports that no steps of any process are known."""
        return (
            ""
            if self._past
            else "no steps of any process are known yet: they are reported, or counted by probes"
        )

    def _on_steps(self, process: str, durations: Sequence[tuple[float, int]]) -> None:
        if self._is_traced(process):
            return
        past = self._past.get(process)
        if past is None:
            self._past = {key: old for key, old in self._past.items() if self._exists(key)}
            if len(self._past) >= _MAX_PROCESSES:
                return
            past = self._past[process] = _StepHistory(
                deque(maxlen=_HISTORY_FACTOR * self._rule.last)
            )
        for seconds, number in durations:
            # Steps with a common mean, as counted by probes, are not independent: N of them need at
            # least ten observations.
            past.last += [seconds] * min(number, max(self._rule.last // 10, 1))
            while len(past.last) >= self._rule.last:
                window, past.last = past.last[: self._rule.last], past.last[self._rule.last :]
                # N steps are compared with the baseline; slower ones never become part of it.
                if len(past.before) < 2 * len(window):
                    past.before.extend(window)
                    continue
                before, now = median(past.before), median(window)
                slower_count = sum(duration > before for duration in window)
                certain = slower_count - len(window) / 2 >= _DEVIATIONS * math.sqrt(len(window)) / 2
                if certain and now > before * (1 + self._rule.by):
                    past.episode += past.slow is None
                    past.slow = (before, now)
                else:
                    past.slow = None
                    past.before.extend(window)
