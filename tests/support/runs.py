"""Made runs: summaries with steps drawn from declared distributions."""

from __future__ import annotations

import numpy as np

from traceloom.analyze.gate_summary import OperatorCalls, RunSummary, StatedCondition

PROGRAM = OperatorCalls(["aten::mm"], ["[[4,4]]"], [3.0])


def steps(
    chance: np.random.Generator, count: int, mean: float, noise: float, alike: float = 0.0
) -> list[float]:
    """Times of steps with relative noise, neighbours correlated by `alike`, and three in a hundred much longer."""
    drawn = chance.standard_normal(count)
    for at in range(1, count):
        drawn[at] = alike * drawn[at - 1] + np.sqrt(1 - alike**2) * drawn[at]
    long = (chance.random(count) < 0.03) * 0.5 * chance.random(count)
    times: list[float] = (mean * (1 + noise * drawn + long)).tolist()
    return times


def summary(
    wall: list[float] | None, name: str = "run", device: str = "H100", **scalars: list[float]
) -> RunSummary:
    """A run with these wall times and metrics of recorded steps."""
    recorded = scalars or {"step_time": (wall or [1.0])[:5]}
    count = len(next(iter(recorded.values())))
    stated = [StatedCondition("device", device, "decisive")]
    return RunSummary(
        name, stated, PROGRAM, wall, list(range(count)), recorded, {"kernel": {}}, None
    )


def run(  # what a run is made of
    chance: np.random.Generator,
    mean: float,
    *,
    of_runs: float,
    of_steps: float = 0.05,
    count: int = 50,
) -> RunSummary:
    """A run whose own mean scatters by `of_runs`."""
    own = mean * (1 + of_runs * chance.standard_normal())
    return summary(steps(chance, count, own, of_steps, 0.3))
