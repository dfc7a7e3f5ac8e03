"""The verdict: rates on made samples, and what it says where it cannot know."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from support import runs as made
from traceloom.analyze import gate, gate_statistics
from traceloom.analyze.gate_summary import OperatorCalls, RunSummary
from traceloom.errors import UsageError

TEN_MS = 1e7


def only(verdict: gate.Verdict) -> dict[str, object]:
    return verdict.checks.row(0, named=True)


def rates(
    monkeypatch: pytest.MonkeyPatch,
    runs: tuple[int, int],
    slower: float,
    of_runs: float,
    limit: str,
    count: int = 50,
) -> tuple[Counter[str], float]:
    """Verdicts of 100 made comparisons, and the share of intervals that hold the true change."""
    monkeypatch.setattr(gate_statistics, "DRAW_COUNT", 600)
    chance = np.random.default_rng(7)
    condition = gate.parse(f"step_time > {limit}")
    verdicts: Counter[str] = Counter()
    held = 0
    for _ in range(100):
        base = [made.run(chance, TEN_MS, of_runs=of_runs, count=count) for _ in range(runs[0])]
        new = [
            made.run(chance, TEN_MS * (1 + slower), of_runs=of_runs, count=count)
            for _ in range(runs[1])
        ]
        row = only(gate.judge(base, new, [condition]))
        verdicts[str(row["verdict"])] += 1
        held += bool(row["low"] <= slower <= row["high"])  # type: ignore[operator]
    return verdicts, held / 100


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    "runs",
    [
        (1, 1),
        (5, 5),
        *(pytest.param(runs, marks=pytest.mark.thorough) for runs in ((2, 2), (6, 1))),
    ],
)
def test_equal_runs_seldom_fail_even_against_no_change_at_all(
    monkeypatch: pytest.MonkeyPatch, runs: tuple[int, int]
) -> None:
    """One run a side knows nothing of the scatter of runs: there, they do not scatter."""
    found, held = rates(monkeypatch, runs, 0.0, 0.01 if max(runs) > 1 else 0.0, "0%")
    assert found["fail"] <= 7
    assert held >= 0.88


def test_equal_runs_never_fail_against_three_per_cent(monkeypatch: pytest.MonkeyPatch) -> None:
    found, _ = rates(monkeypatch, (5, 5), 0.0, 0.01, "3%")
    assert found["fail"] == 0
    assert found["pass"] >= 60


def test_a_slowdown_of_five_per_cent_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    found, held = rates(monkeypatch, (5, 5), 0.05, 0.01, "2%")
    assert found["fail"] >= 65
    assert found["pass"] == 0
    assert held >= 0.88


def test_a_slowdown_of_five_per_cent_is_found_within_one_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found, _ = rates(monkeypatch, (1, 1), 0.05, 0.0, "2%", count=200)
    assert found["fail"] >= 85
    assert found["pass"] == 0


def test_noisy_runs_are_inconclusive_not_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    found, _ = rates(monkeypatch, (3, 3), 0.05, 0.08, "3%")
    assert found["inconclusive"] >= 80
    assert found["fail"] + found["pass"] <= 20


def test_the_scatter_of_runs_counts_where_there_are_several() -> None:
    """Long runs of a machine that changes from run to run: steps alone would be sure, and wrong."""
    chance = np.random.default_rng(3)
    base = [made.summary(made.steps(chance, 500, mean, 0.01)) for mean in (1.00e7, 1.08e7, 0.96e7)]
    new = [made.summary(made.steps(chance, 500, mean, 0.01)) for mean in (1.06e7, 1.01e7, 1.12e7)]
    condition = gate.parse("step_time > 3%")
    assert gate.judge(base[:1], new[:1], [condition]).verdict == "fail"
    several = gate.judge(base, new, [condition])
    assert (several.verdict, only(several)["sample"]) == ("inconclusive", "runs")
    assert only(gate.judge(base[:1], new[:1], [condition]))["sample"] == "within one run only"


def disturbed(chance: np.random.Generator, mean: float) -> RunSummary:
    """A run of which others lengthen half of the steps or nearly all of them, by up to half."""
    plain = mean * (1 + 0.01 * chance.standard_normal(100) + 0.005 * chance.standard_normal())
    longer = (chance.random(100) < chance.uniform(0.2, 0.8)) * chance.uniform(0.2, 0.5, 100)
    return made.summary((plain * (1 + longer)).tolist())


def test_among_others_on_the_machine_the_fastest_steps_tell_what_the_mean_cannot() -> None:
    chance = np.random.default_rng(3)
    base, new = ([disturbed(chance, TEN_MS * slower) for _ in range(5)] for slower in (1.0, 1.05))
    mean, low = (
        only(gate.judge(base, new, [gate.parse(f"{what} > 2%")]))
        for what in ("step_time", "p10(step_time)")
    )
    assert (mean["verdict"], low["verdict"]) == ("inconclusive", "fail")
    assert low["change"] == pytest.approx(0.05, abs=0.01)
    assert str(mean["reason"]).endswith(
        "p10(step_time), the steps that nothing disturbed, would fail"
    )
    assert only(gate.judge(base, base, [gate.parse("p10(step_time) > 2%")]))["verdict"] == "pass"


def test_the_same_runs_give_the_same_verdict() -> None:
    chance = np.random.default_rng(5)
    base, new = ([made.run(chance, TEN_MS, of_runs=0.02) for _ in range(3)] for _ in range(2))
    conditions = [gate.parse("step_time > 3%"), gate.parse("p95(step_time) > 10%")]
    assert (
        gate.judge(base, new, conditions).to_dict() == gate.judge(base, new, conditions).to_dict()
    )


def test_too_few_samples_are_inconclusive() -> None:
    few = made.summary(None, step_time=[1e7, 1.1e7, 1.0e7])
    row = only(gate.judge([few], [few], [gate.parse("step_time > 3%")]))
    assert (row["verdict"], row["reason"]) == ("inconclusive", "3 steps, and 5 are needed")
    wall = made.summary([1e7, 1.1e7, 1.0e7] * 5)
    row = only(gate.judge([wall, wall], [wall], [gate.parse("step_time > 3%")]))
    assert (row["verdict"], row["reason"]) == (
        "inconclusive",
        "3 runs, and 4 of both sides are needed",
    )


def test_what_never_varies_needs_no_statistics() -> None:
    base, new = (
        made.summary(None, step_time=[1e7] * 5, launches=[count] * 5) for count in (100.0, 101.0)
    )
    more = gate.judge([base], [new], [gate.parse("launches > 0")])
    assert more.verdict == "fail"
    assert only(more)["effect_size"] is None
    assert gate.judge([base], [base], [gate.parse("launches > 0")]).verdict == "pass"
    assert gate.judge([base, base], [base], [gate.parse("launches > 0")]).verdict == "pass"


def test_wall_times_come_before_recorded_ones_where_all_runs_have_them() -> None:
    wall = made.summary([1e7, 1.01e7] * 10, step_time=[5e7] * 5)
    plain = made.summary(None, step_time=[5e7] * 5)
    condition = gate.parse("step_time > 3%")
    row = only(gate.judge([wall], [wall], [condition]))
    assert row["source"] == "wall times of undisturbed steps"
    assert row["base"] == pytest.approx(1.005e7)
    row = only(gate.judge([wall], [plain], [condition]))
    assert (row["source"], row["base"], row["new"]) == ("recorded steps", 5e7, 5e7)


def test_absolute_limits_and_falling_values() -> None:
    chance = np.random.default_rng(2)
    base, new = (made.summary(made.steps(chance, 100, mean, 0.01)) for mean in (1.0e7, 1.3e7))
    found = gate.judge(
        [base], [new], [gate.parse(text) for text in ("step_time > 2ms", "step_time > 4ms")]
    )
    assert found.checks["verdict"].to_list() == ["fail", "pass"]
    assert found.checks["change"].to_list() == pytest.approx([3e6, 3e6], rel=0.05)
    found = gate.judge(
        [new], [base], [gate.parse(text) for text in ("step_time < -10%", "step_time < -50%")]
    )
    assert found.checks["verdict"].to_list() == ["fail", "pass"]


def with_kernels(**kernels: list[float]) -> RunSummary:
    made_run = made.summary(None, step_time=[1e7] * 5)
    return RunSummary(
        made_run.name,
        made_run.stated,
        made_run.program,
        None,
        made_run.steps,
        made_run.scalars,
        {"kernel": kernels},
        None,
    )


def test_kernels_are_chosen_by_a_regular_expression() -> None:
    base = with_kernels(gemm_a=[100.0] * 5, gemm_b=[50.0] * 5, copy=[10.0] * 5)
    new = with_kernels(gemm_a=[100.0] * 5, gemm_b=[80.0] * 5, copy=[10.0] * 5)
    found = gate.judge(
        [base], [new], [gate.parse("kernel:gemm > 5%"), gate.parse("kernel:^copy$ > 5%")]
    )
    assert found.checks["verdict"].to_list() == ["fail", "pass"]
    assert found.checks["change"].to_list() == pytest.approx([0.2, 0.0])
    assert found.causes.row(0) == ("kernel", "gemm_b", 50, 80, 30)


def test_a_kernel_of_the_new_side_only_fails_and_one_that_went_passes() -> None:
    base, new = with_kernels(gemm=[100.0] * 5), with_kernels(gemm=[100.0] * 5, sort=[1.0] * 5)
    condition = gate.parse("kernel:sort > 5%")
    row = only(gate.judge([base], [new], [condition]))
    assert (row["verdict"], row["change"], row["reason"]) == (
        "fail",
        None,
        "the base has none of it",
    )
    assert only(gate.judge([new], [base], [condition]))["change"] == -1


def test_what_matches_nothing_is_refused() -> None:
    run = with_kernels(gemm=[100.0] * 5)
    with pytest.raises(UsageError) as error:
        gate.judge([run], [run], [gate.parse("kernel:gmem > 5%")])
    assert error.value.slug == "nothing-measured"
    assert "gemm" in error.value.hint
    with pytest.raises(UsageError, match="neither side"):
        gate.judge([run], [run], [gate.parse("memory_peak > 5%")])


def test_what_one_side_did_not_measure_is_inconclusive() -> None:
    base = made.summary(None, step_time=[1e7] * 5, memory_peak=[1e9] * 5)
    new = made.summary(None, step_time=[1e7] * 5)
    row = only(gate.judge([base], [new], [gate.parse("memory_peak > 2%")]))
    assert (row["verdict"], row["new"]) == ("inconclusive", None)


def test_other_devices_have_no_verdict_and_other_shapes_are_told() -> None:
    base, other = made.summary([1e7, 1.1e7] * 20), made.summary([2e7, 2.1e7] * 20, device="A100")
    found = gate.judge([base], [other], [gate.parse("step_time > 3%")])
    assert (found.verdict, found.comparable) == ("inconclusive", False)
    assert only(found)["reason"] == "not comparable: other device"
    shaped = RunSummary(
        "x",
        base.stated,
        OperatorCalls(["aten::mm"], ["[[8,8]]"], [3.0]),
        [2e7, 2.1e7] * 20,
        base.steps,
        base.scalars,
        {},
        None,
    )
    found = gate.judge([base], [shaped], [gate.parse("step_time > 3%")])
    assert (found.verdict, found.comparable) == ("fail", True)
    differ = found.conditions.filter(~found.conditions["same"])
    assert differ["condition"].to_list() == ["operators with these input shapes"]


@pytest.mark.parametrize("freedom", [1, 2, 4, 9, 25, 1000])
def test_students_quantiles(freedom: int) -> None:
    known = {1: 12.706, 2: 4.303, 4: 2.776, 9: 2.262, 25: 2.060, 1000: 1.962}
    assert gate_statistics.compute_student_t_quantile(freedom) == pytest.approx(
        known[freedom], rel=0.005
    )


def test_blocks_are_longer_where_neighbours_are_alike() -> None:
    chance = np.random.default_rng(1)
    alone = np.array(made.steps(chance, 400, TEN_MS, 0.05))
    alike = np.array(made.steps(chance, 400, TEN_MS, 0.05, 0.9))
    assert gate_statistics.choose_block_length(alone) < 8
    assert 8 < gate_statistics.choose_block_length(alike) <= 100
    assert gate_statistics.choose_block_length(np.ones(50)) == 1


@pytest.mark.parametrize(("limit", "least"), [("3%", -1.0), ("1ms", -1e7)])
def test_no_interval_falls_below_nothing(limit: str, least: float) -> None:
    base, new = (
        [made.summary([mean] * 20) for mean in side] for side in ((0.2e7, 1.8e7), (0.3e7, 1.9e7))
    )
    assert only(gate.judge(base, new, [gate.parse(f"step_time > {limit}")]))["low"] == least
