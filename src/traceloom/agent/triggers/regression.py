"""A rule on steps that became slower than the same process's steps before.

Two things must be so. The median of the last N steps is above that of the steps before by the share of the rule. And of
the last N so many are above the median before as chance gives once in a million looks: had nothing changed, each would
be above it as often as below. Steps while a trace runs are left out: tracing slows them down.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from statistics import median

from traceloom.agent.config import StepRegressionRule
from traceloom.agent.steps import Steps
from traceloom.agent.triggers import Firing
from traceloom.model.units import duration, per_cent

_BEFORE = 4  # so many times N steps are what they were before
_DEVIATIONS = 4.9  # standard deviations of the number above the median: one chance in two million
_MOST_PROCESSES = 4096


@dataclass(slots=True)
class _Past:
    """Durations of a process in seconds: those before, and the last ones until there are N."""

    before: deque[float]
    last: list[float] = field(default_factory=list)
    slow: tuple[float, float] | None = None  # the medians before and now, while it is slower
    episode: int = 0


class StepRegressionWatch:
    """Hears of steps as they come, and compares when N more are there.

    Args:
        rule: By how much, of how many.
        steps: Tells of them.
        is_traced: Whether a process is traced now, by key.
        exists: Whether there is such a process.
    """

    def __init__(
        self, rule: StepRegressionRule, steps: Steps, is_traced: Callable[[str], bool], exists: Callable[[str], bool]
    ) -> None:
        self._rule, self._is_traced, self._exists = rule, is_traced, exists
        self._past: dict[str, _Past] = {}
        steps.listeners.append(self._hear)

    def look(self, now_ns: int) -> Iterator[Firing]:  # noqa: ARG002  (of the protocol)
        """Processes that are slower than they were."""
        for process, past in list(self._past.items()):
            if past.slow is None:
                continue
            if not self._exists(process):
                del self._past[process]
                continue
            before, now = past.slow
            pid = process.partition("@")[0]
            yield Firing(
                {"process": process}, f"{process}#{past.episode}",
                f"the last {self._rule.last} steps of process {pid} took {duration(int(now * 1e9))} "
                f"in the median, {per_cent(now / before - 1)} % more than the {duration(int(before * 1e9))} before",
            )  # fmt: skip

    def trouble(self) -> str:
        """Whether steps of any process are known."""
        return "" if self._past else "no steps of any process are known yet: they are reported, or counted by probes"

    def _hear(self, process: str, durations: Sequence[tuple[float, int]]) -> None:
        if self._is_traced(process):
            return
        past = self._past.get(process)
        if past is None:
            self._past = {key: old for key, old in self._past.items() if self._exists(key)}
            if len(self._past) >= _MOST_PROCESSES:
                return
            past = self._past[process] = _Past(deque(maxlen=_BEFORE * self._rule.last))
        for seconds, number in durations:
            # Steps with one mean, as probes see them, are no witnesses of their own: it takes ten looks at least.
            past.last += [seconds] * min(number, max(self._rule.last // 10, 1))
            while len(past.last) >= self._rule.last:
                window, past.last = past.last[: self._rule.last], past.last[self._rule.last :]
                # N steps are judged by those before; slower ones never become what was before.
                if len(past.before) < 2 * len(window):
                    past.before.extend(window)
                    continue
                before, now = median(past.before), median(window)
                above = sum(each > before for each in window)
                certain = above - len(window) / 2 >= _DEVIATIONS * math.sqrt(len(window)) / 2
                if certain and now > before * (1 + self._rule.by):
                    past.episode += past.slow is None
                    past.slow = (before, now)
                else:
                    past.slow = None
                    past.before.extend(window)
