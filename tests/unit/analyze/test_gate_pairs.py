"""Runs of both sides that took turns: what the machine does to both is no change."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import numpy as np
import pytest

from support import runs as made
from traceloom.analyze import gate, gate_statistics
from traceloom.analyze.gate import arrange_in_pairs, compute_power, compute_runs_needed
from traceloom.analyze.gate_summary import RunSummary

TEN_MS = 1e7


def turns(
    seed: int,
    slower: float,
    count: int = 6,
    drift: float = 0.02,
    order: Callable[[int], bool] = lambda _: True,
) -> tuple[list[RunSummary], list[RunSummary]]:
    """Pairs of runs on a machine that grows slower by `drift` from pair to pair; `order`: the base comes first."""
    chance = np.random.default_rng(seed)
    sides: tuple[list[RunSummary], list[RunSummary]] = ([], [])
    for pair in range(count):
        for turn in range(2):
            side = turn if order(pair) else 1 - turn
            mean = TEN_MS * (1 + slower * side) * (1 + drift * pair)
            run = made.run(chance, mean, of_runs=0.004, of_steps=0.01)
            sides[side].append(msgspec.structs.replace(run, began_unix_ns=1000 * (2 * pair + turn)))
    return sides


def verdict(base: list[RunSummary], new: list[RunSummary], limit: str = "2%") -> dict[str, object]:
    return gate.judge(base, new, [gate.parse(f"step_time > {limit}")]).checks.row(0, named=True)


def without_times(runs: list[RunSummary]) -> list[RunSummary]:
    return [msgspec.structs.replace(run, began_unix_ns=None) for run in runs]


@pytest.fixture(autouse=True)
def _fewer_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gate_statistics, "DRAW_COUNT", 800)


def test_pairs_see_what_a_drifting_machine_hides() -> None:
    base, new = turns(1, 0.05)
    paired = verdict(base, new)
    assert (paired["verdict"], paired["sample"]) == ("fail", "pairs of runs")
    loose = verdict(without_times(base), without_times(new))
    assert (loose["verdict"], loose["sample"]) == ("inconclusive", "runs")
    assert paired["scatter"] < 0.5 * loose["scatter"]


def test_the_interval_of_pairs_holds_the_truth_as_often_as_it_says() -> None:
    rows = [verdict(*turns(seed, 0.03, count=5)) for seed in range(60)]
    held = sum(row["low"] <= 0.03 <= row["high"] for row in rows)
    assert 52 <= held <= 60


def test_no_change_fails_rarely_whatever_the_machine_does() -> None:
    rows = [verdict(*turns(seed, 0.0, drift=0.05), limit="0%") for seed in range(60)]
    assert sum(row["verdict"] == "fail" for row in rows) <= 6


def test_either_side_may_come_first_in_a_pair_and_the_order_of_the_inputs_is_none() -> None:
    base, new = turns(2, 0.05, order=lambda pair: pair % 2 == 0)
    assert verdict(base, new)["sample"] == "pairs of runs"
    first, second, paired = arrange_in_pairs(base[::-1], [*new[3:], *new[:3]])
    assert paired
    assert (list(first), list(second)) == (base, new)


def test_runs_that_did_not_take_turns_are_no_pairs() -> None:
    base, new = turns(3, 0.0)
    one_after_the_other = [
        msgspec.structs.replace(run, began_unix_ns=at) for at, run in enumerate([*base, *new])
    ]
    assert not arrange_in_pairs(one_after_the_other[:6], one_after_the_other[6:])[2]
    assert not arrange_in_pairs(base, new[:5])[2]
    assert not arrange_in_pairs(base[:3], new[:3])[2]
    assert not arrange_in_pairs(without_times(base), new)[2]


def test_runs_needed_of_pairs_come_from_their_ratio() -> None:
    base, new = turns(4, 0.05)
    checks = gate.judge(base, new, [gate.parse("step_time > 2%")]).checks
    row = compute_power(checks, 0.05).row(0, named=True)
    assert row["runs"] == compute_runs_needed(row["scatter"], 0.03, paired=True)
    loose = gate.judge(
        without_times(base), without_times(new), [gate.parse("step_time > 2%")]
    ).checks
    assert row["runs"] < compute_power(loose, 0.05)["runs"][0]
