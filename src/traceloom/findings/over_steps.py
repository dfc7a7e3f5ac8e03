"""What a fix saves in each step of the window: one step may be an unusual one."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain

import numpy as np
from numpy.typing import NDArray

from traceloom.findings.ground import Ground
from traceloom.findings.rule import Candidate, Rule
from traceloom.retime import Plan
from traceloom.simulate import Scenario, unrecorded_saving_ns, whatif_many

Key = tuple[str, tuple[tuple[str, str], ...], int]

MOST_STEPS = 5
_MOST_NODES = 150_000  # of all steps together: of larger ones fewer are looked at


@dataclass
class Step:
    """A step, and what could be fixed in it.

    Attributes:
        ground: The step.
        candidates: By what they are about, which is the same in every step.
        base: The step with what was fixed so far.
        now_ns: How long that takes.
        plan: Of its graph.
    """

    ground: Ground
    candidates: dict[Key, Candidate]
    base: Scenario = field(init=False)
    now_ns: int = field(init=False)
    plan: Plan = field(init=False)

    def __post_init__(self) -> None:
        """Nothing is fixed yet."""
        self.base, self.plan = Scenario.of(self.ground.graph), self.ground.plan
        self.now_ns = int(whatif_many(self.ground.graph, [self.base], self.plan)[0])

    def after(self, keys: Sequence[Key]) -> dict[Key, int]:
        """How long the step takes with each of these fixed, too, where it has them; ns."""
        mine = [key for key in keys if key in self.candidates]
        # one after the other: each scenario is large
        scenarios = (self.ground.changed(self.base, self.candidates[key].changes) for key in mine)
        times = whatif_many(self.ground.graph, chain(scenarios), self.plan)
        return dict(zip(mine, times.tolist(), strict=True))

    def saved_ns(self, key: Key, after_ns: int | None) -> int:
        """What a fix saves on top of those before it, at most what it can; 0 where the step does not have it."""
        if after_ns is None:
            return 0
        most = self.candidates[key].at_most_ns
        saved = self.now_ns - after_ns
        return max(0, saved if most is None else min(saved, most))

    def unrecorded_ns(self, key: Key, saved_ns: int) -> int:
        """The same when nobody records."""
        if key not in self.candidates:
            return 0
        ground = self.ground
        return unrecorded_saving_ns(
            ground.graph, self.candidates[key].changes, min(saved_ns, ground.step_ns),
            whole_ns=ground.step_ns, ratio=ground.host_ratio,
        )  # fmt: skip

    def fix(self, key: Key, after_ns: int | None) -> None:
        """From now on this is fixed."""
        if after_ns is None:
            return
        self.base, self.now_ns = self.ground.changed(self.base, self.candidates[key].changes), after_ns
        if self.base.graph is not self.plan.graph:
            self.plan = Plan(self.base.graph)


def others(ground: Ground, rules: Sequence[Rule], most: int) -> Iterator[Step]:
    """Other steps of the window than the usual one, with what the same rules find in them.

    Those of all lengths; with the usual one at most so many, fewer of large graphs, none where there are no steps.
    """
    room = min(most, _MOST_NODES // max(ground.graph.nodes.height, 1)) - 1
    for beside in ground.beside(room):
        said = [(rule, one) for rule in rules for one in rule.look(beside) if isinstance(one, Candidate)]
        yield Step(beside, keyed(said))


def keyed(candidates: Iterable[tuple[Rule, Candidate]]) -> dict[Key, Candidate]:
    """Candidates by rule and what they change, figures left out."""
    found: dict[Key, Candidate] = {}
    for rule, candidate in candidates:
        about = tuple((change.action, str(change.selection)) for change in candidate.changes)
        number = sum(key[:2] == (rule.slug, about) for key in found)
        found[rule.slug, about, number] = candidate
    return found


def middle(values: Sequence[int]) -> int:
    """The median; of an even number the mean of the two in the middle, rounded down."""
    return int(np.median(np.array(values, dtype=np.int64)))


def interval(values: Sequence[int]) -> tuple[int, int]:
    """Between which values the median of all such steps lies, nine times of ten where there are at least five.

    By the order of the values alone; of fewer than five it is the smallest and the largest.
    """
    ordered = np.sort(np.array(values, dtype=np.int64))
    left = _left_out(ordered.size)
    return int(ordered[left]), int(ordered[ordered.size - 1 - left])


def _left_out(count: int) -> int:
    """How many values at each end can be left out: a coin shows so few heads in one of twenty throws at most."""
    chances = np.cumsum(_binomial(count))
    return max(int(np.searchsorted(chances, 0.05, side="right")) - 1, 0)


def _binomial(count: int) -> NDArray[np.float64]:
    row = np.ones(1)
    for _ in range(count):
        row = (np.append(row, 0.0) + np.append(0.0, row)) / 2
    return row
