"""How many runs a change needs to be seen: by made samples, and in the views."""

from __future__ import annotations

import numpy as np
import pytest

from support import runs as made
from traceloom.analyze import gate, gate_statistics
from traceloom.analyze.gate import compute_power, compute_runs_needed
from traceloom.cli import main
from traceloom.report import verdict as report
from traceloom.report.verdict import list_reasons

TEN_MS = 1e7


def held(
    runs: int, slower: float, seed: int, of_runs: float = 0.012, limit: str = "3%"
) -> gate.Verdict:
    chance = np.random.default_rng(seed)
    base = [made.run(chance, TEN_MS, of_runs=of_runs) for _ in range(runs)]
    new = [made.run(chance, TEN_MS * (1 + slower), of_runs=of_runs) for _ in range(runs)]
    return gate.judge(base, new, [gate.parse(f"step_time > {limit}")])


def test_so_many_runs_find_the_change_eight_times_of_ten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gate_statistics, "DRAW_COUNT", 600)
    scatter = float(
        np.sqrt(np.mean([held(10, 0.05, seed).checks["scatter"][0] ** 2 for seed in range(10)]))
    )
    runs = compute_runs_needed(scatter, 0.05 - 0.03)
    assert runs is not None
    found = [held(runs, 0.05, 100 + seed).checks["verdict"][0] for seed in range(50)]
    assert 30 <= found.count("fail") <= 48


@pytest.mark.parametrize(
    ("scatter", "room", "runs"), [(0.0, 0.01, 2), (0.01, 0.0, None), (1.0, 0.001, None)]
)
def test_bounds(scatter: float, room: float, runs: int | None) -> None:
    assert compute_runs_needed(scatter, room) == runs


def test_more_scatter_needs_more_runs_and_a_larger_change_fewer() -> None:
    assert (compute_runs_needed(0.01, 0.02) or 0) < (compute_runs_needed(0.02, 0.02) or 0)
    assert (compute_runs_needed(0.02, 0.05) or 0) < (compute_runs_needed(0.02, 0.02) or 0)


def test_it_is_told_or_why_it_cannot_be() -> None:
    several, one = held(5, 0.0, 1), held(1, 0.0, 1)
    assert compute_power(several.checks, 0.05)["runs"][0] > 2
    assert compute_power(one.checks, 0.05)["reason"][0].startswith("how runs scatter is not known")
    assert compute_power(several.checks, 0.02)["reason"][0] == "the change is within the limit"
    document = report.build(several, ("a", []), ("b", []), strict=False, effect=0.05)
    assert any("is found eight times of ten with" in line for line in list_reasons(document))
    assert report.build(several, ("a", []), ("b", []), strict=False)["power"] == []


@pytest.mark.parametrize("wrong", ["0%", "x", "-3%"])
def test_what_is_no_change_is_refused(wrong: str) -> None:
    assert main(["baseline", "compare", "main", "run", f"--power={wrong}"]) == 2


def test_it_belongs_to_compare() -> None:
    assert main(["baseline", "save", "main", "run", "--power", "5%"]) == 2
