"""The samples of a metric: its value in each step of each run."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from traceloom.analyze.gate.condition import TABLES, Condition
from traceloom.analyze.gate.summary import RunSummary
from traceloom.errors import UsageError

Floats = NDArray[np.float64]
LEAST_STEPS = 5
WALL, RECORDED = "wall times of undisturbed steps", "recorded steps"
_WHAT = {"kernel": "kernel", "kind": "kind of kernel", "op": "operator", "op_gpu": "operator with GPU work"}
_NEEDS = {
    "memory_peak": "the runs were not recorded with the allocator's totals, as `traceloom record --memory` does",
    "step_time": "no step was found",
}


@dataclass(frozen=True, slots=True)
class Samples:
    """Values of a metric.

    Attributes:
        base: Per run the value in each step; None where a run of the side did not measure it.
        new: The same.
        source: What the values are of: `WALL` or `RECORDED`.
    """

    base: list[Floats] | None
    new: list[Floats] | None
    source: str


def samples(condition: Condition, base: Sequence[RunSummary], new: Sequence[RunSummary]) -> Samples:
    """Take what a condition is about from the runs.

    Raises:
        UsageError: `nothing-measured`: neither side has it, as when a regular expression matches no name.
    """
    source = RECORDED
    if condition.metric == "step_time" and all(len(run.wall_ns or ()) >= LEAST_STEPS for run in (*base, *new)):
        source = WALL
    sides = [[_values(condition, run, source) for run in side] for side in (base, new)]
    if all(values is None for side in sides for values in side):
        raise _nothing(condition, [*base, *new])
    if condition.metric in TABLES:  # a side that measured such things, and has none of these, has 0
        for runs, side in zip((base, new), sides, strict=True):
            for at, run in enumerate(runs):
                if side[at] is None and condition.metric in run.tables:
                    side[at] = np.zeros(len(run.steps))
    whole = [[values for values in side if values is not None] for side in sides]
    complete = [kept if len(kept) == len(side) else None for kept, side in zip(whole, sides, strict=True)]
    return Samples(complete[0], complete[1], source)


def _values(condition: Condition, run: RunSummary, source: str) -> Floats | None:
    if source == WALL:
        return np.array(run.wall_ns, dtype=np.float64)
    if condition.metric not in TABLES:
        column = run.scalars.get(condition.metric)
        return None if column is None else np.array(column, dtype=np.float64)
    table = run.tables.get(condition.metric, {})
    if condition.metric == "kind":
        columns = [values for name, values in table.items() if name == condition.chosen]
    else:
        chosen = re.compile(condition.chosen)
        columns = [values for name, values in table.items() if chosen.search(name)]
    return np.array(columns, dtype=np.float64).sum(axis=0) if columns else None


def _nothing(condition: Condition, runs: list[RunSummary]) -> UsageError:
    """The error where neither side has the metric: a typing error must not pass a check."""
    if condition.metric in TABLES:
        names = {
            name: sum(values)
            for run in runs
            for name, values in run.tables.get(condition.metric, {}).items()
        }  # fmt: skip
        most = sorted(names, key=lambda name: (-names[name], name))[:4]
        hint = f"the largest are {', '.join(name[:60] for name in most)}" if most else "the runs have none at all"
        what = _WHAT[condition.metric]
        return UsageError(f"`{condition.text}` matches no {what} on either side", slug="nothing-measured", hint=hint)
    why = _NEEDS.get(condition.metric, "the runs have no GPU work in steps")
    return UsageError(f"`{condition.text}`: neither side has measured it", slug="nothing-measured", hint=why)
