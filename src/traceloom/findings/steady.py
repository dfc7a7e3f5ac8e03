"""What a fix saves per step of a steady run: steps that follow each other, evaluated together.

A step that is looked at alone ends with all that it launched. In a run the host begins the next step meanwhile: what
holds the host back at the end of a step costs what the next step could have begun earlier.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import ArrayLike, NDArray

from traceloom.findings.context import Context
from traceloom.findings.rule import Candidate, Rule
from traceloom.model.graph_arrays import point_times
from traceloom.retime import Plan
from traceloom.simulate import Scenario, evaluations, most_saved_ns, unrecorded_saving_ns

Ints = NDArray[np.int64]
Key = tuple[str, tuple[tuple[str, str], ...], int]

MOST_STEPS = 5
_MOST_NODES = 150_000  # of all steps together: of larger ones fewer are looked at


@dataclass
class Steady:
    """Steps, and what could be fixed in them.

    Attributes:
        context: Steps that follow each other, or one step.
        candidates: By what they are about.
        base: The steps with what was fixed so far.
        plan: Of its graph.
        now_ns: How long each counted step takes with that, shape (counted steps,).
    """

    context: Context
    candidates: dict[Key, Candidate]
    base: Scenario = field(init=False)
    plan: Plan = field(init=False)
    now_ns: Ints = field(init=False)

    def __post_init__(self) -> None:
        """Nothing is fixed yet."""
        self.base, self.plan = Scenario.of(self.context.graph), self.context.plan
        self.now_ns = self._lengths(point_times(self.context.graph))

    @property
    def count(self) -> int:
        """Steps that count."""
        return int(self.now_ns.size)

    def after(self, keys: Sequence[Key]) -> dict[Key, Ints]:
        """How long each step takes with each of these fixed, too, where there is something to fix; ns."""
        present = [key for key in keys if key in self.candidates]
        graph = self.context.graph
        # one after the other: each scenario is large
        scenarios = (self.context.changed(self.base, self.candidates[key].changes) for key in present)
        measured = point_times(graph)
        lengths = {}
        for key, (scenario, times) in zip(present, evaluations(scenarios, self.plan), strict=True):
            lengths[key] = self._lengths(np.maximum(times, measured - most_saved_ns(graph, scenario)))
        return lengths

    def after_both(self, first: Key, second: Key) -> Ints:
        """How long each step takes with two of these fixed, too; ns."""
        changes = (*self.candidates[first].changes, *self.candidates[second].changes)
        return self._lengths(self.context.changed(self.base, changes).times(self.plan))

    def saved_ns(self, key: Key, after_ns: Ints | None) -> Ints:
        """What a fix saves in each step on top of those before it, together at most what it can; ns."""
        if after_ns is None:
            return np.zeros(self.count, dtype=np.int64)
        saved = self.now_ns - after_ns
        most, whole = self.candidates[key].at_most_ns, int(saved.sum())
        if most is not None and whole > most * self.count / self.context.step_count:
            saved = np.floor(saved * (most * self.count / self.context.step_count / whole)).astype(np.int64)
        return saved

    def unrecorded_ns(self, key: Key, saved_ns: int) -> int:
        """A saving of one step when nobody records."""
        if key not in self.candidates:
            return 0
        context = self.context
        return unrecorded_saving_ns(
            context.graph, self.candidates[key].changes, min(saved_ns, context.step_ns),
            whole_ns=context.step_ns, ratio=context.host_ratio,
        )  # fmt: skip

    def fix(self, key: Key, after_ns: Ints | None) -> None:
        """From now on this is fixed."""
        if after_ns is None:
            return
        self.base, self.now_ns = self.context.changed(self.base, self.candidates[key].changes), after_ns
        if self.base.graph is not self.plan.graph:
            self.plan = Plan(self.base.graph)

    def _lengths(self, times: Ints) -> Ints:
        """How long each step that counts takes."""
        lengths = self.context.lengths_ns(times)
        # the first one may begin with what others left behind: it counts where there are too few others
        return lengths[1:] if lengths.size == 2 or lengths.size > MOST_STEPS else lengths


def steady(context: Context, usual: dict[Key, Candidate], rules: Sequence[Rule], most: int) -> Steady:
    """Steps around the usual one, with what the rules find in them; the usual one alone where there are no others.

    Args:
        context: The usual step.
        usual: What the rules find in it.
        rules: All of them.
        most: Steps that count at most, fewer of large graphs.
    """
    room = min(most + 1, _MOST_NODES // max(context.graph.nodes.height, 1))
    steps = context.around(room) if most > 1 and room > 1 else ()
    if len(steps) < 2:
        return Steady(context, usual)
    several = context.over(steps)
    candidates = [
        (rule, candidate) for rule in rules for candidate in rule.look(several) if isinstance(candidate, Candidate)
    ]
    return Steady(several, keyed(candidates))


def keyed(candidates: Iterable[tuple[Rule, Candidate]]) -> dict[Key, Candidate]:
    """Candidates by rule and what they change, figures left out."""
    by_key: dict[Key, Candidate] = {}
    for rule, candidate in candidates:
        about = tuple((change.action, str(change.selection)) for change in candidate.changes)
        number = sum(key[:2] == (rule.slug, about) for key in by_key)
        by_key[rule.slug, about, number] = candidate
    return by_key


def middle(values: ArrayLike) -> int:
    """The median; of an even number the mean of the two in the middle, rounded down."""
    return int(np.median(np.asarray(values, dtype=np.int64)))


def interval(values: Sequence[int]) -> tuple[int, int]:
    """Between which values the median of all such steps lies, nine times of ten where there are at least five.

    By the order of the values alone; of fewer than five it is the smallest and the largest.
    """
    ordered = np.sort(np.array(values, dtype=np.int64))
    left = _left_out(ordered.size)
    return int(ordered[left]), int(ordered[ordered.size - 1 - left])


def _left_out(count: int) -> int:
    """How many values at each end can be left out: a coin shows so few heads in one of twenty throws at most."""
    chances = np.ones(1)  # of each number of heads
    for _ in range(count):
        chances = (np.append(chances, 0.0) + np.append(0.0, chances)) / 2
    return max(int(np.searchsorted(np.cumsum(chances), 0.05, side="right")) - 1, 0)
