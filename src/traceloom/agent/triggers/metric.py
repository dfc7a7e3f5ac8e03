"""Rules on a metric: above, below, changed, absent."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

from traceloom.agent.config import MetricRule
from traceloom.agent.metrics import METRICS, PREFIX
from traceloom.agent.query import unit
from traceloom.agent.triggers import Firing
from traceloom.agent.triggers.values import Labels, MatchingSeries, SeriesValues, matching
from traceloom.errors import nearest
from traceloom.model.units import byte_rate, size

_MOST_GONE = 10_000  # series that are absent


@dataclass(slots=True)
class _SeriesSeen:
    """Of a series: its last value; since when it is as the rule says (None: it is not); and when it was there last."""

    value: float
    since_ns: int | None
    at_ns: int
    # Of the last while, what may still be the least and the greatest, oldest first: (instant, value).
    least: deque[tuple[int, float]] = field(default_factory=deque)
    greatest: deque[tuple[int, float]] = field(default_factory=deque)


class MetricWatch:
    """Looks at series when they are delivered.

    Args:
        rule: What to look for.
        values: The board's.
        still_there: Whether those whom labels name are there, so that a series of theirs could be, too.
    """

    def __init__(
        self, rule: MetricRule, values: SeriesValues, still_there: Callable[[Mapping[str, str]], bool]
    ) -> None:
        self.rule = rule
        self.matching = of_rule(rule)
        self._values, self._still_there = values, still_there
        self._series: dict[Labels, _SeriesSeen] = {}
        self._looked = -1
        metric = METRICS[self.matching.metric]
        # The `device` of a network card is none that processes are on.
        whose = () if metric.name.startswith("rdma_") else ("process", "device", "cgroup", "job", "rank")
        self._whose = [(column, label) for column, label in enumerate(metric.labels) if label in whose]

    def look(self, now_ns: int) -> Iterator[Firing]:
        """Series for which the rule holds, for as long as it does."""
        rule, fresh = self.rule, self._values.changed != self._looked
        if fresh:
            self._looked = self._values.changed
            self._take(now_ns)
        for labels, seen in list(self._series.items()):
            if rule.absent is not None:
                if now_ns - seen.at_ns < rule.absent * 1e9:
                    continue
                if not self._still_there({label: labels[column] for column, label in self._whose}):
                    del self._series[labels]
                    continue
                since_ns, words = seen.at_ns, f"was absent for {(now_ns - seen.at_ns) / 1e9:.0f} s"
            elif seen.since_ns is not None and seen.at_ns - seen.since_ns >= rule.for_seconds * 1e9:
                measure, since_ns = unit(self.matching.metric), seen.since_ns
                value = _written(seen.value, measure)
                if rule.changed is not None:
                    apart = seen.greatest[0][1] - seen.least[0][1]
                    words = f"changed by {_written(apart, measure)} within {rule.within:g} s, to {value}"
                else:
                    side, limit = ("above", rule.above) if rule.above is not None else ("below", rule.below)
                    lasting = f" for {rule.for_seconds:g} s" if rule.for_seconds else ""
                    words = f"is {value}, {side} {_written(limit or 0.0, measure)}{lasting}"
            else:
                continue
            names = METRICS[self.matching.metric].labels
            of = ", ".join(f"{name} {value}" for name, value in zip(names, labels, strict=True) if value)
            yield Firing(
                ({label: labels[column] for column, label in self._whose}), f"{labels}@{since_ns}",
                f"{self.matching.metric}{f' of {of}' if of else ''} {words}", lasts=True,
            )  # fmt: skip

    def trouble(self) -> str:
        """Whether there is any series to look at."""
        if self._series or any(True for _ in self._values.of(self.matching)):
            return ""
        delivered, metric = self._values.delivered(), self.matching.metric
        if metric not in delivered:
            likely = nearest(metric, delivered).removeprefix("did you mean ").rstrip("? ")
            return f"no collector delivers `{metric}` here now" + (f", but {likely}" if likely else "")
        if METRICS[metric].kind == "counter" and not self.matching.labels:
            return ""  # its rate is there when it has been delivered twice
        return f"no series of `{metric}` has the labels of `where`"

    def _take(self, now_ns: int) -> None:
        rule, there = self.rule, set()
        for labels, value in self._values.of(self.matching):
            if math.isnan(value):
                continue
            there.add(labels)
            seen = self._series.get(labels)
            if seen is None:
                seen = self._series[labels] = _SeriesSeen(value, None, now_ns)
            seen.value, seen.at_ns = value, now_ns
            if rule.changed is not None and rule.within is not None:
                # How far the values since then are apart; each value enters and leaves each queue once
                oldest_ns = now_ns - int(rule.within * 1e9)
                for queue, sign in ((seen.least, 1.0), (seen.greatest, -1.0)):
                    while queue and queue[0][0] < oldest_ns:
                        queue.popleft()
                    while queue and sign * queue[-1][1] >= sign * seen.value:
                        queue.pop()
                    queue.append((seen.at_ns, seen.value))
                holds = seen.greatest[0][1] - seen.least[0][1] >= rule.changed
            else:
                holds = (rule.above is not None and value > rule.above) or (
                    rule.below is not None and value < rule.below
                )
            seen.since_ns = (seen.since_ns if seen.since_ns is not None else now_ns) if holds else None
        gone = [labels for labels in self._series if labels not in there]
        # What is not there is not above anything; an absent one is kept until those whom it was of are gone.
        for labels in gone if rule.absent is None else gone[:-_MOST_GONE]:
            del self._series[labels]


def _written(value: float, measure: str) -> str:
    if measure in ("bytes", "bytes/s") and math.isfinite(value):
        return size(int(value)) if measure == "bytes" else byte_rate(value)
    return f"{value:.4g}" if measure in ("", "1", "ratio") else f"{value:.4g} {measure}"


def of_rule(rule: MetricRule) -> MatchingSeries:
    """The series that a rule looks at."""
    return matching(rule.metric.removeprefix(PREFIX), rule.where)
