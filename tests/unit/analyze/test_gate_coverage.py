"""How often the interval of the gate holds the truth, over made pairs whose steps are correlated."""

from __future__ import annotations

import numpy as np
import pytest

from traceloom.analyze import gate_statistics
from traceloom.analyze.gate_statistics import (
    compute_interval,
    count_independent_steps,
    estimate_from_runs,
    estimate_within_runs,
    get_statistic,
)
from traceloom.trace.array_types import Floats

PAIRS = 400


def made_run(chance: np.random.Generator, steps: int, correlation: float, run: float) -> Floats:
    """Steps of which each is like the one before, of a run that is faster or slower as a whole."""
    noise = chance.normal(size=steps + 50)
    values = np.zeros(steps + 50)
    for step in range(1, steps + 50):
        values[step] = correlation * values[step - 1] + noise[step]
    values *= np.sqrt(1 - correlation**2)
    return np.asarray(1e6 * (1 + run * chance.normal() + 0.05 * values[50:]))


def covers(chance: np.random.Generator, runs: int, steps: int, correlation: float) -> bool:
    run = 0.0 if runs == 1 else 0.02
    base, new = ([made_run(chance, steps, correlation, run) for _ in range(runs)] for _ in "12")
    mean = get_statistic("mean")
    drawn = (
        estimate_within_runs(base[0], new[0], mean)
        if runs == 1
        else estimate_from_runs(base, new, mean)
    )
    change = np.mean([side.mean() for side in new]) / np.mean([side.mean() for side in base]) - 1
    low, high = compute_interval(drawn.new / drawn.base - 1, float(change), drawn.freedom)
    return low <= 0 <= high


@pytest.mark.thorough
@pytest.mark.parametrize("runs", [1, 2, 5])
def test_the_interval_holds_the_truth_nineteen_times_of_twenty(
    monkeypatch: pytest.MonkeyPatch, runs: int
) -> None:
    monkeypatch.setattr(gate_statistics, "DRAW_COUNT", 800)
    shares = []
    for correlation in (0.4, 0.6, 0.8):
        chance = np.random.default_rng(runs)
        shares.append(np.mean([covers(chance, runs, 40, correlation) for _ in range(PAIRS)]))
    assert 0.93 <= np.mean(shares) <= 0.97
    assert 0.92 <= min(shares) <= max(shares) <= 0.98  # each share differs by 1.1 % by chance


def test_one_run_of_correlated_steps_is_not_taken_for_many_samples(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(gate_statistics, "DRAW_COUNT", 400)
    chance = np.random.default_rng(3)
    assert np.mean([covers(chance, 1, 20, 0.8) for _ in range(60)]) >= 0.88


def test_steps_that_are_alike_count_less() -> None:
    chance = np.random.default_rng(5)
    counts = [
        np.mean(
            [count_independent_steps(made_run(chance, 200, share, 0.0)) / 200 for _ in range(20)]
        )
        for share in (0.0, 0.5, 0.8)
    ]
    expected = [1.0, 1 / 3, 1 / 9]
    assert counts == pytest.approx(expected, rel=0.15)
    assert count_independent_steps(np.full(20, 3.0)) == 20
